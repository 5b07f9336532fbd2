"""What a batch holds: tokens, documents, supervised tokens, step targets and the target's states.

Indices are computed on the CPU while a batch is loaded, before it moves to the device. They need no
model, and so the device never has to be asked. The target's hidden states come from a forward pass,
from a feature store or from serving engines.

Letters: B sequences, T tokens, S = B * T flattened tokens, P rows of the teacher, K depths, M rows
of a student, N anchors, D hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from data.features.store_format import HIDDEN_STATES, LAYER_PREFIX
from data.features.store_reader import dequantize_batch
from heads.layers.documents import Documents
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.load import RemoteTarget
from heads.target_model.model import FeatureLayers, Target, TargetOutput

DOCUMENTS, SUPERVISION, STEP_TARGETS = "documents", "supervision", "unrolled"
NOISE_SEEDS = "noise_seeds"
Batch = Mapping[str, Any]
"""Tensors [B, T, ...] by name; also `Documents`, `Supervision`, `StepTargets` and B random seeds,
under the keys above."""


@dataclass(frozen=True)
class SortedIndices:
    """Rising indices, on the host for Python and on the device for tensors.

    A dataclass, because DDP and FSDP2 move every tensor of a tuple to the device.

    Attributes:
        host, device: [n] int64, the same indices twice.
    """

    host: Tensor
    device: Tensor


@dataclass(frozen=True)
class MatchedRows:
    """Rows of a student, sorted by the teacher's rows to compare them with.

    Attributes:
        output_indices: [M] int64 indices into the student's outputs.
        teacher_rows: the teacher's row of each of the M rows.
    """

    output_indices: Tensor
    teacher_rows: SortedIndices


@dataclass(frozen=True)
class Supervision:
    """Supervised tokens of a batch, by depth.

    Attributes:
        token_indices: [P] int64 among S, the tokens before those in the loss mask. The teacher has
            one row for each of them.
        depths: K + 1 entries, one for each depth; depth 0 is the target. A row of depth d is
            compared with the teacher's row d tokens further. Output indices are among S.
    """

    token_indices: Tensor
    depths: tuple[MatchedRows, ...]

    @classmethod
    def from_batch(cls, batch: Batch, num_depths: int) -> "Supervision":
        """Find the supervised tokens of a batch on the CPU, for depths 0 to `num_depths`."""
        is_before_supervised = build_supervision_mask(batch, 0).flatten()
        teacher_row = is_before_supervised.cumsum(0) - 1
        depths = []
        for depth in range(num_depths + 1):
            output_indices = build_supervision_mask(batch, depth).flatten().nonzero().squeeze(1)
            teacher_rows = teacher_row[output_indices + depth]
            depths.append(MatchedRows(output_indices, SortedIndices(teacher_rows, teacher_rows)))
        return cls(depths[0].output_indices, tuple(depths))

    @property
    def depth_counts(self) -> Tensor:
        """Count the supervised tokens of each depth, [K + 1] float32."""
        return torch.tensor([float(len(rows.output_indices)) for rows in self.depths])


@dataclass(frozen=True)
class StepTargets:
    """What each step of a draft is compared with.

    Drafts start behind anchors; step d of an anchor is one row. Rows are sorted by teacher row.

    Attributes:
        anchors: [N] int64 among S, rising, at least one.
        row_anchors: [M] int64 among S, anchor of each row.
        matched_rows: for each row, its index in the outputs of all steps, concatenated, and its
            teacher row.
        row_steps: [M] int64, step of each row, from 0.
        step_order: [M] int64, row numbers sorted by step.
        step_sizes: number of rows of each step.
    """

    anchors: Tensor
    row_anchors: Tensor
    matched_rows: MatchedRows
    row_steps: Tensor
    step_order: Tensor
    step_sizes: tuple[int, ...]

    @classmethod
    def from_supervision(
        cls, supervision: Supervision, step_anchors: Sequence[Tensor] | None = None
    ) -> "StepTargets":
        """Select the anchors from which depth 1 or more is supervised, and the rows of each depth.

        Args:
            supervision: supervised tokens of a batch.
            step_anchors: [N_d] int64 for each depth, rising, the only anchors of that depth; None
                for every supervised token.
        """
        depths = supervision.depths[1:]
        if step_anchors is None:
            anchors = torch.cat([rows.output_indices for rows in depths]).unique()
            step_anchors = [anchors] * len(depths)
        # One unsupervised row keeps every parameter in the graph.
        step_anchors = [
            anchors if len(anchors) else torch.zeros(1, dtype=torch.int64)
            for anchors in step_anchors
        ]
        tokens, teacher_rows, output_indices = [], [], []
        starts = accumulate(map(len, step_anchors[:-1]), initial=0)
        for rows, anchors, start in zip(depths, step_anchors, starts, strict=True):
            is_anchor = torch.isin(rows.output_indices, anchors)
            tokens.append(rows.output_indices[is_anchor])
            teacher_rows.append(rows.teacher_rows.host[is_anchor])
            output_indices.append(torch.searchsorted(anchors, tokens[-1]) + start)
        sizes = tuple(map(len, tokens))
        steps = torch.arange(len(depths)).repeat_interleave(torch.tensor(sizes))
        sorted_teacher_rows, order = torch.cat(teacher_rows).sort(stable=True)
        return cls(
            anchors=step_anchors[0],
            row_anchors=torch.cat(tokens)[order],
            matched_rows=MatchedRows(
                torch.cat(output_indices)[order],
                SortedIndices(sorted_teacher_rows, sorted_teacher_rows),
            ),
            row_steps=steps[order],
            step_order=order.argsort(),
            step_sizes=sizes,
        )


def add_supervision(batch: Batch, num_depths: int) -> Batch:
    """Add `Documents` and the `Supervision` of depths 0 to `num_depths` to a batch on the CPU."""
    documents = Documents.from_ids(batch["document_ids"])
    return {**batch, DOCUMENTS: documents, SUPERVISION: Supervision.from_batch(batch, num_depths)}


def build_supervision_mask(batch: Batch, depth: int) -> Tensor:
    """Mark the tokens at which a depth, a Medusa head or a step of EAGLE, is trained.

    At token t depth d predicts x_{t+1+d}. It is trained if that token is in the loss mask and in
    the document of t. Example: in `a b c | d e`, all in the mask, d=1 is trained at `a` (on `c`)
    only.

    Args:
        batch: `loss_mask` [B, T] bool, `document_ids` [B, T] int, -1 on padding.
        depth: depth from 1. Depth 0 is the target, which predicts x_{t+1} at t.

    Returns:
        [B, T] bool, false in the last `depth` + 1 columns.
    """
    loss_mask, documents = batch["loss_mask"], batch["document_ids"]
    mask = torch.zeros_like(loss_mask, dtype=torch.bool)
    ahead = 1 + depth
    is_same = (documents[:, :-ahead] == documents[:, ahead:]) & (documents[:, ahead:] >= 0)
    mask[:, :-ahead] = is_same & loss_mask[:, ahead:].bool()
    return mask


def gather_labels(batch: Batch) -> Tensor:
    """Gather the [P] int64 text tokens that the teacher's rows predict."""
    return batch["input_ids"].flatten().roll(-1)[batch[SUPERVISION].token_indices]


def add_target_states(target: EmbeddingsAndOutputHead, batch: Batch, taps: FeatureLayers) -> Batch:
    """Add the target's hidden states to a batch, under the names of the feature store.

    Args:
        target: the frozen target. Embedding and output head suffice for a stored batch; a batch
            from serving engines also needs the final norm.
        batch: `input_ids` and `position_ids` [B, T] and documents; or stored hidden states.
        taps: layers that the head reads.

    Returns:
        The batch with `hidden_states` and `layers.{i}` [B, T, D], or with the tensors that the
        store holds instead.
    """
    if isinstance(target, RemoteTarget):
        last = batch[f"{LAYER_PREFIX}{target.num_layers}"].to(target.dtype)
        return {**batch, HIDDEN_STATES: target.final_norm(last)}
    if not isinstance(target, Target):
        return dequantize_batch(batch)
    output = target.encode_documents(
        batch["input_ids"], batch["position_ids"], batch[DOCUMENTS], taps
    )
    layers = {f"{LAYER_PREFIX}{index}": states for index, states in output.layers.items()}
    return {**batch, HIDDEN_STATES: output.hidden_states, **layers}


def collect_states(batch: Batch) -> TargetOutput:
    """Collect the hidden states [B, T, D] of a batch; the last is empty beside stored top-k."""
    layers = {
        int(name.removeprefix(LAYER_PREFIX)): states
        for name, states in batch.items()
        if name.startswith(LAYER_PREFIX)
    }
    return TargetOutput(batch.get(HIDDEN_STATES, torch.empty(0)), layers)


def map_tensors(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Map every tensor of a batch or of a value in it. Host indices stay on the CPU.

    Args:
        value: batch, tensor, tuple, mapping or dataclass; any other value is returned as it is.
        move: function of a tensor.
    """
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, SortedIndices):
        return SortedIndices(value.host, move(value.device))
    if isinstance(value, Mapping):
        return {name: map_tensors(part, move) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map_tensors(part, move) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: map_tensors(getattr(value, name), move) for name in names})
    return value
