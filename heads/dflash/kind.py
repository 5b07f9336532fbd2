"""DFlash heads as a kind of draft head."""

from pathlib import Path
from typing import ClassVar

from conf.settings.blocks import DFlashConfig
from heads.blocks.config import block_config
from heads.blocks.export import BlockLayout
from heads.blocks.kind import BlockKind
from heads.dflash.formats import holds, read_dflash
from heads.dflash.head import DFlashHead
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.vocab import DraftVocab


class DFlashKind(BlockKind[DFlashHead]):
    """See `heads/kind.py`."""

    head = DFlashHead
    forms: ClassVar = {"dflash": "DFlash heads"}
    phrase = "a DFlash head"
    layout = BlockLayout("dflash", "dflash", "DFlash heads", "DFlashDraftModel")
    method, paper = "DFlash", "2602.06036"

    def holds(self, folder: Path) -> bool:
        """By the name of its architecture."""
        return holds(folder)

    read = staticmethod(read_dflash)

    def untrained(self, target: EmbeddingsAndHead, form: str, vocab: DraftVocab) -> DFlashHead:
        """With the recipe's sizes, of all ids."""
        del form
        shape = block_config(DFlashConfig(), target, sample_from_anchor=False)
        return DFlashHead(shape, DraftVocab.everything(vocab.size)).begin(target, seed=0)
