"""The quickstart's parts on this processor and an old one."""

import json
from pathlib import Path

import pytest

from conf.errors import InputError
from scripts.bench import cpu as bench_cpu

SMALL = {
    "hidden": 128, "layers": 4, "vocab": 128, "rows": 32, "length": 32, "prompt": 8,
    "new_tokens": 6, "threads": 1,
}  # fmt: skip
TIMES = {
    "as it is": {"a pass": [2.0, 90.0, 1.0], "a step": [10.0, 10.0, 40.0], "a text": [4.0]},
    "AVX2": {"a pass": [3.0, 2.0, 4.0], "a step": [25.0, 31.0, 31.0], "a text": [3.0]},
    "bfloat16": {"a pass": [1.0], "a step": [4.0], "a text": [5.0]},
    "AVX2, bfloat16": {"a pass": [7.0], "a step": [80.0], "a text": [6.0]},
}


def test_the_part_that_loses_most_is_last() -> None:
    rows, worst = bench_cpu.build_rows(TIMES)
    assert rows == [
        ("a text", "4.0", "3.0", "0.75", "5.0", "6.0"),
        ("a pass", "2.0", "3.0", "1.50", "1.0", "7.0"),
        ("a step", "10.0", "31.0", "3.10", "4.0", "80.0"),
    ]
    assert worst == 3.1


class Quick:
    """A worker that only counts, with steps of its own in bfloat16 where it is to be wrong."""

    wrong = False

    def __init__(self, worker: str, _serve: str, sizes: str, **variables: str) -> None:
        assert (worker, variables.pop("OMP_NUM_THREADS")) == ("cpu", "1")
        self.old, self.narrow = bool(variables), json.loads(sizes)["dtype"] == "bfloat16"
        self.num_runs = -1

    def send(self, part: str) -> None:
        assert part == "a pass"

    def receive(self) -> list[object]:
        self.num_runs += 1
        if self.num_runs == 0:
            return ["OLD" if self.old else "NEW", ["a pass"]]
        # The first is to warm up.
        milliseconds = 1000.0 if self.num_runs == 1 else 31.0 if self.old else 10.0
        return [milliseconds, 5 + (self.narrow and self.wrong)]

    def end_process(self) -> None:
        pass


@pytest.mark.parametrize(("limit", "code"), [("3", 1), ("3.2", 0)])
def test_a_part_that_falls_off_ends_with_1(limit, code, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench_cpu, "WorkerProcess", Quick)
    assert bench_cpu.main(["--limit", limit, "--repeats", "1"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "NEW / OLD, 1 thread(s), processor time, milliseconds"
    assert lines[4] == "| a pass | 10.0 | 31.0 | 3.10 | 10.0 | 31.0 |"
    assert lines[5:] == ["", "a pass: 3.1 times as long with AVX2, 3 allowed"][: 2 * code]


def test_texts_of_other_steps_are_not_compared(monkeypatch) -> None:
    monkeypatch.setattr(bench_cpu, "WorkerProcess", Quick)
    monkeypatch.setattr(Quick, "wrong", True)
    with pytest.raises(SystemExit, match="a pass: takes different steps in different processes"):
        bench_cpu.main(["--repeats", "1"])


def test_parts_are_what_the_quickstart_does(tmp_path: Path) -> None:
    found = bench_cpu.build_parts(SMALL | {"dtype": "float32"}, tmp_path)
    steps = {name: run() for name, run in found.items()}
    # The prompt's pass gives one token of six; look-ups find the rest, untrained heads none of it.
    assert steps == {
        "target, 1 row": 1, "target, 5 rows": 1, "target, 32 rows": 1,
        "Medusa, training step": 1, "EAGLE-3, training step": 1,
        "text by vanilla": 5, "text by generate": 5, "text by medusa_chain": 5,
        "text by medusa_tree": 5, "text by eagle_chain": 5, "text by prompt_lookup": 1,
        "text by suffix": 1,
    }  # fmt: skip


@pytest.mark.slow
def test_the_table_of_processes(capsys) -> None:
    sizes = [
        word for name, size in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(size))
    ]
    bench_cpu.main([*sizes, "--repeats", "1", "--limit", "100"])
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].partition(" / ")[2].endswith(", AVX2, 1 thread(s), processor time, milliseconds")
    )
    assert len(lines) == 4 + 12


@pytest.mark.slow
def test_a_process_that_fails_says_why() -> None:
    sizes = json.dumps(SMALL | {"dtype": "float32", "layers": 1})
    worker = bench_cpu.WorkerProcess("cpu", "--serve", sizes)
    with pytest.raises(InputError, match=r"a process failed:\n(.|\n)*head\.layers is unset"):
        worker.receive()
    worker.end_process()
