"""Times of methods side by side: prompts, repeats and methods in turn, with each run saved."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from conf.command.clock import DecodingTimes, measure_busy_seconds
from conf.command.jsonl_store import JsonlStore
from conf.settings.measure import SpeedupRun
from eval.compare.methods import Method
from eval.decode.engine import Generation, Step
from eval.measure.measurement import Measurement, compute_prompt_seed, gather_items
from eval.measure.prompts import Prompt

STEP_PARTS = ("draft", "verify", "accept", "step")
"""Parts of a decoding step; `step` is all three where one CUDA graph holds them."""
JOBS_PER_SIZE = 1 << 32
"""Job numbers reserved for each batch size in a journal."""


@dataclass(frozen=True)
class PromptRun:
    """Prompt that every method decoded, possibly in a batch.

    Attributes:
        prompt: the decoded prompt.
        texts: one text per repeat, by method.
        busy: seconds in which a GPU worked, by method and part; of the first job only.
    """

    prompt: Prompt
    texts: dict[str, list[Generation]]
    busy: dict[str, dict[str, float]] = field(default_factory=dict)

    def num_tokens(self, method: str) -> int:
        """Count the tokens of a method's text."""
        return len(self.texts[method][0].token_ids)

    def num_decoded(self, method: str) -> int:
        """Count the tokens of a method's text that came after the prompt's own pass."""
        return sum(step.num_emitted for step in self.texts[method][0].steps)

    def seconds_per_repeat(self, method: str, part: str = "total") -> list[float]:
        """Return the text's share of the seconds of its batch, per repeat."""
        return [getattr(text.times, part) for text in self.texts[method]]


class _Job(NamedTuple):
    """One run of a method on some prompts; `id` does not depend on the order."""

    id: int
    repeat: int
    group: int
    method: str


def measure_methods(
    measurement: Measurement,
    config: SpeedupRun,
    methods: dict[str, Method],
    batch_size: int = 1,
    journal: JsonlStore | None = None,
) -> list[PromptRun]:
    """Run every method on every prompt, interleaved, after warm-ups, over all processes.

    Prompts decoded one at a time are separate jobs; batches are one job, as the next prompt takes
    the place of a finished text. The order of methods is drawn anew for every job and repeat, so
    that no method always follows the same one. What a method remembers is cleared at every repeat;
    otherwise it would copy its own earlier answer.

    Args:
        measurement: measurement with the prompts.
        config: settings of the command.
        methods: methods by name.
        batch_size: texts decoded together.
        journal: finished runs, which are not repeated. A method that remembers decodes the texts of
            an interrupted repeat again, unmeasured.
    """
    prompts = measurement.prompts
    groups = [[prompt] for prompt in prompts] if batch_size == 1 else [prompts]
    start = batch_size * JOBS_PER_SIZE
    jobs = _draw_jobs(start, config.num_repeats, len(groups), list(methods), config.seed)
    rows = [] if journal is None else journal.load_rows()
    done = {row["id"]: list(map(_parse_generation, row["texts"])) for row in rows if "texts" in row}
    waiting = {(job.method, job.repeat) for job in jobs if job.id not in done}
    hidden = not measurement.is_main_process
    warmups = sorted({name for name, _ in waiting}) * config.num_warmups
    for name in tqdm(warmups, "warming up", unit="pass", disable=hidden or not warmups):
        _run_method(methods[name], prompts[:batch_size], config.seed, batch_size)
    description = "decoding" if batch_size == 1 else f"decoding, {batch_size} at a time"
    progress = tqdm(jobs, desc=description, unit="job", disable=hidden)
    for job in progress:
        method = methods[job.method]
        if method.forget and job.group == 0:
            method.forget()
        relearns = method.forget and (job.method, job.repeat) in waiting
        if job.id in done and not relearns:
            continue
        texts = _run_method(method, groups[job.group], config.seed, batch_size)
        if job.id not in done:
            done[job.id] = texts
            if journal is not None:
                journal.append([{"id": job.id, "texts": [asdict(text) for text in texts]}])
    runs = [PromptRun(prompt, {name: [] for name in methods}) for prompt in prompts]
    for job in jobs:
        # One prompt per job, or a single job.
        for run, text in zip(runs[job.group :], done[job.id], strict=False):
            run.texts[job.method].append(text)
    target = measurement.embeddings_and_output_head
    if target is not None and target.device.type == "cuda":
        for name, method in methods.items():
            _profile_busy_seconds(name, method, runs[: len(groups[0])], config.seed, batch_size)
    gathered = gather_items(runs)
    return sorted(gathered, key=lambda run: (run.prompt.turn, run.prompt.dialogue))


def _profile_busy_seconds(
    name: str, method: Method, runs: list[PromptRun], seed: int, batch_size: int
) -> None:
    """Add the GPU's working seconds to the runs of a job; transformers' loops have no parts."""
    timed = (run.seconds_per_repeat(name, part) for run in runs for part in STEP_PARTS)
    if not any(map(any, timed)):
        return
    if method.forget:
        method.forget()
    prompts = [run.prompt for run in runs]
    busy = measure_busy_seconds(partial(_run_method, method, prompts, seed, batch_size))
    for run in runs:
        run.busy[name] = {part: seconds / len(runs) for part, seconds in busy.items()}


def _draw_jobs(
    start: int, num_repeats: int, num_groups: int, names: list[str], seed: int
) -> list[_Job]:
    rng, jobs = random.Random(seed), []
    for repeat in range(num_repeats):
        for group in range(num_groups):
            first = start + (repeat * num_groups + group) * len(names)
            for place in rng.sample(range(len(names)), len(names)):
                jobs.append(_Job(first + place, repeat, group, names[place]))
    return jobs


def _run_method(
    method: Method, prompts: Sequence[Prompt], seed: int, batch_size: int
) -> list[Generation]:
    ids = [prompt.token_ids for prompt in prompts]
    return method.run(ids, [compute_prompt_seed(prompt, seed) for prompt in prompts], batch_size)


def _parse_generation(row: dict[str, Any]) -> Generation:
    """Read a text from the result of `asdict`."""
    steps, paths = [Step(**step) for step in row["steps"]], [tuple(path) for path in row["paths"]]
    times = DecodingTimes(**row["times"])
    return Generation(**row | {"steps": steps, "paths": paths, "times": times})
