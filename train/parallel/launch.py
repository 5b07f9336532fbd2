"""Whether the run may start: its batch and folder; and how it is asked to stop."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.errors import InputError
from conf.settings.training import TrainConfig


def check_batch(config: TrainConfig, num_processes: int) -> None:
    """Refuses a batch that does not divide into equal micro batches.

    Raises:
        InputError: naming the three numbers.
    """
    share = num_processes * config.micro_batch_size
    if config.batch_size % share:
        raise InputError(
            f"train.batch_size={config.batch_size} is not divisible by {num_processes} "
            f"processes x train.micro_batch_size={config.micro_batch_size}: "
            f"set a multiple of {share}"
        )


def check_out_dir(out_dir: Path, resume: str | None) -> None:
    """Refuses to write over another run.

    Raises:
        InputError: `out_dir` is a file, or holds something and nothing is being resumed.
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"out_dir={out_dir} is a file: name a folder")
    taken = out_dir.is_dir() and any(out_dir.iterdir())
    inside = resume == "auto" or (
        resume is not None and Path(resume).resolve().is_relative_to(out_dir.resolve())
    )
    if taken and not inside:
        raise InputError(
            f"out_dir={out_dir} is not empty: name another folder, or continue the run in it "
            "with train.resume=auto"
        )
    if resume not in (None, "auto") and not Path(str(resume)).is_dir():
        raise InputError(f"train.resume={resume}: no such folder; allowed: auto, a checkpoint")


@contextmanager
def stop_signals(stop: dict[str, bool]) -> Iterator[None]:
    """SIGTERM, SIGUSR1 and SIGINT ask for a stop instead of ending the process.

    Launchers pass one on, so the same signal may come twice at once; a second SIGINT later
    than two seconds after the first is a person who does not want to wait.
    """
    first: list[float] = []

    def ask(number: int, _frame: Any) -> None:
        stop["asked"] = True
        first.append(time.monotonic())
        if number == signal.SIGINT and first[-1] - first[0] > 2:
            raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
