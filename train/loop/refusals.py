"""Checks of training settings before heavy imports."""

from pathlib import Path

from conf.errors import InputError
from conf.settings.training import TrainRun
from eval.refusals import check_inputs


def check_training(config: TrainRun) -> None:
    """Refuse a used `out_dir`, and a target, data or head that do not exist.

    Raises:
        InputError: naming the setting.
    """
    check_run_folder(Path(config.out_dir), config.train.resume)
    check_inputs(config)


def check_run_folder(out_dir: Path, resume: str | None) -> None:
    """Refuse to write over another run.

    Raises:
        InputError: `out_dir` is a file, or is not empty and nothing is resumed.
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"out_dir={out_dir}: is a file; name a folder")
    taken = out_dir.is_dir() and any(out_dir.iterdir())
    inside = resume == "auto" or (
        resume is not None and Path(resume).resolve().is_relative_to(out_dir.resolve())
    )
    if taken and not inside:
        raise InputError(
            f"out_dir={out_dir}: is not empty; name another folder, or continue its run with "
            "train.resume=auto"
        )
    if resume not in (None, "auto") and not Path(str(resume)).is_dir():
        raise InputError(
            f"train.resume={resume}: no such folder; type auto or the folder of a checkpoint"
        )
