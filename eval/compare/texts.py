"""Texts of methods beside each other: where they part, and how each token was obtained."""

from typing import Any

import torch

from eval.compare.methods import Method
from eval.compare.names import VANILLA
from eval.compare.timing import PromptRun
from eval.decode.engine import Generation, common_prefix
from eval.measure.bench import Bench
from eval.measure.prompts import Prompt
from heads.target_model.model import Target


def lossless(bench: Bench, methods: dict[str, Method], found: list[PromptRun]) -> dict[str, Any]:
    """How many greedy texts are those of plain decoding under every method, and where not."""
    divergences = []
    for index, run in enumerate(found):
        expected = run.runs[VANILLA][0].token_ids
        for name in methods:
            text = run.runs[name][0].token_ids
            if text != expected:
                where = _divergence(bench.target, run.prompt, expected, text)
                divergences.append({"prompt": index, "method": name, **where})
    differing = {found["prompt"] for found in divergences}
    return {
        "num_prompts": len(found),
        "num_equal": len(found) - len(differing),
        "first_divergences": divergences,
    }


@torch.no_grad()
def _divergence(
    target: Target, prompt: Prompt, expected: list[int], text: list[int]
) -> dict[str, Any]:
    """Where two texts part, and by how much the target preferred its choice there."""
    position = common_prefix(expected, text)
    output = target.read_text(prompt.token_ids + expected[:position])
    best, second = target.logits(output.hidden_states[0, -1]).float().topk(2).values.tolist()
    return {"position": position, "top2_margin": best - second}


def texts_shown(
    target: Target, methods: dict[str, Method], found: list[PromptRun], num_texts: int
) -> list[dict[str, Any]]:
    """The texts of some prompts, spread over the categories, for the report."""
    drafting = [
        name
        for name in methods
        if name == VANILLA or any(sum(run.runs[name][0].drafted) for run in found)
    ]
    return [
        _coloured(index, run, drafting, target)
        for index, run in enumerate(_spread(found, num_texts))
    ]


def _spread(found: list[PromptRun], num_texts: int) -> list[PromptRun]:
    """Prompts to show: the first of each category in turn."""
    by_category: dict[str, list[PromptRun]] = {}
    for run in found:
        by_category.setdefault(run.prompt.category, []).append(run)
    longest = max(map(len, by_category.values()))
    rounds = [m[place] for place in range(longest) for m in by_category.values() if place < len(m)]
    return rounds[:num_texts]


def _coloured(index: int, run: PromptRun, methods: list[str], target: Target) -> dict[str, Any]:
    """A prompt's texts with the depth at which each token was accepted, 0 for the target's own."""
    texts, prompt = {}, run.prompt
    for name in methods:
        text = run.runs[name][0]
        pieces = _pieces(target.tokenizer, text.token_ids)
        texts[name] = list(zip(pieces, _origins(text), strict=True))
    return {
        "prompt": index,
        "category": prompt.category,
        "turn": prompt.turn,
        "question": prompt.question,
        "methods": texts,
    }


def _origins(text: Generation) -> list[int]:
    # The prompt's pass gives one token, or more where transformers drafts in it.
    num_first = len(text.token_ids) - sum(step.num_emitted for step in text.steps)
    depths = [*range(1, num_first), 0]
    for step in text.steps:
        depths += [*range(1, step.num_accepted + 1), 0][: step.num_emitted]
    return depths


def _pieces(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """What each token adds to the text; a character split over tokens goes to its last one."""
    pieces, shown = [], ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end])
        whole = end == len(token_ids) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        grown = text if whole and text.startswith(shown) else shown
        pieces.append(grown[len(shown) :])
        shown = grown
    return pieces
