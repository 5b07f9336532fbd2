"""The objective that the loop trains, and when and how fast its parameters learn."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from conf.settings.training import Optimizer, Schedule
from train.batch.states import with_states
from train.batch.supervision import SUPERVISION, Batch, indexed
from train.loss.sizes import Counted, LaunchSizes
from train.loss.sums import Sums


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are trained alike.

    Attributes:
        parameters: of the objective's head.
        rate: their learning rate, as a share of `train.learning_rate`.
        first_step: optimizer step, from 0, that trains them first; later ones than 0 begin a
            warm-up of their own, of `train.warmup_steps`.
    """

    parameters: list[nn.Parameter]
    rate: float = 1.0
    first_step: int = 0


COUNTS = "counts"
"""Key of an indexed batch: K numbers that the batch adds to the divisors of the terms' sums."""


class Objective(nn.Module):
    """A loss of K terms, and how it is trained.

    `forward` must be written. `memory` tells what training takes, where a formula is known;
    `indexed` and `begin` are for losses that learn other rows than all, or change with the step.

    Attributes:
        head: all of its parameters; has `save(folder, provenance)`.
        target: the frozen target, or its ends beside a feature store.
        weights: [K] float32, the weight of each term, in evaluations throughout.
        measures: names of the rows of `Sums.terms` after losses and tokens.
        about: what a run says of the head.
        parts: of its parameters, where they are not all trained alike.
        criterion: compares rows with the target's, and is compiled with the head; None without.
        first_depth: depth of the first term; 0 is the target itself, 1 the first draft.
        resume_settings: by key, those, that must not change when a run continues.
        slow_logits: of a token, those whose loss is faster compiled on a CPU.
        learns_prompts: every token is in the loss mask while training.
        trains_target: `forward` runs the target itself, with gradients.
        usual_optimizer: `train.optimizer` where that is `auto`.
        usual_schedule: `train.schedule` where that is `auto`.
        muon_rate, adam_rate_times_width: what `auto` rates are made of.
    """

    head: Any
    target: Any
    weights: Tensor
    measures: tuple[str, ...]
    about = ""
    first_depth = 1
    slow_logits = 0
    learns_prompts = False
    trains_target = False
    usual_optimizer = Optimizer.muon
    usual_schedule = Schedule.wsd
    muon_rate = 3e-2
    adam_rate_times_width = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.resume_settings: dict[str, Any] = {}
        self.parts: list[ParameterGroup] = []
        self.criterion: Any = None
        self.compiled = False

    def forward(self, batch: Batch, scale: Tensor) -> Sums:
        """The loss on a prepared micro batch, its terms weighed by `scale` [K] float32."""
        raise NotImplementedError

    def memory(self, setting: LaunchSizes) -> Counted | None:
        """The memory that training the head takes; None where no formula is known."""
        del setting
        return None

    def indexed(self, batch: Batch) -> Batch:
        """A batch on the CPU with where its documents lie, what is learnt of it, and `COUNTS`.

        Those are its supervised tokens, unless a loss is another mean.
        """
        batch = indexed(batch, self.depth)
        counts = batch[SUPERVISION].counts[self.first_depth :]
        return {**batch, COUNTS: tuple(counts.tolist())}

    def begin(self, step: int) -> Tensor:
        """Begin an optimizer step, counted from 0; [K] float32 weights of the terms in it."""
        del step
        return self.weights

    # The same for every objective.

    @property
    def depth(self) -> int:
        """Draft tokens of a chain."""
        return self.first_depth + len(self.weights) - 1

    @final
    def groups(self) -> list[ParameterGroup]:
        """The trained parameters, each in one group."""
        trained = [each for each in self.head.parameters() if each.requires_grad]
        return self.parts or [ParameterGroup(trained)]

    @final
    def usual_rates(self, optimizer: Optimizer) -> tuple[float, float]:
        """`train.learning_rate` and `train.adam_learning_rate` where those are `auto`.

        Muon turns a matrix by the same angle whatever its width. AdamW moves every number by its
        rate, so what a sum over H of them changes by grows with H, and its rate falls with it.

        Args:
            optimizer: the one that updates hidden matrices.
        """
        adam = self.adam_rate_times_width / self.target.hidden_size
        return (self.muon_rate if optimizer is Optimizer.muon else adam), adam

    @final
    def distillation_temperature(self, temperature: float) -> float:
        """The teacher's temperature: evaluations show how drafts fare at 1."""
        return temperature if self.training else 1.0

    @final
    def compile_parts(self) -> None:
        """Compile the loss, and the parts of the head that fuse well."""
        self.compiled = True
        if self.criterion is not None:
            self.criterion.compiled = True
        self.head.compile_layers()

    @final
    def training_batch(self, batch: Batch) -> Batch:
        """The indexed batch with what training learns of it, which may be more than answers."""
        if self.learns_prompts:
            batch = {**batch, "loss_mask": batch["document_ids"] >= 0}
        return self.indexed(batch)

    @final
    def counts(self, batch: Batch) -> Tensor:
        """[K] float32, on the CPU, what an indexed batch adds to the divisor of each term's sum."""
        return torch.tensor(batch[COUNTS])

    @final
    def prepare(self, batch: Batch) -> Batch:
        """An indexed batch with what the target gives; needs no gradient, no head, and no step."""
        return batch if self.trains_target else with_states(self.target, batch, self.head.taps)
