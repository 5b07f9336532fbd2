"""Settings of EAGLE, P-EAGLE and MTP heads and their training. Recipes are in `conf/head/`."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import check_fraction, check_not_negative, check_positive
from conf.settings.training import FrozenTargetRun


class EagleForm(Enum):
    """Hidden states read beside the embedding: the last one, or three fused ones."""

    eagle1 = "eagle1"
    eagle3 = "eagle3"


class OutputHead(Enum):
    """Initial weights of EAGLE-3's output head. EAGLE-1 uses the target's output head."""

    auto = "auto"
    """`frozen` for targets of a hidden size of 768 and more, else `copy`."""
    scratch = "scratch"
    """Random, trained (the paper)."""
    copy = "copy"
    """The target's rows, trained."""
    frozen = "frozen"
    """The target's rows, frozen (speculators)."""


class Divergence(Enum):
    """Distance of the draft distribution q from the target's distribution p."""

    kl = "kl"
    """KL(p || q), with p renormalised over the draft vocabulary."""
    rkl = "rkl"
    """KL(q || p), with p renormalised over the draft vocabulary."""
    js = "js"
    """Jensen-Shannon: mean KL of p and q to their mean, with p renormalised."""
    tv = "tv"
    """1 - alpha, with alpha = sum of min(p, q): total variation over the whole vocabulary."""
    nla = "nla"
    """-log alpha (LK losses, arXiv 2602.23881)."""
    hybrid = "hybrid"
    """lambda KL + (1 - lambda) (1 - alpha), with lambda = exp(-lk_eta alpha) (LK losses)."""


class StepNormalizer(Enum):
    """How the losses of the steps are combined."""

    sum = "sum"
    """Sum of decay ** j * loss_j (EAGLE-3)."""
    mean = "mean"
    """The same sum, divided by the sum of the weights (HASS, NeMo)."""


class TokenNormalizer(Enum):
    """Divisor of a step's summed loss."""

    all = "all"
    """All tokens of the batch (EAGLE-3)."""
    supervised = "supervised"
    """Tokens in the loss mask of the step."""


@dataclass
class UnrolledConfig:
    """A head that learns the target's predictions at several depths, and its losses."""

    # Values for heads that lack these settings.
    step_normalizer, token_normalizer = StepNormalizer.sum, TokenNormalizer.all
    detach_features, regression_weight, own_tokens = False, 0.0, False
    off_path_weight, skips_undrafted, output_head = 1.0, True, OutputHead.frozen

    path: str | None = None
    """Saved or published head to start from: folder or Hub id. Keeps its architecture and draft
    vocabulary."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    num_steps: int = 3
    """Depths to train. Step j (from 0) reads j hidden states of the head. The paper uses 7; 3 gave
    equally long drafts in less than half the time (docs/results/training.md)."""
    step_decay: float = 0.8
    """Step j has weight step_decay ** j."""
    learn_prompts: bool = True
    """Learn the target's prediction after every token, user messages included. The papers learn
    answers only. Evaluations always use answers."""
    divergence: Divergence = Divergence.kl
    lk_eta: float = 3.0
    """Speed at which `hybrid` turns from KL to acceptance as alpha grows."""
    teacher_temperature: float = 0.6
    """Divides the target's logits in the training losses. Below 1, heads favour the likeliest
    tokens, which they draft (docs/results/training.md). The papers use 1."""
    divergence_weight: float = 1.0
    """Weight of `divergence` from the target's distribution."""
    text_weight: float = 0.0
    """Weight of -log q of the text's token (FastMTP), where the draft vocabulary has it."""
    top_k_weight: float = 0.0
    """Weight of -sum of p log q over the target's `top_k` likeliest tokens (HASS)."""
    top_k: int = 10
    """Number of tokens in the loss of `top_k_weight`."""
    noise: float = 0.0
    """Width of the uniform noise on input hidden states at 512 tokens. Scales with 512 / length."""

    def __post_init__(self) -> None:
        above = ("num_steps", "step_decay", "teacher_temperature", "lk_eta", "top_k")
        check_positive("head", self, *above)
        weights = ("divergence_weight", "regression_weight", "top_k_weight", "text_weight")
        check_not_negative("head", self, *weights, "noise")
        if not any(getattr(self, name) for name in weights):
            raise InputError(
                f"head.divergence_weight={self.divergence_weight}: every loss has weight 0; set "
                f"one of {', '.join(f'head.{name}' for name in weights)} above 0"
            )


@dataclass
class FeatureHeadConfig(UnrolledConfig):
    """Settings that EAGLE and P-EAGLE heads share."""

    form, norm_output = EagleForm.eagle3, False

    layers: list[int] | None = None
    """Hidden states that EAGLE-3 fuses, as indices of `output_hidden_states`. Unset: 2, L/2 and L-3
    of L layers."""
    fc_bias: bool = False
    """Add a bias to the fusion layer, as in the original EAGLE-1. vLLM cannot load it."""
    fc_norm: bool = False
    """Normalise each fused hidden state (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """Take the residual after the norm of the hidden states."""
    draft_vocab_size: int | None = 32000
    """Token ids that an EAGLE-3 head can draft. Unset: all of the target's."""
    output_head: OutputHead = OutputHead.auto
    """Initial output head (docs/results/rates.md). The paper uses `scratch`. `auto` trains that
    of a saved head (`head.path`) on, unless it still is the target's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("head", self, "draft_vocab_size")


@dataclass
class EagleConfig(FeatureHeadConfig):
    """An EAGLE head and its losses. Defaults are EAGLE-3's (arXiv 2503.01840) unless noted."""

    form: EagleForm = EagleForm.eagle3
    norm_output: bool = False
    """Feed back the normalised output (EAGLE-3.1)."""
    step_normalizer: StepNormalizer = StepNormalizer.sum
    token_normalizer: TokenNormalizer = TokenNormalizer.all
    detach_features: bool = False
    """Stop gradients through the hidden states that a step takes from the previous one (HASS)."""
    regression_weight: float = 0.0
    """Weight of SmoothL1 between drafted and true hidden states (EAGLE-1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "fc_norm", "norm_output", "norm_before_residual"):
            if self.form is EagleForm.eagle1 and getattr(self, name):
                raise InputError(
                    f"head.{name}={getattr(self, name)}: an EAGLE-1 head has no such part; leave "
                    f"head.{name} unset, or set head.form=eagle3"
                )
        if self.form is EagleForm.eagle3 and self.regression_weight:
            raise InputError(
                f"head.regression_weight={self.regression_weight}: an EAGLE-3 head predicts no "
                "hidden state of the target; set it to 0"
            )


@dataclass
class UnrolledRun(FrozenTargetRun):
    """Training of an unrolled head."""

    head: UnrolledConfig = field(default_factory=UnrolledConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head.num_steps >= self.data.max_length:
            raise InputError(
                f"head.num_steps={self.head.num_steps}: too many for sequences of "
                f"data.max_length={self.data.max_length} tokens; set head.num_steps below "
                "data.max_length"
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
    """Draft tokens per pass."""
    step_decay: float = 1.0
    output_head: OutputHead = OutputHead.copy
    mask_token_id: int | None = None
    """Token id of rows whose token is unknown. Unset: an id that no text uses."""
    num_anchors: int = 512
    """Tokens per packed sequence that may draft more than one token in a step."""
    kept_share: float = 0.7
    """The share kept_share ** d of the anchors drafts d + 1 tokens. Each step draws anchors
    anew."""
    least_share: float = 0.2
    """Smallest share of the anchors that drafts at any depth."""
    num_segments: int = 1
    """Parts in which rows after the text are computed, then recomputed for gradients. More parts
    take less memory and give the same result."""
    off_path_weight: float = 0.2
    """Factor on a draft token's loss for each unseen text token before it that the target would not
    have chosen. Products below 0.05 count as 0. Set 1 to weigh all alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("head", self, "num_layers", "num_anchors", "num_segments", "kept_share")
        check_fraction("head", self, "kept_share", "least_share", "off_path_weight")


@dataclass
class PEagleRun(UnrolledRun):
    """`train/peagle.py`."""

    head: PEagleConfig = field(default_factory=PEagleConfig)
    out_dir: str = "outputs/peagle"


@dataclass
class MtpConfig(UnrolledConfig):
    """A multi-token prediction (MTP) layer that reads its own output, and its losses."""

    step_normalizer, token_normalizer = StepNormalizer.mean, TokenNormalizer.supervised
    step_decay: float = 0.6
    """Step j has weight step_decay ** j, divided by the sum (FastMTP, arXiv 2509.18362)."""
    own_tokens: bool = False
    """Feed steps after the first with the layer's likeliest token instead of the text's
    (AngelSpec)."""


@dataclass
class MtpRun(UnrolledRun):
    """`train/mtp.py`."""

    head: MtpConfig = field(default_factory=MtpConfig)
    out_dir: str = "outputs/mtp"
