"""The embedded default: a small target and its conversations, which lie in this folder.

`scripts/embedded/make.py` made them; `scripts/README.md` says from which text.
"""

from pathlib import Path

from conf.settings.data import DataRun

_FOLDER = Path(__file__).parent
TARGET_PATH = str(_FOLDER / "model")
CONVERSATIONS = str(_FOLDER / "train.jsonl")
PROMPTS = str(_FOLDER / "prompts.jsonl")
"""Held out: from files that the target was not trained on."""


def is_embedded(path: str) -> bool:
    """Whether a head's record names the embedded target, in whichever checkout made the head.

    Its folder was called `target` until November 2026.
    """
    *_, data, embedded, name = ("", "", "", *Path(path).parts)
    return (data, embedded) == ("data", "embedded") and name in ("model", "target")


def fill_default_paths(run: DataRun, *, prompts: bool = False) -> None:
    """Fill unset paths with the embedded default.

    Effects: sets `target.path` and `data.path` of the run.

    Args:
        run: whose paths may be unset.
        prompts: its data are prompts to measure on, not conversations to learn from.
    """
    run.target.path = run.target.path or TARGET_PATH
    run.data.path = run.data.path or (PROMPTS if prompts else CONVERSATIONS)
