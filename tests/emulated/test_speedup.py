"""`eval/speedup.py` on an emulated GPU, from its settings to its files."""

import json
from pathlib import Path

import pytest
from emulated.runs import HEADS, forget
from toys import save_target

from conf.settings.data import DataConfig
from conf.settings.drafting import SelfDraftConfig
from conf.settings.measure import SpeedupRun
from conf.settings.target import Dtype, TargetConfig
from eval import speedup
from eval.compare import timing


def test_steps_and_passes_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path / "target", num_hidden_layers=4, **HEADS)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"turns": [f"hello number {n}"], "category": "a"} for n in range(2)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Minutes, as each emulated operation is many real ones.
    monkeypatch.setattr(timing, "_profile_busy_seconds", lambda *_: None)
    forget()
    speedup.main(
        SpeedupRun(
            target=TargetConfig(path=str(tmp_path / "target"), dtype=Dtype.float32),
            data=DataConfig(path=str(prompts)),
            methods=["suffix", "skip_layers"],
            self_draft=SelfDraftConfig(skip=[1]),
            max_new_tokens=8,
            num_turns=1,
            num_warmups=0,
            num_repeats=1,
            concurrency=[2],
            out_dir=str(tmp_path / "out"),
        )
    )
    assert "cuDNN's is off" in capsys.readouterr().err
    result = json.loads((tmp_path / "out" / "speedup.json").read_text())
    assert result["lossless"]["num_equal"] == 2
    captured = {name: row.get("captured") for name, row in result["methods"].items()}
    assert captured == {
        "vanilla": "step", "generate": None, "suffix": "verify pass", "skip_layers": "step",
    }  # fmt: skip
    captures = {name: row.get("captures") for name, row in result["methods"].items()}
    assert captures.pop("generate") is None
    assert all(each["num"] > 0 < each["seconds"] for each in captures.values()), captures
    parts = {name: row["breakdown"].keys() for name, row in result["methods"].items()}
    assert "step" in parts["vanilla"]
    assert "step" not in parts["suffix"]
    assert (tmp_path / "out" / "speedup.html").exists()
