"""Adds the target's states to a batch: from a pass of it, or from a feature store."""

import torch

from data.features.format import HIDDEN, LAYER
from data.features.reader import restore
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Taps, Target, TargetOutput
from heads.target_model.remote import RemoteTarget
from train.batch.supervision import DOCUMENTS, Batch


def with_states(target: EmbeddingsAndHead, batch: Batch, taps: Taps) -> Batch:
    """The batch with the target's states under the names that a feature store uses.

    Args:
        target: the frozen target; embedding and output head are enough for a batch of a store, and
            these with the final norm for a batch of serving engines.
        batch: `input_ids` and `position_ids`, [B, T], and documents; or states.
        taps: the layers that the head reads.

    Returns:
        Also `hidden_states` and `layers.{i}`, [B, T, D], or what the store has in their place.
    """
    if isinstance(target, RemoteTarget):
        last = batch[f"{LAYER}{target.num_layers}"].to(target.dtype)
        return {**batch, HIDDEN: target.final_norm(last)}
    if not isinstance(target, Target):
        return restore(batch)
    output = target.read(batch["input_ids"], batch["position_ids"], batch[DOCUMENTS], taps)
    layers = {f"{LAYER}{index}": states for index, states in output.layers.items()}
    return {**batch, HIDDEN: output.hidden_states, **layers}


def states_of(batch: Batch) -> TargetOutput:
    """The states [B, T, D] of a batch; the last ones are empty beside a teacher of tokens."""
    layers = {
        int(name.removeprefix(LAYER)): states
        for name, states in batch.items()
        if name.startswith(LAYER)
    }
    return TargetOutput(batch.get(HIDDEN, torch.empty(0)), layers)
