"""Settings of `train/peagle.py`; the recipe is `conf/head/peagle.yaml`."""

from dataclasses import dataclass, field, fields

from conf.errors import InputError
from conf.settings.checks import positive
from conf.settings.eagle import EagleConfig
from conf.settings.training import TrainRun

OTHERS = (
    "form", "norm_output", "step_normalizer", "token_normalizer", "detach_features",
    "regression_weight",
)  # fmt: skip
"""Settings of EAGLE heads that feed on their own outputs, one token after another."""


@dataclass
class PEagleConfig(EagleConfig):
    """A P-EAGLE head (arXiv 2602.01469): EAGLE-3's settings, but for those in `OTHERS`."""

    num_layers: int = 4
    """Transformer layers of the head."""
    num_steps: int = 8
    """Draft tokens of a pass."""
    step_decay: float = 1.0
    mask_token_id: int | None = None
    """What rows hold whose token is not known; unset takes one that no text uses."""
    num_anchors: int = 512
    """Tokens of a packed sequence that may draft more than one token in a step."""
    kept_share: float = 0.7
    """Of those that draft d tokens about this share, drawn anew in each step, drafts d + 1."""
    least_share: float = 0.2
    """Of all of them at least this share does."""
    num_segments: int = 1
    """Parts in which rows behind the text are computed, and computed again for their gradients:
    more of them take less memory and give the same."""
    off_path_weight: float = 0.2
    """What a draft's loss is multiplied by for each token between, which it does not see, that the
    target would not have chosen; below 0.05 in all it is left out; 1 weighs all alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("head", self, "num_layers", "num_anchors", "num_segments", "kept_share")
        for name in ("kept_share", "least_share", "off_path_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"head.{name}={getattr(self, name)}: must be from 0 to 1")
        usual = {each.name: each.default for each in fields(EagleConfig)}
        for name in OTHERS:
            if getattr(self, name) != usual[name]:
                raise InputError(
                    f"head.{name}={getattr(self, name)}: a P-EAGLE head drafts all tokens in one "
                    f"pass and has no such setting; allowed: {usual[name]}"
                )


@dataclass
class PEagleRun(TrainRun):
    """`train/peagle.py`."""

    head: PEagleConfig = field(default_factory=PEagleConfig)
    out_dir: str = "outputs/peagle"
