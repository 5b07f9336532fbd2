"""Reader of exported EAGLE and P-EAGLE heads that computes their logits as an engine does.

Names, keys, defaults and the numbers of layers are those of the serving engines.

Sources, read November 2026: vLLM 0.32 `model_executor/models/llama_eagle.py`, `llama_eagle3.py`,
`qwen3_eagle3.py`, `v1/worker/gpu_model_runner.py`; SGLang `srt/models/llama_eagle.py`,
`llama_eagle3.py`; TensorRT-LLM `_torch/models/modeling_speculative.py`; speculators 0.9
`models/eagle3`; SafeAILab/EAGLE `eagle/model/cnets.py` (EAGLE-3) and `cnets1.py` (EAGLE-1).

Letters: S rows, D depths, H hidden, Ht hidden of the target, I input of the attention, Q heads, d
head size, R compared ids.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from conf.errors import InputError
from eval.parity.decoder import EMBEDDING, OUTPUT, HeadShape, ServedLayers, Shapes
from eval.parity.engine_config import EngineConfig, RopeKeys, parse_rope, require_same_value
from eval.parity.export_files import Export, ReferenceLogits

LAYER = "layers.0."
FLAGS = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
IDS = "eagle_aux_hidden_state_layer_ids"
LAUNCH = "eagle3_layers_to_capture"
MASK_HIDDEN, MASK_KEY = "mask_hidden", "mask_token_id"
BIASES = ("attention_bias", "mlp_bias")


class LayerIds(Enum):
    """Where serving engines find the target layers that an EAGLE-3 head reads."""

    hidden_states = "hidden_states"
    """`eagle_aux_hidden_state_layer_ids` in the root or in `eagle_config`; i is the input of layer
    i: index i of `output_hidden_states`."""
    outputs = "outputs"
    """The same key in `eagle_config` only; i is the output of layer i: index i + 1."""
    launch = "launch"
    """`eagle3_layers_to_capture` of the launch configuration, which an export has in its README; i
    as above."""
    fixed = "fixed"
    """Always 2, L // 2 and L - 3 of `output_hidden_states`, whatever the file says."""


class FusionBias(Enum):
    """Bias of the fusion layer in serving engines."""

    never = "never"
    always = "always"
    key = "key"
    """By the key `bias` of config.json."""


class Presence(Enum):
    """Whether a serving engine needs, allows or lacks a tensor."""

    must = "must"
    may = "may"
    no = "no"


@dataclass(frozen=True)
class EngineConventions:
    """Conventions of a serving engine for a kind of EAGLE head.

    Attributes:
        title: name of the serving engine in messages.
        architectures: values of `architectures` that the engine allows.
        prefixes: prefixes of the layer's tensors.
        flags: names of `FLAGS` that the engine supports.
        writes_all_flags: whether unsupported flags must be written as false.
        nested: flags that the engine reads in `eagle_config` only.
        layers: where the engine finds the layers to read.
        always_fuses: whether `fc` also applies to hidden states as wide as the head.
        fc_bias: where the bias of `fc` comes from.
        biases: keys of biases that the engine's layer may have.
        qwen3: whether the engine has a layer with norms on queries and keys.
        rope: spelling of RoPE that the engine reads.
        random_head: whether a missing output head starts randomly; in SGLang, unless
            `draft_vocab_size` is null.
        embedding: `no` if the engine uses the target's embedding where that is as wide as the head.
        t2d: whether the engine has the mask `t2d` beside `d2t`.
        method: kind of head in speculators.
    """

    title: str
    architectures: tuple[str, ...]
    prefixes: tuple[str, ...] = ("midlayer.", "layers.0.")
    flags: tuple[str, ...] = ()
    writes_all_flags: bool = True
    nested: tuple[str, ...] = ()
    layers: LayerIds = LayerIds.fixed
    always_fuses: bool = False
    fc_bias: FusionBias = FusionBias.never
    biases: tuple[str, ...] = ()
    qwen3: bool = False
    rope: RopeKeys = RopeKeys.both
    random_head: bool = False
    embedding: Presence = Presence.may
    t2d: Presence = Presence.may
    method: str = "eagle3"


# fmt: off
VLLM_EAGLE3 = EngineConventions(
    "vLLM",
    ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM",
     "Eagle3Qwen3ForCausalLM"),
    flags=FLAGS, layers=LayerIds.hidden_states, always_fuses=True, biases=BIASES, qwen3=True,
)
CONVENTIONS = {
    ("vllm", "eagle1"): EngineConventions(
        "vLLM", ("LlamaForCausalLM", "EagleLlamaForCausalLM"), ("layers.0.",), biases=BIASES,
    ),
    ("vllm", "eagle3"): VLLM_EAGLE3,
    ("speculators", "eagle3"): replace(
        VLLM_EAGLE3, architectures=("Eagle3Speculator", "Eagle3DraftModel"),
        prefixes=("layers.0.",), random_head=True, t2d=Presence.must,
    ),
    ("sglang", "eagle1"): EngineConventions(
        "SGLang", ("LlamaForCausalLMEagle",), ("layers.0.",),
        fc_bias=FusionBias.always, embedding=Presence.no,
    ),
    # `fc` follows the key `bias`, but so does a bias of the attention's output.
    ("sglang", "eagle3"): EngineConventions(
        "SGLang", ("LlamaForCausalLMEagle3",), flags=("norm_output", "fc_norm"),
        layers=LayerIds.outputs, random_head=True, embedding=Presence.no,
    ),
    # `EAGLE3` is put before the name, without an `Eagle3` at its end.
    ("trtllm", "eagle3"): EngineConventions(
        "TensorRT-LLM", ("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
        flags=("norm_output", "fc_norm", "norm_before_fc"), nested=("norm_before_fc",),
        layers=LayerIds.launch, fc_bias=FusionBias.key, biases=("mlp_bias",),
        rope=RopeKeys.old, embedding=Presence.no, t2d=Presence.no,
    ),
    ("original", "eagle1"): EngineConventions(
        "EAGLE", ("LlamaForCausalLM",), ("layers.0.",),
        fc_bias=FusionBias.key, rope=RopeKeys.two_keys, embedding=Presence.must,
    ),
    ("original", "eagle3"): EngineConventions(
        "EAGLE", ("LlamaForCausalLM", "LlamaForCausalLMEagle3"), ("midlayer.",),
        writes_all_flags=False,
        rope=RopeKeys.two_keys, random_head=True, embedding=Presence.must, t2d=Presence.must,
    ),
    ("vllm", "peagle"): replace(
        VLLM_EAGLE3, flags=tuple(flag for flag in FLAGS if flag != "norm_output"),
    ),
    # vLLM drops `fc_norm` when it converts such a config.
    ("speculators", "peagle"): replace(
        VLLM_EAGLE3, architectures=("PEagleSpeculator", "PEagleDraftModel"),
        prefixes=("layers.0.",), random_head=True, t2d=Presence.must,
        flags=("norm_before_fc", "norm_before_residual"), method="peagle",
    ),
}
# fmt: on
FORMATS = {
    kind: tuple(name for name, head in CONVENTIONS if head == kind)
    for kind in ("eagle1", "eagle3", "peagle")
}


def build_head(export: Export, golden: ReferenceLogits) -> "ServedEagle":
    """Build the head of an export. See `eval.parity.parity_check.Reader`."""
    if export.kind == "peagle":
        return ServedPEagle(export, golden)
    conventions = CONVENTIONS[export.format, export.kind]
    return ServedEagle(export, golden, conventions, parse_shape(export, golden, conventions))


def parse_shape(
    export: Export, golden: ReferenceLogits, conventions: EngineConventions, num_layers: int = 1
) -> "EagleShape":
    """Read the shape of the head from a `config.json`. See `EagleConfigReader`."""
    config = EagleConfigReader(export, golden, conventions, num_layers)
    return config.parse_shape(own_head=OUTPUT in export.tensors)


@dataclass(frozen=True, kw_only=True)
class EagleShape(HeadShape):
    """EAGLE head as a serving engine builds it.

    Attributes:
        eagle3: whether the head fuses three hidden states and has their norms; otherwise EAGLE-1.
        flags: names of `FLAGS` that are on.
        fc_bias: whether the fusion layer has a bias.
        biased: projections of the layer with a bias.
        own_head: whether the head has its own output head.
        logit_scale: factor of the logits.
    """

    eagle3: bool
    flags: frozenset[str]
    fc_bias: bool
    biased: frozenset[str]
    own_head: bool
    logit_scale: float

    def list_tensor_shapes(self) -> Shapes:
        """Compute the shapes of the required tensors."""
        hidden, width = self.hidden_size, self.target_hidden_size
        norms = ["post_attention_layernorm"]
        if self.eagle3:
            norms += ["input_layernorm", "hidden_norm"]
        input_size = 2 * hidden if self.eagle3 else hidden
        shapes = self.list_layer_shapes(LAYER, norms, self.biased, input_size)
        read = len(self.layers) * width if self.eagle3 else hidden + width
        shapes["fc.weight"] = (hidden, read)
        if self.fc_bias:
            shapes["fc.bias"] = (hidden,)
        if "norm_before_fc" in self.flags:
            shapes["input_norm.weight"] = (read,)
        if "fc_norm" in self.flags:
            shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(len(self.layers))}
        if self.eagle3:
            shapes["norm.weight"] = (hidden,)
        if self.own_head:
            shapes[OUTPUT] = (self.draft_vocab_size, hidden)
        return shapes


class EagleConfigReader:
    """Reader of the keys of `config.json` that decide what the serving engine computes.

    Args:
        export: the serving engine's files.
        golden: sizes of the target.
        conventions: conventions of the engine.
        num_layers: layers of the head.
    """

    def __init__(
        self,
        export: Export,
        golden: ReferenceLogits,
        conventions: EngineConventions,
        num_layers: int,
    ) -> None:
        self._export, self._golden, self._engine = export, golden, conventions
        self._num_layers = num_layers
        self._eagle3, self._nested = export.kind != "eagle1", export.format == "speculators"
        self._root = EngineConfig(export.config, export.folder / "config.json", conventions.title)
        self._eagle = self._root.get_section("eagle_config")
        # In speculators' format, Llama's keys lie in a section.
        self._layer = (
            self._root.get_section("transformer_layer_config") if self._nested else self._root
        )

    def parse_shape(self, own_head: bool) -> EagleShape:
        """Read the shape that is built from a file with or without an output head.

        Raises:
            InputError: the serving engine would refuse the config, guess a value, or read another
                value than in training.
        """
        layer, vocab_size = self._layer, self._golden.vocab_size
        self._check_class()
        self._check_constants()
        hidden = layer.require_key("hidden_size", int, "takes 4096")
        heads = layer.require_key("num_attention_heads", int, "takes 32")
        head_dim = layer.require_key("head_dim", int, "divides hidden_size by num_attention_heads")
        if self._engine.rope is RopeKeys.two_keys and head_dim * heads != hidden:
            raise layer.make_error("head_dim", f"{hidden} / {heads}: it always divides")
        width = hidden
        if self._nested:
            # speculators itself builds `fc` for features as wide as the head.
            self._root.check_allowed("target_hidden_size", None, hidden)
        elif self._root.has_key("target_hidden_size"):
            width = self._root.require_key("target_hidden_size", int, "multiplies null")
        fc_bias = self._engine.fc_bias is FusionBias.always
        if self._engine.fc_bias is FusionBias.key:
            fc_bias = self._root.require_key("bias", bool, "guesses, and not as others do")
        else:
            # vLLM and SGLang give other projections a bias for this key.
            self._root.check_allowed("bias", False)
        return EagleShape(
            eagle3=self._eagle3,
            hidden_size=hidden,
            intermediate_size=layer.require_key("intermediate_size", int, "takes 11008"),
            num_heads=heads,
            num_kv_heads=layer.require_key("num_key_value_heads", int, "takes num_attention_heads"),
            head_dim=head_dim,
            target_hidden_size=width,
            vocab_size=vocab_size,
            draft_vocab_size=self._parse_draft_size(own_head) if self._eagle3 else vocab_size,
            eps=float(layer.require_key("rms_norm_eps", float, "takes 1e-6")),
            layers=self._parse_layers(width == hidden) if self._eagle3 else (),
            flags=self._parse_flags() if self._eagle3 else frozenset(),
            fc_bias=fc_bias,
            biased=self._parse_biased_projections(),
            qk_norm=layer.get("model_type") == "qwen3",
            own_head=own_head,
            logit_scale=float(layer.get("logit_scale") or 1.0),
            rope=parse_rope(layer, head_dim, self._engine.rope),
        )

    def _check_class(self) -> None:
        root, layer, engine = self._root, self._layer, self._engine
        named = root.require_key("architectures", list, "finds no class")
        if len(named) != 1 or named[0] not in engine.architectures:
            raise root.make_error("architectures", f"one of {list(engine.architectures)}")
        kind = layer.require_key("model_type", str, "finds no class")
        layer.check_allowed("model_type", *("llama", "qwen3")[: 1 + engine.qwen3])
        if self._nested:
            # Without these keys, speculators and vLLM refuse the folder.
            method, why, refused = engine.method, "the kind of the head", "refuses the folder"
            root.check_equal("speculators_model_type", method, why, refused)
            plan = root.get_section("speculators_config")
            plan.check_equal("algorithm", method, why, refused)
            methods = plan.require_key("proposal_methods", list, refused)
            if not methods or type(methods[0].get("speculative_tokens")) is not int:
                raise plan.make_error("proposal_methods", "speculative_tokens in its first entry")
            plan.get_section("verifier").require_key("name_or_path", str, refused)
        elif (kind == "qwen3") != ("Qwen3" in named[0]):
            raise root.make_error("model_type", f"the one of the architecture {named[0]}")

    def _check_constants(self) -> None:
        layer, golden, number = self._layer, self._golden, self._num_layers
        layer.check_equal("num_hidden_layers", number, "the layers in the file", "builds 32 layers")
        layer.check_equal("vocab_size", golden.vocab_size, "the target's", "takes 32000")
        layer.check_allowed("hidden_act", "silu")
        layer.check_allowed("tie_word_embeddings", False)
        layer.check_allowed("layer_types", None, ["full_attention"])
        layer.check_allowed("qkv_bias", False)
        longest = golden.max_position_embeddings
        if layer.require_key("max_position_embeddings", int, "stops at 2048 positions") < longest:
            raise layer.make_error("max_position_embeddings", f"the target's {longest} or more")

    def _parse_draft_size(self, own_head: bool) -> int:
        root, key = self._root, "draft_vocab_size"
        if self._export.format == "sglang" and root.has_key(key) and root.get(key) is None:
            if own_head:
                raise root.make_error(key, "a number, as null makes it drop lm_head.weight")
            return self._golden.vocab_size
        size = root.require_key(key, int, "takes the target's vocabulary or fails")
        if self._engine.random_head and not own_head:
            raise InputError(
                f"{self._export.weights}: lm_head.weight is missing: with {key}={size} "
                f"{self._engine.title} starts it at random"
            )
        return size

    def _parse_layers(self, same_width: bool) -> tuple[int, ...]:
        """Read the indices of `output_hidden_states` that the serving engine gives to the head."""
        count, where, title = self._golden.num_layers, self._engine.layers, self._engine.title
        self._eagle.check_allowed("use_aux_hidden_state", True)
        first = 0
        if where is LayerIds.hidden_states:
            ids = require_same_value(
                IDS, list, "takes layers 2, L / 2 and L - 3", self._root, self._eagle
            )
            self._check_count(len(ids))
        elif where is LayerIds.fixed:
            ids = [2, count // 2, count - 3]
        elif where is LayerIds.outputs:
            otherwise = "takes layers 2, L / 2 and L - 3 as others count them"
            outputs = self._eagle.require_key(IDS, list, otherwise)
            self._root.check_allowed(IDS, outputs)
            self._check_count(len(outputs))
            ids, first = [i + 1 for i in outputs], 1
        else:
            file = self._export.folder / "README.md"
            text = file.read_text() if file.is_file() else ""
            launched = re.search(rf"{LAUNCH}: *\[([\d, ]+)\]", text)
            if launched is None:
                raise InputError(
                    f"{file}: {LAUNCH}: [...] is missing: {title} reads the layers from its launch "
                    "configuration, and without it takes 1, L / 2 - 1 and L - 4; export again"
                )
            ids, first = [int(number) + 1 for number in launched[1].split(",")], 1
        if not self._engine.always_fuses and same_width and len(ids) == 1:
            raise self._root.make_error(IDS, "two or more: it leaves fc out where the widths agree")
        if ids != sorted(set(ids)) or not all(first <= i < count for i in ids):
            raise InputError(
                f"{self._root.file}: {title} would read hidden states {ids}, but can only give "
                f"those of {first}..{count - 1} before the final norm, each once and in rising "
                "order"
            )
        trained = self._export.layers
        if trained is not None and trained != ids:
            raise InputError(
                f"{self._root.file}: {title} would read hidden states {ids}, but the head was "
                f"trained on {trained} (headsmith.json: export.layers), as engines count layers "
                "differently; export again"
            )
        return tuple(ids)

    def _check_count(self, num_ids: int) -> None:
        """Check the count that decides the width of `fc`, which is read apart from the ids."""
        qwen3 = self._layer.get("model_type") == "qwen3"
        places = (self._root, self._eagle) if qwen3 else (self._eagle,)
        counted = next((len(place.get(IDS)) for place in places if place.has_key(IDS)), 3)
        if (self._layer.get("num_aux_hidden_states") or counted) != num_ids:
            raise self._layer.make_error(
                "num_aux_hidden_states", f"{num_ids}, or it counts {counted}"
            )

    def _parse_flags(self) -> frozenset[str]:
        root, engine = self._root, self._engine
        on = set()
        for flag in FLAGS:
            if flag not in engine.flags:
                if engine.writes_all_flags or root.has_key(flag):
                    root.check_equal(flag, False, "as it has none", "is right, but others guess")
                continue
            places = (self._eagle,) if flag in engine.nested else (root, self._eagle)
            value = require_same_value(flag, bool, "guesses, and not as others do", *places)
            if flag in engine.nested:
                root.check_allowed(flag, value)
            if value:
                on.add(flag)
        self._eagle.check_allowed("return_hidden_post_norm", "norm_output" in on)
        if {"fc_norm", "norm_before_fc"} <= on and self._export.format != "vllm":
            raise root.make_error("fc_norm", "one of fc_norm and norm_before_fc, not both")
        return frozenset(on)

    def _parse_biased_projections(self) -> frozenset[str]:
        layer, biased = self._layer, set[str]()
        parts = {
            "attention_bias": {f"self_attn.{name}_proj" for name in "qkvo"},
            "mlp_bias": {f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        }
        for key, projections in parts.items():
            if key not in self._engine.biases or layer.get("model_type") == "qwen3":
                layer.check_allowed(key, False)
            elif layer.get(key):
                biased |= projections
        return frozenset(biased)


class ServedEagle(ServedLayers):
    """Exported EAGLE head.

    Args:
        export, golden: as in `ServedHead`.
        conventions: conventions of the engine.
        shape: shape that the serving engine builds.
        num_layers: layers of the head.
    """

    shape: EagleShape

    def __init__(
        self, export: Export, golden: ReferenceLogits, conventions: EngineConventions, shape:
            EagleShape,
        num_layers: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(export, golden, conventions.title, shape)
        self.conventions, self.num_layers = conventions, num_layers
        tensors = self.rename_tensors(self._normalise_name)
        self.check_tensors(tensors, *self.list_expected_shapes())
        self._target_ids = self.compute_target_ids()
        # The embedding is not converted: it is large, and few of its rows are needed.
        self.embedding = tensors.pop(EMBEDDING, None)
        self.weights = {n: t.float() for n, t in tensors.items() if t.is_floating_point()}

    @property
    def report_lines(self) -> list[str]:
        """Describe the checks, a line each."""
        shape = self.shape
        on = ", ".join(sorted(shape.flags)) or "none"
        read = f"hidden states {list(shape.layers)}" if shape.eagle3 else "the last hidden state"
        return [
            f"{self.export.config_name}: {self.title} reads {read}, norm flags on: {on}",
            self.tensor_line,
            self.format_vocabulary_line(shape.own_head),
        ]

    def iter_logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield logits [S, R] of the reference ids and logsumexp [S] over all ids, by depth."""
        golden, shape = self.golden, self.shape
        position_ids = golden.require_tensor("position_ids", (None,))
        reached, all_positions = int(position_ids.max()), golden.max_position_embeddings
        if reached < all_positions // 2:
            raise InputError(
                f"{golden.file}: position_ids end at {reached} of {all_positions}, so a wrong RoPE "
                "would go unnoticed; export again"
            )
        width = (len(position_ids), shape.target_hidden_size)
        layers = shape.layers or (golden.num_layers,)
        features = torch.cat(
            [golden.require_tensor(f"hidden_states.{i}", width) for i in layers], dim=-1
        )
        embeds = self._select_embeddings(golden.require_tensor("token_ids", (None,)))
        for states in self.iter_output_states(features, embeds, position_ids):
            if shape.own_head:
                drafted = shape.logit_scale * self.apply_linear(states, "lm_head")
                yield (
                    self.select_reference_ids(drafted, self._target_ids),
                    drafted.logsumexp(dim=-1),
                )
            else:
                rows = golden.require_tensor("output_head", (None, shape.hidden_size))
                yield shape.logit_scale * states @ rows.T, None

    def list_expected_shapes(self) -> tuple[Shapes, Shapes]:
        """Compute the shapes of required and of optional tensors."""
        shape, conventions = self.shape, self.conventions
        if not shape.own_head and "output_head" not in self.golden.tensors:
            raise self.make_error(
                OUTPUT, "is missing", "the head's own: it would take the target's"
            )
        must, may = shape.list_tensor_shapes(), Shapes()
        if shape.eagle3 and shape.draft_vocab_size != shape.vocab_size:
            must["d2t"] = (shape.draft_vocab_size,)
            if conventions.t2d is not Presence.no:
                mask = must if conventions.t2d is Presence.must else may
                mask["t2d"] = (shape.vocab_size,)
        embedding = must if conventions.embedding is Presence.must else may
        embedding[EMBEDDING] = (shape.vocab_size, shape.hidden_size)
        return must, may

    def iter_output_states(
        self, features: Tensor, embeds: Tensor, position_ids: Tensor
    ) -> Iterator[Tensor]:
        """Yield inputs [S, H] of the output head at depth 0, 1, ..., while every draft is accepted.

        Args:
            features: [S, n * Ht] hidden states of the target, in the order of the fusion.
            embeds: [S + D, H] embeddings of the token after each hidden state, then of draft
                tokens.
            position_ids: [S] int64 positions of the hidden states.
        """
        fed, num_rows = self.fuse_features(features), len(features)
        own_rows = torch.eye(num_rows, dtype=torch.bool)
        keys, values, seen = list[Tensor](), list[Tensor](), list[Tensor]()
        for depth in range(len(embeds) - num_rows):
            positions = position_ids + depth
            inputs, residual = self.build_layer_inputs(fed, embeds[depth : depth + num_rows])
            keys.append(self.project_heads(inputs, LAYER, "k", positions))
            values.append(self.project_heads(inputs, LAYER, "v"))
            # The text up to a row, and the row's own draft tokens.
            seen.append(own_rows if depth else torch.ones_like(own_rows).tril())
            attended = self.attend(
                self.project_heads(inputs, LAYER, "q", positions),
                torch.cat(keys), torch.cat(values), torch.cat(seen, dim=1),
            )  # fmt: skip
            outputs = self.finish_layer(residual, attended, LAYER)
            normed = self.apply_norm(outputs, "norm") if self.shape.eagle3 else outputs
            yield normed
            fed = normed if "norm_output" in self.shape.flags else outputs

    def fuse_features(self, features: Tensor) -> Tensor:
        """Fuse [S, n * Ht] into [S, H]. EAGLE-1 reads one hidden state unchanged."""
        if not self.shape.eagle3:
            return features
        if "norm_before_fc" in self.shape.flags:
            features = self.apply_norm(features, "input_norm")
        if "fc_norm" in self.shape.flags:
            parts = features.split(self.shape.target_hidden_size, dim=-1)
            normed = [self.apply_norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            features = torch.cat(normed, dim=-1)
        return self.apply_linear(features, "fc")

    def build_layer_inputs(self, fed: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Build the attention's input [S, I] and the residual [S, H] of the first layer."""
        if not self.shape.eagle3:
            inputs = self.apply_linear(torch.cat([embeds, fed], dim=-1), "fc")
            return inputs, inputs
        states = self.apply_norm(fed, f"{LAYER}hidden_norm")
        embeds = self.apply_norm(embeds, f"{LAYER}input_layernorm")
        residual = states if "norm_before_residual" in self.shape.flags else fed
        return torch.cat([embeds, states], dim=-1), residual

    def finish_layer(self, residual: Tensor, attended: Tensor, layer: str) -> Tensor:
        """Compute a layer's output [S, H] from residual [S, H] and attention output [S, Q * d]."""
        hidden = residual + self.apply_linear(attended, f"{layer}self_attn.o_proj")
        return hidden + self.apply_mlp(
            self.apply_norm(hidden, f"{layer}post_attention_layernorm"), layer
        )

    def _select_embeddings(self, token_ids: Tensor) -> Tensor:
        """Select the embeddings [S + D, H] that the serving engine uses."""
        shape = self.shape
        wanted = (len(token_ids), shape.hidden_size)
        if self.embedding is None:
            return self.golden.require_tensor("token_embeddings", wanted)
        own = self.embedding[token_ids].float()
        dropped = self.conventions.embedding is Presence.no
        if not dropped or shape.hidden_size != shape.target_hidden_size:
            return own
        if not torch.equal(own, self.golden.require_tensor("token_embeddings", wanted)):
            raise self.make_error(EMBEDDING, "is not the target's", "the target's: it takes that")
        return own

    def _normalise_name(self, name: str) -> str:
        prefix = next((p for p in self.conventions.prefixes if name.startswith(p)), "")
        if prefix:
            return LAYER + name.removeprefix(prefix)
        # An unknown prefix must not pass for a known one.
        return f"? {name}" if name.startswith(LAYER) else name


class ServedPEagle(ServedEagle):
    """Exported P-EAGLE head."""

    def __init__(self, export: Export, golden: ReferenceLogits) -> None:
        numbers = {name.split(".")[1] for name in export.tensors if name.startswith("layers.")}
        conventions = CONVENTIONS[export.format, export.kind]
        num_layers = len(numbers | {"0"})
        shape = parse_shape(export, golden, conventions, num_layers)
        super().__init__(export, golden, conventions, shape, num_layers)
        stated, trained = export.config.get(MASK_KEY), int(golden.require_tensor(MASK_KEY, (1,)))
        if stated != trained:
            raise InputError(
                f"{export.folder / 'config.json'}: {MASK_KEY}={stated}, but the head was trained "
                f"with {trained}; export again"
            )

    def list_expected_shapes(self) -> tuple[Shapes, Shapes]:
        """Compute the shapes of required and of optional tensors."""
        must, may = super().list_expected_shapes()
        shape = self.shape
        for number in range(1, self.num_layers):
            norms = ("input_layernorm", "post_attention_layernorm")
            must |= shape.list_layer_shapes(f"layers.{number}.", norms, shape.biased)
        must[MASK_HIDDEN] = (1, 1, len(shape.layers) * shape.target_hidden_size)
        return must, may

    def iter_output_states(
        self, features: Tensor, embeds: Tensor, position_ids: Tensor
    ) -> Iterator[Tensor]:
        """Compute each row separately: its text and the rows after, as one causal sequence."""
        num_rows = len(features)
        depth = len(embeds) - num_rows
        feature = self.weights[MASK_HIDDEN].reshape(1, -1)
        if self.embedding is None:
            mask = self.golden.require_tensor("mask_embedding", (1, self.shape.hidden_size))
        else:
            mask = self.embedding[self.export.config[MASK_KEY]].float()[None]
        outputs = []
        for end in range(1, num_rows + 1):
            fed = self.fuse_features(torch.cat([features[:end], feature.expand(depth - 1, -1)]))
            read = torch.cat([embeds[:end], mask.expand(depth - 1, -1)])
            behind = position_ids[end - 1] + torch.arange(1, depth)
            positions = torch.cat([position_ids[:end], behind])
            causal = torch.ones(len(fed), len(fed), dtype=torch.bool).tril()
            inputs, states = self.build_layer_inputs(fed, read)
            for number in range(self.num_layers):
                layer = f"layers.{number}."
                if number:
                    inputs = self.apply_norm(states, f"{layer}input_layernorm")
                query, keys = (
                    self.project_heads(inputs, layer, which, positions) for which in "qk"
                )
                attended = self.attend(query, keys, self.project_heads(inputs, layer, "v"), causal)
                states = self.finish_layer(states, attended, layer)
            outputs.append(self.apply_norm(states[end - 1 :], "norm"))
        yield from torch.stack(outputs, 1)
