"""Makes the logits of a trained head cheaper, and measures tau before and after.

`python scripts/prune.py head.path=outputs/eagle3/head data.path=chats.jsonl sizes=[8192,16384]`
writes heads with a smaller draft vocabulary; `ranks=[256,512]` shows the effect of `output_rank`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.errors import InputError
from conf.files import check_empty_folder, load_json, write_atomically
from conf.settings.scripts import PruneRun
from eval.preflight_checks import check_inputs


def check_prune(config: PruneRun) -> None:
    """Refuse a run without a head or sizes, missing data, and an earlier result.

    Raises:
        InputError: names the setting and its allowed values.
    """
    if config.head.path is None:
        raise InputError("head.path is unset; type a folder with a trained head, or a Hub id")
    if not config.sizes and not config.ranks:
        raise InputError(
            "sizes=[]: names nothing to do; type how many ids pruned heads draft, e.g. "
            "sizes=[8192,16384], or set ranks"
        )
    check_empty_folder(config.out_dir)
    check_inputs(config)


COMMAND = Command(__doc__, PruneRun, "prune", check=check_prune)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import json
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

from conf.command.run_record import collect_provenance
from data.embedded import fill_default_paths
from data.features.store_format import HIDDEN_STATES
from data.prepared.packing import PackedDataset
from data.prepared.prepare import prepare_datasets
from data.rows.row_digests import PROMPTS_FILE
from eval.decode.generation_config import try_generation_config
from eval.measure.acceptance_stats import (
    PromptSteps,
    alpha,
    compute_tau_interval,
    format_interval,
    tau,
)
from eval.measure.measured_head import get_device_name
from eval.measure.measurement import join_processes, print_notes
from eval.measure.prompts import Prompt, check_prompt
from eval.measure.replay import rank_candidates, replay_tree
from eval.measure.target_answers import generate_greedy_answers
from eval.report.plots import plot_pruning
from eval.tune.step_costs import measure_step_costs
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree
from heads.draft_head import DraftHead, check_depth
from heads.folders import PROVENANCE, locate_head
from heads.kinds import load_head
from heads.layers.fast_linear import check_rank, pack_weights, reduce_rank
from heads.target_model.identity import format_target_change, identify_target
from heads.target_model.load import load_target
from heads.target_model.model import FeatureLayers, Target
from heads.vocab import DraftVocab, compute_covered_fraction
from train.batch.batch import SUPERVISION, add_supervision, add_target_states
from train.batch.data_loader import batch_to_device
from train.loop.evaluation import select_heldout_prompts

ROWS_PER_CHUNK = 256
RESULT = "prune.json"
PromptAnswer = tuple[list[int], list[int]]
"""Token ids of a held-out prompt, and of the target's own greedy text after it."""


def main(config: PruneRun) -> None:
    """Print a table; write `{size}/head` for each size, `prune.json` and `prune.png`."""
    check_prune(config)
    folder = locate_head(str(config.head.path), config.head.revision)
    trained = load_json(folder / PROVENANCE) or {}
    head = load_head(str(folder), layers=config.head.layers)
    check_depth(config.depth, head.max_draft_tokens)
    if config.sizes and head.pruning_problem is not None:
        raise InputError(f"head.path={config.head.path}: {head.pruning_problem}")
    depth = config.depth or head.default_depth
    check_sizes(config.sizes, head.vocab, [])
    state = join_processes()
    if state.num_processes > 1:
        raise InputError(
            f"{state.num_processes} processes: pruning needs one; start it without accelerate "
            "launch"
        )
    fill_default_paths(config)
    target = load_target(config.target, state.device)
    identity = identify_target(config.target, target.tokenizer, target.dtype)
    print_notes(
        try_generation_config(target),
        format_target_change("head.path", str(config.head.path), config.head.revision, identity),
    )
    # Still float32: saved weights must not be rounded to the target's dtype.
    head.attach(target)
    check_sizes(config.sizes, head.vocab, target.special_ids)
    for rank in config.ranks:
        check_rank("ranks", rank, target)
    # Split as in training.
    train, heldout, report = prepare_datasets(config.data, target.tokenizer, config.seed)
    print("\n".join(report.format_lines()))
    for data in (train, heldout):
        data.check_token_ids(target)
    answers = answer_heldout_prompts(config, target, heldout)
    counts = count_target_choices(target, train, config.num_sequences)
    vocabs = [head.vocab.choose_subset(counts, n, target.special_ids) for n in config.sizes]
    heads = [head.prune_vocab(vocab) for vocab in vocabs]
    heads += [load_head(str(folder), layers=config.head.layers) for _ in (*config.ranks, head)]
    ranks: list[int | None] = [*[None for _ in vocabs], *config.ranks, None]
    costs = [
        attach_for_measuring(one, target, rank) for one, rank in zip(heads, ranks, strict=True)
    ]
    pack_weights(target.model, target.output_head, *heads)
    measured = measure_heads(target, heads, answers, depth)
    rows = [
        {"coverage": compute_covered_fraction(counts, one.vocab.to("cpu")), **cost, **row}
        for one, cost, row in zip(heads, costs, measured, strict=True)
    ]
    result = {
        "head": config.head.path,
        "depth": depth,
        "before": rows[-1],
        "pruned": rows[: len(vocabs)],
        "low_rank": rows[len(vocabs) : -1],
        "num_prompts": len(answers),
        "num_tokens": sum(len(text) for _, text in answers),
        "num_counted": int(counts.sum()),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "device": get_device_name(),
        "torch_threads": torch.get_num_threads(),
        **collect_provenance(config, target.name, report),
    }
    print_rows(result, Console())
    write_results(config, result, [head.prune_vocab(vocab) for vocab in vocabs], trained)


def check_sizes(sizes: Sequence[int], vocab: DraftVocab, special: Sequence[int]) -> None:
    """Refuse sizes above the head's own, and sizes without room for special tokens.

    Args:
        sizes: numbers of ids, rising.
        vocab: draft vocabulary of the head.
        special: special ids, which every pruned head keeps.

    Raises:
        InputError: a size is not allowed.
    """
    least, most = max(1, len(vocab.filter_ids(special))), len(vocab.ids)
    if sizes and not least <= sizes[0] <= sizes[-1] <= most:
        raise InputError(
            f"sizes={list(sizes)}: this head drafts {most} ids; allowed: {least} to {most}, "
            "including its special and end tokens"
        )


def answer_heldout_prompts(
    config: PruneRun, target: Target, heldout: PackedDataset
) -> list[PromptAnswer]:
    """Let the target answer held-out prompts greedily.

    Raises:
        InputError: no prompt is short enough, or the answer would not fit the target's window.
    """
    chosen = select_heldout_prompts(heldout, config.num_replay_prompts)
    if not chosen:
        raise InputError(
            "data: every held-out prompt is longer than 256 tokens; name other prompts with "
            "data.eval_path"
        )
    for token_ids in chosen:
        prompt = Prompt("heldout", token_ids, location="a held-out prompt")
        check_prompt(target, prompt, config.max_new_tokens)
    texts = generate_greedy_answers(target, chosen, config.max_new_tokens)
    return list(zip(chosen, texts, strict=True))


@torch.no_grad()
def count_target_choices(target: Target, data: PackedDataset, num_sequences: int) -> Tensor:
    """Count how often each id is the target's first choice, along the answers of the data.

    A draft token is accepted if it is the target's choice, not the data's. Of 4,096 ids, 1,024
    chosen this way kept tau 3.41 of 3.49 on an 8M-parameter target; 1,024 chosen by the tokens of
    the answers kept 3.34. Text that the target writes freely gives about the same (3.45), but takes
    ten times as long per counted token.

    Args:
        target: target model.
        data: packed sequences.
        num_sequences: most sequences to read.

    Returns:
        [V] int64, on the CPU.
    """
    counts = torch.zeros(target.vocab_size, dtype=torch.int64, device=target.device)
    chosen = range(min(num_sequences, len(data)))
    for index in tqdm(chosen, desc="target's choices", unit="sequence"):
        row = {name: values.unsqueeze(0) for name, values in data[index].items()}
        batch = batch_to_device(add_supervision(row, 0), target.device)
        hidden = add_target_states(target, batch, FeatureLayers())[HIDDEN_STATES][0]
        for states in hidden[batch[SUPERVISION].token_indices].split(ROWS_PER_CHUNK):
            best = target.compute_logits(states).argmax(-1)
            counts.index_add_(0, best, torch.ones_like(best))
    return counts.cpu()


def measure_heads(
    target: Target, heads: Sequence[DraftHead], answers: Sequence[PromptAnswer], depth: int
) -> list[dict[str, Any]]:
    """Measure tau of each head on the same text, and the cost of a draft.

    `speedup` is the speed-up of greedy decoding, one text at a time, over the same engine without
    drafts, as expected from tau and the times of a draft and a verify pass.
    """
    chain = Tree.make_chain(depth)
    texts = sorted((prompt + text for prompt, text in answers), key=len)
    drafters = {index: head.make_drafter(chain, GREEDY, [0]) for index, head in enumerate(heads)}
    curve, seconds = measure_step_costs(
        target, drafters, texts[len(texts) // 2], sizes=(depth + 1,)
    )
    passes: list[list[PromptSteps]] = [[] for _ in heads]
    for number, (prompt, text) in enumerate(tqdm(answers, desc="replay", unit="prompt")):
        # Once for all heads.
        output = target.encode_response(prompt, text, heads[0].taps)
        for head, prompts in zip(heads, passes, strict=True):
            ranked = rank_candidates(head, chain, output, prompt, text)
            steps = replay_tree(chain, ranked, text)
            prompts.append(PromptSteps("heldout", steps, dialogue=number))
    return [
        {
            "tau": tau(prompts),
            "tau_ci95": compute_tau_interval(prompts, seed=0),
            "alpha": alpha(prompts, depth),
            "draft_s": seconds[index],
            "speedup": tau(prompts)
            * curve.estimate_seconds(1)
            / (seconds[index] + curve.estimate_seconds(depth + 1)),
        }
        for index, prompts in enumerate(passes)
    ]


def attach_for_measuring(
    head: DraftHead, target: Target, rank: int | None
) -> dict[str, int | None]:
    """Attach a head for measuring, and count the bytes that drafting a token reads.

    Args:
        head: head that gets the target's dtype, and low-rank output heads.
        target: target that lends its output head to a head without one.
        rank: rank of the output heads (`heads.layers.fast_linear`); None keeps them as they are.

    Returns:
        Ids, rank, and bytes of weights without embeddings.
    """
    head.attach(target, target.dtype).eval()
    outputs = head.find_output_heads() or [target.output_head.weight]
    looked_up = [module.weight for module in head.modules() if isinstance(module, nn.Embedding)]
    beside = {id(weight) for weight in (*outputs, *looked_up)}
    read = sum(weight.nbytes for weight in head.parameters() if id(weight) not in beside)
    if rank is None:
        read += sum(weight.nbytes for weight in outputs)
    else:
        read += sum(low.read_bytes for low in reduce_rank(head, target, rank))
    return {"num_ids": len(head.vocab.ids), "rank": rank, "weight_bytes": read}


def print_rows(result: dict[str, Any], console: Console) -> None:
    """Print the rows as a table; the last one is the original head."""
    counted = f"{result['num_prompts']} prompts, {result['num_counted']:,} tokens counted"
    table = Table(title=f"Cheaper logits ({counted})")
    for column in (
        "ids", "rank", "coverage", "tau", "95% interval", "MB read", "draft ms", "speed-up",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in (*result["pruned"], *result["low_rank"], result["before"]):
        table.add_row(
            f"{row['num_ids']:,}", f"{row['rank'] or ''}", f"{row['coverage']:.2%}",
            f"{row['tau']:.3f}", format_interval(row["tau_ci95"]),
            f"{row['weight_bytes'] / 1e6:.1f}",
            f"{1000 * row['draft_s']:.2f}", f"{row['speedup']:.2f}",
        )  # fmt: skip
    console.print(table)


def write_results(
    config: PruneRun, result: dict[str, Any], heads: Sequence[DraftHead], trained: dict[str, Any]
) -> None:
    """Write the heads, then the picture and the figures.

    Args:
        config: settings of the command.
        result: contents of `prune.json`.
        heads: pruned heads of these rows, with trained weights.
        trained: training record of the pruned head; empty if none exists.

    Raises:
        InputError: the disk is full or not writable.
    """
    out_dir = Path(config.out_dir)
    path = out_dir / RESULT
    prompts = load_json(locate_head(str(config.head.path), config.head.revision) / PROMPTS_FILE)
    documents = {} if prompts is None else {PROMPTS_FILE: prompts}
    before = {name: result["before"][name] for name in ("num_ids", "tau")}
    facts = {key: value for key, value in result.items() if key not in ("before", "pruned")}
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for head, row in zip(heads, result["pruned"], strict=True):
            provenance = {**trained, "pruned": {**facts, **row, "before": before}}
            head.save(out_dir / str(row["num_ids"]) / "head", provenance, documents)
        plot_pruning(result, path.with_suffix(".png"))
        write_atomically(path, json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"out_dir={out_dir}: cannot be written: {error}") from error
    print(f"wrote {path}, {path.with_suffix('.png')} and {out_dir}/SIZE/head")


if __name__ == "__main__":
    COMMAND.run(main)
