"""What a model card states of a head, its target and its exports."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.schema_eagle import EagleForm, OutputHead
from heads.eagle.config import EagleHeadConfig
from heads.eagle.head import EagleHead
from heads.kinds import Head
from heads.vocab import DraftVocab

DATA_SUFFIXES = (".jsonl", ".gz", ".json", ".parquet")
BIAS_PROBLEM = (
    "its fusion layer has a bias (`fc.bias`), for which vLLM has no place. A head trained with "
    "head.fc_bias=false loads."
)
TOKEN_MAP_PROBLEM = (
    "version 0.32 has a place for `token_map`, but gives each head as many rows as the target has "
    "ids and then refuses fewer. The head that this one was pruned from loads."
)


@dataclass(frozen=True)
class HeadFacts:
    """What a card says of the head itself.

    Attributes:
        tag: of the Hub, for the kind of head.
        name: what the first sentence calls it.
        method: name of the method that it was trained with.
        paper: arXiv number of the method.
        description: its parts, then how it drafts; without the final full stop.
        num_draft_tokens: how many an engine should draft at a time.
        vllm_method: None if vLLM does not load the head.
        vllm_problem: then why, and what loads.
    """

    tag: str
    name: str
    method: str
    paper: str
    description: str
    num_draft_tokens: int
    vllm_method: str | None
    vllm_problem: str


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


def head_facts(
    head: Head, provenance: dict[str, Any], acceptance: dict[str, Any] | None
) -> HeadFacts:
    """What a head, the settings it was trained with and its measurement say of it."""
    if isinstance(head, EagleHead):
        return _eagle_facts(head, head_settings(provenance), acceptance)
    config = head.config
    return HeadFacts(
        tag="medusa",
        name="Medusa heads",
        method="Medusa-2" if "adapter" in provenance else "Medusa-1",
        paper="2401.10774",
        description=(
            f"{config.num_heads} heads of {config.num_layers} residual "
            f"block{'s' if config.num_layers > 1 else ''} (hidden size {config.hidden_size}, "
            f"{_vocabulary(head.vocab)}). Head k drafts the token k + 1 positions ahead"
        ),
        num_draft_tokens=config.num_heads,
        vllm_method="medusa" if head.vocab.full else None,
        vllm_problem=TOKEN_MAP_PROBLEM,
    )


def _vocabulary(vocab: DraftVocab) -> str:
    if vocab.full:
        return f"vocabulary {vocab.size}"
    return f"draft vocabulary {len(vocab.ids)} of the target's {vocab.size}"


def _eagle_facts(
    head: EagleHead, settings: dict[str, Any], acceptance: dict[str, Any] | None
) -> HeadFacts:
    config = head.config
    tag = "eagle3" if config.form is EagleForm.eagle3 else "eagle"
    method, paper = _eagle_method(config, settings)
    drafted = min(max(settings.get("num_steps", 3), 3), 5)
    return HeadFacts(
        tag=tag,
        name=f"{method} head",
        method=method,
        paper=paper,
        description=(
            f"one decoder layer {_eagle_parts(head)}. It drafts one token after another, to any "
            "depth, each from its own last output"
        ),
        num_draft_tokens=len(acceptance["alpha"]) if acceptance else drafted,
        # vLLM builds the fusion layer without a bias and fails on the tensor.
        vllm_method=None if config.fc_bias else tag,
        vllm_problem=BIAS_PROBLEM,
    )


def _eagle_method(config: EagleHeadConfig, settings: dict[str, Any]) -> tuple[str, str]:
    """Name and arXiv number."""
    if config.form is EagleForm.eagle1:
        # The same head: only its training tells HASS from EAGLE-1, and its use EAGLE-2.
        hass = settings.get("top_k_weight") or settings.get("detach_features")
        return ("HASS", "2408.15766") if hass else ("EAGLE-1/2", "2401.15077")
    if config.fc_norm and config.norm_output:
        return "EAGLE-3.1", "2605.09992"
    return "EAGLE-3", "2503.01840"


def _eagle_parts(head: EagleHead) -> str:
    config = head.config
    size = f"hidden size {config.llama.hidden_size}"
    if config.form is EagleForm.eagle1:
        return f"({size}, {_vocabulary(head.vocab)}) on the target's last hidden state"
    *most, last = map(str, config.layers) if config.layers else ("low", "middle", "high")
    fused = f"{', '.join(most)} and {last}" if most else last
    counted = " (as `output_hidden_states` counts them)" if config.layers else ""
    return (
        f"({size}, {_vocabulary(head.vocab)}) on the target's hidden states {fused}{counted}, fused"
    )


def is_hub_id(name: str) -> bool:
    """Whether a name can be a Hub repository and is not a local path."""
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not name.endswith(("/", *DATA_SUFFIXES))
        and not Path(name).exists()
    )


def head_settings(provenance: dict[str, Any]) -> dict[str, Any]:
    """`head` of the settings that a head was trained with."""
    return (provenance.get("config") or {}).get("head") or {}


def copied_weights(
    head: Head, provenance: dict[str, Any], exports: Sequence[ExportFacts]
) -> list[str]:
    """What of a target's weights a head and its exports hold, in words."""
    found = []
    if isinstance(head, EagleHead):
        start = head_settings(provenance).get("output_head")
        if head.lm_head is not None and start == OutputHead.frozen.value:
            found.append("rows of its output head")
        if head.lm_head is not None and start == OutputHead.copy.value:
            found.append("an output head that started as rows of its own")
        if head.embed_tokens is not None:
            found.append("its token embedding")
    else:
        found.append("output layers that started as copies of its own")
    of_exports = [words for export in exports for words in export.target_weights]
    return list(dict.fromkeys([*found, *of_exports]))
