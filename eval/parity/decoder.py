"""Plain decoder of exported heads, by the names in their files, in torch and float32.

Letters: N rows, T tokens, H hidden, I input of the attention, Q heads, K key-value heads, d head
size, V vocabulary, W drafted ids, R compared ids.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from conf.errors import InputError
from eval.parity.engine_config import EngineConfig, Rope, RopeKeys, parse_rope
from eval.parity.export_files import GGUF, Export, ReferenceLogits

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by their names."""
Presence = Literal["must", "may", "no"]
"""Whether a serving engine needs, allows or lacks a tensor."""
SizeKeys = dict[str, tuple[str, type, str]]
"""Keys of a config by fields of `HeadShape`: name, type, and what the engine does without it."""
SIZE_KEYS: SizeKeys = {
    "hidden_size": ("hidden_size", int, "takes 4096"),
    "intermediate_size": ("intermediate_size", int, "takes 11008"),
    "num_heads": ("num_attention_heads", int, "takes 32"),
    "num_kv_heads": ("num_key_value_heads", int, "takes num_attention_heads"),
    "head_dim": ("head_dim", int, "divides hidden_size by num_attention_heads"),
    "eps": ("rms_norm_eps", float, "takes 1e-6"),
}


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes that a serving engine builds from `config.json`.

    Attributes:
        hidden_size: hidden size H of the head.
        intermediate_size: size of the MLP.
        num_heads: number Q of query heads.
        num_kv_heads: number K of key-value heads.
        head_dim: size d of a head.
        target_hidden_size: hidden size of the target.
        vocab_size: size V of the target's vocabulary.
        draft_vocab_size: number W of ids that the head drafts.
        eps: epsilon of every norm.
        layers: hidden states that the head reads, as indices of `output_hidden_states`.
        qk_norm: whether queries and keys are normalised.
        rope: RoPE of queries and keys.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    eps: float
    layers: tuple[int, ...]
    qk_norm: bool
    rope: Rope

    def list_layer_shapes(
        self,
        layer: str,
        norms: Collection[str],
        biased: Collection[str] = (),
        input_size: int | None = None,
    ) -> Shapes:
        """Compute the shapes of a decoder layer's tensors.

        Args:
            layer: prefix of the names of the tensors.
            norms: names of the norms over H units.
            biased: names of the projections with a bias.
            input_size: size I of the attention's input; H by default.
        """
        hidden, mlp, read = self.hidden_size, self.intermediate_size, input_size or self.hidden_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = {
            "self_attn.q_proj": (heads, read),
            "self_attn.k_proj": (kv_heads, read),
            "self_attn.v_proj": (kv_heads, read),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        sizes = dict.fromkeys(norms, hidden)
        if self.qk_norm:
            sizes |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        return {
            **{f"{layer}{name}.weight": shape for name, shape in projections.items()},
            **{f"{layer}{name}.bias": projections[name][:1] for name in biased},
            **{f"{layer}{name}.weight": (size,) for name, size in sizes.items()},
        }


class ConfigReader:
    """Reader of the keys of `config.json` that decide what the serving engine computes.

    Args:
        export: the serving engine's files.
        golden: reference values, with sizes of the target.
        title: name of the serving engine in messages.

    Attributes:
        root, layer: config, and its keys of decoder layers, which speculators has in a section.
    """

    size_keys: SizeKeys = SIZE_KEYS
    vocab_default, positions_default = "takes 32000", "stops at 2048 positions"

    def __init__(self, export: Export, golden: ReferenceLogits, title: str) -> None:
        self.export, self.golden = export, golden
        self.is_speculators = export.format == "speculators"
        self.root = EngineConfig(export.config, export.folder / "config.json", title)
        self.layer = (
            self.root.get_section("transformer_layer_config") if self.is_speculators else self.root
        )

    def parse_sizes(self, rope: RopeKeys) -> dict[str, Any]:
        """Read sizes and RoPE, as fields of `HeadShape`, and check the layer's other keys.

        Raises:
            InputError: the serving engine would guess a value, or compute with another.
        """
        layer, golden = self.layer, self.golden
        layer.check_equal("vocab_size", golden.vocab_size, "the target's", self.vocab_default)
        layer.check_allowed("hidden_act", "silu")
        layer.check_allowed("tie_word_embeddings", False)
        longest = golden.max_position_embeddings
        if layer.require_key("max_position_embeddings", int, self.positions_default) < longest:
            raise layer.make_error("max_position_embeddings", f"the target's {longest} or more")
        sizes = {name: layer.require_key(*row) for name, row in self.size_keys.items()}
        rotation = parse_rope(layer, sizes["head_dim"], rope)
        return {**sizes, "vocab_size": golden.vocab_size, "rope": rotation}

    def check_speculators(self) -> EngineConfig:
        """Check the keys without which speculators and vLLM refuse the folder; return their plan.

        Raises:
            InputError: a key is missing, or names another kind of head.
        """
        kind, why, refused = self.export.kind, "the kind of the head", "refuses the folder"
        self.root.check_equal("speculators_model_type", kind, why, refused)
        plan = self.root.get_section("speculators_config")
        plan.check_equal("algorithm", kind, why, refused)
        plan.get_section("verifier").require_key("name_or_path", str, refused)
        return plan


def check_trained_layers(config: EngineConfig, export: Export, ids: list[int]) -> tuple[int, ...]:
    """Check that an engine reads the hidden states that the head was trained on; return them.

    Raises:
        InputError: `headsmith.json` names other hidden states.
    """
    if export.layers not in (None, ids):
        raise InputError(
            f"{config.file}: {config.engine} would read hidden states {ids}, but the head was "
            f"trained on {export.layers} (headsmith.json: export.layers), as engines count layers "
            "differently; export again"
        )
    return tuple(ids)


class ServedHead:
    """Exported head: checks of its tensors, and projections by name.

    Args:
        export: the serving engine's files.
        golden: sizes of the target.
        title: name of the serving engine in messages.

    Attributes:
        weights: tensors by the names of the computation; set by each head after its checks.
    """

    def __init__(self, export: Export, golden: ReferenceLogits, title: str) -> None:
        self.export, self.golden, self.title = export, golden, title
        self.weights: dict[str, Tensor] = {}

    def describe_config(self) -> str:
        """Describe what the serving engine reads by its config."""
        raise NotImplementedError

    @property
    def report_lines(self) -> list[str]:
        """Describe the checks, a line each."""
        export, file = self.export, self.export.weights
        config = file.name if file.suffix == GGUF else "config.json"
        return [
            f"{config}: {self.title} reads {self.describe_config()}",
            f"{file.name}: {len(export.tensors)} tensors of {export.dtype}, none missing, none "
            "unknown",
        ]

    def iter_logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield logits [N, R] of the reference ids and logsumexp [N] over all ids, by depth."""
        raise NotImplementedError

    def make_error(self, name: str, found: str, needed: str) -> InputError:
        """Make an error about a tensor."""
        return InputError(f"{self.export.weights}: {name} {found}: {self.title} needs {needed}")

    def rename_tensors(self, rename: Callable[[str], str]) -> dict[str, Tensor]:
        """Rename the tensors of the export.

        Raises:
            InputError: two tensors get one name.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.export.tensors.items():
            new = rename(name)
            if new in tensors:
                raise self.make_error(name, "appears under two names", "one of them")
            tensors[new] = tensor
        return tensors

    def check_tensors(self, tensors: dict[str, Tensor], must: Shapes, may: Shapes) -> None:
        """Check names, shapes and integer types of tensors.

        Args:
            tensors: tensors to check.
            must: shapes of required tensors.
            may: shapes of optional tensors.

        Raises:
            InputError: naming the tensor.
        """
        missing = sorted(set(must) - set(tensors))
        extra = sorted(set(tensors) - set(must) - set(may))
        if missing or extra:
            raise InputError(
                f"{self.export.weights}: missing tensors: {missing}; tensors that {self.title} "
                f"does not read: {extra}; export again"
            )
        for name, tensor in tensors.items():
            shape = (must | may)[name]
            if tuple(tensor.shape) != shape:
                raise self.make_error(name, f"is {list(tensor.shape)}", f"{list(shape)}")
            dtypes = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool,)}.get(name)
            if tensor.dtype not in dtypes if dtypes else not tensor.is_floating_point():
                raise self.make_error(name, f"is of {tensor.dtype}", f"{dtypes or 'floats'}")

    def apply_linear(self, inputs: Tensor, name: str) -> Tensor:
        """Apply a projection, with its bias if it has one."""
        bias = self.weights.get(f"{name}.bias")
        return functional.linear(
            inputs, self.weights[f"{name}.weight"].float(), None if bias is None else bias.float()
        )


class ServedLayers(ServedHead):
    """Head with decoder layers like a target's.

    Args:
        export, golden, title: as in `ServedHead`.
        shape: sizes that the serving engine builds.

    Attributes:
        embedding: the head's own embedding, not converted, as few of its many rows are needed.
        target_ids: [W] int64 target ids of the output head's rows.
    """

    def __init__(
        self, export: Export, golden: ReferenceLogits, title: str, shape: HeadShape
    ) -> None:
        super().__init__(export, golden, title)
        self.shape = shape
        self.embedding: Tensor | None = None
        self.target_ids = torch.empty(0, dtype=torch.int64)

    @property
    def report_lines(self) -> list[str]:
        """Describe the checks, a line each."""
        owner = "its own" if OUTPUT in self.weights else "the target's"
        sizes = f"{self.shape.draft_vocab_size} of {self.shape.vocab_size} ids"
        return [
            *super().report_lines,
            f"vocabulary: drafts {sizes} with {owner} output head",
        ]

    def load_weights(
        self, tensors: dict[str, Tensor], must: Shapes, output: Presence, *,
        embedding: Presence = "may", t2d: Presence = "may",
    ) -> None:  # fmt: skip
        """Check tensors, and convert those of the computation to float32.

        Args:
            tensors: tensors by the names of the computation.
            must: shapes of required tensors, apart from the vocabulary's.
            output: whether the head has an output head.
            embedding: whether the head has its own embedding.
            t2d: whether the head has the mask `t2d` beside `d2t`.

        Raises:
            InputError: naming the tensor.
        """
        shape, may = self.shape, Shapes()
        by_presence = {"must": must, "may": may, "no": Shapes()}
        by_presence[output][OUTPUT] = (shape.draft_vocab_size, shape.hidden_size)
        by_presence[embedding][EMBEDDING] = (shape.vocab_size, shape.hidden_size)
        if shape.draft_vocab_size != shape.vocab_size:
            must["d2t"] = (shape.draft_vocab_size,)
            by_presence[t2d]["t2d"] = (shape.vocab_size,)
        self.check_tensors(tensors, must, may)
        self.target_ids = self.compute_target_ids()
        self.embedding = tensors.get(EMBEDDING)
        self.weights = {
            name: tensor.float()
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and name != EMBEDDING
        }

    def compute_target_ids(self) -> Tensor:
        """Compute the target ids [W] of the output head's rows.

        Raises:
            InputError: `d2t` holds no offsets, or `t2d` marks other ids.
        """
        draft_ids = torch.arange(self.shape.draft_vocab_size)
        offsets, marked = self.export.tensors.get("d2t"), self.export.tensors.get("t2d")
        if offsets is None:
            return draft_ids

        def find_fault(ids: Tensor) -> str | None:
            if ids.min() < 0 or ids.max() >= self.shape.vocab_size:
                return f"leads to ids of {int(ids.min())}..{int(ids.max())}"
            if len(ids.unique()) != len(ids):
                return "gives the same id twice"
            if marked is not None and not (marked[ids].all() and marked.sum() == len(ids)):
                return "leads to other ids than t2d marks"
            return None

        ids = draft_ids + offsets.long()
        if (fault := find_fault(ids)) is None:
            return ids
        if find_fault(offsets.long()) is None:
            fault += ": it holds target ids"
        raise self.make_error("d2t", fault, "offsets: target id minus draft id")

    def compute_logits(self, states: Tensor) -> Tensor:
        """Compute logits [N, W] of states [N, H]; -inf where the target's output head is unknown.

        The reference values hold the target's rows of the compared ids only.
        """
        if OUTPUT in self.weights:
            return self.apply_linear(states, "lm_head")
        ids = self.golden.require_tensor("ids", (None,))
        rows = self.golden.require_tensor("output_head", (len(ids), self.shape.hidden_size))
        logits = torch.full((len(states), self.shape.vocab_size), -torch.inf)
        logits[:, ids] = states @ rows.T
        return logits

    def select_reference_ids(self, drafted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Select logits [N, R] of the reference ids from those of the drafted ids, [N, W].

        Ids that are not drafted have -inf. Also returns logsumexp [N] over all ids if these are
        known.
        """
        every = torch.full((len(drafted), self.shape.vocab_size), -torch.inf)
        every[:, self.target_ids] = drafted
        total = drafted.logsumexp(-1) if OUTPUT in self.weights else None
        return every[:, self.golden.require_tensor("ids", (None,))], total

    def apply_norm(self, states: Tensor, name: str) -> Tensor:
        """Apply an RMS norm."""
        square = states.square().mean(-1, keepdim=True)
        scaled = states * torch.rsqrt(square + self.shape.eps)
        return scaled * self.weights[f"{name}.weight"]

    def project_heads(
        self, inputs: Tensor, layer: str, which: str, position_ids: Tensor | None = None
    ) -> Tensor:
        """Compute queries, keys or values of a layer, rotated if positions are given.

        Args:
            inputs: [N, I] inputs of the attention.
            layer: prefix of the names of the layer's tensors.
            which: q, k or v.
            position_ids: [N] int64 positions of the rows.

        Returns:
            [N, Q, d] queries, or [N, K, d] keys or values.
        """
        name = f"{layer}self_attn.{which}"
        states = self.apply_linear(inputs, f"{name}_proj").unflatten(-1, (-1, self.shape.head_dim))
        if self.shape.qk_norm and which != "v":
            states = self.apply_norm(states, f"{name}_norm")
        if position_ids is None:
            return states
        return self.shape.rope.rotate_states(states, position_ids)

    def apply_layer(
        self, layer: str, residual: Tensor, read: Sequence[tuple[Tensor, Tensor]], seen: Tensor
    ) -> Tensor:
        """Compute a decoder layer's output [N, H].

        Args:
            layer: prefix of the names of the layer's tensors.
            residual: [N, H] states to which the attention is added.
            read: inputs [T_i, I] of the attention and their positions [T_i] int64, part by part;
                the last part are the N rows themselves.
            seen: [N, T] bool, tokens of all parts that each row sees.
        """
        *before, (inputs, position_ids) = read

        def attend(rows: Tensor) -> Tensor:
            parts = [*before, (rows, position_ids)]
            keys = torch.cat([self.project_heads(part, layer, "k", at) for part, at in parts])
            values = torch.cat([self.project_heads(part, layer, "v") for part, _ in parts])
            query = self.project_heads(rows, layer, "q", position_ids)
            groups = query.shape[1] // keys.shape[1]
            keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
            scores = torch.einsum("nqd,tqd->qnt", query, keys) * self.shape.head_dim**-0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            attended = torch.einsum("qnt,tqd->nqd", weights, values).flatten(1)
            return self.apply_linear(attended, f"{layer}self_attn.o_proj")

        def apply_mlp(rows: Tensor) -> Tensor:
            gate = functional.silu(self.apply_linear(rows, f"{layer}mlp.gate_proj"))
            return self.apply_linear(
                gate * self.apply_linear(rows, f"{layer}mlp.up_proj"), f"{layer}mlp.down_proj"
            )

        states = residual + self.apply_sublayer(f"{layer}attention", inputs, attend)
        normed = self.apply_norm(states, f"{layer}post_attention_layernorm")
        return states + self.apply_sublayer(f"{layer}mlp", normed, apply_mlp)

    def apply_sublayer(
        self, name: str, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply a sublayer to its inputs; heads may wrap it."""
        del name
        return sublayer(inputs)
