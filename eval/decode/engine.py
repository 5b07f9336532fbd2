"""One decoding engine for every drafter: lay out, run the target once, accept, compact.

A batch of texts goes on together, each accepting as many tokens as it does; where one ends the
next takes its place, or the batch shrinks. A step waits for the device once, to learn which tokens
were kept.

Letters: B texts, N tree nodes (root included), D hidden, V vocab.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.clock import PartClock
from eval.decode.accept import verify
from eval.decode.crossing import Crossing
from eval.decode.fetch import fetch
from eval.decode.generation import Generation, Request, Step, left_at_end
from eval.decode.rules import Rules
from eval.decode.texts import Stops
from heads.cache import Kept, TreeCache, upload
from heads.drafting import PAD, Draft, Drafter, Seen
from heads.sampling import GREEDY, Generators, Sampling, sample_tokens
from heads.target.model import Reads, Target, TargetOutput
from heads.target.prefill import parts, prefill
from heads.tree import Tree

ROOT_ALONE = Tree.chain(0)


class NoDraft:
    """Plain decoding in the same engine: the baseline `vanilla`."""

    reads = Reads()

    def observe(self, seen: Seen) -> None:
        """Only where the target is."""
        self.device = seen.output.hidden_states.device

    def propose(self, roots: list[int]) -> Draft:
        """The roots alone."""
        tokens = torch.empty(len(roots), 0, dtype=torch.int64, device=self.device)
        return Draft.of(ROOT_ALONE, tokens)

    def keep(self, rows: list[int]) -> None:
        """Nothing to drop."""

    def take(self, row: int, other: "NoDraft") -> None:
        """Nothing to take."""


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
        prompts: rendered prompts, at least one token each; with `max_new_tokens` they are within
            the target's window.
        max_new_tokens: tokens to emit at most per text; a stop token ends earlier and is kept.
        sampling: how the target chooses; greedy unless told.
        seeds: of everything that sampling draws, one per text; 0 unless told.
    """
    batch = _Batch(target, _requests(prompts, seeds), max_new_tokens, sampling)
    return batch.decoded(lambda _: drafter, len(prompts))


def decode_many(
    target: Target,
    make: Callable[[list[int]], Drafter],
    requests: Sequence[Request],
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling = GREEDY,
) -> list[Generation]:
    """`decode_batch` of so many texts at a time: where one ends, the next takes its place.

    Args:
        target: the frozen target.
        make: a fresh drafter for texts with these seeds.
        requests: in the order in which they are begun.
        max_new_tokens: as there.
        batch_size: texts that go on together.
        sampling: as there.
    """
    return _Batch(target, requests, max_new_tokens, sampling).decoded(make, batch_size)


def stream(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
) -> Iterator[dict[int, list[int]]]:
    """Like `decode_batch`, but gives tokens as they are accepted, per text that still goes on."""
    batch = _Batch(target, _requests(prompts, seeds), max_new_tokens, sampling)
    yield from batch.run(lambda _: drafter, len(prompts))


def _requests(prompts: Sequence[list[int]], seeds: Sequence[int] | None) -> list[Request]:
    return list(map(Request, prompts, seeds or [0] * len(prompts)))


@dataclass
class _Begun:
    """Texts whose prompts have been read.

    Attributes:
        texts: their numbers.
        drafter: has seen the prompts but for `seen`.
        seen: the prompts, or their last part.
        roots: [B] int64, the first token of each.
        generators: of the texts.
    """

    texts: list[int]
    drafter: Drafter
    seen: Seen
    roots: Tensor
    generators: Generators


class _Batch:
    """Texts that are decoded together.

    Attributes:
        alive: those that go on, by row.
        waiting: those that have not begun.
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[Request],
        max_new_tokens: int,
        sampling: Sampling,
    ) -> None:
        self.prompts = [each.prompt_ids for each in requests]
        self.seeds = [each.seed for each in requests]
        longest = max(map(len, self.prompts))
        assert target.window is None or longest + max_new_tokens <= target.window
        self.target, self.sampling, self.max_new_tokens = target, sampling, max_new_tokens
        self.stops, self.rules = Stops.of(target), Rules(target.asked, target.stop_ids)
        self.crossing = Crossing(target, self.prompts)
        self.clock = PartClock(target.device, len(requests))
        self.found = [Generation([], times=times) for times in self.clock.times]
        self.started = [0.0] * len(requests)

    def decoded(self, make: Callable[[list[int]], Drafter], batch_size: int) -> list[Generation]:
        """All texts, once they have ended."""
        for _ in self.run(make, batch_size):
            pass
        return [replace(each, steps=left_at_end(each.steps)) for each in self.found]

    @torch.inference_mode()
    def run(
        self, make: Callable[[list[int]], Drafter], batch_size: int
    ) -> Iterator[dict[int, list[int]]]:
        """Tokens by text, after the prompts and after every step."""
        numbers, self.make = list(range(len(self.prompts))), make
        self.alive, self.waiting = numbers[:batch_size], numbers[batch_size:]
        begun, new = self._begin(self.alive)
        self.drafter, self.roots, self.generators = begun.drafter, begun.roots, begun.generators
        seen = begun.seen
        while True:
            going = self._emit(new)
            yield new
            next_ones: list[_Begun] = []
            while self.waiting and len(going) + len(next_ones) < len(self.alive):
                begun, new = self._begin([self.waiting.pop(0)])
                if self._emit(new):
                    next_ones.append(begun)
                yield new
            if not going and not next_ones:
                self.clock.stop(self.alive)
                return
            with self.clock.part("accept", going):
                seen = self._go_on(going, next_ones, seen)
            with self.clock.part("draft", self.alive):
                draft = self.drafter.propose([self.found[t].token_ids[-1] for t in self.alive])
            with self.clock.part("verify", self.alive):
                nodes = self._read(draft, seen.cache)
            with self.clock.part("accept", self.alive):
                seen, new = self._accept(draft, nodes, seen.cache)

    def _begin(self, texts: list[int]) -> tuple[_Begun, dict[int, list[int]]]:
        """Reads prompts with a fresh drafter; the first token of each text."""
        for text in texts:
            self.started[text] = self.clock.lap(self.alive)
        with self.clock.part("prefill", texts):
            seeds = [self.seeds[text] for text in texts]
            drafter, generators = self.make(seeds), Generators.seeded(seeds, self.target.device)
            rows = [self.prompts[text] for text in texts]
            cache = self.target.new_cache(len(rows))
            if len(rows) == 1:
                seen = self._in_parts(cache, rows, drafter)
            else:
                seen = Seen(rows, prefill(self.target, cache, rows, drafter.reads), cache)
            logits = self.target.logits(seen.last.hidden_states[:, 0])
            logits = self.rules.begin(logits, rows)
            roots = sample_tokens(logits, self.sampling, generators)
            new = {text: [root] for text, root in zip(texts, roots.tolist(), strict=True)}
        return _Begun(texts, drafter, seen, roots, generators), new

    def _in_parts(self, cache: TreeCache, rows: list[list[int]], drafter: Drafter) -> Seen:
        """The last part of a prompt; the drafter has seen the others, and nobody keeps them."""
        found: list[Seen] = []
        for tokens, output in parts(self.target, cache, rows, drafter.reads):
            if found:
                drafter.observe(found.pop())
            found.append(Seen(tokens, output, cache))
        return found.pop()

    def _read(self, draft: Draft, cache: TreeCache) -> "_Nodes":
        """One target pass over the trees."""
        tokens = torch.cat([self.roots.unsqueeze(1), draft.tokens], dim=1)
        layout = draft.layout()
        tokens = self.crossing.cut(tokens, layout.depths, cache)
        output = self.target.extend(
            cache, tokens.clamp_min(0), layout.mask, layout.depths, self.drafter.reads
        )
        logits = self.target.logits(output.hidden_states)
        if self.rules.always:
            texts = [self._whole(text)[:-1] for text in self.alive]
            longest = max(map(len, texts))
            rows = [ids + [0] * (longest - len(ids)) for ids in texts]
            history = upload(rows, self.target.device)
            logits = self.rules.apply(logits, history, cache.slots.committed, tokens, layout)
        return _Nodes(tokens, output, logits)

    def _accept(
        self, draft: Draft, nodes: "_Nodes", cache: TreeCache
    ) -> tuple[Seen, dict[int, list[int]]]:
        """What is committed of the trees, and the new tokens by text."""
        accepted = verify(draft, nodes.tokens, nodes.logits, self.sampling, self.generators)
        on_path = nodes.tokens.gather(1, accepted.nodes)
        steps = fetch(accepted, on_path, (draft.tokens != PAD).sum(1))
        paths = [step.path for step in steps]
        counts, longest = accepted.num_accepted + 1, max(map(len, paths))
        cache.commit(paths, Kept(accepted.nodes, counts))
        self.roots = accepted.bonus
        new = {}
        for text, step in zip(self.alive, steps, strict=True):
            own = self.found[text]
            num_left = self.max_new_tokens - len(own.token_ids)
            tokens = [*step.tokens[1:], step.bonus][:num_left]
            new[text] = self.stops.cut(own.token_ids, tokens)
            num_accepted = min(len(step.path) - 1, len(new[text]))
            own.steps.append(Step(num_accepted, len(new[text]), num_left))
            own.paths.append(tuple(step.path[1:]))
            own.drafted.append(step.num_drafted)
        kept, seen = [step.tokens for step in steps], accepted.nodes[:, :longest]
        output, found = nodes.output.at(seen), (on_path[:, :longest], counts)
        return Seen(kept, output, cache, nodes.logits, found, paths, seen), new

    def _emit(self, new: dict[int, list[int]]) -> list[int]:
        """Adds tokens to the texts; those of them that go on."""
        now = self.clock.lap(list(new))
        for text, tokens in new.items():
            self.found[text].token_ids += tokens
            self.found[text].arrivals.append(now - self.started[text])
        return [
            text
            for text in new
            if len(self.found[text].token_ids) < self.max_new_tokens
            and not self.stops.ended(self.found[text].token_ids)
        ]

    def _go_on(self, going: list[int], begun: list[_Begun], seen: Seen) -> Seen:
        """The drafter takes what was kept, and new texts the rows of those that have ended."""
        free = [row for row, text in enumerate(self.alive) if text not in going][: len(begun)]
        if len(going) + len(begun) < len(self.alive):
            # The first rows that are free are among the first of all, which stay where they are.
            seen = self._drop([*going, *(self.alive[row] for row in free)], seen)
        if self.crossing.switch is not None:
            self.crossing.cross(seen.cache, self.alive, list(map(self._whole, self.alive)))
        self.drafter.observe(seen)
        for row, each in zip(free, begun, strict=True):
            self._seat(row, each, seen.cache)
        return seen

    def _seat(self, row: int, begun: _Begun, cache: TreeCache) -> None:
        """A text that was read alone goes on in a row of the batch."""
        begun.drafter.observe(begun.seen)
        self.drafter.take(row, begun.drafter)
        cache.take(row, begun.seen.cache)
        self.generators.take(row, begun.generators)
        self.roots[row] = begun.roots[0]
        self.alive[row] = begun.texts[0]

    def _drop(self, staying: list[int], seen: Seen) -> Seen:
        """Goes on with some texts only, everywhere; the last take the places that are free."""
        last = [row for row in range(len(staying), len(self.alive)) if self.alive[row] in staying]
        first = range(len(staying))
        rows = [row if self.alive[row] in staying else last.pop() for row in first]
        seen.cache.keep(rows)
        self.drafter.keep(rows)
        self.generators = self.generators.rows(rows)
        self.alive = [self.alive[row] for row in rows]
        self.roots = self.roots[upload(rows, self.target.device)]
        return seen.rows(rows)

    def _whole(self, text: int) -> list[int]:
        """Prompt and text so far."""
        return self.prompts[text] + self.found[text].token_ids


@dataclass(frozen=True)
class _Nodes:
    """The trees of a step after the target's pass over them.

    Attributes:
        tokens: [B, N] int64, the roots included; PAD where there is no node.
        output: the target's states [B, N, D].
        logits: [B, N, V].
    """

    tokens: Tensor
    output: TargetOutput
    logits: Tensor
