"""DFlash-2 heads as a kind of draft head."""

from pathlib import Path
from typing import ClassVar

from conf.settings.blocks import DFlash2Config
from conf.settings.export import ExportFormat
from heads.blocks.config import block_config
from heads.blocks.export import BlockLayout
from heads.blocks.kind import BlockKind
from heads.dflash2.formats import holds, read_dflash2
from heads.dflash2.head import DFlash2Head, DFlash2HeadConfig, scales_of
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.vocab import DraftVocab


class DFlash2Kind(BlockKind[DFlash2Head]):
    """See `heads/kind.py`."""

    head = DFlash2Head
    forms: ClassVar = {"dflash2": "DFlash-2 heads"}
    phrase = "a DFlash-2 head"
    layout = BlockLayout("dflash2", "dflash", "DFlash-2 heads", "DFlash2DraftModel")
    method, paper = "DFlash-2", ""
    words = "; among each slot's candidates it walks by the token before"

    def holds(self, folder: Path) -> bool:
        """By the name of its architecture."""
        return holds(folder)

    read = staticmethod(read_dflash2)

    def untrained(self, target: EmbeddingsAndHead, form: str, vocab: DraftVocab) -> DFlash2Head:
        """With the recipe's sizes, of all ids."""
        del form
        shape = block_config(DFlash2Config(), target, sample_from_anchor=False)
        config = DFlash2HeadConfig(**vars(shape), **scales_of(target))
        return DFlash2Head(config, DraftVocab.everything(vocab.size)).begin(target, seed=0)

    def pruning_problem(self, head: DFlash2Head) -> str:
        """None has an output head of its own."""
        return "DFlash-2 heads draft through the target's output head, of which no row can go"

    def export_problem(self, head: DFlash2Head, engine: ExportFormat) -> str | None:
        """Rows see each other both ways, and speculators scales nothing."""
        if head.config.causal:
            return "lets rows of DFlash-2 see later ones, and this head has head.causal=true"
        if head.scales and engine is ExportFormat.speculators:
            return f"has no word for {' and '.join(head.scales)} of this head"
        return super().export_problem(head, engine)
