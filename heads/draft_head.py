"""Interface of draft heads.

Loading, drafting, pruning, export and publishing use nothing else.

A kind of head is a file or folder in `heads/` and a line in `heads/kinds.py`; nothing but these and
its entry script knows its name. A head must define `from_settings`, `compute_candidates`,
`make_drafter`, `plan_export`, `compute_reference_logits` and `build_card_facts`. The defaults of
`from_folder`, `attach` and `build_files` suit small heads. Copy the toy head in `tests/toy_head/`
to start.

Letters: S rows, D depths, L target layers, F target hidden, V vocabulary.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn

from conf.command.environment import hide_hints
from conf.errors import InputError
from conf.settings.export import ExportFormat
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DraftShape, make_default_tree, make_dynamic_shape
from heads.folders import (
    PROVENANCE,
    find_weight_files,
    format_size_mismatch,
    load_head_tensors,
    write_head_folder,
)
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import FeatureLayers, Target, TargetOutput
from heads.vocab import DraftVocab

UNKNOWN = "unknown"
"""Target of a head whose files name none."""
WEIGHTS = "model.safetensors"
USUAL_DEPTH, LONGEST = 5, 8
"""Default and largest depth of chains for heads that draft to any depth: the default of engines,
and the depth beyond which a chain is hardly ever right to the end."""


@dataclass(frozen=True)
class Variant:
    """Variant of a kind of head, with its own files.

    Attributes:
        title: name of these heads ("EAGLE-3 heads").
        settings: makes the settings of a new head, for benchmarks.
    """

    title: str
    settings: Callable[[], Any]


@dataclass(frozen=True)
class HeadFiles:
    """Content of a head's folder, except texts and reference values.

    Attributes:
        config: content of `config.json`, or the metadata of a GGUF file.
        weights: name of the file of tensors; ends with `.gguf` for a GGUF file.
        tensors: tensors by name.
        added: names of tensors that are the target's, or zeros, not the head's own.
        layers: hidden states that the head fuses, as indices of `output_hidden_states`.
    """

    config: dict[str, Any]
    weights: str
    tensors: dict[str, Tensor]
    added: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)


def _raise_no_files() -> HeadFiles:
    raise AssertionError("an engine that cannot serve the head has no files")


@dataclass(frozen=True)
class ExportPlan:
    """Form of a head for a serving engine.

    Attributes:
        problem: why the engine cannot serve the head, as the end of a sentence; None if it can.
        files: function that makes the engine's files of the attached head in the export's dtype;
            raises an `InputError` if the engine would read something else from this target.
        command: start command, as lines for a shell.
        hint: further advice; empty, or a sentence.
        last_version: last version of the engine that loads such heads; empty if the newest does.
    """

    problem: str | None = None
    files: Callable[[], HeadFiles] = _raise_no_files
    command: str = ""
    hint: str = ""
    last_version: str = ""


@dataclass(frozen=True)
class EngineAdvice:
    """What measurements of a head say that an engine should draft.

    Attributes:
        num_tokens: draft tokens per pass.
        reason: why so many, in whole sentences.
        schedule: vLLM's ranges of requests in flight, each its first, its last and the draft tokens
            per pass; empty drafts `num_tokens` at any load.
        profile: content of the file `PROFILE`; None without a measurement.
    """

    num_tokens: int
    reason: str
    schedule: list[list[int]] = field(default_factory=list)
    profile: dict[str, Any] | None = None


@dataclass(frozen=True)
class ReferenceLogits:
    """Reference logits of a head.

    Attributes:
        logits: [D, S, V] float32, -inf outside the draft vocabulary.
        beside: further tensors for a reader of the export.
        output_head: [V, F] of the target, if the head drafts with it.
    """

    logits: Tensor
    beside: dict[str, Tensor]
    output_head: Tensor | None = None


@dataclass(frozen=True)
class HeadFacts:
    """Facts of a head for its model card.

    Attributes:
        tag: Hub tag of the kind of head.
        name: name of the head in the first sentence.
        method: name of the head's training method.
        paper: arXiv number of the method; empty without one.
        description: the head's parts, then how the head drafts; without the final full stop.
        num_draft_tokens: number of draft tokens to use in an engine.
        vllm_method: method name in vLLM; None if vLLM cannot load the head.
        vllm_problem: why vLLM cannot load the head, and which head it loads.
        vllm_settings: further speculation settings of vLLM.
        copied: weights that the head copies from the target, in words.
        last_vllm_version: last version of vLLM that loads the head; empty if the newest does.
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
    last_vllm_version: str = ""


class DraftHead(nn.Module, ABC):
    """Trained network that drafts, after `attach` has joined it with its target.

    Attributes:
        config: architecture, from which the head can be rebuilt. `config.target` names its target;
            `config.num_draft_tokens` is the longest path that the head can draft, None for any.
        config_type: dataclass of the config, for the default `from_folder` and `build_files`.
        vocab: draft vocabulary.
        taps: hidden states of the target that the head reads.
        max_positions: number of positions that the head knows and drafts for; None for all.
        variant: name in the head's files, a key of `variants`.
        variants: variants of this kind of head.
        own_title: title where the head's config tells more than its variant; else empty.
        name_with_article: name of this kind with an article, for messages.
        has_static_tree: whether the head's trees have one shape for every text.
        output_head_patterns: name patterns of parameters that turn states into logits, with one row
            per draft id. A head without them drafts with the target's output head.
        draft_id_patterns: patterns of other trained parameters with one row per draft id.
        target_id_patterns: patterns of trained parameters with one row per target id.
        compiled_modules: classes of modules that are faster compiled.
        default_layers: function from a target's number of layers and a setting's name to the hidden
            states that a new head reads besides the last one; it refuses too few layers under that
            name. None for heads that read the last one alone.
        ambiguities: generators over what the head's files may have meant. Each yields a description
            and an attached head with the same weights under that setting, the likeliest first.
        pruning_hint: which heads of this kind can be pruned, for the message of the others.
        vllm_settings: further speculation settings of vLLM.
        advice: what an engine should draft; None leaves the default.
    """

    config: Any
    config_type: ClassVar[Any] = None
    taps: FeatureLayers
    max_positions: int | None = None
    variants: ClassVar[dict[str, Variant]]
    own_title: str = ""
    name_with_article: ClassVar[str]
    has_static_tree: ClassVar[bool] = False
    output_head_patterns: ClassVar[tuple[str, ...]] = ()
    draft_id_patterns: ClassVar[tuple[str, ...]] = ()
    target_id_patterns: ClassVar[tuple[str, ...]] = ()
    compiled_modules: ClassVar[tuple[type[nn.Module], ...]] = ()
    default_layers: ClassVar["staticmethod[[int, str], tuple[int, ...]] | None"] = None
    ambiguities: ClassVar[tuple[Callable[[Any], Iterator[tuple[str, Any]]], ...]] = ()
    pruning_hint: ClassVar[str] = "none of this kind"
    vllm_settings: ClassVar[dict[str, bool]] = {}
    advice: EngineAdvice | None = None

    def __init__(self, config: Any, vocab: DraftVocab) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        self.variant = next(iter(self.variants))
        # In a tuple, so that the target is no submodule of the head.
        self._target: tuple[EmbeddingsAndOutputHead, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path, path: str, layers: Sequence[int] | None) -> Self | None:
        """Load the head of a folder in float32, not attached: trained, exported or published.

        By default, read what the default `build_files` writes.

        Args:
            folder: local folder with a `config.json`.
            path: name of the folder in messages.
            layers: hidden states to fuse instead of those in `config.json`.

        Returns:
            The head; None if the folder holds no head of this kind.

        Raises:
            InputError: files are missing, corrupt or foreign, or `layers` does not apply.
        """
        del layers
        settings = json.loads((folder / "config.json").read_text())
        if settings.get("architectures") != [cls.__name__]:
            return None
        config = cls.config_type(
            **{each.name: settings[each.name] for each in fields(cls.config_type)}
        )
        files = find_weight_files(f"head.path={path}", folder) or [folder / WEIGHTS]
        tensors = load_head_tensors(files, path)
        vocab = DraftVocab.make_full(config.vocab_size)
        rows = None
        if "d2t" in tensors:
            vocab, rows = DraftVocab.from_offsets(
                tensors.pop("d2t"), vocab.size, tensors.pop("t2d")
            )
        head = cls(config, vocab)
        head.load_state_dict(head.select_draft_rows(tensors, rows))
        return head

    @classmethod
    @abstractmethod
    def from_settings(
        cls, target: EmbeddingsAndOutputHead, settings: Any, vocab: DraftVocab, seed: int
    ) -> Self:
        """Make a new float32 head by a seed, attached to the target.

        Args:
            target: the frozen target.
            settings: settings `head` of the head's training command.
            vocab: draft vocabulary, if the head can restrict it.
            seed: seed of the head's weights.

        Raises:
            InputError: the settings do not fit the target.
        """

    def attach(self, target: EmbeddingsAndOutputHead, dtype: torch.dtype | None = None) -> Self:
        """Attach the head to a target that it fits, and move it to the target's device and `dtype`.

        Raises:
            InputError: the head does not fit.
        """
        check_fits(self, target, self.config.hidden_size)
        self.vocab = self.vocab.to(target.device)
        return self.to(target.device, dtype)

    @abstractmethod
    def compute_candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """Compute the best tokens of each depth along a text, [depth, n, width] int64.

        Args:
            output: the target's hidden states [1, S, .] of the first S tokens.
            token_ids: [S + 1], the text and its last token, which the target has not read.
            first: first token to draft from; n = S - first.
            depth: draft tokens per chain.
            width: candidates per depth.
        """

    @abstractmethod
    def make_drafter(self, shape: DraftShape, sampling: Sampling, seeds: Sequence[int]) -> Drafter:
        """Make a drafter of the attached head.

        Args:
            shape: a chain, or a shape like that of `make_default_shape`.
            sampling: the target's sampling.
            seeds: one seed per text.
        """

    def build_files(self) -> HeadFiles:
        """Build the content of the folder that `save` writes: by default, config and parameters."""
        # Not `state_dict`, which makes FSDP return shards.
        tensors = {name: each.detach() for name, each in self.named_parameters()}
        if not self.vocab.is_full:
            tensors |= {"d2t": self.vocab.compute_offsets(), "t2d": self.vocab.build_mask()}
        names = {"architectures": [type(self).__name__], "draft_vocab_size": len(self.vocab.ids)}
        return HeadFiles(names | vars(self.config), WEIGHTS, tensors)

    @abstractmethod
    def plan_export(self, engine: ExportFormat, folder: str = "DIR") -> ExportPlan:
        """Plan the head's files for a serving engine; the head may be attached or not."""

    @abstractmethod
    def compute_reference_logits(
        self, target: Target, states: list[Tensor], token_ids: Tensor, places: Tensor
    ) -> ReferenceLogits:
        """Compute the head's reference logits, in float32 on the CPU.

        Args:
            target: frozen target, with the head attached in the dtype of the export.
            states: hidden states [S, F] of the target, L + 1 of L layers.
            token_ids: [S + D + 1] int64 text.
            places: [S] int64 positions of the text's first S tokens.
        """

    @abstractmethod
    def build_card_facts(self, provenance: dict[str, Any]) -> HeadFacts:
        """Build the facts of the head's model card from the record of its training."""

    # The same for every head.

    @property
    def target(self) -> EmbeddingsAndOutputHead:
        """Return the target that an attached head uses."""
        return self._target[0]

    @property
    def target_name(self) -> str:
        """Return the target's Hub id or folder: the attached target's, or else the config's."""
        return self._target[0].name if self._target else self.config.target

    @property
    def title(self) -> str:
        """Return the name of such heads: "EAGLE-3 heads"."""
        return self.own_title or self.variants[self.variant].title

    @property
    def max_draft_tokens(self) -> int | None:
        """Return the length of the longest path that the head can draft; None for any length."""
        return self.config.num_draft_tokens

    @property
    def default_depth(self) -> int:
        """Return the default number of draft tokens of a chain."""
        return self.max_draft_tokens or USUAL_DEPTH

    @property
    def num_engine_tokens(self) -> int:
        """Return the number of draft tokens per pass that an engine is told to draft."""
        return self.default_depth if self.advice is None else self.advice.num_tokens

    @property
    def max_chain_depth(self) -> int:
        """Return the number of draft tokens of the longest useful chain."""
        return self.max_draft_tokens or LONGEST

    @final
    def make_default_shape(self, gpu: bool | None = None) -> DraftShape:
        """Make the default shape of drafts, for a GPU or a CPU.

        Args:
            gpu: whether the target runs on a GPU; None asks this machine.
        """
        if self.has_static_tree:
            return make_default_tree(self.max_chain_depth, gpu)
        shape = make_dynamic_shape(gpu)
        return replace(shape, depth=min(shape.depth, self.max_draft_tokens or shape.depth))

    @final
    def save(
        self,
        folder: Path,
        provenance: dict[str, object] | None = None,
        more: Mapping[str, object] | None = None,
        tensors: dict[str, Tensor] | None = None,
    ) -> None:
        """Write `config.json`, the weights and `headsmith.json`, all or nothing.

        Args:
            folder: folder, replaced if it exists.
            provenance: content of `headsmith.json`.
            more: content of further JSON files, by name.
            tensors: what `collect_tensors` gave at an earlier step, to write in place of the
                present weights.

        Raises:
            InputError: the disk is full or not writable. An older head there stays untouched.
        """
        files = self.build_files()
        documents: dict[str, object] = {"config.json": files.config, **(more or {})}
        if provenance is not None:
            documents[PROVENANCE] = provenance
        write_head_folder(folder, files.weights, tensors or files.tensors, documents)

    @final
    def collect_tensors(self) -> dict[str, Tensor]:
        """Collect the tensors that `save` writes, by their names in the file."""
        return self.build_files().tensors

    @final
    def find_output_heads(self) -> list[Tensor]:
        """Find the head's own matrices from states to logits, with one row per draft id."""
        patterns = self.output_head_patterns
        return [each for name, each in self.named_parameters() if _is_matched(patterns, name)]

    @final
    def find_embeddings(self) -> list[Tensor]:
        """Find the head's own trained matrices with one row per id, except output heads."""
        patterns = (*self.draft_id_patterns, *self.target_id_patterns)
        return [each for name, each in self.named_parameters() if _is_matched(patterns, name)]

    @property
    def pruning_problem(self) -> str | None:
        """Return why the draft vocabulary cannot shrink; None if it can."""
        if self.find_output_heads():
            return None
        return (
            f"this {self.variant} head drafts with the target's output head, which cannot lose "
            f"rows; allowed: {self.pruning_hint}"
        )

    @final
    def prune_vocab(self, vocab: DraftVocab) -> Self:
        """Copy the head in float32, not attached, with a smaller draft vocabulary."""
        pruned = type(self)(self.config, vocab)
        rows = self.vocab.to_draft_ids(vocab.ids.to(self.vocab.ids.device))
        pruned.load_state_dict(self.select_draft_rows(self.state_dict(), rows))
        return pruned

    @final
    def select_draft_rows(
        self, tensors: Mapping[str, Tensor], rows: Tensor | None
    ) -> dict[str, Tensor]:
        """Select rows [n] int64 of the tensors that have one per draft id; None selects all."""
        by_id = (*self.output_head_patterns, *self.draft_id_patterns)
        return {
            name: tensor if rows is None or not _is_matched(by_id, name) else tensor[rows]
            for name, tensor in tensors.items()
        }

    @final
    def compile_layers(self) -> None:
        """Compile the modules other than attention, on first use."""
        hide_hints()
        for module in self.modules():
            if isinstance(module, self.compiled_modules):
                module.compile(dynamic=True)

    @final
    def iter_config_variants(self) -> Iterator[tuple[str, Self]]:
        """Yield the heads that the files of this head may have meant. See `ambiguities`."""
        for iter_variants in self.ambiguities:
            yield from iter_variants(self)


def _is_matched(patterns: Sequence[str], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def get_head_settings(provenance: dict[str, Any]) -> dict[str, Any]:
    """Get the settings `head` of a head's training; empty if unknown."""
    return (provenance.get("config") or {}).get("head") or {}


def check_fits(
    head: DraftHead, target: EmbeddingsAndOutputHead, size: int, which: str = "hidden_size"
) -> None:
    """Refuse a target of other sizes than the head's.

    Args:
        head: head with its vocabulary.
        target: the target.
        size: width of the states that the head reads.
        which: the target's name for this size: `hidden_size` of last states, or `feature_size`.

    Raises:
        InputError: naming both sizes.
    """
    needed = {which: size, "vocab_size": head.vocab.size}
    for name, head_size in needed.items():
        target_size = getattr(target, name)
        if head_size != target_size:
            raise InputError(
                format_size_mismatch(name, head_size, head.config.target, target.name, target_size)
            )


def check_depth(depth: int | None, most: int | None, key: str = "depth") -> None:
    """Refuse more draft tokens than a head can draft.

    Raises:
        InputError: naming the limit.
    """
    if depth is not None and most is not None and depth > most:
        raise InputError(
            f"{key}={depth}: this head drafts at most {most} tokens; set {key}={most} or less"
        )
