"""DSpark heads as a kind of draft head."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from conf.settings.blocks import DSparkConfig, Markov
from conf.settings.export import ExportFormat
from heads.blocks.config import block_config
from heads.blocks.export import BlockLayout
from heads.blocks.kind import BlockKind
from heads.dspark.formats import holds, read_dspark
from heads.dspark.head import DSparkHead, DSparkHeadConfig
from heads.readings import flipped
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.vocab import DraftVocab


class DSparkKind(BlockKind[DSparkHead]):
    """See `heads/kind.py`."""

    head = DSparkHead
    forms: ClassVar = {"dspark": "DSpark heads"}
    phrase = "a DSpark head"
    layout = BlockLayout("dspark", "dspark", "DSpark heads", "DSparkDraftModel", with_ends=True)
    method, paper = "DSpark", "2607.05147"
    words = ", each by the token before it"

    def holds(self, folder: Path) -> bool:
        """By the name of its architecture."""
        return holds(folder)

    read = staticmethod(read_dspark)

    def untrained(self, target: EmbeddingsAndHead, form: str, vocab: DraftVocab) -> DSparkHead:
        """With the recipe's sizes, of all ids."""
        del form
        shape = block_config(DSparkConfig(block_size=7), target, sample_from_anchor=True)
        config = DSparkHeadConfig(**vars(shape))
        return DSparkHead(config, DraftVocab.everything(vocab.size)).begin(target, seed=0)

    def readings(self, head: DSparkHead) -> Iterator[tuple[str, DSparkHead]]:
        """Also of which row drafts which token, where readers disagree."""
        yield flipped(head, "sample_from_anchor")
        yield from super().readings(head)

    def export_problem(self, head: DSparkHead, engine: ExportFormat) -> str | None:
        """vLLM builds one of the Markov heads, whatever the file says."""
        kind = head.config.markov_head_type
        if engine is ExportFormat.vllm and kind is not Markov.vanilla:
            return f"applies head.markov_head_type=vanilla alone, and this head has {kind.value}"
        return super().export_problem(head, engine)
