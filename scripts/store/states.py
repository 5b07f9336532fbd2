"""Computes with the target what a feature store holds of each packed sequence.

Letters: B sequences, T tokens, n tokens without padding, D hidden, V vocabulary, k teacher tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.settings.target import TargetConfig
from data.features.store_format import (
    HIDDEN_STATES,
    NO_PROBABILITY,
    SCALE,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    TOKEN_FIELDS,
    StoreContents,
    quantize_states,
)
from eval.measure.engine_answers import EngineAnswerSource, open_states_pool
from eval.measure.target_answers import AnswerSource, LocalAnswerSource
from heads.layers.documents import Documents
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import FeatureLayers, Target
from heads.target_model.remote import RemoteTarget
from train.loss.topk import fast_topk

ROWS_PER_CHUNK = 1024
GROUP = 8

ComputeStates = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""From a batch of packed sequences, [B, T] tensors on the CPU, to [B, T, D] `hidden_states` and
`layers.{i}`, in any dtype."""


def make_target_states(target: Target, layers: tuple[int, ...]) -> ComputeStates:
    """Make states with the target's own forward pass."""

    def states_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        documents = Documents.from_ids(batch["document_ids"]).to_device(target.device)
        ids, positions = (
            batch[name].to(target.device, non_blocking=True)
            for name in ("input_ids", "position_ids")
        )
        output = target.encode_documents(ids, positions, documents, FeatureLayers(layers))
        return {HIDDEN_STATES: output.hidden_states} | {
            f"layers.{index}": states for index, states in output.layers.items()
        }

    return states_of


@dataclass(frozen=True)
class StatesSource:
    """The target's states of texts, and its own texts."""

    compute_states: ComputeStates
    texts: AnswerSource

    @classmethod
    def from_target(cls, target: Target, layers: tuple[int, ...]) -> "StatesSource":
        """Source from a target in this process, and its layers."""
        return cls(make_target_states(target, layers), LocalAnswerSource(target))


@contextmanager
def open_source(
    config: TargetConfig, target: EmbeddingsAndOutputHead, layers: tuple[int, ...], text: list[int]
) -> Iterator[StatesSource]:
    """Open a source of the target's states and own texts, from a pass here or from engines.

    Args:
        config: settings with the engines.
        target: complete target, or the parts that engines leave to us.
        layers: layers to read.
        text: token ids of the data, to test engines with.

    Raises:
        InputError: an engine does not write these states.
    """
    if isinstance(target, Target):
        yield StatesSource.from_target(target, layers)
        return
    assert isinstance(target, RemoteTarget)
    with open_states_pool(config, target, layers, text, target.final_norm) as pool:

        def states_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
            names, columns = batch.keys(), batch.values()
            rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
            read = list(pool.stream_sequence_states(rows))
            return {name: torch.stack([states[name] for states in read]) for name in read[0]}

        yield StatesSource(states_of, EngineAnswerSource(pool, target))


@torch.no_grad()
def compute_top_k(
    target: EmbeddingsAndOutputHead, hidden_states: Tensor, k: int, asked: Tensor
) -> dict[str, Tensor]:
    """Compute the target's likeliest tokens, where a loss will ask for them.

    Args:
        target: has the output head.
        hidden_states: [n, D], after the final norm.
        k: number of tokens, at most V.
        asked: [n] bool, on the CPU; elsewhere the teacher gives every token probability 0.

    Returns:
        [n, k] int32 ids, likeliest first, and [n, k] float16 log-probabilities over all V tokens.
    """
    shape, device = (len(hidden_states), k), hidden_states.device
    ids = torch.zeros(shape, dtype=torch.int32, device=device)
    log_probs = torch.full(shape, NO_PROBABILITY, dtype=torch.float16, device=device)
    for places in asked.nonzero().squeeze(1).to(device, non_blocking=True).split(ROWS_PER_CHUNK):
        logits = target.compute_logits(hidden_states[places]).float()
        best, which = fast_topk(logits, k, GROUP)
        ids[places] = which.int()
        log_probs[places] = (best - logits.logsumexp(-1, keepdim=True)).half()
    return {TEACHER_IDS: ids, TEACHER_LOG_PROBS: log_probs}


def build_stored_tensors(
    target: EmbeddingsAndOutputHead,
    contents: StoreContents,
    states: Mapping[str, Tensor],
    tokens: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Encode the states [n, D] of a sequence as a store holds them, on the target's device.

    Args:
        target: has the output head.
        contents: contents of the store.
        states: states by name.
        tokens: [n], result of `token_fields`.
    """
    tensors = {}
    for name in contents.state_names:
        values, scale = quantize_states(states[name].to(target.device), contents.format)
        tensors[name] = values
        if scale is not None:
            tensors[name + SCALE] = scale
    if contents.top_k:
        # Losses compare heads with the target wherever a token of the document follows.
        asked = tokens["document_ids"].roll(-1) == tokens["document_ids"]
        asked[-1] = False
        tensors |= compute_top_k(
            target, states[HIDDEN_STATES].to(target.device), contents.top_k, asked
        )
    return tensors


def select_token_fields(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ids, documents and masks [n] of a packed sequence, as the store holds them."""
    num_tokens = int((row["document_ids"] >= 0).sum())
    return {field.name: row[field.name][:num_tokens].to(field.dtype) for field in TOKEN_FIELDS}
