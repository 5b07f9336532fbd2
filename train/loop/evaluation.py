"""What a run shows between its steps: held-out figures, and what the head's kind adds."""

import sys
import traceback

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from train.batch.prefetch import on_device, stacked
from train.batch.rows import Batch
from train.loop.job import Job
from train.loop.tracking import figures
from train.objective import Objective
from train.parallel import processes
from train.parallel.placement import Placement

ERRORS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What code that only measures may raise, an exhausted device and wrong input included; a wish
to end the program is not among them."""


EDGES = torch.tensor([1 << 10, 1 << 12, 1 << 14, 1 << 16])
RANGES = ("0-1k", "1k-4k", "4k-16k", "16k-64k", "64k-")
"""Positions in a document, by which accuracies are told apart."""


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, job: Job, placement: Placement, step: int
) -> dict[str, float]:
    """Held-out loss and accuracy per term, and what `job.evaluate` adds.

    Args:
        accelerator: of the run.
        job: the run.
        placement: has the head, and the averages that are looked at in its place.
        step: optimizer steps done.

    Returns:
        Figures by name, on all processes; none if it failed on any of them, which is told.
    """
    objective = job.objective
    more: dict[str, float] = {}
    failed, sums = 1.0, _no_sums(job, accelerator.device)
    objective.eval()
    with placement.averaged():
        try:
            sums = _heldout_sums(accelerator, job)
            if accelerator.is_main_process and job.evaluate is not None:
                more = job.evaluate(objective.head)
            failed = 0.0
        except ERRORS as error:
            _report(error, accelerator.process_index, step)
    objective.train()
    processes.wait()  # the first one has more to measure
    packed = torch.cat([sums.new_tensor([failed]), sums.flatten()])
    packed = accelerator.reduce(packed, reduction="sum")
    if packed[0] > 0:
        return {}
    sums = packed[1:].view_as(sums)
    found = figures("eval", sums.sum(0), objective.weights, objective)
    found |= _by_position(sums, objective)
    return found | {f"eval/{name}": value for name, value in more.items()}


def _by_position(sums: Tensor, objective: Objective) -> dict[str, float]:
    """Accuracies by range of positions, where there is more than one."""
    found: dict[str, float] = {}
    ranges = [(name, each) for name, each in zip(RANGES, sums, strict=True) if each[1].any()]
    for name, each in ranges if len(ranges) > 1 else ():
        means = figures(f"eval/{name}", each, objective.weights, objective)
        found |= {key: value for key, value in means.items() if "loss" not in key}
    return found


def _report(error: Exception, rank: int, step: int) -> None:
    where = "".join(traceback.format_tb(error.__traceback__)[-1:]).strip()
    tqdm.write(
        f"step {step}: the evaluation failed in process {rank}, training goes on without its "
        f"figures: {type(error).__name__}: {error}\n{where}",
        file=sys.stderr,
    )


def _no_sums(job: Job, device: torch.device) -> Tensor:
    """[R, 2 + L, K] zeros; R ranges of positions."""
    shape = (len(RANGES), 2 + len(job.objective.measures), len(job.objective.weights))
    return torch.zeros(shape, device=device)


def _heldout_sums(accelerator: Accelerator, job: Job) -> Tensor:
    """[R, 2 + L, K] over this process's share of the held-out sequences."""
    objective, size, device = job.objective, job.config.micro_batch_size, accelerator.device
    weights = objective.weights.to(device)
    sums = _no_sums(job, device)
    mine = list(range(min(len(job.heldout), job.config.num_eval_sequences)))
    mine = mine[accelerator.process_index :: accelerator.num_processes]
    for begin in range(0, len(mine), size):
        rows = stacked(job.heldout, mine[begin : begin + size])
        learnt, ranges = rows["loss_mask"], torch.bucketize(rows["position_ids"], EDGES, right=True)
        seen: Batch = {}
        for number in ranges[learnt].unique().tolist():
            indexed = objective.indexed({**rows, "loss_mask": learnt & (ranges == number)})
            if seen:  # the target need not read it again
                new = {k: v for k, v in indexed.items() if k not in rows or k == "loss_mask"}
                seen = {**seen, **on_device(new, device)}
            else:
                seen = objective.prepare(on_device(indexed, device))
            # Not a call: the hooks of a strategy would wait for processes that have no batch left.
            sums[number] += objective.forward(seen, weights).terms
    return sums
