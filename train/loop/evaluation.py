"""Evaluate a head during training: held-out losses by depth and position, and tau by replay.

The target answers a few held-out prompts once, greedily. Each evaluation then costs one forward
pass of the head per depth over these answers. It is an exact replay.

Letters: K terms, L metrics, R ranges of positions, n answer tokens, S tokens of prompt and answer.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from data.features.store_format import HIDDEN_STATES, LAYER_PREFIX
from data.features.store_reader import StoredDataset, dequantize_batch
from data.prepared.packing import PackedDataset
from eval.measure.acceptance_stats import (
    FEWEST_DIALOGUES,
    PromptSteps,
    Ratio,
    alpha,
    compare_tau_sums,
    compute_tau,
    compute_tau_interval,
    format_interval,
    sum_by_dialogue,
    tau,
)
from eval.measure.engine_answers import AnswerSource
from eval.measure.replay import rank_candidates, replay_tree
from heads.decoding.tree import Tree
from heads.draft_head import DraftHead
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import FeatureLayers, TargetOutput
from train.batch.batch import Batch
from train.batch.data_loader import Dataset, batch_to_device, stack_sequences
from train.objective import Objective
from train.parallel import processes
from train.parallel.strategies import ParallelStrategy

EDGES = torch.tensor([1 << 10, 1 << 12, 1 << 14, 1 << 16])
RANGES = ("0-1k", "1k-4k", "4k-16k", "16k-64k", "64k-")
"""Ranges of document positions for which accuracies are reported."""
MAX_PROMPT_TOKENS = 256
MAX_REPLAY_TOKENS = 64
TEXT_PROMPT_TOKENS = 32
NUM_PROMPTS, INTERVAL = "tau_prompts", ("tau_low", "tau_high")
"""Figures beside `tau`: prompts that it rests on, and its 95% interval, of two prompts or more."""


class HeldoutFigures(NamedTuple):
    """Figures of a head on held-out data.

    Attributes:
        figures: figures by name.
        texts: emitted tokens and verify passes of each replayed text, on rank 0; empty where every
            evaluation replays other texts.
    """

    figures: dict[str, float]
    texts: Sequence[Ratio] = ()


Evaluate = Callable[[Any], HeldoutFigures]
"""Function that evaluates a head in eval mode."""


@torch.no_grad()
def evaluate_heldout(
    placement: ParallelStrategy,
    objective: Objective,
    heldout: Dataset,
    extra_evaluate: Evaluate | None,
    step: int,
) -> HeldoutFigures:
    """Evaluate on held-out data: loss and metrics per depth, also by range of positions.

    Args:
        placement: strategy that holds the head, and its averaged weights if kept.
        objective: objective of the run.
        heldout: packed sequences.
        extra_evaluate: function of the head that gives further figures, called on rank 0 only.
        step: optimizer steps done.

    Returns:
        Figures on all processes. Empty, with a message, if the evaluation failed on any process.
    """
    accelerator = placement.accelerator
    shape = (len(RANGES), 2 + len(objective.metric_names), len(objective.term_weights))
    sums, failed = torch.zeros(shape, device=accelerator.device), 1.0
    extra = HeldoutFigures({})
    objective.eval()
    with placement.open_averaged_weights():
        try:
            _add_sums(sums, placement, objective, heldout)
            if accelerator.is_main_process and extra_evaluate is not None:
                extra = extra_evaluate(objective.head)
            failed = 0.0
        except Exception as error:  # noqa: BLE001  what only measures ends no run
            frame = "".join(traceback.format_tb(error.__traceback__)[-1:]).strip()
            tqdm.write(
                f"step {step}: the evaluation failed in process {accelerator.process_index}, "
                f"training goes on without its figures: {type(error).__name__}: {error}\n{frame}",
                file=sys.stderr,
            )
    objective.train()
    processes.wait_for_processes()  # rank 0 measures more than the others
    packed = torch.cat([sums.new_tensor([failed]), sums.flatten()])
    packed = accelerator.reduce(packed, reduction="sum")
    if packed[0] > 0:
        return HeldoutFigures({})
    sums = packed[1:].view_as(sums)
    named = compute_metrics("eval", sums.sum(0), objective.term_weights, objective)
    ranges = {name: each for name, each in zip(RANGES, sums, strict=True) if each[1].any()}
    for name, range_sums in ranges.items() if len(ranges) > 1 else ():
        means = compute_metrics(f"eval/{name}", range_sums, objective.term_weights, objective)
        named |= {key: value for key, value in means.items() if "loss" not in key}
    named |= {f"eval/{name}": value for name, value in extra.figures.items()}
    return HeldoutFigures(named, extra.texts)


@dataclass(frozen=True)
class KeptHead:
    """Choice of the step whose head a run leaves, and the evaluation to compare others with.

    Attributes:
        step: optimizer steps of the kept head.
        figures: figures of its evaluation, by name with the prefix `eval/`.
        why: reason, for people.
        best_step: step of the largest tau.
        best_texts: emitted tokens and verify passes of each held-out text at that step.
    """

    step: int
    figures: dict[str, float]
    why: str
    best_step: int
    best_texts: Sequence[Ratio]


def choose_kept_head(kept: KeptHead | None, step: int, evaluated: HeldoutFigures) -> KeptHead:
    """Choose between the kept head and the head of a later step.

    The later step wins unless its tau is below the best so far, with a paired 95% interval below 0
    over at least `FEWEST_DIALOGUES` texts. Every step is compared with the best, so that a slow
    decline is noticed as well.

    Args:
        kept: earlier choice; None before the first evaluation. A choice by other held-out texts,
            which a run that goes on may have, does not count.
        step: optimizer steps of the later head.
        evaluated: its figures, with replayed texts.
    """
    texts, figures = evaluated.texts, evaluated.figures
    own, num_texts = compute_tau(texts), len(texts)
    # Every head emits the whole text, so other numbers of tokens are of other texts.
    if kept is None or [n for n, _ in kept.best_texts] != [n for n, _ in texts]:
        return KeptHead(step, figures, f"its tau, {own:.3f}, is the first", step, texts)
    change, interval = compare_tau_sums(kept.best_texts, texts, seed=0)
    if change >= 0:
        return KeptHead(step, figures, f"its tau, {own:.3f}, is the largest", step, texts)
    best = f"that of step {kept.best_step}, {compute_tau(kept.best_texts):.3f}"
    difference = f"({change:+.3f}, 95% interval {format_interval(interval, 3, ' to ')})"
    if interval is None or num_texts < FEWEST_DIALOGUES:
        why = f"{num_texts} texts cannot tell its tau, {own:.3f}, from {best}"
    elif interval[1] < 0:
        below = f"the tau of step {step}, {own:.3f}, is below {best} {difference}"
        return replace(kept, why=below)
    else:
        why = f"its tau, {own:.3f}, is as good as {best} {difference}"
    return replace(kept, step=step, figures=figures, why=why)


def _add_sums(
    sums: Tensor, placement: ParallelStrategy, objective: Objective, heldout: Dataset
) -> None:
    """Add this process's part of the held-out sums to `sums` [R, 2 + L, K], by position range."""
    config, accelerator = placement.config, placement.accelerator
    weights = objective.term_weights.to(accelerator.device)
    last = min(len(heldout), config.num_eval_sequences)
    indices = list(range(accelerator.process_index, last, accelerator.num_processes))
    begins = range(0, len(indices), config.micro_batch_size)
    is_silent = not accelerator.is_main_process
    for begin in tqdm(begins, "held-out losses", leave=None, disable=is_silent, unit="batch"):
        rows = stack_sequences(heldout, indices[begin : begin + config.micro_batch_size])
        loss_mask = rows["loss_mask"]
        ranges = torch.bucketize(rows["position_ids"], EDGES, right=True)
        batch: Batch = {}
        for number in ranges[loss_mask].unique().tolist():
            indexed = objective.index_batch({**rows, "loss_mask": loss_mask & (ranges == number)})
            if batch:  # the states are there already
                new = {k: v for k, v in indexed.items() if k not in rows or k == "loss_mask"}
                batch = {**batch, **batch_to_device(new, accelerator.device)}
            else:
                batch = objective.prepare_batch(batch_to_device(indexed, accelerator.device))
            # `forward` skips the hooks of a strategy, which wait for processes without a batch.
            sums[number] += objective.forward(batch, weights).terms


def compute_metrics(
    prefix: str, sums: Tensor, weights: Tensor, objective: Objective
) -> dict[str, float]:
    """Compute means by name: the loss, and the loss and metrics of each depth.

    Args:
        prefix: prefix of the names.
        sums: [2 + L, K] losses, supervised tokens and L metrics.
        weights: [K] weights of the losses.
        objective: objective with the names of the metrics and the first depth.
    """
    means = sums / sums[1].clamp_min(1)
    named = {f"{prefix}/loss": float((weights.to(means) * means[0]).sum())}
    for row, name in ((0, "loss"), *enumerate(objective.metric_names, start=2)):
        for depth, value in enumerate(means[row].tolist(), start=objective.first_depth):
            named[f"{prefix}/{name}_d{depth}"] = value
    return named


def format_figures(figures: Mapping[str, float]) -> str:
    """Format the figures of an evaluation as a line, tau with its prompts and interval.

    Figures by position appear in the file only.
    """
    named = {name.removeprefix("eval/"): value for name, value in figures.items()}
    beside = {NUM_PROMPTS, *INTERVAL}
    return ", ".join(
        f"{name} {value:.3f}" + (f" ({format_basis(named)})" if name == "tau" else "")
        for name, value in named.items()
        if "/" not in name and name not in beside
    )


def format_basis(figures: Mapping[str, float]) -> str:
    """Format what a tau rests on: `16 prompts, 95% interval 1.21-1.40`."""
    text = format_count(int(figures[NUM_PROMPTS]))
    if INTERVAL[0] not in figures:
        return text
    return f"{text}, 95% interval {format_interval([figures[name] for name in INTERVAL])}"


def format_count(num_prompts: int) -> str:
    """Format a number of prompts."""
    return f"{num_prompts} prompt{'' if num_prompts == 1 else 's'}"


@dataclass
class Replay:
    """Replay of a chain of draft tokens over the target's own answers.

    Attributes:
        prompts: token ids up to the start of the answer.
        depth: draft tokens of the chain.
        load_answers: function that gives, at the first use, the answer [n] to each prompt and the
            target's states of prompt and answer.
    """

    prompts: list[list[int]]
    depth: int
    load_answers: Callable[[], list[tuple[list[int], TargetOutput]]]

    @cached_property
    def answers(self) -> list[tuple[list[int], TargetOutput]]:
        """Return the answers and the target's states, see `load_answers`."""
        return self.load_answers()

    def __call__(self, head: DraftHead) -> HeldoutFigures:
        """Compute `tau`, its number of prompts and 95% interval, and `greedy_alpha_d1`.."""
        chain = Tree.make_chain(self.depth)
        steps: list[PromptSteps] = []
        answered = list(zip(self.prompts, self.answers, strict=True))
        for prompt, (answer, output) in tqdm(answered, "held-out tau", leave=None, unit="prompt"):
            ranked = rank_candidates(head, chain, output, prompt, answer)
            passes = replay_tree(chain, ranked, answer)
            steps.append(PromptSteps("heldout", passes, dialogue=len(steps)))
        figures = {"tau": tau(steps), NUM_PROMPTS: float(len(steps))}
        if (interval := compute_tau_interval(steps, seed=0)) is not None:
            figures |= dict(zip(INTERVAL, interval, strict=True))
        rates = alpha(steps, chain.depth)
        figures |= {f"greedy_alpha_d{d}": rate for d, rate in enumerate(rates, start=1)}
        return HeldoutFigures(figures, sum_by_dialogue([each.build_row() for each in steps]))


def make_heldout_replay(
    texts: AnswerSource, prompts: list[list[int]], depth: int, taps: FeatureLayers
) -> Replay:
    """Make a replay over answers that the target writes at the first use, decoding each once."""
    answer = partial(texts.answer_with_states, prompts, MAX_REPLAY_TOKENS, taps)
    return Replay(prompts, depth, answer)


def make_stored_replay(
    target: EmbeddingsAndOutputHead,
    stored: StoredDataset,
    num_prompts: int,
    depth: int,
    taps: FeatureLayers,
) -> Replay:
    """Make a replay over the answers in the split `replay` of a feature store.

    States [1, S - 1, D] are of all tokens but the last; a state not stored is empty.
    """
    rows = [stored.load_sequence(index) for index in range(min(num_prompts, len(stored)))]

    def load_answer(row: dict[str, Tensor]) -> tuple[list[int], TargetOutput]:
        states = {
            name: tensor[None, :-1].to(target.device, target.dtype)
            for name, tensor in dequantize_batch(row).items()
            if name == HIDDEN_STATES or name.startswith(LAYER_PREFIX)
        }
        layers = {index: states[f"{LAYER_PREFIX}{index}"] for index in taps.layers}
        empty = next(iter(states.values()))[..., :0]
        answer = row["input_ids"][row["loss_mask"]].tolist()
        return answer, TargetOutput(states.get(HIDDEN_STATES, empty), layers)

    prompts = [row["input_ids"][~row["loss_mask"]].tolist() for row in rows]
    return Replay(prompts, depth, lambda: list(map(load_answer, rows)))


def select_heldout_prompts(heldout: PackedDataset, num_prompts: int) -> list[list[int]]:
    """Select the first prompts of held-out documents.

    Args:
        heldout: packed sequences.
        num_prompts: largest number of prompts; prompts of more than 256 tokens are skipped.
    """
    prompts = (prompt for index in range(len(heldout)) for prompt in iter_prompts(heldout[index]))
    short = (prompt for prompt in prompts if len(prompt) <= MAX_PROMPT_TOKENS)
    return list(islice(short, num_prompts))


def iter_prompts(row: Mapping[str, Tensor]) -> Iterator[list[int]]:
    """Yield the tokens before the first supervised token of each document of a packed sequence.

    A plain text is supervised from its first token, so its first 32 tokens serve as prompt.
    """
    num_tokens = row["document_ids"].add(1).bincount()[1:].tolist()  # -1 is padding
    begin = 0
    for end in accumulate(num_tokens):
        ids, learnt = row["input_ids"][begin:end], row["loss_mask"][begin:end]
        begin = end
        length = int(learnt.int().argmax()) or min(TEXT_PROMPT_TOKENS, len(ids))
        yield ids[:length].tolist()
