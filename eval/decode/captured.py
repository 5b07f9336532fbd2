"""Steps of a batch as CUDA graphs: one launch each, which the host reads one step late.

Draft, verify, accept and commit are captured whole. All that lasts from step to step lies in
tensors that stay where they are; what the host learns of a step it copies while the next one is
already under way, so that the device never waits for Python. What a text's last steps have drafted
too much is dropped. A row whose text has ended goes on, unread, until another text takes it or half
of the rows are free.

Passes read a set number of slots; where texts grow beyond it, a graph for more is captured beside.

Letters: B texts, N tree nodes (root included), A nodes of the longest path.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.decode.accept import verify
from eval.decode.batch import Batch, Begun, read
from eval.decode.context_limits import ContextLimits
from eval.decode.fetch import fetched, record
from eval.decode.generation import Request
from eval.decode.graphs import CaptureError, Graph
from heads.decoding.cache import Kept, TreeCache
from heads.decoding.drafting import Committed, Drafter, Roots
from heads.decoding.sampling import GREEDY, Generators
from heads.target_model.model import Target

WIDTH = 512
"""Slots by which what a pass reads grows."""
FREE = -1
"""In place of a text, where a row has had none yet."""


def slots_for(length: int, num_nodes: int) -> int:
    """Slots that a pass reads where the longest text is known to have so many tokens.

    The step before may have added as many as a tree has nodes, this one may too, and those of the
    next are pending behind them.
    """
    return -(-(length + 3 * num_nodes) // WIDTH) * WIDTH


@dataclass(frozen=True)
class _Launched:
    """A step that is under way.

    Attributes:
        texts: by row, as the step began.
        rows: [B, 3 + 2 N] in pinned memory, of `record`.
        done: when they are there.
    """

    texts: list[int]
    rows: Tensor
    done: torch.cuda.Event


class Rows:
    """Rows of a batch whose steps are captured: all that a step reads and leaves behind.

    Args:
        target: the target.
        drafter: with `static_nodes`; has seen the rows' texts.
        roots: [B] int64.
        generators: of the rows.
        cache: of the rows.
        longest: tokens of the longest text that there will be.

    Attributes:
        seen: the last step, in tensors that stay where they are; None before the first.
        capacity: slots of the caches.
        width: slots that the next step reads.

    Raises:
        CaptureError: a compiled target's cache is too small.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        roots: Tensor,
        generators: Generators,
        cache: TreeCache,
        longest: int,
    ) -> None:
        assert drafter.static_nodes is not None
        self.target, self.drafter, self.num_nodes = target, drafter, drafter.static_nodes
        self.roots, self.generators, self.cache = roots, generators, cache
        self.context_limits = ContextLimits(target, [])
        self.capacity = target.capacity or slots_for(longest, self.num_nodes)
        if not self.fits(longest):
            raise CaptureError(f"{longest} tokens in a compiled target's {self.capacity} slots")
        self.seen: Committed | None = None
        self.pool, self.width = torch.cuda.graph_pool_handle(), 0
        self.graphs: dict[int, Graph] = {}
        self.met: set[int] = set()
        self.buffers: list[Tensor] = []
        self.record: Tensor | None = None

    def fits(self, longest: int) -> bool:
        """Whether a text that long has room."""
        return slots_for(longest, self.num_nodes) <= self.capacity

    def prepare(self, longest: int) -> bool:
        """For a step of texts known to be so long; whether it is to be captured first."""
        self.width = self._hold(longest)
        return self.width in self.met and self.width not in self.graphs

    def capture(self) -> None:
        """Makes the graph of a step; computes nothing."""
        self.graphs[self.width] = Graph(self._run, self.pool)

    def launch(self) -> tuple[Tensor, torch.cuda.Event]:
        """The step: its record in pinned memory, and when it is done."""
        if self.width in self.graphs:
            self.graphs[self.width].launch()
        else:
            # A first time as it is: kernels are loaded and buffers made outside of any capture.
            self._run()
            self.met.add(self.width)
        return self._told()

    def _hold(self, longest: int) -> int:
        """Slots that passes read from now on."""
        width, held = slots_for(longest, self.num_nodes), self.cache.slots.held
        if self.target.capacity is not None:
            width = self.target.capacity
        elif held is not None and len(self.roots) > 1:
            # Beside others, rows whose texts have ended may have come as far as there were slots.
            width = max(width, held)
        if width != held:
            self.cache.hold(width, self.num_nodes, self.capacity)
        return width

    def _told(self) -> tuple[Tensor, torch.cuda.Event]:
        """The step's record on its way to the host, into the buffer that was read last."""
        assert self.record is not None
        if len(self.buffers) < 2:
            pinned = torch.cuda.is_available()
            rows = torch.empty(self.record.shape, dtype=torch.int64, pin_memory=pinned)
        else:
            rows = self.buffers.pop(0)
        self.buffers.append(rows.copy_(self.record, non_blocking=True))
        done = torch.cuda.Event()
        done.record()
        return rows, done

    def _run(self) -> None:
        """A step that asks the host for nothing."""
        cache = self.cache
        draft = self.drafter.propose(Roots(self.roots, []))
        nodes = read(self.context_limits, draft, self.roots, cache, self.drafter.taps)
        accepted = verify(draft, nodes.tokens, nodes.logits, GREEDY, self.generators)
        on_path, counts = nodes.tokens.gather(1, accepted.nodes), accepted.num_accepted + 1
        path = accepted.nodes[:, : draft.depth + 1]
        if draft.is_chain:
            cache.slots.advance(counts, [])
        else:
            cache.commit([], Kept(path, counts))
        self.roots.copy_(accepted.bonus)
        on_device, output = (on_path[:, : path.shape[1]], counts), nodes.output.at(path)
        self._see(Committed([], output, cache, logits=nodes.logits, on_device=on_device))
        told = record(accepted, on_path, draft)
        self.record = told if self.record is None else self.record.copy_(told)

    def _see(self, new: Committed) -> None:
        """The drafter sees a step, in tensors that it knows."""
        if self.seen is None:
            self.seen = replace(new, logits=None)
        else:
            self.seen.fill(new)
        self.drafter.observe(replace(self.seen, logits=new.logits))


class CapturedBatch(Batch):
    """Greedy texts of a drafter with `static_nodes` on a GPU.

    Args:
        target: the target.
        requests: the texts.
        max_new_tokens: of each, at most.
        rows: of an earlier batch that has ended; None makes new ones.
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[Request],
        max_new_tokens: int,
        rows: Rows | None = None,
    ) -> None:
        super().__init__(target, requests, max_new_tokens, GREEDY)
        self.rows = rows
        self.late: _Launched | None = None
        self.longest = max(map(len, self.prompts)) + max_new_tokens

    def _start(self, batch_size: int) -> tuple[Committed, dict[int, list[int]]]:
        """As ever, or with free rows, which the first texts take."""
        rows = self.rows
        if rows is None or len(rows.roots) != batch_size or not rows.fits(self.longest):
            self.rows = None
            return super()._start(batch_size)
        assert rows.seen is not None
        self.drafter, self.roots, self.generators = rows.drafter, rows.roots, rows.generators
        self.alive, self.going = [FREE] * batch_size, []
        return rows.seen, {}

    def _go_on(self, begun: list[Begun], seen: Committed) -> Committed:
        """New texts take the rows of those that have ended; the drafter has seen its steps."""
        if self.rows is None:
            seen = super()._go_on(begun, seen)
            self._hold(seen.cache)
        elif 2 * (len(self.going) + len(begun)) <= len(self.alive):
            seen = self._drop(len(begun), seen)
            self._seat(begun, seen.cache)
            self._hold(seen.cache)
            assert self.rows is not None
            self.rows.seen = seen
        else:
            self._seat(begun, seen.cache)
        return seen

    def _hold(self, cache: TreeCache) -> None:
        """Rows as they are now."""
        of_rows = self.roots, self.generators, cache
        self.rows = Rows(self.target, self.drafter, *of_rows, self.longest)

    def _step(self, seen: Committed) -> tuple[Committed, dict[int, list[int]]]:  # noqa: ARG002
        """Launches a step; new tokens by text of the one before, of the first none."""
        assert self.rows is not None
        longest = max(len(self.prompts[t]) + len(self.found[t].token_ids) for t in self.going)
        if self.rows.prepare(longest):
            with self.clock.aside():
                self.rows.capture()
        with self.clock.part("step", self.going):
            launched = _Launched(list(self.alive), *self.rows.launch())
        late, self.late = self.late, launched
        assert self.rows.seen is not None
        return self.rows.seen, {} if late is None else self._learn(late)

    def _learn(self, late: _Launched) -> dict[int, list[int]]:
        """New tokens by text of a step, the only thing that is waited for."""
        late.done.synchronize()
        steps = zip(late.texts, fetched(late.rows.tolist()), strict=True)
        return {text: self._add(text, step) for text, step in steps if text in self.going}
