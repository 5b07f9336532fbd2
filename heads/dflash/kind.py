"""DFlash heads as a kind of draft head."""

from pathlib import Path
from typing import ClassVar

from heads.blocks.kind import BlockKind
from heads.dflash.formats import holds, read_dflash
from heads.dflash.head import DFlashHead


class DFlashKind(BlockKind[DFlashHead]):
    """See `heads/kind.py`."""

    head = DFlashHead
    forms: ClassVar = {"dflash": "DFlash heads"}
    phrase = "a DFlash head"

    def holds(self, folder: Path) -> bool:
        """By the name of its architecture."""
        return holds(folder)

    read = staticmethod(read_dflash)
