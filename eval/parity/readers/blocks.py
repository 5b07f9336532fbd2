"""Reader of exported block drafters, DFlash, DFlash-2 and DSpark, that computes their logits.

Names, keys and defaults are those of the serving engines.

Sources, read November 2026: vLLM 0.32 `models/qwen3_dflash.py`, `models/qwen3_dspark.py`,
`configs/speculators/`; SGLang 0.5 `models/dflash.py`; z-lab/dflash `model.py`.

Letters: S rows of a text, s of them before a block, R rows of a block, D slots, H hidden, G groups
of channels, V vocabulary, W drafted ids, r compared ids or, for a selector or a Markov head, rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from conf.errors import InputError
from eval.parity.decoder import EMBEDDING, OUTPUT, HeadShape, ServedLayers, Shapes
from eval.parity.engine_config import EngineConfig, RopeKeys, parse_rope
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
FULL, SLIDING = "full_attention", "sliding_attention"
SELECTOR = "candidate_selector."
MARKOV_FIRST, MARKOV_SECOND = "markov_head.markov_w1", "markov_head.markov_w2"
MARKOV_GATE, MARKOV_JOINT = "markov_head.gate_proj", "markov_head.joint_proj"
CONFIDENCE = "confidence_head.proj"


def build_head(export: Export, golden: ReferenceLogits) -> "ServedBlocks":
    """Build the head of an export. See `eval.parity.parity_check.Reader`."""
    reader = BlockConfigReader(export, golden)
    builders: dict[str, Callable[[BlockConfigReader], ServedBlocks]] = {
        "dflash": _build_dflash, "dflash2": _build_dflash2, "dspark": _build_dspark,
    }  # fmt: skip
    return builders[export.kind](reader)


def _build_dflash(reader: "BlockConfigReader") -> "ServedBlocks":
    return ServedBlocks(reader.export, reader.golden, _parse_dflash_shape(reader), {})


def _build_dflash2(reader: "BlockConfigReader") -> "ServedDFlash2":
    shape = _parse_dflash_shape(reader)
    block = reader.root if reader.is_speculators else reader.root.get_section("dflash_config")
    # Rows of a block see each other.
    block.check_allowed("causal", False)
    block.check_allowed("sliding_window_non_causal", True)
    values: dict[str, Any] = {
        field.name: block.require_key(field.name, int, "refuses the head")
        if field.default is MISSING
        else block.require_key(field.name, float, "scales nothing")
        for field in fields(DFlash2Settings)
        if field.default is MISSING or block.has_key(field.name)
    }
    return ServedDFlash2(reader.export, reader.golden, shape, DFlash2Settings(**values))


def _build_dspark(reader: "BlockConfigReader") -> "ServedDSpark":
    export, root, guesses = reader.export, reader.root, "guesses, and vLLM not as speculators does"
    anchored = root.require_key("sample_from_anchor", bool, guesses)
    causal = (
        reader.parse_speculators_causal()
        if reader.is_speculators
        else reader.parse_causal(root, "is_causal")
    )
    shape = reader.parse_shape(root, anchored=anchored, causal=causal)
    markov = root.require_key("markov_head_type", str, "takes vanilla")
    served = ("vanilla",) if export.format == "vllm" else ("vanilla", "gated", "rnn")
    root.check_allowed("markov_head_type", *served)
    rank = root.require_key("markov_rank", int, "takes 256 or none")
    with_markov = root.require_key("confidence_head_with_markov", bool, "takes false, or true")
    has_confidence = root.require_key("enable_confidence_head", bool, "takes false, or true")
    return ServedDSpark(
        export, reader.golden, shape, markov=markov, rank=rank,
        confidence_size=shape.hidden_size + rank * with_markov if has_confidence else 0,
    )  # fmt: skip


def _parse_dflash_shape(reader: "BlockConfigReader") -> "BlockShape":
    """Read the shape of a head whose masked rows draft the tokens at their own places.

    Raises:
        InputError: as in `BlockConfigReader.parse_shape`.
    """
    root = reader.root
    if reader.is_speculators:
        root.check_equal(
            "sample_from_anchor", False, "as rows draft the token at their place", "guesses"
        )
        return reader.parse_shape(root, anchored=False, causal=reader.parse_speculators_causal())
    block = root.get_section("dflash_config")
    causal = reader.parse_causal(block, "causal")
    root.check_allowed("is_causal", causal)
    root.check_allowed("sample_from_anchor", False)
    return reader.parse_shape(block, anchored=False, causal=causal)


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


class BlockConfigReader:
    """Reader of the keys of `config.json` that decide what the serving engine computes.

    Args:
        export: the engine's files.
        golden: reference values, with sizes of the target.
    """

    def __init__(self, export: Export, golden: ReferenceLogits) -> None:
        self.export, self.golden = export, golden
        self.is_speculators = export.format == "speculators"
        file, title = export.folder / "config.json", TITLES[export.format]
        self.root = EngineConfig(export.config, file, title)
        self.layer = (
            self.root.get_section("transformer_layer_config") if self.is_speculators else self.root
        )

    def parse_shape(self, block: EngineConfig, anchored: bool, causal: bool) -> BlockShape:
        """Read the shape that the serving engine builds.

        Args:
            block: section with the mask token and, except in speculators, the layers.
            anchored: value of `sample_from_anchor`.
            causal: whether rows see no later rows of their block, as the serving engine decides.

        Raises:
            InputError: the serving engine would refuse the config, guess a value, or read another
                value than in training.
        """
        layer, golden, root = self.layer, self.golden, self.root
        self._check_constants()
        mask = int(golden.require_tensor("mask_token_id", (1,)))
        block.check_equal("mask_token_id", mask, "as it was trained", "has no mask")
        head_dim = layer.require_key("head_dim", int, "takes 128")
        return BlockShape(
            hidden_size=layer.require_key("hidden_size", int, "takes 4096"),
            intermediate_size=layer.require_key("intermediate_size", int, "takes 22016"),
            num_heads=layer.require_key("num_attention_heads", int, "takes 32"),
            num_kv_heads=layer.require_key("num_key_value_heads", int, "takes num_attention_heads"),
            head_dim=head_dim,
            num_layers=layer.require_key("num_hidden_layers", int, "builds 32 layers"),
            target_hidden_size=root.require_key("target_hidden_size", int, "takes the head's own"),
            vocab_size=golden.vocab_size,
            draft_vocab_size=root.require_key("draft_vocab_size", int, "takes all ids"),
            eps=float(layer.require_key("rms_norm_eps", float, "takes 1e-6")),
            layers=self._parse_layers(block),
            block_size=root.require_key("block_size", int, "takes 8 or 16"),
            drafts_next_token=anchored,
            causal=causal,
            window=self._parse_window(),
            full=self._list_full_layers(),
            qk_norm=True,
            rope=parse_rope(layer, head_dim, RopeKeys.both),
        )

    def _check_constants(self) -> None:
        layer, golden, root = self.layer, self.golden, self.root
        named = ARCHITECTURES[self.export.kind][self.export.format]
        root.check_equal("architectures", [named], "its class", "finds no class")
        layer.check_equal("model_type", "qwen3", "its class", "finds no class")
        layer.check_equal("vocab_size", golden.vocab_size, "the target's", "takes 151936")
        layer.check_allowed("hidden_act", "silu")
        layer.check_allowed("attention_bias", False)
        layer.check_allowed("tie_word_embeddings", False)
        longest = golden.max_position_embeddings
        if layer.require_key("max_position_embeddings", int, "stops at 32768 positions") < longest:
            raise layer.make_error("max_position_embeddings", f"the target's {longest} or more")
        if self.is_speculators:
            kind, refused = self.export.kind, "refuses the folder"
            root.check_equal("speculators_model_type", kind, "the kind of the head", refused)
            plan = root.get_section("speculators_config")
            plan.check_equal("algorithm", kind, "the kind of the head", refused)
            plan.get_section("verifier").require_key("name_or_path", str, refused)

    def _parse_layers(self, block: EngineConfig) -> tuple[int, ...]:
        """Read the hidden states as indices of `output_hidden_states`, from the engine's own."""
        if self.is_speculators:
            key, place, offset = "aux_hidden_state_layer_ids", self.root, 0
        else:
            key, place, offset = "target_layer_ids", block, 1
        ids = [index + offset for index in place.require_key(key, list, "guesses layers")]
        known, trained = range(self.golden.num_layers), self.export.layers
        if ids != sorted(set(ids)) or not set(ids) <= set(known):
            raise place.make_error(
                key, f"each of {list(known)} (less {offset}) once, in rising order"
            )
        if trained is not None and trained != ids:
            raise InputError(
                f"{place.file}: {place.engine} would read hidden states {ids}, but the head was "
                f"trained on {trained} (headsmith.json: export.layers), as engines count "
                "differently; export again"
            )
        return tuple(ids)

    def _parse_window(self) -> int | None:
        layer, number = self.layer, self.layer.get("num_hidden_layers")
        kinds = layer.require_key("layer_types", list, "guesses by other keys")
        if len(kinds) != number or not set(kinds) <= {FULL, SLIDING}:
            raise layer.make_error("layer_types", f"{number} of {FULL} and {SLIDING}")
        if SLIDING not in kinds:
            layer.check_allowed("use_sliding_window", False)
            return None
        layer.check_equal("use_sliding_window", True, "as layer_types says", "sees all of the text")
        return layer.require_key("sliding_window", int, "takes 4096")

    def _list_full_layers(self) -> tuple[int, ...]:
        """List the layers without a window, if other layers have one."""
        if self._parse_window() is None:
            return ()
        kinds = self.layer.require_key("layer_types", list, "guesses by other keys")
        return tuple(number for number, kind in enumerate(kinds) if kind == FULL)

    def parse_causal(self, place: EngineConfig, key: str) -> bool:
        """Tell whether rows of layers with a window see no later rows of their block.

        Raises:
            InputError: the key is missing, or concerns layers that see all of the text.
        """
        if not self._list_full_layers():
            return place.require_key(key, bool, "takes it from layer_types")
        place.check_allowed(key, False)
        # Without the key, engines read layer_types.
        return not place.has_key(key)

    def parse_speculators_causal(self) -> bool:
        """Tell whether a row sees no later rows of its block, by `sliding_window_non_causal`.

        In speculators' format only layers with a window can be causal.

        Raises:
            InputError: the key is missing, or says causal for a layer that sees all of the text.
        """
        key = "sliding_window_non_causal"
        is_non_causal = self.root.require_key(
            key, bool, "guesses, and vLLM not as speculators does"
        )
        if not is_non_causal and (self._parse_window() is None or self._list_full_layers()):
            raise self.root.make_error(key, "true, as some of its layers see all of the text")
        return not is_non_causal


class ServedBlocks(ServedLayers):
    """Exported block drafter. Subclasses add parts beyond DFlash.

    Args:
        export, golden: as in `ServedHead`.
        shape: shape that the serving engine builds.
        more: shapes of further tensors of the head.
    """

    shape: BlockShape

    def __init__(
        self, export: Export, golden: ReferenceLogits, shape: BlockShape, more: Shapes
    ) -> None:
        super().__init__(export, golden, TITLES[export.format], shape)
        # The known rows of the target's output head do not give all logits.
        self._knows_all = "output_head" not in golden.tensors
        self._check_tensors(shape.list_tensor_shapes() | more)
        self._target_ids = self.compute_target_ids()
        self.weights = {
            name: tensor.float()
            for name, tensor in export.tensors.items()
            if tensor.is_floating_point() and name != EMBEDDING
        }

    @property
    def report_lines(self) -> list[str]:
        """Describe the checks, a line each."""
        shape = self.shape
        rows = "one after another" if shape.causal else "all at once"
        seen = "all of the text" if shape.window is None else f"{shape.window} tokens"
        return [
            f"{self.export.config_name}: {self.title} reads hidden states {list(shape.layers)}, "
            f"{shape.block_size} rows that see {seen} and each other {rows}",
            self.tensor_line,
            self.format_vocabulary_line(OUTPUT in self.export.tensors),
        ]

    def iter_logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield logits [S, r] of the reference ids and logsumexp [S] over all ids, slot by slot."""
        golden = self.golden
        position_ids, tokens = (
            golden.require_tensor(name, (None,)) for name in ("position_ids", "token_ids")
        )
        num_rows = len(position_ids)
        outputs = torch.stack([self._compute_block(row, position_ids) for row in range(num_rows)])
        state: Tensor | None = None
        for slot in range(outputs.shape[1]):
            before = tokens[slot : slot + num_rows]
            base = self._compute_base_logits(outputs[:, slot])
            drafted, state = self.compute_slot_logits(base, outputs[:, slot], before, state)
            total = drafted.logsumexp(-1) if self._knows_all else None
            yield self.select_reference_ids(drafted, self._target_ids), total

    def _compute_base_logits(self, outputs: Tensor) -> Tensor:
        if OUTPUT in self.weights:
            return self.apply_linear(outputs, "lm_head")
        ids = self.golden.require_tensor("ids", (None,))
        rows = self.golden.require_tensor("output_head", (len(ids), self.shape.hidden_size))
        # Logits of other ids are unknown.
        logits = torch.full((len(outputs), self.shape.vocab_size), -torch.inf)
        logits[:, ids] = outputs @ rows.T
        return logits

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
            states = self._compute_layer(number, states, context, position_ids[: row + 1], places)
        return self.apply_norm(states, "norm")[shape.slots]

    def embed_block(self, row: int) -> Tensor:
        """Embed the block after a row, [R, H], by the head's own embedding if it has one."""
        golden, hidden, num_masks = self.golden, self.shape.hidden_size, self.shape.block_size - 1
        if EMBEDDING in self.export.tensors:
            token = int(golden.require_tensor("token_ids", (None,))[row])
            mask_id = int(golden.require_tensor("mask_token_id", (1,)))
            return self.export.tensors[EMBEDDING][[token] + [mask_id] * num_masks].float()
        token_embeddings = golden.require_tensor("token_embeddings", (None, hidden))
        mask = golden.require_tensor("mask_embedding", (1, hidden))
        return torch.cat([token_embeddings[row : row + 1], mask.expand(num_masks, -1)])

    def _compute_layer(
        self, number: int, states: Tensor, context: Tensor, before: Tensor, places: Tensor
    ) -> Tensor:
        """Compute a layer's output [R, H] over its block.

        The block [R, H] stands at `places`, the text's states [s, H] at `before`.
        """
        name = f"layers.{number}."

        def attend(inputs: Tensor) -> Tensor:
            keys = torch.cat([self.project_heads(context, name, "k", before),
                              self.project_heads(inputs, name, "k", places)])  # fmt: skip
            values = torch.cat([self.project_heads(rows, name, "v") for rows in (context, inputs)])
            query, seen = (
                self.project_heads(inputs, name, "q", places),
                self._build_mask(number, len(context)),
            )
            return self.apply_linear(
                self.attend(query, keys, values, seen), f"{name}self_attn.o_proj"
            )

        inputs = self.apply_norm(states, f"{name}input_layernorm")
        states = states + self.apply_sublayer(f"{name}attention", inputs, attend)
        inputs = self.apply_norm(states, f"{name}post_attention_layernorm")
        return states + self.apply_sublayer(
            f"{name}mlp", inputs, lambda rows: self.apply_mlp(rows, name)
        )

    def apply_sublayer(
        self, name: str, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply a sublayer to [R, H]; subclasses may wrap it."""
        del name
        return sublayer(inputs)

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

    def _check_tensors(self, must: Shapes) -> None:
        """Check the tensors, including those of the head's vocabulary."""
        shape = self.shape
        may: Shapes = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
        reduced = shape.draft_vocab_size != shape.vocab_size
        output = must if reduced or self._knows_all else may
        output[OUTPUT] = (shape.draft_vocab_size, shape.hidden_size)
        if reduced:
            must["d2t"] = (shape.draft_vocab_size,)
            may["t2d"] = (shape.vocab_size,)
        self.check_tensors(self.export.tensors, must, may)


@dataclass(frozen=True)
class DFlash2Settings:
    """Settings that a DFlash-2 head has beyond DFlash's.

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


class ServedDFlash2(ServedBlocks):
    """Exported DFlash-2 head.

    Args:
        export, golden, shape: as in `ServedBlocks`.
        settings: settings that DFlash lacks.
    """

    def __init__(
        self, export: Export, golden: ReferenceLogits, shape: BlockShape, settings: DFlash2Settings
    ) -> None:
        self._settings, hidden = settings, shape.hidden_size
        self._groups = hidden // settings.conv_group_size
        taps, rank = settings.conv_kernel_size, settings.selector_rank
        more: Shapes = {
            f"{SELECTOR}predecessor_codebook": (shape.vocab_size, rank),
            f"{SELECTOR}successor_codebook": (shape.vocab_size, rank),
            f"{SELECTOR}hidden_projection.weight": (rank, hidden),
        }
        for number in range(shape.num_layers):
            for name in ("attention_conv", "mlp_conv"):
                conv = f"layers.{number}.{name}."
                more[f"{conv}base_kernel"] = (2, taps, hidden)
                more[f"{conv}kernel_projection.weight"] = (2 * taps * self._groups, hidden)
        super().__init__(export, golden, shape, more)

    def apply_sublayer(
        self, name: str, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply a sublayer between two convolutions: [R, H]."""
        base = self.weights[f"{name}_conv.base_kernel"]
        change = self.apply_linear(inputs, f"{name}_conv.kernel_projection")
        change = change.view(len(inputs), 2, self._settings.conv_kernel_size, self._groups)
        return self._convolve_rows(
            sublayer(self._convolve_rows(inputs, base[0], change[:, 0])), base[1], change[:, 1]
        )

    def _convolve_rows(self, rows: Tensor, base: Tensor, change: Tensor) -> Tensor:
        """Convolve [R, H] row by row, each a sum over earlier rows."""
        size, outputs = rows.shape[1] // self._groups, []
        for row in range(len(rows)):
            mixed = torch.zeros(rows.shape[1])
            for tap in range(min(self._settings.conv_kernel_size, row + 1)):
                kernel = base[tap] + change[row, tap].repeat_interleave(size)
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
        least = base.topk(min(self._settings.selector_top_k, base.shape[-1])).values[:, -1:]
        unary = base * self._settings.output_multiplier
        cap = self._settings.final_logit_softcapping
        unary = torch.tanh(unary / cap) * cap if cap > 0 else unary
        return (unary + asked @ second.T).masked_fill(base < least, -torch.inf), state

    def embed_block(self, row: int) -> Tensor:
        """Embed and scale the block after a row: [R, H]."""
        return super().embed_block(row) * self._settings.input_embedding_scale


class ServedDSpark(ServedBlocks):
    """Exported DSpark head.

    Args:
        export, golden, shape: as in `ServedBlocks`.
        markov: type of the Markov head.
        rank: rank r of the Markov head.
        confidence_size: input width of the confidence head; 0 without one.
    """

    def __init__(
        self, export: Export, golden: ReferenceLogits, shape: BlockShape, *, markov: str, rank: int,
        confidence_size: int,
    ) -> None:  # fmt: skip
        self._markov = markov
        hidden = shape.hidden_size
        more: Shapes = {
            f"{MARKOV_FIRST}.weight": (shape.vocab_size, rank),
            f"{MARKOV_SECOND}.weight": (shape.draft_vocab_size, rank),
        }
        if markov == "gated":
            more |= {f"{MARKOV_GATE}.weight": (rank, hidden + rank), f"{MARKOV_GATE}.bias": (rank,)}
        if markov == "rnn":
            size = 3 * rank, 2 * rank + hidden
            more |= {f"{MARKOV_JOINT}.weight": size, f"{MARKOV_JOINT}.bias": size[:1]}
        if confidence_size:
            more |= {f"{CONFIDENCE}.weight": (1, confidence_size), f"{CONFIDENCE}.bias": (1,)}
        super().__init__(export, golden, shape, more)

    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add the logits of the Markov head to a slot's [S, W]."""
        memory = self.weights[f"{MARKOV_FIRST}.weight"][before]
        if self._markov == "gated":
            memory = (
                memory * self.apply_linear(torch.cat([outputs, memory], -1), MARKOV_GATE).sigmoid()
            )
        elif self._markov == "rnn":
            state = torch.zeros_like(memory) if state is None else state
            joint = self.apply_linear(torch.cat([state, memory, outputs], -1), MARKOV_JOINT)
            gate, candidate, output = joint.chunk(3, -1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            memory = output.tanh()
        return base + self.apply_linear(memory, MARKOV_SECOND), state
