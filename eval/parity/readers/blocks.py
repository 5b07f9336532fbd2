"""Reader of exported block drafters, DFlash, DFlash-2 and DSpark, that computes their logits.

Names, keys and defaults are those of the serving engines.

Sources, read November 2026: vLLM 0.33 `models/qwen3_dflash.py`, `models/qwen3_dspark.py`,
`configs/speculators/`; SGLang 0.5.23 `models/dflash.py`; z-lab/dflash `model.py`.

Letters: S rows of a text, s of them before a block, R rows of a block, D slots, H hidden, G groups
of channels, V vocabulary, W drafted ids, r compared ids or, for a selector or a Markov head, rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.parity.decoder import (
    SIZE_KEYS,
    ConfigReader,
    HeadShape,
    Presence,
    ServedLayers,
    Shapes,
    check_trained_layers,
)
from eval.parity.export_files import Export, ReferenceLogits

TITLES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "speculators": "speculators",
    "original": "the authors' code",
    "llamacpp": "llama.cpp",
}
FORMATS = dict.fromkeys(
    ("dflash", "dflash2", "dspark"), ("vllm", "sglang", "speculators", "original")
)
ARCHITECTURES = {
    "dflash": dict.fromkeys(FORMATS["dflash"], "DFlashDraftModel"),
    "dflash2": dict.fromkeys(FORMATS["dflash2"], "DFlash2DraftModel"),
    "dspark": dict.fromkeys(FORMATS["dspark"], "Qwen3DSparkModel")
    | {"speculators": "DSparkDraftModel"},
}
"""Class names by kind of head and format."""
GUESSES = "guesses, and vLLM not as speculators does"
FULL, SLIDING = "full_attention", "sliding_attention"
DFLASH2_NUMBERS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DFLASH2_FACTORS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
SELECTOR = "candidate_selector."
MARKOV_FIRST, MARKOV_SECOND = "markov_head.markov_w1", "markov_head.markov_w2"
MARKOV_GATE, MARKOV_JOINT = "markov_head.gate_proj", "markov_head.joint_proj"
CONFIDENCE = "confidence_head.proj"


def build_head(export: Export, golden: ReferenceLogits) -> "ServedBlocks":
    """Build the head of an export. See `eval.parity.parity_check.Reader`."""
    reader = BlockConfigReader(export, golden)
    sizes, block = reader.parse_block_sizes(), reader.block
    if export.kind == "dflash":
        return ServedBlocks(export, golden, BlockShape(**sizes))
    if export.kind == "dspark":
        markov = block.require_key("markov_head_type", str, "takes vanilla")
        served = ("vanilla",) if export.format == "vllm" else ("vanilla", "gated", "rnn")
        block.check_allowed("markov_head_type", *served)
        rank = block.require_key("markov_rank", int, "takes 256 or none")
        with_markov = block.require_key("confidence_head_with_markov", bool, "takes false, or true")
        has_confidence = block.require_key("enable_confidence_head", bool, "takes false, or true")
        confidence_size = sizes["hidden_size"] + rank * with_markov if has_confidence else 0
        shape = DSparkShape(**sizes, markov=markov, rank=rank, confidence_size=confidence_size)
        return ServedDSpark(export, golden, shape)
    # Rows of a block see each other.
    block.check_allowed("causal", False)
    block.check_allowed("sliding_window_non_causal", True)
    for name in DFLASH2_NUMBERS:
        sizes[name] = block.require_key(name, int, "refuses the head")
    for name in DFLASH2_FACTORS:
        if name in block.values:
            sizes[name] = block.require_key(name, float, "scales nothing")
    return ServedDFlash2(export, golden, DFlash2Shape(**sizes))


@dataclass(frozen=True, kw_only=True)
class BlockShape(HeadShape):
    """Block drafter as a serving engine builds it.

    Attributes:
        num_layers: layers of the head.
        block_size: number R of rows.
        drafts_next_token: whether row j drafts the next token instead of its own.
        causal: whether rows see no later rows of their block.
        window: tokens that a row sees; None for all.
        full: layers whose rows see everything, regardless of `causal` and `window`.
    """

    num_layers: int
    block_size: int
    drafts_next_token: bool
    causal: bool
    window: int | None
    full: tuple[int, ...]

    @property
    def slots(self) -> slice:
        """Select the rows that draft."""
        return slice(0 if self.drafts_next_token else 1, None)

    def list_tensor_shapes(self) -> Shapes:
        """Compute the shapes of the tensors that every block drafter has."""
        hidden = self.hidden_size
        shapes: Shapes = {
            "fc.weight": (hidden, len(self.layers) * self.target_hidden_size),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for number in range(self.num_layers):
            norms = ("input_layernorm", "post_attention_layernorm")
            shapes |= self.list_layer_shapes(f"layers.{number}.", norms)
        return shapes


@dataclass(frozen=True, kw_only=True)
class DFlash2Shape(BlockShape):
    """DFlash-2 head as a serving engine builds it.

    Attributes:
        conv_kernel_size: taps of each convolution.
        conv_group_size: channels that share a change of the kernel.
        selector_rank: rank r of the selector.
        selector_top_k: candidates of the selector.
        input_embedding_scale, output_multiplier: factors of embeddings and logits.
        final_logit_softcapping: soft cap of the logits; 0 without one.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0

    def list_tensor_shapes(self) -> Shapes:
        """Compute the shapes of the tensors of a DFlash-2 head."""
        hidden, taps, rank = self.hidden_size, self.conv_kernel_size, self.selector_rank
        shapes = super().list_tensor_shapes() | {
            f"{SELECTOR}predecessor_codebook": (self.vocab_size, rank),
            f"{SELECTOR}successor_codebook": (self.vocab_size, rank),
            f"{SELECTOR}hidden_projection.weight": (rank, hidden),
        }
        num_outputs = 2 * taps * (hidden // self.conv_group_size)
        for number in range(self.num_layers):
            for name in ("attention_conv", "mlp_conv"):
                conv = f"layers.{number}.{name}."
                shapes[f"{conv}base_kernel"] = (2, taps, hidden)
                shapes[f"{conv}kernel_projection.weight"] = (num_outputs, hidden)
        return shapes


@dataclass(frozen=True, kw_only=True)
class DSparkShape(BlockShape):
    """DSpark head as a serving engine builds it.

    Attributes:
        markov: type of the Markov head.
        rank: rank r of the Markov head.
        confidence_size: input width of the confidence head; 0 without one.
    """

    markov: str
    rank: int
    confidence_size: int

    def list_tensor_shapes(self) -> Shapes:
        """Compute the shapes of the tensors of a DSpark head."""
        hidden, rank, width = self.hidden_size, self.rank, self.confidence_size
        shapes = super().list_tensor_shapes() | {
            f"{MARKOV_FIRST}.weight": (self.vocab_size, rank),
            f"{MARKOV_SECOND}.weight": (self.draft_vocab_size, rank),
        }
        if self.markov == "gated":
            shapes |= {f"{MARKOV_GATE}.weight": (rank, hidden + rank)}
            shapes |= {f"{MARKOV_GATE}.bias": (rank,)}
        if self.markov == "rnn":
            shapes |= {f"{MARKOV_JOINT}.weight": (3 * rank, 2 * rank + hidden)}
            shapes |= {f"{MARKOV_JOINT}.bias": (3 * rank,)}
        if width:
            shapes |= {f"{CONFIDENCE}.weight": (1, width), f"{CONFIDENCE}.bias": (1,)}
        return shapes


class BlockConfigReader(ConfigReader):
    """Reader of the config of a block drafter.

    Attributes:
        is_dspark: whether the head is a DSpark head, whose rows may draft the next token.
        block: keys of DFlash heads, or of the root that has them in their place.
    """

    size_keys = SIZE_KEYS | {
        "intermediate_size": ("intermediate_size", int, "takes 22016"),
        "head_dim": ("head_dim", int, "takes 128"),
        "num_layers": ("num_hidden_layers", int, "builds 32 layers"),
    }
    vocab_default, positions_default = "takes 151936", "stops at 32768 positions"

    def __init__(self, export: Export, golden: ReferenceLogits) -> None:
        super().__init__(export, golden, TITLES[export.format])
        self.is_dspark, self.block = export.kind == "dspark", self.root
        if not self.is_dspark and not self.is_speculators:
            self.block = self.root.get_section("dflash_config")

    def parse_block_sizes(self) -> dict[str, Any]:
        """Read the fields of `BlockShape` as the serving engine builds it.

        Raises:
            InputError: the serving engine would refuse the config, guess a value, or read another
                value than in training.
        """
        root, layer, anchor = self.root, self.layer, "sample_from_anchor"
        named = ARCHITECTURES[self.export.kind][self.export.format]
        root.check_equal("architectures", [named], "its class", "finds no class")
        layer.check_equal("model_type", "qwen3", "its class", "finds no class")
        layer.check_allowed("attention_bias", False)
        if self.is_speculators:
            self.check_speculators()
        mask = int(self.golden.require_tensor("mask_token_id", (1,)))
        self.block.check_equal("mask_token_id", mask, "as it was trained", "has no mask")
        window, full = self._parse_windows()
        causal = self._parse_causal(window, full)
        anchored = self.is_dspark and root.require_key(anchor, bool, GUESSES)
        if not self.is_dspark and self.is_speculators:
            root.check_equal(anchor, False, "as rows draft the token at their place", "guesses")
        elif not self.is_dspark:
            root.check_allowed("is_causal", causal)
            root.check_allowed(anchor, False)
        return self.parse_sizes("both") | {
            "target_hidden_size": root.require_key(
                "target_hidden_size", int, "takes the head's own"
            ),
            "draft_vocab_size": root.require_key("draft_vocab_size", int, "takes all ids"),
            "layers": self._parse_layers(),
            "block_size": root.require_key("block_size", int, "takes 8 or 16"),
            "drafts_next_token": anchored,
            "causal": causal,
            "window": window,
            "full": full,
            "qk_norm": True,
        }

    def _parse_layers(self) -> tuple[int, ...]:
        """Read the hidden states as indices of `output_hidden_states`, from the engine's own."""
        key, offset = "target_layer_ids", 1
        if self.is_speculators:
            key, offset = "aux_hidden_state_layer_ids", 0
        ids = [index + offset for index in self.block.require_key(key, list, "guesses layers")]
        known = range(self.golden.num_layers)
        if ids != sorted(set(ids)) or not set(ids) <= set(known):
            raise self.block.make_error(
                key, f"each of {list(known)} (less {offset}) once, in rising order"
            )
        return check_trained_layers(self.block, self.export, ids)

    def _parse_windows(self) -> tuple[int | None, tuple[int, ...]]:
        """Read the window, or None, and the layers without a window if others have one.

        Raises:
            InputError: `layer_types` is missing, of other layers, or other keys disagree.
        """
        layer, number = self.layer, self.layer.values.get("num_hidden_layers")
        kinds = layer.require_key("layer_types", list, "guesses by other keys")
        if len(kinds) != number or not set(kinds) <= {FULL, SLIDING}:
            raise layer.make_error("layer_types", f"{number} of {FULL} and {SLIDING}")
        if SLIDING not in kinds:
            layer.check_allowed("use_sliding_window", False)
            return None, ()
        layer.check_equal("use_sliding_window", True, "as layer_types says", "sees all of the text")
        window = layer.require_key("sliding_window", int, "takes 4096")
        return window, tuple(number for number, kind in enumerate(kinds) if kind == FULL)

    def _parse_causal(self, window: int | None, full: tuple[int, ...]) -> bool:
        """Tell whether rows of layers with a window see no later rows of their block.

        In speculators' format `sliding_window_non_causal` tells, and no other layer can be causal.

        Raises:
            InputError: the key is missing, or concerns layers that see all of the text.
        """
        key, place = "causal", self.block
        if self.is_dspark or self.export.format == "sglang":
            key, place = "is_causal", self.root
        if self.is_speculators:
            key = "sliding_window_non_causal"
            is_non_causal = self.root.require_key(key, bool, GUESSES)
            if not is_non_causal and (window is None or full):
                raise self.root.make_error(key, "true, as some of its layers see all of the text")
            if is_non_causal and window is not None and self.is_dspark:
                raise self.root.make_error(key, "false: it drops the key, and a window is causal")
            return not is_non_causal
        if not full:
            return place.require_key(key, bool, "takes it from layer_types")
        place.check_allowed(key, False)
        # Without the key, engines read layer_types.
        return key not in place.values


class ServedBlocks(ServedLayers):
    """Exported block drafter. Subclasses add parts beyond DFlash.

    Args:
        export, golden: as in `ServedHead`.
        shape: shape that the serving engine builds.
    """

    shape: BlockShape

    def __init__(self, export: Export, golden: ReferenceLogits, shape: BlockShape) -> None:
        super().__init__(export, golden, TITLES[export.format], shape)
        # The known rows of the target's output head do not give all logits.
        needs_output = (
            shape.draft_vocab_size != shape.vocab_size or "output_head" not in golden.tensors
        )
        output: Presence = "must" if needs_output else "may"
        self.load_weights(export.tensors, shape.list_tensor_shapes(), output)

    def describe_config(self) -> str:
        """Describe what the rows of a block read and see."""
        shape = self.shape
        rows = "one after another" if shape.causal else "all at once"
        seen = "all of the text" if shape.window is None else f"{shape.window} tokens"
        return (
            f"hidden states {list(shape.layers)}, {shape.block_size} rows that see {seen} and each "
            f"other {rows}"
        )

    def iter_logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield logits [S, r] of the reference ids and logsumexp [S] over all ids, slot by slot."""
        position_ids, tokens = (
            self.golden.require_tensor(name, (None,)) for name in ("position_ids", "token_ids")
        )
        num_rows = len(position_ids)
        outputs = torch.stack([self._compute_block(row, position_ids) for row in range(num_rows)])
        state: Tensor | None = None
        for slot in range(outputs.shape[1]):
            before = tokens[slot : slot + num_rows]
            base = self.compute_logits(outputs[:, slot])
            drafted, state = self.compute_slot_logits(base, outputs[:, slot], before, state)
            yield self.select_reference_ids(drafted)

    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a slot's logits [S, W] after tokens [S], and the next state.

        DFlash leaves `base` unchanged.
        """
        del outputs, before
        return base, state

    def _compute_block(self, row: int, position_ids: Tensor) -> Tensor:
        """Compute the inputs [D, H] of the output head, for the slots of the block after a row."""
        golden, shape = self.golden, self.shape
        wanted = (None, shape.target_hidden_size)
        features = [
            golden.require_tensor(f"hidden_states.{i}", wanted)[: row + 1] for i in shape.layers
        ]
        context = self.apply_norm(self.apply_linear(torch.cat(features, -1), "fc"), "hidden_norm")
        places = position_ids[row] + 1 + torch.arange(shape.block_size)
        states = self.embed_block(row)
        for number in range(shape.num_layers):
            layer = f"layers.{number}."
            inputs = self.apply_norm(states, f"{layer}input_layernorm")
            read = [(context, position_ids[: row + 1]), (inputs, places)]
            states = self.apply_layer(layer, states, read, self._build_mask(number, row + 1))
        return self.apply_norm(states, "norm")[shape.slots]

    def embed_block(self, row: int) -> Tensor:
        """Embed the block after a row, [R, H], by the head's own embedding if it has one."""
        golden, hidden, num_masks = self.golden, self.shape.hidden_size, self.shape.block_size - 1
        if self.embedding is not None:
            token = int(golden.require_tensor("token_ids", (None,))[row])
            mask_id = int(golden.require_tensor("mask_token_id", (1,)))
            return self.embedding[[token] + [mask_id] * num_masks].float()
        token_embeddings = golden.require_tensor("token_embeddings", (None, hidden))
        mask = golden.require_tensor("mask_embedding", (1, hidden))
        return torch.cat([token_embeddings[row : row + 1], mask.expand(num_masks, -1)])

    def _build_mask(self, number: int, num_tokens: int) -> Tensor:
        """Build the mask [R, s + R] bool of what rows see in a layer, by the distance of tokens."""
        shape = self.shape
        keys = torch.arange(num_tokens + shape.block_size)
        rows = keys[num_tokens:].unsqueeze(1)
        seen = torch.ones(len(rows), len(keys), dtype=torch.bool)
        if number in shape.full:
            return seen
        if shape.causal:
            seen &= keys <= rows
        return seen if shape.window is None else seen & ((rows - keys).abs() < shape.window)


class ServedDFlash2(ServedBlocks):
    """Exported DFlash-2 head."""

    shape: DFlash2Shape

    def apply_sublayer(
        self, name: str, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply a sublayer between two convolutions: [R, H]."""
        base = self.weights[f"{name}_conv.base_kernel"]
        change = self.apply_linear(inputs, f"{name}_conv.kernel_projection")
        change = change.view(len(inputs), 2, self.shape.conv_kernel_size, -1)
        return self._convolve_rows(
            sublayer(self._convolve_rows(inputs, base[0], change[:, 0])), base[1], change[:, 1]
        )

    def _convolve_rows(self, rows: Tensor, base: Tensor, change: Tensor) -> Tensor:
        """Convolve [R, H] row by row with changes [R, taps, G], each a sum over earlier rows."""
        outputs = []
        for row in range(len(rows)):
            mixed = torch.zeros(rows.shape[1])
            for tap in range(min(self.shape.conv_kernel_size, row + 1)):
                kernel = base[tap] + change[row, tap].repeat_interleave(self.shape.conv_group_size)
                mixed = mixed + kernel * rows[row - tap]
            outputs.append(mixed)
        return torch.stack(outputs)

    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute logits [S, V] of each row's candidates, by the previous token.

        Other tokens get -inf.
        """
        first, second = (
            self.weights[f"{SELECTOR}{n}_codebook"] for n in ("predecessor", "successor")
        )
        asked = first[before] * self.apply_linear(outputs, f"{SELECTOR}hidden_projection")
        least = base.topk(min(self.shape.selector_top_k, base.shape[-1])).values[:, -1:]
        unary = base * self.shape.output_multiplier
        cap = self.shape.final_logit_softcapping
        unary = torch.tanh(unary / cap) * cap if cap > 0 else unary
        return (unary + asked @ second.T).masked_fill(base < least, -torch.inf), state

    def embed_block(self, row: int) -> Tensor:
        """Embed and scale the block after a row: [R, H]."""
        return super().embed_block(row) * self.shape.input_embedding_scale


class ServedDSpark(ServedBlocks):
    """Exported DSpark head."""

    shape: DSparkShape

    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add the logits of the Markov head to a slot's [S, W]."""
        memory = self.weights[f"{MARKOV_FIRST}.weight"][before]
        if self.shape.markov == "gated":
            memory = (
                memory * self.apply_linear(torch.cat([outputs, memory], -1), MARKOV_GATE).sigmoid()
            )
        elif self.shape.markov == "rnn":
            state = torch.zeros_like(memory) if state is None else state
            joint = self.apply_linear(torch.cat([state, memory, outputs], -1), MARKOV_JOINT)
            gate, candidate, output = joint.chunk(3, -1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            memory = output.tanh()
        return base + self.apply_linear(memory, MARKOV_SECOND), state
