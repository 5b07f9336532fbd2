"""The table of draft heads, and what finds them: a new kind is a folder and a line here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import InputError
from heads.dflash.kind import DFlashKind
from heads.dflash2.kind import DFlash2Kind
from heads.dspark.kind import DSparkKind
from heads.eagle.kind import EagleKind
from heads.kind import DraftHead, Kind
from heads.medusa.kind import MedusaKind
from heads.peagle.kind import PEagleKind
from heads.storage import locate

KINDS: dict[str, Kind[Any]] = {
    "eagle": EagleKind(),  # first, so asked last: its files have no sign of their own
    "medusa": MedusaKind(),
    "dflash": DFlashKind(),
    "dflash2": DFlash2Kind(),
    "dspark": DSparkKind(),
    "peagle": PEagleKind(),
}
"""By the name of the folder, the entry script `train/{name}.py`, and its ways to draft."""


def name_of(head: DraftHead) -> str:
    """The name of a head's line in the table."""
    return next(name for name, kind in reversed(KINDS.items()) if isinstance(head, kind.head))


def kind_of(head: DraftHead) -> Kind[Any]:
    """The kind of a head."""
    return KINDS[name_of(head)]


def forms() -> dict[str, Kind[Any]]:
    """The kind of each form, as files and benchmarks name it: `medusa`, `eagle1`, `eagle3`."""
    return {form: kind for kind in KINDS.values() for form in kind.forms}


def load_head(
    path: str, revision: str | None = None, layers: Sequence[int] | None = None
) -> DraftHead:
    """Loads a head, trained, exported or published; float32, not attached.

    Args:
        path: folder or Hub id.
        revision: of a Hub id.
        layers: see `Kind.read`.

    Raises:
        InputError: as `Kind.read`; nothing there, or nothing that any kind reads.
    """
    # Once: a second look at the Hub could find another commit.
    return read_head(locate(path, revision), path, layers)


def read_head(folder: Path, path: str, layers: Sequence[int] | None = None) -> DraftHead:
    """`load_head` of a folder that `locate` has found for `path`."""
    for kind in reversed(KINDS.values()):
        if kind.holds(folder):
            return kind.read(folder, path, layers)
    raise InputError(f"head.path={path}: no head there; known are {', '.join(KINDS)}")
