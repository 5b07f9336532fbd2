"""One distillation loss, forward and backward, the way of one toolkit.

    python -m scripts.bench.peers.losses job.json result.json

runs in the environment of the path that the job names, so besides torch it imports only that
path's library. Letters: T tokens, H hidden, V vocabulary.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from scripts.bench.footprint import best_device, footprint, free_bytes, peak_bytes

SHARE = 32
"""A run on one of so many tokens tells what all of them would need."""


@dataclass(frozen=True)
class LossJob:
    """What to run.

    Attributes:
        path: a key of `PATHS`.
        tokens, hidden, vocab: T, H and V.
        dtype: of every tensor.
        trained: whether the student's projection gets a gradient.
        repeats: timed runs; 0 asks for the loss and its gradients instead.
    """

    path: str
    tokens: int
    hidden: int
    vocab: int
    dtype: str
    trained: bool
    repeats: int


@dataclass(frozen=True)
class LossInputs:
    """Hidden states [T, H] and projections [V, H] of student and teacher."""

    student: Tensor
    projection: Tensor
    teacher: Tensor
    output_head: Tensor

    @classmethod
    def of(cls, job: LossJob, device: torch.device) -> "LossInputs":
        """The same numbers in every process, and in every dtype, as bfloat16 can hold them."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(rows: int, scale: float) -> Tensor:
            values = torch.randn(rows, job.hidden, generator=generator, device=device)
            return values.mul_(scale).bfloat16().to(getattr(torch, job.dtype))

        spread = 2 * job.hidden**-0.5
        student, projection = draw(job.tokens, 1.0), draw(job.vocab, spread)
        teacher, output_head = draw(job.tokens, 1.0), draw(job.vocab, spread)
        projection.requires_grad_(job.trained)
        return cls(student.requires_grad_(), projection, teacher, output_head)

    def first(self, tokens: int) -> "LossInputs":
        """The same of the first tokens only."""
        student = self.student.detach()[:tokens].requires_grad_()
        return LossInputs(student, self.projection, self.teacher[:tokens], self.output_head)


Loss = Callable[[], Tensor]


def ours(inputs: LossInputs) -> Loss:
    """`train.loss.fused` as `train/eagle.py` uses it."""
    from conf.settings.eagle import EagleConfig
    from heads.layers.projection import Projection
    from heads.vocab import DraftVocab
    from train.batch.rows import SortedIndices
    from train.loss.eagle import EagleCriterion
    from train.loss.fused import Part, fused_linear
    from train.loss.teachers import HiddenTeacher

    device = inputs.student.device
    vocab = DraftVocab.everything(len(inputs.output_head)).to(device)
    target: Any = _OutputHead(inputs.output_head)
    teacher = HiddenTeacher(target, vocab, inputs.teacher)
    numbers = torch.arange(len(inputs.student))
    rows = SortedIndices(numbers, numbers.to(device))
    ones = torch.ones(len(numbers), device=device)
    criterion = EagleCriterion(EagleConfig(), vocab)

    def loss() -> Tensor:
        part = Part(inputs.student, Projection(inputs.projection), rows, ones)
        return fused_linear([part], teacher, criterion)[0]

    return loss


class _OutputHead:
    """What `HiddenTeacher` needs of a target."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.vocab_size = weight, len(weight)

    def logits(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, self.weight)


def naive(inputs: LossInputs) -> Loss:
    """Whole logits and autograd, as textbooks write it."""

    def loss() -> Tensor:
        logits, targets = _logits(inputs)
        log_q = logits.float().log_softmax(-1)
        return F.kl_div(log_q, targets.float().softmax(-1), reduction="sum")

    return loss


def liger(inputs: LossInputs) -> Loss:
    """liger-kernel's chunked loss; with beta 0 its divergence is KL(teacher || student).

    Its mean over tokens is left a mean: it would need more memory to scale its gradients.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    criterion = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)
    labels = torch.zeros(len(inputs.student), dtype=torch.int64, device=inputs.student.device)

    def loss() -> Tensor:
        tensors = (inputs.student, inputs.projection, inputs.teacher, inputs.output_head)
        return criterion(*tensors, labels)

    return loss


def speculators(inputs: LossInputs) -> Loss:
    """speculators' loss of logits: its Triton kernel on CUDA, its eager formula elsewhere."""
    from speculators.losses import resolve_loss_config

    on_cuda = inputs.student.is_cuda
    config = resolve_loss_config("kl_div", "fused" if on_cuda else "eager")
    divergence, _weight = config["kl_div"]

    def loss() -> Tensor:
        logits, targets = _logits(inputs)
        return divergence(logits[None], targets[None]).sum()

    return loss


def _logits(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """[T, V] of student and teacher."""
    with torch.no_grad():
        targets = F.linear(inputs.teacher, inputs.output_head)
    return F.linear(inputs.student, inputs.projection), targets


PATHS = {"ours": ours, "naive": naive, "liger": liger, "speculators": speculators}
WHOLE_LOGITS = {"naive", "speculators"}
MEANS = {"liger"}


def step(inputs: LossInputs, loss: Loss) -> Tensor:
    """One forward and backward pass into fresh gradients."""
    inputs.student.grad = inputs.projection.grad = None
    total = loss()
    total.backward()
    return total.detach()


def values(job: LossJob, inputs: LossInputs) -> dict[str, Any]:
    """The summed loss and its gradients, flat."""
    total = step(inputs, PATHS[job.path](inputs))
    factor = job.tokens if job.path in MEANS else 1
    found = {"hidden": inputs.student.grad, "projection": inputs.projection.grad}
    grads = {
        name: (grad.double() * factor).flatten().tolist()
        for name, grad in found.items()
        if grad is not None
    }
    return {"loss": float(total) * factor, "gradients": grads}


def costs(job: LossJob, inputs: LossInputs) -> dict[str, Any]:
    """Time and memory of a step, or what it would need if that is not there."""
    device = inputs.student.device
    if job.path in WHOLE_LOGITS:
        needed, free = _needed(job, inputs), free_bytes(device)
        if needed > free:
            return {"needed_bytes": needed, "free_bytes": free}
    loss = PATHS[job.path](inputs)
    found = footprint(lambda: step(inputs, loss), device, job.repeats)
    return found._asdict() | {"grad_bytes": _grad_bytes(inputs)}


def _needed(job: LossJob, inputs: LossInputs) -> int:
    """Bytes that whole logits take, from a run on few tokens."""
    few = inputs.first(max(1, job.tokens // SHARE))
    loss = PATHS[job.path](few)
    peak = peak_bytes(lambda: step(few, loss), few.student.device)
    grad_bytes = _grad_bytes(few)
    few.projection.grad = None
    return grad_bytes + (peak - grad_bytes) * job.tokens // len(few.student)


def _grad_bytes(inputs: LossInputs) -> int:
    grad = inputs.projection.grad
    return 0 if grad is None else grad.nbytes


def main() -> None:
    """Job in, result out."""
    question, answer = map(Path, sys.argv[1:])
    job = LossJob(**json.loads(question.read_text()))
    inputs = LossInputs.of(job, best_device())
    result = costs(job, inputs) if job.repeats else values(job, inputs)
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
