"""What both measurements start from: target, head, tree, prompts and their results file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from eval.accept import Sampling
from eval.eagle import DynamicShape, EagleChain, EagleTree
from eval.engine import Drafter, NoDraft, decode
from eval.medusa import MedusaDrafter
from heads.eagle import EagleHead
from heads.load import Head, load_head
from heads.target import Target, load_target
from heads.tree import Tree, default_tree

EAGLE_DEPTH = 5


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: `token_ids` end where the response begins."""

    category: str
    token_ids: list[int]


@dataclass(frozen=True)
class Bench:
    """A target and a head with the prompts to measure them on.

    Attributes:
        tree: Medusa's static tree, or the shape of EAGLE's dynamic ones.
        chain: one candidate per depth.
        sampling: how tokens are chosen.
        data: where the prompts came from, for the results file.
    """

    target: Target
    head: Head
    tree: Tree | DynamicShape
    chain: Tree
    prompts: list[Prompt]
    sampling: Sampling
    data: dict[str, Any]

    @property
    def tree_name(self) -> str:
        """The key of the tree's figures."""
        return "static_tree" if isinstance(self.tree, Tree) else "dynamic_tree"

    @property
    def family(self) -> str:
        """What the head's methods are named after."""
        return "eagle" if isinstance(self.head, EagleHead) else "medusa"

    def drafter(self, kind: str, seed: int) -> Drafter:
        """A fresh drafter, `chain` or `tree`; `seed` is that of the text."""
        if isinstance(self.head, EagleHead):
            if isinstance(self.tree, DynamicShape) and kind == "tree":
                return EagleTree(self.head, self.tree)
            # What a sampled chain draws must not follow what the target draws.
            return EagleChain(self.head, self.chain.depth, self.sampling, seed + (1 << 32))
        assert isinstance(self.tree, Tree)
        return MedusaDrafter(self.head, self.tree if kind == "tree" else self.chain)


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
    head = load_head(run.head.path, run.head.revision, run.head.layers)
    tree, chain = _trees(run, head)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(run.target, device)
    head.attach(target, target.dtype).eval()
    chosen = records.records[: run.data.num_prompts]
    prompts = [_prompt(record, target) for record in chosen]
    _check_window(run, prompts, target, max(tree.depth, chain.depth))
    data = {
        "path": run.data.path,
        "form": records.form.value,
        "sha256": records.sha256,
        "num_prompts": len(prompts),
        "num_bad": len(records.bad),
    }
    for message in records.bad:
        Console(stderr=True).print(f"skipped: {message}", highlight=False)
    sampling = Sampling(run.temperature, run.top_p, run.top_k)
    return Bench(target, head, tree, chain, prompts, sampling, data)


def _trees(run: MeasureRun, head: Head) -> tuple[Tree | DynamicShape, Tree]:
    if isinstance(head, EagleHead):
        if run.tree is not None:
            raise InputError("tree: an EAGLE head drafts dynamic trees; set dynamic_tree.*")
        return _dynamic_shape(run), Tree.chain(run.depth or EAGLE_DEPTH)
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


def _dynamic_shape(run: MeasureRun) -> DynamicShape:
    depth, top_k, num_tokens = (8, 10, 59) if torch.cuda.is_available() else (5, 4, 8)
    config = run.dynamic_tree
    return DynamicShape(
        config.depth or depth, config.top_k or top_k, config.num_tokens or num_tokens
    )


def _prompt(record: Record, target: Target) -> Prompt:
    """The dialogue up to its first question; later turns would need the first answer."""
    messages = record.messages or []
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise InputError(f"{record.where}: no user message to answer; measuring needs prompts")
    return Prompt(record.category, encode_prompt(messages[: users[0] + 1], target.tokenizer))


def _check_window(run: MeasureRun, prompts: Sequence[Prompt], target: Target, depth: int) -> None:
    window = getattr(target.config, "max_position_embeddings", None)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    needed = longest + run.max_new_tokens + depth
    if window is not None and needed > window:
        raise InputError(
            f"max_new_tokens={run.max_new_tokens}: with the longest prompt of {longest} tokens "
            f"and drafts of depth {depth} that is {needed}, above the target's window of "
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
        "top_p": run.top_p,
        "top_k": run.top_k,
        "tree": _described(bench.tree),
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


def _described(tree: Tree | DynamicShape) -> list[int] | dict[str, int]:
    return list(tree.parents) if isinstance(tree, Tree) else asdict(tree)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
