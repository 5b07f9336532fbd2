"""What an engine builds from the `config.json` of a block drafter.

Sources, read November 2026: vLLM 0.32 `models/qwen3_dflash.py`, `models/qwen3_dspark.py`,
`configs/speculators/`; SGLang 0.5 `models/dflash.py`; z-lab/dflash `model.py`. Letters: R rows of a
block, D slots, H hidden, Ht hidden of the target, V vocabulary, W drafted ids, Q heads, K key-value
heads, d head size.
"""

from dataclasses import dataclass

from conf.errors import InputError
from eval.parity.config import Settings
from eval.parity.files import Export, Golden
from eval.parity.rope import Rope, RopeKeys, read_rope

TITLES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "speculators": "speculators",
    "original": "the authors' code",
}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class BlockShape:
    """What an engine builds from `config.json`.

    Attributes:
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: H, -, Q, K, d.
        num_layers: of the head.
        target_hidden_size: Ht.
        vocab_size, draft_vocab_size: V and W.
        eps: of every norm.
        layers: indices of `output_hidden_states` of the features that are read.
        block_size: R.
        anchored: row j drafts the token behind it, not the one at its place.
        causal: a row sees no later row of its block.
        window: tokens that a row sees; None for all.
        full: layers whose rows see all, whatever `causal` and `window` say.
        rope: of queries and keys.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    eps: float
    layers: tuple[int, ...]
    block_size: int
    anchored: bool
    causal: bool
    window: int | None
    full: tuple[int, ...]
    rope: Rope

    @property
    def slots(self) -> slice:
        """Rows that draft."""
        return slice(0 if self.anchored else 1, None)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that every kind has."""
        hidden, mlp, size = self.hidden_size, self.intermediate_size, self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.layers) * self.target_hidden_size),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for number in range(self.num_layers):
            layer = {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (self.num_heads * size, hidden),
                "self_attn.k_proj": (self.num_kv_heads * size, hidden),
                "self_attn.v_proj": (self.num_kv_heads * size, hidden),
                "self_attn.o_proj": (hidden, self.num_heads * size),
                "self_attn.q_norm": (size,),
                "self_attn.k_norm": (size,),
                "mlp.gate_proj": (mlp, hidden),
                "mlp.up_proj": (mlp, hidden),
                "mlp.down_proj": (hidden, mlp),
            }
            found |= {f"layers.{number}.{n}.weight": shape for n, shape in layer.items()}
        return found


class BlockReader:
    """Taps every key that decides what the engine computes.

    Args:
        export: the engine's files.
        golden: sizes of the target.
        architectures: of the kind, by engine's format; `speculators` among them if it has a class.
    """

    def __init__(self, export: Export, golden: Golden, architectures: dict[str, str]) -> None:
        self.export, self.golden, self.architectures = export, golden, architectures
        self.nested = export.format == "speculators"
        file, title = export.folder / "config.json", TITLES[export.format]
        self.root = Settings(export.config, file, title)
        self.layer = self.root.part("transformer_layer_config") if self.nested else self.root

    def shape(self, block: Settings, anchored: bool, causal: bool) -> BlockShape:
        """What is built.

        Args:
            block: where the mask token and, but in speculators, the layers stand.
            anchored: `sample_from_anchor`.
            causal: as the engine decides.

        Raises:
            InputError: the engine would refuse the config, guess a value, or read another than the
                head was trained with.
        """
        layer, golden, root = self.layer, self.golden, self.root
        self._check_constants()
        mask = int(golden.need("mask_token_id", (1,)))
        block.equal("mask_token_id", mask, "as it was trained", "has no mask")
        hidden = layer.need("hidden_size", int, "takes 4096")
        head_dim = layer.need("head_dim", int, "takes 128")
        width = root.need("target_hidden_size", int, "takes the head's own")
        return BlockShape(
            hidden_size=hidden,
            intermediate_size=layer.need("intermediate_size", int, "takes 22016"),
            num_heads=layer.need("num_attention_heads", int, "takes 32"),
            num_kv_heads=layer.need("num_key_value_heads", int, "takes num_attention_heads"),
            head_dim=head_dim,
            num_layers=layer.need("num_hidden_layers", int, "builds 32 layers"),
            target_hidden_size=width,
            vocab_size=golden.vocab_size,
            draft_vocab_size=root.need("draft_vocab_size", int, "takes all ids"),
            eps=float(layer.need("rms_norm_eps", float, "takes 1e-6")),
            layers=self._layers(block),
            block_size=root.need("block_size", int, "takes 8 or 16"),
            anchored=anchored,
            causal=causal,
            window=self._window(),
            full=self._full(),
            rope=read_rope(layer, head_dim, RopeKeys.both),
        )

    def _check_constants(self) -> None:
        layer, golden, root = self.layer, self.golden, self.root
        named = self.architectures[self.export.format]
        root.equal("architectures", [named], "its class", "finds no class")
        layer.equal("model_type", "qwen3", "its class", "finds no class")
        layer.equal("vocab_size", golden.vocab_size, "the target's", "takes 151936")
        layer.only("hidden_act", "silu")
        layer.only("attention_bias", False)
        layer.only("tie_word_embeddings", False)
        longest = golden.max_position_embeddings
        if layer.need("max_position_embeddings", int, "stops at 32768 positions") < longest:
            raise layer.wrong("max_position_embeddings", f"the target's {longest} or more")
        if self.nested:
            kind, refused = self.export.kind, "refuses the folder"
            root.equal("speculators_model_type", kind, "the kind of the head", refused)
            plan = root.part("speculators_config")
            plan.equal("algorithm", kind, "the kind of the head", refused)
            plan.part("verifier").need("name_or_path", str, refused)

    def _layers(self, block: Settings) -> tuple[int, ...]:
        """Indices of `output_hidden_states`, translated from the engine's own."""
        if self.nested:
            key, place, offset = "aux_hidden_state_layer_ids", self.root, 0
        else:
            key, place, offset = "target_layer_ids", block, 1
        ids = [each + offset for each in place.need(key, list, "guesses layers")]
        known, trained = range(self.golden.num_layers), self.export.layers
        if ids != sorted(set(ids)) or not set(ids) <= set(known):
            raise place.wrong(key, f"each of {list(known)} (less {offset}) once, in rising order")
        if trained is not None and trained != ids:
            raise InputError(
                f"{place.file}: {place.engine} would read hidden states {ids}, but the head was "
                f"trained on {trained} (headsmith.json: export.layers); engines count otherwise"
            )
        return tuple(ids)

    def _window(self) -> int | None:
        layer, number = self.layer, self.layer.get("num_hidden_layers")
        kinds = layer.need("layer_types", list, "guesses by other keys")
        if len(kinds) != number or not set(kinds) <= {FULL, SLIDING}:
            raise layer.wrong("layer_types", f"{number} of {FULL} and {SLIDING}")
        if SLIDING not in kinds:
            layer.only("use_sliding_window", False)
            return None
        layer.equal("use_sliding_window", True, "as layer_types says", "sees all of the text")
        return layer.need("sliding_window", int, "takes 4096")

    def _full(self) -> tuple[int, ...]:
        """Layers without a window beside others that have one."""
        if self._window() is None:
            return ()
        kinds = self.layer.need("layer_types", list, "guesses by other keys")
        return tuple(number for number, kind in enumerate(kinds) if kind == FULL)

    def causal(self, place: Settings, key: str) -> bool:
        """Whether rows see no later one, where there is a window in some layers alone.

        Raises:
            InputError: it is not said, or of layers that see all of the text.
        """
        if not self._full():
            return place.need(key, bool, "takes it from layer_types")
        place.only(key, False)
        # Not said, engines take it from layer_types.
        return not place.has(key)

    def non_causal(self) -> bool:
        """`causal` of speculators' layout, where only layers with a window can be."""
        key = "sliding_window_non_causal"
        free = self.root.need(key, bool, "guesses, and vLLM not as speculators does")
        if not free and (self._window() is None or self._full()):
            raise self.root.wrong(key, "true, as some of its layers see all of the text")
        return not free
