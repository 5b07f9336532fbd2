import json
from pathlib import Path

from scripts import quickstart


def test_what_is_there_is_not_made_again_but_shown(tmp_path: Path, capsys) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head/config.json").write_text("{}")
    (tmp_path / "acceptance.json").write_text('{"tau": 2.0, "alpha": [0.5]}')
    figures = {"tau": 2.0, "tokens_per_s": 10.0, "speedup": 1.5}
    answer = [["    return", 0], [" a", 1], ["<|end|>", 0]]
    speedup = {
        "baseline": "generate",
        "methods": {"medusa_chain": figures},
        "texts": [
            {"question": "def f(a):", "methods": {"vanilla": answer, "medusa_chain": answer}}
        ],
    }
    (tmp_path / "speedup.json").write_text(json.dumps(speedup))
    quickstart.main(tmp_path)
    shown = capsys.readouterr().out
    assert "def f(a):\n    return a\n" in shown
    assert "1.50" in shown and "done before" in shown
    table = quickstart.build_summary(speedup, {"tau": 2.0, "alpha": [0.5, 0.25]})
    assert table.title == "Held-out prompts; speed-up over the baseline, generate"
    assert [[column.header, *column.cells] for column in table.columns] == [
        ["method", "medusa_chain"], ["tau", "2.00"], ["tokens/s", "10.00"], ["speed-up", "1.50"],
    ]  # fmt: skip
    assert table.caption == "replayed tau 2.000, alpha per depth 0.50 0.25"
    assert f"{tmp_path}/speedup.png" in shown.replace("\n", "")
    assert "accelerate launch train/eagle.py head=eagle3_1 target.path=MODEL" in shown


def test_what_is_missing_is_run(tmp_path: Path) -> None:
    commands = {name: arguments for name, _, arguments in quickstart.list_stages(tmp_path)}
    assert list(commands) == ["train", "acceptance", "speedup"]
    assert "train.resume=auto" not in commands["train"]
    (tmp_path / "metrics.jsonl").write_text("")
    commands = {name: arguments for name, _, arguments in quickstart.list_stages(tmp_path)}
    assert commands["train"][-1] == "train.resume=auto"
