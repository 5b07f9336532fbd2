"""`torch.cuda` and torch's makers of tensors as they are where there are emulated devices."""

import contextlib
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from emulated import graphs, kernels
from emulated.device import Mode, numbered, pinned, wait
from torch import Tensor
from torch.utils._device import _device_constructors

NUM_DEVICES = 2
DEVICE_BYTES = 80 << 30
_registered = torch.library.Library("aten", "IMPL", "CUDA")  # as long as it lives


class Stream:
    """A stream in which everything has happened already."""

    def __init__(self, device: Any = None, **_options: Any) -> None:
        self.device = numbered(device or "cuda")

    def record_event(self, event: Any = None) -> "Event":
        return event or Event()

    def wait_event(self, event: "Event") -> None:
        """The host goes on."""

    def wait_stream(self, stream: "Stream") -> None:
        """The host goes on."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait("stream")


class _Current(threading.local):
    """The stream of each device that a thread is on, where it is not the first."""

    def __init__(self) -> None:
        self.of: dict[torch.device, Stream] = {}


_first = {
    device: Stream(device) for device in (torch.device("cuda", n) for n in range(NUM_DEVICES))
}
_current = _Current()


def _current_stream(device: Any = None) -> Stream:
    device = numbered(device or "cuda")
    return _current.of.get(device, _first[device])


def _set_stream(stream: Stream) -> None:
    _current.of[stream.device] = stream


@contextlib.contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = _current_stream(stream.device)
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(before)


class Event:
    """An event that has happened already; the host waits for it none the less."""

    def __init__(self, **_options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """There is one order only."""

    def wait(self, stream: Any = None) -> None:
        """The host goes on."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait("event")

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


def _is_pinned(tensor: Tensor, *_device: Any) -> bool:
    whole = tensor if tensor._base is None else tensor._base
    return hasattr(whole, "is_in_pinned_memory")


def _tensor(*args: Any, _made: Any = torch.tensor, pin_memory: bool = False, **options: Any) -> Any:
    """`torch.tensor`, which asks the allocator for pinned memory itself."""
    found = _made(*args, **options)
    return pinned(found) if pin_memory else found


def _run_thread(thread: threading.Thread, _run: Any = threading.Thread.run) -> None:
    """A mode is a thread's own."""
    with Mode():
        _run(thread)


def _unreached(*_args: Any) -> None:
    raise AssertionError("an emulated device runs its kernels itself")


def install() -> None:
    """Has torch believe in the devices, in this process and for good."""
    threading.Thread.run = _run_thread  # type: ignore[method-assign]
    # `with torch.device(...)` knows the makers of tensors as they are now.
    _device_constructors()
    # Memory that nobody has written holds NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in kernels.OF_CUDA_ALONE:
        _registered.impl(name, _unreached)
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.is_bf16_supported = lambda *_args, **_options: True
    cuda.device_count = lambda: NUM_DEVICES
    cuda.current_device = lambda: 0
    cuda.set_device = lambda _device: None
    cuda.device = lambda _device: contextlib.nullcontext()
    cuda.get_device_name = lambda *_args: "emulated"
    cuda.get_device_capability = lambda *_args: (8, 0)
    cuda.mem_get_info = lambda *_args: (DEVICE_BYTES, DEVICE_BYTES)
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *_args: 0
    cuda.empty_cache = cuda.ipc_collect = cuda.reset_peak_memory_stats = lambda *_args: None
    cuda.manual_seed = cuda.manual_seed_all = lambda _seed: None
    cuda.synchronize = lambda *_args: wait("synchronize")
    cuda.Stream, cuda.Event = Stream, Event
    cuda.CUDAGraph, cuda.graph = graphs.CUDAGraph, graphs.graph
    pools = count(1)
    cuda.graph_pool_handle = lambda: (0, next(pools))
    torch._C._cuda_endAllocateToPool = graphs.end_pool  # type: ignore[attr-defined]
    torch._C._cuda_releasePool = graphs.release_pool  # type: ignore[attr-defined]
    cuda.default_generators = tuple(map(graphs.DefaultGenerator, _first))
    cuda.default_stream = lambda device=None: _first[numbered(device or "cuda")]
    cuda.current_stream, cuda.set_stream, cuda.stream = _current_stream, _set_stream, _on_stream
    torch.tensor = _tensor
    torch.Tensor.pin_memory = lambda self, *_args: pinned(self.clone())  # type: ignore[assignment]
    torch.Tensor.is_pinned = _is_pinned  # type: ignore[assignment]
    torch.backends.cuda.can_use_efficient_attention = lambda *_args: True
    # Numbers become tensors of the CPU, which then go where they are wanted.
    torch._C._set_only_lift_cpu_tensors(True)
    # A module that moves keeps its parameters: tied ones stay tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
