"""The one training loop: batches, gradients, evaluation, checkpoints, resuming, stopping.

A head's entry script brings an objective; the loop divides its sums by the number of supervised
tokens of the whole optimizer step, counted over all processes and micro batches before the
first of them runs.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.profiler import record_function
from tqdm import tqdm

from conf.command.clock import Stopwatch
from conf.errors import InputError
from conf.files import make_folder
from heads.decoding.cache import upload
from train import schedule
from train.batch.prefetch import Prefetcher, on_device, stacked
from train.batch.rows import NOISE_SEEDS, Batch
from train.loop import resume
from train.loop.evaluation import evaluate
from train.loop.job import Job, Outcome
from train.loop.rounds import Round
from train.loop.skipping import Skipped
from train.loop.tracking import Metrics, as_line, figures
from train.loss.losses import Sums
from train.parallel import checkpoint, processes
from train.parallel.launch import stop_signals
from train.parallel.optimizers import state_keys
from train.parallel.placement import Placement, place


def fit(accelerator: Accelerator, job: Job) -> Outcome:
    """Trains to `max_steps`, or until SIGTERM, SIGUSR1 or SIGINT, which save a checkpoint.

    Effects: trains `job.objective.head` in place and writes into `job.out_dir`.

    Raises:
        InputError: the checkpoint to resume does not fit, the disk is full, or the loss became
            NaN or infinite.
    """
    run = Run(accelerator, job)
    run.resume()
    processes.wait()
    try:
        with stop_signals(run.stop):
            return run.train()
    finally:
        run.close()


class _StepResult(NamedTuple):
    """What all processes found in an optimizer step, on the CPU.

    Attributes:
        tokens: that were read, padding not counted.
        stop: whether any process was asked to stop.
        losses: of each micro batch, process by process.
        sums: [2 + L, K] of the step.
        norm: of the gradients before they were clipped.
    """

    tokens: int
    stop: bool
    losses: list[float]
    sums: Tensor
    norm: float


class Run:
    """The state of a run between its optimizer steps."""

    def __init__(self, accelerator: Accelerator, job: Job) -> None:
        self.accelerator, self.job, self.config = accelerator, job, job.config
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.device = accelerator.device
        self.checkpoints = job.out_dir / "checkpoints"
        self.placement: Placement
        self.step = self.tokens = 0
        self.stop = {"asked": False}
        self.stopping = False
        self.metrics: Metrics | None = None
        self.round = Round(job.train, 0, self.config.max_steps, job.seed)
        self.skipped = Skipped(len(job.train))
        self.window: list[Tensor] = []
        self.evaluation: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Prints on rank 0, above the progress bar."""
        if self.rank == 0:
            tqdm.write(text)

    def resume(self) -> None:
        """Loads the checkpoint that `train.resume` names; opens metrics and what is read."""
        path: Path | None = None
        if self.config.resume == "auto":
            path = checkpoint.latest(self.checkpoints, self.say)
        elif self.config.resume is not None:
            path = Path(self.config.resume)
        state = {} if path is None else self._restore(path)
        processes.wait()  # loading took each as long as it took
        self._check_agreed()
        self.placement = place(self.accelerator, self.job.objective, self.config)
        if self.world > 1:
            self.say(f"layout: {self.placement}")
        if path is not None:
            self.placement.restore(self.step, state)
            self.say(f"continuing from {path}")
        # Nobody may write before everybody has looked at what is there.
        processes.wait()
        if self.rank == 0:
            make_folder(self.job.out_dir)
            settings = self.job.provenance.get("config", {})
            self.metrics = Metrics(
                self.job.out_dir, self.job.log, settings, self.say, goes_on=path is not None
            )
            self.metrics.forget_after(self.step)
        self._open()

    def _open(self) -> None:
        """From this step on reads the data, or the round of answers that it belongs to."""
        objective, rollouts = self.job.objective, self.job.rollouts
        if rollouts is not None:
            objective.eval()
            with self.placement.gathered():
                self.round, written = rollouts.round(self.step, objective.head)
            objective.train()
            known = self.skipped.numbers if self.step > self.round.first else ()
            self.skipped = Skipped(len(self.round.data), known)
            if written and self.metrics is not None:
                self.metrics.log(self.step, written)
                self.say(f"step {self.step}: {rollouts.line(written)}")
        last = min(self.round.last, self.config.max_steps)
        prepare = objective.prepare
        self.prefetcher = Prefetcher(self._load, prepare, self.device, self.step, last)

    def _restore(self, path: Path) -> dict[str, Tensor]:
        """Sets progress and the head; returns the state of its optimizers, not made yet."""
        head = self.job.objective.head
        progress, tensors = checkpoint.read(path)
        self._check_same(progress, path)
        checkpoint.check_fits(path, tensors, head, state_keys(head, self.config))
        head.load_state_dict(tensors.head)
        self.step, self.tokens = progress.step, progress.tokens
        self.skipped = Skipped(len(self.job.train), progress.skipped)
        return tensors.state

    def _check_agreed(self) -> None:
        steps = torch.zeros(self.world, device=self.device)
        steps[self.rank] = self.step
        found = self._sum(steps).int().tolist()
        if len(set(found)) > 1:
            raise InputError(
                f"train.resume={self.config.resume}: the processes found checkpoints of steps "
                f"{found}: out_dir={self.job.out_dir} must be one folder that all nodes share"
            )

    def _check_same(self, progress: checkpoint.Progress, path: Path) -> None:
        unknown = resume.check(
            path, progress.run, resume.of_run(self.job), self.config, progress.step
        )
        if unknown:
            self.say(f"{path} is of an earlier version: not compared are {', '.join(unknown)}")

    def train(self) -> Outcome:
        """Steps until the end or a stop."""
        bar = tqdm(
            total=self.config.max_steps, initial=self.step, disable=self.rank != 0, unit="step",
            dynamic_ncols=True, mininterval=0.5,
        )  # fmt: skip
        with bar:
            if self.step == 0 and self.job.goes_on:
                self._evaluate()
            self._watch, self._started_tokens = Stopwatch(), self.tokens
            while self.step < self.config.max_steps:
                if self.stopping:
                    self._save()
                    return Outcome(False, self.step, self.evaluation)
                if self.step == self.round.last:
                    self.prefetcher.close()
                    self._open()
                loss = self.optimizer_step()
                self.step += 1
                bar.set_postfix_str(f"loss {loss:.4f}, {self._tokens_per_s():.0f} tokens/s", False)
                bar.update()
                self._after_step()
        # The head before its last figures: whatever they do, it is there.
        self._save_head()
        self._evaluate()
        return Outcome(True, self.step, self.evaluation)

    def _after_step(self) -> None:
        last = self.step == self.config.max_steps
        if last or self.step % self.config.log_steps == 0:
            self._log()
        if last or self.step % self.config.save_steps == 0:
            self._save()
        if not last and self.step % self.config.eval_steps == 0:
            self._evaluate()

    def _sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return self.accelerator.reduce(value, reduction="sum")

    def optimizer_step(self) -> float:
        """One optimizer step; returns its loss. The host waits for the device once."""
        batches = self.prefetcher.next_step()
        result = self._gradients(batches, self.prefetcher.micro_batches())
        again = False
        while suspects := self._suspects(result.losses):
            self._leave_out(suspects, again)
            again = True
            batches = self._load(self.step)
            result = self._gradients(batches, map(self._prepared, batches))
        self._check_norm(result.norm)
        self._rate = schedule.learning_rate(self.config, self.step)
        with record_function("optimizer"):
            late_norm = self.placement.step(self._rate, self.step)
        self._check_norm(late_norm)
        self.stopping = result.stop
        self.tokens += result.tokens
        self.window.append(result.sums)
        return float((self._weights * result.sums[0] / result.sums[1].clamp_min(1)).sum())

    def _gradients(self, batches: list[Batch], prepared: Iterable[Batch]) -> _StepResult:
        """Clipped gradients of a step, and what all processes found.

        Args:
            batches: the micro batches of this process, on the CPU.
            prepared: the same on the device, with what the target gives.
        """
        counts = torch.stack([self.job.objective.counts(batch) for batch in batches])
        self._weights = self.job.objective.begin(self.step)
        totals = self._sum(upload(counts.sum(0).double(), self.device))
        # Gradients become a mean over the processes; their sum is wanted.
        scale = self.world * upload(self._weights, self.device) / totals.clamp_min(1).float()
        sums = self._accumulate(prepared, len(batches), scale)
        with record_function("optimizer"):
            norm = self.placement.clip(self.step)
            return self._reduce(sums, norm, sum(map(_num_tokens, batches)))

    def _indices(self, step: int) -> list[int]:
        """The sequences of a step over all processes."""
        return self.round.sequences(step, self.config.batch_size)

    def _load(self, step: int) -> list[Batch]:
        """The micro batches of this process in a step, on the CPU.

        Each sequence gets a seed for what is drawn for it, made of its number and the step: not
        of the process, so draws are the same on any number of them, and after a stop.
        """
        size, objective = self.config.micro_batch_size, self.job.objective
        batches: list[Batch] = []
        for group in schedule.micro_batches(self._indices(step), self.rank, self.world, size):
            seeds = tuple(schedule.draw_seed(self.job.seed, step, index) for index in group)
            batch = self.skipped.blanked(stacked(self.round.data, group), group)
            batches.append(objective.training_batch({**batch, NOISE_SEEDS: seeds}))
        return batches

    def _prepared(self, batch: Batch) -> Batch:
        return self.job.objective.prepare(on_device(batch, self.device))

    def _accumulate(self, prepared: Iterable[Batch], num_micro: int, scale: Tensor) -> Tensor:
        """Runs every micro batch forward and backward; [M, 2 + L, K] what each gave."""
        found: list[Tensor] = []
        for batch in prepared:
            with self.placement.micro_batch(len(found) == num_micro - 1):
                sums: Sums = self.placement.objective(batch, scale)
                with record_function("backward"):
                    self.placement.backward(sums.total)
            found.append(sums.terms)
            del batch, sums  # the next one takes their memory
        return torch.stack(found)

    def _reduce(self, sums: Tensor, norm: Tensor, num_tokens: int) -> _StepResult:
        """Brings to the host what all processes found in a step; the step's wait for the device.

        Args:
            sums: [M, 2 + L, K] of this process's micro batches.
            norm: [] of the gradients, the same on every process.
            num_tokens: in those micro batches.
        """
        losses = torch.zeros(self.world, len(sums), dtype=torch.float64, device=self.device)
        losses[self.rank] = sums[:, 0].sum(1)
        own = torch.tensor([num_tokens, self.stop["asked"]], dtype=torch.float64)
        parts = (upload(own, self.device), losses.flatten(), sums.sum(0).flatten())
        packed = self._sum(torch.cat([part.double() for part in parts]))
        found = torch.cat([packed, norm.double().view(1)]).to("cpu")
        tokens, stop = found[:2].tolist()
        terms = found[2 + losses.numel() : -1].view_as(sums[0]).float()
        return _StepResult(
            int(tokens), stop > 0, found[2 : 2 + losses.numel()].tolist(), terms, float(found[-1])
        )

    def _suspects(self, losses: list[float]) -> list[int]:
        """The sequences of micro batches whose losses [processes * M] are not finite."""
        size, indices = self.config.micro_batch_size, self._indices(self.step)
        bad = [micro for micro, loss in enumerate(losses) if not math.isfinite(loss)]
        return [index for micro in bad for index in indices[micro * size :][:size]]

    def _leave_out(self, suspects: list[int], again: bool) -> None:
        """Forgets the gradients of a step, and the sequences that spoiled them.

        Args:
            suspects: sequences of micro batches whose losses are not finite.
            again: the step was loaded without those that are left out.

        Raises:
            InputError: the head is at fault, see `Skipped`, or too many of them are bad.
        """
        if not self.placement.can_discard:
            self._stop_on("the loss", suspects)
        self.placement.discard()
        new = self.skipped.staying(suspects)
        if not new and not again:
            return  # they were loaded before they were known
        bad = [each for each in new if self._is_bad(each)] or new
        own = self._indices(self.step)
        around = self.round.around(self.step, self.config.batch_size)
        if not bad or self.skipped.diverged(bad, own, around, self._is_bad):
            self._stop_on("the loss", bad or suspects)
        self.say(self.skipped.add(bad, self.step + 1))

    @torch.no_grad()
    def _is_bad(self, index: int) -> bool:
        """Whether the loss of one sequence alone is not finite; run on all processes alike."""
        objective = self.job.objective
        batch = objective.training_batch({**stacked(self.round.data, [index]), NOISE_SEEDS: (0,)})
        with self.placement.gathered():
            # As in an evaluation: without the hooks of a strategy.
            terms = objective.forward(self._prepared(batch), self._weights.to(self.device)).terms
        return not terms.isfinite().all()

    def _check_norm(self, norm: float) -> None:
        """Stops if the norm of the gradients is not finite."""
        if not math.isfinite(norm):
            self._stop_on("the gradient's norm", self._indices(self.step))

    def _stop_on(self, what: str, indices: list[int]) -> None:
        raise InputError(
            f"{what} is not finite at step {self.step + 1}, in packed training sequences "
            f"{indices}: nothing of this step was applied or saved. Look at those, or use "
            "train.dtype=float32: train.resume=auto continues from the newest checkpoint; or begin "
            f"again with a lower train.learning_rate={self.config.learning_rate}"
        )

    def _tokens_per_s(self) -> float:
        return (self.tokens - self._started_tokens) / self._watch.seconds()

    def _log(self) -> None:
        sums = torch.stack(self.window).sum(0)
        self.window.clear()
        metrics = figures("train", sums, self._weights, self.job.objective)
        metrics |= {"train/learning_rate": self._rate, "train/tokens": self.tokens}
        metrics["train/tokens_per_s"] = self._tokens_per_s()
        metrics["train/skipped_sequences"] = len(self.skipped.numbers)
        if self.metrics is not None:
            self.metrics.log(self.step, metrics)

    def _evaluate(self) -> None:
        """Held-out figures, and what `job.evaluate` adds; without any if that fails."""
        self.evaluation = evaluate(self.accelerator, self.job, self.placement, self.step)
        if not self.evaluation:
            return
        if self.metrics is not None:
            self.metrics.log(self.step, self.evaluation)
        self.say(f"step {self.step}: {as_line(self.evaluation)}")

    def _save(self) -> None:
        tensors = self.placement.tensors()
        if self.rank == 0:
            position = self.step * self.config.batch_size
            progress = checkpoint.Progress(
                self.step, self.tokens, position, resume.of_run(self.job),
                sorted(self.skipped.numbers),
            )  # fmt: skip
            checkpoint.save(self.checkpoints, tensors, progress, self.config.num_checkpoints)
        processes.wait()

    def _save_head(self) -> None:
        with self.placement.averaged():
            if self.rank == 0:
                self.job.objective.head.save(self.job.out_dir / "head", self.job.provenance)
        processes.wait()

    def close(self) -> None:
        """Ends the loading, and lets the tracker finish."""
        self.prefetcher.close()
        if self.metrics is not None:
            self.metrics.close()


def _num_tokens(batch: Batch) -> int:
    return int((batch["document_ids"] >= 0).sum())
