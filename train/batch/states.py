"""Hidden states of the target for a batch: from a forward pass, or from a feature store."""

import torch

from data.features.store_format import HIDDEN_STATES, LAYER_PREFIX
from data.features.store_reader import dequantize_batch
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import FeatureLayers, Target, TargetOutput
from heads.target_model.remote import RemoteTarget
from train.batch.supervision import DOCUMENTS, Batch


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
