"""The model card of a published head: its kind, its origin, and its measurements."""

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from conf.command.forms import name_commands
from conf.errors import InputError
from conf.files import find_local_path, split_gguf_path
from data.rows.data_files import DATA_ENDINGS
from eval.measure.acceptance_stats import (
    count_dialogues,
    format_shown_interval,
    select_tree_figures,
)
from eval.measure.data_statement import format_training_notes
from eval.measure.modes import build_mode_rows
from eval.measure.results import build_markdown_table, format_conditions
from heads.draft_head import HeadFacts, get_head_settings
from heads.export.writer import format_template_note, format_vllm_command

TRAIN_KEYS = (
    "max_steps", "batch_size", "optimizer", "learning_rate", "adam_learning_rate", "schedule",
    "warmup_steps", "weight_decay", "average_decay",
    "adam_beta2", "max_grad_norm", "max_grad_value", "dtype",
)  # fmt: skip


@dataclass(frozen=True)
class ExportFacts:
    """Hold the facts of an export, as a card states them.

    Attributes:
        format: name of the format.
        repo_id: repository of the export.
        folder: folder in that repository; empty for its root.
        loaders: engine versions whose loaders the export was written for.
        commands: commands that download the export, unless the engine does, and serve it.
        target_problem: why the engine cannot serve the head with its target; empty if it can.
        version_limit: which versions of the engine load the head, if the newest does not.
        parity: distance of the export's logits from the trained head's, by an independent reader.
        target_weights: names of the target's weights that the export contains.
    """

    format: str
    repo_id: str
    folder: str
    loaders: str
    commands: str
    target_problem: str
    version_limit: str
    parity: str
    target_weights: tuple[str, ...]


@dataclass(frozen=True)
class CardFacts:
    """Hold the contents of a card; local paths are already removed."""

    repo_id: str
    head: HeadFacts
    target: str | None
    """Hub id of the target, perhaps of its GGUF file there; None for the embedded default."""
    provenance: dict[str, Any]
    """Contents of `headsmith.json`."""
    num_tokens_reason: str = ""
    """Why engines are told to draft so many tokens, in whole sentences."""
    license: str | None = None
    acceptance: dict[str, Any] | None = None
    speedup: dict[str, Any] | None = None
    verdict: str = ""
    """What these figures say about serving the head; empty without figures."""
    comparisons: list[str] = field(default_factory=list)
    """Sentences and tables of `scripts/compare.py`."""
    figures: list[str] = field(default_factory=list)
    """File names beside the card."""
    exports: list[ExportFacts] = field(default_factory=list)
    head_repo: str | None = None
    """Repository of the head itself, for the card of an export's own repository."""
    notices: list[str] = field(default_factory=list)
    """Terms that apply, one paragraph each."""


def is_hub_id(name: str) -> bool:
    """Tell whether a name can be a Hub repository with an owner, and is no local path.

    On a card made elsewhere, a name without an owner was more likely a folder there.
    """
    try:
        return "/" in name and find_local_path("a name", name, DATA_ENDINGS) is None
    except InputError:
        return False


def parse_hub_id(name: str) -> str:
    """Return the id of a Hub repository; the name may end in a GGUF file."""
    parts = split_gguf_path(name)
    return name if parts is None else parts[0]


def build_model_card(facts: CardFacts) -> ModelCard:
    """Build the card of a head, with its metadata."""
    sections = [
        _format_introduction(facts), facts.verdict, *facts.notices, _format_usage(facts),
        _format_measurements(facts), _format_training(facts),
    ]  # fmt: skip
    body = "\n\n".join(filter(None, sections))
    return ModelCard(f"---\n{_build_metadata(facts).to_yaml()}\n---\n\n{body}\n")


def _build_metadata(facts: CardFacts) -> ModelCardData:
    data_path = str(facts.provenance.get("data", {}).get("path") or "")
    return ModelCardData(
        # The Hub refuses a base_model that is not an id, and treats every unnamed relation as a
        # finetune. It knows adapter, finetune, merge and quantized; an adapter adds to a base model
        # without changing it. No pipeline_tag: a head by itself generates nothing.
        base_model=parse_hub_id(facts.target) if facts.target else None,
        base_model_relation="adapter" if facts.target else None,
        datasets=[data_path] if is_hub_id(data_path) else None,
        library_name="headsmith",
        license=facts.license,
        model_name=facts.repo_id.rsplit("/")[-1] if facts.acceptance else None,
        eval_results=_build_eval_results(facts.acceptance) if facts.acceptance else None,
        tags=[
            "speculative-decoding", facts.head.tag, "draft-head",
            *sorted(export.format for export in facts.exports),
        ],
    )  # fmt: skip


def _build_eval_results(acceptance: dict[str, Any]) -> list[EvalResult]:
    """Build tau of the chain and of the tree, in the Hub's `model-index` form."""
    data = str((acceptance.get("data") or {}).get("path") or "headsmith-default")
    taus = {"chain": acceptance} | {
        key.replace("_", " "): acceptance[key]
        for key in ("static_tree", "dynamic_tree")
        if key in acceptance
    }
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=data if is_hub_id(data) else Path(data).stem,
            dataset_name=Path(data).stem,
            metric_type="tau",
            metric_name=f"tau, {name} (mean tokens per target pass)",
            metric_value=round(figures["tau"], 4),
        )
        for name, figures in taus.items()
    ]


def _format_introduction(facts: CardFacts) -> str:
    head = facts.head
    target = "Headsmith's embedded default target"
    if facts.target:
        target = f"[{facts.target}](https://huggingface.co/{parse_hub_id(facts.target)})"
    paper = f" ([arXiv {head.paper}](https://arxiv.org/abs/{head.paper}))" if head.paper else ""
    trained = "on a frozen target. The head works with this target only."
    if "adapter" in facts.provenance:
        trained = (
            "together with an adapter of the target. The head works with the target so adapted, "
            "or merged with the adapter, only."
        )
    identity = facts.provenance.get("target_identity") or {}
    if split_gguf_path(str(identity.get("name"))):
        trained += (
            f" It was trained on the weights in `{Path(identity['name']).name}`, of type "
            f"{identity['quantization']}, which llama.cpp serves."
        )
    elsewhere = ""
    if facts.head_repo is not None:
        elsewhere = (
            f"\n\nThis repository holds the head in the format {facts.exports[0].format}; the head "
            "itself, for Headsmith, is in "
            f"[{facts.head_repo}](https://huggingface.co/{facts.head_repo})."
        )
    return (
        f"# {facts.repo_id.rsplit('/')[-1]}\n\n"
        f"{head.name} for speculative decoding of {target}: {head.description}; the target checks "
        "all drafts in one pass, so that its own greedy text comes out, in fewer passes.\n\n"
        f"Method: {head.method}{paper}, {trained}{elsewhere}"
    )


def _format_measurements(facts: CardFacts) -> str:
    parts = ["## Measured"]
    if facts.acceptance is None and facts.speedup is None and not facts.comparisons:
        parts.append("Nothing was measured before this head was published.")
    if facts.acceptance is not None:
        parts += _format_acceptance(facts.acceptance)
    if facts.speedup is not None:
        parts += _format_speedup(facts.speedup)
    parts += facts.comparisons
    parts += [f"![{Path(name).stem}]({name})" for name in facts.figures]
    return "\n\n".join(parts)


def _format_acceptance(acceptance: dict[str, Any]) -> list[str]:
    """Format tau in words and by category, and acceptance by depth."""
    temperature = acceptance.get("temperature")
    choice = f"temperature {temperature}" if temperature else "greedy"
    summary = (
        f"tau, the mean number of tokens per target pass (its own token included), is "
        f"**{acceptance['tau']:.3f}** for the top-1 chain over {acceptance['num_prompts']} "
        f"prompts and {acceptance['num_tokens']} tokens{_format_dtype_and_device(acceptance)} "
        f"({acceptance['mode']}, {choice}); without drafting it is 1."
    )
    tree, dialogues = select_tree_figures(acceptance), count_dialogues(acceptance["prompts"])
    header = ["category", "prompts", "tau", "95% interval", "tau, tree"]
    rows = []
    every = {**acceptance, "ci95": acceptance["tau_ci95"]}
    for name, row in [*acceptance["by_category"].items(), ("all", every)]:
        interval = format_shown_interval(row["ci95"], min(dialogues, row["num_prompts"]))
        in_tree = tree if row is every else tree["by_category"][name]
        rows.append(
            [name, row["num_prompts"], f"{row['tau']:.3f}", interval, f"{in_tree['tau']:.3f}"]
        )
    modes = build_mode_rows(acceptance, tree)
    rates = zip(acceptance["alpha"], acceptance["per_position"], strict=True)
    depths = [
        [depth, f"{alpha:.3f}", f"{cumulative:.3f}"]
        for depth, (alpha, cumulative) in enumerate(rates, 1)
    ]
    by_depth = ["depth", "accepted when reached (alpha)", "accepted of all passes"]
    conditions = format_conditions(acceptance)
    return [
        summary,
        *([f"Measured under: {conditions}."] if conditions else []),
        *_format_training_notes(acceptance),
        build_markdown_table([header, *rows]),
        *([build_markdown_table(modes)] if modes else []),
        build_markdown_table([by_depth, *depths]),
    ]


def _format_training_notes(result: dict[str, Any]) -> list[str]:
    """Format what of the data was trained on, and how else training differs from measuring."""
    data = result.get("data") or {}
    own = (each for each in data.get("trained_on") or () if each["head"] == result.get("head"))
    notes = [note for each in own for note in format_training_notes(data, each, "This head")]
    return [f"{note}." for note in notes]


def _format_dtype_and_device(result: dict[str, Any]) -> str:
    """Name dtype and device, if the measurement has them."""
    names = [str(result[key]) for key in ("target_dtype", "device") if result.get(key)]
    return f", {' on '.join(names)}" if names else ""


def _format_speedup(speedup: dict[str, Any]) -> list[str]:
    """Format the speed-up of every method, and the number of texts equal to the target's own."""
    others = [f"`{name}`" for name in speedup["baselines"] if name != speedup["baseline"]]
    faster = f", the faster of it and {' and '.join(others)}" if others else ""
    summary = (
        f"Decoding at batch {speedup.get('batch_size', 1)}{_format_dtype_and_device(speedup)}; "
        f"speed-up over `{speedup['baseline']}`{faster}, without drafting; efficiency is the "
        "speed-up of decoding / tau."
    )
    dialogues = count_dialogues(speedup["methods"][speedup["baseline"]]["prompts"])
    header = ["method", "tau", "tokens/s", "speed-up", "95% interval", "efficiency"]
    rows = [
        [
            name,
            f"{row['tau']:.3f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}",
            format_shown_interval(row["speedup_ci95"], dialogues),
            "-" if row["efficiency"] is None else f"{row['efficiency']:.2f}",
        ]
        for name, row in speedup["methods"].items()
    ]
    parts = [summary, *_format_training_notes(speedup), build_markdown_table([header, *rows])]
    lossless = speedup["lossless"]
    if lossless is not None:  # sampled texts are not compared
        parts.append(
            f"{lossless['num_equal']} of {lossless['num_prompts']} texts equal the target's own "
            "greedy text token for token."
        )
    return parts


def _format_usage(facts: CardFacts) -> str:
    head, of_target = facts.head, f" target.path={facts.target}" if facts.target else ""
    if facts.exports:
        serve = _format_exports(facts)
    elif head.vllm_method is None:
        serve = f"vLLM does not load this head: {head.vllm_problem}"
    else:
        command = format_vllm_command(
            head.vllm_method, head.num_draft_tokens, facts.target or "TARGET", facts.repo_id,
            **head.vllm_settings,
        )  # fmt: skip
        last = f" up to version {head.last_vllm_version}" if head.last_vllm_version else ""
        serve = f"Serve with vLLM{last}:\n\n```\n{command}\n```\n\n{facts.num_tokens_reason}"
    return (
        "## Use\n\n"
        "Evaluate on your own prompts, with Headsmith:\n\n"
        f"```\n{name_commands('python eval/acceptance.py')} "
        f"head.path={facts.head_repo or facts.repo_id}{of_target} "
        f"data.path=my_prompts.jsonl\n```\n\n{serve}"
    )


def _format_exports(facts: CardFacts) -> str:
    """List the engine of each export, its distance from the trained head, and how to serve it."""
    rows = [
        [each.format, f"`{PurePosixPath(each.repo_id, each.folder)}`", each.loaders, each.parity]
        for each in facts.exports
    ]
    intro = "Serve it from the export for your engine."
    if any(export.folder for export in facts.exports):
        intro += (
            " Engines only look for weights in a repository's root, so download its folder first."
        )
    parity = (
        "Parity: an independent reader, which only knows the engine's documented names, computes "
        "logits from the export, and compares them with the trained head's on the golden features "
        f"in `parity/`. Headsmith's `{name_commands('python scripts/verify_export.py')} FOLDER` "
        "checks it again on the serving machine."
    )
    commands = [
        f"{export.format}: {export.target_problem}"
        if export.target_problem
        else f"{export.format}:{export.version_limit and f' {export.version_limit}'}\n\n"
        f"```\n{export.commands}\n```"
        for export in facts.exports
    ]
    table = build_markdown_table([["format", "where", "loaders read", "parity"], *rows])
    return "\n\n".join([intro, table, parity, *commands])


def _format_training(facts: CardFacts) -> str:
    provenance = facts.provenance
    if not provenance:
        return "## Training\n\nThis head has no record of how it was trained."
    parts = ["## Training", _data_text(provenance.get("data") or {})]
    config = provenance.get("config") or {}
    settings = config.get("train") or {}
    of_data = config.get("data") or {}
    # A store's sequences have a length of their own.
    length = None if of_data.get("features") else of_data.get("max_length")
    rows = [["data.max_length", length]] if length else []
    rows += [[f"train.{key}", settings[key]] for key in TRAIN_KEYS if key in settings]
    rows += [
        [f"head.{key}", value]
        for key, value in get_head_settings(provenance).items()
        # The starting head's path is a place on its maker's machine.
        if key not in ("path", "revision") and value is not None
    ]
    rows += [["seed", config["seed"]]] if "seed" in config else []
    if rows:
        table = build_markdown_table([["setting", "value"], *rows])
        parts.append(f"<details><summary>{len(rows)} settings</summary>\n\n{table}\n\n</details>")
    parts.append(format_template_note(provenance))
    about = list(provenance.get("about_head") or ())
    if kept := provenance.get("kept"):
        about.append(f"step {kept['step']} of {kept['num_steps']} was kept: {kept['why']}")
    parts.append(
        "What training said of the head:\n\n```\n" + "\n".join(about) + "\n```" if about else ""
    )
    made_with = [f"{k} {v}" for k, v in (provenance.get("versions") or {}).items() if v]
    revision = provenance.get("git")
    if made_with:
        commit = f", Headsmith revision `{revision}`" if revision else ""
        parts.append(
            f"Made with {', '.join(made_with)}{commit}. Everything else: `headsmith.json`."
        )
    return "\n\n".join(part for part in parts if part)


def _data_text(data: dict[str, Any]) -> str:
    if not data:
        return ""
    rows = data.get("num_records")
    heldout, eval_path = data.get("num_heldout") or 0, data.get("eval_path")
    apart = ""
    if isinstance(rows, int) and heldout:
        rows -= heldout
        apart = f" {heldout:,} rows of {f'`{eval_path}`' if eval_path else 'it'} were held out."
    count = f"{rows:,} rows" if isinstance(rows, int) else "an unknown number of rows"
    name = data.get("path") or "Headsmith's embedded default"
    form = f", form {data['form']}" if data.get("form") else ""
    digest = f", sha256 `{data['sha256']}`" if data.get("sha256") else ""
    number = data.get("num_truncated") or 0
    cut = f" {number:,} samples were longer than `data.max_length`; their ends were not learnt."
    return f"Data: `{name}`, {count}{form}{digest}.{apart}{cut if number else ''}"
