"""The base class of objectives, and the words that its interface speaks."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from conf.settings.target import Dtype
from conf.settings.training import Optimizer, Schedule, TrainConfig
from heads.target_model.load import resolve_dtype
from train.batch.batch import SUPERVISION, Batch, add_supervision, add_target_states
from train.loss.fused_linear import LossSums

PIECES_OF_TEXT, PIECES_OF_TEACHER = 1, 4
"""Pieces, see `SavedRows`, of a loss against the text, or against a distribution."""
DIVISORS = "counts"
"""Key of an indexed batch: K numbers to add to the divisors of the terms' sums."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are trained alike.

    Attributes:
        parameters: parameters of the objective's head.
        rate: learning rate as a fraction of `train.learning_rate`.
        first_step: first optimizer step, from 0, that trains the parameters. After step 0, a new
            warm-up of `train.warmup_steps` begins there.
    """

    parameters: list[nn.Parameter]
    rate: float = 1.0
    first_step: int = 0


@dataclass(frozen=True)
class LaunchSpec:
    """Facts of a launch on which memory depends, beside the objective.

    Attributes:
        tokens: tokens N of a micro batch.
        dtype: dtype of the head under autocast.
        strategy: `DDP` (also one process), `FSDP2` or `ZeRO-1`, `ZeRO-2`, `ZeRO-3`.
        num_processes: number n of processes.
        cuda: whether micro batches are prepared in advance and pieces are large.
        train: settings of the optimizers.
    """

    tokens: int
    dtype: torch.dtype
    strategy: str
    num_processes: int
    cuda: bool
    train: TrainConfig = field(default_factory=TrainConfig)

    @classmethod
    def from_config(
        cls, config: TrainConfig, length: int, strategy: str, accelerator: Any
    ) -> "LaunchSpec":
        """Make the facts of a launch on sequences of `length` tokens."""
        return cls(
            tokens=config.micro_batch_size * length,
            dtype=resolve_dtype(Dtype(config.dtype), accelerator.device),
            strategy=strategy,
            num_processes=accelerator.num_processes,
            cuda=accelerator.device.type == "cuda",
            train=config,
        )


class SavedRows(NamedTuple):
    """Rows of tensors that training on a micro batch holds; `train.loop.memory` knows bytes.

    Attributes:
        kept: rows kept for the backward pass, by name in `compute_row_bytes`.
        compared: rows of a student in the loss.
        loss_grads: gradients of width H beside a chunk of the loss.
        backward_grads: gradients of width H in the backward pass.
        mlp_grads: rows of an MLP with gradients in the backward pass.
        pieces: float32 tensors [r, W] that exist at once while a piece of the loss is compared.
            Logits in another dtype add one, their float32 copy.
        is_teacher_widest: whether computing the teacher's logits can be the loss's fullest moment.
        uncast: numbers of trained matrices that are never cast at the same time as the others.
    """

    kept: dict[str, float]
    compared: int
    loss_grads: int
    backward_grads: int
    mlp_grads: int
    pieces: int = PIECES_OF_TEACHER
    is_teacher_widest: bool = False
    uncast: int = 0


class Objective(nn.Module):
    """Loss of K terms, with the facts that training needs.

    Subclasses must define `forward`. `count_saved_rows` is for heads whose memory is known,
    `index_batch` for losses with other supervised rows, `start_step` for losses that change with
    the step.

    Attributes:
        head: head that holds all trained parameters; has `save(folder, provenance)`.
        target: the frozen target, or its embedding and output head beside a feature store.
        term_weights: [K] float32 weight of each term; evaluations always use these.
        metric_names: names of the rows of `LossSums.terms` after losses and tokens.
        description: description of the head to print.
        own_parameter_groups: groups of the head's parameters, if they are not all trained alike.
        compiled: whether the loss is compiled on first use.
        first_depth: depth of the first term; 0 is the target, 1 the first draft token.
        resume_settings: settings by key that must not change when a run continues.
        loss_logits_per_token: logits per token whose loss is faster compiled on a CPU.
        learns_prompts: whether training supervises every token, prompts included.
        trains_target: whether `forward` runs the target itself, with gradients.
        default_optimizer: optimizer for `train.optimizer=auto`.
        default_schedule: schedule for `train.schedule=auto`.
        muon_rate, adam_rate_times_width: constants of the `auto` learning rates.
    """

    head: Any
    target: Any
    term_weights: Tensor
    metric_names: tuple[str, ...]
    description = ""
    first_depth = 1
    loss_logits_per_token = 0
    learns_prompts = False
    trains_target = False
    default_optimizer = Optimizer.muon
    default_schedule = Schedule.wsd
    muon_rate = 3e-2
    adam_rate_times_width = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.resume_settings: dict[str, Any] = {}
        self.own_parameter_groups: list[ParameterGroup] = []
        self.compiled = False

    def forward(self, batch: Batch, scale: Tensor) -> LossSums:
        """Compute the loss of a prepared micro batch; `scale` [K] weighs its terms."""
        raise NotImplementedError

    def count_saved_rows(self, setting: LaunchSpec) -> SavedRows | None:
        """Count the rows that training the head on a launch holds; None if they are unknown."""
        del setting
        return None

    def index_batch(self, batch: Batch) -> Batch:
        """Add documents, supervision and `DIVISORS` to a batch on the CPU.

        The divisors are the numbers of supervised tokens, unless the loss takes another mean.
        """
        batch = add_supervision(batch, self.depth)
        counts = batch[SUPERVISION].depth_counts[self.first_depth :]
        return {**batch, DIVISORS: tuple(counts.tolist())}

    def start_step(self, step: int) -> Tensor:
        """Start an optimizer step, from 0; return the weights [K] float32 of its terms."""
        del step
        return self.term_weights

    # The same for every objective.

    @property
    def depth(self) -> int:
        """Return the number of draft tokens of a chain."""
        return self.first_depth + len(self.term_weights) - 1

    @final
    def list_parameter_groups(self) -> list[ParameterGroup]:
        """List the groups that hold each trained parameter once."""
        trained = [each for each in self.head.parameters() if each.requires_grad]
        return self.own_parameter_groups or [ParameterGroup(trained)]

    @final
    def compute_default_rates(self, optimizer: Optimizer) -> tuple[float, float]:
        """Compute `train.learning_rate` and `train.adam_learning_rate` for `auto`.

        Muon turns a matrix by the same angle at any width. AdamW changes every number by its rate,
        so a sum over H numbers changes by H times that; the rate falls with H.

        Args:
            optimizer: optimizer of hidden matrices.
        """
        adam = self.adam_rate_times_width / self.target.hidden_size
        return (self.muon_rate if optimizer is Optimizer.muon else adam), adam

    @final
    def distillation_temperature(self, temperature: float) -> float:
        """Choose the temperature of the teacher: the given one in training, 1 in evaluations."""
        return temperature if self.training else 1.0

    @final
    def compile_parts(self) -> None:
        """Compile the loss, and the parts of the head that fuse well."""
        self.compiled = True
        self.head.compile_layers()

    @final
    def index_training_batch(self, batch: Batch) -> Batch:
        """Index a batch for training, which may supervise more than answers."""
        if self.learns_prompts:
            batch = {**batch, "loss_mask": batch["document_ids"] >= 0}
        return self.index_batch(batch)

    @final
    def compute_divisors(self, batch: Batch) -> Tensor:
        """Return what an indexed batch adds to the divisor of each term, [K] float32 on the CPU."""
        return torch.tensor(batch[DIVISORS])

    @final
    def prepare_batch(self, batch: Batch) -> Batch:
        """Add the target's output to an indexed batch. Needs no gradient, head or step."""
        return (
            batch if self.trains_target else add_target_states(self.target, batch, self.head.taps)
        )
