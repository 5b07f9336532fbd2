"""The one training loop: batches, gradients, evaluation, checkpoints, resuming, stopping.

An entry script brings an objective. The loop divides its sums by the number of supervised tokens of
the whole optimizer step, counted over all processes and micro batches in advance. Sequences whose
loss is not finite are skipped in all further steps.

Letters: B sequences, T tokens of one, K terms of a loss, L metrics, M micro batches of a process.
"""

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from conf.command.clock import Stopwatch, label_part
from conf.errors import InputError
from conf.files import load_json, make_folder, write_atomically
from conf.settings.training import Keep, LogConfig, TrainConfig
from heads.devices import to_device
from heads.folders import PROVENANCE
from train.batch.batch import NOISE_SEEDS, Batch
from train.batch.data_loader import (
    Dataset,
    Prefetcher,
    SkippedSequences,
    batch_to_device,
    hash_seed,
    split_micro_batches,
    stack_sequences,
)
from train.loop.evaluation import (
    Evaluate,
    HeldoutFigures,
    KeptHead,
    choose_kept_head,
    compute_metrics,
    evaluate_heldout,
    format_figures,
)
from train.loop.metric_logger import MetricLogger
from train.loop.rollouts import Rollouts, Round
from train.loop.sources import ServedSequences, WaitTimer, format_server_balance
from train.loss.fused_linear import LossSums
from train.objective import Objective
from train.parallel import checkpoint, processes
from train.parallel.optimizers import compute_learning_rate, state_keys
from train.parallel.strategies import copy_to_cpu, make_strategy

STOPPED = "stopped/head"
"""Head of a run that was stopped, below `out_dir`, until the run has its last head."""
STDERR = 2
MIN_LONG_MINUTES = 60
"""Minutes from which a run's estimate says what to lower."""


@dataclass(frozen=True)
class TrainingJob:
    """Everything that one training run needs.

    Attributes:
        config: settings of the loop.
        log: settings of the tracker.
        seed: seed of the order of sequences, and of all draws of an objective.
        out_dir: folder for `checkpoints/`, `metrics.jsonl` and at the end `head/`.
        objective: the loss to train.
        train: packed sequences, each a dict of [T] tensors.
        heldout: packed sequences to evaluate on.
        provenance: facts to write as `head/headsmith.json`.
        head_documents: content of further JSON files of the head, by name.
        fingerprint: fingerprint of the target and of the training data.
        has_trained_head: whether the head was trained before; then it is also evaluated before the
            first step.
        rollouts: the target's answers to learn instead of `train`.
        evaluate: function that adds figures at each evaluation, given the head in eval mode; on
            rank 0 only. The names of its figures get the prefix `eval/`.
        num_prefetch_steps: number of optimizer steps to load in advance.
    """

    config: TrainConfig
    log: LogConfig
    seed: int
    out_dir: Path
    objective: Objective
    train: Dataset
    heldout: Dataset
    provenance: dict[str, Any] = field(default_factory=dict)
    head_documents: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    has_trained_head: bool = False
    rollouts: Rollouts | None = None
    evaluate: Evaluate | None = None
    num_prefetch_steps: int = 1

    @property
    def resume_settings(self) -> dict[str, Any]:
        """Collect the settings by key, kept in checkpoints, that must not change in a run."""
        rollouts = self.rollouts
        answering = rollouts and checkpoint.collect_resume_settings("rollout", rollouts.config)
        return {
            checkpoint.KIND: type(self.objective.head).__name__,
            "seed": self.seed,
            **checkpoint.collect_resume_settings("train", self.config),
            **(answering or {}),
            **self.fingerprint,
            "data.max_length": len(self.train[0]["document_ids"]),
            "packed sequences": len(self.train),
            "checksum of the first sequence": checkpoint.compute_token_checksum(self.train[0]),
            **self.objective.resume_settings,
        }


@dataclass(frozen=True)
class Outcome:
    """End of a run.

    Attributes:
        finished: whether all steps were run; false if a signal stopped the run at `step`.
        step: optimizer steps done.
        evaluation: figures of the head that the run leaves, if measured.
        kept: record of a finished run: `step` of its head, of `num_steps`, and `why` that one.
    """

    finished: bool
    step: int
    evaluation: dict[str, float]
    kept: dict[str, Any]


def fit_head(accelerator: Accelerator, job: TrainingJob) -> Outcome:
    """Train to `max_steps`, or until SIGTERM, SIGUSR1 or SIGINT, which save a checkpoint.

    Effects: trains `job.objective.head` in place and writes into `job.out_dir`.

    Raises:
        InputError: the checkpoint to resume does not fit, the disk is full, or the loss became NaN
            or infinite.
    """
    run = TrainingLoop(accelerator, job)
    processes.wait_for_processes()
    try:
        with _stop_signals(run):
            return run.run_steps()
    finally:
        run.close()


class _StepResult(NamedTuple):
    """Figures of an optimizer step over all processes, on the CPU.

    Attributes:
        tokens: tokens read, padding not counted.
        stop: whether any process was asked to stop.
        losses: loss of each micro batch, process by process.
        sums: [2 + L, K] sums of the step.
        norm: norm of the gradients before clipping.
    """

    tokens: int
    stop: bool
    losses: list[float]
    sums: Tensor
    norm: float


class TrainingLoop:
    """State of a run between optimizer steps, new or continued with `train.resume`.

    Raises:
        InputError: the checkpoint to resume does not fit.
    """

    def __init__(self, accelerator: Accelerator, job: TrainingJob) -> None:
        self.accelerator, self.job, self.config = accelerator, job, job.config
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.device = accelerator.device
        self.checkpoints = job.out_dir / "checkpoints"
        self.step = self.tokens = 0
        self.stop_asked = self.stopping = False
        self._step_left_s = 0.0  # about, and 0 until the first micro batch has ended
        self.metrics: MetricLogger | None = None
        self.skipped = SkippedSequences(len(job.train))
        self.round = Round(job.train, 0, self.config.num_steps, job.seed)
        self.window: list[Tensor] = []
        self.evaluation: dict[str, float] = {}
        self.kept: KeptHead | None = None
        self._kept_tensors: dict[str, Tensor] = {}
        self._term_weights, self._rate = job.objective.term_weights, 0.0
        self._watch, self._started_tokens = Stopwatch(), 0
        self.waiting = WaitTimer()
        # The first micro batch of a compiled objective compiles. On CUDA steps take seconds.
        compiles = job.objective.compiled
        self._timed_micro = int(compiles) if self.device.type == "cpu" else None
        path: Path | None = None
        if self.config.resume == "auto":
            path = checkpoint.find_latest_checkpoint(self.checkpoints, self.print_on_main)
        elif self.config.resume is not None:
            path = Path(self.config.resume)
        state = {} if path is None else self._restore_progress(path)
        processes.wait_for_processes()  # processes load at different speeds
        self._check_agreed()
        self.placement = make_strategy(accelerator, job.objective, self.config)
        if self.world > 1:
            self.print_on_main(f"layout: {self.placement}")
        if path is not None:
            self.placement.restore_optimizers(self.step, state)
            self.print_on_main(f"continuing from {path}")
        # No process may write before all of them have looked at the folder.
        processes.wait_for_processes()
        if self.rank == 0:
            make_folder(job.out_dir)
            settings, goes_on = job.provenance.get("config", {}), path is not None
            self.metrics = MetricLogger(
                job.out_dir, job.log, settings, self.print_on_main, is_resumed=goes_on
            )
            self.metrics.drop_later_lines(self.step)
        self._open_round()

    def print_on_main(self, text: str) -> None:
        """Print on rank 0, above the progress bar."""
        if self.rank == 0:
            tqdm.write(text)

    def _restore_progress(self, path: Path) -> dict[str, Tensor]:
        """Restore progress and head; return the state of the optimizers, which do not exist yet."""
        head = self.job.objective.head
        progress, tensors = checkpoint.load_checkpoint(path)
        now = self.job.resume_settings
        if unknown := checkpoint.check_resume_settings(
            path, progress.run, now, self.config, progress.step
        ):
            self.print_on_main(
                f"{path} is of an earlier version, which did not record {', '.join(unknown)}: not "
                "compared"
            )
        checkpoint.check_checkpoint_fits(path, tensors, head, state_keys(head, self.config))
        head.load_state_dict(head.state_dict() | tensors.head)  # buffers keep their values
        self.step, self.tokens = progress.step, progress.tokens
        self.skipped.numbers |= {*progress.skipped}
        if progress.kept is not None and self.rank == 0:
            self.kept = KeptHead(**progress.kept)
            self._kept_tensors = {name: copy_to_cpu(t) for name, t in tensors.kept.items()}
        return tensors.state

    def _check_agreed(self) -> None:
        steps = self.accelerator.gather(torch.tensor([self.step], device=self.device)).tolist()
        if len(set(steps)) > 1:
            raise InputError(
                f"train.resume={self.config.resume}: processes found checkpoints of different "
                f"steps {steps}; set out_dir={self.job.out_dir} to one folder that all nodes share"
            )

    def _open_round(self) -> None:
        """Start to load from this step on: the data, or the round of answers of the step."""
        objective, rollouts = self.job.objective, self.job.rollouts
        if rollouts is not None:
            objective.eval()
            with self.placement.open_whole_weights():
                self.round, written = rollouts.load_or_write_round(self.step, objective.head)
            objective.train()
            known = self.skipped.numbers if self.step > self.round.first else ()
            self.skipped = SkippedSequences(len(self.round.data), known)
            if written:
                self._log(written)
                self.print_on_main(f"step {self.step}: {rollouts.format_round(written)}")
        self._start_loading(self.step)

    def _start_loading(self, step: int) -> None:
        """Start to load the rest of the round, from `step` on."""
        self.prefetcher = Prefetcher(
            self._load_micro_batches, self.job.objective.prepare_batch, self.device, step,
            min(self.round.last, self.config.num_steps), self.job.num_prefetch_steps,
        )  # fmt: skip

    def run_steps(self) -> Outcome:
        """Run steps until the end or a stop."""
        config = self.config
        bar = tqdm(
            desc="training", total=config.num_steps, initial=self.step, disable=self.rank != 0,
            unit="step", dynamic_ncols=True, mininterval=0.5,
        )  # fmt: skip
        with bar:
            # The evaluation of a checkpoint's step follows the checkpoint.
            if self._evaluates(self.step) and (self.step > 0 or self.job.has_trained_head):
                self._run_evaluation()
            self._watch, self._started_tokens = Stopwatch(), self.tokens
            self.waiting.restart()
            while self.step < config.num_steps:
                if self.stopping:
                    self._save_checkpoint()
                    self._save_head(STOPPED)
                    return Outcome(False, self.step, self.evaluation, {})
                if self.step == self.round.last:
                    self.prefetcher.close()
                    self._open_round()
                loss = self.optimizer_step()
                self.step += 1
                bar.set_postfix_str(f"loss {loss:.4f}, {self._tokens_per_s():.0f} tokens/s", False)
                bar.update()
                last = self.step == config.num_steps
                if last or self.step % config.log_steps == 0:
                    self._log_metrics()
                if last or self.step % config.save_steps == 0:
                    self._save_checkpoint()
                if self._evaluates(self.step):
                    self._run_evaluation()
        # The head is saved before its last evaluation, so a failure there loses nothing.
        self._save_head("head")
        if self.rank == 0:
            shutil.rmtree((self.job.out_dir / STOPPED).parent, ignore_errors=True)
        self._run_evaluation()
        record = self._leave_kept_head()
        return Outcome(True, self.step, self.evaluation, record)

    def _evaluates(self, step: int) -> bool:
        """Tell whether an evaluation follows a step before the last."""
        return step < self.config.num_steps and step % self.config.eval_steps == 0

    def optimizer_step(self) -> float:
        """Run one optimizer step and return its loss. The host waits for the device once."""
        with self.waiting.measure_wait():
            batches = self.prefetcher.next_step()
        result = self._compute_gradients(batches, self.prefetcher.iter_micro_batches())
        while not all(map(math.isfinite, result.losses)):
            self._skip_non_finite(result.losses)
            batches = self._load_micro_batches(self.step)
            result = self._compute_gradients(batches, map(self._prepare_batch, batches))
        self._check_norm(result.norm)
        self._rate = compute_learning_rate(self.config, self.step)
        with label_part("optimizer"):
            late_norm = self.placement.step_optimizers(self._rate, self.step)
        self._check_norm(late_norm)
        self.stopping = result.stop
        self.tokens += result.tokens
        self.window.append(result.sums)
        return float((self._term_weights * result.sums[0] / result.sums[1].clamp_min(1)).sum())

    def _compute_gradients(self, batches: list[Batch], prepared: Iterable[Batch]) -> _StepResult:
        """Compute and clip the gradients of a step; gather its figures from all processes.

        Args:
            batches: the micro batches of this process, on the CPU.
            prepared: the same batches on the device, with the target's hidden states.
        """
        counts = torch.stack([self.job.objective.compute_divisors(batch) for batch in batches])
        self._term_weights = self.job.objective.start_step(self.step)
        totals = to_device(counts.sum(0).double(), self.device)
        totals = self.accelerator.reduce(totals, reduction="sum")
        # Strategies average gradients over the processes; the loss needs their sum.
        weights = to_device(self._term_weights, self.device)
        scale = self.world * weights / totals.clamp_min(1).float()
        sums = self._accumulate_gradients(prepared, len(batches), scale)
        num_tokens = sum(int((batch["document_ids"] >= 0).sum()) for batch in batches)
        with label_part("optimizer"):
            norm = self.placement.clip_gradients(self.step)
            return self._reduce_figures(sums, norm, num_tokens)

    def _accumulate_gradients(
        self, prepared: Iterable[Batch], num_micro: int, scale: Tensor
    ) -> Tensor:
        """Run forward and backward of each micro batch; return `LossSums.terms` [M, 2 + L, K]."""
        terms: list[Tensor] = []
        watch = Stopwatch()
        for batch in prepared:
            with self.placement.open_micro_batch(len(terms) == num_micro - 1):
                sums: LossSums = self.placement.objective(batch, scale)
                with label_part("backward"):
                    self.placement.backward(sums.total)
            terms.append(sums.terms)
            del batch, sums  # frees their memory for the next batch
            self._estimate_time(watch.seconds(), len(terms), num_micro)
            watch = Stopwatch()
        return torch.stack(terms)

    def _reduce_figures(self, sums: Tensor, norm: Tensor, num_tokens: int) -> _StepResult:
        """Bring the figures of all processes to the host: the step's only wait.

        Args:
            sums: [M, 2 + L, K] sums of this process's micro batches.
            norm: [] norm of the gradients, the same on every process.
            num_tokens: tokens of this process's micro batches.
        """
        losses = torch.zeros(self.world, len(sums), dtype=torch.float64, device=self.device)
        losses[self.rank] = sums[:, 0].sum(1)
        own_figures = torch.tensor([num_tokens, self.stop_asked], dtype=torch.float64)
        parts = (to_device(own_figures, self.device), losses.flatten(), sums.sum(0).flatten())
        own = torch.cat([part.double() for part in parts])
        packed = self.accelerator.reduce(own, reduction="sum")
        packed = torch.cat([packed, norm.double().view(1)]).to("cpu")
        (tokens, stop), all_losses, terms, (gathered_norm,) = packed.split(
            [2, losses.numel(), sums[0].numel(), 1]
        )
        return _StepResult(
            tokens=int(tokens), stop=bool(stop > 0), losses=all_losses.tolist(),
            sums=terms.view_as(sums[0]).float(), norm=float(gathered_norm),
        )  # fmt: skip

    def _draw_indices(self) -> list[int]:
        """Draw the sequences of this step, over all processes."""
        return self.round.draw_global_batch(self.step, self.config.batch_size)

    def _load_micro_batches(self, step: int) -> list[Batch]:
        """Load the micro batches of this process in a step, on the CPU.

        Each sequence gets a random seed from its index and the step. Draws are therefore the same
        on any number of processes, and after a restart.
        """
        size, objective = self.config.micro_batch_size, self.job.objective
        batches: list[Batch] = []
        indices = self.round.draw_global_batch(step, self.config.batch_size)
        for group in split_micro_batches(indices, self.rank, self.world, size):
            seeds = tuple(hash_seed(self.job.seed, step, index) for index in group)
            batch = self.skipped.blank_skipped(stack_sequences(self.round.data, group), group)
            batches.append(objective.index_training_batch({**batch, NOISE_SEEDS: seeds}))
        return batches

    def _prepare_batch(self, batch: Batch) -> Batch:
        return self.job.objective.prepare_batch(batch_to_device(batch, self.device))

    def _estimate_time(self, seconds: float, num_done: int, num_micro: int) -> None:
        """Estimate the time of the run, once, and of the step after `num_done` micro batches."""
        # After the last micro batch, a stop in an evaluation waits for a whole step.
        self._step_left_s = seconds * (num_micro - num_done or num_micro)
        if self._timed_micro == num_done - 1:
            self._timed_micro = None
            num_left = num_micro * (self.config.num_steps - self.step)
            for line in format_estimate(seconds, num_left):
                self.print_on_main(line)

    def format_stop(self) -> str:
        """Format when a run that is asked to stop will do so, and how to end it at once.

        `accelerate launch` of one process ends at Ctrl-C, and leaves the run without a terminal.
        """
        at_once = (
            f"To stop at once, type Ctrl-C after two seconds, or kill -INT {os.getpid()} where "
            "the prompt is back already"
        )
        if self.step == self.config.num_steps:
            return f"all steps are done: stops after the last evaluation. {at_once}"
        time_left = format_minutes(self._step_left_s)
        return (
            f"stops after this step ({self.step + 1:,} of {self.config.num_steps:,})"
            f"{time_left and f', in {time_left},'} and saves a checkpoint. {at_once}; that loses "
            "the steps since the last checkpoint"
        )

    def _skip_non_finite(self, losses: list[float]) -> None:
        """Discard the gradients of a step, and skip the sequences with non-finite losses.

        Args:
            losses: [processes * M] losses, some not finite.

        Raises:
            InputError: the head is at fault (see `SkippedSequences`), or too many sequences are
                bad.
        """
        size, indices = self.config.micro_batch_size, self._draw_indices()
        bad = [micro for micro, loss in enumerate(losses) if not math.isfinite(loss)]
        suspects = [index for micro in bad for index in indices[micro * size :][:size]]
        if not self.placement.can_discard:
            self._stop_on("the loss", suspects)
        self.placement.discard_gradients()
        new = self.skipped.filter_kept(suspects)
        faulty = [index for index in new if self._is_loss_non_finite(index)] or new
        around = self.round.iter_other_batches(self.step, self.config.batch_size)
        if not faulty or self.skipped.has_diverged(
            faulty, indices, around, self._is_loss_non_finite
        ):
            self._stop_on("the loss", faulty or suspects)
        self.print_on_main(self.skipped.skip_sequences(faulty, self.step + 1))
        self.prefetcher.close()  # later steps are loaded already, with these sequences
        self._start_loading(self.step + 1)

    @torch.no_grad()
    def _is_loss_non_finite(self, index: int) -> bool:
        """Run the head on one sequence, on all processes; True if its loss is not finite."""
        objective = self.job.objective
        batch = objective.index_training_batch(
            {**stack_sequences(self.round.data, [index]), NOISE_SEEDS: (0,)}
        )
        with self.placement.open_whole_weights():
            # As in evaluations, without the hooks of a strategy.
            weights = self._term_weights.to(self.device)
            terms = objective.forward(self._prepare_batch(batch), weights).terms
        return not terms.isfinite().all()

    def _check_norm(self, norm: float) -> None:
        if not math.isfinite(norm):
            self._stop_on("the gradient's norm", self._draw_indices())

    def _stop_on(self, what: str, indices: list[int]) -> None:
        raise InputError(
            f"{what} is not finite at step {self.step + 1}, in packed training sequences "
            f"{indices}; nothing of this step was applied or saved. Look at these sequences, set "
            "train.dtype=float32 with train.resume=auto, or start again with a lower "
            f"train.learning_rate={self.config.learning_rate}"
        )

    def _tokens_per_s(self) -> float:
        return (self.tokens - self._started_tokens) / self._watch.seconds()

    def _log(self, metrics: dict[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.log(self.step, metrics)

    def _log_metrics(self) -> None:
        sums = torch.stack(self.window).sum(0)
        self.window.clear()
        metrics = compute_metrics("train", sums, self._term_weights, self.job.objective)
        metrics |= {"train/learning_rate": self._rate, "train/tokens": self.tokens}
        metrics["train/tokens_per_s"] = self._tokens_per_s()
        metrics["train/skipped_sequences"] = len(self.skipped.numbers)
        metrics["train/waiting"] = self.waiting.pop_wait_fraction()
        # The pipeline is full by the second look.
        if isinstance(self.job.train, ServedSequences) and self.waiting.num_looks == 2:
            self.print_on_main(format_server_balance(metrics["train/waiting"]))
        self._log(metrics)

    def _run_evaluation(self) -> None:
        job = self.job
        evaluated = evaluate_heldout(
            self.placement, job.objective, job.heldout, job.evaluate, self.step
        )
        self.evaluation = evaluated.figures
        if self.evaluation:
            self._log(self.evaluation)
            self.print_on_main(f"step {self.step}: {format_figures(self.evaluation)}")
        if self.config.keep is Keep.best:
            self._keep_better_head(evaluated)

    def _keep_better_head(self, evaluated: HeldoutFigures) -> None:
        """Keep the head of this step in memory, unless an earlier one is better."""
        is_last = self.step == self.config.num_steps
        if evaluated.texts:
            self.kept = choose_kept_head(self.kept, self.step, evaluated)
            if self.kept.step < self.step:
                self.print_on_main(f"the head of step {self.kept.step} stays: {self.kept.why}")
        elif is_last:
            self.kept = None  # nothing speaks against the last head
        is_new = self.kept is not None and self.kept.step == self.step
        if processes.broadcast_from_main(is_new) and not is_last:
            with self.placement.open_averaged_weights():
                if self.rank == 0:
                    tensors = self.job.objective.head.collect_tensors()
                    self._kept_tensors = {name: copy_to_cpu(t) for name, t in tensors.items()}

    def _leave_kept_head(self) -> dict[str, Any]:
        """Leave the kept head as `head`, and write into its record which step it is and why."""
        kept, job = self.kept, self.job
        record: dict[str, Any] = {
            "step": self.step,
            "num_steps": self.step,
            "why": "train.keep=last",
        }
        if kept is not None:
            record |= {"step": kept.step, "why": kept.why}
            self.evaluation = kept.figures
        elif self.config.keep is Keep.best:
            record["why"] = "the last, as its evaluation gave no tau to compare"
        with self.placement.open_whole_weights():
            if self.rank == 0:
                folder = job.out_dir / "head"
                if record["step"] < self.step:
                    provenance, tensors = job.provenance | {"kept": record}, self._kept_tensors
                    job.objective.head.save(folder, provenance, job.head_documents, tensors)
                else:
                    written = load_json(folder / PROVENANCE) or {}
                    text = json.dumps(written | {"kept": record}, indent=2)
                    write_atomically(folder / PROVENANCE, text + "\n")
        processes.wait_for_processes()
        return record

    def _save_checkpoint(self) -> None:
        tensors = self.placement.gather_tensors()
        if self.rank == 0:
            progress = checkpoint.Progress(
                step=self.step, tokens=self.tokens,
                run=self.job.resume_settings, skipped=sorted(self.skipped.numbers),
                kept=None if self.kept is None else asdict(self.kept),
            )  # fmt: skip
            checkpoint.save_checkpoint(
                self.checkpoints, replace(tensors, kept=self._kept_tensors), progress,
                self.config.num_checkpoints,
            )  # fmt: skip
        processes.wait_for_processes()

    def _save_head(self, place: str) -> None:
        """Save the head, with averaged weights if they are kept, to a folder below `out_dir`."""
        with self.placement.open_averaged_weights():
            if self.rank == 0:
                job = self.job
                job.objective.head.save(job.out_dir / place, job.provenance, job.head_documents)
        processes.wait_for_processes()

    def close(self) -> None:
        """End loading and let the tracker finish."""
        self.prefetcher.close()
        if self.metrics is not None:
            self.metrics.close()


@contextmanager
def _stop_signals(run: TrainingLoop) -> Iterator[None]:
    """Turn SIGTERM, SIGUSR1 and SIGINT into a stop after the current step.

    Launchers pass signals on, so one may arrive twice at once. A second SIGINT after more than two
    seconds comes from a person and ends the process.
    """
    asked_at: list[float] = []

    def ask(number: int, _frame: Any) -> None:
        if run.rank == 0 and not run.stop_asked:
            # The handler may interrupt a print, so it does not use Python's buffers.
            os.write(STDERR, f"\n{run.format_stop()}\n".encode())
        run.stop_asked = True
        asked_at.append(time.monotonic())
        if number == signal.SIGINT and asked_at[-1] - asked_at[0] > 2:
            raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def format_estimate(seconds: float, num_left: int) -> list[str]:
    """Format the time of `num_left` micro batches, each of some seconds; nothing if it is short."""
    text = format_minutes(seconds * num_left)
    if not text:
        return []
    line = (
        f"{text} to train, then the evaluation, by the first micro batch: {num_left:,} of "
        f"{seconds:.1f} s"
    )
    if seconds * num_left < 60 * MIN_LONG_MINUTES:
        return [line]
    return [f"{line}; lower train.num_epochs, train.max_steps, data.num_prompts or data.max_length"]


def format_minutes(seconds: float) -> str:
    """Format seconds as `about 8 minutes` or `about 3 hours`; nothing below one and a half minutes.

    From 100 minutes on, hours are named.
    """
    minutes = seconds / 60
    if minutes < 1.5:
        return ""
    return f"about {minutes:,.0f} minutes" if minutes < 100 else f"about {minutes / 60:,.0f} hours"
