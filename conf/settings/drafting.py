"""Settings of the ways to draft: heads, trees, and methods without a head."""

from dataclasses import dataclass

from conf.errors import InputError
from conf.settings.checks import below_one, positive


@dataclass
class HeadRef:
    """A trained head to load."""

    path: str | None = None
    """Folder, Hub id or GGUF file."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    layers: list[int] | None = None
    """Target features that an EAGLE-3 head reads, as indices of `output_hidden_states`, for a
    published head whose config counts them otherwise (SGLang's are one less)."""


@dataclass
class DynamicTreeConfig:
    """EAGLE-2's tree; unset values are 2, 4 and 5 on CPU, 8, 10 and 59 on CUDA (the paper's)."""

    depth: int | None = None
    """Draft tokens of the longest path."""
    top_k: int | None = None
    """Nodes expanded per level, and children drawn from each."""
    num_tokens: int | None = None
    """Draft tokens that are kept and checked."""

    def __post_init__(self) -> None:
        positive("dynamic_tree", self, "depth", "top_k", "num_tokens")


@dataclass
class DraftModelConfig:
    """A separate, smaller language model that drafts."""

    path: str | None = None
    """Hub id, folder or GGUF file; one with another tokenizer drafts text that is encoded again."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    num_tokens: int = 5
    """Draft tokens of a chain."""
    heuristic: bool = False
    """Start from `num_tokens` and draft 2 more after a fully accepted chain, else 1 less."""
    max_tokens: int = 16
    """Bound of `heuristic`."""
    confidence: float = 0.0
    """Stop a chain once the draft model gives its best token less; waits for the device per
    draft token. 0 never stops."""
    tree: list[list[int]] | None = None
    """Paths of child ranks; unset takes 8 nodes on CPU, 32 on CUDA."""

    def __post_init__(self) -> None:
        positive("draft", self, "num_tokens", "max_tokens")
        below_one("draft", self, "confidence")


@dataclass
class LookupConfig:
    """Drafts copied from the text so far: prompt lookup, and an n-gram model of the text."""

    num_tokens: int = 10
    """Draft tokens of a chain."""
    max_ngram: int = 3
    """Longest run of last tokens that is looked for."""
    min_ngram: int = 1
    """Shortest such run."""

    def __post_init__(self) -> None:
        positive("lookup", self, "num_tokens", "max_ngram", "min_ngram")
        if self.min_ngram > self.max_ngram:
            raise InputError(
                f"lookup.min_ngram={self.min_ngram}: must be at most "
                f"lookup.max_ngram={self.max_ngram}"
            )


@dataclass
class SuffixConfig:
    """Suffix decoding (arXiv 2411.04975); the defaults are vLLM's."""

    num_tokens: int = 24
    """Draft tokens at most."""
    max_ngram: int = 24
    """Longest run of last tokens that is continued."""
    factor: float = 1.0
    """Tokens drafted per token of the run, at most."""
    min_prob: float = 0.1
    """A draft ends where it is less likely to be right."""

    def __post_init__(self) -> None:
        positive("suffix", self, "num_tokens", "max_ngram", "factor")
        below_one("suffix", self, "min_prob")


@dataclass
class RecyclingConfig:
    """Token recycling (arXiv 2408.08696)."""

    num_tokens: int | None = None
    """Nodes of the tree without the root; unset takes 8 on CPU, 80 on CUDA (the paper's)."""

    def __post_init__(self) -> None:
        positive("recycling", self, "num_tokens")


@dataclass
class LookaheadConfig:
    """Lookahead decoding (arXiv 2402.02057)."""

    window: int = 7
    """Columns of the Jacobi window."""
    level: int = 5
    """Tokens of an n-gram; the window has one row less."""
    num_guesses: int = 7
    """N-grams of the pool that are checked in a step."""

    def __post_init__(self) -> None:
        positive("lookahead", self, "window", "num_guesses")
        if self.level < 2:
            raise InputError(f"lookahead.level={self.level}: must be at least 2")


@dataclass
class SelfDraftConfig:
    """The target drafting with some of its own layers."""

    num_layers: int | None = None
    """Layers of `early_exit`; unset takes half of them."""
    skip: list[int] | None = None
    """Layers that `skip_layers` leaves out, from 0; unset searches on up to 8 prompts behind the
    first `data.num_prompts`, which are not measured."""
    num_tokens: int | None = None
    """Draft tokens of a chain; unset takes 4, or what the search found."""

    def __post_init__(self) -> None:
        positive("self_draft", self, "num_layers", "num_tokens")


@dataclass
class TypicalConfig:
    """Medusa's typical acceptance, which is lossy; see `heads.decoding.sampling.Typical`."""

    threshold: float = 0.09
    """Probability from which a token is accepted at the latest (epsilon)."""
    alpha: float = 0.3
    """Of alpha exp(-entropy), from which it is where the target is unsure (delta)."""

    def __post_init__(self) -> None:
        positive("typical", self, "threshold", "alpha")
