"""Training from start to end on an emulated GPU: feed, optimizer steps, evaluation, saving."""

import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated.device import Counts, counted
from emulated.runs import (
    HEADS_OF,
    MOST_WAITS,
    gradients,
    inputs,
    losses,
    on_cpu,
    on_cuda,
    run_of,
    short,
    waits_of_step,
)
from torch import Tensor

from conf.settings.target import Dtype
from data.features.store_format import HIDDEN_STATES
from heads.target_model.embeddings_and_output_head import Projection
from train.batch.batch import Batch, SortedIndices
from train.loss.fused_linear import Student, compute_fused_loss
from train.loss.teachers import build_text_teacher
from train.medusa import text_criterion
from train.objective import Objective

__all__ = ["inputs", "short"]


@dataclass(frozen=True)
class Ran:
    """A run on the CPU and on the device, and the waits for the device in a step."""

    cpu: Path
    cuda: Path
    waits: Counts


# `test_targets.py` holds the same of the first three; HASS steps as EAGLE-1 does, and what DFlash
# has of its own DFlash-2 and DSpark have too; Medusa-2 is Medusa with an adapted target.
SLOW = ("medusa, soft labels", "medusa-2", "eagle-1", "eagle-3", "hass", "dflash", "dflash-2")


def marked(names: Iterable[str], slow: Sequence[str]) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.slow] if n in slow else []) for n in names]


@pytest.fixture(scope="module", params=marked(HEADS_OF, SLOW))
def ran(
    request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Ran:
    folder = tmp_path_factory.mktemp("ran")
    on_cpu(run_of(request.param, inputs, folder / "cpu"))
    counts = on_cuda(run_of(request.param, inputs, folder / "cuda"))
    return Ran(folder / "cpu", folder / "cuda", waits_of_step(counts))


def test_losses_are_those_of_the_cpu_and_a_head_is_saved(ran: Ran) -> None:
    assert losses(ran.cuda) == pytest.approx(losses(ran.cpu), rel=5e-3, abs=2e-4)
    for folder in ("head", "checkpoints/step-000003"):
        names = [
            sorted(path.name for path in (at / folder).iterdir()) for at in (ran.cpu, ran.cuda)
        ]
        assert names[0] == names[1]


def test_an_optimizer_step_waits_twice_at_most(ran: Ran) -> None:
    assert ran.waits.num_waits <= MOST_WAITS, str(ran.waits)


@pytest.mark.parametrize("name", marked(["medusa", "eagle-3"], ["medusa"]))
def test_a_micro_batch_is_one_pass_whatever_it_holds(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    def operations(micro_batch_size: int) -> int:
        out_dir, target = tmp_path / str(micro_batch_size), {"dtype": Dtype.bfloat16}
        run = run_of(name, inputs, out_dir, target=target, micro_batch_size=micro_batch_size)
        return waits_of_step(on_cuda(run)).operations.total()

    # Four sequences in one, against one after another.
    assert operations(4) < 0.4 * operations(1)


@pytest.mark.parametrize(
    "name", marked(["medusa", "eagle-1", "eagle-3.1", "dflash"], ["medusa", "eagle-1"])
)
def test_gradients_in_bfloat16_are_those_in_float32(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    once: dict[str, Any] = {"max_steps": 1, "warmup_steps": 0}
    expected = gradients(
        lambda: on_cpu(run_of(name, inputs, tmp_path / "cpu", **once, dtype=Dtype.float32))
    )
    found = gradients(lambda: on_cuda(run_of(name, inputs, tmp_path / "cuda", **once)))
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 0.05 * theirs.norm()


def test_a_total_that_is_scaled_is_refused_without_a_wait() -> None:
    def total() -> Tensor:
        labels = torch.arange(3)
        hidden, weight = torch.randn(3, 4, device="cuda"), torch.randn(5, 4, device="cuda")
        rows = SortedIndices(labels, labels.to("cuda"))
        scales = torch.ones(3, device="cuda")
        part = Student(hidden, Projection(weight.requires_grad_()), rows, scales)
        return compute_fused_loss([part], build_text_teacher(labels.to("cuda")), text_criterion)[0]

    right, wrong = total(), total() * 0.5
    with counted() as counts:
        right.backward()
    assert counts.num_waits == 0
    with pytest.raises(RuntimeError, match="a total must be run backward once and unscaled"):
        wrong.backward()


def test_states_of_two_micro_batches_are_on_the_device(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, live, most = Objective.prepare_batch, list[Any](), list[int]()

    def noted(objective: Objective, batch: Batch) -> Batch:
        found = prepare(objective, batch)
        # Autograd's threads let go of a batch a moment after the backward pass has returned.
        for _ in range(500):
            live[:] = [each for each in live if each() is not None]
            if len(live) > 1:
                time.sleep(0.01)
        live.append(weakref.ref(found[HIDDEN_STATES]))
        most.append(len(live))
        return found

    monkeypatch.setattr(Objective, "prepare_batch", noted)
    on_cuda(run_of("eagle-3", inputs, tmp_path / "run", batch_size=8))
    assert max(most) == 2
