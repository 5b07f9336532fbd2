"""Whether the run may start: its launch, batch and folder; and how it is asked to stop.

Nothing here imports a launcher: the checks read the environment that it left.
"""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.schema import InputError, TrainConfig

_SIZES = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
_TWO_ON_CPU = (
    "on CPU: accelerate launch --config_file conf/accelerate/cpu2.yaml SCRIPT, or "
    "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no SCRIPT"
)


def check_launch(environ: Mapping[str, str], num_processes: int) -> None:
    """Refuses a launch whose processes do not see each other.

    Args:
        environ: the environment variables.
        num_processes: processes that train together, as accelerate sees them.

    Raises:
        InputError: the launcher started, or was asked for, more processes than that; each
            would train alone and overwrite the others.
    """
    for name in _SIZES:
        size = environ.get(name, "1")
        if size.isdigit() and int(size) > num_processes:
            raise InputError(
                f"the launcher set {name}={size}, but only {num_processes} process sees the "
                f"others: they would train alone, into one folder. Use {_TWO_ON_CPU}"
            )
    # `accelerate launch` sets the master's address for several processes only, and the world
    # size only if it really starts them; with `--cpu --num_processes 2` it starts one.
    launched = "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_PORT" in environ
    if launched and "WORLD_SIZE" not in environ:
        raise InputError(
            "accelerate was asked for several processes and started one (as it does with "
            f"--cpu --num_processes N). Use {_TWO_ON_CPU}. If one process is wanted, pass "
            "--num_processes 1 and unset MASTER_ADDR and MASTER_PORT"
        )


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
    """SIGTERM and SIGINT ask for a stop instead of ending the process.

    Launchers pass one on, so the same signal may come twice at once; a second SIGINT later
    than two seconds after the first is a person who does not want to wait.
    """
    first: list[float] = []

    def ask(number: int, _frame: Any) -> None:
        stop["asked"] = True
        first.append(time.monotonic())
        if number == signal.SIGINT and first[-1] - first[0] > 2:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
