"""Training steps on a GPU against float32 on the CPU, and the layouts of several GPUs."""

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_step import KINDS, differences, gradients

from conf.settings.target import Dtype
from scripts.bench import training as bench_train
from tests.train.parallel.test_launch import ENV, arguments, inputs, trained
from tests.train.parallel.test_placement import launched

__all__ = ["inputs"]
OF_BFLOAT16 = 0.12
"""Largest relative difference of a gradient; on a CPU it is 0.01 to 0.07, and about 1 where a
kernel is given tensors that it does not read as they lie."""
OF_FLOAT32 = 1e-3
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
on_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


def worst(kind: str, device: str, dtype: Dtype, tmp_path: Path, compiled: bool = False) -> float:
    expected = gradients(kind, "cpu", Dtype.float32, tmp_path / "exact")
    found = gradients(kind, device, dtype, tmp_path / "found", compiled)
    each = differences(found, expected)
    print({name: round(value, 4) for name, value in each.items()})
    return max(each.values())


@pytest.mark.parametrize(
    "kind",
    [
        # Without instructions for bfloat16 each takes long; what these have, others have too.
        pytest.param(
            kind, marks=pytest.mark.slow if kind in ("eagle1", "dflash", "dflash2") else []
        )
        for kind in KINDS
    ],
)
def test_bfloat16_on_the_cpu_gives_the_gradients_of_float32(kind: str, tmp_path: Path) -> None:
    assert worst(kind, "cpu", Dtype.bfloat16, tmp_path) < OF_BFLOAT16


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(Dtype.bfloat16, OF_BFLOAT16), (Dtype.float32, OF_FLOAT32)]
)
def test_a_gpu_gives_the_gradients_of_the_cpu(
    kind: str, compiled: bool, dtype: Dtype, bound: float, tmp_path: Path
) -> None:
    assert worst(kind, "cuda", dtype, tmp_path, compiled) < bound


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("form", ["medusa", "eagle3", "dflash"])
def test_thirty_steps_compile_nothing_anew(form: str, tmp_path: Path) -> None:
    sizes = "--hidden 256 --layers 6 --vocab 512 --max-length 256 --steps 30 --compile"
    torch._dynamo.reset()
    run, _ = bench_train.start(bench_train.arguments([form, *sizes.split()]), tmp_path / "run")
    graphs = torch._dynamo.utils.counters["stats"]
    for _ in range(6):
        run.optimizer_step()
    before = graphs["unique_graphs"]
    for _ in range(24):
        run.optimizer_step()
    run.close()
    assert before > 0
    assert graphs["unique_graphs"] == before


@pytest.mark.gpu
@on_gpus
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_two_gpus_equal_one(inputs: Path, tmp_path: Path, layout: str) -> None:
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed")
    exact = ["train.dtype=float32", "target.dtype=float32"]
    seen = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")}
    for name, command in (("one", [sys.executable]), ("two", launched(layout))):
        own = arguments(inputs, tmp_path / name, *exact)
        assert "cuda" in trained([*command, *own], tmp_path, **{**ENV, **seen})
    found, expected = (
        load_file(tmp_path / name / "checkpoints/step-000012/head.safetensors")
        for name in ("two", "one")
    )
    assert max(differences(found, expected).values()) < OF_FLOAT32
