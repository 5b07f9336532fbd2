"""The model card of a published head: what it is, what it was made from, what it gives."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from conf.schema_eagle import EagleForm
from heads.eagle import EagleHead
from heads.eagle_config import EagleHeadConfig
from heads.load import Head

DATA_SUFFIXES = (".jsonl", ".gz", ".json", ".parquet")
TRAIN_KEYS = (
    "max_steps", "batch_size", "learning_rate", "schedule", "warmup_steps", "weight_decay",
    "adam_beta2", "max_grad_norm", "dtype",
)  # fmt: skip


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
    """

    tag: str
    name: str
    method: str
    paper: str
    description: str
    num_draft_tokens: int
    vllm_method: str | None


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


def model_card(facts: CardFacts) -> ModelCard:
    """Writes the card, its metadata included."""
    sections = [
        _introduction(facts),
        _measured(facts),
        _use(facts),
        _training(facts),
    ]
    body = "\n\n".join(section for section in sections if section)
    return ModelCard(f"---\n{_metadata(facts).to_yaml()}\n---\n\n{body}\n")


def head_facts(
    head: Head, provenance: dict[str, Any], acceptance: dict[str, Any] | None
) -> HeadFacts:
    """What a head, the settings it was trained with and its measurement say of it."""
    if isinstance(head, EagleHead):
        return _eagle_facts(head, _head_settings(provenance), acceptance)
    config = head.config
    return HeadFacts(
        tag="medusa",
        name="Medusa heads",
        method="Medusa-2" if "adapter" in provenance else "Medusa-1",
        paper="2401.10774",
        description=(
            f"{config.num_heads} heads of {config.num_layers} residual "
            f"block{'s' if config.num_layers > 1 else ''} (hidden size {config.hidden_size}, "
            f"vocabulary {config.vocab_size}). Head k drafts the token k + 1 positions ahead"
        ),
        num_draft_tokens=config.num_heads,
        vllm_method="medusa",
    )


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
    config, vocab = head.config, head.vocab
    size = f"hidden size {config.llama.hidden_size}"
    if config.form is EagleForm.eagle1:
        return f"({size}, vocabulary {vocab.size}) on the target's last hidden state"
    reduced = f"draft vocabulary {len(vocab.ids)} of the target's {vocab.size}"
    words = f"vocabulary {vocab.size}" if vocab.full else reduced
    *most, last = map(str, config.layers) if config.layers else ("low", "middle", "high")
    fused = f"{', '.join(most)} and {last}" if most else last
    counted = " (as `output_hidden_states` counts them)" if config.layers else ""
    return f"({size}, {words}) on the target's hidden states {fused}{counted}, fused"


def is_hub_id(name: str) -> bool:
    """Whether a name can be a Hub repository and is not a local path."""
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not name.endswith(("/", *DATA_SUFFIXES))
        and not Path(name).exists()
    )


def _metadata(facts: CardFacts) -> ModelCardData:
    data_path = str(facts.provenance.get("data", {}).get("path") or "")
    on_hub = facts.target is not None and is_hub_id(facts.target)
    return ModelCardData(
        # The Hub refuses a base_model that is not an id, and calls every unnamed relation a
        # finetune; an adapter is what adds to a base model without changing it.
        base_model=facts.target if on_hub else None,
        base_model_relation="adapter" if on_hub else None,
        datasets=[data_path] if is_hub_id(data_path) else None,
        library_name="headsmith",
        license=facts.license,
        tags=["speculative-decoding", facts.head.tag, "draft-head"],
    )


def _introduction(facts: CardFacts) -> str:
    head = facts.head
    target = f"`{facts.target}`" if facts.target else "Headsmith's embedded default target"
    if facts.target and is_hub_id(facts.target):
        target = f"[{facts.target}](https://huggingface.co/{facts.target})"
    trained = "on a frozen target. The head works with this target only."
    if "adapter" in facts.provenance:
        trained = (
            "together with an adapter of the target. The head works with the target so adapted, "
            "or merged with the adapter, only."
        )
    return (
        f"# {facts.repo_id.rsplit('/')[-1]}\n\n"
        f"{head.name} for speculative decoding of {target}: {head.description}; the target checks "
        "all drafts in one pass, so that its own greedy text comes out, in fewer passes.\n\n"
        f"Method: {head.method} ([arXiv {head.paper}](https://arxiv.org/abs/{head.paper})), "
        f"{trained}"
    )


def _measured(facts: CardFacts) -> str:
    parts = ["## Measured"]
    if facts.acceptance is None and facts.speedup is None:
        parts.append("Nothing was measured before this head was published.")
    if facts.acceptance is not None:
        parts += [_acceptance_text(facts.acceptance), _acceptance_table(facts.acceptance)]
        parts.append(_depth_table(facts.acceptance))
    if facts.speedup is not None:
        parts += [_speedup_table(facts.speedup), _lossless_text(facts.speedup["lossless"])]
    parts += [f"![{Path(name).stem}]({name})" for name in facts.figures]
    return "\n\n".join(part for part in parts if part)


def _acceptance_text(acceptance: dict[str, Any]) -> str:
    where = _setting(acceptance)
    temperature = acceptance.get("temperature")
    choice = f"temperature {temperature}" if temperature else "greedy"
    return (
        f"tau, the mean number of tokens per target pass (its own token included), is "
        f"**{acceptance['tau']:.3f}** for the top-1 chain over {acceptance['num_prompts']} "
        f"prompts and {acceptance['num_tokens']} tokens{where} "
        f"({acceptance['mode']}, {choice}); without drafting it is 1."
    )


def _setting(result: dict[str, Any]) -> str:
    """Names dtype and device, where the measurement says them."""
    told = [str(result[key]) for key in ("target_dtype", "device") if result.get(key)]
    return f", {' on '.join(told)}" if told else ""


def _acceptance_table(acceptance: dict[str, Any]) -> str:
    found = acceptance.get("static_tree") or acceptance.get("dynamic_tree") or {}
    tree = found.get("by_category", {})
    header = ["category", "prompts", "tau", "95% interval", *(["tau, tree"] if tree else [])]
    rows = []
    for name, row in acceptance["by_category"].items():
        low, high = row["ci95"]
        cells = [name, row["num_prompts"], f"{row['tau']:.3f}", f"{low:.3f} to {high:.3f}"]
        if tree:
            cells.append(f"{tree[name]['tau']:.3f}" if name in tree else "")
        rows.append(cells)
    return _table(header, rows)


def _depth_table(acceptance: dict[str, Any]) -> str:
    rows = [
        [depth, f"{alpha:.3f}", f"{cumulative:.3f}"]
        for depth, (alpha, cumulative) in enumerate(
            zip(acceptance["alpha"], acceptance["per_position"], strict=True), 1
        )
    ]
    return _table(["depth", "accepted when reached (alpha)", "accepted of all passes"], rows)


def _speedup_table(speedup: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{row['tau']:.3f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['efficiency']:.2f}",
        ]
        for name, row in speedup["methods"].items()
    ]
    intro = (
        f"Decoding at batch {speedup.get('batch_size', 1)}{_setting(speedup)}; speed-up over "
        f"`{speedup['baseline']}`, the same engine without drafting; efficiency is speed-up / tau."
    )
    header = ["method", "tau", "tokens/s", "speed-up", "efficiency"]
    return f"{intro}\n\n{_table(header, rows)}"


def _lossless_text(lossless: dict[str, Any] | None) -> str:
    if lossless is None:  # sampled texts are not compared
        return ""
    return (
        f"{lossless['num_equal']} of {lossless['num_prompts']} texts equal the target's own "
        "greedy text token for token."
    )


def _use(facts: CardFacts) -> str:
    of_target = f" target.path={facts.target}" if facts.target else ""
    return (
        "## Use\n\n"
        "Evaluate on your own prompts, with Headsmith:\n\n"
        f"```\npython eval/acceptance.py head.path={facts.repo_id}{of_target} "
        f"data.path=my_prompts.jsonl\n```\n\n{_serve(facts)}"
    )


def _serve(facts: CardFacts) -> str:
    if facts.head.vllm_method is None:
        return (
            "vLLM does not load this head: its fusion layer has a bias (`fc.bias`), for which "
            "vLLM has no place. A head trained with head.fc_bias=false loads."
        )
    speculation = {
        "method": facts.head.vllm_method,
        "model": facts.repo_id,
        "num_speculative_tokens": facts.head.num_draft_tokens,
    }
    return (
        "Serve with vLLM:\n\n"
        f"```\nvllm serve {facts.target or 'TARGET'} --speculative-config "
        f"'{json.dumps(speculation)}'\n```"
    )


def _training(facts: CardFacts) -> str:
    provenance = facts.provenance
    if not provenance:
        return "## Training\n\nThis head carries no record of how it was trained."
    parts = ["## Training", _data_text(provenance.get("data") or {})]
    config = provenance.get("config") or {}
    settings = config.get("train") or {}
    rows = [[f"train.{key}", settings[key]] for key in TRAIN_KEYS if key in settings]
    rows += [
        [f"head.{key}", value]
        for key, value in _head_settings(provenance).items()
        # Where the head started from is its maker's own place.
        if key not in ("path", "revision") and value is not None
    ]
    rows += [["seed", config["seed"]]] if "seed" in config else []
    parts.append(_table(["setting", "value"], rows) if rows else "")
    made_with = [f"{k} {v}" for k, v in (provenance.get("versions") or {}).items() if v]
    revision = provenance.get("git")
    if made_with:
        at = f", Headsmith revision `{revision}`" if revision else ""
        parts.append(f"Made with {', '.join(made_with)}{at}. Everything else: `headsmith.json`.")
    return "\n\n".join(part for part in parts if part)


def _head_settings(provenance: dict[str, Any]) -> dict[str, Any]:
    return (provenance.get("config") or {}).get("head") or {}


def _data_text(data: dict[str, Any]) -> str:
    if not data:
        return ""
    rows = data.get("num_records")
    count = f"{rows:,} rows" if isinstance(rows, int) else "an unknown number of rows"
    name = data.get("path") or "Headsmith's embedded default"
    form = f", form {data['form']}" if data.get("form") else ""
    digest = f", sha256 `{data['sha256']}`" if data.get("sha256") else ""
    return f"Data: `{name}`, {count}{form}{digest}."


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )
