"""Refusals of settings before anything is imported for them, prepared, loaded or made."""

import os
from pathlib import Path
from typing import Any

from conf.command.launch import check_spread
from conf.errors import InputError
from conf.files import check_room
from conf.settings.drafting import HeadRef
from conf.settings.measure import MeasureRun, SpeedupRun
from data.rows.files import check_data
from heads.folders import check_head, check_target


def check_inputs(run: Any) -> None:
    """Refuses a target, data or heads that are not there; of whichever the command has.

    Raises:
        InputError: see each.
    """
    data, target = getattr(run, "data", None), getattr(run, "target", None)
    if data is not None:
        check_data(data)
    if target is not None and getattr(data, "features", None) is None:
        check_spread(target.device_map, os.environ)
        check_target(target)
    if (head := getattr(run, "head", None)) is not None:
        check_head(head, target)
    if isinstance(run, SpeedupRun):
        for path in run.heads:
            check_head(HeadRef(path), target, "heads")
        check_head(run.draft, None, "draft.path")
    check_room(run.out_dir)


def check_measure(run: MeasureRun, result: str) -> None:
    """Refuses a measurement without a head, or over an earlier one.

    Args:
        run: the settings.
        result: the file that will be written.

    Raises:
        InputError: see each part; nothing has been made when it is raised.
    """
    if run.head.path is None and run.needs_head:
        raise InputError("head.path is unset: a folder with a trained head, or a Hub id")
    if (Path(run.out_dir) / result).exists():
        raise InputError(f"out_dir={run.out_dir} already holds {result}: choose another")
    check_inputs(run)
