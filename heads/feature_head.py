"""Shared part of EAGLE, P-EAGLE and block heads, which read the target's hidden states.

Variants of a head's config follow the head. Writers of heads count layers, order hidden states and
rotate positions differently, and the files say so only in part. A variant is a head with the same
weights (copied only if reordered) and one such setting changed.

Letters: F width of a hidden state, H hidden, V target vocabulary, W draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from conf.errors import InputError
from heads.decoding.drafting import PAD, Drafter, FeatureDrafter
from heads.decoding.sampling import Sampling, drafter_seeds
from heads.decoding.tree import DraftShape, DynamicShape
from heads.draft_head import UNKNOWN, DraftHead
from heads.target_model.architecture import find_rope
from heads.target_model.embeddings_and_output_head import (
    EmbeddingsAndOutputHead,
    Projection,
    select_embedding_rows,
)
from heads.target_model.model import FeatureLayers, Target, TargetOutput
from heads.vocab import DraftVocab

FUSED = ("fc.weight", "input_norm.weight", "mask_hidden")
"""Tensors whose last dimension concatenates the hidden states."""
USUAL_THETAS = (1e4, 1e6)
"""Values of theta that readers assume if files name none."""
ALL_ORDERS = 3
"""Largest number of hidden states of which every order is tried."""
ConfigVariants = Iterator[tuple[str, Any]]
Head = TypeVar("Head", bound="FeatureHead")


@dataclass(frozen=True, kw_only=True)
class FeatureArchitecture:
    """Architecture of a head over hidden states.

    Attributes:
        llama: sizes, RoPE and norms of the layers; `vocab_size` is the target's.
        target: Hub id or folder of the target.
        target_hidden_size: width of one hidden state of the target.
        layers: hidden states that the head reads, as indices of `output_hidden_states`; empty for
            EAGLE's default of the attached target.
        own_output_head: whether the head has an output head of its own.
        own_embedding: whether the head has an embedding of its own.
    """

    llama: LlamaConfig
    target: str
    target_hidden_size: int
    layers: tuple[int, ...] = ()
    own_output_head: bool = False
    own_embedding: bool = False


class FeatureHead(DraftHead):
    """Head over hidden states, with an embedding and an output head of its own or the target's.

    Attributes:
        drafter: class of the head's drafters, of chains and dynamic trees.
        drawn_modules: classes of modules whose weights a seed draws.
        fc: fusion layer; its weight has the head's dtype.
        lm_head: [W, H]; None drafts with the target's output head.
        embed_tokens: [V, H] frozen; None uses the target's embedding.
    """

    drafter: ClassVar[type[FeatureDrafter]]
    output_head_patterns: ClassVar[tuple[str, ...]] = (r"lm_head\.weight",)
    compiled_modules: ClassVar[tuple[type[nn.Module], ...]] = (LlamaMLP,)
    drawn_modules: ClassVar[Any] = (nn.Linear,)
    max_positions: int
    fc: nn.Linear
    lm_head: nn.Linear | None
    embed_tokens: nn.Embedding | None

    def _make_embeddings_and_head(self, own_output_head: bool) -> None:
        config, llama = self.config, self.config.llama
        sizes = llama.hidden_size, len(self.vocab.ids)
        self.lm_head = nn.Linear(*sizes, bias=False) if own_output_head else None
        self.embed_tokens = None
        if config.own_embedding:
            embedding = nn.Embedding(llama.vocab_size, llama.hidden_size)
            self.embed_tokens = embedding.requires_grad_(False)
        self.taps, self.max_positions = FeatureLayers(config.layers), llama.max_position_embeddings

    def attach(self, target: EmbeddingsAndOutputHead, dtype: torch.dtype | None = None) -> Self:
        """Attach the head to a target; see `DraftHead.attach`.

        The head uses the target's embedding and output head where it has none of its own.
        """
        config = self.complete_config(target)
        name = target.name if config.target == UNKNOWN else config.target
        self.config = replace(config, target=name)
        self.taps = FeatureLayers(config.layers)
        if self.taps.layers and isinstance(target, Target):
            assert target.decoder_layers  # checked before any work
        self._target = (target,)
        self.vocab = self.vocab.to(target.device)
        return self.to(target.device, dtype)

    def draw_weights(self, seed: int) -> None:
        """Draw the weights of all modules of `drawn_modules` by a seed; biases become zero."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, self.drawn_modules):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def draw_and_attach(self, target: EmbeddingsAndOutputHead, seed: int) -> None:
        """Draw weights by a seed, attach the head, and copy the target's embedding if needed."""
        self.draw_weights(seed)
        self.attach(target)
        if self.embed_tokens is not None:
            self.embed_tokens.weight.data.copy_(target.embedding.weight)

    @abstractmethod
    def complete_config(self, target: EmbeddingsAndOutputHead) -> Any:
        """Complete the config with facts of a target that fits.

        Raises:
            InputError: the head does not fit.
        """

    def make_drafter(self, shape: DraftShape, sampling: Sampling, seeds: Sequence[int]) -> Drafter:
        """Make a drafter: chains sample like the target, and dynamic trees are ranked."""
        limits = shape if isinstance(shape, DynamicShape) else shape.depth
        return self.drafter(self, limits, sampling, drafter_seeds(seeds))

    @torch.no_grad()
    def compute_candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """Compute best tokens [depth, n, width] per depth. See `DraftHead.compute_candidates`."""
        ids = torch.tensor(token_ids, device=output.hidden_states.device)
        best = self.rank_drafts(self.collect_features(output)[0], ids, first, depth, width)
        rows = torch.arange(first, len(ids) - 1, device=ids.device) + self.draft_offset
        reached = rows + torch.arange(depth, device=ids.device).unsqueeze(1)
        return best.masked_fill((reached >= self.max_positions).unsqueeze(2), PAD)

    @abstractmethod
    def rank_drafts(
        self, features: Tensor, ids: Tensor, first: int, depth: int, width: int
    ) -> Tensor:
        """Rank the tokens of each depth along a text: the best [depth, n, width] int64.

        Arguments as in `compute_candidates`, with hidden states [S, F] as `features` and all tokens
        [S + 1] int64 as `ids`.
        """

    @property
    def draft_offset(self) -> int:
        """Return the positions from a known token to the row that drafts first after it."""
        return 0

    @property
    def num_layers(self) -> int:
        """Return the number of layers that keep keys and values of a text."""
        return self.config.llama.num_hidden_layers

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the parameters."""
        return self.fc.weight.dtype

    def list_copied_parts(self, start: str | None = "copy") -> list[str]:
        """List the copies of the target's weights, with an output head that started by a way."""
        words = {"frozen": "rows of its output head"}
        words["copy"] = "an output head that started as rows of its own"
        copied = [words[start]] if self.lm_head is not None and start in words else []
        return copied + ([] if self.embed_tokens is None else ["its token embedding"])

    def collect_features(self, output: TargetOutput) -> Tensor:
        """Concatenate the hidden states [..., F] of a target pass, in the head's dtype."""
        layers = [output.layers[index] for index in self.config.layers]
        return torch.cat(layers, dim=-1).to(self.fc.weight)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens [...] as [..., H], by the head's own embedding or the target's."""
        if self.embed_tokens is not None:
            return self.embed_tokens(token_ids)
        return functional.embedding(token_ids, self.target.embedding.weight).to(self.dtype)

    def make_projection(self) -> Projection:
        """Make the projection from normalised outputs to logits: the head's own or the target's."""
        if self.lm_head is not None:
            return Projection(self.lm_head.weight)
        return self.target.projection

    def compute_logits(self, outputs: Tensor) -> Tensor:
        """Compute draft logits [..., W] of normalised outputs [..., H]."""
        if self.lm_head is not None:
            return self.lm_head(outputs)
        weight = self.target.output_head.weight
        return self.target.compute_logits(outputs.to(weight.dtype)).to(outputs.dtype)


def copy_to_cpu(head: Head, target: Target, token_ids: Tensor) -> tuple[Head, dict[str, Tensor]]:
    """Copy a head to the CPU in float32, with an embedding of only some tokens and the mask token.

    Args:
        head: attached head.
        target: the head's target.
        token_ids: [n] int64 tokens, which the copy knows as 0, 1, ..., n - 1, and the mask as n.

    Returns:
        The copy, and what readers of reference logits need of the target: `token_embeddings`
        [n - 1, D] after the first token and, of a head with a mask token, `mask_token_id` [1] and
        `mask_embedding` [1, D].
    """
    size = len(token_ids)
    mask = token_ids.new_tensor(
        [head.config.mask_token_id] if hasattr(head.config, "mask_token_id") else []
    )
    token_ids = torch.cat([token_ids, mask])
    embeddings = select_embedding_rows(target.embedding.weight, token_ids, head.dtype)
    own_embeddings = embeddings
    if head.embed_tokens is not None:
        own_embeddings = select_embedding_rows(head.embed_tokens.weight, token_ids, head.dtype)
    copy = type(head)(head.config, head.vocab.to("cpu"))
    copy.embed_tokens = None
    tensors = {n: t for n, t in head.state_dict().items() if not n.startswith("embed_tokens.")}
    copy.load_state_dict(tensors)
    copy.embed_tokens = nn.Embedding.from_pretrained(own_embeddings.float())
    beside = {"token_embeddings": embeddings[1:size]}
    if len(mask):
        copy.config = replace(copy.config, mask_token_id=size)
        beside |= {"mask_token_id": mask, "mask_embedding": embeddings[size:]}
    return copy.eval(), beside


def make_config_variant(
    head: Any,
    vocab: DraftVocab | None = None,
    tensors: dict[str, Tensor] | None = None,
    **settings: Any,
) -> Any:
    """Make a head with the same weights under other settings, attached to the same target.

    Args:
        head: attached head.
        vocab: another draft vocabulary of the same size.
        tensors: replacements of tensors in `state_dict`.
        settings: fields of the config.
    """
    other = type(head)(replace(head.config, **settings), vocab or head.vocab)
    other.load_state_dict(head.state_dict() | (tensors or {}), assign=True)
    return other.attach(head.target).eval()


def iter_layer_variants(
    head: Any, default_layers: Callable[[int], Sequence[int]]
) -> ConfigVariants:
    """Yield variants that read other hidden states.

    These are all layers or the last one moved by one, and the layers that a new head reads.

    Args:
        head: attached head.
        default_layers: function that gives a new head's hidden states by the number of layers;
            raises an `InputError` for too few.
    """
    try:
        fresh = tuple(default_layers(head.target.num_layers))
    except InputError:
        fresh = ()
    stated, known = head.config.layers, range(head.target.num_layers)
    near = [tuple(index + step for index in stated) for step in (-1, 1)]
    ends = [(*stated[:-1], stated[-1] + step) for step in (-1, 1)]
    for each in dict.fromkeys((*near, *ends, fresh)):
        fits = len(set(each)) == len(stated) and set(each) <= set(known)
        if fits and each != stated:
            words = f"hidden states {list(each)}, not {list(stated)}"
            yield words, make_config_variant(head, layers=each)


def iter_order_variants(head: Any) -> ConfigVariants:
    """Yield variants with another order of the hidden states.

    Of more than `ALL_ORDERS` states, only rising and falling orders and those with an end moved are
    tried.
    """
    stated = head.config.layers
    rising = tuple(sorted(stated))
    usual_orders = (rising, rising[::-1], (*rising[1:], rising[0]), (rising[-1], *rising[:-1]))
    orders = permutations(rising) if len(rising) <= ALL_ORDERS else usual_orders
    for order in dict.fromkeys(orders):
        if order != stated:
            # The fused part j is hidden state `order[j]`; the variant's layers are in rising order.
            places, state = sorted(range(len(order)), key=order.__getitem__), head.state_dict()
            tensors = {name: reorder_parts(state[name], places) for name in FUSED if name in state}
            norms = [(f"fc_norm.{old}.weight", place) for place, old in enumerate(places)]
            tensors |= {f"fc_norm.{n}.weight": state[old] for old, n in norms if old in state}
            variant = make_config_variant(head, tensors=tensors, layers=tuple(sorted(order)))
            yield f"features in the order {list(order)}", variant


def reorder_parts(tensor: Tensor, places: Sequence[int]) -> Tensor:
    """Reorder the n parts of the last dimension of a tensor [..., n * size]."""
    chunks = tensor.chunk(len(places), dim=-1)
    return torch.cat([chunks[place] for place in places], dim=-1)


def flip_setting(head: Any, name: str) -> tuple[str, Any]:
    """Make the variant with the opposite of a boolean setting, and describe it."""
    other: dict[str, Any] = {name: not getattr(head.config, name)}
    return f"{name}={str(other[name]).lower()}", make_config_variant(head, **other)


def iter_rope_variants(head: Any) -> ConfigVariants:
    """Yield variants with the target's RoPE, without scaling, and with usual values of theta."""
    stated: dict[str, Any] = head.config.llama.rope_parameters
    target_rope = find_rope(head.target.config)
    kind, theta = target_rope["rope_type"], target_rope["rope_theta"]
    candidates = {
        f"the target's RoPE ({kind}, theta {theta:g})": target_rope,
        "RoPE without scaling": {"rope_type": "default", "rope_theta": stated["rope_theta"]},
        **{f"RoPE with theta {theta:g}": {**stated, "rope_theta": theta} for theta in USUAL_THETAS},
    }
    tried = [stated]
    for words, rope in candidates.items():
        if rope not in tried:
            tried.append(rope)
            llama = deepcopy(head.config.llama)
            llama.rope_parameters = rope
            yield words, make_config_variant(head, llama=llama)


def iter_vocab_variants(head: Any) -> ConfigVariants:
    """Yield the variant that reads the map of draft ids as target ids, if offsets allow it."""
    vocab = head.vocab
    ids = vocab.compute_offsets()
    if not vocab.is_full and bool((ids.diff() > 0).all()):
        yield (
            "d2t holds target ids, not offsets",
            make_config_variant(head, DraftVocab(ids, vocab.size)),
        )


def iter_mask_token_variants(head: Any) -> ConfigVariants:
    """Yield variants with other mask tokens.

    These are the default of a new head, the tokenizer's special tokens, and the first and last ids.
    """
    target: EmbeddingsAndOutputHead = head.target
    tokenizer, size = target.tokenizer, len(target.embedding.weight)
    names = ("mask_token_id", "pad_token_id", "unk_token_id", "eos_token_id", "bos_token_id")
    special_ids = [getattr(tokenizer, name, None) for name in names]
    try:
        free = choose_mask_token(target, None)
    except InputError:
        free = None
    for token in dict.fromkeys((free, *special_ids, 0, size - 1)):
        if token not in (None, head.config.mask_token_id):
            yield f"mask token {token}", make_config_variant(head, mask_token_id=token)


def choose_mask_token(target: EmbeddingsAndOutputHead, asked: int | None) -> int:
    """Choose the mask token of a head: the id asked for, or an id that no text uses.

    By default this is the first embedding row after the tokenizer's ids (the last row without a
    tokenizer), or else a token named as mask, reserved, unused or padding.

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
    token = size - 1 if tokenizer is None else _find_free_token(target, size)
    if token is None:
        raise InputError(
            f"head.mask_token_id is unset: target.path={target.name} has no spare token, as all "
            f"{size} rows of its embedding have a token and none is called mask, reserved, unused "
            f"or pad; set it to a token that its texts do not use{_suggest_mask_token(target)}"
        )
    return token


def _find_free_token(target: EmbeddingsAndOutputHead, size: int) -> int | None:
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


def _suggest_mask_token(target: EmbeddingsAndOutputHead) -> str:
    """Suggest a special token that chats do not use; empty if all may be used."""
    tokenizer = target.tokenizer
    used = (str(tokenizer.chat_template), *map(str, tokenizer.special_tokens_map.values()))
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        name = str(token.content)
        if token.special and not any(name in text for text in used):
            return f", such as head.mask_token_id={index} ({name})"
    return ""
