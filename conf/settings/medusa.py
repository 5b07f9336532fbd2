"""Settings of Medusa heads and their training, with a frozen or a trained target."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import check_below_one, check_fraction, check_not_negative, check_positive
from conf.settings.training import FrozenTargetRun, TrainConfig, TrainRun


class Labels(Enum):
    """What a head learns: the text (`hard`), or the target's distribution (`soft`)."""

    hard = "hard"
    soft = "soft"


@dataclass
class MedusaConfig:
    """Medusa-1 heads (arXiv 2401.10774, section 2.1)."""

    path: str | None = None
    """Saved head to start from: folder or Hub id."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    num_heads: int = 4
    """Number of heads. Head k (from 1) predicts the token k + 1 positions ahead."""
    num_layers: int = 1
    """Residual blocks per head."""
    loss_decay: float = 0.8
    """Head k has weight lambda_k = loss_decay ** k."""
    labels: Labels = Labels.soft
    """What heads learn: the text (`hard`, the paper), or the target's distribution (`soft`, which
    gave longer drafts: docs/results/training.md)."""
    teacher_temperature: float = 0.6
    """Divides the target's logits for soft labels. Below 1, heads favour the likeliest tokens,
    which they draft (docs/results/training.md)."""
    off_path_weight: float = 0.2
    """With soft labels: factor on a draft token's loss for each earlier text token of the draft
    that the target would not have chosen. Products below 0.05 count as 0. Set 1 to weigh all
    alike."""

    def __post_init__(self) -> None:
        check_positive("head", self, "num_heads", "num_layers", "loss_decay", "teacher_temperature")
        check_fraction("head", self, "off_path_weight")


@dataclass
class MedusaRun(FrozenTargetRun):
    """`train/medusa.py`."""

    head: MedusaConfig = field(default_factory=MedusaConfig)
    out_dir: str = "outputs/medusa"


class TargetLoss(Enum):
    """Loss that keeps the target good while its adapter is trained."""

    text = "text"
    """Cross-entropy on the data. The target learns to write like the data."""
    self = "self"
    """KL to the target without its adapter. The target stays as it was, on any data."""


class HeadsSchedule(Enum):
    """Weight of the heads' losses over the joint steps."""

    constant = "constant"
    sine = "sine"
    """heads_weight * sin(pi / 2 * step / steps)."""


@dataclass
class AdapterConfig:
    """The LoRA adapter (arXiv 2106.09685) that the target learns."""

    rank: int = 32
    """Rank of the two matrices beside each linear layer."""
    alpha: int = 16
    """Scales the adapter's output by alpha / rank."""
    dropout: float = 0.05
    """Dropout on the adapter's input."""
    modules: list[str] | None = None
    """Names of linear layers, e.g. [q_proj,v_proj]. Unset: all linear layers of the decoder."""
    recompute_layers: bool = True
    """Keep only the input of each target layer and recompute the layer for gradients: a fifth of
    the memory, a third more time per forward and backward pass, the same result."""

    def __post_init__(self) -> None:
        check_positive("adapter", self, "rank", "alpha")
        check_below_one("adapter", self, "dropout")
        if self.modules is not None and not self.modules:
            raise InputError(
                "adapter.modules=[]: no layer to adapt; name one, e.g. adapter.modules=[q_proj], "
                "or leave it unset"
            )


@dataclass
class JointConfig:
    """Joint training of heads and adapter (arXiv 2401.10774, section 2.2.2)."""

    heads_only_steps: int | None = None
    """First optimizer steps, which train only the heads. Unset: half of `train.max_steps` for new
    heads, 0 for `head.path`."""
    target_loss: TargetLoss = TargetLoss.self
    heads_weight: float = 0.2
    """Weight of the heads' losses beside the target's loss (lambda_0)."""
    heads_schedule: HeadsSchedule = HeadsSchedule.constant
    heads_lr_multiplier: float = 4.0
    """Learning rate of the heads divided by `train.learning_rate`, which is the adapter's."""

    def __post_init__(self) -> None:
        check_positive("joint", self, "heads_weight", "heads_lr_multiplier")
        check_not_negative("joint", self, "heads_only_steps")


@dataclass
class Medusa2Run(TrainRun):
    """`train/medusa2.py`."""

    head: MedusaConfig = field(default_factory=lambda: MedusaConfig(labels=Labels.hard))
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    joint: JointConfig = field(default_factory=JointConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(learning_rate=2.5e-4))
    out_dir: str = "outputs/medusa2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.max_steps is not None:
            self.settle_joint_steps(self.train.max_steps)
        if self.target.adapter is not None:
            raise InputError(
                f"target.adapter={self.target.adapter}: this command trains a new adapter; merge "
                "yours first with scripts/merge_adapter.py"
            )
        if self.target.device_map is not None:
            raise InputError(
                f"target.device_map={self.target.device_map}: a target that is trained must lie on "
                "one device; leave target.device_map unset"
            )

    def settle_joint_steps(self, num_steps: int) -> None:
        """Fill in an unset `joint.heads_only_steps`, once the number of steps is known.

        Raises:
            InputError: no joint step is left.
        """
        if self.joint.heads_only_steps is None:
            self.joint.heads_only_steps = num_steps // 2 if self.head.path is None else 0
        if self.joint.heads_only_steps >= num_steps:
            raise InputError(
                f"joint.heads_only_steps={self.joint.heads_only_steps}: leaves no joint step of "
                f"train.max_steps={num_steps}; set it lower, or use train/medusa.py"
            )
