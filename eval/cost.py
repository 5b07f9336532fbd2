"""What a verify pass over n tokens and a draft cost on this machine."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from conf.schema import InputError
from eval.accept import GREEDY, Noise, judge
from eval.draft import Draft
from eval.engine import Drafter, Seen
from heads.cache import TreeCache
from heads.target import Reads, Target
from heads.tree import Tree

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Tokens of a pass that are timed; between them a straight line is drawn."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a verify pass by the tokens of one text that it checks.

    Attributes:
        device: what it was measured on.
        sizes: tokens per text, rising.
        seconds: per size.
        batch_size: texts of the pass.
        context: tokens in the cache of each.
    """

    device: str
    sizes: list[int]
    seconds: list[float]
    batch_size: int = 1
    context: int = 0

    def at(self, num_tokens: float) -> float:
        """Seconds for any number of tokens, in a straight line beyond the last size too."""
        if num_tokens <= self.sizes[-1] or len(self.sizes) == 1:
            return float(np.interp(num_tokens, self.sizes, self.seconds))
        (a, b), (s, t) = self.sizes[-2:], self.seconds[-2:]
        return t + (num_tokens - b) * max(t - s, 0.0) / (b - a)

    def described(self) -> dict[str, object]:
        """For a results file, and what `load_curve` reads."""
        return asdict(self)


def load_curve(path: str) -> CostCurve:
    """A curve recorded elsewhere: JSON with `device`, `sizes` and `seconds`.

    Raises:
        InputError: not such a file.
    """
    try:
        found = json.loads(Path(path).read_text())
        sizes, seconds = [int(n) for n in found["sizes"]], [float(s) for s in found["seconds"]]
        device = str(found["device"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"curve={path}: not a cost curve ({type(error).__name__}: {error}); allowed: JSON "
            "with device, sizes and seconds"
        ) from None
    if sizes != sorted(set(sizes)) or len(sizes) != len(seconds) or min(seconds, default=0) <= 0:
        raise InputError(
            f"curve={path}: sizes {sizes} must rise, with one time above 0 each, found {seconds}"
        )
    return CostCurve(device, sizes, seconds, 1, int(found.get("context", 0)))


@torch.no_grad()
def verify_curve(
    target: Target,
    prompt_ids: list[int],
    device: str,
    batch_size: int = 1,
    sizes: Sequence[int] = SIZES,
    num_repeats: int = 9,
) -> CostCurve:
    """Medians of passes over trees of every size, sizes interleaved.

    A pass is all that the engine does between a draft and the tokens kept: layout, target,
    output head, the greedy rule and the one wait.

    Args:
        target: the target.
        prompt_ids: the context of every text.
        device: its name.
        batch_size: texts checked together.
        sizes: tokens per text, the root included.
        num_repeats: timed passes per size.
    """
    cache = _prefilled(target, prompt_ids, batch_size)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in tqdm(range(num_repeats + 2), desc=f"pass times, batch {batch_size}", leave=False):
        for size in sizes:
            started = time.perf_counter()
            _verify(target, cache, prompt_ids[-1], size)
            if repeat >= 2:  # warm-ups
                times[size].append(time.perf_counter() - started)
    medians = [statistics.median(times[size]) for size in sizes]
    return CostCurve(device, list(sizes), medians, batch_size, len(prompt_ids))


def _prefilled(target: Target, prompt_ids: list[int], batch_size: int) -> TreeCache:
    cache, length = target.new_cache(batch_size), len(prompt_ids)
    ids = torch.tensor([prompt_ids] * batch_size, device=target.device)
    causal = torch.ones(1, length, length, dtype=torch.bool, device=target.device).tril()
    target.extend(cache, ids, causal, torch.arange(length, device=target.device).unsqueeze(0))
    cache.commit([list(range(length))] * batch_size)
    return cache


def _verify(target: Target, cache: TreeCache, token: int, size: int) -> None:
    num_texts = len(cache.slots.lengths)
    tree = Tree.from_paths([[rank] for rank in range(size - 1)])
    tokens = torch.full((num_texts, size), token, device=target.device)
    draft = Draft.of(tree, tokens[:, 1:])
    layout = draft.layout()
    output = target.extend(cache, tokens, layout.mask, layout.depths)
    verdict = judge(draft, tokens, target.logits(output.hidden_states), GREEDY, Noise([]))
    verdict.bonus.tolist()


@torch.no_grad()
def draft_seconds(
    target: Target,
    make: Callable[[int], Drafter],
    prompt_ids: list[int],
    batch_size: int = 1,
    num_repeats: int = 9,
) -> float:
    """Median seconds of a draft after a prompt that the drafter has read.

    Args:
        target: the target.
        make: a fresh drafter for so many texts.
        prompt_ids: the context of every text.
        batch_size: texts drafted for together.
        num_repeats: timed drafts.
    """
    drafter = make(batch_size)
    cache = target.new_cache(batch_size)
    tokens = [list(prompt_ids)] * batch_size
    times = []
    for repeat in range(num_repeats + 3):  # the first reads the prompt, two more warm up
        _observe(target, drafter, cache, tokens)
        started = time.perf_counter()
        draft = drafter.propose([prompt_ids[-1]] * batch_size)
        draft.tokens.tolist()
        if repeat >= 3:
            times.append(time.perf_counter() - started)
        tokens = [[prompt_ids[-1]]] * batch_size
    return statistics.median(times)


def _observe(target: Target, drafter: Drafter, cache: TreeCache, tokens: list[list[int]]) -> None:
    length, device = len(tokens[0]), target.device
    causal = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
    depths = torch.arange(length, device=device).unsqueeze(0)
    reads: Reads = drafter.reads
    output = target.extend(cache, torch.tensor(tokens, device=device), causal, depths, reads)
    cache.commit([list(range(length))] * len(tokens))
    logits = target.logits(output.hidden_states[:, -1:])
    drafter.observe(Seen(tokens, output, cache, logits))
