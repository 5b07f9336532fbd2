"""Settings of the commands in `scripts/`."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import check_not_negative, check_positive
from conf.settings.data import (
    DataRun,
    PackedRun,
    RowsConfig,
    StateFormat,
    TeacherKind,
)
from conf.settings.drafting import HeadRef
from conf.settings.measure import AnswerSettings, ChainSettings, MeasureRun


@dataclass
class ShowMaskRun(PackedRun):
    """`scripts/show_mask.py`."""

    num_samples: int = 3
    """Number of conversations to show."""


@dataclass
class CaptureRun(PackedRun):
    """`scripts/capture.py`."""

    layers: list[int] | None = None
    """Hidden states to store for EAGLE-3, as indices of `output_hidden_states`. Unset: 2, L/2 and
    L-3 of L layers. []: none, for Medusa and EAGLE-1."""
    format: StateFormat = StateFormat.bf16
    teacher: TeacherKind = TeacherKind.hidden
    top_k: int = 64
    """Tokens stored per position with `teacher=top_k`; at most the vocabulary."""
    micro_batch_size: int = 4
    """Packed sequences per forward pass of one process."""
    num_replay_prompts: int = 16
    """Held-out prompts that the target answers. Training measures tau on them."""
    out_dir: str = "outputs/features"
    """Folder for the stored states. A second start continues there."""
    seed: int = 0
    """Seed of packing and of the choice of held-out conversations."""

    def __post_init__(self) -> None:
        check_positive("", self, "top_k", "micro_batch_size")
        check_not_negative("", self, "num_replay_prompts")
        if self.teacher is TeacherKind.top_k and self.layers == []:
            raise InputError(
                "layers=[]: teacher=top_k stores no hidden state either, so heads would have "
                "nothing to read; name layers, or set teacher=hidden"
            )


@dataclass
class RegenerateRun(DataRun):
    """`scripts/regenerate.py`."""

    endpoint: str | None = None
    """URL of an OpenAI-compatible server, e.g. http://localhost:8000/v1. Unset: see `vllm`."""
    vllm: str = "auto"
    """Environment with the vLLM that answers, which this command starts and stops: its folder or
    its Python. auto: that of the `vllm` on the path, if any. none, or without one: in process."""
    model: str | None = None
    """Model name sent to the server. Unset: the first that the server lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the server's key, if the server needs one."""
    concurrency: int = 16
    """Requests in flight to `endpoint`."""
    max_retries: int = 5
    """Further attempts after a request fails."""
    timeout_s: float = 300.0
    """Seconds to wait for a request."""
    batch_size: int = 16
    """Conversations generated together in process."""
    max_new_tokens: int = 512
    """Largest number of tokens per answer."""
    temperature: float = 0.0
    """Sampling temperature. 0 takes the likeliest token."""
    plain: bool = False
    """Without `endpoint`, ignore the target's generation config (repetition penalty, stop texts and
    the like)."""
    out_dir: str = "outputs/regenerated"
    """Folder for `conversations.jsonl`. A second start continues there."""
    seed: int = 0
    """Seed of sampling, above temperature 0."""

    def __post_init__(self) -> None:
        check_positive("", self, "concurrency", "batch_size", "max_new_tokens", "timeout_s")
        check_not_negative("", self, "temperature", "max_retries")
        if self.endpoint is None and self.model is not None:
            raise InputError(
                f"model={self.model}: names a model of a server, but endpoint is unset; set "
                "endpoint=URL, or target.path to generate in process"
            )
        if self.endpoint is not None and self.vllm != "auto":
            raise InputError(
                f"vllm={self.vllm}: is started by this command, but endpoint names a server that "
                "runs; set one of them"
            )
        if self.endpoint is not None and self.plain:
            raise InputError(
                "plain=true: applies in process only, but endpoint is set; leave plain unset and "
                "serve the model with --generation-config vllm"
            )
        if self.endpoint is not None and "chat_template" in (self.data.chat_template_kwargs or {}):
            raise InputError(
                "data.chat_template_kwargs.chat_template: a server applies the template it was "
                "started with; leave it unset and serve the model with --chat-template FILE"
            )


@dataclass
class RelayRun:
    """`scripts/relay.py`."""

    folder: str = "???"
    """Folder that the server writes to, e.g. /dev/shm/layers-2-18-33-36. Made if missing."""
    host: str = "127.0.0.1"
    """Address to listen at. Beyond this machine, name a private address: texts and states travel
    unencrypted to anyone with the token."""
    port: int = 8100
    """Port to listen at."""
    max_age_s: float = 3600.0
    """Age in seconds at which files and their locks are deleted. Must exceed the time that trainers
    wait."""

    def __post_init__(self) -> None:
        check_positive("", self, "port", "max_age_s")
        if self.port > 65535:
            raise InputError(f"port={self.port}: must be at most 65535")


@dataclass
class PruneRun(ChainSettings, PackedRun):
    """`scripts/prune.py`."""

    head: HeadRef = field(default_factory=HeadRef)
    sizes: list[int] = field(default_factory=list)
    """Numbers of token ids that pruned heads can draft, rising. Writes one head for each."""
    ranks: list[int] = field(default_factory=list)
    """Values of `output_rank` to measure too, rising. They need no new head."""
    num_sequences: int = 512
    """Packed training sequences on whose answers the target's first choices are counted."""
    num_replay_prompts: int = 64
    """Held-out prompts for replaying tau over the target's own text."""
    max_new_tokens: int = 128
    """Tokens of that text per prompt."""
    out_dir: str = "outputs/pruned"
    """Folder for the pruned heads and the table."""
    seed: int = 0
    """Seed of packing, held-out conversations and confidence intervals."""

    def __post_init__(self) -> None:
        check_positive("", self, "num_sequences", "num_replay_prompts", "max_new_tokens", "depth")
        for name in ("sizes", "ranks"):
            values = getattr(self, name)
            if min(values, default=1) <= 0 or sorted(set(values)) != list(values):
                raise InputError(f"{name}={values}: must be numbers above 0, in rising order")


@dataclass
class RepairRun(AnswerSettings, ChainSettings, MeasureRun):
    """`scripts/repair.py`, which replays chains over greedy text."""

    out_dir: str = "outputs/repair"


@dataclass
class CompareRun:
    """`scripts/compare.py`."""

    results: list[str] = field(default_factory=list)
    """Folders with `acceptance.json`; each gives a row named after its folder. Also files, or
    folders with one: results of `vllm bench serve`."""
    out_dir: str = "outputs/comparison"
    """Folder for the table and the picture."""


class ContestPart(Enum):
    """Parts of a contest, in order."""

    train = "train"
    measure = "measure"
    report = "report"


@dataclass
class ContestTrainConfig:
    """Settings shared by all trainings of a contest."""

    batch_size: int = 8
    """Packed sequences per optimizer step, over all processes."""
    micro_batch_size: int = 1
    """Packed sequences per forward pass of one process."""

    def __post_init__(self) -> None:
        check_positive("train", self, "batch_size", "micro_batch_size")


@dataclass
class ContestRun(PackedRun):
    """`scripts/contest/run.py`; trains on `data`, measures on `prompts`."""

    prompts: RowsConfig = field(default_factory=RowsConfig)
    """Unset `prompts.path`: the embedded default."""
    recipes: list[str] = field(default_factory=lambda: ["medusa", "eagle3_1", "dspark"])
    """Heads to train: `medusa` or a recipe of `conf/head`. Settings may follow, as in `dspark
    head.num_layers=2`."""
    tokens: int = "???"  # type: ignore[assignment]
    """Training tokens per recipe, padding included."""
    train: ContestTrainConfig = field(default_factory=ContestTrainConfig)
    launch: list[str] = field(default_factory=list)
    """Arguments of `accelerate launch` for trainings, e.g.
    [--config_file,conf/accelerate/ddp.yaml]. Empty: start them with plain python."""
    untrained: list[str] = field(
        default_factory=lambda: ["prompt_lookup", "ngram", "suffix", "recycling"]
    )
    """Methods of `eval/speedup.py` without a trained head to include."""
    concurrency: list[int] = field(default_factory=lambda: [1, 4])
    """Batch sizes at which tokens/s are measured."""
    max_new_tokens: int = 128
    """Largest number of tokens per answer."""
    num_turns: int = 2
    """Questions to ask per dialogue."""
    num_repeats: int = 3
    """Timed passes over the prompts."""
    parts: list[ContestPart] = field(default_factory=lambda: list(ContestPart))
    """Parts to run. Existing results are kept."""
    out_dir: str = "outputs/contest"
    """Folder for the contest. A second start continues there."""
    seed: int = 0
    """Seed of weights, data and sampling."""

    def __post_init__(self) -> None:
        check_positive("", self, "max_new_tokens", "num_turns", "num_repeats")
        if not self.recipes:
            raise InputError("recipes=[]: no head to train; name one, e.g. recipes=[medusa]")
        if not self.concurrency or min(self.concurrency) < 1:
            raise InputError(f"concurrency={self.concurrency}: must be numbers above 0")


@dataclass
class TargetsRun:
    """`scripts/zoo/check.py`."""

    model_types: list[str] = field(default_factory=list)
    """Model types of transformers, e.g. [llama,qwen3_next]. Empty: all."""
    timeout: float = 300.0
    """Seconds after which the check of an architecture is ended and counts as failed."""
    out_dir: str = "outputs/targets"
    """Folder for results. Checked architectures are skipped."""

    def __post_init__(self) -> None:
        check_positive("", self, "timeout")
