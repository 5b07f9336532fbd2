"""A CUDA device that is not there: tensors that say `cuda:0` or `cuda:1` and compute on the CPU.

What would fail on a GPU, or make the host wait for one, shows on a machine without any:

- Tensors of different devices in one operation raise, as does a kernel's input that the kernel
  on CUDA does not take (`kernels.py`).
- Whatever the host waits for is counted with the line that asked for it, and so are operations.
- A generator of the device draws what the CPU's would, so sampling can be compared.

Not emulated: the order of streams and races between them (all runs at once, in order), the
memory of a device, NCCL, generated kernels (`torch.compile`, Triton), float32
products in TF32, and the limits and rounding of kernels that are not in `kernels.py`. Foreach
kernels are not taken for a subclass of tensors, so an optimizer that is not fused counts an
operation per parameter.

`guard.cpp` must be loaded before torch, and `cuda.py` makes torch believe in the devices;
`conftest.py` does both.
"""

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from emulated import kernels
from emulated.graphs import capturing, forbid
from oldest_torch import check_call
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = str(Path(__file__).resolve().parents[2])
CPU = torch.device("cpu")
COPIES = {"copy_", "_to_copy"}
UP, DOWN = "host to device", "device to host"
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Kernels whose result's size, or a number for the host, depends on the data.
WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "unique_dim",
    "_unique", "_unique2", "equal", "bincount", "repeat_interleave",
}  # fmt: skip
VIEWS = {
    "view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze",
    "squeeze", "split", "split_with_sizes", "unbind", "as_strided", "alias", "detach", "unfold",
    "diagonal", "_reshape_alias", "lift_fresh",
}  # fmt: skip


class MixedDevicesError(RuntimeError):
    """Tensors of different devices met in one operation."""


class DeviceTensor(torch.Tensor):
    """A tensor of an emulated device around one of the CPU, `held`."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "DeviceTensor":
        # Inference mode refuses views of such tensors that were made in it.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
                dtype=held.dtype, layout=held.layout, device=device,
            )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"{self.held} on {self.device}"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def record_stream(self, stream: Any) -> None:
        """Memory is never reused here."""


class Mode(TorchDispatchMode):
    """Inside, what is made on or brought to a CUDA device becomes a `DeviceTensor`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its guard around every call costs more than the calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


def off() -> contextlib.AbstractContextManager[Any]:
    """Inside there is the CPU alone, at its own speed."""
    return _disable_current_modes()


@dataclass
class Counts:
    """Counts of the devices' work: operations by name; the rest by kind and the project's line.

    Attributes:
        operations: kernels.
        waits: whatever the host waited for.
        copies: tensors that went from the host to a device or back, waited for or not.
    """

    operations: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def num_waits(self) -> int:
        return self.waits.total()

    @property
    def num_up(self) -> int:
        """Copies to a device."""
        return sum(n for (kind, _), n in self.copies.items() if kind == UP)

    @property
    def num_down(self) -> int:
        """Copies from a device."""
        return sum(n for (kind, _), n in self.copies.items() if kind == DOWN)

    def __sub__(self, earlier: "Counts") -> "Counts":
        return Counts(
            self.operations - earlier.operations,
            self.waits - earlier.waits,
            self.copies - earlier.copies,
        )

    def __repr__(self) -> str:
        return f"waits: {_listed(self.waits)}; copies: {_listed(self.copies)}"


def _listed(found: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{n} x {kind} at {line}" for (kind, line), n in found.most_common())


_counting: list[Counts] = []
meters: list[Callable[[Any, Any, Any, Any], None]] = []
"""Told of each operation with its arguments and its result, as they lie in memory."""


class Memory:
    """The place of device tensors' numbers: the CPU, or nowhere (`hollow.py`)."""

    at = CPU

    @property
    def is_real(self) -> bool:
        return self.at is CPU


memory = Memory()


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Counts inside; may be nested."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


def wait(kind: str) -> None:
    """Notes that the host waits for a device."""
    forbid(kind)
    for counts in _counting:
        counts.waits[kind, _line()] += 1


def launched(name: str) -> None:
    """Notes that something was given to a device."""
    for counts in _counting:
        counts.operations[name] += 1


def _copied(kind: str) -> None:
    if capturing() is not None:
        forbid(f"{kind} at {_line()}")
    for counts in _counting:
        counts.copies[kind, _line()] += 1


def _line() -> str:
    """The innermost line of the project; autograd's threads stand where the main one does."""
    frames = [sys._getframe()]
    # Only a thread that Python has not started is one of those; for others the main one, whose
    # frames come and go meanwhile, does not wait.
    if isinstance(threading.current_thread(), threading._DummyThread):
        frames.append(sys._current_frames()[threading.main_thread().ident or 0])
    for frame in frames:
        at: Any = frame
        while at is not None:
            file = at.f_code.co_filename
            ours = file.startswith(ROOT) and "/emulated/" not in file and "/.venv" not in file
            if ours and at.f_code.co_name != "upload":
                return f"{file.removeprefix(ROOT + '/')}:{at.f_lineno}"
            at = at.f_back
    return "?"


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One operation: checked, counted, computed on the CPU."""
    if torch.is_inference_mode_enabled() and func._can_decompose():
        # Autograd, which is off, is what takes such operations apart.
        with Mode():
            return func.decompose(*args, **kwargs)
    tensors = list(_tensors([*args, *kwargs.values()]))
    here = [each for each in tensors if isinstance(each, DeviceTensor)]
    wanted = numbered(kwargs.get("device"))
    if not here and (wanted is None or wanted.type != "cuda"):
        return _on_cpu(func, args, kwargs)
    device = _place(func, args, tensors, here, wanted)
    check_call(func, args, kwargs)
    _count(func, args, kwargs, device)
    given = [_held(each) for each in args]
    options = _plain({key: _held(each) for key, each in kwargs.items()}, device)
    kernel, graph = kernels.KERNELS.get(func, func), capturing()
    if not memory.is_real:
        kernel = kernels.without_numbers(func)
    if graph is not None:
        graph.keep(func, given, options)
    with _drawing(options, device):
        found = kernel(*given, **options)
    if graph is not None:
        graph.note(kernel, given, options, found)
    for meter in meters:
        meter(func, given, options, found)
    if device.type != "cuda":
        return pinned(found) if kwargs.get("non_blocking") else found
    # What was changed in place is the tensor that was given.
    known = {id(each.held): each for each in here}
    return _wrapped(found, device, known)


def _on_cpu(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    return pinned(func(*args, **_plain(kwargs)))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _held(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.held if memory.is_real else value.held.to(memory.at)
    if isinstance(value, (list, tuple)):
        return type(value)(_held(each) for each in value)
    return value


def _plain(kwargs: dict[str, Any], device: torch.device = CPU) -> dict[str, Any]:
    """Arguments for where the numbers are."""
    if kwargs.get("device") is not None:
        kwargs["device"] = memory.at if device.type == "cuda" else CPU
    return {key: each for key, each in kwargs.items() if key != "pin_memory"}


def _wrapped(found: Any, device: torch.device, known: dict[int, DeviceTensor]) -> Any:
    if isinstance(found, DeviceTensor) or not isinstance(found, (Tensor, list, tuple)):
        return found
    if isinstance(found, Tensor):
        same = known.get(id(found))
        return DeviceTensor(found, device) if same is None else same
    return type(found)(_wrapped(each, device, known) for each in found)


def numbered(value: Any) -> torch.device | None:
    """A device with its number."""
    if value is None:
        return None
    device = torch.device(value)
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def _place(
    func: Any,
    args: Sequence[Any],
    tensors: list[Tensor],
    here: list[DeviceTensor],
    wanted: torch.device | None,
) -> torch.device:
    """Where an operation runs, and so what it gives.

    Raises:
        MixedDevicesError: CUDA would refuse to run it.
    """
    name = func.overloadpacket.__name__
    if name in COPIES:
        own = args[0].device
        return own if name == "copy_" or wanted is None else wanted
    places = {each.device for each in here}
    # A number on the CPU may be used anywhere; indices on the CPU are copied.
    strict = func is torch.ops.aten._fused_adamw_.default
    alien = [
        each
        for each in tensors
        if not isinstance(each, DeviceTensor) and (each.dim() > 0 or strict)
    ]
    if name in INDEXING and isinstance(args[0], DeviceTensor):
        alien = [each for each in alien if not any(each is index for index in args[1])]
    if len(places) > 1 or (places and alien):
        found = [(str(each.device), tuple(each.shape)) for each in tensors]
        raise MixedDevicesError(f"{func} of tensors on {found}, called at {_line()}")
    return wanted or next(iter(places))


def _count(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> None:
    if not _counting and capturing() is None:
        return
    name = func.overloadpacket.__name__
    if name not in VIEWS:
        launched(name)
    if name in COPIES:
        _count_copy(name, args, kwargs, device)
    elif name in INDEXING:
        _count_index(name, args)
    elif name in WAITING and kwargs.get("output_size") is None:
        _copied(DOWN)
        wait(name)


def _count_copy(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device
) -> None:
    source: Tensor = args[1] if name == "copy_" else args[0]
    if (source.device.type == "cuda") == (device.type == "cuda"):
        return
    flag = args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking")
    up = device.type == "cuda"
    # On the way down `to` makes its own pinned memory; on the way up a dtype changes before.
    same = source.dtype == (args[0].dtype if name == "copy_" else kwargs.get("dtype", source.dtype))
    ready = source.is_pinned() and same if up else name == "_to_copy" or args[0].is_pinned()
    if up and name == "copy_" and source.dim() == 0:
        return  # a single number is a kernel's argument
    _copied(UP if up else DOWN)
    if not (flag and ready):
        wait(UP if up else DOWN)


def _count_index(name: str, args: Sequence[Any]) -> None:
    for index in args[1]:
        if index is None:
            continue
        if index.device.type == "cpu":
            _copied(UP)
            wait(f"{name} by indices of the host")
        # A number at a boolean mask is `masked_fill`.
        elif index.dtype in (torch.bool, torch.uint8) and (
            name == "index" or args[2].numel() > 1 or len(args[1]) > 1
        ):
            _copied(DOWN)
            wait(f"{name} by a mask")


@contextlib.contextmanager
def _drawing(kwargs: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Inside, a generator of the device is one of the CPU."""
    generator = kwargs.get("generator")
    if generator is None:
        yield
        return
    forbid("a draw")
    if generator.device != device:
        raise MixedDevicesError(
            f"a generator of {generator.device} draws on {device}, at {_line()}"
        )
    kwargs["generator"] = torch.Generator()
    kwargs["generator"].set_state(generator.get_state())
    yield
    generator.set_state(kwargs["generator"].get_state())


def pinned(found: Tensor) -> Tensor:
    """The tensor, said to lie in pinned memory; its views do too, where autograd knows of them."""
    found.is_in_pinned_memory = True  # type: ignore[attr-defined]
    return found
