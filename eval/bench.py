"""What both measurements start from: target, head, tree, prompts and their results file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm

from conf.provenance import provenance
from conf.schema import InputError, MeasureRun
from data.chat import encode_prompt
from data.embedded import ensure_embedded
from data.records import Record, load_records
from eval.engine import NoDraft, decode
from heads.medusa import MedusaHead
from heads.target import Target, load_target
from heads.tree import Tree, default_tree


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: `token_ids` end where the response begins."""

    category: str
    token_ids: list[int]


@dataclass(frozen=True)
class Bench:
    """A target and a head with the prompts to measure them on."""

    target: Target
    head: MedusaHead
    tree: Tree
    chain: Tree
    prompts: list[Prompt]
    data: dict[str, Any]


def open_bench(run: MeasureRun, result_name: str) -> Bench:
    """Checks what is cheap to check, then loads everything.

    Raises:
        InputError: see each part; nothing has been written when it is raised.
    """
    if run.head.path is None:
        raise InputError("head.path is unset: a folder with a trained head, or a Hub id")
    result = Path(run.out_dir) / result_name
    if result.exists():
        raise InputError(f"out_dir={run.out_dir} already holds {result_name}: choose another")
    if run.target.path is None or run.data.path is None:
        embedded = ensure_embedded()
        run.target.path = run.target.path or embedded.target_path
        run.data.path = run.data.path or embedded.prompts_path
    records = load_records(
        run.data.path, split=run.data.split, form=run.data.form, on_bad_row=run.data.on_bad_row
    )
    head = MedusaHead.load(run.head.path, run.head.revision)
    tree, chain = _trees(run, head)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(run.target, device)
    head.check_target(target)
    head.to(target.device, target.dtype).eval()
    chosen = records.records[: run.data.num_prompts]
    prompts = [_prompt(record, target) for record in chosen]
    _check_window(run, prompts, target, tree)
    data = {
        "path": run.data.path,
        "form": records.form.value,
        "sha256": records.sha256,
        "num_prompts": len(prompts),
        "num_bad": len(records.bad),
    }
    for message in records.bad:
        Console(stderr=True).print(f"skipped: {message}", highlight=False)
    return Bench(target, head, tree, chain, prompts, data)


def _trees(run: MeasureRun, head: MedusaHead) -> tuple[Tree, Tree]:
    depth = run.depth or head.num_heads
    if depth > head.num_heads:
        raise InputError(f"depth={depth}: this head drafts at most {head.num_heads} tokens")
    # Nodes are nearly free on CUDA and cost time on CPU.
    num_nodes = 32 if torch.cuda.is_available() else 8
    tree = (
        default_tree(head.num_heads, num_nodes) if run.tree is None else Tree.from_paths(run.tree)
    )
    if not 0 < tree.depth <= head.num_heads:
        raise InputError(f"tree: depth {tree.depth}, this head has depths 1..{head.num_heads}")
    return tree, Tree.chain(depth)


def _prompt(record: Record, target: Target) -> Prompt:
    """The dialogue up to its first question; later turns would need the first answer."""
    messages = record.messages or []
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise InputError(f"{record.where}: no user message to answer; measuring needs prompts")
    return Prompt(record.category, encode_prompt(messages[: users[0] + 1], target.tokenizer))


def _check_window(run: MeasureRun, prompts: Sequence[Prompt], target: Target, tree: Tree) -> None:
    window = getattr(target.config, "max_position_embeddings", None)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    needed = longest + run.max_new_tokens + tree.depth
    if window is not None and needed > window:
        raise InputError(
            f"max_new_tokens={run.max_new_tokens}: with the longest prompt of {longest} tokens "
            f"and a tree of depth {tree.depth} that is {needed}, above the target's window of "
            f"{window}; lower max_new_tokens or drop long prompts"
        )


def greedy_responses(bench: Bench, max_new_tokens: int) -> list[list[int]]:
    """The target's own greedy tokens per prompt, from the engine without drafting."""
    return [
        decode(bench.target, NoDraft(), prompt.token_ids, max_new_tokens).token_ids
        for prompt in tqdm(bench.prompts, desc="target's own text", unit="prompt")
    ]


def write_result(run: MeasureRun, name: str, result: dict[str, Any], bench: Bench) -> Path:
    """Writes `out_dir/name` whole or not at all, with what produced it."""
    result = {
        **result,
        "head": run.head.path,
        "target_dtype": str(bench.target.dtype).removeprefix("torch."),
        "device": _device_name(bench.target.device),
        "torch_threads": torch.get_num_threads(),
        "max_new_tokens": run.max_new_tokens,
        "temperature": run.temperature,
        "tree": list(bench.tree.parents),
        **provenance(run, bench.target.name, bench.data),
    }
    path = Path(run.out_dir) / name
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(result, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"out_dir={run.out_dir}: cannot write {name}: {error}") from error
    return path


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
