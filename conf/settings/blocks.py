"""Settings of block drafters (DFlash, DFlash-2, DSpark) and of their training."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import ABSENT, check_fraction, check_not_negative, check_positive
from conf.settings.eagle import Divergence
from conf.settings.training import FrozenTargetRun


@dataclass
class BlockConfig:
    """A block drafter and its losses. Defaults are DFlash's (arXiv 2602.06036) unless noted."""

    own_output_head, draft_vocab_size = False, ABSENT
    top_k_weight, skips_undrafted = 0.0, False

    path: str | None = None
    """Saved or published head to start from: folder or Hub id. Keeps its architecture and draft
    vocabulary."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    layers: list[int] | None = None
    """Hidden states that the head fuses, as indices of `output_hidden_states`. Unset:
    `num_features` layers in even steps."""
    num_features: int = 5
    """Number of target layers whose hidden states are fused."""
    num_layers: int = 5
    """Transformer layers of the head."""
    block_size: int = 16
    """Rows of a block. The first row holds the last known token. A head that fills in masks drafts
    from the other rows: block_size - 1 draft tokens."""
    causal: bool = False
    """Hide later rows of the block from each row."""
    window: int | None = None
    """Tokens of text and block that a row attends to. Unset: all."""
    mask_token_id: int | None = None
    """Token id of rows whose token is unknown. Unset: an id that no text uses."""
    num_anchors: int = 512
    """Blocks trained per packed sequence and step. Each step draws their places anew."""
    slot_gamma: float = 7.0
    """Depth d has weight exp(-(d - 1) / slot_gamma)."""
    text_weight: float = 1.0
    """Weight of the cross-entropy against the text."""
    divergence_weight: float = 0.0
    """Weight of `divergence` from the target's distribution."""
    divergence: Divergence = Divergence.kl
    lk_eta: float = 3.0
    """Speed at which `hybrid` turns from KL to acceptance as alpha grows."""
    teacher_temperature: float = 1.0
    """Divides the target's logits in the training divergence."""
    off_path_weight: float = 0.2
    """Factor on a draft token's loss for each unseen text token before it that the target would not
    have chosen. Products below 0.05 count as 0. Set 1 to weigh all alike."""
    learn_prompts: bool = False
    """Learn after every token, user messages included."""

    def __post_init__(self) -> None:
        above = ("num_features", "num_layers", "num_anchors", "slot_gamma", "lk_eta")
        check_positive("head", self, *above, "draft_vocab_size", "window", "teacher_temperature")
        check_not_negative("head", self, "text_weight", "divergence_weight")
        if self.block_size < 2:
            raise InputError(f"head.block_size={self.block_size}: must be at least 2")
        if not self.text_weight + self.divergence_weight:
            raise InputError(
                f"head.text_weight={self.text_weight}: every loss has weight 0; "
                "set head.text_weight or head.divergence_weight above 0"
            )
        check_fraction("head", self, "off_path_weight")
        if self.draft_vocab_size is not None and not self.own_output_head:
            raise InputError(
                f"head.draft_vocab_size={self.draft_vocab_size}: the target's output head has all "
                "ids; set head.own_output_head=true, or leave head.draft_vocab_size unset"
            )


@dataclass
class OwnOutputHead:
    """Settings of block drafters for which engines accept an output head."""

    own_output_head: bool = False
    """Train an output head, starting from the target's rows. Engines know it as `lm_head`."""
    draft_vocab_size: int | None = None
    """Token ids that a head with its own output head can draft. Unset: all."""


@dataclass
class DFlashConfig(OwnOutputHead, BlockConfig):
    """A DFlash head."""


@dataclass
class DFlashRun(FrozenTargetRun):
    """`train/dflash.py`."""

    head: DFlashConfig = field(default_factory=DFlashConfig)
    out_dir: str = "outputs/dflash"


@dataclass
class DFlash2Config(BlockConfig):
    """A DFlash-2 head (inco.ai/dflash2, vllm-project/vllm#52816)."""

    conv_kernel_size: int = 2
    """Rows that a convolution mixes into each row, including the row."""
    conv_group_size: int = 16
    """Channels that share the row-dependent part of a convolution."""
    selector_rank: int = 256
    """Rank of the scores of consecutive tokens."""
    selector_top_k: int = 16
    """Candidate tokens per row for the selector."""
    selector_weight: float = 1.0
    """Weight of the cross-entropy among the selector's candidates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        check_positive("head", self, *sizes)
        check_not_negative("head", self, "selector_weight")
        if self.selector_top_k < 2:
            raise InputError(f"head.selector_top_k={self.selector_top_k}: must be at least 2")


@dataclass
class DFlash2Run(FrozenTargetRun):
    """`train/dflash2.py`."""

    head: DFlash2Config = field(default_factory=DFlash2Config)
    out_dir: str = "outputs/dflash2"


class Markov(Enum):
    """Ways in which a row reads the tokens before it."""

    vanilla = "vanilla"
    """Reads the previous token."""
    gated = "gated"
    """Reads the previous token through a gate, set by the row's hidden state."""
    rnn = "rnn"
    """Reads all previous tokens of the block."""


@dataclass
class DSparkConfig(OwnOutputHead, BlockConfig):
    """A DSpark head (arXiv 2607.05147)."""

    markov_head_type: Markov = Markov.vanilla
    markov_rank: int = 256
    """Rank of the logits that the previous token adds."""
    confidence_weight: float = 1.0
    """Weight of the cross-entropy between a row's confidence and its chance of acceptance. 0 trains
    no confidence head."""
    confidence_head_with_markov: bool = True
    """Let the confidence head read the previous token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("head", self, "markov_rank")
        check_not_negative("head", self, "confidence_weight")


@dataclass
class DSparkRun(FrozenTargetRun):
    """`train/dspark.py`."""

    head: DSparkConfig = field(default_factory=DSparkConfig)
    out_dir: str = "outputs/dspark"
