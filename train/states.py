"""What a batch holds of the target: taken from a pass of it."""

from heads.target import Reads, Target
from train.losses import Batch


def with_states(target: Target, batch: Batch, reads: Reads) -> Batch:
    """The batch with the target's states under the names that a feature store uses.

    Args:
        target: the frozen target.
        batch: `input_ids`, `position_ids` and `document_ids`, [B, T].
        reads: the layers that the head reads.

    Returns:
        Also `hidden_states` and `layers.{i}`, [B, T, D].
    """
    output = target.read(batch["input_ids"], batch["position_ids"], batch["document_ids"], reads)
    layers = {f"layers.{index}": states for index, states in output.layers.items()}
    return {**batch, "hidden_states": output.hidden_states, **layers}
