"""A GPU beside which torch.compile's needs are not met, as Triton is not here."""

from pathlib import Path

import pytest
import torch
from emulated.runs import forget, inputs, on_cuda, run_of, short

from conf.command import environment as compiler
from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.measure import SpeedupRun
from conf.settings.target import TargetConfig
from eval import speedup
from eval.measure import measurement as bench
from heads.target_model.load import load_target
from train.loop import sources
from train.objective import Objective

__all__ = ["inputs", "short"]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_spec", lambda _: object())
    monkeypatch.setattr(compiler, "which", lambda _: None)


def test_training_goes_on_without_and_says_what_is_missing(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    used: list[Objective] = []
    monkeypatch.setattr(Objective, "compile_parts", used.append)
    on_cuda(run_of("medusa", inputs, tmp_path / "run", compile=None))
    told = capsys.readouterr().out
    assert "not compiled, which is slower: torch.compile needs a C compiler (gcc or clang" in told
    assert "compiled on first use" not in told
    assert not used


def test_who_asks_for_it_is_refused_before_anything_is_loaded(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sources, bench):
        monkeypatch.setattr(module, "load_target", lambda *_: pytest.fail("loaded"))
    forget()
    with pytest.raises(InputError, match=r"^train\.compile=true: torch\.compile lacks a C comp"):
        run_of("medusa", inputs, tmp_path / "run", compile=True)()
    forget()
    run = SpeedupRun(
        target=TargetConfig(path=str(inputs / "target")),
        data=DataConfig(path=str(inputs / "chat.jsonl")),
        methods=["suffix"],
        compile=True,
        out_dir=str(tmp_path / "out"),
    )
    with pytest.raises(InputError, match=r"^compile=true: torch\.compile lacks a C comp"):
        speedup.main(run)


def test_flex_attention_is_compiled_too(inputs: Path) -> None:
    config = TargetConfig(path=str(inputs / "target"), attention="flex_attention")
    with pytest.raises(InputError, match=r"flex_attention: .* which needs a C compiler"):
        load_target(config, torch.device("cuda"))
