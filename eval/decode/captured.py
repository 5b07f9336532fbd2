"""Decoding in CUDA graphs: whole steps, or verify passes where the host has a hand in drafts.

A step of a drafter with `static_nodes` asks the host for nothing: draft, pass, acceptance and what
the drafter observes are one launch. The host learns of a step when the next one is under way, so
that the device never waits for it; a text that has ended goes on, unread, until another takes its
row. Any other drafter works as ever before and after a pass; the target's pass over its draft, what
is accepted and what is committed are one launch, for which the host waits. Such drafts are filled
up to a few sizes, each of which is a graph.

A pass reads a fixed number of slots, whatever the texts' lengths; where they outgrow it, a graph
for more is captured beside.

Letters: B texts, N tree nodes (root included), D depth.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from eval.decode.engine import Batch, Generation, Make, NewTokens, Prefilled, Request
from eval.decode.verify_pass import ContextLimits, HostStep, Verified, read_trees
from heads.decoding.cache import Kept, TreeCache
from heads.decoding.drafting import PAD, Committed, Draft, Drafter, Roots
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import Tree
from heads.target_model.model import Taps, Target

Output = TypeVar("Output")
WIDTH = 512
"""Slots by which what a pass reads grows."""
FREE = -1
"""The number of no text, of a row that has had none yet."""
SIZES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Draft tokens, and depths, that drafts are filled up to."""


class CaptureError(RuntimeError):
    """A step that CUDA does not capture."""


class Graph(Generic[Output]):
    """All that a call launches, to be launched again at once.

    Args:
        call: launches; run once, and computes nothing.
        pool: of the memory that it uses; not to be used again after an error.

    Raises:
        CaptureError: CUDA does not capture it; its cause is what was refused first. Nothing else
            has changed: what follows runs, and is captured, as if nobody had tried.
    """

    def __init__(self, call: Callable[[], Output], pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on with what a capture does not allow.
            with (
                _or_as_before(self.graph, pool),
                torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"),
            ):
                self.output = call()
        except RuntimeError as error:
            # What failed first: the end of a capture fails of it, and says less.
            cause: BaseException = error
            while isinstance(cause.__context__, RuntimeError):
                cause = cause.__context__
            raise CaptureError(f"{type(cause).__name__}: {cause}") from cause

    def launch(self) -> Output:
        """Runs it, while the host goes on; gives the call's output, written over."""
        self.graph.replay()
        return self.output


_failed: list[Any] = []
"""Graphs whose captures torch 2.13's allocator of pinned memory takes for being under way: it asks
them at every later one."""


@contextmanager
def _or_as_before(graph: Any, pool: Any) -> Iterator[None]:
    """Undoes what `torch.cuda.graph` leaves behind where the end of its capture fails.

    The thread stays on the stream of captures then, the allocator keeps the pool open, so that
    it frees nothing that several streams have used, and before torch 2.13 the device's generator
    refuses to draw.
    """
    stream, device = torch.cuda.current_stream(), torch.cuda.current_device()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        if _was_open(pool, device):
            _failed.append(graph)
            torch._C._cuda_releasePool(device, pool)
            generator = torch.cuda.default_generators[device]
            fresh = torch.Generator(generator.device)
            fresh.set_state(generator.get_state())
            generator.graphsafe_set_state(fresh)
        raise


def _was_open(pool: Any, device: int) -> bool:
    """Closes a pool; one that a capture has closed is refused."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return False
    return True


def obstacle(target: Target, sampling: Sampling) -> str:
    """The reason why passes of a target cannot be captured; empty where they can."""
    if not sampling.greedy:
        return "tokens are sampled by generators of the host"
    if len({parameter.device for parameter in target.model.parameters()}) > 1:
        return "the target's layers lie on several devices"
    if target.is_recurrent:
        return "the target's recurrent layers run depth by depth"
    if target.rope.switch is not None:
        return "the target reads texts beyond a length in another way"
    if target.logits_processing:
        return "the target's generation config asks for processors of logits"
    return ""


def slots_for(length: int, num_nodes: int) -> int:
    """Slots that a pass reads where the longest text is known to have so many tokens.

    The step before may have added as many as a tree has nodes, this one may too, and those of the
    next are pending behind them.
    """
    return -(-(length + 3 * num_nodes) // WIDTH) * WIDTH


class Captured:
    """Decodes greedy texts of one way to draft; what it captures for one serves the next ones.

    Args:
        target: the target, without an `obstacle`.
        make: makes a fresh drafter.
        max_new_tokens: of a text.

    Attributes:
        what: is captured.
        kept: of the last text, `CapturedSteps` or `CapturedPasses`; of several at a time None.
    """

    def __init__(self, target: Target, make: Make, max_new_tokens: int) -> None:
        self.target, self.make, self.max_new_tokens = target, make, max_new_tokens
        self.what = "verify pass" if make([0]).static_nodes is None else "step"
        self.kept: Any = None

    def decode(self, requests: Sequence[Request], batch_size: int) -> list[Generation]:
        """See `decode_many`.

        Raises:
            CaptureError: CUDA does not capture them.
        """
        kind: type[StepBatch] | type[PassBatch]
        kind = StepBatch if self.what == "step" else PassBatch
        batch = kind(self.target, self.make, requests, self.max_new_tokens, batch_size)
        # Passes know one number of texts, steps any.
        if batch_size == 1 or self.what == "step":
            batch.captured = self.kept
        self.kept = None
        generations = batch.decoded()
        # Larger batches give rows up as they end, and what they leave holds a cache.
        self.kept = batch.captured if batch_size == 1 else None
        return generations


class _Graphs(Generic[Output]):
    """Graphs of one call by their key.

    With a new key the call first runs as it is: kernels are loaded and buffers made outside of any
    capture.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.captured: dict[Hashable, Graph[Output]] = {}
        self.met: set[Hashable] = set()

    def awaits(self, key: Hashable) -> bool:
        """True where a graph is to be captured before the next run."""
        return key in self.met and key not in self.captured

    def capture(self, key: Hashable, call: Callable[[], Output]) -> None:
        """Makes a graph; computes nothing."""
        self.captured[key] = Graph(call, self.pool)

    def run(self, key: Hashable, call: Callable[[], Output]) -> Output:
        """The call, in one launch where it has been captured."""
        if key in self.captured:
            return self.captured[key].launch()
        self.met.add(key)
        return call()


def _verify(
    limits: ContextLimits, draft: Draft, roots: Tensor, cache: TreeCache, taps: Taps
) -> Verified:
    """A greedy pass that asks the host for nothing, with cache and roots written in place."""
    verified = read_trees(limits, draft, roots, cache, taps).accept(
        draft, GREEDY, Generators([], [])
    )
    if draft.is_chain:
        cache.slots.advance(verified.counts, [])
    else:
        path = verified.accepted.nodes[:, : draft.depth + 1]
        cache.commit([], Kept(path, verified.counts))
    roots.copy_(verified.accepted.bonus)
    return verified


class CapturedSteps:
    """Rows of a batch whose steps are captured: all that a step reads and leaves behind.

    Args:
        target: the target.
        drafter: with `static_nodes`; has observed the rows' texts.
        roots: [B] int64.
        generators: of the rows.
        cache: of the rows.
        longest: tokens of the longest text that there will be.

    Attributes:
        committed: by the last step, in tensors that stay where they are; None before the first.
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
        self.committed: Committed | None = None
        self.width, self.graphs = 0, _Graphs[None]()
        self.buffers: list[Tensor] = []
        self.record: Tensor | None = None

    def fits(self, longest: int) -> bool:
        """True where a text that long has room."""
        return slots_for(longest, self.num_nodes) <= self.capacity

    def prepare(self, longest: int) -> bool:
        """Reserves slots for texts known to be so long; true if the step awaits its capture."""
        width, held = slots_for(longest, self.num_nodes), self.cache.slots.held
        if self.target.capacity is not None:
            width = self.target.capacity
        elif held is not None and len(self.roots) > 1:
            # Beside others, rows whose texts have ended may have come as far as there were slots.
            width = max(width, held)
        if width != held:
            self.cache.hold(width, self.num_nodes, self.capacity)
        self.width = width
        return self.graphs.awaits(width)

    def capture(self) -> None:
        """Makes the graph of a step; computes nothing."""
        self.graphs.capture(self.width, self._step)

    def launch(self) -> tuple[Tensor, torch.cuda.Event]:
        """The step: its record on the way to pinned memory, and when it is there."""
        self.graphs.run(self.width, self._step)
        assert self.record is not None
        # Into the buffer that was read last.
        if len(self.buffers) < 2:
            pinned = torch.cuda.is_available()
            buffer = torch.empty(self.record.shape, dtype=torch.int64, pin_memory=pinned)
        else:
            buffer = self.buffers.pop(0)
        self.buffers.append(buffer.copy_(self.record, non_blocking=True))
        done = torch.cuda.Event()
        done.record()
        return buffer, done

    def _step(self) -> None:
        draft, taps = self.drafter.propose(Roots(self.roots, [])), self.drafter.taps
        verified = _verify(self.context_limits, draft, self.roots, self.cache, taps)
        path = verified.accepted.nodes[:, : draft.depth + 1]
        new = Committed(
            token_ids=[],
            output=verified.nodes.output.at(path),
            cache=self.cache,
            logits=verified.nodes.logits,
            on_device=(verified.on_path[:, : path.shape[1]], verified.counts),
        )
        # The drafter observes the step in tensors that it knows.
        if self.committed is None:
            self.committed = replace(new, logits=None)
        else:
            self.committed.fill(new)
        self.drafter.observe(replace(self.committed, logits=new.logits))
        if self.record is None:
            self.record = verified.record
        else:
            self.record.copy_(verified.record)


@dataclass(frozen=True)
class _Launched:
    """A step that is under way.

    Attributes:
        texts: by row, as the step began.
        record: [B, 3 + 2 N] in pinned memory.
        done: when it is there.
    """

    texts: list[int]
    record: Tensor
    done: torch.cuda.Event


class StepBatch(Batch):
    """Greedy texts of a drafter with `static_nodes` on a GPU, in steps that are captured.

    Attributes:
        captured: the rows; may be those of an earlier batch that has ended.
    """

    captured: CapturedSteps | None = None
    late: _Launched | None = None

    def _start(self) -> tuple[Committed, NewTokens]:
        """As ever, or with free rows, which the first texts take."""
        rows, size = self.captured, self.batch_size
        if rows is None or len(rows.roots) != size or not rows.fits(self.longest):
            self.captured = None
            return super()._start()
        assert rows.committed is not None
        self.drafter, self.roots, self.generators = rows.drafter, rows.roots, rows.generators
        self.rows, self.running = [FREE] * size, []
        return rows.committed, {}

    def _go_on(self, prefilled: list[Prefilled], committed: Committed) -> Committed:
        """New texts take the rows of those that have ended; the drafter has observed its steps."""
        if self.captured is None:
            committed = super()._go_on(prefilled, committed)
            self.captured = self._captured_rows(committed)
        elif 2 * (len(self.running) + len(prefilled)) <= len(self.rows):
            committed = self._drop(len(prefilled), committed)
            self._seat(prefilled, committed.cache)
            self.captured = self._captured_rows(committed)
            self.captured.committed = committed
        else:
            self._seat(prefilled, committed.cache)
        return committed

    def _captured_rows(self, committed: Committed) -> CapturedSteps:
        return CapturedSteps(
            target=self.target,
            drafter=self.drafter,
            roots=self.roots,
            generators=self.generators,
            cache=committed.cache,
            longest=self.longest,
        )

    def _step(self, committed: Committed) -> tuple[Committed, NewTokens]:  # noqa: ARG002
        """Launches a step; new tokens by text of the one before, of the first none."""
        rows = self.captured
        assert rows is not None
        if rows.prepare(self._length(self.running)):
            with self.clock.aside():
                rows.capture()
        with self.clock.part("step", self.running):
            launched = _Launched(list(self.rows), *rows.launch())
        late, self.late = self.late, launched
        assert rows.committed is not None
        if late is None:
            return rows.committed, {}
        late.done.synchronize()  # the only thing that is waited for
        steps = zip(late.texts, HostStep.all_of(late.record.tolist()), strict=True)
        new = {text: self._note_one(text, step) for text, step in steps if text in self.running}
        return rows.committed, new


class PassShape(NamedTuple):
    """The shape of drafts that share a graph.

    Attributes:
        tree: of all texts; None where each has its own.
        num_tokens: N - 1.
        depth: D, or more.
    """

    tree: Tree | None
    num_tokens: int
    depth: int

    @classmethod
    def of(cls, draft: Draft) -> "PassShape":
        """The least that holds a draft."""
        tree, num_tokens = draft.tree, draft.tokens.shape[1]
        if isinstance(tree, Tree) and not draft.is_chain:
            return cls(tree, num_tokens, tree.depth)
        size, depth = (
            next((size for size in SIZES if size >= number), number)
            for number in (num_tokens, draft.depth)
        )
        if isinstance(tree, Tree):
            return cls(Tree.chain(size), size, size)
        return cls(None, size, min(size, depth))


class CapturedPasses:
    """The verify passes of a batch.

    Args:
        target: the target.
        cache: of the texts.
        roots: [B] int64, in their place.
        taps: the states that the drafter needs.
        longest: tokens of the longest text that there will be.

    Attributes:
        most: draft tokens of a text so far.
        capacity: slots of the caches.
        key: of the next pass: its shape, and the slots that it reads.
    """

    def __init__(
        self, target: Target, cache: TreeCache, roots: Tensor, taps: Taps, longest: int
    ) -> None:
        self.context_limits, self.taps = ContextLimits(target, []), taps
        self.cache, self.roots, self.longest, self.most = cache, roots, longest, 0
        self.capacity = target.capacity or slots_for(longest, 1)
        self.fixed = target.capacity is not None
        self.inputs: dict[PassShape, tuple[Tensor, Tensor]] = {}
        self.graphs = _Graphs[Verified]()
        self.key = PassShape(None, 0, 0), 0

    def fits(self, longest: int) -> bool:
        """True where a text that long has room, with as much drafted for it as ever was."""
        return slots_for(longest, 1 + self.most) <= self.capacity

    def take(self, committed: Committed, roots: Tensor, longest: int) -> Committed:
        """The one text of another cache goes on here: its prompt, as a drafter observes it."""
        self.longest = longest
        self.cache.take(0, committed.cache)
        self.roots.copy_(roots)
        # Before a head reads the prompt in as many slots as the last text had.
        self._hold(self.cache.slots.lengths[0], 1)
        return replace(committed, cache=self.cache)

    def prepare(self, draft: Draft, longest: int) -> bool:
        """Takes a draft for texts known to be so long; true if its pass awaits its capture."""
        shape = PassShape.of(draft)
        if shape.num_tokens > SIZES[-1]:
            raise CaptureError(f"{shape.num_tokens} draft tokens, more than {SIZES[-1]}")
        self.most = max(self.most, shape.num_tokens)
        if not self.fits(self.longest):
            if self.fixed:
                raise CaptureError(
                    f"{self.longest} tokens and {self.most} drafted in a compiled target's "
                    f"{self.capacity} slots"
                )
            # Caches may move now, away from all graphs.
            self.capacity, self.graphs = slots_for(self.longest, 1 + self.most), _Graphs()
        self.key = shape, self._hold(longest, 1 + shape.num_tokens)
        self._write(shape, draft)
        return self.graphs.awaits(self.key)

    def capture(self) -> None:
        """Makes the graph of a pass; computes nothing."""
        self.graphs.capture(self.key, self._pass)

    def run(self) -> Verified:
        """The pass over the draft, in tensors that the next one of its key writes over."""
        return self.graphs.run(self.key, self._pass)

    def _hold(self, longest: int, num_nodes: int) -> int:
        """Slots that passes read from now on."""
        width = self.capacity if self.fixed else slots_for(longest, num_nodes)
        self.cache.hold(width, num_nodes, self.capacity)
        return width

    def _write(self, shape: PassShape, draft: Draft) -> None:
        """Writes a draft where its graph reads it."""
        missing = shape.num_tokens - draft.tokens.shape[1]
        tokens, parents = pad(draft.tokens, (0, missing), value=PAD), draft.tree
        parents = tokens if isinstance(parents, Tree) else pad(parents, (0, missing))
        if shape not in self.inputs:
            self.inputs[shape] = tokens.clone(), parents.clone()
        for own, new in zip(self.inputs[shape], (tokens, parents), strict=True):
            own.copy_(new)

    def _pass(self) -> Verified:
        shape, _ = self.key
        tokens, parents = self.inputs[shape]
        draft = Draft(parents if shape.tree is None else shape.tree, tokens, shape.depth)
        return _verify(self.context_limits, draft, self.roots, self.cache, self.taps)


class PassBatch(Batch):
    """Greedy texts of any drafter on a GPU, in verify passes that are captured.

    Attributes:
        captured: the passes; may be those of an earlier batch of one text that has ended.
    """

    captured: CapturedPasses | None = None

    def _start(self) -> tuple[Committed, NewTokens]:
        """As ever; an earlier text's slots are used again."""
        committed, new = super()._start()
        if self.captured is not None and not self.captured.fits(self.longest):
            self.captured = None
        if self.captured is not None:
            committed = self.captured.take(committed, self.roots, self.longest)
            self.roots = self.captured.roots
        return committed, new

    def _go_on(self, prefilled: list[Prefilled], committed: Committed) -> Committed:
        """As ever; with fewer rows all is new."""
        if len(self.running) + len(prefilled) < len(self.rows):
            self.captured = None
        committed = super()._go_on(prefilled, committed)
        if self.captured is None:
            taps = self.drafter.taps
            self.captured = CapturedPasses(
                self.target, committed.cache, self.roots, taps, self.longest
            )
        return committed

    def _step(self, committed: Committed) -> tuple[Committed, NewTokens]:
        """Drafts, then the rest at once."""
        passes = self.captured
        assert passes is not None
        with self.clock.part("draft", self.rows):
            draft = self.drafter.propose(self._last_tokens())
        if passes.prepare(draft, self._length(self.rows)):
            with self.clock.aside():
                passes.capture()
        with self.clock.part("verify", self.rows):
            verified = passes.run()
        with self.clock.part("accept", self.rows):
            steps = HostStep.all_of(verified.record.tolist())
            # A head that does not draft for a while keeps them.
            verified = replace(verified, on_path=verified.on_path.clone())
            return verified.committed(steps, committed.cache), self._note(steps)
