"""Writer of trained heads for serving engines.

A folder holds `config.json`, one safetensors file, `README.md`, `headsmith.json`, and
`parity/parity.safetensors` with reference values, in a subfolder because engines load every
safetensors file beside `config.json` as weights. A GGUF file holds config and weights.

The reference values are hidden states, logits, and further inputs of a reader, which can compute
the head from the exported files and compare. All arithmetic is float32 on the CPU, whatever the
dtype of the head.

Sources of the start commands: vLLM 0.33 `config/speculative.py`, and of its schedule
`v1/spec_decode/dynamic/utils.py`; SGLang 0.5.23 `srt/arg_groups/fields/spec.py`; TensorRT-LLM 1.3
`llm_args.py`, and of 1.1 `examples/medusa/README.md`; SafeAILab/EAGLE and FasterDecoding/Medusa.

Letters: S rows, D depths (of Medusa: its heads), L target layers, F target hidden, H hidden, V
vocabulary, R ids whose logits are kept.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from conf.command.forms import name_commands
from conf.errors import InputError
from conf.files import split_gguf_path
from conf.settings.export import ExportFormat
from heads.draft_head import DraftHead
from heads.export.gguf import (
    build_vocab_metadata,
    serve_command,
    target_hint,
    weights_name,
    write_gguf,
)
from heads.export.versions import LOADER_VERSIONS
from heads.folders import PROFILE, PROVENANCE, write_folder
from heads.target_model.architecture import find_max_positions
from heads.target_model.decoder import extract_hidden_state
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target

ENGINE_NAMES = {
    ExportFormat.vllm: "vLLM",
    ExportFormat.sglang: "SGLang",
    ExportFormat.trtllm: "TensorRT-LLM",
    ExportFormat.speculators: "speculators",
    ExportFormat.original: "the authors' code",
    ExportFormat.llamacpp: "llama.cpp",
}
LLAMACPP_HEADS = (
    "it serves heads of train/eagle.py with head=eagle3, and of train/dflash.py, dflash2.py "
    "and dspark.py"
)
"""Heads that llama.cpp serves, for the message to owners of others."""
SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
"""vLLM's key of draft tokens by requests in flight. Beyond its last range that range goes on."""
PARITY = Path("parity") / "parity.safetensors"
MOST_IDS = 8192
"""Largest vocabulary of which all ids are kept."""
LIKELIEST, SPREAD = 16, 1024
"""Ids kept of larger vocabularies: the likeliest per row and depth, and evenly spaced ones."""


def check_format(head: DraftHead, engine: ExportFormat) -> None:
    """Refuse an engine that cannot serve a head with any target.

    Raises:
        InputError: naming the possible formats.
    """
    problem = head.plan_export(engine).problem
    if problem is not None:
        more = f"; {LLAMACPP_HEADS}" if engine is ExportFormat.llamacpp else ""
        allowed = [each.value for each in ExportFormat if head.plan_export(each).problem is None]
        raise InputError(
            f"format={engine.value}: {ENGINE_NAMES[engine]} {problem}; allowed for this head: "
            f"{', '.join(allowed) or 'none'}{more}"
        )


def check_export_target(head: DraftHead, engine: ExportFormat) -> None:
    """Refuse an attached target that the engine would read differently; see `check_format` too.

    Raises:
        InputError: naming what the engine reads.
    """
    check_format(head, engine)
    head.plan_export(engine).files()


def find_target_problem(head: DraftHead, engine: ExportFormat) -> str:
    """Find why an engine cannot serve an attached head that it loads: a sentence, or empty."""
    if engine is not ExportFormat.llamacpp:
        return ""
    return target_hint(head.target.config.model_type)


def format_version_limit(head: DraftHead, engine: ExportFormat) -> str:
    """Format which versions of an engine load a head, where the newest does not; else empty."""
    last = head.plan_export(engine).last_version
    if not last:
        return ""
    title = head.title
    return f"{ENGINE_NAMES[engine]} loads {title} up to version {last}; newer versions have none."


def choose_engine(head: DraftHead) -> ExportFormat | None:
    """Choose the first engine that serves a head with its target; None if none does.

    Targets in GGUF files are llama.cpp's.
    """
    llamacpp = ExportFormat.llamacpp
    engines = [llamacpp] if split_gguf_path(head.target_name) else ExportFormat
    for engine in engines:
        if head.plan_export(engine).problem is None and not find_target_problem(head, engine):
            return engine
    return None


def list_serving_warnings(head: DraftHead, target: EmbeddingsAndOutputHead) -> list[str]:
    """List what the owner of a head should know of engines before training, a line each.

    The engine of a target in a GGUF file is llama.cpp. For other targets, only heads that llama.cpp
    loads have a line about it.
    """
    lines = [format_version_limit(head, engine) for engine in ExportFormat]
    problem = head.plan_export(ExportFormat.llamacpp).problem
    if problem is None or split_gguf_path(target.name):
        unserved = target_hint(target.config.model_type)
        if problem is not None and not unserved:
            unserved = f"llama.cpp, which serves GGUF files, {problem}; {LLAMACPP_HEADS}."
        lines.append(unserved)
    return [line for line in lines if line]


def export_head(
    head: DraftHead,
    engine: ExportFormat,
    reference: tuple[dict[str, Tensor], dict[str, str]],
    out_dir: Path,
    provenance: dict[str, object],
    tokenizer_gguf: Path | None = None,
) -> None:
    """Write an export atomically.

    Args:
        head: attached head in the dtype of the export.
        engine: format.
        reference: tensors and metadata of `compute_reference_tensors`.
        out_dir: folder, replaced if it exists.
        provenance: record of the training, for `headsmith.json`, and `exported_from`, by which a
            later export of the same head knows that it may replace this one.
        tokenizer_gguf: GGUF file of the target, whose vocabulary a GGUF file of the head copies.

    Raises:
        InputError: the engine cannot serve this head, or the disk is full or not writable. Earlier
            content stays untouched.
    """
    check_format(head, engine)
    files = head.plan_export(engine).files()
    tensors = {name: each.detach().cpu().contiguous() for name, each in files.tensors.items()}
    gguf = files.weights.endswith(".gguf")
    documents: dict[str, object] = {} if gguf else {"config.json": files.config}
    if head.advice is not None and head.advice.profile is not None:
        documents[PROFILE] = head.advice.profile
    export_record = {
        "format": engine.value,
        "kind": head.variant,
        "layers": files.layers,
        "target": head.target_name,
        "dtype": format_dtype(head),
        # For exports that may replace this one.
        "files": [*documents, PROVENANCE, "README.md", files.weights, PARITY.as_posix()],
        # For readers of the export.
        "added": files.added,
        # For the model card.
        "target_problem": find_target_problem(head, engine),
        "version_limit": format_version_limit(head, engine),
    }
    documents[PROVENANCE] = provenance | {"export": export_record}
    if gguf:
        vocab_metadata = build_vocab_metadata(head.vocab.size, tokenizer_gguf)

    def fill(staging: Path) -> None:
        for name, content in documents.items():
            (staging / name).write_text(json.dumps(content, indent=2) + "\n")
        (staging / "README.md").write_text(format_readme(head, engine, files.layers, provenance))
        if gguf:
            # The head's mask token takes precedence over the target's.
            write_gguf(staging / files.weights, vocab_metadata | files.config, tensors)
        else:
            save_file(tensors, staging / files.weights, metadata={"format": "pt"})
        (staging / PARITY).parent.mkdir()
        save_file(reference[0], staging / PARITY, metadata=reference[1])

    write_folder(out_dir, fill)


def format_readme(
    head: DraftHead, engine: ExportFormat, layers: Sequence[int], provenance: dict[str, Any]
) -> str:
    """Format the README of an export, with `DIR` for its folder."""
    export = head.plan_export(engine)
    warnings = [find_target_problem(head, engine), format_version_limit(head, engine)]
    before = "".join(f"{each}\n\n" for each in warnings if each)
    reason = "" if head.advice is None else head.advice.reason
    notes = [reason, export.hint, format_template_note(provenance)]
    further = "".join(f"{note}\n\n" for note in notes if note)
    taps = f", reads `output_hidden_states` {list(layers)} of the target" if layers else ""
    return (
        f"# {head.title} for {head.target_name}\n\n"
        f"For speculative decoding with {ENGINE_NAMES[engine]}, {format_dtype(head)} "
        f"weights{taps}. "
        f"Written by Headsmith after the loaders of {LOADER_VERSIONS[engine]}.\n\n"
        f"## Serve\n\n{before}"
        f"```\n{export.command}\n```\n\n`DIR` is this folder.\n\n{further}"
        "## Verify\n\n"
        "`parity/parity.safetensors` holds hidden states of the target and the logits of the "
        "trained head on them. On any machine with Headsmith\n\n"
        f"```\n{name_commands('python scripts/verify_export.py')} DIR\n```\n\n"
        "computes the head again from these files alone, as the engine reads them, and compares.\n"
    )


def format_template_note(provenance: dict[str, Any]) -> str:
    """Format advice to serve with the template settings of a training; empty without such settings.

    Args:
        provenance: content of `headsmith.json`.
    """
    data = (provenance.get("config") or {}).get("data") or {}
    kwargs = data.get("chat_template_kwargs")
    if not kwargs:
        return ""
    encoded = json.dumps(kwargs)
    return (
        f"It was trained on chats rendered with `chat_template_kwargs` `{encoded}`. Serve with the "
        f"same: in each request, or vLLM with `--default-chat-template-kwargs '{encoded}'`."
    )


def format_dtype(head: nn.Module) -> str:
    """Format the dtype of a head: `float32`, `float16` or `bfloat16`."""
    return str(next(head.parameters()).dtype).removeprefix("torch.")


def format_vllm_command(
    method: str, num_tokens: int, target: str, folder: str, **more: object
) -> str:
    """Format the command that starts vLLM with a head in a folder.

    Args:
        method: method name in vLLM.
        num_tokens: draft tokens per pass.
        target: Hub id or folder of the target.
        folder: folder of the head.
        more: further speculation settings.
    """
    speculation = {"method": method, "model": folder, "num_speculative_tokens": num_tokens, **more}
    return f"vllm serve {target} --speculative-config '{json.dumps(speculation)}'"


def format_engine_command(
    head: DraftHead,
    engine: ExportFormat,
    folder: str,
    method: str,
    num_tokens: int,
    steps: str = "",
) -> str:
    """Format the command that starts vLLM, SGLang or llama.cpp with a head, for a shell.

    Args:
        head: head, which may be attached or not.
        engine: the engine; speculators' heads are vLLM's.
        folder: folder of the head.
        method: method name in vLLM and llama.cpp, and in capitals in SGLang.
        num_tokens: draft tokens per pass.
        steps: further arguments of SGLang.
    """
    target = head.target_name
    if engine is ExportFormat.vllm:
        more: dict[str, object] = {**head.vllm_settings}
        if head.advice is not None and head.advice.schedule:
            more[SCHEDULE_KEY] = head.advice.schedule
        return format_vllm_command(method, num_tokens, target, folder, **more)
    if engine is ExportFormat.speculators:
        return f"vllm serve {folder}"
    if engine is ExportFormat.sglang:
        return (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {method.upper()} "
            f"--speculative-draft-model-path {folder} {steps}"
            f"--speculative-num-draft-tokens {num_tokens + 1}"
        )
    file = f"{folder}/{weights_name(method, target, next(head.parameters()).dtype)}"
    return serve_command(target, file, f"draft-{method}", num_tokens)


def build_speculators_section(head: DraftHead, method: str) -> dict[str, Any]:
    """Build the section of speculators' config that names method, proposals and target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": head.num_engine_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": head.target_name, "architectures": head.target.architectures}
    return {
        "algorithm": method,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": verifier,
    }


@torch.no_grad()
def compute_reference_tensors(
    head: DraftHead, target: Target, num_rows: int = 24, depth: int = 4
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Compute hidden states of one text and the head's logits on them.

    Row t at depth j has read hidden states 0..t beside tokens 0..t, and then its own outputs beside
    tokens t+1..t+j, like an engine's chain while every draft token is accepted. Positions are
    spread over the whole range, so that a wrong RoPE is noticed.

    Args:
        head: attached head in the dtype of the export.
        target: the frozen target.
        num_rows: number S of rows.
        depth: number D of depths, for a head that drafts to any depth.

    Returns:
        Tensors `token_ids` [S + D], `position_ids` [S], `hidden_states.{i}` [S, F] with i as in
        `output_hidden_states`, `ids` [R], `logits` [D, S, R], and, if needed, `logsumexp` [D, S],
        `token_embeddings` [S + D, H], `output_head` [R, F]; and metadata for the safetensors file.

    Raises:
        InputError: the head drafts with the target's output head, which is quantised or has a bias.
    """
    depth = head.max_draft_tokens or depth
    max_positions = find_max_positions(target.config)
    token_ids = _draw_tokens(target, num_rows + depth + 1)
    states = _collect_hidden_states(target, token_ids[:num_rows])
    # A block has one row more than draft tokens.
    places = torch.linspace(0, max_positions - depth - 2, num_rows, dtype=torch.float64).long()
    reference = head.compute_reference_logits(target, states, token_ids, places)
    ids = torch.arange(size := reference.logits.shape[-1])
    if size > MOST_IDS:
        spread = torch.linspace(0, size - 1, SPREAD, dtype=torch.float64).long()
        ids = torch.cat([reference.logits.topk(LIKELIEST).indices.flatten(), spread]).unique()
    tensors = {"token_ids": token_ids[1:], "position_ids": places, "ids": ids}
    # All states for a head that fuses some, so that a wrong layer is noticed.
    first = 0 if head.taps.layers else len(states) - 2
    for index, each in list(enumerate(states))[first:]:
        tensors[f"hidden_states.{index}"] = each if each.dtype is torch.bfloat16 else each.float()
    tensors |= reference.beside
    tensors["logits"] = reference.logits[..., ids]
    if reference.output_head is not None:
        tensors["output_head"] = reference.output_head[ids]
    metadata = {
        "headsmith_parity": "1",
        "kind": head.variant,
        "num_layers": str(target.num_layers),
        "max_position_embeddings": str(max_positions),
        "vocab_size": str(target.vocab_size),
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata


def _draw_tokens(target: Target, count: int) -> Tensor:
    """Draw tokens [count] int64, always the same and independent of a tokenizer."""
    size = min(target.vocab_size, len(target.embedding.weight))
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(0))


def _collect_hidden_states(target: Target, token_ids: Tensor) -> list[Tensor]:
    """Collect L + 1 hidden states [S, F]: the input of each layer, and the last hidden state.

    The inputs are read, not the outputs that taps read, so that a tap off by one is noticed. A
    layer for images only has the input of the next layer.
    """
    active = getattr(target.config, "altup_active_idx", None)
    inputs: dict[nn.Module, Tensor] = {}

    def record_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[module] = extract_hidden_state(args or kwargs["hidden_states"], active)

    with ExitStack() as undo:
        for block in target.decoder_layers:
            undo.callback(block.register_forward_pre_hook(record_input, with_kwargs=True).remove)
        ids = token_ids.unsqueeze(0).to(target.device)
        states = [target.decoder(input_ids=ids, use_cache=False).last_hidden_state]
    for block in reversed(target.decoder_layers):
        states.append(inputs[block] if block in inputs else states[-1].clone())
    return [each[0].cpu() for each in reversed(states)]
