"""Settings of `train/dspark.py`; the recipe is `conf/head/dspark.yaml`."""

from dataclasses import dataclass, field
from enum import Enum

from conf.settings.blocks import BlockConfig
from conf.settings.checks import not_negative, positive
from conf.settings.training import TrainRun


class Markov(Enum):
    """How a slot hears of the token before it."""

    vanilla = "vanilla"
    """By that token alone."""
    gated = "gated"
    """The same, as far as the slot's own state lets it."""
    rnn = "rnn"
    """By all tokens of the block so far."""


@dataclass
class DSparkConfig(BlockConfig):
    """A DSpark head (arXiv 2607.05147)."""

    markov_head_type: Markov = Markov.vanilla
    markov_rank: int = 256
    """Columns of what the token before adds to the logits."""
    confidence_weight: float = 1.0
    """Of the cross-entropy between a slot's confidence and the chance that it is accepted; 0 makes
    a head without."""
    confidence_head_with_markov: bool = True
    """The confidence also reads the token before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("head", self, "markov_rank")
        not_negative("head", self, "confidence_weight")


@dataclass
class DSparkRun(TrainRun):
    """`train/dspark.py`."""

    head: DSparkConfig = field(default_factory=DSparkConfig)
    out_dir: str = "outputs/dspark"
