"""Settings of EAGLE, P-EAGLE and MTP heads and of their training; recipes are in `conf/head/`."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import not_negative, positive, share
from conf.settings.training import FrozenTargetRun


class EagleForm(Enum):
    """Features beside the embedding that the layer reads: the last one, or three fused ones."""

    eagle1 = "eagle1"
    eagle3 = "eagle3"


class OutputHead(Enum):
    """Starts of EAGLE-3's own output head; EAGLE-1 uses the target's."""

    scratch = "scratch"
    """Random, trained (the paper)."""
    copy = "copy"
    """The target's rows, trained."""
    frozen = "frozen"
    """The target's rows, not trained (speculators)."""


class Divergence(Enum):
    """Measures of how far a draft distribution q is from the target's p."""

    kl = "kl"
    """KL(p || q), p renormalised over the draft vocabulary."""
    rkl = "rkl"
    """KL(q || p), p likewise."""
    js = "js"
    """Jensen-Shannon, p likewise: the mean of both KL to the middle of p and q."""
    tv = "tv"
    """1 - alpha, alpha = sum of min(p, q): total variation over the whole vocabulary."""
    nla = "nla"
    """-log alpha (LK losses, arXiv 2602.23881)."""
    hybrid = "hybrid"
    """lambda KL + (1 - lambda) (1 - alpha), lambda = exp(-lk_eta alpha) (the same)."""


class StepNormalizer(Enum):
    """Ways to put the losses of the steps together."""

    sum = "sum"
    """Sum of decay ** j * loss_j (EAGLE-3)."""
    mean = "mean"
    """The same over the sum of the weights (HASS, NeMo)."""


class TokenNormalizer(Enum):
    """Divisors of the summed loss of a step."""

    all = "all"
    """All tokens of the batch (EAGLE-3)."""
    supervised = "supervised"
    """Tokens in the loss mask of that step."""


@dataclass
class UnrolledConfig:
    """A head that learns what the target says at several depths, and its losses."""

    # Of a head without such settings.
    step_normalizer, token_normalizer = StepNormalizer.sum, TokenNormalizer.all
    detach_features, regression_weight, own_tokens = False, 0.0, False

    path: str | None = None
    """A saved or published head to start from: folder or Hub id. Its architecture and draft
    vocabulary are kept."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    num_steps: int = 3
    """Depths that are trained: step j (from 0) reads j features of its own. Not the paper's 7: on
    the same tokens 3 gave as long drafts in less than half the time (heads/README.md)."""
    step_decay: float = 0.8
    """Step j weighs step_decay ** j."""
    learn_prompts: bool = True
    """Learn what the target says after every token, the user's too; not the papers' answers
    alone. Evaluations look at answers either way."""
    divergence: Divergence = Divergence.kl
    lk_eta: float = 3.0
    """How fast `hybrid` turns from KL to acceptance as alpha grows."""
    teacher_temperature: float = 0.6
    """Divides the target's logits in training's losses. Below 1 heads learn the likeliest tokens
    first, which is what they draft; not the papers' 1 (heads/README.md)."""
    divergence_weight: float = 1.0
    """Of `divergence` from the target's distribution."""
    text_weight: float = 0.0
    """Of -log q of the text's own token (FastMTP), where its id can be drafted."""
    top_k_weight: float = 0.0
    """Of -sum of p log q over the target's `top_k` likeliest tokens (HASS)."""
    top_k: int = 10
    """Tokens of `top_k_weight`."""
    noise: float = 0.0
    """Width of the uniform noise on input features, at 512 tokens; divided by length / 512."""

    def __post_init__(self) -> None:
        above = ("num_steps", "step_decay", "teacher_temperature", "lk_eta", "top_k")
        positive("head", self, *above)
        weights = ("divergence_weight", "regression_weight", "top_k_weight", "text_weight")
        not_negative("head", self, *weights, "noise")
        if not any(getattr(self, name) for name in weights):
            raise InputError("head.divergence_weight: every loss has weight 0")


@dataclass
class FeatureHeadConfig(UnrolledConfig):
    """A head over the target's hidden states: the settings that EAGLE and P-EAGLE share."""

    form, norm_output = EagleForm.eagle3, False

    layers: list[int] | None = None
    """Target features that EAGLE-3 fuses, as indices of `output_hidden_states`; unset takes
    2, L/2 and L-3 of L layers."""
    fc_bias: bool = False
    """A bias in the fusion layer; the original EAGLE-1 has one, vLLM has no place for it."""
    fc_norm: bool = False
    """A norm for each target feature (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """Take the residual after the feature's norm."""
    draft_vocab_size: int | None = 32000
    """Ids an EAGLE-3 head can draft; unset, or no fewer than the target has, takes all."""
    output_head: OutputHead = OutputHead.copy
    """Not the paper's `scratch`: after 250 thousand tokens on an 8M-parameter target, drafts
    agreed with the target 1.5 times as often."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("head", self, "draft_vocab_size")


@dataclass
class EagleConfig(FeatureHeadConfig):
    """An EAGLE head and its losses; defaults are EAGLE-3's (arXiv 2503.01840) unless said."""

    form: EagleForm = EagleForm.eagle3
    norm_output: bool = False
    """Feed back the normed output (EAGLE-3.1)."""
    step_normalizer: StepNormalizer = StepNormalizer.sum
    token_normalizer: TokenNormalizer = TokenNormalizer.all
    detach_features: bool = False
    """No gradient through the features that a step takes from the one before (HASS)."""
    regression_weight: float = 0.0
    """Of SmoothL1 between drafted and true features (EAGLE-1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "fc_norm", "norm_output", "norm_before_residual"):
            if self.form is EagleForm.eagle1 and getattr(self, name):
                raise InputError(f"head.{name}: an EAGLE-1 head has none; allowed: unset")
        if self.form is EagleForm.eagle3 and self.regression_weight:
            raise InputError(
                f"head.regression_weight={self.regression_weight}: an EAGLE-3 head drafts no "
                "feature of the target; allowed: 0"
            )


@dataclass
class UnrolledRun(FrozenTargetRun):
    """A training of such a head."""

    head: UnrolledConfig = field(default_factory=UnrolledConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head.num_steps >= self.data.max_length:
            raise InputError(
                f"head.num_steps={self.head.num_steps}: no token of a sequence of "
                f"data.max_length={self.data.max_length} is followed by so many; set it lower"
            )


@dataclass
class EagleRun(UnrolledRun):
    """`train/eagle.py`."""

    head: EagleConfig = field(default_factory=EagleConfig)
    out_dir: str = "outputs/eagle"


@dataclass
class PEagleConfig(FeatureHeadConfig):
    """A P-EAGLE head (arXiv 2602.01469), which drafts all tokens in one pass, and its losses."""

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
        share("head", self, "kept_share", "least_share", "off_path_weight")


@dataclass
class PEagleRun(UnrolledRun):
    """`train/peagle.py`."""

    head: PEagleConfig = field(default_factory=PEagleConfig)
    out_dir: str = "outputs/peagle"


@dataclass
class MtpConfig(UnrolledConfig):
    """An MTP layer that reads its own output, and its losses."""

    step_normalizer, token_normalizer = StepNormalizer.mean, TokenNormalizer.supervised
    step_decay: float = 0.6
    """Step j weighs step_decay ** j, over the sum of all (FastMTP, arXiv 2509.18362)."""
    own_tokens: bool = False
    """Steps after the first read the token that the layer itself takes for the likeliest, not the
    text's (AngelSpec)."""


@dataclass
class MtpRun(UnrolledRun):
    """`train/mtp.py`."""

    head: MtpConfig = field(default_factory=MtpConfig)
    out_dir: str = "outputs/mtp"
