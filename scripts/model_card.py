"""The model card of a published head: what it is, what it was made from, what it gives."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from heads.medusa import MedusaHeadConfig

DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
TRAIN_KEYS = (
    "max_steps", "batch_size", "learning_rate", "schedule", "warmup_steps", "weight_decay",
    "max_grad_norm", "dtype",
)  # fmt: skip


@dataclass(frozen=True)
class CardFacts:
    """Everything that a card states; paths in it are already scrubbed."""

    repo_id: str
    head: MedusaHeadConfig
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
        tags=["speculative-decoding", "medusa", "draft-head"],
    )


def _introduction(facts: CardFacts) -> str:
    head = facts.head
    target = f"`{facts.target}`" if facts.target else "Headsmith's embedded default target"
    if facts.target and is_hub_id(facts.target):
        target = f"[{facts.target}](https://huggingface.co/{facts.target})"
    return (
        f"# {facts.repo_id.rsplit('/')[-1]}\n\n"
        f"Medusa heads for speculative decoding of {target}: {head.num_heads} heads of "
        f"{head.num_layers} residual block{'s' if head.num_layers > 1 else ''} "
        f"(hidden size {head.hidden_size}, vocabulary {head.vocab_size}). "
        "Head k drafts the token k + 1 positions ahead; the target checks all drafts in one "
        "pass, so that its own greedy text comes out, in fewer passes.\n\n"
        "Method: Medusa-1 ([arXiv 2401.10774](https://arxiv.org/abs/2401.10774)), on a frozen "
        "target. The head works with this target only."
    )


def _measured(facts: CardFacts) -> str:
    parts = ["## Measured"]
    if facts.acceptance is None and facts.speedup is None:
        parts.append("Nothing was measured before this head was published.")
    if facts.acceptance is not None:
        parts += [_acceptance_text(facts.acceptance), _acceptance_table(facts.acceptance)]
        parts.append(_depth_table(facts.acceptance))
    if facts.speedup is not None:
        parts += [_speedup_table(facts.speedup), _lossless_text(facts.speedup)]
    parts += [f"![{Path(name).stem}]({name})" for name in facts.figures]
    return "\n\n".join(part for part in parts if part)


def _acceptance_text(acceptance: dict[str, Any]) -> str:
    where = _setting(acceptance)
    return (
        f"tau, the mean number of tokens per target pass (its own token included), is "
        f"**{acceptance['tau']:.3f}** for the top-1 chain over {acceptance['num_prompts']} "
        f"prompts and {acceptance['num_tokens']} tokens{where} "
        f"({acceptance['mode']}, greedy); without drafting it is 1."
    )


def _setting(result: dict[str, Any]) -> str:
    """Names dtype and device, where the measurement says them."""
    told = [str(result[key]) for key in ("target_dtype", "device") if result.get(key)]
    return f", {' on '.join(told)}" if told else ""


def _acceptance_table(acceptance: dict[str, Any]) -> str:
    tree = (acceptance.get("static_tree") or {}).get("by_category", {})
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
        f"Decoding at batch 1{_setting(speedup)}; speed-up over `{speedup['baseline']}`, the same "
        "engine without drafting; efficiency is speed-up / tau."
    )
    header = ["method", "tau", "tokens/s", "speed-up", "efficiency"]
    return f"{intro}\n\n{_table(header, rows)}"


def _lossless_text(speedup: dict[str, Any]) -> str:
    lossless = speedup["lossless"]
    return (
        f"{lossless['num_equal']} of {lossless['num_prompts']} texts equal the target's own "
        "greedy text token for token."
    )


def _use(facts: CardFacts) -> str:
    of_target = f" target.path={facts.target}" if facts.target else ""
    speculation = {
        "method": "medusa",
        "model": facts.repo_id,
        "num_speculative_tokens": facts.head.num_heads,
    }
    return (
        "## Use\n\n"
        "Evaluate on your own prompts, with Headsmith:\n\n"
        f"```\npython eval/acceptance.py head.path={facts.repo_id}{of_target} "
        "data.path=my_prompts.jsonl\n```\n\n"
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
    head = config.get("head") or {}
    rows += [[f"head.{key}", head[key]] for key in ("labels", "loss_decay") if key in head]
    rows += [["seed", config["seed"]]] if "seed" in config else []
    parts.append(_table(["setting", "value"], rows) if rows else "")
    made_with = [f"{k} {v}" for k, v in (provenance.get("versions") or {}).items() if v]
    revision = provenance.get("git")
    if made_with:
        at = f", Headsmith revision `{revision}`" if revision else ""
        parts.append(f"Made with {', '.join(made_with)}{at}. Everything else: `headsmith.json`.")
    return "\n\n".join(part for part in parts if part)


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
