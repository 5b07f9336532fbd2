"""Architecture of block drafters: fields, defaults from a target, and `config.json`.

Two conventions are translated here only. Layers: `layers` are indices of `output_hidden_states`;
the authors' `target_layer_ids` name the layer whose output is read, one less. Rows: a block has
`block_size` rows, and the first holds the last known token. Either row j drafts the token at its
own place and the first row drafts nothing (fill-in), or row j drafts the next token
(`sample_from_anchor`), which gives one more draft token.
"""

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

from conf.errors import InputError
from conf.settings.blocks import BlockConfig
from heads.layers.llama import LLAMA_KEYS, format_legacy_rope, make_llama_config
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab


@dataclass(frozen=True)
class BlockHeadConfig:
    """Architecture of a block drafter.

    Attributes:
        llama: sizes, RoPE and norms of the layers; `vocab_size` is the target's.
        target: Hub id or folder of the target.
        target_hidden_size: width of one hidden state of the target.
        num_target_layers: decoder layers of the target; 0 while unknown.
        layers: hidden states that are read, as indices of `output_hidden_states`.
        block_size: rows of a block in training.
        mask_token_id: token id of rows whose token is unknown.
        sample_from_anchor: whether row j drafts the next token instead of its own.
        causal: whether rows see no later rows of their block.
        window: tokens of text and block that a row sees; None for all.
        full_layers: layers whose rows see everything, regardless of `causal` and `window`.
        own_output_head, own_embedding: whether the head has its own.
    """

    llama: LlamaConfig
    target: str
    target_hidden_size: int
    num_target_layers: int
    layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool = False
    causal: bool = False
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    own_output_head: bool = False
    own_embedding: bool = False

    @property
    def first_row(self) -> int:
        """First row that drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens of a full block."""
        return self.block_size - self.first_row

    def select_draft_vocab(self, vocab: DraftVocab) -> DraftVocab:
        """Ids that a head drafts: `vocab` with an own output head, otherwise all ids."""
        return vocab if self.own_output_head else DraftVocab.make_full(vocab.size)

    def num_rows(self, depth: int) -> int:
        """Rows of a block that drafts `depth` tokens."""
        return depth + self.first_row


def default_layers(num_layers: int, number: int, key: str = "head.layers") -> tuple[int, ...]:
    """Layers in even steps from the output of layer 1 to that of layer L - 3, as in DFlash.

    Args:
        num_layers: L.
        number: number of layers to read; duplicates are merged.
        key: setting that is unset, for the message.

    Raises:
        InputError: fewer than 4 layers.

    Source: z-lab/dflash `model.py`, `build_target_layer_ids`, which counts layers from 0.
    """
    if num_layers < 4:
        raise InputError(
            f"{key} is unset: no default for a target of {num_layers} layers; set {key} to hidden "
            f"states of 0..{num_layers}"
        )
    if number == 1:
        return (num_layers // 2 + 1,)
    steps = [1 + index * (num_layers - 4) / (number - 1) for index in range(number)]
    return tuple(sorted({round(step) + 1 for step in steps}))


def check_layers(layers: tuple[int, ...], target: EmbeddingsAndOutputHead) -> None:
    """Refuse layers that the target lacks, repeated ones and ones out of order.

    Raises:
        InputError: naming the allowed layers.
    """
    # The output of the last layer passes the final norm, which engines do not apply here.
    known = range(target.num_layers)
    if list(layers) != sorted(set(layers)) or not set(layers) <= set(known):
        raise InputError(
            f"head.layers={list(layers)}: must be rising and of 0..{target.num_layers - 1}, the "
            f"hidden states of target.path={target.name} before its final norm"
        )


def choose_mask_token(target: EmbeddingsAndOutputHead, asked: int | None) -> int:
    """Choose the mask token: the one asked for, or one that no text uses.

    Default: the first embedding row after the tokenizer's ids (the last row without a tokenizer),
        or else a token named as mask, reserved, unused or padding.

    Raises:
        InputError: the id is out of range, begins or ends texts, or no token is free.
    """
    size, tokenizer = len(target.embedding.weight), target.tokenizer
    if asked is not None:
        if not 0 <= asked < size:
            raise InputError(
                f"head.mask_token_id={asked}: must be from 0 to {size - 1}, a row of the "
                f"embedding of target.path={target.name}"
            )
        if asked in target.stop_ids:
            raise InputError(
                f"head.mask_token_id={asked}: ends texts of target.path={target.name}; name a "
                "token that its texts do not use"
            )
        return asked
    # Without a tokenizer the texts are unknown too.
    found = size - 1 if tokenizer is None else _free_token(target, size)
    if found is None:
        raise InputError(
            f"head.mask_token_id is unset: target.path={target.name} has no spare token, as all "
            f"{size} rows of its embedding have a token and none is called mask, reserved, unused "
            f"or pad; set it to a token that its texts do not use{_suggest_mask_token(target)}"
        )
    return found


def _suggest_mask_token(target: EmbeddingsAndOutputHead) -> str:
    """Suggest a special token that chats do not use; empty if all may be used."""
    tokenizer = target.tokenizer
    used = (str(tokenizer.chat_template), *map(str, tokenizer.special_tokens_map.values()))
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        name = str(token.content)
        if token.special and not any(name in text for text in used):
            return f", such as head.mask_token_id={index} ({name})"
    return ""


def _free_token(target: EmbeddingsAndOutputHead, size: int) -> int | None:
    tokenizer = target.tokenizer
    if len(tokenizer) < size:
        return len(tokenizer)
    special = [(str(token.content).lower(), index)
               for index, token in sorted(tokenizer.added_tokens_decoder.items())
               if token.special and index < size and index not in target.stop_ids]  # fmt: skip
    for word in ("mask", "reserved", "unused", "pad"):
        for name, index in special:
            if word in name:
                return index
    return None


def build_block_config(
    settings: BlockConfig, target: EmbeddingsAndOutputHead, sample_from_anchor: bool
) -> BlockHeadConfig:
    """Architecture of a new head with layers of the target's sizes.

    Raises:
        InputError: the target lacks the layers or the mask token.
    """
    layers = tuple(settings.layers or default_layers(target.num_layers, settings.num_features))
    check_layers(layers, target)
    llama = make_llama_config(target.config, target.vocab_size)
    llama.num_hidden_layers = settings.num_layers
    return BlockHeadConfig(
        llama=llama,
        target=target.name,
        target_hidden_size=target.feature_size,
        num_target_layers=target.num_layers,
        layers=layers,
        block_size=settings.block_size,
        mask_token_id=choose_mask_token(target, settings.mask_token_id),
        sample_from_anchor=sample_from_anchor,
        causal=settings.causal,
        window=settings.window,
        own_output_head=settings.own_output_head,
        # In the file, one width says that a target's embedding fits.
        own_embedding=target.feature_size != target.hidden_size,
    )


def build_qwen3_keys(config: BlockHeadConfig, num_draft_ids: int) -> dict[str, Any]:
    """Keys of `config.json` in every layout, as in Qwen3."""
    llama = config.llama
    rope: Any = llama.rope_parameters
    sliding = config.window is not None
    kinds = ["sliding_attention" if sliding else "full_attention"] * llama.num_hidden_layers
    for number in config.full_layers:
        kinds[number] = "full_attention"
    return {
        "model_type": "qwen3",
        **{name: getattr(llama, name) for name in LLAMA_KEYS},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": format_legacy_rope(rope),
        "num_hidden_layers": llama.num_hidden_layers,
        "layer_types": kinds,
        "sliding_window": config.window,
        "use_sliding_window": sliding,
        "tie_word_embeddings": False,
        "draft_vocab_size": num_draft_ids,
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "base_model_name_or_path": config.target,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def build_causal_key(config: BlockHeadConfig, name: str) -> dict[str, bool]:
    """Key that engines apply in all layers; without it, layers with a window are causal."""
    return {} if config.causal and config.full_layers else {name: config.causal}


def build_dflash_keys(config: BlockHeadConfig) -> dict[str, Any]:
    """Keys of `dflash_config`, with layers as the authors count them."""
    window = {"use_swa": True, "swa_window_size": config.window} if config.window else {}
    return {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [index - 1 for index in config.layers],
        **build_causal_key(config, "causal"),
        **window,
    }
