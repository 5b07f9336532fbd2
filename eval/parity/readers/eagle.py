"""Reader of exported EAGLE and P-EAGLE heads that computes their logits as an engine does.

Names, keys, defaults and the numbers of layers are those of the serving engines.

Sources, read November 2026: vLLM 0.33 `model_executor/models/llama_eagle.py`, `llama_eagle3.py`,
`qwen3_eagle3.py`, `v1/worker/gpu_model_runner.py`; SGLang 0.5.23 `srt/models/llama_eagle.py`,
`llama_eagle3.py`; TensorRT-LLM `_torch/models/modeling_speculative.py`; speculators 0.9
`models/eagle3`; SafeAILab/EAGLE `eagle/model/cnets.py` (EAGLE-3) and `cnets1.py` (EAGLE-1).

Letters: S rows, D depths, H hidden, Ht hidden of the target, I input of the attention, Q heads, d
head size, R compared ids.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from conf.errors import InputError
from eval.parity.decoder import (
    EMBEDDING,
    OUTPUT,
    ConfigReader,
    HeadShape,
    Presence,
    ServedLayers,
    Shapes,
    check_trained_layers,
)
from eval.parity.engine_config import RopeKeys, require_same_value
from eval.parity.export_files import Export, ReferenceLogits

LAYER = "layers.0."
FLAGS = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
IDS = "eagle_aux_hidden_state_layer_ids"
LAUNCH = "eagle3_layers_to_capture"
MASK_HIDDEN, MASK_KEY = "mask_hidden", "mask_token_id"
BIASES = {
    "attention_bias": {f"self_attn.{name}_proj" for name in "qkvo"},
    "mlp_bias": {f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""Projections of a layer by the key that gives them a bias."""
LayerIds = Literal["hidden_states", "outputs", "launch", "fixed"]
"""Where serving engines find the target layers that an EAGLE-3 head reads.

- hidden_states: `eagle_aux_hidden_state_layer_ids` in the root or in `eagle_config`; i is the input
  of layer i: index i of `output_hidden_states`.
- outputs: the same key in `eagle_config` only; i is the output of layer i: index i + 1.
- launch: `eagle3_layers_to_capture` of the launch configuration, which an export has in its README;
  i as above.
- fixed: always 2, L // 2 and L - 3 of `output_hidden_states`, whatever the file says.
"""


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
        fc_bias: whether `fc` has a bias; None if the key `bias` of config.json tells.
        biases: keys of biases that the engine's layer may have.
        qwen3: whether the engine has a layer with norms on queries and keys.
        rope: spelling of RoPE that the engine reads.
        random_head: whether a missing output head starts randomly; in SGLang, unless
            `draft_vocab_size` is null.
        needs_embedding: whether the engine needs the head's own embedding.
        takes_target_embedding: whether the engine uses the target's embedding where that is as wide
            as the head.
        t2d: whether the engine has the mask `t2d` beside `d2t`.
    """

    title: str
    architectures: tuple[str, ...]
    prefixes: tuple[str, ...] = ("midlayer.", "layers.0.")
    flags: tuple[str, ...] = ()
    writes_all_flags: bool = True
    nested: tuple[str, ...] = ()
    layers: LayerIds = "fixed"
    always_fuses: bool = False
    fc_bias: bool | None = False
    biases: tuple[str, ...] = ()
    qwen3: bool = False
    rope: RopeKeys = "both"
    random_head: bool = False
    needs_embedding: bool = False
    takes_target_embedding: bool = False
    t2d: Presence = "may"


# fmt: off
VLLM_EAGLE3 = EngineConventions(
    "vLLM",
    ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM",
     "Eagle3Qwen3ForCausalLM"),
    flags=FLAGS, layers="hidden_states", always_fuses=True, biases=tuple(BIASES), qwen3=True,
)
CONVENTIONS = {
    ("vllm", "eagle1"): EngineConventions(
        "vLLM", ("LlamaForCausalLM", "EagleLlamaForCausalLM"), ("layers.0.",), biases=tuple(BIASES),
    ),
    ("vllm", "eagle3"): VLLM_EAGLE3,
    ("speculators", "eagle3"): replace(
        VLLM_EAGLE3, architectures=("Eagle3Speculator", "Eagle3DraftModel"),
        prefixes=("layers.0.",), random_head=True, t2d="must",
    ),
    ("sglang", "eagle1"): EngineConventions(
        "SGLang", ("LlamaForCausalLMEagle",), ("layers.0.",),
        fc_bias=True, takes_target_embedding=True,
    ),
    # `fc` follows the key `bias`, but so does a bias of the attention's output.
    ("sglang", "eagle3"): EngineConventions(
        "SGLang", ("LlamaForCausalLMEagle3",), flags=("norm_output", "fc_norm", "norm_before_fc"),
        layers="outputs", random_head=True, takes_target_embedding=True,
    ),
    # `EAGLE3` is put before the name, without an `Eagle3` at its end.
    ("trtllm", "eagle3"): EngineConventions(
        "TensorRT-LLM", ("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
        flags=("norm_output", "fc_norm", "norm_before_fc"), nested=("norm_before_fc",),
        layers="launch", fc_bias=None, biases=("mlp_bias",),
        rope="old", takes_target_embedding=True, t2d="no",
    ),
    ("original", "eagle1"): EngineConventions(
        "EAGLE", ("LlamaForCausalLM",), ("layers.0.",),
        fc_bias=None, rope="two_keys", needs_embedding=True,
    ),
    ("original", "eagle3"): EngineConventions(
        "EAGLE", ("LlamaForCausalLM", "LlamaForCausalLMEagle3"), ("midlayer.",),
        writes_all_flags=False,
        rope="two_keys", random_head=True, needs_embedding=True, t2d="must",
    ),
    ("vllm", "peagle"): replace(
        VLLM_EAGLE3, flags=tuple(flag for flag in FLAGS if flag != "norm_output"),
    ),
    # vLLM drops `fc_norm` when it converts such a config.
    ("speculators", "peagle"): replace(
        VLLM_EAGLE3, architectures=("PEagleSpeculator", "PEagleDraftModel"),
        prefixes=("layers.0.",), random_head=True, t2d="must",
        flags=("norm_before_fc", "norm_before_residual"),
    ),
}
# fmt: on
FORMATS = {
    kind: tuple(name for name, head in CONVENTIONS if head == kind)
    for kind in ("eagle1", "eagle3", "peagle")
}


def build_head(export: Export, golden: ReferenceLogits) -> "ServedEagle":
    """Build the head of an export. See `eval.parity.parity_check.Reader`."""
    conventions = CONVENTIONS[export.format, export.kind]
    shape = EagleConfigReader(export, golden, conventions).parse_shape()
    served = ServedPEagle if export.kind == "peagle" else ServedEagle
    return served(export, golden, conventions, shape)


@dataclass(frozen=True, kw_only=True)
class EagleShape(HeadShape):
    """EAGLE head as a serving engine builds it.

    Attributes:
        kind: eagle1, eagle3 or peagle; the last two fuse hidden states and have their norms.
        num_layers: layers of the head.
        flags: names of `FLAGS` that are on.
        fc_bias: whether the fusion layer has a bias.
        biased: projections of the layers with a bias.
        logit_scale: factor of the logits.
    """

    kind: str
    num_layers: int = 1
    flags: frozenset[str] = frozenset()
    fc_bias: bool = False
    biased: frozenset[str] = frozenset()
    logit_scale: float = 1.0

    def list_tensor_shapes(self) -> Shapes:
        """Compute the shapes of the required tensors, apart from the vocabulary's."""
        hidden, width, num_features = self.hidden_size, self.target_hidden_size, len(self.layers)
        fuses, norms = self.kind != "eagle1", ("input_layernorm", "post_attention_layernorm")
        first, attends = ((*norms, "hidden_norm"), 2 * hidden) if fuses else (norms[1:], hidden)
        shapes = self.list_layer_shapes(LAYER, first, self.biased, attends)
        for number in range(1, self.num_layers):
            shapes |= self.list_layer_shapes(f"layers.{number}.", norms, self.biased)
        read = num_features * width if fuses else hidden + width
        shapes["fc.weight"] = (hidden, read)
        if self.fc_bias:
            shapes["fc.bias"] = (hidden,)
        if "norm_before_fc" in self.flags:
            shapes["input_norm.weight"] = (read,)
        if "fc_norm" in self.flags:
            shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(num_features)}
        if fuses:
            shapes["norm.weight"] = (hidden,)
        if self.kind == "peagle":
            shapes[MASK_HIDDEN] = (1, 1, read)
        return shapes


class EagleConfigReader(ConfigReader):
    """Reader of the config of an EAGLE head.

    Args:
        export, golden: as in `ConfigReader`.
        conventions: conventions of the engine.
    """

    def __init__(
        self, export: Export, golden: ReferenceLogits, conventions: EngineConventions
    ) -> None:
        super().__init__(export, golden, conventions.title)
        self._engine = conventions
        self._eagle = self.root.get_section("eagle_config")
        self._is_qwen3 = self.layer.values.get("model_type") == "qwen3"

    def parse_shape(self) -> EagleShape:
        """Read the shape that is built from the file.

        Raises:
            InputError: the serving engine would refuse the config, guess a value, or read another
                value than in training.
        """
        root, layer, engine = self.root, self.layer, self._engine
        fuses = self.export.kind != "eagle1"
        self._check_class()
        num_layers = self._check_num_layers()
        layer.check_allowed("layer_types", None, ["full_attention"])
        layer.check_allowed("qkv_bias", False)
        sizes = self.parse_sizes(engine.rope)
        hidden, heads = sizes["hidden_size"], sizes["num_heads"]
        if engine.rope == "two_keys" and sizes["head_dim"] * heads != hidden:
            raise layer.make_error("head_dim", f"{hidden} / {heads}: it always divides")
        width = hidden
        if self.is_speculators:
            # speculators itself builds `fc` for features as wide as the head.
            root.check_allowed("target_hidden_size", None, hidden)
        elif "target_hidden_size" in root.values:
            width = root.require_key("target_hidden_size", int, "multiplies null")
        fc_bias = engine.fc_bias
        if fc_bias is None:
            fc_bias = root.require_key("bias", bool, "guesses, and not as others do")
        else:
            # vLLM and SGLang give other projections a bias for this key.
            root.check_allowed("bias", False)
        return EagleShape(
            **sizes,
            kind=self.export.kind,
            num_layers=num_layers,
            target_hidden_size=width,
            draft_vocab_size=self._parse_draft_size() if fuses else sizes["vocab_size"],
            layers=self._parse_layers(width == hidden) if fuses else (),
            flags=self._parse_flags() if fuses else frozenset(),
            fc_bias=fc_bias,
            biased=self._parse_biased_projections(),
            qk_norm=self._is_qwen3,
            logit_scale=float(layer.values.get("logit_scale") or 1.0),
        )

    def _check_class(self) -> None:
        root, layer, engine = self.root, self.layer, self._engine
        named = root.require_key("architectures", list, "finds no class")
        if len(named) != 1 or named[0] not in engine.architectures:
            raise root.make_error("architectures", f"one of {list(engine.architectures)}")
        layer.require_key("model_type", str, "finds no class")
        layer.check_allowed("model_type", *("llama", "qwen3")[: 1 + engine.qwen3])
        if self.is_speculators:
            plan = self.check_speculators()
            methods = plan.require_key("proposal_methods", list, "refuses the folder")
            if not methods or type(methods[0].get("speculative_tokens")) is not int:
                raise plan.make_error("proposal_methods", "speculative_tokens in its first entry")
        elif self._is_qwen3 != ("Qwen3" in named[0]):
            raise root.make_error("model_type", f"the one of the architecture {named[0]}")

    def _check_num_layers(self) -> int:
        """Count the layers in the file, which only P-EAGLE heads have more than one of."""
        names = self.export.tensors if self.export.kind == "peagle" else ()
        count = len({"0"} | {name.split(".")[1] for name in names if name.startswith("layers.")})
        why = "the layers in the file"
        self.layer.check_equal("num_hidden_layers", count, why, "builds 32 layers")
        return count

    def _parse_draft_size(self) -> int:
        root, key, own_head = self.root, "draft_vocab_size", OUTPUT in self.export.tensors
        if self.export.format == "sglang" and root.values.get(key, 0) is None:
            if own_head:
                raise root.make_error(key, "a number, as null makes it drop lm_head.weight")
            return self.golden.vocab_size
        size = root.require_key(key, int, "takes the target's vocabulary or fails")
        if self._engine.random_head and not own_head:
            raise InputError(
                f"{self.export.weights}: lm_head.weight is missing: with {key}={size} "
                f"{self._engine.title} starts it at random"
            )
        return size

    def _parse_layers(self, same_width: bool) -> tuple[int, ...]:
        """Read the indices of `output_hidden_states` that the serving engine gives to the head."""
        count, where, title = self.golden.num_layers, self._engine.layers, self._engine.title
        self._eagle.check_allowed("use_aux_hidden_state", True)
        first = 0
        if where == "hidden_states":
            ids = require_same_value(
                IDS, list, "takes layers 2, L / 2 and L - 3", self.root, self._eagle
            )
            self._check_count(len(ids))
        elif where == "fixed":
            ids = [2, count // 2, count - 3]
        elif where == "outputs":
            otherwise = "takes layers 2, L / 2 and L - 3 as others count them"
            outputs = self._eagle.require_key(IDS, list, otherwise)
            self.root.check_allowed(IDS, outputs)
            self._check_count(len(outputs))
            ids, first = [i + 1 for i in outputs], 1
        else:
            file = self.export.folder / "README.md"
            text = file.read_text() if file.is_file() else ""
            launched = re.search(rf"{LAUNCH}: *\[([\d, ]+)\]", text)
            if launched is None:
                raise InputError(
                    f"{file}: {LAUNCH}: [...] is missing: {title} reads the layers from its launch "
                    "configuration, and without it takes 1, L / 2 - 1 and L - 4; export again"
                )
            ids, first = [int(number) + 1 for number in launched[1].split(",")], 1
        if not self._engine.always_fuses and same_width and len(ids) == 1:
            raise self.root.make_error(IDS, "two or more: it leaves fc out where the widths agree")
        if ids != sorted(set(ids)) or not all(first <= i < count for i in ids):
            raise InputError(
                f"{self.root.file}: {title} would read hidden states {ids}, but can only give "
                f"those of {first}..{count - 1} before the final norm, each once and in rising "
                "order"
            )
        return check_trained_layers(self.root, self.export, ids)

    def _check_count(self, num_ids: int) -> None:
        """Check the count that decides the width of `fc`, which is read apart from the ids."""
        places = (self.root, self._eagle) if self._is_qwen3 else (self._eagle,)
        counted = next((len(place.values[IDS]) for place in places if IDS in place.values), 3)
        if (self.layer.values.get("num_aux_hidden_states") or counted) != num_ids:
            raise self.layer.make_error(
                "num_aux_hidden_states", f"{num_ids}, or it counts {counted}"
            )

    def _parse_flags(self) -> frozenset[str]:
        root, engine = self.root, self._engine
        on = set()
        for flag in FLAGS:
            if flag not in engine.flags:
                if engine.writes_all_flags or flag in root.values:
                    root.check_equal(flag, False, "as it has none", "is right, but others guess")
                continue
            places = (self._eagle,) if flag in engine.nested else (root, self._eagle)
            value = require_same_value(flag, bool, "guesses, and not as others do", *places)
            if flag in engine.nested:
                root.check_allowed(flag, value)
            if value:
                on.add(flag)
        self._eagle.check_allowed("return_hidden_post_norm", "norm_output" in on)
        if {"fc_norm", "norm_before_fc"} <= on and self.export.format not in ("vllm", "sglang"):
            raise root.make_error("fc_norm", "one of fc_norm and norm_before_fc, not both")
        return frozenset(on)

    def _parse_biased_projections(self) -> frozenset[str]:
        for key in BIASES:
            if key not in self._engine.biases or self._is_qwen3:
                self.layer.check_allowed(key, False)
        return frozenset().union(*(BIASES[key] for key in BIASES if self.layer.values.get(key)))


class ServedEagle(ServedLayers):
    """Exported EAGLE head.

    Args:
        export, golden: as in `ServedHead`.
        conventions: conventions of the engine.
        shape: shape that the serving engine builds.
    """

    shape: EagleShape

    def __init__(
        self,
        export: Export,
        golden: ReferenceLogits,
        conventions: EngineConventions,
        shape: EagleShape,
    ) -> None:
        super().__init__(export, golden, conventions.title, shape)
        self.conventions = conventions
        own_head = OUTPUT in export.tensors
        tensors = self.rename_tensors(self._normalise_name)
        if not own_head and "output_head" not in golden.tensors:
            raise self.make_error(
                OUTPUT, "is missing", "the head's own: it would take the target's"
            )
        self.load_weights(
            tensors, shape.list_tensor_shapes(), "must" if own_head else "no",
            embedding="must" if conventions.needs_embedding else "may", t2d=conventions.t2d,
        )  # fmt: skip

    def describe_config(self) -> str:
        """Describe the hidden states and the flags that the serving engine reads."""
        layers = self.shape.layers
        read = f"hidden states {list(layers)}" if layers else "the last hidden state"
        return f"{read}, norm flags on: {', '.join(sorted(self.shape.flags)) or 'none'}"

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
            yield self.select_reference_ids(shape.logit_scale * self.compute_logits(states))

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
        read, seen = list[tuple[Tensor, Tensor]](), list[Tensor]()
        for depth in range(len(embeds) - num_rows):
            inputs, residual = self.build_layer_inputs(fed, embeds[depth : depth + num_rows])
            # The text up to a row, and the row's own draft tokens.
            read.append((inputs, position_ids + depth))
            seen.append(own_rows if depth else torch.ones_like(own_rows).tril())
            outputs = self.apply_layer(LAYER, residual, read, torch.cat(seen, dim=1))
            normed = outputs if self.shape.kind == "eagle1" else self.apply_norm(outputs, "norm")
            yield normed
            fed = normed if "norm_output" in self.shape.flags else outputs

    def fuse_features(self, features: Tensor) -> Tensor:
        """Fuse [S, n * Ht] into [S, H]. EAGLE-1 reads one hidden state unchanged."""
        if self.shape.kind == "eagle1":
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
        if self.shape.kind == "eagle1":
            inputs = self.apply_linear(torch.cat([embeds, fed], dim=-1), "fc")
            return inputs, inputs
        states = self.apply_norm(fed, f"{LAYER}hidden_norm")
        embeds = self.apply_norm(embeds, f"{LAYER}input_layernorm")
        residual = states if "norm_before_residual" in self.shape.flags else fed
        return torch.cat([embeds, states], dim=-1), residual

    def _select_embeddings(self, token_ids: Tensor) -> Tensor:
        """Select the embeddings [S + D, H] that the serving engine uses."""
        shape = self.shape
        wanted = (len(token_ids), shape.hidden_size)
        if self.embedding is None:
            return self.golden.require_tensor("token_embeddings", wanted)
        own = self.embedding[token_ids].float()
        dropped = self.conventions.takes_target_embedding
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

    def iter_output_states(
        self, features: Tensor, embeds: Tensor, position_ids: Tensor
    ) -> Iterator[Tensor]:
        """Compute each row separately: its text and the rows after, as one causal sequence."""
        golden, config = self.golden, self.export.config
        mask_id = int(golden.require_tensor(MASK_KEY, (1,)))
        if config.get(MASK_KEY) != mask_id:
            raise InputError(
                f"{self.export.folder / 'config.json'}: {MASK_KEY}={config.get(MASK_KEY)}, but the "
                f"head was trained with {mask_id}; export again"
            )
        num_rows = len(features)
        num_masks = len(embeds) - num_rows - 1
        feature = self.weights[MASK_HIDDEN].reshape(1, -1)
        if self.embedding is None:
            mask = golden.require_tensor("mask_embedding", (1, self.shape.hidden_size))
        else:
            mask = self.embedding[mask_id].float()[None]
        outputs = []
        for end in range(1, num_rows + 1):
            fed = self.fuse_features(torch.cat([features[:end], feature.expand(num_masks, -1)]))
            embedded = torch.cat([embeds[:end], mask.expand(num_masks, -1)])
            behind = position_ids[end - 1] + torch.arange(1, num_masks + 1)
            positions = torch.cat([position_ids[:end], behind])
            causal = torch.ones(len(fed), len(fed), dtype=torch.bool).tril()
            inputs, states = self.build_layer_inputs(fed, embedded)
            for number in range(self.shape.num_layers):
                layer = f"layers.{number}."
                if number:
                    inputs = self.apply_norm(states, f"{layer}input_layernorm")
                states = self.apply_layer(layer, states, [(inputs, positions)], causal)
            outputs.append(self.apply_norm(states[end - 1 :], "norm"))
        yield from torch.stack(outputs, 1)
