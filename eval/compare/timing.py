"""Runs methods side by side: prompts, repeats and methods in turn, each run kept as it ends."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from tqdm import tqdm

from conf.schema_measure import SpeedupRun
from data.journal import Journal
from eval.clock import Times, busy_seconds
from eval.compare.methods import Method
from eval.decode.engine import Generation, Step
from eval.measure import processes
from eval.measure.bench import Bench, batches, seed_of
from eval.measure.prompts import Prompt


@dataclass(frozen=True)
class BatchRun:
    """Prompts of one category that every method decoded together.

    Attributes:
        prompts: the prompts.
        runs: by method, [repeat][prompt].
        busy: by method and part, seconds in which a GPU worked; of the first batch alone.
    """

    prompts: list[Prompt]
    runs: dict[str, list[list[Generation]]]
    busy: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def category(self) -> str:
        """That of all its prompts."""
        return self.prompts[0].category

    def num_tokens(self, method: str) -> int:
        """Tokens of all texts, counted from their ids."""
        return sum(len(g.token_ids) for g in self.runs[method][0])

    def num_decoded(self, method: str) -> int:
        """Of those, the tokens that came after the prompts' own pass."""
        return sum(step.num_emitted for g in self.runs[method][0] for step in g.steps)

    def seconds(self, method: str, part: str = "total") -> list[float]:
        """Per repeat, for the whole batch."""
        return [getattr(repeat[0].times, part) for repeat in self.runs[method]]


@dataclass(frozen=True)
class _Job:
    """One method on one batch, once; `id` is the same in any order."""

    id: int
    repeat: int
    batch: int
    method: str


def time_methods(
    bench: Bench, config: SpeedupRun, methods: dict[str, Method], journal: Journal | None = None
) -> list[BatchRun]:
    """Every method on every batch, interleaved, after warm-ups; of all processes.

    The order of the methods is drawn anew for every batch and repeat, so that none always comes
    after the same one. What a method remembers of texts starts anew with every repeat: a prompt
    asked again would only copy its own answer.

    Args:
        bench: with the prompts.
        config: the settings.
        methods: by name.
        journal: of what has run, which is not run again; but a method that remembers writes the
            texts of a repeat that was broken off once more, unmeasured, to know them.
    """
    prompts = [
        [bench.prompts[index] for index in group]
        for group in batches(bench.prompts, config.batch_size)
    ]
    jobs = _jobs(config.num_repeats, len(prompts), list(methods), config.seed)
    rows = [] if journal is None else journal.rows()
    kept = {row["id"]: _texts(row) for row in rows if "texts" in row}
    waiting = {(job.method, job.repeat) for job in jobs if job.id not in kept}
    for _ in range(config.num_warmups):
        for name in {name for name, _ in waiting}:
            _run(methods[name], prompts[0], config.seed)
    progress = tqdm(jobs, desc="decoding", unit="text", disable=not bench.main)
    for job in progress:
        method = methods[job.method]
        if method.forget and job.batch == 0:
            method.forget()
        relearns = method.forget and (job.method, job.repeat) in waiting
        if job.id in kept and not relearns:
            continue
        texts = _run(method, prompts[job.batch], config.seed)
        if job.id not in kept:
            kept[job.id] = texts
            if journal is not None:
                journal.append([{"id": job.id, "texts": [asdict(g) for g in texts]}])
    found = [BatchRun(each, {name: [] for name in methods}) for each in prompts]
    for job in jobs:
        found[job.batch].runs[job.method].append(kept[job.id])
    if bench.target is not None and bench.target.device.type == "cuda":
        for name, method in methods.items():
            if method.forget:
                method.forget()
            found[0].busy[name] = busy_seconds(partial(_run, method, prompts[0], config.seed))
    return sorted(processes.gathered(found), key=_place)


def _jobs(num_repeats: int, num_batches: int, names: list[str], seed: int) -> list[_Job]:
    rng, jobs = random.Random(seed), []
    for repeat in range(num_repeats):
        for batch in range(num_batches):
            first = (repeat * num_batches + batch) * len(names)
            for place in rng.sample(range(len(names)), len(names)):
                jobs.append(_Job(first + place, repeat, batch, names[place]))
    return jobs


def _run(method: Method, prompts: Sequence[Prompt], seed: int) -> list[Generation]:
    ids = [prompt.token_ids for prompt in prompts]
    return method.run(ids, [seed_of(prompt, seed) for prompt in prompts])


def _texts(row: dict[str, Any]) -> list[Generation]:
    """What `asdict` of the texts became on disk."""
    return [
        Generation(
            text["token_ids"],
            [Step(**step) for step in text["steps"]],
            [tuple(path) for path in text["paths"]],
            Times(**text["times"]),
            text["drafted"],
        )
        for text in row["texts"]
    ]


def _place(batch: BatchRun) -> tuple[int, int]:
    return batch.prompts[0].turn, batch.prompts[0].dialogue
