"""Compute a loss fused with the output projection, without a tensor of [tokens, vocabulary].

A loss compares a student's distributions after some tokens with a teacher's. `divergences` has the
formulas, `teachers` the distributions, and the objectives (`train.medusa`, `train.eagle`,
`train.block_objective`) the losses of heads. The teacher's rows are taken in chunks. Each chunk
computes the teacher's logits once, projects and compares all student rows that refer to it, and
carries the gradient back through the projection at once. The backward pass recomputes nothing and
returns the gradients of the forward pass.

Matrix products are faster with many rows; the float32 work between them needs memory per row. A
chunk is therefore compared in pieces, and the gradient of a piece overwrites its logits.

The gradient of a projection is as large as the projection, so it exists once: the forward pass adds
to `.grad`. The backward pass adds nothing and only triggers its hooks.

A loss is a sum and a count, never a mean. The loop divides by the count of the whole optimizer
step, so the result does not depend on how sequences fall on processes and micro batches.

Serving verifies a draft token only if all tokens before it are the target's own. A draft token
therefore weighs less for each earlier token that the target would not have chosen: such a token is
off the target's path.

Letters: S flattened tokens of a batch, P rows of the teacher, M of a student, R of a chunk, r of a
piece, m of a selection, D hidden, W columns (vocabulary), K terms (heads or steps), L metrics.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from conf.command.environment import hide_hints
from heads.target_model.embeddings_and_output_head import Projection
from train.batch.batch import (
    STEP_TARGETS,
    SUPERVISION,
    Batch,
    SortedIndices,
    StepTargets,
    gather_labels,
)
from train.loss.divergences import Distribution, Softmax

CHUNK_BYTES = 512 * 2**20
"""Bytes of a chunk's logits, the teacher's and a student's, in their own dtype. Each chunk adds to
the whole gradient of a projection: 2.1 GB in float32 for 128k columns of 4,096."""
PIECE_BYTES, MAX_PIECE_BYTES = 64 * 2**20, 260 * 2**20
"""Bytes of a float32 tensor [r, W]; about five exist at once, 1.4 GB at most. A quarter of that up
to 32,000 columns. The larger size is a little more than a quarter of a bfloat16 chunk."""
PIECE_ROWS = 528
"""Rows r that fill a GPU: four for each of 132 multiprocessors, with one block per row."""
CPU_CHUNK_BYTES, CPU_CHUNK_ROWS = 96 * 2**20, 512
"""Bytes of a chunk on a CPU, and its least rows where these take more, up to `CHUNK_BYTES`: torch
reorders the projection for every product, which takes as long as that of some hundred rows."""
CPU_PIECE_BYTES = 2 * 2**20
"""Bytes of a piece on a CPU, chosen to stay in its caches."""
TILE_BYTES = 64 * 2**20
"""Bytes of a float32 piece of a projection's gradient or of its factors."""
MAX_GRAPHS = 64
"""Criteria, teachers and dtypes of a process that Dynamo compiles; its own limit is 8."""
MIN_WEIGHT_FRACTION = 0.05
"""Least weight of a supervised draft token, as a fraction; less would teach little at full cost."""
MISUSED = (
    "a total must be run backward once and unscaled: its gradients are computed in the forward pass"
)
RowSelection = slice | Tensor
"""Rows: a slice, or [m] int64 indices."""
Compare = Callable[..., Any]
"""`apply_criterion` with its first arguments bound."""
Buffers = dict[tuple[int, torch.dtype], Tensor]


class LowRank(NamedTuple):
    """Low-rank product to add to logits.

    Attributes:
        states: [M, r], one state per student row.
        weight: [W, r], a parameter.
    """

    states: Tensor
    weight: Tensor


class Student(NamedTuple):
    """Student rows that share a projection.

    Attributes:
        hidden: [M, D] hidden states.
        projection: output projection. It gets a gradient if its weight is a trained parameter.
        teacher_rows: the M teacher rows to compare with.
        scales: [M] float32, factor of each row's loss in the total. `compute_fused_loss` reads the
            factors of a row after it has computed the row's teacher chunk, and all factors again at
            the end; `OffPathScales` thus learn from the teacher which rows weigh 0.
        added: low-rank product to add to the projection's logits.
    """

    hidden: Tensor
    projection: Projection
    teacher_rows: SortedIndices
    scales: "Tensor | OffPathScales"
    added: LowRank | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Return states and weights, in pairs, that may need gradients."""
        return self.hidden, self.projection.weight, *(self.added or ())


class Teacher(NamedTuple):
    """Distributions by row, to compare students with.

    Attributes:
        num_rows: number P of rows.
        bytes_per_row: bytes that a chunk holds per row.
        compute_chunk: function that computes once what `Criterion` needs of rows begin..end.
    """

    num_rows: int
    bytes_per_row: int
    compute_chunk: Callable[[int, int], Any]


class RowLosses(NamedTuple):
    """Losses of r student rows.

    Attributes:
        values: [1 + L, r] loss and metrics of each row.
        grad: [r, W] gradient of the logits, or None.
    """

    values: Tensor
    grad: Tensor | None


class Criterion(Protocol):
    """Loss computed row by row."""

    num_metrics: int

    def __call__(
        self, chunk: Any, chunk_rows: Tensor, student: Softmax, needs_grad: bool
    ) -> RowLosses:
        """Compare student rows with teacher rows.

        Args:
            chunk: chunk of the teacher.
            chunk_rows: [r] int64 rows of `chunk`.
            student: softmax of the student rows. All but the logits may be overwritten.
            needs_grad: whether the gradient is needed.
        """


class LossSums(NamedTuple):
    """Summed losses of a batch.

    Attributes:
        total: [] float32 sum of the terms' losses times their scales. Only the total has a
            gradient.
        terms: [2 + L, K] float32, summed over the supervised tokens of each term: the loss, the
            tokens, and L metrics.
    """

    total: Tensor
    terms: Tensor


def compute_fused_loss(
    students: Sequence[Student], teacher: Teacher, criterion: Criterion, compiled: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Sum the losses of all student rows, each times its scale.

    Effects: with gradients enabled, adds the gradients of trained projections to their `.grad`. Run
        the total backward once and unscaled; otherwise a RuntimeError follows, on a GPU a failed
        assertion that a later call reports.

    Args:
        students: rows to train. Autocast applies to their projection; everything after the logits
            is float32 (float64 for float64 weights).
        teacher: distributions, without gradients.
        criterion: loss of a row.
        compiled: whether to compile the criterion on first use.

    Returns:
        total: [] float32, with a gradient to hidden states.
        values: [1 + L, M] float32 loss and metrics per row of each student, without gradients.
    """
    inputs = [tensor for student in students for tensor in student.inputs]
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    compare = partial(_compare_compiled if compiled else apply_criterion, criterion)
    total, *values = _Fused.apply(
        students, teacher, criterion.num_metrics, compare, needs_grad, *inputs
    )
    return total, values


def apply_criterion(
    criterion: Criterion, chunk: Any, chunk_rows: Tensor, logits: Tensor, needs_grad: bool
) -> RowLosses:
    """Apply a criterion to logits [r, W]: everything between the matrix products."""
    precise = torch.promote_types(logits.dtype, torch.float32)
    return criterion(chunk, chunk_rows, Softmax.from_logits(logits.to(precise)), needs_grad)


@cache
def _compile_criterion() -> Compare:
    hide_hints()
    # Imported on use: the compiler takes as long to import as torch.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    # With few rows in the first piece, Inductor would split each row's sums into kernels of their
    # own for the pieces of all sizes.
    return torch.compile(apply_criterion, dynamic=True, options={"split_reductions": False})


def _compare_compiled(
    criterion: Criterion, chunk: Any, chunk_rows: Tensor, logits: Tensor, needs_grad: bool
) -> RowLosses:
    # Dynamo would compile a single row separately, as it takes 1 for a constant.
    compare = apply_criterion if len(logits) == 1 else _compile_criterion()
    return compare(criterion, chunk, chunk_rows, logits, needs_grad)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        students: Sequence[Student],
        teacher: Teacher,
        num_metrics: int,
        compare: Compare,
        needs_grad: bool,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        device, dtype = inputs[0].device, None
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        with torch.autocast(device.type, enabled=False):
            size = count_chunk_rows(teacher.bytes_per_row, device.type == "cpu")
            chunks = split_evenly(0, teacher.num_rows, size)
            edges = [0, *(rows.stop for rows in chunks)]
            buffers: Buffers = {}
            passes = [
                _StudentPass(student, num_metrics, needs_grad, dtype, edges, buffers)
                for student in students
            ]
            for number, (begin, end) in enumerate(pairwise(edges)):
                chunk = teacher.compute_chunk(begin, end)
                for student_pass in passes:
                    student_pass.compare_rows(partial(compare, chunk), number, begin)
                del chunk  # frees its memory before the next chunk
        ctx.state_grads = [grad for student_pass in passes for grad in student_pass.state_grads]
        ctx.weights = [weight for student in students for weight in student.inputs[1::2]]
        values = [student_pass.values for student_pass in passes]
        ctx.mark_non_differentiable(*values)
        totals = [
            (student_pass.values[0] * student_pass.student.scales[:]).sum()
            for student_pass in passes
        ]
        return torch.stack(totals).sum(), *values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Any, ...]:
        if ctx.state_grads is None:
            raise RuntimeError(MISUSED)
        torch._assert_async(grad_total == 1, MISUSED)  # does not wait for a GPU
        grads: list[Tensor | None] = []
        for grad, weight in zip(ctx.state_grads, ctx.weights, strict=True):
            grads.append(grad)
            # Not None: DDP and others wait for this gradient. Without entries, as autograd would
            # read and write all of `.grad` to add zeros.
            trained = weight.requires_grad
            grads.append(torch.zeros_like(weight, layout=torch.sparse_coo) if trained else None)
        ctx.state_grads = None
        return None, None, None, None, None, *grads


class _StudentPass:
    """Pass of one student through the teacher's chunks, which begin and end at `edges`."""

    def __init__(
        self,
        student: Student,
        num_metrics: int,
        needs_grad: bool,
        dtype: torch.dtype | None,
        edges: list[int],
        buffers: Buffers,
    ) -> None:
        self.student, self.needs_grad, self.buffers = student, needs_grad, buffers
        weight = student.projection.weight
        self.dtype, self.last_chunk = dtype or weight.dtype, len(edges) - 2
        self.projection: Projection | None = None
        self.added: LowRank | None = None
        self.bounds = torch.searchsorted(student.teacher_rows.host, torch.tensor(edges)).tolist()
        precise = torch.promote_types(weight.dtype, torch.float32)
        shape = (1 + num_metrics, len(student.hidden))
        self.values = torch.zeros(shape, dtype=precise, device=weight.device)
        pairs = list(zip(student.inputs[::2], student.inputs[1::2], strict=True))
        self.state_grads = [
            torch.zeros_like(states) if needs_grad and states.requires_grad else None
            for states, _ in pairs
        ]
        self.weight_grads = [
            _get_or_make_grad(factor) if needs_grad and factor.requires_grad else None
            for _, factor in pairs
        ]

    def compare_rows(self, compare: Compare, number: int, begin: int) -> None:
        """Compare the student rows that refer to the teacher's chunk from row `begin` on."""
        student, weight = self.student, self.student.projection.weight
        if self.projection is None:
            narrow = weight.detach().to(self.dtype)
            self.projection = student.projection._replace(weight=narrow)
            self.added = student.added and LowRank(
                *(factor.detach().to(self.dtype) for factor in student.added)
            )
        first, last = self.bounds[number : number + 2]
        rows: RowSelection = slice(first, last)
        num_rows = last - first
        has_late_scales = self.needs_grad and not isinstance(student.scales, Tensor)
        if has_late_scales and weight.device.type == "cpu":
            # Only rows with weight; on other devices this would wait.
            weighted = student.scales[rows].nonzero().squeeze(1)
            rows, num_rows = first + weighted, len(weighted)
        row_bytes = weight.shape[0] * self.dtype.itemsize
        size = count_chunk_rows(row_bytes, weight.device.type == "cpu")
        for part in split_evenly(0, num_rows, size):
            self._compare_rows(compare, select_part(rows, part), self.projection, begin)
        if number == self.last_chunk:
            self.projection = self.added = None  # frees them before the next student's cast

    def _compare_rows(
        self, compare: Compare, rows: RowSelection, projection: Projection, begin: int
    ) -> None:
        hidden = self.student.hidden[rows].detach().to(self.dtype)
        logits = projection.compute_logits(hidden, self._get_logits_buffer(len(hidden)))
        added = self._add_low_rank(rows, logits)
        chunk_rows = self.student.teacher_rows.device[rows] - begin
        for piece in split_evenly(0, len(logits), count_piece_rows(logits)):
            piece_rows = select_part(rows, piece)
            result = compare(chunk_rows[piece], logits[piece], self.needs_grad)
            self.values[:, piece_rows] = result.values
            if result.grad is not None:
                if self.added is not None:
                    states, weight = self.added
                    self._carry_back(
                        1, result.grad.to(self.dtype), piece_rows, states[piece_rows], weight
                    )
                projection_logits = logits[piece] if added is None else logits[piece] - added[piece]
                logits[piece] = projection.scale_gradient(result.grad, projection_logits)
        if self.needs_grad:
            self._carry_back(0, logits, rows, hidden, projection.weight)

    def _get_logits_buffer(self, num_rows: int) -> Tensor:
        """Return rows [R, W] of one buffer for all chunks, as first touches of memory are slow."""
        weight = self.student.projection.weight
        key = (weight.shape[0], self.dtype)
        buffer = self.buffers.get(key)
        if buffer is None or len(buffer) < num_rows:
            shape = (num_rows, weight.shape[0])
            buffer = self.buffers[key] = weight.new_empty(shape, dtype=self.dtype)
        return buffer[:num_rows]

    def _add_low_rank(self, rows: RowSelection, logits: Tensor) -> Tensor | None:
        """Add `LowRank` to logits [R, W]; return its product [R, W] if gradients need it again."""
        if self.added is None:
            return None
        states, weight = self.added
        if self.student.projection.cap is None:
            logits.addmm_(states[rows], weight.T)
            return None
        added = states[rows] @ weight.T
        logits += added
        return added

    def _carry_back(
        self, number: int, grad: Tensor, rows: RowSelection, states: Tensor, weight: Tensor
    ) -> None:
        """Carry a product's gradient [R, W] back to its states [R, .] and weight, pair `number`."""
        # The scales multiply the narrow side of each product.
        scales = self.student.scales[rows].unsqueeze(1)
        state_grad, weight_grad = self.state_grads[number], self.weight_grads[number]
        if state_grad is not None:
            state_grad[rows] = (scales * (grad @ weight)).to(state_grad)
        if weight_grad is not None:
            states = (scales * states).to(states)
            size = count_fitting_rows(TILE_BYTES, 4 * max(states.shape))
            tiles = zip(weight_grad.split(size), grad.split(size, dim=1), strict=True)
            for whole, tile in tiles:
                _add_product(whole, tile.T, states)


def _get_or_make_grad(weight: Tensor) -> Tensor:
    """Return `.grad` of a parameter, made if missing."""
    assert weight.is_leaf, "a projection is trained as a parameter"
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _add_product(whole: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `whole`, summed in the dtype of `whole`."""
    if whole.dtype == left.dtype:
        whole.addmm_(left, right)
    elif whole.is_cuda:
        whole.add_(torch.mm(left, right, out_dtype=whole.dtype))
    else:
        whole.addmm_(left.to(whole), right.to(whole))


def count_chunk_rows(row_bytes: int, cpu: bool) -> int:
    """Count the rows R of a chunk, at most, by the bytes of a row."""
    return count_fitting_rows(compute_chunk_bytes(row_bytes, cpu), row_bytes)


def compute_chunk_bytes(row_bytes: int, cpu: bool) -> int:
    """Compute the largest bytes of a chunk."""
    enough = max(CPU_CHUNK_BYTES, CPU_CHUNK_ROWS * row_bytes)
    return min(enough, CHUNK_BYTES) if cpu else CHUNK_BYTES


def compute_piece_bytes(width: int, cpu: bool) -> int:
    """Compute the bytes of a float32 tensor [r, W] of a piece, for W columns."""
    filling = min(max(PIECE_BYTES, 4 * width * PIECE_ROWS), MAX_PIECE_BYTES)
    return CPU_PIECE_BYTES if cpu else filling


def count_piece_rows(logits: Tensor) -> int:
    """Count the rows r of a piece of logits [R, W]."""
    width = logits.shape[1]
    return count_fitting_rows(compute_piece_bytes(width, logits.device.type == "cpu"), 4 * width)


def count_fitting_rows(num_bytes: int, row_bytes: int) -> int:
    """Count the rows that fit into some bytes, at least one."""
    return max(1, num_bytes // row_bytes)


def split_evenly(first: int, last: int, size: int) -> list[slice]:
    """Cut first..last into few slices of at most `size`, of equal lengths to within one.

    A slice has a single row only if there is no other row.
    """
    number = -(-(last - first) // size)
    edges = [first + (last - first) * i // number for i in range(number + 1)] if number else []
    return [slice(begin, end) for begin, end in pairwise(edges)]


def select_part(rows: RowSelection, part: slice) -> RowSelection:
    """Select a part of some rows."""
    if isinstance(rows, slice):
        return slice(rows.start + part.start, rows.start + part.stop)
    return rows[part]


def scale_off_path_rows(
    student: Student, teacher: Teacher, batch: Batch, weight: float
) -> tuple[Student, Teacher]:
    """Scale the draft tokens of a batch's `StepTargets` by how far their text is the target's own.

    Args:
        student: rows to scale.
        teacher: teacher of these rows.
        batch: indexed batch.
        weight: factor for each off-path token, see `OffPathTokens`; 1 changes nothing.

    Returns:
        The student with late scales, and a teacher that finds the off-path tokens.
    """
    if weight == 1:
        return student, teacher
    step_targets: StepTargets = batch[STEP_TARGETS]
    path = OffPathTokens(batch, weight)
    # The token after the row's own is read by the head, so it cannot mislead the draft.
    scales = OffPathScales(
        path, step_targets.row_anchors + 1, step_targets.row_steps, student.scales[:]
    )
    return student._replace(scales=scales), mark_off_path(teacher, gather_labels(batch), path)


class OffPathTokens:
    """Tokens of a batch that the target would not have chosen.

    Args:
        batch: indexed batch.
        weight: factor on a draft token's loss for each off-path token before it.

    Attributes:
        longest: largest depth of a draft token.
        is_off_path: [S] bool, whether the next token is not the target's choice. Tokens outside the
            loss mask were given to the target and count as its own.
    """

    def __init__(self, batch: Batch, weight: float) -> None:
        supervision = batch[SUPERVISION]
        self.weight, self.token_indices = weight, supervision.token_indices
        self.longest = len(supervision.depths) - 1
        num_tokens, device = batch["input_ids"].numel(), self.token_indices.device
        self.is_off_path = torch.zeros(num_tokens, dtype=torch.bool, device=device)


@dataclass(frozen=True)
class OffPathScales:
    """Weight of each student row.

    A row weighs less for each token between its anchor and its draft token that the target would
    not have said. The teacher finds these tokens chunk by chunk, so a row's weight is final once
    the chunk with its teacher row has been computed.

    Attributes:
        path: off-path tokens of the batch.
        first_between: [M] int64 among S, first index of `is_off_path` that counts for a row (entry
            i speaks of token i + 1).
        num_between: [M] int64, how many entries count.
        scales: [M] float32 weights of draft tokens on the path.
    """

    path: OffPathTokens
    first_between: Tensor
    num_between: Tensor
    scales: Tensor

    def __getitem__(self, rows: RowSelection) -> Tensor:
        """Return the [m] float32 weights of m rows."""
        return self.scales[rows] * self.compute_fractions(rows)

    def compute_fractions(self, rows: RowSelection) -> Tensor:
        """Compute the [m] float32 weight of each row relative to a row on the path; 0 if tiny."""
        first, counts = self.first_between[rows], self.num_between[rows]
        num_off_path = torch.zeros_like(counts)
        for step in range(self.path.longest):
            inside = step < counts
            num_off_path += inside & self.path.is_off_path[first + inside * step]
        fractions = self.path.weight ** num_off_path.float()
        return fractions * (fractions >= MIN_WEIGHT_FRACTION)


def mark_off_path(teacher: Teacher, labels: Tensor, path: OffPathTokens) -> Teacher:
    """Make a teacher that marks, chunk by chunk, which tokens leave the target's path.

    Args:
        teacher: source of the distributions.
        labels: [P] int64 tokens of the text.
        path: tokens to mark.
    """

    def compute_chunk(begin: int, end: int) -> Distribution:
        distribution: Distribution = teacher.compute_chunk(begin, end)
        is_off_path = distribution.top1_ids != labels[begin:end]
        path.is_off_path[path.token_indices[begin:end]] = is_off_path
        return distribution

    return Teacher(teacher.num_rows, teacher.bytes_per_row, compute_chunk)


def sum_steps(values: Tensor, student: Student, step_targets: StepTargets) -> Tensor:
    """Sum rows [1 + L, M] of all steps by step: [2 + L, K], each column as in `sum_term`."""
    steps = values.index_select(1, step_targets.step_order).split(step_targets.step_sizes, 1)
    counted = build_counted_mask(student)
    if counted is None:
        return torch.stack([sum_term(step) for step in steps], dim=1)
    masks = counted[step_targets.step_order].split(step_targets.step_sizes)
    return torch.stack(list(map(sum_term, steps, masks)), dim=1)


def sum_term(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """Sum the rows of a term: [2 + L] float32 loss, tokens and metrics.

    Args:
        values: [1 + L, M] loss and metrics of each row.
        counted: [M] bool, rows that count; None for all.
    """
    sums = (values if counted is None else values * counted).sum(1, dtype=torch.float32)
    num_rows = sums.new_full((), values.shape[1]) if counted is None else counted.sum().to(sums)
    return torch.cat([sums[:1], num_rows[None], sums[1:]])


def build_counted_mask(student: Student) -> Tensor | None:
    """Mark the rows that count, [M] bool: those with a weight above 0; None if all rows count."""
    scales = student.scales
    return scales.compute_fractions(slice(None)) > 0 if isinstance(scales, OffPathScales) else None
