"""Medusa heads as a kind of draft head."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from conf.errors import InputError
from conf.settings.export import ExportFormat
from conf.settings.medusa import MedusaConfig
from heads.decoding.chains import Calibration
from heads.decoding.sampling import Sampling
from heads.decoding.tree import Shape, Tree, usual_tree
from heads.kind import Drafted, HeadFacts, Kind
from heads.medusa import export
from heads.medusa.drafter import MedusaCut, MedusaDrafter
from heads.medusa.head import MedusaHead, is_medusa
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

TOKEN_MAP_PROBLEM = (
    "version 0.32 has a place for `token_map`, but gives each head as many rows as the target has "
    "ids and then refuses fewer. The head that this one was pruned from loads."
)


class MedusaKind(Kind[MedusaHead]):
    """See `heads/kind.py`."""

    head = MedusaHead
    forms: ClassVar = {"medusa": "Medusa heads"}
    phrase = "a Medusa head"

    holds = staticmethod(is_medusa)

    def read(self, folder: Path, path: str, layers: Sequence[int] | None) -> MedusaHead:
        """In the original layout or vLLM's."""
        if layers is not None:
            raise InputError(
                f"head.path={path}: a Medusa head reads the last hidden state: leave head.layers "
                "unset"
            )
        return MedusaHead.read(folder, path)

    def most_tokens(self, head: MedusaHead) -> int:
        """One of each head."""
        return head.num_heads

    def longest(self, head: MedusaHead) -> int:
        """One of each head."""
        return head.num_heads

    def usual_shape(self, head: MedusaHead, gpu: bool | None = None) -> Tree:
        """Medusa's own accuracies, as published."""
        return usual_tree(head.num_heads, gpu)

    def drafter(
        self,
        head: MedusaHead,
        shape: Shape,
        sampling: Sampling,
        seeds: Sequence[int],
        calibration: Calibration | None = None,
    ) -> MedusaDrafter:
        """Draws nothing: candidates are ranked."""
        assert isinstance(shape, Tree)
        if calibration is not None:
            return MedusaCut(head, shape.depth, calibration)
        return MedusaDrafter(head, shape)

    def untrained(self, target: EmbeddingsAndHead, form: str, vocab: DraftVocab) -> MedusaHead:
        """Heads of the whole vocabulary."""
        config = MedusaConfig()
        return MedusaHead.from_target(target, config.num_heads, config.num_layers)

    export_problem = staticmethod(export.problem)
    files = staticmethod(export.files)
    serve_command = staticmethod(export.serve_command)

    def hint(self, head: MedusaHead, engine: ExportFormat) -> str:
        """Of the authors' loader."""
        if engine is not ExportFormat.original:
            return ""
        return (
            "The authors' loader builds 5 heads, whatever the file holds; those that it lacks "
            "draft at random."
        )

    def drafted(
        self,
        head: MedusaHead,
        target: Target,
        states: list[Tensor],
        token_ids: Tensor,
        places: Tensor,
    ) -> Drafted:
        """Of the last hidden states alone."""
        return export.drafted(head, states[-1])

    def facts(
        self,
        head: MedusaHead,
        provenance: dict[str, Any],
        acceptance: dict[str, Any] | None,
    ) -> HeadFacts:
        """Medusa-2 where an adapter was trained beside the heads."""
        config = head.config
        return HeadFacts(
            tag="medusa",
            name="Medusa heads",
            method="Medusa-2" if "adapter" in provenance else "Medusa-1",
            paper="2401.10774",
            description=(
                f"{config.num_heads} heads of {config.num_layers} residual "
                f"block{'s' if config.num_layers > 1 else ''} (hidden size {config.hidden_size}, "
                f"{head.vocab.described()}). Head k drafts the token k + 1 positions ahead"
            ),
            num_draft_tokens=config.num_heads,
            vllm_method="medusa" if head.vocab.full else None,
            vllm_problem=TOKEN_MAP_PROBLEM,
        )

    def copied(self, head: MedusaHead, provenance: dict[str, Any]) -> list[str]:
        """Their projections started as the target's."""
        return ["output layers that started as copies of its own"]
