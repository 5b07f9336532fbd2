"""Settings of the ways to draft: heads, trees, and methods without a head."""

from dataclasses import dataclass

from conf.errors import InputError
from conf.settings.checks import check_below_one, check_positive


@dataclass
class HeadRef:
    """A trained head to load."""

    path: str | None = None
    """Folder, Hub id or GGUF file."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    layers: list[int] | None = None
    """Hidden states that an EAGLE-3 head reads, as indices of `output_hidden_states`. Needed for a
    published head whose config counts layers otherwise (SGLang counts one less)."""


@dataclass
class DynamicTreeConfig:
    """EAGLE-2's tree. Unset: 2, 4 and 5 on CPU; 8, 10 and 59 on CUDA (the paper's)."""

    depth: int | None = None
    """Draft tokens on the longest path."""
    top_k: int | None = None
    """Nodes expanded per depth, and children of each."""
    num_tokens: int | None = None
    """Draft tokens kept for verification."""

    def __post_init__(self) -> None:
        check_positive("dynamic_tree", self, "depth", "top_k", "num_tokens")


@dataclass
class DraftModelConfig:
    """A separate, smaller language model that drafts."""

    path: str | None = None
    """Hub id, folder or GGUF file. Text of a model with another tokenizer is encoded again."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    num_tokens: int = 5
    """Draft tokens of a chain."""
    heuristic: bool = False
    """Start with `num_tokens`. Draft 2 more after a fully accepted chain, otherwise 1 less."""
    max_tokens: int = 16
    """Largest number of draft tokens with `heuristic`."""
    confidence: float = 0.0
    """Stop a chain when the draft model's best token is less likely than this. Waits for the device
    at each draft token. 0: never stop."""
    tree: list[list[int]] | None = None
    """Paths of child ranks. Unset: 8 nodes on CPU, 32 on CUDA."""

    def __post_init__(self) -> None:
        check_positive("draft", self, "num_tokens", "max_tokens")
        check_below_one("draft", self, "confidence")


@dataclass
class LookupConfig:
    """Draft tokens copied from the text so far: prompt lookup, and an n-gram model of the text."""

    num_tokens: int = 10
    """Draft tokens of a chain."""
    max_ngram: int = 3
    """Longest run of last tokens to look up."""
    min_ngram: int = 1
    """Shortest run of last tokens to look up."""

    def __post_init__(self) -> None:
        check_positive("lookup", self, "num_tokens", "max_ngram", "min_ngram")
        if self.min_ngram > self.max_ngram:
            raise InputError(
                f"lookup.min_ngram={self.min_ngram}: must be at most "
                f"lookup.max_ngram={self.max_ngram}"
            )


@dataclass
class SuffixConfig:
    """Suffix decoding (arXiv 2411.04975). Defaults are vLLM's."""

    num_tokens: int = 24
    """Largest number of draft tokens."""
    max_ngram: int = 24
    """Longest run of last tokens to continue."""
    factor: float = 1.0
    """Largest number of draft tokens per token of the run."""
    min_prob: float = 0.1
    """End the chain when the estimated probability of a draft token falls below this."""

    def __post_init__(self) -> None:
        check_positive("suffix", self, "num_tokens", "max_ngram", "factor")
        check_below_one("suffix", self, "min_prob")


@dataclass
class RecyclingConfig:
    """Token recycling (arXiv 2408.08696)."""

    num_tokens: int | None = None
    """Nodes of the tree, root excluded. Unset: 8 on CPU, 80 on CUDA (the paper's)."""

    def __post_init__(self) -> None:
        check_positive("recycling", self, "num_tokens")


@dataclass
class LookaheadConfig:
    """Lookahead decoding (arXiv 2402.02057)."""

    window: int = 7
    """Columns of the Jacobi window."""
    level: int = 5
    """Tokens of an n-gram. The window has one row less."""
    num_guesses: int = 7
    """N-grams of the pool verified per step."""

    def __post_init__(self) -> None:
        check_positive("lookahead", self, "window", "num_guesses")
        if self.level < 2:
            raise InputError(f"lookahead.level={self.level}: must be at least 2")


@dataclass
class SelfDraftConfig:
    """The target drafts with some of its own layers."""

    num_layers: int | None = None
    """Layers that `early_exit` runs. Unset: half of them."""
    skip: list[int] | None = None
    """Layers that `skip_layers` leaves out, counted from 0. Unset: search on up to 8 prompts after
    the first `data.num_prompts`; these prompts are not measured."""
    num_tokens: int | None = None
    """Draft tokens of a chain. Unset: 4, or the number that the search found."""

    def __post_init__(self) -> None:
        check_positive("self_draft", self, "num_layers", "num_tokens")


@dataclass
class TypicalConfig:
    """Medusa's typical acceptance, which is lossy. See `heads.decoding.sampling.Typical`."""

    threshold: float = 0.09
    """Probability above which every draft token is accepted (epsilon)."""
    alpha: float = 0.3
    """Accept above alpha exp(-entropy) too, which is lower where the target is unsure (delta)."""

    def __post_init__(self) -> None:
        check_positive("typical", self, "threshold", "alpha")
