"""Checks of settings before heavy imports and work."""

import os
from pathlib import Path
from typing import Any

from conf.command.environment import check_device_map
from conf.errors import InputError
from conf.files import check_out_dir
from conf.settings.drafting import HeadRef
from conf.settings.measure import MeasureRun, SpeedupRun
from data.rows.data_files import check_data_paths
from heads.folders import check_head_files, check_target_files


def check_inputs(run: Any) -> None:
    """Refuse a target, data or heads that do not exist, if the command has them.

    Raises:
        InputError: naming the setting.
    """
    data, target = getattr(run, "data", None), getattr(run, "target", None)
    if data is not None:
        check_data_paths(data)
    if target is not None and getattr(data, "features", None) is None:
        check_device_map(target.device_map, os.environ)
        check_target_files(target)
    if (head := getattr(run, "head", None)) is not None:
        check_head_files(head, target)
    if isinstance(run, SpeedupRun):
        for path in run.heads:
            check_head_files(HeadRef(path), target, "heads")
        check_head_files(run.draft, None, "draft.path")
    check_out_dir(run.out_dir)


def check_measurement(run: MeasureRun, result: str) -> None:
    """Refuse a measurement without a head, or over an earlier one.

    Args:
        run: settings of the command.
        result: name of the file to write.

    Raises:
        InputError: before anything is made.
    """
    if run.head.path is None and run.needs_head:
        raise InputError(
            "head.path is unset: this command needs a head; type a folder with a trained head, or "
            "a Hub id"
        )
    if (Path(run.out_dir) / result).exists():
        raise InputError(f"out_dir={run.out_dir}: already holds {result}; choose another folder")
    check_inputs(run)
