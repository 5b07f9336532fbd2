"""One decoding engine for every drafter: lay out, run the target once, accept, compact.

A batch of texts goes on together, each accepting as many tokens as it does; a text that ends
leaves the batch. A step waits for the device once, to learn which tokens were kept.

Letters: B texts, N tree nodes (root included), D hidden, V vocab.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.decode.accept import Accepted, verify
from heads.cache import TreeCache, upload
from heads.drafting import Draft, Drafter, Seen
from heads.sampling import GREEDY, Generators, Sampling, sample_tokens
from heads.target.model import Reads, Target, TargetOutput
from heads.tree import Tree


class NoDraft:
    """Plain decoding in the same engine: the baseline `vanilla`."""

    reads = Reads()

    def observe(self, seen: Seen) -> None:
        """Only where the target is."""
        self.device = seen.output.hidden_states.device

    def propose(self, roots: list[int]) -> Draft:
        """The roots alone."""
        tokens = torch.empty(len(roots), 0, dtype=torch.int64, device=self.device)
        return Draft.of(Tree.chain(0), tokens)

    def keep(self, rows: list[int]) -> None:
        """Nothing to drop."""


@dataclass(frozen=True)
class Step:
    """One text's share of a verify pass.

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
    """Seconds per part of decoding a batch."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    total: float = 0.0

    @property
    def decode(self) -> float:
        """Everything after the prompts."""
        return self.total - self.prefill

    @property
    def host(self) -> float:
        """What is left when the named parts are taken away."""
        return self.decode - self.draft - self.verify - self.accept


@dataclass
class Generation:
    """What a decode gave for one text.

    Attributes:
        token_ids: the text.
        steps: its share of the verify passes.
        paths: the accepted nodes of each step, without the root.
        times: of its whole batch.
        num_passes: of the target, where somebody else's loop shows no steps.
    """

    token_ids: list[int]
    steps: list[Step] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    num_passes: int = 0


def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Generation:
    """`decode_batch` of one prompt."""
    return decode_batch(target, drafter, [prompt_ids], max_new_tokens, sampling, [seed])[0]


def decode_batch(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
) -> list[Generation]:
    """Decoding with tree verification that changes nothing about the target's texts.

    Greedy text equals the target's own; sampled text has the distribution of the target's own,
    unless `sampling` is lossy.

    Args:
        target: the frozen target.
        drafter: fresh for these prompts.
        prompts: rendered prompts, at least one token each.
        max_new_tokens: tokens to emit at most per text; a stop token ends earlier and is kept.
        sampling: how the target chooses; greedy unless told.
        seeds: of everything that sampling draws, one per text; 0 unless told.
    """
    batch = _Batch(target, drafter, prompts, max_new_tokens, sampling, seeds)
    for _ in batch.run():
        pass
    return batch.generations()


def stream(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
) -> Iterator[dict[int, list[int]]]:
    """Like `decode_batch`, but gives tokens as they are accepted, per text that still goes on."""
    yield from _Batch(target, drafter, prompts, max_new_tokens, sampling, seeds).run()


class _Batch:
    """Texts that are decoded together; `alive` are those that have not ended."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int] | None,
    ) -> None:
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.prompts, self.max_new_tokens = prompts, max_new_tokens
        self.stops = set(target.stop_ids)
        self.clock = _Clock(target.device)
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.steps: list[list[Step]] = [[] for _ in prompts]
        self.paths: list[list[tuple[int, ...]]] = [[] for _ in prompts]
        self.alive = list(range(len(prompts)))
        self.generators = Generators.seeded(seeds or [0] * len(prompts), target.device)

    @torch.no_grad()
    def run(self) -> Iterator[dict[int, list[int]]]:
        """Tokens by text, after the prompts and after every step."""
        cache = self.target.new_cache(len(self.prompts))
        with self.clock.part("prefill"):
            output, roots = self._prefill(cache)
        new = {row: [root] for row, root in enumerate(roots)}
        kept = list(self.prompts)
        logits = None
        while True:
            going = self._emit(new)
            if not going:
                self.clock.stop()
            yield new
            if not going:
                return
            with self.clock.part("accept"):
                if len(going) < len(self.alive):
                    output, kept, logits = self._drop(going, cache, output, kept, logits)
                self.drafter.observe(Seen(kept, output, cache, logits))
            with self.clock.part("draft"):
                draft = self.drafter.propose([self.texts[text][-1] for text in self.alive])
            with self.clock.part("verify"):
                output, tokens, logits = self._verify(draft, cache)
            with self.clock.part("accept"):
                output, kept, new = self._accept(draft, tokens, logits, output, cache)

    def generations(self) -> list[Generation]:
        """What came out, once `run` is through."""
        columns = zip(self.texts, map(_end_room, self.steps), self.paths, strict=True)
        return [Generation(text, steps, paths, self.clock.times) for text, steps, paths in columns]

    def _prefill(self, cache: TreeCache) -> tuple[TargetOutput, list[int]]:
        """The target's states of all prompts, and the first token of each text."""
        device, longest = self.target.device, max(map(len, self.prompts))
        # What fills up a shorter row comes after its tokens, which cannot see it.
        rows = [prompt + [0] * (longest - len(prompt)) for prompt in self.prompts]
        causal = torch.ones(1, longest, longest, dtype=torch.bool, device=device).tril()
        depths = torch.arange(longest, device=device).unsqueeze(0)
        ids = upload(rows, device)
        output = self.target.extend(cache, ids, causal, depths, self.drafter.reads)
        cache.commit([list(range(len(prompt))) for prompt in self.prompts])
        last = upload([len(prompt) - 1 for prompt in self.prompts], device)
        states = output.at(last.unsqueeze(1)).hidden_states[:, 0]
        return output, sample_tokens(
            self.target.logits(states), self.sampling, self.generators
        ).tolist()

    def _verify(self, draft: Draft, cache: TreeCache) -> tuple[TargetOutput, Tensor, Tensor]:
        """One target pass over the trees: states, tokens [B, N], logits [B, N, V]."""
        roots = [self.texts[text][-1:] for text in self.alive]
        tokens = torch.cat([upload(roots, self.target.device), draft.tokens], dim=1)
        layout = draft.layout()
        output = self.target.extend(
            cache, tokens.clamp_min(0), layout.mask, layout.depths, self.drafter.reads
        )
        return output, tokens, self.target.logits(output.hidden_states)

    def _accept(
        self, draft: Draft, tokens: Tensor, logits: Tensor, output: TargetOutput, cache: TreeCache
    ) -> tuple[TargetOutput, list[list[int]], dict[int, list[int]]]:
        """States at the kept nodes, their tokens, and the new tokens by text."""
        accepted = verify(draft, tokens, logits, self.sampling, self.generators)
        paths, run, bonus = _fetch(accepted, tokens)
        cache.commit(paths)
        nodes = accepted.nodes[:, : max(map(len, paths))]
        kept = [found[: len(path)] for found, path in zip(run, paths, strict=True)]
        new = {}
        for text, path, found, token in zip(self.alive, paths, kept, bonus, strict=True):
            room = self.max_new_tokens - len(self.texts[text])
            new[text] = _cut([*found[1:], token][:room], self.stops)
            num_accepted = min(len(path) - 1, len(new[text]))
            self.steps[text].append(Step(num_accepted, len(new[text]), room))
            self.paths[text].append(tuple(path[1:]))
        return output.at(nodes), kept, new

    def _emit(self, new: dict[int, list[int]]) -> list[int]:
        """Adds tokens to the texts; the texts that go on."""
        for text, tokens in new.items():
            self.texts[text] += tokens
        return [
            text
            for text in self.alive
            if len(self.texts[text]) < self.max_new_tokens
            and self.texts[text][-1] not in self.stops
        ]

    def _drop(
        self,
        going: list[int],
        cache: TreeCache,
        output: TargetOutput,
        kept: list[list[int]],
        logits: Tensor | None,
    ) -> tuple[TargetOutput, list[list[int]], Tensor | None]:
        """Goes on with some texts only, everywhere."""
        rows = [self.alive.index(text) for text in going]
        cache.keep(rows)
        self.drafter.keep(rows)
        self.generators = self.generators.rows(rows)
        self.alive = going
        index = upload(rows, self.target.device)
        return (
            output.rows(index),
            [kept[row] for row in rows],
            None if logits is None else logits[index],
        )


def _fetch(
    accepted: Accepted, tokens: Tensor
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """The accepted path and its tokens per text, and the bonus tokens: the wait of a step."""
    parts = [
        accepted.nodes, tokens.gather(1, accepted.nodes),
        accepted.num_accepted.unsqueeze(1), accepted.bonus.unsqueeze(1),
    ]  # fmt: skip
    rows = torch.cat(parts, dim=1).tolist()
    width = accepted.nodes.shape[1]
    paths = [row[: row[-2] + 1] for row in rows]
    return paths, [row[width : 2 * width] for row in rows], [row[-1] for row in rows]


def _end_room(steps: list[Step]) -> list[Step]:
    """Shortens each step's room to the tokens that the text really had left."""
    left, ended = 0, []
    for step in reversed(steps):
        left += step.emitted
        ended.append(Step(step.accepted, step.emitted, left))
    return ended[::-1]


def _cut(tokens: list[int], stops: set[int]) -> list[int]:
    """Tokens up to and with the first stop token."""
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1]
    return tokens


class _Clock:
    """Adds up seconds per part, on CUDA by events in the stream, which nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.times = Times()
        self.started = time.perf_counter()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self.cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            started = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - started)

    def stop(self) -> None:
        """Takes the total, when everything has been fetched from the device."""
        self.times.total = time.perf_counter() - self.started
        for name, start, end in self._events:
            end.synchronize()
            self._add(name, start.elapsed_time(end) / 1000)
        self._events = []

    def _add(self, name: str, seconds: float) -> None:
        setattr(self.times, name, getattr(self.times, name) + seconds)
