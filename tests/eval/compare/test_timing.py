from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conf.command.clock import DecodingTimes
from conf.command.jsonl_store import JsonlStore
from conf.settings.measure import SpeedupRun
from eval.compare import timing
from eval.compare.methods import Method
from eval.compare.timing import PromptRun, measure_methods
from eval.decode.engine import Generation, Step
from eval.measure.measurement import Measurement, compute_prompt_seed
from eval.measure.prompts import Prompt
from heads.decoding.sampling import GREEDY, drafter_seeds
from tests.eval.test_commands import KilledError


def prompt(category: str, dialogue: int = 0, turn: int = 1) -> Prompt:
    return Prompt(category, [5, 6], dialogue, turn)


def test_no_two_texts_share_a_seed() -> None:
    prompts = [prompt("a", d, t) for d in range(50) for t in (1, 2)]
    seeds = [compute_prompt_seed(p, seed) for p in prompts for seed in (0, 1)]
    assert len({*seeds, *drafter_seeds(seeds)}) == 400


class Machine:
    """Methods that do nothing but tell of their calls, the first in second 1."""

    def __init__(self, *names: str) -> None:
        self.calls: list[tuple[str, list[int], int]] = []
        self.methods = {name: Method(self.runner(name)) for name in names}

    def runner(self, name: str):
        def run(ids: list[list[int]], seeds: list[int], batch_size: int) -> list[Generation]:
            assert ids == [[5, 6]] * len(seeds)
            self.calls.append((name, seeds, batch_size))
            seconds = DecodingTimes(0.25, 0.5, total=float(len(self.calls)))
            steps = [Step(1, 2, 2)]
            return [Generation([7, 8, 9], steps, [(1,)], seconds, [4], [1.0, 2.0]) for _ in ids]

        return run


BENCH = Measurement(None, [], [prompt("a", 1), prompt("a", 2), prompt("b", 3)], GREEDY, {}, True)
SEEDS = [17, 33, 49]  # of the three prompts: 16 per dialogue, 1 per turn


def test_methods_take_turns_after_warm_ups_on_the_first_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = Machine("vanilla", "tree")
    found = measure_methods(BENCH, SpeedupRun(num_warmups=2, num_repeats=2), machine.methods)
    said = capsys.readouterr().err
    assert "warming up: 100%" in said and "| 4/4 " in said
    assert "decoding: 100%" in said and "| 12/12 " in said
    warm, timed = machine.calls[:4], machine.calls[4:]
    assert sorted(warm) == [("tree", SEEDS[:1], 1)] * 2 + [("vanilla", SEEDS[:1], 1)] * 2
    rounds = [timed[place : place + 2] for place in range(0, 12, 2)]
    for pair, seed in zip(rounds, SEEDS * 2, strict=True):
        assert sorted(pair) == [("tree", [seed], 1), ("vanilla", [seed], 1)]
    assert [run.prompt for run in found] == BENCH.prompts
    for name in ("vanilla", "tree"):
        places = [5 + place for place, call in enumerate(timed) if call[0] == name]
        for number, run in enumerate(found):
            assert run.seconds_per_repeat(name) == [places[number], places[3 + number]]


def test_prompts_of_batches_are_given_all_at_once() -> None:
    """Prompts of all categories; as many warm up as go on together."""
    machine = Machine("vanilla", "tree")
    config = SpeedupRun(num_warmups=1, num_repeats=2)
    found = measure_methods(BENCH, config, machine.methods, batch_size=2)
    warm, timed = machine.calls[:2], machine.calls[2:]
    assert sorted(warm) == [("tree", SEEDS[:2], 2), ("vanilla", SEEDS[:2], 2)]
    for pair in (timed[:2], timed[2:]):
        assert sorted(pair) == [("tree", SEEDS, 2), ("vanilla", SEEDS, 2)]
    for name in ("vanilla", "tree"):
        places = [3 + place for place, call in enumerate(timed) if call[0] == name]
        assert [run.seconds_per_repeat(name) for run in found] == [places] * 3


def test_no_method_always_comes_after_the_same_one() -> None:
    names = ("vanilla", "generate", "tree")

    def orders(seed: int) -> list[tuple[str, ...]]:
        machine = Machine(*names)
        measure_methods(
            BENCH, SpeedupRun(num_warmups=0, num_repeats=20, seed=seed), machine.methods
        )
        called = [name for name, *_ in machine.calls]
        return [tuple(called[place : place + 3]) for place in range(0, len(called), 3)]

    found = orders(0)
    assert all(sorted(order) == sorted(names) for order in found)
    assert len(set(found)) == 6  # every order there is
    assert orders(0) == found != orders(1)


class Learner:
    """Its texts have a token for every text it knows."""

    def __init__(self, num_runs: int = 99) -> None:
        self.known: list[int] = []
        self.left = num_runs
        self.methods = {"vanilla": Method(self.run, forget=self.known.clear)}

    def run(self, _ids: list[list[int]], seeds: list[int], _size: int) -> list[Generation]:
        if not self.left:
            raise KilledError
        self.left -= 1
        self.known.extend(seeds)
        return [Generation([7] * len(self.known), times=DecodingTimes(total=1.0)) for _ in seeds]

    def lengths(self, config: SpeedupRun, journal: JsonlStore | None = None) -> list[list[int]]:
        """[prompt][repeat]"""
        found = measure_methods(BENCH, config, self.methods, journal=journal)
        return [[len(text.token_ids) for text in run.texts["vanilla"]] for run in found]


@pytest.mark.parametrize("num_runs", range(2, 8))
def test_a_repeat_knows_what_it_wrote_itself(tmp_path: Path, num_runs: int) -> None:
    """Two warm-ups: killed after `num_runs` texts, or not at all."""
    config = SpeedupRun(num_warmups=2, num_repeats=2)
    assert Learner().lengths(config) == [[1, 1], [2, 2], [3, 3]]
    with JsonlStore(tmp_path, {}, "runs.jsonl") as journal, pytest.raises(KilledError):
        Learner(num_runs).lengths(config, journal)
    with JsonlStore(tmp_path, {}, "runs.jsonl") as journal:
        assert len(journal.done_ids) == num_runs - 2
        assert Learner().lengths(config, journal) == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize(("batch_size", "num_jobs"), [(1, 12), (2, 4)])
def test_what_has_run_is_not_run_again(tmp_path: Path, batch_size: int, num_jobs: int) -> None:
    config = SpeedupRun(num_warmups=1, num_repeats=2)

    def timed(machine: Machine, journal: JsonlStore | None = None) -> list[PromptRun]:
        return measure_methods(BENCH, config, machine.methods, batch_size, journal)

    expected = timed(Machine("vanilla", "tree"))
    broken = Machine("vanilla", "tree")
    run = broken.methods["tree"].run

    def stops(*given) -> list[Generation]:
        if len(broken.calls) > num_jobs - 1:
            raise KilledError
        return run(*given)

    broken.methods["tree"] = Method(stops)
    with JsonlStore(tmp_path, {}, "runs.jsonl") as journal, pytest.raises(KilledError):
        timed(broken, journal)
    with JsonlStore(tmp_path, {}, "runs.jsonl") as journal:
        num_kept = len(journal.done_ids)
        assert 0 < num_kept < num_jobs
        machine = Machine("vanilla", "tree")
        found = timed(machine, journal)
    # Nothing is warmed up that does not run.
    assert len(machine.calls) == num_jobs - num_kept + len({name for name, *_ in machine.calls})
    for one, other in zip(expected, found, strict=True):
        for name in ("vanilla", "tree"):
            assert [replace(g, times=None) for g in one.texts[name]] == [
                replace(g, times=None) for g in other.texts[name]
            ]
            assert all(isinstance(s, float) for s in other.seconds_per_repeat(name))
            assert other.seconds_per_repeat(name, "draft") == [0.5, 0.5]
    with JsonlStore(tmp_path, {}, "runs.jsonl") as journal:
        machine = Machine("vanilla", "tree")
        assert timed(machine, journal) == found
        assert machine.calls == []


def test_a_journal_tells_batch_sizes_apart(tmp_path: Path) -> None:
    machine = Machine("vanilla")
    with JsonlStore(tmp_path, {}, "runs.jsonl") as journal:
        for batch_size in (1, 2, 3):
            config = SpeedupRun(num_warmups=0, num_repeats=1)
            measure_methods(BENCH, config, machine.methods, batch_size, journal)
    assert [size for *_, size in machine.calls] == [1, 1, 1, 2, 3]


def test_tokens_after_the_prompt_are_counted_apart() -> None:
    text = Generation([7, 8, 9], [Step(1, 2, 2)])
    run = PromptRun(prompt("a"), {"tree": [text, text], "silent": [Generation([7])]})
    assert (run.num_tokens("tree"), run.num_decoded("tree")) == (3, 2)
    assert (run.num_tokens("silent"), run.num_decoded("silent")) == (1, 0)


def test_only_methods_with_parts_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile of transformers' own loop would take longest, and fill no part."""
    profiled: list[list[Generation]] = []

    def measure(call: Callable[[], list[Generation]]) -> dict[str, float]:
        profiled.append(call())
        return {"draft": 0.25}

    monkeypatch.setattr(timing, "measure_busy_seconds", measure)
    machine, plain = Machine("tree"), [Generation([7], times=DecodingTimes(0.5, total=2.0))]
    methods = {**machine.methods, "generate": Method(lambda *_: plain)}
    cuda = SimpleNamespace(device=torch.device("cuda"))
    bench = replace(BENCH, prompts=[prompt("a", 1)], embeddings_and_output_head=cuda)
    run = measure_methods(bench, SpeedupRun(num_warmups=0, num_repeats=1), methods)[0]
    assert run.busy == {"tree": {"draft": 0.25}}
    assert len(profiled) == 1
