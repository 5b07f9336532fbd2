"""Settings of Medusa heads and of their training, with and without the target."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import below_one, not_negative, positive, share
from conf.settings.training import FrozenTargetRun, TrainConfig, TrainRun


class Labels(Enum):
    """Lessons for a head: the text itself, or the target's distribution."""

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
        share("head", self, "off_path_weight")


@dataclass
class MedusaRun(FrozenTargetRun):
    """`train/medusa.py`."""

    head: MedusaConfig = field(default_factory=MedusaConfig)
    out_dir: str = "outputs/medusa"


class TargetLoss(Enum):
    """Losses that keep the target good while it is adapted."""

    text = "text"
    """Cross-entropy on the data, which makes the target say what the data says."""
    self = "self"
    """KL from what the target says without its adapter: it stays what it was, on any data."""


class HeadsSchedule(Enum):
    """Schedules of the weight of the heads' losses over the joint steps."""

    constant = "constant"
    sine = "sine"
    """heads_weight * sin(pi / 2 * step / steps)."""


@dataclass
class AdapterConfig:
    """The LoRA (arXiv 2106.09685) that the target gets."""

    rank: int = 32
    """Of the two matrices beside each linear layer."""
    alpha: int = 16
    """What the adapter adds is scaled by alpha / rank."""
    dropout: float = 0.05
    """Of what the adapter reads."""
    modules: list[str] | None = None
    """Names of linear layers, e.g. [q_proj,v_proj]; unset takes all of the decoder."""
    recompute_layers: bool = True
    """Of each layer of the target keep the input alone, and run it again for gradients: the same
    result with a fifth of the memory, at a third more time of a pass there and back."""

    def __post_init__(self) -> None:
        positive("adapter", self, "rank", "alpha")
        below_one("adapter", self, "dropout")
        if self.modules is not None and not self.modules:
            raise InputError("adapter.modules=[]: name a linear layer, or leave it unset")


@dataclass
class JointConfig:
    """The joint training of heads and adapter (arXiv 2401.10774, section 2.2.2)."""

    heads_only_steps: int | None = None
    """Optimizer steps, the first ones, that train the heads alone; unset takes half of
    `train.max_steps` for untrained heads, none for those of `head.path`."""
    target_loss: TargetLoss = TargetLoss.self
    heads_weight: float = 0.2
    """lambda_0, the weight of the heads' losses beside the target's own."""
    heads_schedule: HeadsSchedule = HeadsSchedule.constant
    heads_lr_multiplier: float = 4.0
    """The heads' learning rate over `train.learning_rate`, which is the adapter's."""

    def __post_init__(self) -> None:
        positive("joint", self, "heads_weight", "heads_lr_multiplier")
        not_negative("joint", self, "heads_only_steps")


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
        if self.joint.heads_only_steps is None:
            fresh = self.head.path is None
            self.joint.heads_only_steps = self.train.max_steps // 2 if fresh else 0
        if self.joint.heads_only_steps >= self.train.max_steps:
            raise InputError(
                f"joint.heads_only_steps={self.joint.heads_only_steps} leaves no joint step of "
                f"train.max_steps={self.train.max_steps}: lower it, or use train/medusa.py"
            )
        if self.target.adapter is not None:
            raise InputError(
                f"target.adapter={self.target.adapter}: the target gets one of its own here; "
                "merge this one first with scripts/merge_adapter.py"
            )
        if self.target.device_map is not None:
            raise InputError(
                f"target.device_map={self.target.device_map}: a target that is trained lies on "
                "one device; leave it unset"
            )
