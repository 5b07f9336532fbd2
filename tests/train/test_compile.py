"""When a run is compiled, and what is said where it cannot be."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toys import noisy_head, random_target

from conf.command.environment import check_compile, find_missing_toolchain
from conf.errors import InputError
from conf.settings.training import TrainConfig
from train.loop.command import MIN_COMPILED_LOGITS, needs_compile
from train.loss import fused_linear as fused

MILLION = 10**6


def asked(device: str = "cpu", processes: int = 1, logits: int = 3, **train: object) -> bool:
    """The answer for a run of 1,000 steps of 10 sequences of 1,000 tokens."""
    config = TrainConfig(**{"max_steps": 1000, "batch_size": 10, "warmup_steps": 0, **train})
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
    return needs_compile(config, 1000, SimpleNamespace(loss_logits_per_token=logits), accelerator)


def test_a_gpu_compiles_and_a_setting_has_the_last_word() -> None:
    assert asked("cuda", logits=0)
    assert not asked("cuda", compile=False)
    assert asked("cpu", logits=0, compile=True)


def test_a_cpu_compiles_where_the_run_is_long_enough() -> None:
    least = int(MIN_COMPILED_LOGITS) // (10 * MILLION)
    assert not asked(logits=least)
    assert asked(logits=least + 1)
    assert not asked(logits=least + 1, processes=2)
    assert not asked(logits=0)


def machine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *programs: str, header: bool = True
) -> None:
    """Has these programs, Triton, and Python.h or not."""
    (folder / "bin").mkdir()
    for name in programs:
        (folder / "bin" / name).touch(mode=0o755)
    (folder / "Python.h").touch()
    monkeypatch.setenv("PATH", str(folder / "bin"))
    include = folder if header else folder / "bin"
    monkeypatch.setattr("sysconfig.get_paths", lambda _scheme: {"include": str(include)})
    monkeypatch.setattr("conf.command.environment.find_spec", lambda _: object())
    for name in ("CC", "CXX", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("programs", "on_cuda", "on_cpu"),
    [(("gcc",), "", "a C++ compiler (g++ on PATH"), (("clang",), "", "a C++ compiler (g++ on PATH"),
     (("g++",), "a C compiler (gcc or clang on PATH", ""), (("gcc", "g++"), "", "")],
)  # fmt: skip
def test_compilers_are_looked_for_where_torch_does(
    programs: tuple[str, ...], on_cuda: str, on_cpu: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    machine(monkeypatch, tmp_path, *programs)
    for device, expected in (("cuda", on_cuda), ("cpu", on_cpu)):
        assert find_missing_toolchain(device).startswith(expected)
        assert bool(find_missing_toolchain(device)) == bool(expected)


def test_a_named_compiler_counts_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, "gcc", "own")
    monkeypatch.setenv("CC", "own")
    assert not find_missing_toolchain("cuda")
    monkeypatch.setenv("CC", "gone")
    assert "CC=gone is no program" in find_missing_toolchain("cuda")


def test_python_h_and_triton_are_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, "gcc", "g++", header=False)
    for device in ("cuda", "cpu"):
        assert find_missing_toolchain(device).startswith(
            f"Python.h (in {tmp_path}/bin; e.g. apt-get install pyt"
        )
        with pytest.raises(
            InputError, match=r"^train\.compile=true: torch\.compile lacks Python\.h"
        ):
            check_compile("train.compile", True, device)
        check_compile("train.compile", None, device)
        check_compile("train.compile", False, device)
    monkeypatch.setenv("C_INCLUDE_PATH", f":{tmp_path}")
    assert not find_missing_toolchain("cuda")
    monkeypatch.setattr("conf.command.environment.find_spec", lambda _: None)
    assert find_missing_toolchain("cuda") == "Triton (pip install triton)"
    assert not find_missing_toolchain("cpu")


@pytest.mark.parametrize(
    "compiles",
    [
        fused._compile_criterion.__wrapped__,
        lambda: noisy_head(random_target(), 1).compile_layers(),
        lambda: random_target().compile(8),
    ],
    ids=["loss", "layers of a head", "target"],
)
def test_hints_that_nobody_can_heed_stay_off_progress_bars(
    compiles: Callable, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    compiles()
    for text in (
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.",
        "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction.",
        "TensorFloat32 is of no use to softmax",
    ):
        warnings.warn(text, stacklevel=1)
    assert [str(each.message) for each in recwarn] == ["TensorFloat32 is of no use to softmax"]
