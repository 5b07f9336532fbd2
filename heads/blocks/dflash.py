"""DFlash: slots that draft in parallel and do not see each other's tokens.

Source: arXiv 2602.06036; z-lab/dflash. Letters: N rows, H hidden, W draft vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from conf.settings.blocks import DFlashConfig
from heads.blocks.block_head import (
    BlockHead,
    build_block_config,
    build_dflash_keys,
    build_qwen3_keys,
)
from heads.blocks.checkpoint import BlockCheckpoint
from heads.blocks.layouts import BlockLayout
from heads.draft_head import Variant
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.vocab import DraftVocab


class DFlashHead(BlockHead):
    """DFlash head: the logits of a slot are those of the output head."""

    variants: ClassVar = {"dflash": Variant("DFlash heads", DFlashConfig)}
    name_with_article = "a DFlash head"
    architectures = ("DFlashDraftModel", "DFlashSpeculator")
    layout = BlockLayout("dflash", "dflash", "DFlash heads", "DFlashDraftModel")
    method, paper = "DFlash", "2602.06036"

    @classmethod
    def load_known_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self:
        """Load a DFlash head, as `heads/blocks/checkpoint.py` reads the folder."""
        file = BlockCheckpoint.from_folder(folder, path)
        if file.settings.get("sample_from_anchor"):
            raise file.make_error(
                "config.json says sample_from_anchor=True, but a DFlash head fills in masks, and "
                "no engine serves the other kind; must be false"
            )
        return file.load_into(cls(file.build_head_config(layers, anchored=False), file.vocab))

    @classmethod
    def from_settings(
        cls, target: EmbeddingsAndOutputHead, settings: DFlashConfig, vocab: DraftVocab, seed: int
    ) -> Self:
        """Make a new head; it drafts all ids unless it has its own output head."""
        config = build_block_config(settings, target, sample_from_anchor=False)
        return cls(config, config.select_draft_vocab(vocab)).initialise(target, seed)

    def compute_slot_logits(
        self, base: Tensor, outputs: Tensor, previous_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits `base` [N, W], which do not depend on the previous tokens."""
        del outputs, previous_ids
        return base, state

    def build_config_json(self) -> dict[str, Any]:
        """Build the authors' keys, which vLLM and SGLang read."""
        shared = build_qwen3_keys(self.config, len(self.vocab.ids))
        return {
            "architectures": ["DFlashDraftModel"],
            **shared,
            "dflash_config": build_dflash_keys(self.config),
        }
