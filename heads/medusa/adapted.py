"""Medusa heads with the adapter of the target that they read: Medusa-2.

Source: arXiv 2401.10774, section 2.2.2.
"""

import hashlib
from pathlib import Path

from torch import Tensor, nn

from heads.medusa.head import MedusaHead
from heads.target_model.adapter import WEIGHTS, Adapter
from heads.target_model.model import TargetOutput


class AdaptedMedusa(nn.Module):
    """Medusa heads with the adapter of the target that they read."""

    def __init__(self, heads: MedusaHead, adapter: Adapter) -> None:
        super().__init__()
        self.heads = heads
        self.adapter = adapter
        self.taps = heads.taps

    def compute_candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """The heads' candidates. See `MedusaHead.candidates`."""
        return self.heads.compute_candidates(output, token_ids, first, depth, width)

    def find_output_heads(self) -> list[Tensor]:
        """The heads' output heads. See `MedusaHead.output_heads`."""
        return self.heads.find_output_heads()

    def find_embeddings(self) -> list[Tensor]:
        """The heads' embeddings. See `DraftHead.embeddings`."""
        return self.heads.find_embeddings()

    def compile_layers(self) -> None:
        """Compile the heads. See `DraftHead.compile_layers`."""
        self.heads.compile_layers()

    def save(self, folder: Path, provenance: dict[str, object]) -> None:
        """Write the heads to `folder` and the adapter to `adapter` beside it.

        The heads' `headsmith.json` names their adapter and its checksum.

        Raises:
            InputError: the disk is full or not writable.
        """
        beside = folder.parent / "adapter"
        self.adapter.save(beside, provenance)
        with (beside / WEIGHTS).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        belongs = {"adapter": {"path": str(beside), "sha256": checksum}}
        self.heads.save(folder, {**provenance, **belongs})
