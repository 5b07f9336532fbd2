"""The verdict of the figures that were measured beside a head."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from conf.files import load_json
from eval.measure.verdict import Verdict, judge_acceptance, judge_speedup


def judge_measured_head(folder: Path, kind: str, places: Sequence[Path]) -> str:
    """Judge a head by its `speedup.json`, or else by its `acceptance.json`.

    Args:
        folder: folder of the head.
        kind: kind of the head, after which its methods are named.
        places: folders with measurements; the first that has a file is used.

    Returns:
        The verdict, and the file that it rests on; empty if the files measure another head, lack
        figures, or are missing.
    """
    judges: dict[str, Callable[[dict[str, Any]], Verdict | None]] = {
        "speedup.json": partial(judge_speedup, kinds=[kind]),
        "acceptance.json": judge_acceptance,
    }
    for name, judge in judges.items():
        result = next(filter(None, (load_json(place / name) for place in places)), {})
        if measures_another_head(result.get("head"), folder):
            continue
        if "methods" in result:  # eagle_tree_2 is another head's
            rows = result["methods"].items()
            numbered = re.compile(rf"{kind}_\w+_\d+")
            result["methods"] = {k: row for k, row in rows if not numbered.fullmatch(k)}
        try:
            verdict = judge(result)
        except KeyError:  # no file, or an old one
            continue
        if verdict is not None:
            return f"The verdict of {name}: {verdict.sentence}"
    return ""


def measures_another_head(path: object, folder: Path) -> bool:
    """Tell whether a result's head, if it is a folder of this machine, is none of a given one."""
    return isinstance(path, str) and Path(path).is_dir() and not Path(path).samefile(folder)
