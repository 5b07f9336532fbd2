"""Decoding with CUDA graphs: whole steps, or only verify passes if drafting needs the host.

A step of a drafter with `num_static_nodes` needs nothing from the host: draft, pass, acceptance and
observation are one launch. The host reads each step while the next one runs, so the device never
waits. A finished text continues unread until another takes its row. Other drafters work as usual
before and after a pass; the target's pass over the draft, acceptance and commit are one launch, for
which the host waits. Their drafts are padded to a few sizes, with one graph each.

A pass reads a fixed number of slots, whatever the texts' lengths; when they outgrow it, a graph
with more slots is captured.

Letters: B texts, N tree nodes (root included), D depth.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from eval.decode.engine import (
    DecodingBatch,
    DrafterFactory,
    Generation,
    NewTokens,
    Prefilled,
    Request,
)
from eval.decode.verification import (
    AcceptedPaths,
    ContextLimits,
    HostStep,
    accept_paths,
    run_verify_pass,
)
from heads.decoding.cache import KeptNodes, TreeCache
from heads.decoding.drafting import PAD, CommittedTokens, Draft, Roots
from heads.decoding.sampling import GREEDY, Sampling
from heads.decoding.tree import Tree
from heads.target_model.model import Target

Output = TypeVar("Output")
WIDTH = 512
"""Step by which the number of slots grows."""
FREE = -1
"""Text number of a row that has had no text yet."""
PADDED_DRAFT_SIZES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of draft tokens, and depths, to which drafts are padded."""


class CaptureError(RuntimeError):
    """CUDA cannot capture a step."""


class CudaGraph(Generic[Output]):
    """CUDA graph of everything that a call launches.

    Args:
        call: function that launches; run once for the capture, without computing.
        pool: memory pool; must not be used again after an error.

    Raises:
        CaptureError: CUDA cannot capture the call; the cause is the first refused operation. Later
            work runs and can be captured as if this capture had not been tried.
    """

    def __init__(self, call: Callable[[], Output], pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may do what a capture forbids.
            with (
                _restore_after_failure(self.graph, pool),
                torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"),
            ):
                self.output = call()
        except RuntimeError as error:
            # The first failure; the end of the capture then fails too, with less information.
            cause: BaseException = error
            while isinstance(cause.__context__, RuntimeError):
                cause = cause.__context__
            raise CaptureError(f"{type(cause).__name__}: {cause}") from cause

    def launch_graph(self) -> Output:
        """Launch the graph without waiting; return the call's output, overwritten in place."""
        self.graph.replay()
        return self.output


_failed_graphs: list[Any] = []
"""CUDA graphs whose capture failed. torch 2.13's allocator of pinned memory believes that they are
still being captured and asks them at every later capture, so these objects must not be freed."""


@contextmanager
def _restore_after_failure(graph: Any, pool: Any) -> Iterator[None]:
    """Undo what `torch.cuda.graph` leaves behind if the end of its capture fails.

    Otherwise the thread stays on the capture stream, the allocator keeps the pool open and frees no
    memory used by several streams, and before torch 2.13 the device's generator refuses to draw.
    """
    stream, device = torch.cuda.current_stream(), torch.cuda.current_device()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        if _close_pool(pool, device):
            _failed_graphs.append(graph)
            torch._C._cuda_releasePool(device, pool)
            generator = torch.cuda.default_generators[device]
            fresh = torch.Generator(generator.device)
            fresh.set_state(generator.get_state())
            generator.graphsafe_set_state(fresh)
        raise


def _close_pool(pool: Any, device: int) -> bool:
    """Close a memory pool; return False if the capture had closed it already."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return False
    return True


def find_capture_obstacle(target: Target) -> str:
    """Name the reason why passes of a target cannot be captured; empty if they can be."""
    if len({parameter.device for parameter in target.model.parameters()}) > 1:
        return "the target's layers lie on several devices"
    if target.is_recurrent:
        return "the target's recurrent layers run depth by depth"
    if target.long_rope.switch is not None:
        return "the target reads long texts with other frequencies"
    if target.logits_processing:
        return "the target's generation config changes its logits"
    return ""


def compute_num_slots(length: int, num_nodes: int) -> int:
    """Compute the cache slots of a pass whose longest text is known to have `length` tokens.

    The previous step and this one may each have added as many tokens as a tree has nodes, and those
    of the next are pending after them.
    """
    return -(-(length + 3 * num_nodes) // WIDTH) * WIDTH


class GraphDecoder:
    """Decodes texts with one drafter; its graphs serve all later texts.

    Args:
        target: target without an obstacle, see `find_capture_obstacle`.
        make: function that makes a drafter.
        max_new_tokens: largest number of tokens per text.
        sampling: how the target chooses.

    Attributes:
        what: captured part of a step.
        last_captured: `CapturedSteps` or `CapturedPasses` of the last text; None with several texts
            at a time.
    """

    def __init__(
        self, target: Target, make: DrafterFactory, max_new_tokens: int, sampling: Sampling = GREEDY
    ) -> None:
        self.target, self.make = target, make
        self.max_new_tokens, self.sampling = max_new_tokens, sampling
        self.what = "verify pass" if make([0]).num_static_nodes is None else "step"
        self.last_captured: Any = None

    def decode_requests(self, requests: Sequence[Request], batch_size: int) -> list[Generation]:
        """Decode texts, as `eval.decode.engine.decode_many` does.

        Raises:
            CaptureError: CUDA cannot capture the steps.
        """
        kind: type[StepBatch] | type[PassBatch]
        kind = StepBatch if self.what == "step" else PassBatch
        batch = kind(
            self.target, self.make, requests, self.max_new_tokens, batch_size, self.sampling
        )
        # Captured passes need a fixed number of texts; steps do not.
        if batch_size == 1 or self.what == "step":
            batch.captured = self.last_captured
        self.last_captured = None
        generations = batch.decode_all()
        # Larger batches drop rows as texts end, and their graphs would keep a cache alive.
        self.last_captured = batch.captured if batch_size == 1 else None
        return generations


class _Graphs(Generic[Output]):
    """Graphs of one call, by key.

    The first call with a key runs without capture, to load kernels and allocate buffers.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.captured: dict[Hashable, CudaGraph[Output]] = {}
        self.seen_keys: set[Hashable] = set()

    def needs_capture(self, key: Hashable) -> bool:
        """Tell whether a graph must be captured before the next run."""
        return key in self.seen_keys and key not in self.captured

    def capture_graph(self, key: Hashable, call: Callable[[], Output]) -> None:
        """Capture a graph, without computing."""
        self.captured[key] = CudaGraph(call, self.pool)

    def run_call(self, key: Hashable, call: Callable[[], Output]) -> Output:
        """Run the call of a key, in one launch if captured."""
        if key in self.captured:
            return self.captured[key].launch_graph()
        self.seen_keys.add(key)
        return call()


class _Rows:
    """Rows of a batch in fixed memory, which captured graphs read and write.

    Args:
        batch: batch whose drafter has observed its texts.
        cache: cache of the texts.

    Attributes:
        roots: [B] int64 tokens that the target has chosen but not read yet.
        generators: generators of the target's draws.
    """

    def __init__(self, batch: DecodingBatch, cache: TreeCache) -> None:
        self.target, self.taps, self.sampling = batch.target, batch.drafter.taps, batch.sampling
        self.roots, self.generators, self.cache = batch.roots, batch.generators, cache
        self.context_limits = ContextLimits(batch.target, [])

    def _verify_and_accept(self, draft: Draft) -> tuple[AcceptedPaths, Tensor]:
        """Verify a draft without the host; cache, roots and generators are written in place.

        Returns:
            Accepted paths, and the record that the host reads of them.
        """
        outputs = run_verify_pass(self.context_limits, draft, self.roots, self.cache, self.taps)
        accepted = accept_paths(draft, outputs, self.sampling, self.generators)
        if draft.is_chain:
            self.cache.slots.advance(accepted.counts, [])
        else:
            path = accepted.nodes[:, : draft.depth + 1]
            self.cache.commit([], KeptNodes(path, accepted.counts))
        self.roots.copy_(accepted.bonus)
        return accepted, accepted.pack_for_host(draft)


class CapturedSteps(_Rows):
    """Rows of a batch with captured steps: everything that a step reads and writes.

    Args:
        batch: batch whose drafter has `num_static_nodes` and has observed its texts.
        cache: cache of the texts.

    Attributes:
        committed: committed tokens of the last step, in fixed memory; None before the first step.
        capacity: slots of the caches.
        width: slots that the next step reads.

    Raises:
        CaptureError: a compiled target's cache is too small.
    """

    def __init__(self, batch: DecodingBatch, cache: TreeCache) -> None:
        super().__init__(batch, cache)
        assert batch.drafter.num_static_nodes is not None
        self.drafter, self.num_nodes = batch.drafter, batch.drafter.num_static_nodes
        self.capacity = self.target.capacity or compute_num_slots(batch.longest, self.num_nodes)
        if not self.has_room(batch.longest):
            raise CaptureError(
                f"{batch.longest} tokens in a compiled target's {self.capacity} slots"
            )
        self.committed: CommittedTokens | None = None
        self.width, self.graphs = 0, _Graphs[None]()
        self.buffers: list[Tensor] = []
        self.record: Tensor | None = None

    def has_room(self, longest: int) -> bool:
        """Tell whether a text of this length has room."""
        return compute_num_slots(longest, self.num_nodes) <= self.capacity

    def reserve_slots(self, longest: int) -> bool:
        """Reserve slots for texts of a known length; return whether the step must be captured."""
        width = compute_num_slots(longest, self.num_nodes)
        fixed_width = self.cache.slots.fixed_width
        if self.target.capacity is not None:
            width = self.target.capacity
        elif fixed_width is not None and len(self.roots) > 1:
            # Rows of finished texts may have advanced to the end of the slots.
            width = max(width, fixed_width)
        if width != fixed_width:
            self.cache.fix_width(width, self.num_nodes, self.capacity)
        self.width = width
        return self.graphs.needs_capture(width)

    def capture_step(self) -> None:
        """Capture the graph of a step, without computing."""
        self.graphs.capture_graph(self.width, self._compute_step)

    def launch_step(self) -> tuple[Tensor, torch.cuda.Event]:
        """Launch the step; return its record, being copied to pinned memory, and its event."""
        self.graphs.run_call(self.width, self._compute_step)
        assert self.record is not None
        # Reuse the buffer that was read last.
        if len(self.buffers) < 2:
            pinned = torch.cuda.is_available()
            buffer = torch.empty(self.record.shape, dtype=torch.int64, pin_memory=pinned)
        else:
            buffer = self.buffers.pop(0)
        self.buffers.append(buffer.copy_(self.record, non_blocking=True))
        done = torch.cuda.Event()
        done.record()
        return buffer, done

    def _compute_step(self) -> None:
        draft = self.drafter.propose(Roots(self.roots, []))
        accepted, record = self._verify_and_accept(draft)
        path = accepted.nodes[:, : draft.depth + 1]
        new = CommittedTokens(
            token_ids=[],
            output=accepted.outputs.output.select_tokens(path),
            cache=self.cache,
            logits=accepted.outputs.logits,
            on_device=(accepted.tokens[:, : path.shape[1]], accepted.counts),
        )
        # The drafter observes the step in fixed memory.
        if self.committed is None:
            self.committed = replace(new, logits=None)
        else:
            self.committed.copy_from(new)
        self.drafter.observe(replace(self.committed, logits=new.logits))
        if self.record is None:
            self.record = record
        else:
            self.record.copy_(record)


@dataclass(frozen=True)
class _Launched:
    """Step in progress.

    Attributes:
        texts: text of each row when the step began.
        record: [B, 3 + 2 N] in pinned memory.
        done: event of the copy to `record`.
    """

    texts: list[int]
    record: Tensor
    done: torch.cuda.Event


class StepBatch(DecodingBatch):
    """Texts of a drafter with `num_static_nodes` on a GPU, in captured steps.

    Attributes:
        captured: the rows, possibly of an earlier finished batch.
    """

    captured: CapturedSteps | None = None
    previous: _Launched | None = None

    def _start_texts(self) -> tuple[CommittedTokens, NewTokens]:
        """Start as usual, or with free rows that the first texts take."""
        rows, size = self.captured, self.batch_size
        if rows is None or len(rows.roots) != size or not rows.has_room(self.longest):
            self.captured = None
            return super()._start_texts()
        assert rows.committed is not None
        self.drafter, self.roots, self.generators = rows.drafter, rows.roots, rows.generators
        self.rows, self.running = [FREE] * size, []
        return rows.committed, {}

    def _observe_and_refill(
        self, prefilled: list[Prefilled], committed: CommittedTokens
    ) -> CommittedTokens:
        """Let new texts take the rows of finished ones; the drafter has observed its steps."""
        if self.captured is None:
            committed = super()._observe_and_refill(prefilled, committed)
            self.captured = CapturedSteps(self, committed.cache)
        elif 2 * (len(self.running) + len(prefilled)) <= len(self.rows):
            committed = self._drop_rows(len(prefilled), committed)
            self._insert_texts(prefilled, committed.cache)
            self.captured = CapturedSteps(self, committed.cache)
            self.captured.committed = committed
        else:
            self._insert_texts(prefilled, committed.cache)
        return committed

    def _run_step(self, committed: CommittedTokens) -> tuple[CommittedTokens, NewTokens]:  # noqa: ARG002
        """Launch a step; return the new tokens of the previous one, by text."""
        rows = self.captured
        assert rows is not None
        if rows.reserve_slots(self._compute_longest(self.running)):
            with self.clock.pause_timing(self.running):
                rows.capture_step()
        with self.clock.measure_part("step", self.running):
            launched = _Launched(list(self.rows), *rows.launch_step())
        previous, self.previous = self.previous, launched
        assert rows.committed is not None
        if previous is None:
            return rows.committed, {}
        previous.done.synchronize()  # the only wait
        steps = zip(previous.texts, HostStep.from_records(previous.record.tolist()), strict=True)
        new = {text: self._record_step(text, step) for text, step in steps if text in self.running}
        return rows.committed, new


class PassShape(NamedTuple):
    """Shape of drafts that share a graph.

    Attributes:
        tree: tree of all texts; None for different trees.
        num_tokens: N - 1.
        depth: depth D, or more.
        num_inner: rows P of `draft_probs`; 0 if tokens were not sampled.
    """

    tree: Tree | None
    num_tokens: int
    depth: int
    num_inner: int = 0

    @classmethod
    def from_draft(cls, draft: Draft) -> "PassShape":
        """Find the smallest shape that holds a draft."""
        tree, num_tokens = draft.tree, draft.tokens.shape[1]
        num_inner = 0 if draft.draft_probs is None else draft.draft_probs.shape[1]
        if isinstance(tree, Tree) and not draft.is_chain:
            return cls(tree, num_tokens, tree.depth, num_inner)
        size, depth = (
            next((size for size in PADDED_DRAFT_SIZES if size >= number), number)
            for number in (num_tokens, draft.depth)
        )
        if isinstance(tree, Tree):
            return cls(Tree.make_chain(size), size, size, size if num_inner else 0)
        return cls(None, size, min(size, depth))

    def pad_draft(self, draft: Draft) -> Draft:
        """Pad a draft to this shape, in new memory; its missing nodes are never reached."""
        missing = self.num_tokens - draft.tokens.shape[1]
        tree = draft.tree if self.tree is None else self.tree
        if isinstance(tree, Tensor):
            tree = pad(tree, (0, missing))
        draft_probs = draft.draft_probs
        if draft_probs is not None:
            draft_probs = pad(draft_probs, (0, 0, 0, self.num_inner - draft_probs.shape[1]))
        return Draft(tree, pad(draft.tokens, (0, missing), value=PAD), self.depth, draft_probs)


class CapturedPasses(_Rows):
    """Captured verify passes of a batch.

    Args:
        batch: batch whose drafts are verified.
        cache: cache of the texts.

    Attributes:
        longest: tokens of the longest text to come.
        max_draft_tokens: largest number of draft tokens of a text so far.
        capacity: slots of the caches.
        inputs: drafts in fixed memory.
        key: key of the next pass: shape of the drafts, and number of slots.
    """

    def __init__(self, batch: DecodingBatch, cache: TreeCache) -> None:
        super().__init__(batch, cache)
        self.longest, self.max_draft_tokens = batch.longest, 0
        self.capacity = self.target.capacity or compute_num_slots(self.longest, 1)
        self.fixed = self.target.capacity is not None
        self.inputs: dict[PassShape, Draft] = {}
        self.graphs = _Graphs[tuple[AcceptedPaths, Tensor]]()
        self.key = PassShape(None, 0, 0), 0

    def has_room(self, longest: int) -> bool:
        """Tell whether a text of this length has room, with the largest draft so far."""
        return compute_num_slots(longest, 1 + self.max_draft_tokens) <= self.capacity

    def insert_text(self, batch: DecodingBatch, committed: CommittedTokens) -> CommittedTokens:
        """Continue the single text of another batch here, and return its prompt for the drafter."""
        self.longest = batch.longest
        self.cache.insert_row(0, committed.cache)
        self.roots.copy_(batch.roots)
        self.generators.insert_row(0, batch.generators)
        # Before a head reads the prompt with as many slots as the last text had.
        self._set_fixed_width(self.cache.slots.lengths[0], 1)
        return replace(committed, cache=self.cache)

    def prepare_draft(self, draft: Draft, longest: int) -> bool:
        """Prepare the pass over a draft for texts of a known length; tell whether to capture it."""
        shape = PassShape.from_draft(draft)
        if shape.num_tokens > PADDED_DRAFT_SIZES[-1]:
            raise CaptureError(
                f"{shape.num_tokens} draft tokens, more than the largest graph of "
                f"{PADDED_DRAFT_SIZES[-1]}"
            )
        self.max_draft_tokens = max(self.max_draft_tokens, shape.num_tokens)
        if not self.has_room(self.longest):
            if self.fixed:
                raise CaptureError(
                    f"{self.longest} tokens and {self.max_draft_tokens} draft tokens exceed a "
                    f"compiled target's {self.capacity} slots"
                )
            # Caches may move now, as all graphs are dropped.
            self.capacity = compute_num_slots(self.longest, 1 + self.max_draft_tokens)
            self.graphs = _Graphs()
        self.key = shape, self._set_fixed_width(longest, 1 + shape.num_tokens)
        self._write_draft(shape, draft)
        return self.graphs.needs_capture(self.key)

    def capture_pass(self) -> None:
        """Capture the graph of a pass, without computing."""
        self.graphs.capture_graph(self.key, self._compute_pass)

    def run_pass(self) -> tuple[AcceptedPaths, Tensor]:
        """Run the pass over the draft; the next pass with the same key overwrites the result."""
        return self.graphs.run_call(self.key, self._compute_pass)

    def _set_fixed_width(self, longest: int, num_nodes: int) -> int:
        """Set the slots that passes read from now on."""
        width = self.capacity if self.fixed else compute_num_slots(longest, num_nodes)
        self.cache.fix_width(width, num_nodes, self.capacity)
        return width

    def _write_draft(self, shape: PassShape, draft: Draft) -> None:
        """Write a draft where its graph reads it."""
        new = shape.pad_draft(draft)
        fixed = self.inputs.setdefault(shape, new)
        for to, source in zip(_list_draft_tensors(fixed), _list_draft_tensors(new), strict=True):
            to.copy_(source)

    def _compute_pass(self) -> tuple[AcceptedPaths, Tensor]:
        return self._verify_and_accept(self.inputs[self.key[0]])


def _list_draft_tensors(draft: Draft) -> list[Tensor]:
    values = (draft.tree, draft.tokens, draft.draft_probs)
    return [value for value in values if isinstance(value, Tensor)]


class PassBatch(DecodingBatch):
    """Texts of any drafter on a GPU, in captured verify passes.

    Attributes:
        captured: the passes, possibly of an earlier finished batch of one text.
    """

    captured: CapturedPasses | None = None

    def _start_texts(self) -> tuple[CommittedTokens, NewTokens]:
        """Start as usual, and reuse the slots of an earlier text."""
        committed, new = super()._start_texts()
        if self.captured is not None and not self.captured.has_room(self.longest):
            self.captured = None
        if self.captured is not None:
            committed = self.captured.insert_text(self, committed)
            self.roots, self.generators = self.captured.roots, self.captured.generators
        return committed, new

    def _observe_and_refill(
        self, prefilled: list[Prefilled], committed: CommittedTokens
    ) -> CommittedTokens:
        """Continue as usual; with fewer rows, capture anew."""
        if len(self.running) + len(prefilled) < len(self.rows):
            self.captured = None
        committed = super()._observe_and_refill(prefilled, committed)
        if self.captured is None:
            self.captured = CapturedPasses(self, committed.cache)
        return committed

    def _run_step(self, committed: CommittedTokens) -> tuple[CommittedTokens, NewTokens]:
        """Draft, then launch the rest at once."""
        passes = self.captured
        assert passes is not None
        with self.clock.measure_part("draft", self.rows):
            draft = self.drafter.propose(self._last_tokens())
        if passes.prepare_draft(draft, self._compute_longest(self.rows)):
            with self.clock.pause_timing(self.rows):
                passes.capture_pass()
        with self.clock.measure_part("verify", self.rows):
            accepted, record = passes.run_pass()
        with self.clock.measure_part("accept", self.rows):
            steps = HostStep.from_records(record.tolist())
            # A head that pauses drafting keeps these tokens.
            accepted = replace(accepted, tokens=accepted.tokens.clone())
            new = self._record_steps(steps)
            return accepted.build_committed_tokens(steps, committed.cache), new
