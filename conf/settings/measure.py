"""Settings of the commands in `eval/`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conf.errors import InputError
from conf.settings.checks import ABSENT, check_below_one, check_not_negative, check_positive
from conf.settings.data import DataRun
from conf.settings.drafting import (
    DraftModelConfig,
    DynamicTreeConfig,
    HeadRef,
    LookaheadConfig,
    LookupConfig,
    RecyclingConfig,
    SelfDraftConfig,
    SuffixConfig,
    TypicalConfig,
)


class Mode(Enum):
    """How acceptance is measured."""

    replay = "replay"
    decode = "decode"


@dataclass
class MeasureRun(DataRun):
    """Measurement of a head over prompts."""

    # Values for commands that lack these settings: greedy text up to the target's stop tokens.
    temperature, top_p, top_k, min_p = 0.0, 1.0, ABSENT, 0.0
    stop, ignore_eos, plain = ABSENT, False, False
    depth = tree = output_rank = ABSENT
    dynamic_tree = DynamicTreeConfig()
    needs_head = True

    head: HeadRef = field(default_factory=HeadRef)
    max_new_tokens: int = 128
    """Largest number of tokens per answer."""
    num_turns: int = 1
    """Questions to ask per dialogue. Later questions follow the target's greedy answers to the
    earlier ones."""
    out_dir: str = "outputs/measure"
    """Folder for results and pictures."""
    seed: int = 0
    """Seed of sampling (above temperature 0) and of confidence intervals."""

    def __post_init__(self) -> None:
        check_positive("", self, "max_new_tokens", "depth", "top_k", "output_rank", "num_turns")
        check_not_negative("", self, "temperature")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p}: must be above 0 and at most 1")
        check_below_one("", self, "min_p")
        if "" in (self.stop or []):
            raise InputError(
                f"stop={self.stop}: an empty text would end every answer at once; leave it out"
            )


@dataclass
class SamplingSettings:
    """Settings that choose the next token."""

    temperature: float = 0.0
    """Sampling temperature. 0 takes the likeliest token."""
    top_p: float = 1.0
    """Keep the likeliest tokens until their probabilities sum to this. 1 keeps all."""
    top_k: int | None = None
    """Number of likeliest tokens to keep. Unset: all."""
    min_p: float = 0.0
    """Least probability of a kept token, as a share of the likeliest token's. 0 keeps all."""


@dataclass
class AnswerSettings:
    """Settings that end an answer or change its logits."""

    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, besides the target's stop tokens. Empty: those of the target's
    generation config."""
    ignore_eos: bool = False
    """Continue past stop tokens, up to `max_new_tokens` or a text of `stop`."""
    plain: bool = False
    """Ignore changes of logits in the target's generation config, e.g. a repetition penalty.
    Otherwise every method and `generate` apply them."""


@dataclass
class ChainSettings:
    """Settings of chains of draft tokens."""

    depth: int | None = None
    """Draft tokens of a chain. Unset: all Medusa heads, or 5 tokens of EAGLE."""


@dataclass
class TreeSettings:
    """Settings of trees of draft tokens."""

    tree: list[list[int]] | None = None
    """Medusa's static tree as paths of child ranks, e.g. [[0],[1],[0,0]]. Unset: the tree that
    `eval/tree_search.py` wrote beside the head, else the 8 likeliest nodes on CPU, 32 on CUDA."""
    dynamic_tree: DynamicTreeConfig = field(default_factory=DynamicTreeConfig)


@dataclass
class OutputSettings:
    """Settings of the output head while drafting."""

    output_rank: int | None = None
    """Rank of the output head while drafting; the likeliest ids get exact logits. Unset: all logits
    from the full output head. Texts stay the same."""


@dataclass
class DecodingSettings(
    SamplingSettings, AnswerSettings, ChainSettings, TreeSettings, OutputSettings
):
    """All settings of decoding with a head."""


@dataclass
class AcceptanceRun(DecodingSettings, MeasureRun):
    """`eval/acceptance.py`."""

    num_turns: int = 2
    mode: Mode = Mode.replay
    conditions: list[str] = field(default_factory=list)
    """Settings to change, one text for each condition, e.g. ["temperature=0","mode=decode
    temperature=1"]: all conditions are measured and shown in one table. Allowed are `data`,
    `mode`, `max_new_tokens`, `num_turns`, `seed` and the settings of sampling."""
    out_dir: str = "outputs/acceptance"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode is Mode.replay and self.temperature:
            raise InputError(
                f"temperature={self.temperature}: only greedy text can be replayed; set "
                "mode=decode or temperature=0"
            )
        if self.mode is Mode.decode and self.target.engine:
            raise InputError(
                f"mode=decode: needs the target's layers, which target.engine={self.target.engine} "
                "holds; set mode=replay, or leave target.engine unset"
            )


@dataclass
class SpeedupRun(DecodingSettings, MeasureRun):
    """`eval/speedup.py`."""

    needs_head = False

    num_turns: int = 2
    methods: Any = "all"
    """A method, a list of methods, or `all`. Without a head: `prompt_lookup`, `ngram`, `suffix`,
    `recycling`, `lookahead`, `early_exit`, `skip_layers`, `generate_lookup`; with `draft.path`:
    `draft_chain`, `draft_tree`, `generate_assisted`. Of a head: its kind with `_chain`, `_tree`,
    `_suffix` or `_typical`, such as `eagle_tree`. The baselines `vanilla` and `generate`
    always run."""
    heads: list[str] = field(default_factory=list)
    """Further heads to compare: folders or Hub ids."""
    draft: DraftModelConfig = field(default_factory=DraftModelConfig)
    lookup: LookupConfig = field(default_factory=LookupConfig)
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    recycling: RecyclingConfig = field(default_factory=RecyclingConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    self_draft: SelfDraftConfig = field(default_factory=SelfDraftConfig)
    typical: TypicalConfig = field(default_factory=TypicalConfig)
    batch_size: int = 1
    """Texts decoded together. The next text takes the place of a finished one."""
    concurrency: list[int] = field(default_factory=list)
    """Further batch sizes for every method, e.g. [1,4,16]. They show the latency of each and where
    drafting stops paying."""
    cuda_graphs: bool = True
    """On a GPU, launch each step as one CUDA graph, or only its verify pass where drafting needs
    the host. `captured` in the results says which."""
    compile: bool = False
    """Compile the target's verify pass (torch.compile) for `vanilla` and every method, and
    `generate` with its static cache."""
    num_warmups: int = 3
    """Untimed passes of every method over the first prompts."""
    num_repeats: int = 3
    """Timed passes over the prompts. Each pass draws the order of the methods; medians are
    reported."""
    num_texts: int = 6
    """Prompts whose texts the report shows, spread over the categories."""
    out_dir: str = "outputs/speedup"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("", self, "batch_size", "num_repeats")
        if any(size < 1 for size in self.concurrency):
            raise InputError(
                f"concurrency={self.concurrency}: sizes must be at least 1; type one like [1,4,16]"
            )
        if isinstance(self.methods, str):
            self.methods = [self.methods]
        if not isinstance(self.methods, list) or not self.methods:
            raise InputError(f"methods={self.methods}: must be a name, a list of names, or all")
        self.methods = [str(name) for name in self.methods]

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes to measure, in rising order."""
        return sorted({self.batch_size, *self.concurrency})


@dataclass
class ServeRun(SamplingSettings, ChainSettings, MeasureRun):
    """`eval/serve.py`."""

    needs_head = False
    plain = True  # the server is told so

    endpoint: str = "???"
    """Base URL of a vLLM, SGLang or llama.cpp server that serves the target with the head, e.g.
    http://localhost:8000; nobody else may use the server meanwhile."""
    baseline: str | None = None
    """Base URL of the same server without a draft head: speed-up is measured against this one."""
    model: str | None = None
    """Name of the served model, e.g. of an adapter; unset takes the first that the server lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key of both servers, if they need one."""
    concurrency: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])
    """Requests in flight, each number a point of the curve, up to the number that the server runs
    at a time; [] compares texts and drafts alone."""
    num_warmups: int = 1
    """Untimed passes before each number of requests in flight, over as many prompts."""
    num_repeats: int = 3
    """Timed passes over all prompts, in an order drawn for each; medians are reported."""
    tolerance: float = 0.0
    """Share by which the counts of drafts and accepted tokens may differ from the replay, and share
    of the tokens that the target need not have chosen; 0 fits float32 on both sides."""
    depth: int | None = None
    """Draft tokens of a chain; unset takes the server's."""
    out_dir: str = "outputs/serve"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_below_one("", self, "tolerance")
        check_positive("", self, "num_repeats")
        check_not_negative("", self, "num_warmups")
        if any(size < 1 for size in self.concurrency):
            raise InputError(f"concurrency={self.concurrency}: numbers must be positive")


@dataclass
class TreeSearchRun(AnswerSettings, OutputSettings, MeasureRun):
    """`eval/tree_search.py`."""

    max_nodes: int = 64
    """Draft tokens of the largest tree to try."""
    top_ks: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Values of `dynamic_tree.top_k` to try for an EAGLE head."""
    curve: str | None = None
    """JSON file with the cost of passes on another machine, as in conf/curves. Searches for that
    machine, without decoding or writing a tree. Unset: measure this machine."""
    write: bool = True
    """Write the best tree to the head's folder."""
    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Batch sizes to give advice for."""
    num_repeats: int = 3
    """Timed passes over the second half of the prompts, which checks the choice."""
    out_dir: str = "outputs/tree_search"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("", self, "max_nodes", "num_repeats")
        for name in ("top_ks", "batch_sizes"):
            values = getattr(self, name)
            if not values or min(values) <= 0 or sorted(set(values)) != list(values):
                raise InputError(f"{name}={values}: must be numbers above 0, in rising order")
