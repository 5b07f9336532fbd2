"""Training steps on a GPU against float32 on the CPU, and the layouts of several GPUs."""

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from devices import DEVICE, on_cuda, on_device
from safetensors.torch import load_file
from training_step import KINDS, FirstStep, differences, first_step

from conf.settings.target import Dtype
from heads.target_model.embeddings_and_output_head import Projection
from scripts.bench import training as bench_train
from tests.train.runs import ENV, arguments, inputs, launched, trained
from train.batch.batch import SortedIndices
from train.loss import fused_linear as fused
from train.loss.fused_linear import Student, compute_fused_loss
from train.loss.teachers import build_text_teacher
from train.medusa import text_criterion

__all__ = ["inputs"]
OF_BFLOAT16 = 0.12
"""Largest relative difference of a gradient; on a CPU it is 0.01 to 0.07, and about 1 where a
kernel is given tensors that it does not read as they lie."""
OF_FLOAT32 = 1e-3
on_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


def steps(
    kind: str, device: str, dtype: Dtype, tmp_path: Path, compiled: bool = False
) -> tuple[FirstStep, FirstStep]:
    """A step on a device, and the same on a CPU in float32."""
    # Otherwise later cases would silently run what they do not compile.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        found = first_step(kind, device, dtype, tmp_path / "found", compiled)
    return found, first_step(kind, "cpu", Dtype.float32, tmp_path / "exact")


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
    found, exact = (
        first_step(kind, "cpu", each, tmp_path / each.value, micro_batch_size=1, batch_size=2)
        for each in (Dtype.bfloat16, Dtype.float32)
    )
    assert max(differences(found.gradients, exact.gradients).values()) < OF_BFLOAT16


@pytest.mark.gpu
@on_device
# `scripts/bench/gpu.py` picks a kind by the end of an id; what compiles comes last.
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.split(",")[0])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(Dtype.float32, OF_FLOAT32), (Dtype.bfloat16, OF_BFLOAT16)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gpu_gives_the_gradients_of_the_cpu(
    kind: str,
    compiled: bool,
    dtype: Dtype,
    bound: float,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    found, exact = steps(kind, DEVICE, dtype, tmp_path, compiled)
    each = differences(found.gradients, exact.gradients)
    worst = max(each, key=lambda name: each[name])
    record_property("losses", [round(found.shown, 5), round(exact.shown, 5)])
    record_property("worst", [worst, round(each[worst], 6)])
    record_property("median", round(statistics.median(each.values()), 6))
    assert each[worst] < bound


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("form", ["medusa", "eagle3", "dflash"])
def test_thirty_steps_compile_nothing_anew(form: str, tmp_path: Path) -> None:
    sizes = bench_train.RunSizes(form, 256, 6, 512, max_length=256, steps=30, compile=True)
    torch._dynamo.reset()
    run, _ = bench_train.start_run(sizes, tmp_path / "run")
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
@on_cuda
def test_the_first_rows_do_not_choose_the_kernels_of_a_loss() -> None:
    """With few rows for the multiprocessors, Inductor splits sums into kernels of their own."""
    from torch._inductor import metrics

    num_kernels = []
    for num_rows in (100, 528):
        torch._dynamo.reset()
        fused._compile_criterion.cache_clear()
        before = metrics.generated_kernel_count
        hidden = torch.randn(num_rows, 64, device="cuda")
        projection = Projection(torch.randn(65536, 64, device="cuda"))
        rows = torch.arange(num_rows)
        student = Student(hidden, projection, SortedIndices(rows, rows.cuda()), hidden[:, 0])
        text = build_text_teacher(rows.cuda())
        with torch._inductor.config.patch(force_disable_caches=True):
            compute_fused_loss([student], text, text_criterion, compiled=True)
        num_kernels.append(metrics.generated_kernel_count - before)
    few, full = num_kernels
    assert few == full > 0


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
