"""One decoding engine for every drafter: lay out, run the target once, accept, compact.

Batch 1. Letters: N tree nodes (root included), S cached tokens, D hidden, V vocab.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from eval.accept import GREEDY, Sampling, walk_greedy, walk_sampled
from heads.target import Reads, Target, TargetOutput, keep_cache
from heads.tree import Tree


@dataclass(frozen=True)
class Draft:
    """A proposed tree.

    Attributes:
        tree: its shape; a chain if `probs` is given.
        tokens: [N - 1] int64, its nodes without the root.
        probs: [N - 1, V] float32 on the target's device, row i is the very distribution that
            `tokens[i]` was drawn from, by randomness other than `decode`'s seed gives; None if
            the tokens were not drawn (the drafter's best).
    """

    tree: Tree
    tokens: Tensor
    probs: Tensor | None = None


class Drafter(Protocol):
    """Proposes trees. A new way to draft is a new class with these three members."""

    reads: Reads

    def observe(self, token_ids: list[int], output: TargetOutput) -> None:
        """Takes committed tokens [n] and the target's states at them ([1, n, D])."""

    def propose(self, root: int) -> Draft:
        """A tree below `root`, the token the target has chosen but not read yet."""


class NoDraft:
    """Plain decoding in the same engine: the baseline `vanilla`."""

    reads = Reads()

    def observe(self, token_ids: list[int], output: TargetOutput) -> None:
        """Nothing to remember."""

    def propose(self, root: int) -> Draft:  # noqa: ARG002
        """The root alone."""
        return Draft(Tree.chain(0), torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class Step:
    """One verify pass.

    Attributes:
        accepted: draft tokens kept.
        emitted: tokens kept, the bonus token included; a text that ends inside the accepted
            run is cut there and what is cut is not counted.
        room: tokens that the text still had to give when the pass started; depths beyond it
            could not be tested.
    """

    accepted: int
    emitted: int
    room: int


@dataclass
class Times:
    """Seconds per part of a generation."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    total: float = 0.0

    @property
    def decode(self) -> float:
        """Everything after the prompt."""
        return self.total - self.prefill

    @property
    def host(self) -> float:
        """What is left when the named parts are taken away."""
        return self.decode - self.draft - self.verify - self.accept


@dataclass
class Generation:
    """What a decode gave."""

    token_ids: list[int]
    steps: list[Step] = field(default_factory=list)
    times: Times = field(default_factory=Times)


@torch.no_grad()
def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Generation:
    """Decoding with tree verification that changes nothing about the target's text.

    Greedy text equals the target's own; sampled text has the distribution of the target's own.

    Args:
        target: the frozen target.
        drafter: fresh for this prompt.
        prompt_ids: the rendered prompt, at least one token.
        max_new_tokens: tokens to emit at most; a stop token ends earlier and is kept.
        sampling: how the target chooses; greedy unless told.
        seed: of everything that sampling draws.
    """
    clock = _Clock(target.device)
    stops = set(target.stop_ids)
    started = clock.now()
    generator = torch.Generator(target.device).manual_seed(seed)
    cache = DynamicCache()
    with clock.part("prefill"):
        output = _prefill(target, prompt_ids, cache, drafter.reads)
        root = sampling.choose(target.logits(output.hidden_states[:, -1]), generator)
    drafter.observe(prompt_ids, output)
    emitted, steps = [root], []
    while len(emitted) < max_new_tokens and emitted[-1] not in stops:
        room = max_new_tokens - len(emitted)
        with clock.part("draft"):
            draft = drafter.propose(emitted[-1])
        with clock.part("verify"):
            output, ids, logits = _verify(target, draft, emitted[-1], cache, drafter.reads)
        with clock.part("accept"):
            path, tokens, bonus = _accept(draft, ids, logits, sampling, generator)
            _compact(cache, path, draft.tree.num_nodes)
            drafter.observe([tokens[node] for node in path], _select(output, path))
        new = [tokens[node] for node in path[1:]] + [bonus]
        new = _cut(new[:room], stops)
        steps.append(Step(min(len(path) - 1, len(new)), len(new), room))
        emitted += new
    clock.times.total = clock.now() - started
    return Generation(emitted, _end_room(steps), clock.times)


def _end_room(steps: list[Step]) -> list[Step]:
    """Shortens each step's room to the tokens that the text really had left."""
    left, ended = 0, []
    for step in reversed(steps):
        left += step.emitted
        ended.append(Step(step.accepted, step.emitted, left))
    return ended[::-1]


def _prefill(
    target: Target, prompt_ids: list[int], cache: DynamicCache, reads: Reads
) -> TargetOutput:
    ids = torch.tensor([prompt_ids], device=target.device)
    length = ids.shape[1]
    positions = torch.arange(length, device=target.device).unsqueeze(0)
    causal = torch.ones(1, length, length, dtype=torch.bool, device=target.device).tril()
    return target.forward(ids, positions, causal, positions, cache, reads)


def _verify(
    target: Target, draft: Draft, root: int, cache: DynamicCache, reads: Reads
) -> tuple[TargetOutput, Tensor, Tensor]:
    """One target pass over the tree: states, the nodes' tokens [N], the logits [N, V] after."""
    past, device = cache.get_seq_length(), target.device
    tree_mask, depths = _layout(draft.tree, device)
    ids = torch.cat([torch.tensor([root], device=device), draft.tokens.to(device)])
    allowed = torch.cat([tree_mask.new_ones(len(ids), past), tree_mask], dim=1)
    positions = past + depths
    keys = torch.cat([torch.arange(past, device=device), positions])
    output = target.forward(ids[None], positions[None], allowed[None], keys[None], cache, reads)
    return output, ids, target.logits(output.hidden_states[0])


def _accept(
    draft: Draft, ids: Tensor, logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[list[int], list[int], int]:
    """The accepted path of nodes, the token of every node, the bonus token."""
    if sampling.greedy:
        # The step's one wait for the device.
        tokens, choices = torch.stack([ids, logits.argmax(-1)]).tolist()
        path = walk_greedy(draft.tree, tokens, choices)
        return path, tokens, choices[path[-1]]
    tokens, probs = ids.tolist(), sampling.probabilities(logits)
    path, bonus = walk_sampled(draft.tree, tokens, probs, draft.probs, generator)
    return path, tokens, bonus


@lru_cache(maxsize=64)
def _layout(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mask [N, N] bool and depths [N] int64 of a tree, kept for the next step."""
    return tree.mask(device), torch.tensor(tree.depths, device=device)


def _compact(cache: DynamicCache, path: list[int], num_nodes: int) -> None:
    if len(path) == num_nodes:
        return
    past = cache.get_seq_length() - num_nodes
    keep_cache(cache, list(range(past)) + [past + node for node in path])


def _select(output: TargetOutput, path: list[int]) -> TargetOutput:
    return TargetOutput(
        output.hidden_states[:, path], {i: states[:, path] for i, states in output.layers.items()}
    )


def _cut(tokens: list[int], stops: set[int]) -> list[int]:
    """Tokens up to and with the first stop token."""
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1]
    return tokens


class _Clock:
    """Adds up seconds per part; waits for CUDA so that a part is charged for its own work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times = Times()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = self.now()
        yield
        setattr(self.times, name, getattr(self.times, name) + self.now() - started)
