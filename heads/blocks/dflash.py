"""DFlash: slots that draft in parallel and do not see each other's tokens.

Source: arXiv 2602.06036; z-lab/dflash.
"""

from typing import ClassVar

from conf.settings.blocks import DFlashConfig
from heads.blocks.block_head import BlockHead
from heads.blocks.layouts import BlockLayout
from heads.draft_head import Variant


class DFlashHead(BlockHead):
    """DFlash head: the logits of a slot are those of the output head."""

    variants: ClassVar = {"dflash": Variant("DFlash heads", DFlashConfig)}
    name_with_article = "a DFlash head"
    architectures = ("DFlashDraftModel", "DFlashSpeculator")
    layout = BlockLayout("dflash", "dflash", "DFlashDraftModel")
    method, paper = "DFlash", "2602.06036"
