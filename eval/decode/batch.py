"""One step after another for every drafter: lay out, run the target once, accept, compact.

A batch of texts goes on together, each accepting as many tokens as it does; where one ends the
next takes its place, or the batch shrinks. A step waits for the device once, to learn which tokens
were kept.

Letters: B texts, N tree nodes (root included), D hidden, V vocab.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.command.clock import PartClock
from eval.decode.accept import verify
from eval.decode.context_limits import ContextLimits
from eval.decode.fetch import Fetched, fetched, record
from eval.decode.generation import Generation, Request, Step, left_at_end
from eval.decode.rules import Rules
from eval.decode.texts import Stops
from heads.decoding.cache import Kept, TreeCache, upload
from heads.decoding.drafting import Committed, Draft, Drafter, Roots
from heads.decoding.sampling import Generators, Sampling, sample_tokens
from heads.target_model.model import Taps, Target, TargetOutput, prefill_parts


@dataclass
class Begun:
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
    seen: Committed
    roots: Tensor
    generators: Generators


class Batch:
    """Texts that are decoded together.

    Attributes:
        alive: their numbers, by row.
        going: those of them that have not ended.
        waiting: those that have not begun.
        roots: [B] int64, the token of each that the target has chosen but not read yet.
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
        self.stops, self.rules = Stops.of(target), Rules(target.logits_processing, target.stop_ids)
        self.context_limits = ContextLimits(target, self.prompts)
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
        self.make, self.waiting = make, list(range(len(self.prompts)))
        seen, new = self._start(batch_size)
        while True:
            self._emit(new)
            yield new
            next_ones: list[Begun] = []
            while self.waiting and len(self.going) + len(next_ones) < len(self.alive):
                begun, new = self._begin([self.waiting.pop(0)])
                if self._emit(new):
                    next_ones.append(begun)
                yield new
            if not self.going and not next_ones:
                self.clock.stop(self.alive)
                return
            with self.clock.part("accept", self.going):
                seen = self._go_on(next_ones, seen)
            seen, new = self._step(seen)

    def _start(self, batch_size: int) -> tuple[Committed, dict[int, list[int]]]:
        """Taps the prompts of the first texts together; their first tokens."""
        self.alive, self.waiting = self.waiting[:batch_size], self.waiting[batch_size:]
        begun, new = self._begin(self.alive)
        self.drafter, self.roots, self.generators = begun.drafter, begun.roots, begun.generators
        self.going = list(self.alive)
        return begun.seen, new

    def _step(self, seen: Committed) -> tuple[Committed, dict[int, list[int]]]:
        """Draft, verify, accept: what was seen, and new tokens by text."""
        roots = Roots(self.roots, [self.found[text].token_ids[-1] for text in self.alive])
        with self.clock.part("draft", self.alive):
            draft = self.drafter.propose(roots)
        with self.clock.part("verify", self.alive):
            nodes = self._read(draft, seen.cache)
        with self.clock.part("accept", self.alive):
            return self._accept(draft, nodes, seen.cache)

    def _begin(self, texts: list[int]) -> tuple[Begun, dict[int, list[int]]]:
        """Taps prompts with a fresh drafter; the first token of each text."""
        for text in texts:
            self.started[text] = self.clock.lap(self.alive)
        with self.clock.part("prefill", texts):
            seeds = [self.seeds[text] for text in texts]
            drafter, generators = self.make(seeds), Generators.seeded(seeds, self.target.device)
            rows = [self.prompts[text] for text in texts]
            cache = self.target.new_cache(len(rows))
            seen = self._in_parts(cache, rows, drafter)
            logits = self.target.logits(seen.last.hidden_states[:, 0])
            logits = self.rules.begin(logits, rows)
            roots = sample_tokens(logits, self.sampling, generators)
            new = {text: [root] for text, root in zip(texts, roots.tolist(), strict=True)}
        return Begun(texts, drafter, seen, roots, generators), new

    def _in_parts(self, cache: TreeCache, rows: list[list[int]], drafter: Drafter) -> Committed:
        """The last part of prompts; the drafter has seen the others, and nobody keeps them."""
        found: list[Committed] = []
        for tokens, output in prefill_parts(self.target, cache, rows, drafter.taps):
            seen = Committed(tokens, output, cache)
            if found:
                before, seen = found.pop().hand_on(seen)
                drafter.observe(before)
            found.append(seen)
        return found.pop()

    def _read(self, draft: Draft, cache: TreeCache) -> "Nodes":
        """One target pass over the trees."""
        nodes = read(self.context_limits, draft, self.roots, cache, self.drafter.taps)
        if not self.rules.always:
            return nodes
        texts = [self._whole(text)[:-1] for text in self.alive]
        longest = max(map(len, texts))
        rows = [ids + [0] * (longest - len(ids)) for ids in texts]
        history, layout = upload(rows, self.target.device), draft.layout()
        committed = cache.slots.committed
        logits = self.rules.apply(nodes.logits, history, committed, nodes.tokens, layout)
        return replace(nodes, logits=logits)

    def _accept(
        self, draft: Draft, nodes: "Nodes", cache: TreeCache
    ) -> tuple[Committed, dict[int, list[int]]]:
        """What is committed of the trees, and the new tokens by text."""
        accepted = verify(draft, nodes.tokens, nodes.logits, self.sampling, self.generators)
        on_path = nodes.tokens.gather(1, accepted.nodes)
        steps = fetched(record(accepted, on_path, draft).tolist())
        paths = [step.path for step in steps]
        counts, longest = accepted.num_accepted + 1, max(map(len, paths))
        cache.commit(paths, Kept(accepted.nodes, counts))
        self.roots = accepted.bonus
        new = {text: self._add(text, each) for text, each in zip(self.alive, steps, strict=True)}
        kept, seen = [step.tokens for step in steps], accepted.nodes[:, :longest]
        committed = Committed(
            kept,
            nodes.output.at(seen),
            cache,
            logits=nodes.logits,
            on_device=(on_path[:, :longest], counts),
            paths=paths,
            nodes=seen,
        )
        return committed, new

    def _add(self, text: int, step: Fetched) -> list[int]:
        """Notes a step of a text; its new tokens."""
        own = self.found[text]
        num_left = self.max_new_tokens - len(own.token_ids)
        tokens = [*step.tokens[1:], step.bonus][:num_left]
        new = self.stops.cut(own.token_ids, tokens)
        own.steps.append(Step(min(len(step.path) - 1, len(new)), len(new), num_left))
        own.paths.append(tuple(step.path[1:]))
        own.drafted.append(step.num_drafted)
        return new

    def _emit(self, new: dict[int, list[int]]) -> bool:
        """Adds tokens to the texts; whether all of them go on."""
        now = self.clock.lap(list(new) or self.going)
        ended = set()
        for text, tokens in new.items():
            own = self.found[text]
            own.token_ids += tokens
            own.arrivals.append(now - self.started[text])
            if len(own.token_ids) >= self.max_new_tokens or self.stops.ended(own.token_ids):
                ended.add(text)
        self.going = [text for text in self.going if text not in ended]
        return not ended

    def _go_on(self, begun: list[Begun], seen: Committed) -> Committed:
        """The drafter takes what was kept, and new texts the rows of those that have ended."""
        if len(self.going) + len(begun) < len(self.alive):
            seen = self._drop(len(begun), seen)
        if self.context_limits.switch is not None:
            self.context_limits.cross(seen.cache, self.alive, list(map(self._whole, self.alive)))
        self.drafter.observe(seen)
        self._seat(begun, seen.cache)
        return seen

    def _seat(self, begun: list[Begun], cache: TreeCache) -> None:
        """Texts that were read alone go on in rows of the batch."""
        free = [row for row, text in enumerate(self.alive) if text not in self.going]
        for row, each in zip(free, begun, strict=False):
            each.drafter.observe(each.seen)
            self.drafter.take(row, each.drafter)
            cache.take(row, each.seen.cache)
            self.generators.take(row, each.generators)
            self.roots[row] = each.roots[0]
            self.alive[row] = each.texts[0]
            self.going += each.texts

    def _drop(self, num_new: int, seen: Committed) -> Committed:
        """Goes on with fewer texts, everywhere; the last take the places that are free."""
        free = [text for text in self.alive if text not in self.going]
        # The first rows that are free are among the first of all, which stay where they are.
        staying = [*self.going, *free[:num_new]]
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
class Nodes:
    """The trees of a step after the target's pass over them.

    Attributes:
        tokens: [B, N] int64, the roots included; PAD where there is no node.
        output: the target's states [B, N, D].
        logits: [B, N, V].
    """

    tokens: Tensor
    output: TargetOutput
    logits: Tensor


def read(
    context_limits: ContextLimits, draft: Draft, roots: Tensor, cache: TreeCache, taps: Taps
) -> Nodes:
    """A pass of the target over trees.

    Args:
        context_limits: of the batch.
        draft: the trees.
        roots: [B] int64.
        cache: of the texts.
        taps: what the drafter reads.
    """
    layout, target = draft.layout(), context_limits.target
    tokens = torch.cat([roots.unsqueeze(1), draft.tokens], dim=1)
    tokens = context_limits.cut(tokens, layout.depths, cache)
    mask = None if draft.is_chain else layout.mask
    output = target.extend(cache, tokens.clamp_min(0), mask, layout.depths, taps)
    return Nodes(tokens, output, target.logits(output.hidden_states))
