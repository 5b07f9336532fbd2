"""Settings of the commands in `scripts/`."""

from dataclasses import dataclass, field
from enum import Enum

from conf.errors import InputError
from conf.settings.checks import below_one, not_negative, positive
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
    """Conversations that are shown."""


@dataclass
class CaptureRun(PackedRun):
    """`scripts/capture.py`."""

    layers: list[int] | None = None
    """Features for EAGLE-3, as indices of `output_hidden_states`; unset takes 2, L/2 and L-3 of
    L layers, [] none (Medusa and EAGLE-1 need none)."""
    format: StateFormat = StateFormat.bf16
    teacher: TeacherKind = TeacherKind.hidden
    top_k: int = 64
    """Tokens of `teacher=top_k`; of a smaller vocabulary all."""
    micro_batch_size: int = 4
    """Packed sequences per forward pass of one process."""
    num_replay_prompts: int = 16
    """Held-out prompts that the target answers, so that training can measure tau."""
    out_dir: str = "outputs/features"
    """A second start continues it."""
    seed: int = 0
    """Of the packing, and of which conversations are held out."""

    def __post_init__(self) -> None:
        positive("", self, "top_k", "micro_batch_size")
        not_negative("", self, "num_replay_prompts")
        if self.teacher is TeacherKind.top_k and self.layers == []:
            raise InputError(
                "layers=[]: with teacher=top_k there would be nothing for a head to read; name "
                "layers, or set teacher=hidden"
            )


@dataclass
class RegenerateRun(DataRun):
    """`scripts/regenerate.py`."""

    endpoint: str | None = None
    """URL of an OpenAI-compatible server, e.g. http://localhost:8000/v1; unset is in process."""
    model: str | None = None
    """Model name sent to the endpoint; unset takes the first it lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the endpoint's key, if it needs one."""
    concurrency: int = 16
    """Requests in flight."""
    max_retries: int = 5
    """Further attempts of a request that failed."""
    timeout_s: float = 300.0
    """Seconds that a request is waited for."""
    batch_size: int = 16
    """Conversations generated together in process."""
    max_new_tokens: int = 512
    """Tokens of an answer at most."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    plain: bool = False
    """In process, leave out what the target's generation config asks for (repetition penalty, stop
    texts and the like)."""
    out_dir: str = "outputs/regenerated"
    """Holds `conversations.jsonl`; a second start continues it."""
    seed: int = 0
    """Of the draws, above temperature 0."""

    def __post_init__(self) -> None:
        positive("", self, "concurrency", "batch_size", "max_new_tokens", "timeout_s")
        not_negative("", self, "temperature", "max_retries")
        if self.endpoint is None and self.model is not None:
            raise InputError(
                f"model={self.model}: names an endpoint's model, and endpoint is not set; "
                "in process it is target.path"
            )
        if self.endpoint is not None and self.plain:
            raise InputError(
                "plain=true: says how answers are written in process, and endpoint is set: serve "
                "the model with --generation-config vllm instead"
            )
        if self.endpoint is not None and "chat_template" in (self.data.chat_template_kwargs or {}):
            raise InputError(
                "data.chat_template_kwargs.chat_template: a server renders by the template that it "
                "was started with: unset it, and serve the model with --chat-template FILE"
            )


@dataclass
class RelayRun:
    """`scripts/relay.py`."""

    folder: str = "???"
    """The folder that the server writes to, e.g. /dev/shm/layers-2-18-33-36; made if missing."""
    host: str = "127.0.0.1"
    """Address to listen at. Of another than this machine's own, name a private one: texts and
    states go unencrypted to whoever has the token."""
    port: int = 8100
    """Of that address."""
    max_age_s: float = 3600.0
    """Age in seconds at which files and their locks are deleted, above what trainers wait for."""

    def __post_init__(self) -> None:
        positive("", self, "port", "max_age_s")
        if self.port > 65535:
            raise InputError(f"port={self.port}: must be at most 65535")


@dataclass
class PruneRun(ChainSettings, PackedRun):
    """`scripts/prune.py`."""

    head: HeadRef = field(default_factory=HeadRef)
    sizes: list[int] = field(default_factory=list)
    """Ids that a pruned head can draft, rising; one head each."""
    ranks: list[int] = field(default_factory=list)
    """Values of `output_rank` to measure beside them, rising; any head can draft so as it is."""
    num_sequences: int = 512
    """Packed training sequences along whose answers the target's first choices are counted."""
    num_replay_prompts: int = 64
    """Held-out prompts on which tau is replayed, over the target's own text."""
    max_new_tokens: int = 128
    """Of that text, per prompt."""
    out_dir: str = "outputs/pruned"
    """Folder for the pruned heads and the table."""
    seed: int = 0
    """Of the packing, of which conversations are held out, and of intervals."""

    def __post_init__(self) -> None:
        positive("", self, "num_sequences", "num_replay_prompts", "max_new_tokens", "depth")
        for name in ("sizes", "ranks"):
            values = getattr(self, name)
            if min(values, default=1) <= 0 or sorted(set(values)) != list(values):
                raise InputError(f"{name}={values}: must be numbers above 0, rising")


@dataclass
class RepairRun(AnswerSettings, ChainSettings, MeasureRun):
    """`scripts/repair.py`, which replays chains over greedy text."""

    out_dir: str = "outputs/repair"


@dataclass
class ServeCheckRun(ChainSettings, MeasureRun):
    """`scripts/serve_check.py`."""

    plain = True  # the server is told so

    endpoint: str = "???"
    """Base URL of a vLLM, SGLang or llama.cpp server that serves the target with the head, e.g.
    http://localhost:8000; nobody else may use it meanwhile."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the endpoint's key, if it needs one."""
    tolerance: float = 0.0
    """Share of the texts that may differ, and share by which drafts and accepted tokens of a
    depth may; 0 fits float32 on both sides."""
    depth: int | None = None
    """Draft tokens of a chain; unset takes the server's."""
    out_dir: str = "outputs/serve_check"

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one("", self, "tolerance")


@dataclass
class CompareRun:
    """`scripts/compare.py`."""

    results: list[str] = field(default_factory=list)
    """Folders with `acceptance.json`, each a row that is called after its folder; or files, or
    folders with one: results of `vllm bench serve`, Model-Optimizer's `acceptance_rate.json`,
    speculators' `acceptance.csv`."""
    out_dir: str = "outputs/comparison"
    """Folder for the table and the picture."""


class ContestPart(Enum):
    """Parts of a contest, in their order."""

    plan = "plan"
    """Probe every recipe, and settle how many steps it gets."""
    train = "train"
    measure = "measure"
    report = "report"


@dataclass
class ContestTrainConfig:
    """Settings that all trainings of a contest share."""

    batch_size: int = 8
    """Packed sequences per optimizer step, over all processes."""
    micro_batch_size: int = 1
    """Packed sequences per forward pass of one process."""

    def __post_init__(self) -> None:
        positive("train", self, "batch_size", "micro_batch_size")


@dataclass
class ContestRun(PackedRun):
    """`scripts/contest/run.py`; `data` is what is learnt, `prompts` what is measured on."""

    prompts: RowsConfig = field(default_factory=RowsConfig)
    """Unset `prompts.path` means the embedded default's."""
    recipes: list[str] = field(default_factory=lambda: ["medusa", "eagle3_1", "dspark"])
    """Heads to train: `medusa`, or a recipe of `conf/head`; settings may follow, as in
    `dspark head.num_layers=2`."""
    tokens: int | None = None
    """Tokens that each recipe learns, padding included; either this or `minutes`."""
    minutes: float | None = None
    """Of optimizer steps on this machine, in all; recipes have equal shares."""
    train: ContestTrainConfig = field(default_factory=ContestTrainConfig)
    launch: list[str] = field(default_factory=list)
    """Arguments of `accelerate launch` for trainings, e.g.
    [--config_file,conf/accelerate/ddp.yaml]; empty starts them by plain python."""
    untrained: list[str] = field(
        default_factory=lambda: ["prompt_lookup", "ngram", "suffix", "recycling"]
    )
    """Methods of `eval/speedup.py` without a head that compete."""
    concurrency: list[int] = field(default_factory=lambda: [1, 4])
    """Batch sizes at which tokens/s are predicted and measured."""
    max_new_tokens: int = 128
    """Tokens of an answer at most."""
    num_turns: int = 2
    """Questions of a dialogue that are asked."""
    num_repeats: int = 3
    """Timed passes over the prompts."""
    probe_steps: int = 8
    """Optimizer steps of the run that tells what a step takes."""
    parts: list[ContestPart] = field(default_factory=lambda: list(ContestPart))
    """What this start does; what is there is not made again."""
    out_dir: str = "outputs/contest"
    """A second start goes on."""
    seed: int = 0
    """Of weights, data and draws."""

    def __post_init__(self) -> None:
        positive("", self, "tokens", "minutes", "max_new_tokens", "num_turns", "num_repeats")
        if self.probe_steps < 4:
            raise InputError(f"probe_steps={self.probe_steps}: must be at least 4")
        if not self.recipes:
            raise InputError("recipes=[]: name at least one")
        if not self.concurrency or min(self.concurrency) < 1:
            raise InputError(f"concurrency={self.concurrency}: must be numbers above 0")


@dataclass
class TargetsRun:
    """`scripts/zoo/check.py`."""

    model_types: list[str] = field(default_factory=list)
    """Of transformers, e.g. [llama,qwen3_next]; empty takes all."""
    timeout: float = 300.0
    """Seconds after which an architecture's process is ended, and its check failed."""
    out_dir: str = "outputs/targets"
    """What was checked there is not checked again."""

    def __post_init__(self) -> None:
        positive("", self, "timeout")
