"""Output projection and loss in one: no tensor of [tokens, vocabulary] ever lives.

A loss compares what a student says after some tokens with what a teacher says there. Rows of
the teacher are taken in chunks; for each chunk the teacher's logits are computed once, every
student row that refers to it is projected and compared, and the gradient is carried back
through the projection at once. So the backward pass has nothing to recompute: it scales what
the forward pass has found.

Matrix products want many rows, and logits are narrow numbers; what is done between them is
float32 and wants few. So a chunk is compared in pieces, and a piece's gradient takes the place
of its logits.

Letters: P rows of the teacher, M of a student, R of a chunk, r of a piece, D hidden, W columns
(vocabulary), L measures.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from heads.projection import Projection
from train.divergences import Said

CHUNK_BYTES = 96 * 2**20
"""Of the logits of a chunk, the teacher's and those of a student, in the dtype they come in."""
PIECE_BYTES = 32 * 2**20
"""Of one [r, W] float32 tensor, of which about five live at a time."""
CPU_PIECE_BYTES = 4 * 2**20
"""The same on a CPU, which is faster where they stay in its caches."""
TILE_BYTES = 64 * 2**20
"""Of a piece of a projection's gradient before it is added to the rest."""


Judge = Callable[..., Any]
"""`judge` with its first arguments given."""


class Part(NamedTuple):
    """Student rows that share a projection.

    Attributes:
        hidden: [M, D].
        projection: gets a gradient if its weight wants one.
        rows: [M] int64, the teacher's row that each is compared with.
        scales: [M] float32, the weight of each row in the total.
    """

    hidden: Tensor
    projection: Projection
    rows: Tensor
    scales: Tensor


class Teacher(Protocol):
    """What students are compared with, by rows."""

    @property
    def num_rows(self) -> int:
        """P."""
        ...

    @property
    def row_bytes(self) -> int:
        """What `known` keeps of a row."""
        ...

    def known(self, begin: int, end: int) -> Any:
        """What `Criterion` needs of rows begin..end; computed once."""
        ...


class Verdict(NamedTuple):
    """Of r student rows: loss [r], gradient [r, W] of the logits or None, measures [L, r]."""

    loss: Tensor
    grad: Tensor | None
    measures: Tensor


class Criterion(Protocol):
    """A loss of one row at a time."""

    num_measures: int

    def __call__(self, known: Any, at: Tensor, said: Said, want_grad: bool) -> Verdict:
        """Compares rows.

        Args:
            known: of the teacher's chunk.
            at: [r] int64, rows of `known`.
            said: by the students; may be written over, all but the logits.
            want_grad: whether the gradient is needed.
        """
        ...


def judge(criterion: Criterion, known: Any, at: Tensor, logits: Tensor, want_grad: bool) -> Verdict:
    """What a criterion finds of logits; all that is done on [r, W] besides matrix products."""
    precise = torch.promote_types(logits.dtype, torch.float32)
    return criterion(known, at, Said.of(logits.to(precise)), want_grad)


compiled_judge = torch.compile(judge, dynamic=True)


def fused_linear(
    parts: Sequence[Part], teacher: Teacher, criterion: Criterion, compiled: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The sum of losses over all rows, each times its scale, and what each row gave.

    Args:
        parts: the students. Under autocast they are projected in its dtype; everything from
            the logits on is float32 (float64 for float64 weights).
        teacher: without gradients.
        criterion: the loss.
        compiled: compile it on first use.

    Returns:
        total: [] float32 with a gradient to hidden states and, where trained, projections.
        found: per part [1 + L, M] float32, loss and measures of each row, without one.
    """
    inputs = [tensor for part in parts for tensor in (part.hidden, part.projection.weight)]
    want_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    judged = partial(compiled_judge if compiled else judge, criterion)
    total, *found = _Fused.apply(parts, teacher, criterion.num_measures, judged, want_grad, *inputs)
    return total, found


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        parts: Sequence[Part],
        teacher: Teacher,
        num_measures: int,
        judged: Judge,
        want_grad: bool,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        dtype = _autocast_dtype(inputs[0].device)
        with torch.autocast(inputs[0].device.type, enabled=False):
            size = rows_of(CHUNK_BYTES, teacher.row_bytes)
            edges = [*range(0, teacher.num_rows, size), teacher.num_rows]
            students = [_Student(part, num_measures, want_grad, dtype, edges) for part in parts]
            for chunk, (begin, end) in enumerate(pairwise(edges)):
                known = teacher.known(begin, end)
                for student in students:
                    student.compare(partial(judged, known), chunk, begin)
                del known  # before the next one is made
        ctx.grads = [grad for student in students for grad in student.grads]
        found = [student.found for student in students]
        ctx.mark_non_differentiable(*found)
        totals = [(s.found[0] * s.part.scales).sum() for s in students]
        return torch.stack(totals).sum(), *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Any, ...]:
        assert ctx.grads is not None, "one backward pass per loss"
        # In place, because the gradient of a projection is as large as itself.
        grads = [None if grad is None else grad.mul_(grad_total) for grad in ctx.grads]
        ctx.grads = None
        return None, None, None, None, None, *grads


class _Student:
    """One part on its way through the chunks, which begin and end at `edges`."""

    def __init__(
        self,
        part: Part,
        num_measures: int,
        want_grad: bool,
        dtype: torch.dtype | None,
        edges: list[int],
    ) -> None:
        self.part, self.want_grad = part, want_grad
        weight = part.projection.weight
        self.projection = part.projection._replace(weight=weight.detach().to(dtype or weight.dtype))
        rows, self.order = torch.sort(part.rows, stable=True)
        self.bounds = torch.searchsorted(rows, rows.new_tensor(edges)).tolist()
        precise = torch.promote_types(weight.dtype, torch.float32)
        self.found = torch.zeros(
            1 + num_measures, len(part.rows), dtype=precise, device=weight.device
        )
        self.hidden_grad = torch.zeros_like(part.hidden) if self._wants(part.hidden) else None
        wanted = self._wants(weight)
        self.weight_grad = torch.zeros_like(weight, dtype=precise) if wanted else None

    def _wants(self, tensor: Tensor) -> bool:
        return self.want_grad and tensor.requires_grad

    @property
    def grads(self) -> tuple[Tensor | None, Tensor | None]:
        """Of hidden states and projection, in their dtypes."""
        if self.weight_grad is None:
            return self.hidden_grad, None
        return self.hidden_grad, self.weight_grad.to(self.part.projection.weight.dtype)

    def compare(self, judged: Judge, chunk: int, begin: int) -> None:
        """Compares the rows that refer to a chunk of the teacher, which begins at a row."""
        first, last = self.bounds[chunk : chunk + 2]
        weight = self.projection.weight
        size = rows_of(CHUNK_BYTES, weight.shape[0] * weight.element_size())
        for mine in self.order[first:last].split(size):
            if len(mine):
                self._rows(judged, mine, self.part.rows[mine] - begin)

    def _rows(self, judged: Judge, mine: Tensor, at: Tensor) -> None:
        hidden = self.part.hidden[mine].detach().to(self.projection.weight.dtype)
        logits = self.projection.logits(hidden)
        size = piece_rows(logits)
        for piece in zip(mine.split(size), at.split(size), logits.split(size), strict=True):
            self._piece(judged, *piece)
        if self.want_grad:
            self._carry_back(logits, mine, hidden)

    def _piece(self, judged: Judge, mine: Tensor, at: Tensor, logits: Tensor) -> None:
        """Compares r rows; their gradient takes the place of the logits."""
        verdict = judged(at, logits, self.want_grad)
        self.found[0, mine] = verdict.loss
        self.found[1:, mine] = verdict.measures
        if verdict.grad is not None:
            logits.copy_(self.projection.before(verdict.grad, logits))

    def _carry_back(self, grad: Tensor, mine: Tensor, hidden: Tensor) -> None:
        # The scales go to the narrow side of each product.
        scales = self.part.scales[mine].unsqueeze(1)
        if self.hidden_grad is not None:
            self.hidden_grad[mine] = (scales * (grad @ self.projection.weight)).to(self.hidden_grad)
        if self.weight_grad is not None:
            hidden = (scales * hidden).to(hidden)
            size = rows_of(TILE_BYTES, 4 * hidden.shape[1])
            tiles = zip(self.weight_grad.split(size), grad.split(size, dim=1), strict=True)
            for whole, tile in tiles:
                _add_product(whole, tile.T, hidden)


def _add_product(whole: Tensor, left: Tensor, right: Tensor) -> None:
    if whole.dtype == left.dtype:
        whole.addmm_(left, right)
    else:
        whole.add_(left @ right)


def rows_of(num_bytes: int, row_bytes: int) -> int:
    """How many rows fit, and at least one."""
    return max(1, num_bytes // row_bytes)


def piece_rows(logits: Tensor) -> int:
    """Rows of a piece of logits [R, W]."""
    num_bytes = CPU_PIECE_BYTES if logits.device.type == "cpu" else PIECE_BYTES
    return rows_of(num_bytes, 4 * logits.shape[1])


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None
