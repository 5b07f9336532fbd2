"""DFlash-2 heads as a kind of draft head."""

from pathlib import Path
from typing import ClassVar

from conf.schema_dflash2 import DFlash2Config
from conf.schema_export import ExportFormat
from heads.blocks.config import block_config
from heads.blocks.export import BlockLayout
from heads.blocks.kind import BlockKind
from heads.dflash2.formats import holds, read_dflash2
from heads.dflash2.head import DFlash2Head, DFlash2HeadConfig
from heads.target.ends import TargetEnds
from heads.vocab import DraftVocab


class DFlash2Kind(BlockKind[DFlash2Head]):
    """See `heads/kind.py`."""

    head = DFlash2Head
    forms: ClassVar = {"dflash2": "DFlash-2 heads"}
    phrase = "a DFlash-2 head"
    layout = BlockLayout("dflash2", "dflash", "DFlash-2 heads", None)
    method, paper = "DFlash-2", ""
    words = "; among each slot's candidates it walks by the token before"

    def holds(self, folder: Path) -> bool:
        """By the name of its architecture."""
        return holds(folder)

    read = staticmethod(read_dflash2)

    def untrained(self, target: TargetEnds, form: str, vocab: DraftVocab) -> DFlash2Head:
        """With the recipe's sizes, of all ids."""
        del form
        shape = block_config(DFlash2Config(), target, sample_from_anchor=False)
        config = DFlash2HeadConfig(**vars(shape))
        return DFlash2Head(config, DraftVocab.everything(vocab.size)).begin(target, seed=0)

    def pruning_problem(self, head: DFlash2Head) -> str:
        """None has an output head of its own."""
        return "DFlash-2 heads draft through the target's output head, of which no row can go"

    def export_problem(self, head: DFlash2Head, engine: ExportFormat) -> str | None:
        """Rows of its convolutions see each other both ways."""
        if head.config.causal:
            return "lets rows of DFlash-2 see later ones, and this head has head.causal=true"
        return super().export_problem(head, engine)
