"""Settings of `train/medusa.py`."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import not_negative, positive
from conf.settings.training import TrainRun


class Labels(Enum):
    """What a head learns to predict: the text itself, or the target's distribution."""

    hard = "hard"
    soft = "soft"


@dataclass
class MedusaConfig:
    """Medusa-1 heads (arXiv 2401.10774, section 2.1)."""

    path: str | None = None
    """A saved head to start from: folder or Hub id."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    num_heads: int = 4
    """Head k (from 1) predicts the token k + 1 positions ahead."""
    num_layers: int = 1
    """Residual blocks per head."""
    loss_decay: float = 0.8
    """lambda_k = loss_decay ** k weighs head k."""
    labels: Labels = Labels.soft
    """The paper's are hard; soft ones gave longer drafts (heads/README.md)."""
    teacher_temperature: float = 0.6
    """Divides the target's logits for soft labels. Below 1 heads learn the likeliest tokens first,
    which is what they draft (heads/README.md)."""
    off_path_weight: float = 0.2
    """With soft labels, what a draft's loss is multiplied by for each token before it in the text
    that the target would not have chosen; below 0.05 in all it is left out; 1 weighs all alike."""

    def __post_init__(self) -> None:
        positive("head", self, "num_heads", "num_layers", "loss_decay", "teacher_temperature")
        not_negative("head", self, "off_path_weight")
        if self.off_path_weight > 1:
            raise InputError(f"head.off_path_weight={self.off_path_weight}: must be from 0 to 1")


@dataclass
class MedusaRun(TrainRun):
    """`train/medusa.py`."""

    head: MedusaConfig = field(default_factory=MedusaConfig)
    out_dir: str = "outputs/medusa"
