"""Reading DFlash heads: see `heads/blocks/formats.py`."""

from collections.abc import Sequence
from pathlib import Path

from heads.blocks.formats import BlockFile, names_kind
from heads.dflash.head import DFlashHead
from heads.storage import locate

ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")


def load_dflash(
    path: str, revision: str | None = None, layers: Sequence[int] | None = None
) -> DFlashHead:
    """Loads a DFlash head, published or ours; float32, not attached.

    Args:
        path: folder or Hub id.
        revision: of a Hub id.
        layers: the target features that it fuses, as indices of `output_hidden_states`, in place
            of those in `config.json`.

    Raises:
        InputError: as `read_dflash`, or nothing is there.
    """
    return read_dflash(locate(path, revision), path, layers)


def read_dflash(folder: Path, path: str, layers: Sequence[int] | None = None) -> DFlashHead:
    """`load_dflash` of a folder that `locate` has found for `path`.

    Raises:
        InputError: missing, corrupt, pickled or foreign files; settings that contradict the
            tensors, or that this head does not compute.
    """
    found = BlockFile.open(folder, path)
    if found.settings.get("sample_from_anchor"):
        raise found.error(
            "config.json says sample_from_anchor=True: a DFlash head fills in masks, and no engine "
            "serves another; allowed: false"
        )
    head = DFlashHead(found.architecture(layers, anchored=False), found.vocab)
    found.fill(head)
    return head


def holds(folder: Path) -> bool:
    """Whether a folder with a `config.json` says that it holds such a head."""
    return names_kind(folder, ARCHITECTURES, "dflash")
