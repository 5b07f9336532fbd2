"""What an adapter does to the target itself: its loss on held-out text, without and with it."""

from functools import cached_property

import torch

from data.features.layout import HIDDEN
from heads.target_model.adapter import Adapter
from heads.target_model.model import Taps, Target
from train.batch.prefetch import Dataset, on_device, stacked
from train.batch.rows import indexed
from train.batch.states import with_states
from train.loss.losses import target_loss


class HeldoutLoss:
    """The mean cross-entropy of a target on the answers of held-out sequences.

    Args:
        target: with the adapter on it.
        adapter: being trained.
        heldout: packed sequences.
        num_sequences: of them, at most.
    """

    def __init__(
        self, target: Target, adapter: Adapter, heldout: Dataset, num_sequences: int
    ) -> None:
        self.target = target
        self.adapter = adapter
        self.heldout = heldout
        self.num_sequences = num_sequences

    def __call__(self) -> dict[str, float]:
        """The loss in nats per token without and with the adapter, and the change in percent."""
        adapted = self._mean()
        return {
            "target_loss_before": self.before,
            "target_loss": adapted,
            "target_change_percent": 100 * (adapted / self.before - 1),
        }

    @cached_property
    def before(self) -> float:
        """Without the adapter."""
        with self.adapter.off():
            return self._mean()

    @torch.no_grad()
    def _mean(self) -> float:
        sums = torch.zeros(2, device=self.target.device)
        for index in range(min(len(self.heldout), self.num_sequences)):
            batch = on_device(indexed(stacked(self.heldout, [index]), 0), self.target.device)
            hidden = with_states(self.target, batch, Taps())[HIDDEN]
            sums += target_loss(self.target, hidden, batch, sums.new_ones(1)).terms[:2, 0]
        return float(sums[0] / sums[1])
