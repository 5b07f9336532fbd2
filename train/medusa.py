"""Trains Medusa heads: `accelerate launch train/medusa.py target.path=... data.path=...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from torch import Tensor, nn

from conf import entry
from conf.schema import Labels, MedusaConfig, MedusaRun
from data.pack import PackedDataset
from heads.medusa import MedusaHead
from heads.target import Target
from train import command
from train.losses import Batch, Sums, medusa_loss, medusa_weights, supervised_counts


class MedusaObjective(nn.Module):
    """The Medusa loss of a batch, with hidden states taken from the target on the way."""

    measures = Sums._fields[2:]

    def __init__(self, head: MedusaHead, target: Target, config: MedusaConfig) -> None:
        super().__init__()
        self.head = head
        self.target = target
        self.weights = medusa_weights(head.num_heads, config.loss_decay)
        self.teacher = target.logits if config.labels is Labels.soft else None

    def counts(self, batch: Batch) -> Tensor:
        """[K] float32 supervised tokens of each head."""
        return supervised_counts(batch, self.head.num_heads)

    def forward(self, batch: Batch) -> Sums:
        """The sums of each head over `batch`, a dict of [B, T] tensors."""
        output = self.target.read(batch["input_ids"], batch["position_ids"], batch["document_ids"])
        # DeepSpeed casts the head's parameters to bfloat16 and does not autocast.
        hidden = output.hidden_states.to(next(self.head.parameters()).dtype)
        return medusa_loss(self.head, hidden, batch, self.teacher)


def main(config: MedusaRun) -> None:
    """Trains to `out_dir/head`."""

    def build(target: Target, _train: PackedDataset) -> tuple[MedusaObjective, list[str]]:
        head = make_head(config.head, target)
        size = sum(parameter.numel() for parameter in head.parameters())
        line = f"head: {head.num_heads} Medusa heads, {size / 1e6:.1f} M parameters"
        return MedusaObjective(head, target, config.head), [line]

    command.train(config, build)


def make_head(config: MedusaConfig, target: Target) -> MedusaHead:
    """Untrained heads, or saved ones that fit the target."""
    if config.path is None:
        return MedusaHead.from_target(target, config.num_heads, config.num_layers)
    return MedusaHead.load(config.path).attach(target)


if __name__ == "__main__":
    entry.run(main, MedusaRun, "medusa")
