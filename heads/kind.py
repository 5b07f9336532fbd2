"""What the rest of Headsmith asks of a draft head, and of one kind of them.

A kind is a folder of `heads/` and a line of `heads/kinds.py`. Loading, drafting, replay, the
search for trees, capture, pruning, export, publishing and the benchmarks know heads by what is
declared here, and none by its name.

Letters: S rows, D depths, F target hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from conf.errors import InputError
from conf.settings.export import ExportFormat
from heads.decoding.chains import Calibration
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import Sampling
from heads.decoding.tree import Shape
from heads.folders import other_target
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Taps, Target, TargetOutput
from heads.vocab import DraftVocab

UNKNOWN = "unknown"
"""The target that a head names which nobody has told."""


class DraftHead(nn.Module, ABC):
    """A trained network that drafts.

    Attributes:
        config: of its own kind; `config.target` names the target it was trained for.
        vocab: the ids that it drafts.
        taps: what it needs of a pass of the target.
        window: positions that it knows; what lies beyond it does not draft. None for all.
    """

    config: Any
    vocab: DraftVocab
    taps: Taps
    window: int | None = None

    @property
    def target_name(self) -> str:
        """Hub id or folder of the target."""
        return self.config.target

    @abstractmethod
    def attach(self, target: EmbeddingsAndHead, dtype: torch.dtype | None = None) -> "DraftHead":
        """Checks that it fits a target, and moves to its device; `dtype` unset leaves weights.

        Raises:
            InputError: it does not fit.
        """

    @abstractmethod
    def candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """[depth, n, width] int64, the best tokens of each depth along a text itself.

        Args:
            output: the target's states of the first S tokens, [1, S, .] each.
            token_ids: [S + 1], the text and its last token, which the target has not read.
            first: the first token to draft from; n = S - first.
            depth: tokens of a draft.
            width: candidates per depth.
        """

    @abstractmethod
    def save(self, folder: Path, provenance: dict[str, object] | None = None) -> None:
        """Writes `config.json`, the weights and `headsmith.json`, whole or not at all.

        Raises:
            InputError: the disk is full or not writable; an older head there is untouched.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What `save` writes, by its names in the file."""

    @abstractmethod
    def output_heads(self) -> list[Tensor]:
        """Matrices of its own from states to logits: a row for each id that it drafts."""

    def embeddings(self) -> list[Tensor]:
        """Trained matrices of its own with a row for each id, besides output heads."""
        return []

    @abstractmethod
    def pruned(self, vocab: DraftVocab) -> "DraftHead":
        """A copy, float32 and not attached, that drafts some of its ids with the same logits."""


@dataclass(frozen=True)
class Files:
    """An export, but for its words and golden values.

    Attributes:
        config: content of `config.json`.
        weights: name of the file that the engine opens.
        tensors: its content.
        added: names of those that are not the head's own, but the target's, or zeros.
        layers: target features that the head fuses, as `output_hidden_states` counts them.
    """

    config: dict[str, Any]
    weights: str
    tensors: dict[str, Tensor]
    added: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Drafted:
    """What a head makes of features.

    Attributes:
        logits: [D, S, V] float32, -inf where the head cannot draft the id.
        beside: what else a reader needs.
        output_head: [V, F] of the target, if the head drafts with that.
    """

    logits: Tensor
    beside: dict[str, Tensor]
    output_head: Tensor | None = None


@dataclass(frozen=True)
class HeadFacts:
    """What a model card says of a head.

    Attributes:
        tag: of the Hub, for the kind of head.
        name: what the first sentence calls it.
        method: name of the method that it was trained with.
        paper: arXiv number of the method; empty without one.
        description: its parts, then how it drafts; without the final full stop.
        num_draft_tokens: how many an engine should draft at a time.
        vllm_method: None if vLLM does not load the head.
        vllm_problem: then why, and what loads.
        vllm_settings: of speculation, besides the usual ones.
    """

    tag: str
    name: str
    method: str
    paper: str
    description: str
    num_draft_tokens: int
    vllm_method: str | None
    vllm_problem: str
    vllm_settings: dict[str, bool] = field(default_factory=dict)


Head = TypeVar("Head", bound=DraftHead)


class Kind(ABC, Generic[Head]):
    """One kind of head.

    Attributes:
        head: its class.
        forms: what its files call it, one name or several, and what people do ("EAGLE-3 heads").
        phrase: with an article, for errors and help.
        static: its trees have one shape for every text.
    """

    head: type[Head]
    forms: ClassVar[dict[str, str]]
    phrase: ClassVar[str]
    static: ClassVar[bool] = True

    def form(self, head: Head) -> str:
        """The one of `forms` that a head is."""
        (only,) = self.forms
        return only

    # Loading.

    @abstractmethod
    def holds(self, folder: Path) -> bool:
        """Whether a folder with a `config.json` holds such a head."""

    @abstractmethod
    def read(self, folder: Path, path: str, layers: Sequence[int] | None) -> Head:
        """The head in a folder, trained, exported or published; float32, not attached.

        Args:
            folder: on this machine.
            path: what the user calls it.
            layers: target features to fuse in place of those in `config.json`.

        Raises:
            InputError: missing, corrupt or foreign files, or `layers` for a head without.
        """

    # Drafting.

    @abstractmethod
    def most_tokens(self, head: Head) -> int | None:
        """Draft tokens of the longest path that the head can draft; None for any."""

    def usual_depth(self, head: Head) -> int:
        """Draft tokens of a chain, unless told."""
        return self.longest(head)

    @abstractmethod
    def longest(self, head: Head) -> int:
        """Draft tokens of the longest chain worth a look."""

    @abstractmethod
    def usual_shape(self, head: Head, gpu: bool | None = None) -> Shape:
        """Of drafts that nobody has measured, on a GPU or not; this machine unless told."""

    @abstractmethod
    def drafter(
        self,
        head: Head,
        shape: Shape,
        sampling: Sampling,
        seeds: Sequence[int],
        calibration: Calibration | None = None,
    ) -> Drafter:
        """A fresh drafter.

        Args:
            head: attached to the target.
            shape: a chain, or what `usual_shape` is one of.
            sampling: the target's.
            seeds: of the texts.
            calibration: cuts a chain, and has it say how sure the head was.
        """

    # What capturing for any head should take.

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Hidden states that a fresh head reads of a target, besides the last one.

        Raises:
            InputError: the target has too few layers to tell.
        """
        return ()

    @abstractmethod
    def untrained(self, target: EmbeddingsAndHead, form: str, vocab: DraftVocab) -> Head:
        """A fresh head with the recipe's settings, for benchmarks; `vocab` where it may choose."""

    # Repair.

    def readings(self, head: Head) -> Iterator[tuple[str, Head]]:
        """What a head's files may have meant, each a setting otherwise than they declare it.

        Args:
            head: as they declare it, attached.

        Returns:
            Words for what is taken otherwise, and a head of the same weights, attached, the
            likeliest first; nothing for kinds whose files leave no doubt.
        """
        return iter(())

    # Pruning, export and publishing.

    def pruning_problem(self, head: Head) -> str | None:
        """Why the draft vocabulary of a head cannot shrink, and which can; None if it can."""
        return None

    @abstractmethod
    def export_problem(self, head: Head, engine: ExportFormat) -> str | None:
        """Why an engine cannot serve a head, as the end of a sentence; None if it can."""

    def check_target(self, head: Head, engine: ExportFormat) -> None:
        """Refuses what an engine takes from the target in another way than the head does.

        Raises:
            InputError: with what it takes.
        """

    @abstractmethod
    def files(self, head: Head, engine: ExportFormat) -> Files:
        """What an engine that can serve a head reads; the head in the export's dtype, attached."""

    @abstractmethod
    def serve_command(self, head: Head, engine: ExportFormat, folder: str) -> str:
        """What starts the engine with an export, as lines for a shell."""

    def hint(self, head: Head, engine: ExportFormat) -> str:
        """What else a user of this engine should know; empty or a sentence."""
        return ""

    @abstractmethod
    def drafted(
        self, head: Head, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> Drafted:
        """What a head makes of features, in float32 on the CPU.

        Args:
            head: in the dtype of the export, attached to `target`.
            target: the frozen target.
            states: the target's hidden states [S, F], one more than it has layers.
            token_ids: [S + D + 1] int64, a text.
            places: [S] int64 positions of its first tokens.
        """

    @abstractmethod
    def facts(
        self, head: Head, provenance: dict[str, Any], acceptance: dict[str, Any] | None
    ) -> HeadFacts:
        """What a head, the record of its training and its measurement say of it."""

    def copied(self, head: Head, provenance: dict[str, Any]) -> list[str]:
        """What of a target's weights a head holds, in words."""
        return []


def trained_with(provenance: dict[str, Any]) -> dict[str, Any]:
    """`head` of the settings that a head was trained with; empty where nobody wrote them down."""
    return (provenance.get("config") or {}).get("head") or {}


def check_fits(
    head: DraftHead, target: EmbeddingsAndHead, size: int, which: str = "hidden_size"
) -> None:
    """Refuses a target of other sizes than a head was trained for.

    Args:
        head: knows its vocabulary.
        target: the target.
        size: of the states that the head reads.
        which: of the target's sizes that is: `hidden_size` of final states, or `feature_size`.

    Raises:
        InputError: with both sizes.
    """
    needed = {which: size, "vocab_size": head.vocab.size}
    for name, mine in needed.items():
        theirs = getattr(target, name)
        if mine != theirs:
            told = head.config.target
            raise InputError(other_target(name, mine, told, target.name, theirs))


def check_depth(depth: int | None, most: int | None, key: str = "depth") -> None:
    """Refuses drafts that a head cannot make.

    Raises:
        InputError: with what it can.
    """
    if depth is not None and most is not None and depth > most:
        raise InputError(f"{key}={depth}: this head drafts at most {most} tokens")
