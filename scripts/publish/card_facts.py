"""What a model card states of a head, its target and its exports."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.errors import InputError
from conf.files import here
from data.rows.sources import SUFFIXES
from heads.kind import DraftHead, HeadFacts
from heads.kinds import kind_of


@dataclass(frozen=True)
class ExportFacts:
    """What a card says of an export.

    Attributes:
        format: its name.
        repo_id: of the repository it lies in.
        folder: in that repository; empty for its root.
        loaders: the engines' versions whose loaders it was written for.
        commands: what downloads it, where the engine does not, and serves it.
        max_difference: of its logits from the trained head's, as an independent reader found it.
        scale: the largest of those logits.
        target_weights: what it holds of the target's weights, in words.
    """

    format: str
    repo_id: str
    folder: str
    loaders: str
    commands: str
    max_difference: float
    scale: float
    target_weights: tuple[str, ...]

    @property
    def parity(self) -> str:
        """How near the export is to the trained head, in words."""
        return f"max |difference| {self.max_difference:.1e} of logits up to {self.scale:.1f}"


@dataclass(frozen=True)
class CardFacts:
    """Everything that a card states; paths in it are already scrubbed."""

    repo_id: str
    head: HeadFacts
    target: str | None
    """Hub id or name of the target; None for the embedded default."""
    provenance: dict[str, Any]
    """Contents of `headsmith.json`."""
    license: str | None = None
    acceptance: dict[str, Any] | None = None
    speedup: dict[str, Any] | None = None
    figures: list[str] = field(default_factory=list)
    """File names beside the card."""
    exports: list[ExportFacts] = field(default_factory=list)
    head_repo: str | None = None
    """Where the head itself is, on the card of an export's own repository."""
    notices: list[str] = field(default_factory=list)
    """Whose terms apply, one paragraph each."""


def is_hub_id(name: str) -> bool:
    """Whether a name can be a Hub repository, of an owner, and is not a local path.

    One without an owner, on a card of what was made elsewhere, was more likely a folder there.
    """
    try:
        return "/" in name and here("a name", name, SUFFIXES) is None
    except InputError:
        return False


def copied_weights(
    head: DraftHead, provenance: dict[str, Any], exports: Sequence[ExportFacts]
) -> list[str]:
    """What of a target's weights a head and its exports hold, in words."""
    own = kind_of(head).copied(head, provenance)
    of_exports = [words for export in exports for words in export.target_weights]
    return list(dict.fromkeys([*own, *of_exports]))
