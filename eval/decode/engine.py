"""One decoding engine for every drafter: lay out, run the target once, accept, compact.

A batch of texts goes on together, each accepting as many tokens as it does; a text that ends
leaves the batch. A step waits for the device once, to learn which tokens were kept.

Letters: B texts, N tree nodes (root included), D hidden, V vocab.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.clock import PartClock, Times
from eval.decode.accept import Accepted, verify
from eval.decode.crossing import Crossing
from eval.decode.rules import Rules
from eval.decode.texts import Stops
from heads.cache import Kept, TreeCache, upload
from heads.drafting import Draft, Drafter, Seen
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


@dataclass(frozen=True)
class Step:
    """One text's share of a verify pass.

    Attributes:
        num_accepted: draft tokens kept.
        num_emitted: tokens kept, the bonus token included; a text that ends inside the accepted
            run is cut there and what is cut is not counted.
        num_left: tokens that the text still had to give when the pass started; depths beyond it
            could not be tested.
    """

    num_accepted: int
    num_emitted: int
    num_left: int


@dataclass
class Generation:
    """What a decode gave for one text.

    Attributes:
        token_ids: the text.
        steps: its share of the verify passes.
        paths: the accepted nodes of each step, without the root.
        times: of its whole batch.
        drafted: draft tokens that each step checked, where they were counted.
    """

    token_ids: list[int]
    steps: list[Step] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    drafted: list[int] = field(default_factory=list)


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
        longest = max(map(len, prompts))
        assert target.window is None or longest + max_new_tokens <= target.window
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.prompts, self.max_new_tokens = prompts, max_new_tokens
        self.stops, self.rules = Stops.of(target), Rules(target.asked, target.stop_ids)
        self.clock = PartClock(target.device)
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.steps: list[list[Step]] = [[] for _ in prompts]
        self.paths: list[list[tuple[int, ...]]] = [[] for _ in prompts]
        self.alive = list(range(len(prompts)))
        self.generators = Generators.seeded(seeds or [0] * len(prompts), target.device)
        self.crossing = Crossing(target, prompts)

    @torch.inference_mode()
    def run(self) -> Iterator[dict[int, list[int]]]:
        """Tokens by text, after the prompts and after every step."""
        with self.clock.part("prefill"):
            seen, new = self._prefill()
        while True:
            going = self._emit(new)
            if not going:
                self.clock.stop()
            yield new
            if not going:
                return
            with self.clock.part("accept"):
                if len(going) < len(self.alive):
                    seen = self._drop(going, seen)
                if self.crossing.switch is not None:
                    whole = [self.prompts[text] + self.texts[text] for text in self.alive]
                    self.crossing.cross(seen.cache, self.alive, whole)
                self.drafter.observe(seen)
            with self.clock.part("draft"):
                draft = self.drafter.propose([self.texts[text][-1] for text in self.alive])
            with self.clock.part("verify"):
                nodes = self._read(draft, seen.cache)
            with self.clock.part("accept"):
                seen, new = self._accept(draft, nodes, seen.cache)

    def generations(self) -> list[Generation]:
        """What came out, once `run` is through."""
        columns = zip(self.texts, map(_left_at_end, self.steps), self.paths, strict=True)
        return [Generation(text, steps, paths, self.clock.times) for text, steps, paths in columns]

    def _prefill(self) -> tuple[Seen, dict[int, list[int]]]:
        """What the prompts gave, and the first token of each text."""
        cache, rows = self.target.new_cache(len(self.prompts)), list(self.prompts)
        if len(rows) == 1:
            seen = self._in_parts(cache, rows)
        else:
            seen = Seen(rows, prefill(self.target, cache, rows, self.drafter.reads), cache)
        logits = self.target.logits(seen.last.hidden_states[:, 0])
        logits = self.rules.begin(logits, list(self.prompts))
        self.roots = sample_tokens(logits, self.sampling, self.generators)
        return seen, {text: [root] for text, root in enumerate(self.roots.tolist())}

    def _in_parts(self, cache: TreeCache, rows: list[list[int]]) -> Seen:
        """The last part of a prompt; the drafter has seen the others, and nobody keeps them."""
        found: list[Seen] = []
        for tokens, output in parts(self.target, cache, rows, self.drafter.reads):
            if found:
                self.drafter.observe(found.pop())
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
            texts = [self.prompts[text] + self.texts[text][:-1] for text in self.alive]
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
        paths, tokens_on_path, bonus = _fetch(accepted, on_path)
        counts, longest = accepted.num_accepted + 1, max(map(len, paths))
        cache.commit(paths, Kept(accepted.nodes, counts))
        self.roots = accepted.bonus
        kept = [tokens[: len(path)] for tokens, path in zip(tokens_on_path, paths, strict=True)]
        new = {}
        for text, path, tokens, token in zip(self.alive, paths, kept, bonus, strict=True):
            num_left = self.max_new_tokens - len(self.texts[text])
            new[text] = self.stops.cut(self.texts[text], [*tokens[1:], token][:num_left])
            num_accepted = min(len(path) - 1, len(new[text]))
            self.steps[text].append(Step(num_accepted, len(new[text]), num_left))
            self.paths[text].append(tuple(path[1:]))
        seen = accepted.nodes[:, :longest]
        output, found = nodes.output.at(seen), (on_path[:, :longest], counts)
        return Seen(kept, output, cache, nodes.logits, found, paths, seen), new

    def _emit(self, new: dict[int, list[int]]) -> list[int]:
        """Adds tokens to the texts; the texts that go on."""
        for text, tokens in new.items():
            self.texts[text] += tokens
        return [
            text
            for text in self.alive
            if len(self.texts[text]) < self.max_new_tokens
            and not self.stops.ended(self.texts[text])
        ]

    def _drop(self, going: list[int], seen: Seen) -> Seen:
        """Goes on with some texts only, everywhere; the last take the places that are free."""
        last = [row for row in range(len(going), len(self.alive)) if self.alive[row] in going]
        first = range(len(going))
        rows = [row if self.alive[row] in going else last.pop() for row in first]
        seen.cache.keep(rows)
        self.drafter.keep(rows)
        self.generators = self.generators.rows(rows)
        self.alive = [self.alive[row] for row in rows]
        self.roots = self.roots[upload(rows, self.target.device)]
        return seen.rows(rows)


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


def _fetch(
    accepted: Accepted, on_path: Tensor
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """The accepted path and its tokens per text, and the bonus tokens: the wait of a step."""
    columns = [
        accepted.nodes, on_path,
        accepted.num_accepted.unsqueeze(1), accepted.bonus.unsqueeze(1),
    ]  # fmt: skip
    rows = torch.cat(columns, dim=1).tolist()
    width = accepted.nodes.shape[1]
    paths = [row[: row[-2] + 1] for row in rows]
    return paths, [row[width : 2 * width] for row in rows], [row[-1] for row in rows]


def _left_at_end(steps: list[Step]) -> list[Step]:
    """Sets each step's `num_left` to the tokens that the text really had left."""
    left, ended = 0, []
    for step in reversed(steps):
        left += step.num_emitted
        ended.append(Step(step.num_accepted, step.num_emitted, left))
    return ended[::-1]
