"""Log the metrics of a run, to `metrics.jsonl` and on request to tensorboard or wandb.

A tracker never stops a run: after its first failure, which is printed, the run goes on without it.
The variable WANDB_MODE chooses whether wandb is online; its key stays in the environment.
"""

import json
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from conf.errors import InputError
from conf.files import write_atomically
from conf.settings.training import LogConfig, Tracker

START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 60.0
WANDB_ID = "wandb_run_id.txt"
"""File in `out_dir` with the id of the run in wandb, by which a resumed run continues there."""
Say = Callable[[str], None]


class MetricLogger:
    """Logger of a run's metrics, on rank 0 only."""

    def __init__(
        self,
        out_dir: Path,
        config: LogConfig,
        run: dict[str, Any],
        say: Say,
        is_resumed: bool = False,
    ) -> None:
        """Open the file and start the tracker.

        Args:
            out_dir: folder of the run, which exists.
            config: tracker and names.
            run: resolved configuration to show in the tracker.
            say: function that prints a tracker's failure.
            is_resumed: whether wandb knows the run under an id.
        """
        if not is_resumed:
            (out_dir / WANDB_ID).unlink(missing_ok=True)
        self.path = out_dir / "metrics.jsonl"
        self._say = say
        self._tracker: GeneralTracker | None = None
        self._name = config.tracker.value
        if config.tracker is not Tracker.none:
            start = _start_wandb if config.tracker is Tracker.wandb else _start_tensorboard
            self._tracker = self._guard_tracker(
                lambda: start(out_dir, config, run), START_TIMEOUT_S
            )

    def drop_later_lines(self, step: int) -> None:
        """Drop the lines that a run resumed at `step` writes again.

        These are the lines of later steps and of evaluations after this step.
        """
        if not self.path.exists():
            return

        def stays(line: str) -> bool:
            try:
                written = json.loads(line)
                return written["step"] - ("eval/loss" not in written) < step
            except (ValueError, KeyError, TypeError):  # half a line of a killed process
                return False

        lines = filter(stays, self.path.read_text().splitlines())
        write_atomically(self.path, "".join(f"{line}\n" for line in lines))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step as one line and send them to the tracker.

        Raises:
            InputError: `metrics.jsonl` cannot be written.
        """
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be written: {error}; free space there"
            ) from error
        if self._tracker is not None:
            tracker = self._tracker
            self._guard_tracker(lambda: tracker.log(metrics, step), None)

    def close(self) -> None:
        """Let the tracker finish within a time limit."""
        if self._tracker is not None:
            self._guard_tracker(self._tracker.finish, CLOSE_TIMEOUT_S)

    def _guard_tracker(self, act: Callable[[], Any], timeout_s: float | None) -> Any:
        try:
            return act() if timeout_s is None else _run_with_timeout(act, timeout_s)
        # A tracker may raise any error, and no such error is worth a run.
        except Exception as error:  # noqa: BLE001
            self._tracker = None
            reason = str(error).strip().split("\n")[0]
            self._say(
                f"log.tracker={self._name} failed, so the run goes on without it: "
                f"{type(error).__name__}: {reason}; metrics go to {self.path}"
            )
        return None


def _start_tensorboard(out_dir: Path, config: LogConfig, run: dict[str, Any]) -> GeneralTracker:
    tracker = TensorBoardTracker("tensorboard", out_dir)
    tracker.start()
    tracker.writer.add_text("config", f"```\n{json.dumps(run, indent=1)}\n```")
    if config.run_name is not None:
        tracker.writer.add_text("run_name", config.run_name)
    return tracker


def _start_wandb(out_dir: Path, config: LogConfig, run: dict[str, Any]) -> GeneralTracker:
    import wandb

    known = out_dir / WANDB_ID
    number = known.read_text().strip() if known.is_file() else uuid.uuid4().hex[:8]
    write_atomically(known, f"{number}\n")
    # Without a limit `init` waits about 100 s for a missing network.
    settings = wandb.Settings(init_timeout=START_TIMEOUT_S / 2, silent=True)
    tracker = WandBTracker(
        config.project, name=config.run_name, dir=str(out_dir), config=run, id=number,
        resume="allow", settings=settings,
    )  # fmt: skip
    tracker.start()
    return tracker


def _run_with_timeout(act: Callable[[], Any], timeout_s: float) -> Any:
    """Run an action in a thread; after a TimeoutError the thread is left behind."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised again below
            is_usual = isinstance(error, Exception)
            outcome.set_exception(error if is_usual else RuntimeError(repr(error)))

    threading.Thread(target=run, daemon=True).start()
    if not wait([outcome], timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    return outcome.result()
