"""Settings of block drafters (DFlash, DFlash-2, DSpark) and of their training."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import ABSENT, not_negative, positive, share
from conf.settings.eagle import Divergence
from conf.settings.training import FrozenTargetRun


class SlotWeights(Enum):
    """Weights of a block's drafts: by depth alone, or by what the block's drafts give yet."""

    decay = "decay"
    dpace = "dpace"


@dataclass
class BlockConfig:
    """A block drafter and its losses; defaults are DFlash's (arXiv 2602.06036) unless said."""

    own_output_head, draft_vocab_size = False, ABSENT

    path: str | None = None
    """A saved or published head to start from: folder or Hub id. Its architecture and draft
    vocabulary are kept."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    layers: list[int] | None = None
    """Target features that it fuses, as indices of `output_hidden_states`; unset takes
    `num_features` of them in even steps."""
    num_features: int = 5
    """Target features that are fused."""
    num_layers: int = 5
    """Transformer layers of the head."""
    block_size: int = 16
    """Rows of a block. The first holds the token that is sure: of a head that fills in masks it
    drafts nothing, so there is a draft token less than rows."""
    causal: bool = False
    """A row sees no later row of its block."""
    window: int | None = None
    """Tokens of the text and of its block that a row sees; unset for all."""
    mask_token_id: int | None = None
    """What rows hold whose token is not known; unset takes one that no text uses."""
    num_anchors: int = 512
    """Blocks of a packed sequence that learn in a step, behind tokens drawn anew in each."""
    slot_weights: SlotWeights = SlotWeights.decay
    """`decay`, or `dpace` (arXiv 2605.18810): how many tokens a block is expected to give from this
    draft on, by what the head makes of the text's tokens now."""
    slot_gamma: float = 7.0
    """Of `decay`: the draft at depth d weighs exp(-(d - 1) / slot_gamma)."""
    slot_smoothing: float = 0.5
    """Of `dpace`: the share of certainty that is added to every probability."""
    text_weight: float = 1.0
    """Of the cross-entropy against the text."""
    divergence_weight: float = 0.0
    """Of `divergence` from the target's distribution."""
    divergence: Divergence = Divergence.kl
    lk_eta: float = 3.0
    """How fast `hybrid` turns from KL to acceptance as alpha grows."""
    teacher_temperature: float = 1.0
    """Divides the target's logits in training's divergence."""
    off_path_weight: float = 0.2
    """What a draft's loss is multiplied by for each token between, which it does not see, that the
    target would not have chosen; below 0.05 in all it is left out; 1 weighs all alike."""
    learn_prompts: bool = False
    """Learn after every token, the user's too."""

    def __post_init__(self) -> None:
        above = ("num_features", "num_layers", "num_anchors", "slot_gamma", "lk_eta")
        positive("head", self, *above, "draft_vocab_size", "window", "teacher_temperature")
        not_negative("head", self, "text_weight", "divergence_weight")
        if self.block_size < 2:
            raise InputError(f"head.block_size={self.block_size}: must be at least 2")
        if not self.text_weight + self.divergence_weight:
            raise InputError("head.text_weight: every loss has weight 0")
        share("head", self, "off_path_weight", "slot_smoothing")
        if self.draft_vocab_size is not None and not self.own_output_head:
            raise InputError(
                f"head.draft_vocab_size={self.draft_vocab_size}: needs head.own_output_head=true, "
                "as the target's has all ids"
            )


@dataclass
class OwnOutputHead:
    """Settings of block drafters that engines allow an output head of their own."""

    own_output_head: bool = False
    """Train an output head of its own, from the target's rows; engines know it as `lm_head`."""
    draft_vocab_size: int | None = None
    """Ids that a head with an output head of its own can draft; unset for all."""


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
    """Rows of the block that a convolution mixes into each, its own included."""
    conv_group_size: int = 16
    """Channels that share the part of a convolution which depends on the row."""
    selector_rank: int = 256
    """Of the scores of two tokens that follow each other."""
    selector_top_k: int = 16
    """Tokens of a slot that the selector chooses from."""
    selector_weight: float = 1.0
    """Of the cross-entropy among those."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        positive("head", self, *sizes)
        not_negative("head", self, "selector_weight")
        if self.selector_top_k < 2:
            raise InputError(f"head.selector_top_k={self.selector_top_k}: must be at least 2")


@dataclass
class DFlash2Run(FrozenTargetRun):
    """`train/dflash2.py`."""

    head: DFlash2Config = field(default_factory=DFlash2Config)
    out_dir: str = "outputs/dflash2"


class Markov(Enum):
    """A slot's way to hear of the token before it."""

    vanilla = "vanilla"
    """By that token alone."""
    gated = "gated"
    """The same, as far as the slot's own state lets it."""
    rnn = "rnn"
    """By all tokens of the block so far."""


@dataclass
class DSparkConfig(OwnOutputHead, BlockConfig):
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
class DSparkRun(FrozenTargetRun):
    """`train/dspark.py`."""

    head: DSparkConfig = field(default_factory=DSparkConfig)
    out_dir: str = "outputs/dspark"
