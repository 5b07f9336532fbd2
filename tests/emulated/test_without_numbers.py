"""The device without numbers: what it meters, and that as much runs on it as where numbers are.

Last by its name: what lasts in a process, as the shapes of trees, has no numbers afterwards.
"""

import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from emulated import predict_gpu
from emulated.hollow import H100, hollow, metered
from emulated.test_training import MOST_WAITS

TOY = {"hidden": 128, "layers": 4, "vocab": 300, "length": 128, "batch_size": 2}


def test_a_product_takes_as_long_as_its_operations_and_at_least_as_a_kernel() -> None:
    with hollow(), metered() as meter:
        left = torch.empty(3, 4, device="cuda", dtype=torch.bfloat16)
        right = torch.empty(5, 4, device="cuda", dtype=torch.bfloat16)
        left @ right.T
    assert (meter.num_launches, meter.flops, meter.bytes) == (1, 2 * 3 * 4 * 5, 2 * (12 + 20 + 15))
    assert meter.device_s == meter.product_s == H100.kernel_s
    for dtype, flops_per_s in ((torch.bfloat16, 990e12), (torch.float32, 67e12)):
        with hollow(), metered() as meter:
            square = torch.empty(8192, 8192, device="cuda", dtype=dtype)
            square @ square
        assert meter.device_s == pytest.approx(2 * 8192**3 / flops_per_s)


def test_rows_that_are_looked_up_are_the_ones_that_move() -> None:
    with hollow(), metered() as meter:
        table = torch.empty(1000, 8, device="cuda")
        table[torch.zeros(3, dtype=torch.int64, device="cuda")]
        table.unsqueeze(0).expand(50, -1, -1) + 1
    # The zeros, the rows there and back, and a table that lies there once and becomes fifty.
    assert meter.bytes == 3 * 8 + 2 * 3 * 8 * 4 + (1000 * 8 + 50 * 1000 * 8) * 4


def test_the_host_reads_zeros() -> None:
    with hollow():
        ones = torch.ones(3, device="cuda")
        assert float(ones.sum()) == 0
        assert ones.tolist() == [0, 0, 0]
        assert torch.ones(3).copy_(ones).tolist() == [0, 0, 0]
        assert (ones > 0).cpu().dtype == torch.bool


def test_a_step_launches_as_much_as_where_there_are_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job: dict[str, Any] = {**TOY, "name": "eagle3"}
    without = predict_gpu.trained(job)
    monkeypatch.setattr(predict_gpu, "hollow", nullcontext)
    # Memory that a kernel makes may lie in another order.
    assert predict_gpu.trained(job) == pytest.approx(without, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_what_the_benchmark_shows_is_what_would_be_predicted(name: str) -> None:
    sizes = predict_gpu.TARGET | predict_gpu.TRAINING
    found = predict_gpu.trained({**sizes, "name": name})
    speed = found["num_tokens"] / predict_gpu.step_seconds(found)
    shown = json.loads(predict_gpu.PREDICTIONS_FILE.read_text())[f"train {name}"]["tokens/s"]
    assert shown == pytest.approx(speed, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", predict_gpu.RECIPES)
def test_training_meets_few_shapes(name: str) -> None:
    found = predict_gpu.trained({**TOY, "length": 4096, "name": name})
    assert found["num_shapes"] <= 16
    assert found["num_waits"] <= MOST_WAITS


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", ["none", *predict_gpu.DRAFTING])
def test_captured_decoding_meets_few_shapes(name: str, shape: str) -> None:
    found = predict_gpu.decoded({**TOY, "length": 2048, "name": name}, shape)
    assert found["num_shapes"] <= 12  # of a prompt, 512 tokens at a time


def test_a_captured_step_is_one_launch_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict_gpu, "SHORTER", 4)
    monkeypatch.setattr(predict_gpu, "LONGER", 6)
    plain = predict_gpu.decoded({**TOY, "name": "none"}, "chain")
    drafting = predict_gpu.decoded({**TOY, "name": "medusa"}, "tree")
    assert plain["num_launches"] == drafting["num_launches"] == 2  # with the record's copy
    assert plain["num_waits"] == drafting["num_waits"] == 1
    assert drafting["num_kernels"] > 1.1 * plain["num_kernels"]
