"""CUDA graphs on an emulated device: what a capture meets runs again, in the memory that it met.

As on a GPU, a capture computes nothing: what it changes is put back, and what it makes holds
garbage until the graph is launched. Then every operation runs again with the tensors and numbers
that it had, so whatever Python decided, read or uploaded meanwhile is a constant.

What CUDA does not permit spoils a capture, whose end then fails before anything is put back, as
torch's does: see `graph`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_under_way: list["CUDAGraph"] = []
open_pools: list[Any] = []
"""The allocator's captures under way."""
users: dict[Any, int] = {}
"""Number of users of each pool."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class CUDAGraph:
    """A captured graph."""

    def __init__(self) -> None:
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self.made: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.spoilt = False

    def capture_begin(self, pool: Any, **_options: Any) -> None:
        begin_pool(0, pool)
        self.pool, self.generator = pool, torch.cuda.default_generators[0]
        self.generator.state.capturing = True
        _under_way.append(self)

    def capture_end(self) -> None:
        from emulated.device import off

        _under_way.pop()
        with off():
            self._undo()
        if self.spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")
        end_pool(0, self.pool)
        self.generator.state.capturing = False

    def replay(self) -> None:
        from emulated.device import launched, off

        launched("graph")
        with off():
            for run, args, options, made in self.operations:
                found = list(tensors(run(*args, **options)))
                for held, new in zip(made, _new(found, args, options), strict=True):
                    held.copy_(new)

    def note(self, run: Callable[..., Any], args: Any, options: Any, found: Any) -> None:
        """An operation that has run."""
        made = _new(list(tensors(found)), args, options)
        self.made |= {_memory(each) for each in made}
        self.operations.append((run, args, options, made))

    def keep(self, func: Any, args: Any, options: Any) -> None:
        """Remembers what an operation is about to change."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else options.get(argument.name)
            for each in tensors([value]):
                memory = _memory(each)
                if memory not in self.made and memory not in self.before:
                    whole = torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())
                    self.before[memory] = whole, whole.clone()

    def _undo(self) -> None:
        """Nothing has happened."""
        for whole, old in self.before.values():
            whole.copy_(old)
        for *_, made in self.operations:
            for each in made:
                if each.is_floating_point():
                    each.fill_(torch.nan)
                elif each.dtype in INTEGERS:
                    each.fill_(torch.iinfo(each.dtype).max // 2)


def capturing() -> CUDAGraph | None:
    """The graph that is being captured."""
    return _under_way[-1] if _under_way else None


class graph:  # noqa: N801
    """`torch.cuda.graph`: where the end of its capture fails, the stream stays."""

    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, **options: Any) -> None:
        self.made, self.pool, self.options = cuda_graph, pool, options
        self.stream = torch.cuda.stream(torch.cuda.Stream())

    def __enter__(self) -> None:
        self.stream.__enter__()
        self.made.capture_begin(self.pool, **self.options)

    def __exit__(self, *args: Any) -> None:
        self.made.capture_end()
        self.stream.__exit__(*args)


class State:
    """The state of a generator; of one that a capture left, torch below 2.13 draws nothing."""

    capturing = False


class DefaultGenerator:
    """The generator of a device for draws that name none."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.state = device, State()

    def get_state(self) -> Tensor:
        return torch.Generator().get_state()

    def graphsafe_set_state(self, _other: Any) -> None:
        self.state = State()


def begin_pool(_device: int, pool: Any) -> None:
    users[pool] = users.get(pool, 0) + 1
    if pool in open_pools:
        raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
    open_pools.append(pool)


def end_pool(_device: int, pool: Any) -> None:
    if pool not in open_pools:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    open_pools.remove(pool)


def release_pool(_device: int, pool: Any) -> None:
    users[pool] -= 1


def forbid(what: str) -> None:
    """As CUDA does while it captures."""
    if _under_way:
        _under_way[-1].spoilt = True
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a result or among arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _new(found: list[Tensor], args: Any, options: Any) -> list[Tensor]:
    """The tensors in memory of their own."""
    known = {_memory(each) for each in tensors([*args, *options.values()])}
    return [each for each in found if each.numel() and _memory(each) not in known]
