"""What is launched at once, and what is left behind where CUDA does not capture it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CaptureError(RuntimeError):
    """A step that CUDA does not capture."""


class Graph:
    """All that a call launches, to be launched again at once.

    Args:
        call: launches; run once, and computes nothing.
        pool: of the memory that it uses; not to be used again after an error.

    Raises:
        CaptureError: CUDA does not capture it; its cause is what was refused first. Nothing else
            has changed: what follows runs, and is captured, as if nobody had tried.
    """

    def __init__(self, call: Callable[[], None], pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on with what a capture does not allow.
            with (
                _or_as_before(self.graph, pool),
                torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"),
            ):
                call()
        except RuntimeError as error:
            cause = _first(error)
            raise CaptureError(f"{type(cause).__name__}: {cause}") from cause

    def launch(self) -> None:
        """Runs it; the host goes on."""
        self.graph.replay()


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


def _first(error: BaseException) -> BaseException:
    """What failed first: the end of a capture fails of it, and says less."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error
