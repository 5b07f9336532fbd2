"""Verify passes as CUDA graphs, for drafts that the host has a hand in.

The target's pass over a draft, what is accepted of it and what is committed are one launch; the
drafter works as ever before and after it, and the host waits for each pass, as the next draft
needs to know what was kept. Drafts are filled up to a few sizes, each of which is a graph.

Letters: B texts, N tree nodes (root included), D depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eval.decode.accept import Accepted, verify
from eval.decode.batch import Batch, Begun, Nodes, read
from eval.decode.captured import slots_for
from eval.decode.context_limits import ContextLimits
from eval.decode.fetch import fetched, record
from eval.decode.generation import Request
from eval.decode.graphs import CaptureError, Graph
from heads.decoding.cache import Kept, TreeCache
from heads.decoding.drafting import PAD, Committed, Draft, Roots
from heads.decoding.sampling import GREEDY, Generators
from heads.decoding.tree import Tree
from heads.target_model.model import Taps, Target

SIZES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Draft tokens, and depths, that drafts are filled up to."""


class Shape(NamedTuple):
    """Of drafts that share a graph.

    Attributes:
        tree: of all texts; None where each has its own.
        num_tokens: N - 1.
        depth: D, or more.
    """

    tree: Tree | None
    num_tokens: int
    depth: int

    @classmethod
    def of(cls, draft: Draft) -> "Shape":
        """The least that holds a draft."""
        tree, number = draft.tree, draft.tokens.shape[1]
        if isinstance(tree, Tree) and not draft.is_chain:
            return cls(tree, number, tree.depth)
        size = _filled_up(number)
        if isinstance(tree, Tree):
            return cls(Tree.chain(size), size, size)
        return cls(None, size, min(size, _filled_up(draft.depth)))


def _filled_up(number: int) -> int:
    return next((size for size in SIZES if size >= number), number)


@dataclass(frozen=True)
class Passed:
    """A pass, in tensors that the next one of its kind writes over.

    Attributes:
        nodes: tokens, states and logits.
        accepted: what is kept.
        on_path: [B, N] int64, the tokens of its nodes.
        record: [B, 3 + 2 N] int64, for the host.
    """

    nodes: Nodes
    accepted: Accepted
    on_path: Tensor
    record: Tensor


class Passes:
    """The passes of a batch.

    Args:
        target: the target.
        cache: of the texts.
        roots: [B] int64, in their place.
        taps: what the drafter reads.
        longest: tokens of the longest text that there will be.

    Attributes:
        most: draft tokens of a text so far.
        capacity: slots of the caches.
    """

    def __init__(
        self, target: Target, cache: TreeCache, roots: Tensor, taps: Taps, longest: int
    ) -> None:
        self.context_limits, self.taps = ContextLimits(target, []), taps
        self.cache, self.roots, self.longest, self.most = cache, roots, longest, 0
        self.capacity = target.capacity or slots_for(longest, 1)
        self.fixed = target.capacity is not None
        self.pool = torch.cuda.graph_pool_handle()
        self.inputs: dict[Shape, tuple[Tensor, Tensor]] = {}
        self.graphs: dict[tuple[Shape, int], tuple[Graph, Passed]] = {}
        self.met: set[tuple[Shape, int]] = set()

    def fits(self, longest: int) -> bool:
        """Whether a text that long has room, with as much drafted for it as ever was."""
        return slots_for(longest, 1 + self.most) <= self.capacity

    def take(self, seen: Committed, roots: Tensor, longest: int) -> Committed:
        """The one text of another cache goes on here: its prompt, as a drafter reads it."""
        self.longest = longest
        self.cache.take(0, seen.cache)
        self.roots.copy_(roots)
        # Before a head reads the prompt in as many slots as the last text had.
        self._hold(self.cache.slots.lengths[0], 1)
        return replace(seen, cache=self.cache)

    def prepare(self, draft: Draft, longest: int) -> bool:
        """For a draft, and texts known to be so long; whether its pass is to be captured first."""
        shape = Shape.of(draft)
        if shape.num_tokens > SIZES[-1]:
            raise CaptureError(f"{shape.num_tokens} draft tokens, more than {SIZES[-1]}")
        self.most = max(self.most, shape.num_tokens)
        if not self.fits(self.longest):
            self._make_room()
        self.key = shape, self._hold(longest, 1 + shape.num_tokens)
        self._give(shape, draft)
        return self.key in self.met and self.key not in self.graphs

    def capture(self) -> None:
        """Makes the graph of a pass; computes nothing."""
        found: list[Passed] = []
        graph = Graph(lambda: found.append(self._pass(self.key[0])), self.pool)
        self.graphs[self.key] = graph, found[0]

    def run(self) -> Passed:
        """The pass over the draft."""
        if self.key in self.graphs:
            graph, passed = self.graphs[self.key]
            graph.launch()
            return passed
        self.met.add(self.key)
        return self._pass(self.key[0])

    def _make_room(self) -> None:
        """For the longest text with the largest drafts; caches may move, away from all graphs."""
        if self.fixed:
            raise CaptureError(
                f"{self.longest} tokens and {self.most} drafted in a compiled target's "
                f"{self.capacity} slots"
            )
        self.capacity = slots_for(self.longest, 1 + self.most)
        self.graphs.clear()
        self.met.clear()
        self.pool = torch.cuda.graph_pool_handle()  # the other one ends with its graphs

    def _hold(self, longest: int, num_nodes: int) -> int:
        """Slots that passes read from now on."""
        width = self.capacity if self.fixed else slots_for(longest, num_nodes)
        self.cache.hold(width, num_nodes, self.capacity)
        return width

    def _give(self, shape: Shape, draft: Draft) -> None:
        """Writes a draft where its graph reads it."""
        missing = shape.num_tokens - draft.tokens.shape[1]
        tokens, parents = pad(draft.tokens, (0, missing), value=PAD), draft.tree
        parents = tokens if isinstance(parents, Tree) else pad(parents, (0, missing))
        if shape not in self.inputs:
            self.inputs[shape] = tokens.clone(), parents.clone()
        for own, new in zip(self.inputs[shape], (tokens, parents), strict=True):
            if own is not new:
                own.copy_(new)

    def _pass(self, shape: Shape) -> Passed:
        tokens, parents = self.inputs[shape]
        draft = Draft(parents if shape.tree is None else shape.tree, tokens, shape.depth)
        nodes = read(self.context_limits, draft, self.roots, self.cache, self.taps)
        accepted = verify(draft, nodes.tokens, nodes.logits, GREEDY, Generators([], []))
        on_path, counts = nodes.tokens.gather(1, accepted.nodes), accepted.num_accepted + 1
        if draft.is_chain:
            self.cache.slots.advance(counts, [])
        else:
            self.cache.commit([], Kept(accepted.nodes[:, : shape.depth + 1], counts))
        self.roots.copy_(accepted.bonus)
        return Passed(nodes, accepted, on_path, record(accepted, on_path, draft))


class PassedBatch(Batch):
    """Texts of any drafter on a GPU, in verify passes that are captured.

    Args:
        target: the target.
        requests: the texts.
        max_new_tokens: of each, at most.
        passes: of an earlier batch of one text that has ended; None makes new ones.
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[Request],
        max_new_tokens: int,
        passes: Passes | None = None,
    ) -> None:
        super().__init__(target, requests, max_new_tokens, GREEDY)
        self.longest = max(map(len, self.prompts)) + max_new_tokens
        self.passes = passes if passes is None or passes.fits(self.longest) else None

    def _start(self, batch_size: int) -> tuple[Committed, dict[int, list[int]]]:
        """As ever; an earlier text's slots are used again."""
        seen, new = super()._start(batch_size)
        if self.passes is not None:
            seen, self.roots = self.passes.take(seen, self.roots, self.longest), self.passes.roots
        return seen, new

    def _go_on(self, begun: list[Begun], seen: Committed) -> Committed:
        """As ever; with fewer rows all is new."""
        if len(self.going) + len(begun) < len(self.alive):
            self.passes = None
        seen = super()._go_on(begun, seen)
        if self.passes is None:
            of_rows = seen.cache, self.roots, self.drafter.taps
            self.passes = Passes(self.target, *of_rows, self.longest)
        return seen

    def _step(self, seen: Committed) -> tuple[Committed, dict[int, list[int]]]:
        """Draft, then the rest at once."""
        assert self.passes is not None
        ids = [self.found[text].token_ids[-1] for text in self.alive]
        with self.clock.part("draft", self.alive):
            draft = self.drafter.propose(Roots(self.roots, ids))
        longest = max(len(self.prompts[t]) + len(self.found[t].token_ids) for t in self.alive)
        if self.passes.prepare(draft, longest):
            with self.clock.aside():
                self.passes.capture()
        with self.clock.part("verify", self.alive):
            passed = self.passes.run()
        with self.clock.part("accept", self.alive):
            return self._see(passed, seen.cache)

    def _see(self, passed: Passed, cache: TreeCache) -> tuple[Committed, dict[int, list[int]]]:
        """What the host learns, and what the drafter may keep."""
        steps = fetched(passed.record.tolist())
        kept, paths = [step.tokens for step in steps], [step.path for step in steps]
        longest, nodes = max(map(len, paths)), passed.nodes
        path = passed.accepted.nodes[:, :longest]
        # A head that does not draft for a while keeps them.
        on_device = passed.on_path[:, :longest].clone(), passed.accepted.num_accepted + 1
        new = {text: self._add(text, each) for text, each in zip(self.alive, steps, strict=True)}
        committed = Committed(
            kept,
            nodes.output.at(path),
            cache,
            logits=nodes.logits,
            on_device=on_device,
            paths=paths,
            nodes=path,
        )
        return committed, new
