"""The questions that a draft head answers.

Loading, drafting, pruning, export and publishing ask nothing else.

A kind of head is a folder of `heads/` and a line of `heads/kinds.py`. Nothing outside that folder
and its entry script knows its name. What a head must write: `untrained`, `candidates`, `drafter`,
`export`, `golden` and `card`. `load`, `attach` and `files` have answers that fit small heads. The
toy head in `tests/toy_head/` is the template.

Letters: S rows, D depths, F target hidden, V vocabulary.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn

from conf.errors import InputError
from conf.settings.export import ExportFormat
from heads.decoding.chains import Calibration
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import Sampling
from heads.decoding.tree import Shape, usual_dynamic_shape, usual_tree
from heads.folders import PROVENANCE, other_target
from heads.storage import load_tensors, save_head
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Taps, Target, TargetOutput
from heads.vocab import DraftVocab

UNKNOWN = "unknown"
"""The target of a head whose files name none."""
WEIGHTS = "model.safetensors"
USUAL_DEPTH, LONGEST = 5, 8
"""Draft tokens of a chain, and of the longest one worth a look, of heads that draft to any depth:
as engines draft, and beyond what is hardly ever right to the end."""


@dataclass(frozen=True)
class Variant:
    """A variant of a kind of head, with files of its own.

    Attributes:
        title: what people call such heads ("EAGLE-3 heads").
        settings: makes the settings of an untrained one, for benchmarks.
    """

    title: str
    settings: Callable[[], Any]


@dataclass(frozen=True)
class Files:
    """A head's folder, but for words and golden values.

    Attributes:
        config: content of `config.json`, or the metadata of a GGUF file.
        weights: name of the file of tensors; a GGUF file's ends with `.gguf`.
        tensors: its content.
        added: names of tensors that are not the head's own, but the target's, or zeros.
        layers: target features that the head fuses, as `output_hidden_states` counts them.
    """

    config: dict[str, Any]
    weights: str
    tensors: dict[str, Tensor]
    added: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)


def _none() -> Files:
    raise AssertionError("an engine that cannot serve the head has no files")


@dataclass(frozen=True)
class Export:
    """The form in which a serving engine takes a head.

    Attributes:
        problem: why it cannot serve the head, as the end of a sentence; None if it can.
        files: makes what it reads of the head, attached and in the export's dtype; an `InputError`
            if it takes something from this target in another way than the head does.
        command: what starts it, as lines for a shell.
        hint: what else a user should know; empty or a sentence.
    """

    problem: str | None = None
    files: Callable[[], Files] = _none
    command: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Golden:
    """The logits that a head makes of features.

    Attributes:
        logits: [D, S, V] float32, -inf where the head cannot draft the id.
        beside: what else a reader of the export needs.
        output_head: [V, F] of the target, if the head drafts with that.
    """

    logits: Tensor
    beside: dict[str, Tensor]
    output_head: Tensor | None = None


@dataclass(frozen=True)
class HeadFacts:
    """The facts of a head on its model card.

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
        copied: what of the target's weights it holds, in words.
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
    copied: list[str] = field(default_factory=list)


class DraftHead(nn.Module, ABC):
    """A trained network that drafts; `attach` it to its target before use.

    Attributes:
        config: its architecture, which rebuilds it. `config.target` names the target that it was
            trained for, `config.num_draft_tokens` is the longest path that it can draft, None
            for any.
        config_type: its dataclass, where `load` and `files` are those of this class.
        vocab: the ids that it drafts.
        taps: the target's states that it reads.
        window: positions that it knows; what lies beyond it does not draft. None for all.
        variant: what its files call it, a key of `variants`.
        variants: of this kind of head.
        phrase: this kind of head with an article, for errors and help.
        static: its trees have one shape for every text.
        output_rows: patterns of parameters that make logits of states, a row for each id that it
            drafts. A head without drafts through the target's output head.
        drafted_rows: of other trained parameters with a row for each id that it drafts.
        id_rows: of those with a row for each id of the target.
        compiled: its modules that are faster compiled.
        default_layers: gives the hidden states that a fresh head reads of a target of so many
            layers, besides the last one, or refuses the setting of this name; None for none.
        doubts: give what its files may have meant: words for what is taken otherwise, and a head
            of the same weights, attached, the likeliest first.
        prunable: which heads of this kind can be pruned, where this one has no output rows.
    """

    config: Any
    config_type: ClassVar[Any] = None
    taps: Taps
    window: int | None = None
    variants: ClassVar[dict[str, Variant]]
    phrase: ClassVar[str]
    static: ClassVar[bool] = False
    output_rows: ClassVar[tuple[str, ...]] = ()
    drafted_rows: ClassVar[tuple[str, ...]] = ()
    id_rows: ClassVar[tuple[str, ...]] = ()
    compiled: ClassVar[tuple[type[nn.Module], ...]] = ()
    default_layers: ClassVar["staticmethod[[int, str], tuple[int, ...]] | None"] = None
    doubts: ClassVar[tuple[Callable[[Any], Iterator[tuple[str, Any]]], ...]] = ()
    prunable: ClassVar[str] = "none of this kind"

    def __init__(self, config: Any, vocab: DraftVocab) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        self.variant = next(iter(self.variants))
        # In a tuple, so that the target does not become a part of the head.
        self._target: tuple[EmbeddingsAndHead, ...] = ()

    @classmethod
    def load(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """The head in a folder, trained, exported or published; float32, not attached.

        Unless told, what `files` writes unless told.

        Args:
            folder: on this machine, with a `config.json`.
            path: what the user calls it.
            layers: target features to fuse in place of those in `config.json`.

        Returns:
            None if the folder holds no such head.

        Raises:
            InputError: missing, corrupt or foreign files, or `layers` for a head without.
        """
        del path, layers
        settings = json.loads((folder / "config.json").read_text())
        if settings.get("architectures") != [cls.__name__]:
            return None
        config = cls.config_type(
            **{each.name: settings[each.name] for each in fields(cls.config_type)}
        )
        tensors, vocab = load_tensors(folder / WEIGHTS), DraftVocab.everything(config.vocab_size)
        if "d2t" in tensors:
            vocab = DraftVocab.from_offsets(tensors.pop("d2t"), vocab.size, tensors.pop("t2d"))
        head = cls(config, vocab)
        head.load_state_dict(tensors)
        return head

    @classmethod
    @abstractmethod
    def untrained(
        cls, target: EmbeddingsAndHead, settings: Any, vocab: DraftVocab, seed: int
    ) -> Self:
        """A fresh float32 head, alike for a seed, attached to the target.

        Args:
            target: the frozen target.
            settings: `head` of its training command.
            vocab: the ids that it drafts, if it may choose.
            seed: of its weights.

        Raises:
            InputError: settings that do not fit the target.
        """

    def attach(self, target: EmbeddingsAndHead, dtype: torch.dtype | None = None) -> Self:
        """Check that the head fits a target, and move to its device; `dtype` unset leaves weights.

        Raises:
            InputError: it does not fit.
        """
        check_fits(self, target, self.config.hidden_size)
        self.vocab = self.vocab.to(target.device)
        return self.to(target.device, dtype)

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
    def drafter(
        self,
        shape: Shape,
        sampling: Sampling,
        seeds: Sequence[int],
        calibration: Calibration | None = None,
    ) -> Drafter:
        """A fresh drafter of the head, attached.

        Args:
            shape: a chain, or what `usual_shape` is one of.
            sampling: the target's.
            seeds: of the texts.
            calibration: cuts a chain, and has it say how sure the head was.
        """

    def files(self) -> Files:
        """The folder that `save` writes; here fields of `config`, and parameters by their names."""
        # Not `state_dict`, which FSDP takes as a wish for shards.
        tensors = {name: each.detach() for name, each in self.named_parameters()}
        if not self.vocab.full:
            tensors |= {"d2t": self.vocab.offsets(), "t2d": self.vocab.mask()}
        names = {"architectures": [type(self).__name__], "draft_vocab_size": len(self.vocab.ids)}
        return Files(names | vars(self.config), WEIGHTS, tensors)

    @abstractmethod
    def export(self, engine: ExportFormat, folder: str = "DIR") -> Export:
        """The form in which a serving engine takes the head, which may not be attached yet."""

    @abstractmethod
    def golden(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> Golden:
        """The logits that the head makes of features, in float32 on the CPU.

        Args:
            target: the frozen target, which the head is attached to in the dtype of the export.
            states: the target's hidden states [S, F], one more than it has layers.
            token_ids: [S + D + 1] int64, a text.
            places: [S] int64 positions of its first tokens.
        """

    @abstractmethod
    def card(self, provenance: dict[str, Any], acceptance: dict[str, Any] | None) -> HeadFacts:
        """The facts on the head's model card, by the records of training and measurement."""

    # The same for every head.

    @property
    def target(self) -> EmbeddingsAndHead:
        """The target of a head that is attached and borrows from it."""
        return self._target[0]

    @property
    def target_name(self) -> str:
        """Hub id or folder of the target, by its name of today where the head holds on to it."""
        return self._target[0].name if self._target else self.config.target

    @property
    def most_tokens(self) -> int | None:
        """Draft tokens of the longest path that the head can draft; None for any."""
        return self.config.num_draft_tokens

    @property
    def usual_depth(self) -> int:
        """Draft tokens of a chain, unless told."""
        return self.most_tokens or USUAL_DEPTH

    @property
    def longest(self) -> int:
        """Draft tokens of the longest chain worth a look."""
        return self.most_tokens or LONGEST

    @final
    def usual_shape(self, gpu: bool | None = None) -> Shape:
        """The shape of drafts nobody has measured, on a GPU or not; this machine unless told."""
        if self.static:
            return usual_tree(self.longest, gpu)
        usual = usual_dynamic_shape(gpu)
        return replace(usual, depth=min(usual.depth, self.most_tokens or usual.depth))

    @final
    def save(self, folder: Path, provenance: dict[str, object] | None = None) -> None:
        """Writes `config.json`, the weights and `headsmith.json`, whole or not at all.

        Raises:
            InputError: the disk is full or not writable; an older head there is untouched.
        """
        files = self.files()
        documents: dict[str, object] = {"config.json": files.config}
        if provenance is not None:
            documents[PROVENANCE] = provenance
        save_head(folder, files.weights, files.tensors, documents)

    @final
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that `save` writes, by their names in the file."""
        return self.files().tensors

    @final
    def output_heads(self) -> list[Tensor]:
        """The head's own matrices from states to logits: a row for each id that the head drafts."""
        return self._named(self.output_rows)

    @final
    def embeddings(self) -> list[Tensor]:
        """The head's own trained matrices with a row for each id, besides output heads."""
        return self._named((*self.drafted_rows, *self.id_rows))

    def _named(self, patterns: tuple[str, ...]) -> list[Tensor]:
        return [each for name, each in self.named_parameters() if _any(patterns, name)]

    @property
    def pruning_problem(self) -> str | None:
        """The reason why the draft vocabulary cannot shrink, and which heads' can, or None."""
        if self.output_heads():
            return None
        return (
            f"this {self.variant} head drafts through the target's output head, of which no row "
            f"can go; allowed: {self.prunable}"
        )

    @final
    def pruned(self, vocab: DraftVocab) -> Self:
        """A float32 copy of the head, not attached, that drafts some ids with the same logits."""
        small = type(self)(self.config, vocab)
        rows = self.vocab.to_draft(vocab.ids.to(self.vocab.ids.device))
        by_id = (*self.output_rows, *self.drafted_rows)
        state = self.state_dict()
        small.load_state_dict({n: t[rows] if _any(by_id, n) else t for n, t in state.items()})
        return small

    @final
    def compile_layers(self) -> None:
        """Compiles what is not attention, on first use."""
        for module in self.modules():
            if isinstance(module, self.compiled):
                module.compile(dynamic=True)

    @final
    def readings(self) -> Iterator[tuple[str, Self]]:
        """Heads that the files of this head may have meant, see `doubts`."""
        for doubt in self.doubts:
            yield from doubt(self)


def _any(patterns: Sequence[str], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


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
