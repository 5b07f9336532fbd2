"""DFlash: slots that draft side by side, none knowing what another drafts.

Source: arXiv 2602.06036; z-lab/dflash. Letters: N rows, H hidden, W draft vocabulary.
"""

from typing import Any

from torch import Tensor

from heads.blocks.config import dflash_keys, shared_keys
from heads.blocks.head import BlockHead


class DFlashHead(BlockHead):
    """See the module's docstring."""

    def step(
        self, base: Tensor, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[N, W] the slot's own logits, whatever stands before it."""
        del outputs, before
        return base, state

    def config_json(self) -> dict[str, Any]:
        """The authors' keys, which vLLM and SGLang read."""
        shared = shared_keys(self.config, len(self.vocab.ids))
        return {
            "architectures": ["DFlashDraftModel"],
            **shared,
            "dflash_config": dflash_keys(self.config),
        }
