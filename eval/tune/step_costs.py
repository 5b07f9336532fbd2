"""Seconds that verify passes over n tokens, and drafts, take on this machine."""

import json
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from conf.command.clock import measure_seconds
from conf.errors import InputError
from eval.decode.cuda_graphs import (
    CaptureError,
    CudaGraph,
    compute_num_slots,
    find_capture_obstacle,
)
from eval.decode.verification import TreeOutputs, accept_paths
from eval.measure.measured_head import get_device_name
from heads.decoding.cache import TreeCache
from heads.decoding.drafting import CommittedTokens, Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY, NO_DRAWS
from heads.decoding.tree import Tree
from heads.devices import to_device
from heads.target_model.model import FeatureLayers, Target, prefill

PASS_SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Numbers of tokens, besides 1, of the passes to time; others are interpolated."""
NUM_ROUNDS = 6
"""Timed passes and drafts per size and drafter; with more samples the minimum would be smaller."""
NUM_PLAIN = 3
"""Passes over one token in a row, of which the last is timed."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a verify pass by its number of tokens per text.

    Attributes:
        device: device of the measurement.
        sizes: tokens per text, rising.
        seconds: seconds per size.
        batch_size: texts per pass.
        context: tokens in the cache of each text.
        draft_seconds: seconds of one pass of the draft head on that device, if recorded.
        source: origin of a recorded curve.
    """

    device: str
    sizes: list[int]
    seconds: list[float]
    batch_size: int = 1
    context: int = 0
    draft_seconds: float | None = None
    source: str = "measured"

    def estimate_seconds(self, num_tokens: int) -> float:
        """Estimate the seconds of a pass over `num_tokens`, linearly beyond the last size."""
        if num_tokens <= self.sizes[-1] or len(self.sizes) == 1:
            return float(np.interp(num_tokens, self.sizes, self.seconds))
        (a, b), (s, t) = self.sizes[-2:], self.seconds[-2:]
        return t + (num_tokens - b) * max(t - s, 0.0) / (b - a)


def load_cost_curve(path: str) -> CostCurve:
    """Read a recorded curve: JSON with the attributes of `CostCurve`.

    Raises:
        InputError: the file has another content.
    """
    try:
        curve = CostCurve(**json.loads(Path(path).read_text()))
        numbers = [*curve.sizes, *curve.seconds, curve.draft_seconds or 0.0]
        bad = not all(isinstance(number, int | float) for number in numbers)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"curve={path}: not a cost curve ({type(error).__name__}: {error}); allowed: JSON with "
            "device, sizes, seconds, and optionally draft_seconds, context and source"
        ) from None
    sizes, seconds, draft = curve.sizes, curve.seconds, curve.draft_seconds
    bad = bad or not sizes or sizes != sorted(set(sizes)) or len(sizes) != len(seconds)
    if bad or sizes[0] < 1 or min(seconds) <= 0 or (draft or 0) < 0:
        raise InputError(
            f"curve={path}: sizes {sizes} must be rising numbers, with one number of seconds "
            f"{seconds} each; sizes must be at least 1, seconds above 0, draft_seconds at least 0 "
            f"(found {draft})"
        )
    return curve


@torch.no_grad()
def measure_step_costs(
    target: Target,
    drafters: Mapping[Key, Drafter],
    context: list[int],
    batch_size: int = 1,
    sizes: Sequence[int] = PASS_SIZES,
) -> tuple[CostCurve, dict[Key, float]]:
    """Time passes over drafts of every size, and drafts of every drafter.

    A pass is everything that the engine does between a draft and the accepted tokens: layout,
    target, output head, greedy acceptance and the wait. Drafts and passes alternate as in decoding;
    repeated passes would find their weights in the processor's cache and take a tenth less. Passes
    over one token follow each other directly, as in plain decoding. The minimum over equally many
    samples counts for each kind. On a GPU they are CUDA graphs if decoding's are.

    Args:
        target: target that is timed.
        drafters: new drafters for `batch_size` texts that read the same layers.
        context: tokens of every text.
        batch_size: texts per pass.
        sizes: verified tokens per text, root included; rising from 2.

    Returns:
        Seconds of passes by size, and seconds of a draft of each drafter, between two passes.
    """
    cache, root = target.new_cache(batch_size), context[-1]
    taps = next(iter(drafters.values())).taps
    roots = Roots.from_ids([root] * batch_size, target.device)
    for tokens in ([context] * batch_size, [[root]] * batch_size):
        output = prefill(target, cache, tokens, taps)
        logits = target.compute_logits(output.hidden_states[:, -1:])
        counts = [len(tokens[0])] * batch_size
        on_device = to_device(tokens, target.device), to_device(counts, target.device)
        seen = CommittedTokens(tokens, output, cache, logits=logits, on_device=on_device)
        for drafter in drafters.values():
            _run_draft(drafter, seen, roots).tolist()
    captures = target.device.type == "cuda" and not find_capture_obstacle(target)
    if captures:
        width = target.capacity or compute_num_slots(len(context) + 1, sizes[-1])
        cache.fix_width(width, sizes[-1], width)
    verify = partial(_run_verify, target, cache, roots)
    checks = {size: _prepare_step(partial(verify, taps, size), captures) for size in sizes}
    plain = _prepare_step(partial(verify, FeatureLayers(), 1), captures)
    proposals = {
        key: _prepare_step(
            partial(_run_draft, drafter, seen, roots),
            captures and drafter.num_static_nodes is not None,
        )
        for key, drafter in drafters.items()
    }
    passes: dict[Key, dict[int, list[float]]]
    passes = {key: {n: [] for n in (1, *sizes)} for key in drafters}
    drafts: dict[Key, dict[int, list[float]]] = {key: {n: [] for n in sizes} for key in drafters}
    for _ in tqdm(range(NUM_ROUNDS), desc=f"step times, batch {batch_size}", leave=False):
        for key in drafters:
            passes[key][1].append(
                [measure_seconds(plain, target.device) for _ in range(NUM_PLAIN)][-1]
            )
            for size in sizes:
                drafts[key][size].append(measure_seconds(proposals[key], target.device))
                passes[key][size].append(measure_seconds(checks[size], target.device))
    # Other work of the machine only adds time, so the minimum counts. A draft's effect on the next
    # pass differs between drafters, so the minimum is taken for each drafter.
    seconds = [statistics.mean(min(p[size]) for p in passes.values()) for size in (1, *sizes)]
    curve = CostCurve(get_device_name(), [1, *sizes], seconds, batch_size, len(context))
    return curve, {
        key: statistics.mean(map(min, by_size.values())) for key, by_size in drafts.items()
    }


def build_typical_context(prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> list[int]:
    """Build a typical context: the prompt of median length with half of its text."""
    prompt, text = sorted(zip(prompts, texts, strict=True), key=lambda pair: len(pair[0]))[
        len(prompts) // 2
    ]
    return prompt + text[: len(text) // 2]


def _prepare_step(run: Callable[[], Tensor], captures: bool) -> Callable[[], list[Any]]:
    """Prepare a part of a decoding step, to be launched as in decoding and waited for.

    Args:
        run: function that launches the part and returns the tensor for the host, without waiting.
        captures: whether to use a CUDA graph.
    """
    launch = run
    if captures:
        # The first call runs without capture, to load kernels and allocate buffers.
        run()
        with suppress(CaptureError):
            launch = CudaGraph(run, torch.cuda.graph_pool_handle()).launch_graph
    return lambda: launch().tolist()


def _run_verify(
    target: Target, cache: TreeCache, roots: Roots, taps: FeatureLayers, size: int
) -> Tensor:
    tokens = roots.tokens.unsqueeze(1).repeat(1, size)
    tree = Tree.from_paths([[rank] for rank in range(size - 1)])
    draft = Draft.from_tree(tree, tokens[:, 1:])
    layout = draft.build_layout()
    output = target.run_pending(cache, tokens, layout.mask, layout.depths, taps)
    outputs = TreeOutputs(layout, tokens, output, target.compute_logits(output.hidden_states))
    return accept_paths(draft, outputs, GREEDY, NO_DRAWS).bonus


def _run_draft(drafter: Drafter, seen: CommittedTokens, roots: Roots) -> Tensor:
    drafter.observe(seen)
    return drafter.propose(roots).tokens
