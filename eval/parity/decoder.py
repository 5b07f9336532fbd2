"""Exported head, computed from the names in its file, in plain torch and float32.

Letters: N rows, T tokens, H hidden, I input of the attention, Q heads, K key-value heads, d head
size, V vocabulary, W drafted ids, R compared ids.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from conf.errors import InputError
from eval.parity.engine_config import Rope
from eval.parity.export_files import Export, ReferenceLogits

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by their names."""


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

    @property
    def report_lines(self) -> list[str]:
        """Describe the checks, a line each."""
        raise NotImplementedError

    def iter_logits(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield logits [N, R] of the reference ids and logsumexp [N] over all ids, by depth."""
        raise NotImplementedError

    @property
    def tensor_line(self) -> str:
        """Describe the tensors on a line."""
        return (
            f"{self.export.weights.name}: {len(self.export.tensors)} tensors of "
            f"{self.export.dtype}, none missing, none unknown"
        )

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
    """

    def __init__(
        self, export: Export, golden: ReferenceLogits, title: str, shape: HeadShape
    ) -> None:
        super().__init__(export, golden, title)
        self.shape = shape

    def format_vocabulary_line(self, own_head: bool) -> str:
        """Describe the vocabulary on a line."""
        owner = "its own" if own_head else "the target's"
        sizes = f"{self.shape.draft_vocab_size} of {self.shape.vocab_size} ids"
        return f"vocabulary: drafts {sizes} with {owner} output head"

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

    def select_reference_ids(self, drafted: Tensor, target_ids: Tensor) -> Tensor:
        """Select logits [N, R] of the reference ids; -inf outside the draft vocabulary."""
        every = torch.full((len(drafted), self.shape.vocab_size), -torch.inf)
        every[:, target_ids] = drafted
        return every[:, self.golden.require_tensor("ids", (None,))]

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

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """Compute attention [N, Q * d] of queries [N, Q, d] over [T, K, d] with mask [N, T]."""
        groups = query.shape[1] // keys.shape[1]
        keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
        scores = torch.einsum("nqd,tqd->qnt", query, keys) * self.shape.head_dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("qnt,tqd->nqd", weights, values).flatten(1)

    def apply_mlp(self, inputs: Tensor, layer: str) -> Tensor:
        """Apply a layer's gated MLP: [N, H]."""
        gate = functional.silu(self.apply_linear(inputs, f"{layer}mlp.gate_proj"))
        return self.apply_linear(
            gate * self.apply_linear(inputs, f"{layer}mlp.up_proj"), f"{layer}mlp.down_proj"
        )
