"""Supervised tokens of a batch: indices on the CPU, before the batch moves to the device.

They need no model, so loading computes them and the device never has to be asked.

Letters: B sequences, T tokens, S = B * T flattened tokens, P answered places, K depths, M rows of a
student, N tokens that draft.
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
from heads.target_model.model import FeatureLayers, Target, TargetOutput
from heads.target_model.remote import RemoteTarget

DOCUMENTS, SUPERVISION, STEP_TARGETS = "documents", "supervision", "unrolled"
NOISE_SEEDS = "noise_seeds"
Batch = Mapping[str, Any]
"""Tensors [B, T, ...] by name; also `Documents`, `Supervision`, `Unrolled` and B random seeds,
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
    """Rows of a student, in the order of the teacher's rows to compare them with.

    Attributes:
        output_indices: [M] int64 positions in the student's outputs.
        teacher_rows: M rows of the teacher.
    """

    output_indices: Tensor
    teacher_rows: SortedIndices


@dataclass(frozen=True)
class Supervision:
    """Places of a batch that are learnt from, by depth.

    Attributes:
        token_indices: [P] int64 among S, tokens before those in the loss mask. The teacher has one
            row per place.
        depths: K + 1 entries. Depth d reads the teacher d tokens further; depth 0 is the target.
            Their places are among S.
    """

    token_indices: Tensor
    depths: tuple[MatchedRows, ...]

    @classmethod
    def from_batch(cls, batch: Batch, num_depths: int) -> "Supervision":
        """Find the places of a batch on the CPU for depths 0 to `num_depths`."""
        before = build_supervision_mask(batch, 0).flatten()
        number = before.cumsum(0) - 1
        depths = []
        for depth in range(num_depths + 1):
            places = build_supervision_mask(batch, depth).flatten().nonzero().squeeze(1)
            answers = number[places + depth]
            depths.append(MatchedRows(places, SortedIndices(answers, answers)))
        return cls(depths[0].output_indices, tuple(depths))

    @property
    def depth_counts(self) -> Tensor:
        """[K + 1] float32, supervised tokens per depth."""
        return torch.tensor([float(len(rows.output_indices)) for rows in self.depths])


@dataclass(frozen=True)
class StepTargets:
    """Rows of tokens that draft in parallel, step by step.

    Attributes:
        anchors: [N] int64 among S, rising; tokens from which drafts start. At least one.
        row_anchors: [M] int64 among S, the token from which each row drafts.
        matched_rows: rows of all steps. Their output indices index the concatenated outputs of the
            steps.
        row_steps: [M] int64, the step of each row, from 0.
        step_order: [M] int64, the numbers of the rows, sorted by step.
        step_sizes: rows of each step.
    """

    anchors: Tensor
    row_anchors: Tensor
    matched_rows: MatchedRows
    row_steps: Tensor
    step_order: Tensor
    step_sizes: tuple[int, ...]

    @classmethod
    def from_supervision(
        cls, learnt: Supervision, drafts: Sequence[Tensor] | None = None
    ) -> "StepTargets":
        """Select the tokens from which depth 1 or more is learnt, and the rows of each depth.

        Args:
            learnt: supervision of a batch.
            drafts: [N_d] int64 per depth, rising; restricts the drafting tokens of each depth to
                these.
        """
        depths = learnt.depths[1:]
        if drafts is None:
            drafts = [torch.cat([rows.output_indices for rows in depths]).unique()] * len(depths)
        # One unsupervised row keeps every parameter in the graph.
        drafts = [own if len(own) else torch.zeros(1, dtype=torch.int64) for own in drafts]
        tokens, answers, places = [], [], []
        before = accumulate(map(len, drafts[:-1]), initial=0)
        for rows, own, start in zip(depths, drafts, before, strict=True):
            drafted = torch.isin(rows.output_indices, own)
            tokens.append(rows.output_indices[drafted])
            answers.append(rows.teacher_rows.host[drafted])
            places.append(torch.searchsorted(own, tokens[-1]) + start)
        sizes = tuple(map(len, tokens))
        steps = torch.arange(len(depths)).repeat_interleave(torch.tensor(sizes))
        sorted_answers, order = torch.cat(answers).sort(stable=True)
        return cls(
            anchors=drafts[0],
            row_anchors=torch.cat(tokens)[order],
            matched_rows=MatchedRows(
                torch.cat(places)[order], SortedIndices(sorted_answers, sorted_answers)
            ),
            row_steps=steps[order],
            step_order=order.argsort(),
            step_sizes=sizes,
        )


def build_supervision_mask(batch: Batch, depth: int) -> Tensor:
    """Mark tokens at which a depth, a Medusa head or a step of EAGLE, is trained.

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
    learnt = torch.zeros_like(loss_mask, dtype=torch.bool)
    ahead = 1 + depth
    if loss_mask.shape[1] > ahead:
        same = (documents[:, :-ahead] == documents[:, ahead:]) & (documents[:, ahead:] >= 0)
        learnt[:, :-ahead] = same & loss_mask[:, ahead:].bool()
    return learnt


def gather_labels(batch: Batch) -> Tensor:
    """[P] int64 tokens after the answered places."""
    return batch["input_ids"].flatten().roll(-1)[batch[SUPERVISION].token_indices]


def map_tensors(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Move every tensor of a batch or of a value in it. Host indices stay on the CPU."""
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


def add_supervision(batch: Batch, num_depths: int) -> Batch:
    """Add its `Documents` and the `Supervision` of depths 0 to `num_depths` to a CPU batch."""
    documents = Documents.from_ids(batch["document_ids"])
    return {**batch, DOCUMENTS: documents, SUPERVISION: Supervision.from_batch(batch, num_depths)}


def add_target_states(target: EmbeddingsAndOutputHead, batch: Batch, taps: FeatureLayers) -> Batch:
    """Add the target's hidden states to a batch, under the names of the feature store.

    Args:
        target: the frozen target. Embedding and output head suffice for a stored batch; a batch
            from serving engines also needs the final norm.
        batch: `input_ids` and `position_ids` [B, T] and documents; or stored hidden states.
        taps: the layers that the head reads.

    Returns:
        The batch with `hidden_states` and `layers.{i}` [B, T, D], or with what the store holds
        instead.
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
