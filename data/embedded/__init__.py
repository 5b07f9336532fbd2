"""Embedded default: a small target and its conversations, which lie in this folder.

`scripts/embedded/make.py` made them; `scripts/README.md` says from which text.
"""

from pathlib import Path

from conf.settings.data import DataRun

_FOLDER = Path(__file__).parent
TARGET_PATH = str(_FOLDER / "model")
CONVERSATIONS = str(_FOLDER / "train.jsonl")
PROMPTS = str(_FOLDER / "prompts.jsonl")
"""Held-out prompts, from files that the target was not trained on."""


def is_embedded(path: str) -> bool:
    """Tell whether the target's path in a head's record is the embedded one of any checkout.

    The folder of the target was called `target` until November 2026.
    """
    *_, data, embedded, name = ("", "", "", *Path(path).parts)
    return (data, embedded) == ("data", "embedded") and name in ("model", "target")


def fill_default_paths(run: DataRun, *, prompts: bool = False) -> None:
    """Fill unset paths with the embedded default.

    Effects: sets `target.path` and `data.path` of the run.

    Args:
        run: settings whose paths may be unset.
        prompts: whether the data are prompts to measure on, not conversations to learn from.
    """
    run.target.path = run.target.path or TARGET_PATH
    run.data.path = run.data.path or (PROMPTS if prompts else CONVERSATIONS)
