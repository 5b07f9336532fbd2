import json
from pathlib import Path

from scripts import quickstart


def test_what_is_there_is_not_made_again_but_shown(tmp_path: Path, capsys) -> None:
    for folder in ("head", "medusa/head", "vllm"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "acceptance.json").write_text('{"tau": 2.0, "alpha": [0.5]}')
    figures = {"tau": 2.0, "tokens_per_s": 10.0, "speedup": 1.5, "speedup_ci95": [1.25, 1.75]}
    answer = [["    return", 0], [" a", 1], ["<|end|>", 0]]
    speedup = {
        "baseline": "generate",
        "methods": {"eagle_chain": figures, "generate": figures | {"speedup_ci95": None}},
        "texts": [{"question": "def f(a):", "methods": {"vanilla": answer, "eagle_chain": answer}}],
    }
    (tmp_path / "speedup.json").write_text(json.dumps(speedup))
    quickstart.main(tmp_path)
    shown = capsys.readouterr().out
    assert "def f(a):\n    return a\n" in shown
    assert "1.50" in shown and "done before" in shown
    table = quickstart.build_summary(speedup, {"tau": 2.0, "alpha": [0.5, 0.25]})
    assert table.title == "Held-out prompts; speed-up over the baseline, generate"
    assert [[column.header, *column.cells] for column in table.columns] == [
        ["method", "eagle_chain", "generate"], ["tau", "2.00", "2.00"],
        ["tokens/s", "10.00", "10.00"], ["speed-up", "1.50", "1.50"],
        ["95% interval", "1.25-1.75", ""],
    ]  # fmt: skip
    assert table.caption == "replayed tau 2.000, alpha per depth 0.50 0.25"
    assert f"{tmp_path}/speedup.png" in shown.replace("\n", "")
    assert "accelerate launch train/eagle.py head=eagle3_1 target.path=MODEL" in shown


def test_what_is_missing_is_run(tmp_path: Path) -> None:
    stages = {name: (file, set(words)) for name, file, words in quickstart.list_stages(tmp_path)}
    head, medusa = tmp_path / "head", tmp_path / "medusa/head"
    assert {name: str(file.relative_to(tmp_path)) for name, (file, _) in stages.items()} == {
        "EAGLE-3.1": "head/config.json", "Medusa": "medusa/head/config.json",
        "acceptance": "acceptance.json", "speedup": "speedup.json", "export": "vllm/config.json",
    }  # fmt: skip
    expected = {
        "EAGLE-3.1": {"train/eagle.py", f"out_dir={tmp_path}", "train.resume=auto"},
        "Medusa": {"train/medusa.py", f"out_dir={tmp_path}/medusa", "train.resume=auto"},
        "acceptance": {f"head.path={head}", f"out_dir={tmp_path}"},
        "speedup": {f"head.path={head}", f"heads=[{medusa}]", f"out_dir={tmp_path}"},
        "export": {f"head.path={head}", f"out_dir={tmp_path}/vllm", "format=vllm"},
    }
    assert all(words <= stages[name][1] for name, words in expected.items())
