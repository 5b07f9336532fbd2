"""Devices: dtypes and kernels that the CPU of this process multiplies fast, and copies to a GPU.

Torch computes in bfloat16 and float16 on every CPU. Without native instructions it emulates the
products, and products of many rows take several times as long as in float32.

torch's `get_cpu_capability` follows ATEN_CPU_CAPABILITY, and oneDNN's support follows
ONEDNN_MAX_CPU_ISA; `get_capabilities` names the chip's instructions regardless. With these
variables a new CPU behaves like an old one, here too.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

NATIVE_INSTRUCTIONS = {
    torch.bfloat16: {"amx_bf16", "avx512_bf16", "bf16"},
    torch.float16: {"amx_fp16", "avx512_fp16"},
}
"""Instructions that multiply in a dtype, named as in `torch.cpu.get_capabilities`."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's `mallopt`."""
WITHOUT_PRODUCTS = ("AVX512_CORE", "AVX512_CORE_VNNI", "AVX2_VNNI_2")
"""Values of ONEDNN_MAX_CPU_ISA under which oneDNN accepts bfloat16 but emulates its products."""


@dataclass(frozen=True)
class Processor:
    """CPU as torch may use it.

    Attributes:
        name: name of the chip.
        vectors: widest vectors in use: AVX512, AVX2, ...; DEFAULT for neither.
        instructions: available instructions of `NATIVE_INSTRUCTIONS`.
        packs: whether oneDNN and MKL are available, as on x86 only.
    """

    name: str
    vectors: str
    instructions: frozenset[str] = frozenset()
    packs: bool = False

    def is_fast(self, dtype: torch.dtype) -> bool:
        """Tell whether products in a dtype have native instructions, as float32 always has."""
        return dtype not in NATIVE_INSTRUCTIONS or not self.instructions.isdisjoint(
            NATIVE_INSTRUCTIONS[dtype]
        )

    def multiplies_packed(self, dtype: torch.dtype) -> bool:
        """Tell whether products with packed weights are faster than torch's own."""
        return self.packs and dtype in (torch.float32, torch.bfloat16) and self.is_fast(dtype)

    @property
    def pads_few_rows(self) -> bool:
        """Tell whether packed products of one to three rows take longer than of four."""
        return self.vectors == "AVX512"

    def packs_for_one_row(self, num_threads: int) -> bool:
        """Tell whether packed weights are also faster for a single float32 row.

        With AVX2 alone one thread reads packed weights of 2,048 numbers a row more slowly than
        torch does. With more threads packed weights are faster, as torch's product uses only one.
        """
        return self.vectors == "AVX512" or num_threads > 1

    def __str__(self) -> str:
        amx = any(product.startswith("amx") for product in self.instructions)
        vectors = {"AVX512": "AVX-512", "DEFAULT": ""}.get(self.vectors, self.vectors)
        narrow = [
            str(dtype).removeprefix("torch.")
            for dtype in NATIVE_INSTRUCTIONS
            if self.is_fast(dtype)
        ]
        described = ", ".join(part for part in (self.name, vectors, "AMX" if amx else "") if part)
        return f"{described} with {' and '.join(narrow)}" if narrow else described


@lru_cache(maxsize=1)
def this_processor() -> Processor:
    """Describe the CPU of this process, with the environment of the first call."""
    return make_processor(
        _get_capabilities(),
        torch.backends.cpu.get_cpu_capability(),
        {dtype for dtype in NATIVE_INSTRUCTIONS if _is_supported(dtype)},
        torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available(),
        os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
    )


def make_processor(
    capabilities: dict[str, Any],
    vectors: str,
    supported: Collection[torch.dtype],
    packs: bool,
    limit: str,
) -> Processor:
    """Make a processor from the facts of torch and the environment.

    Args:
        capabilities: result of `torch.cpu.get_capabilities`.
        vectors: result of `torch.backends.cpu.get_cpu_capability`.
        supported: dtypes besides float32 that oneDNN accepts; with AVX-512, bfloat16 is accepted
            even without native products.
        packs: whether oneDNN and MKL are available.
        limit: value of ONEDNN_MAX_CPU_ISA.
    """
    limit = limit.upper()
    products = {
        product
        for dtype in supported
        for product in NATIVE_INSTRUCTIONS[dtype]
        if capabilities.get(product)
        and limit not in WITHOUT_PRODUCTS
        and ("amx" not in product or "AMX" in limit or limit in ("", "ALL", "DEFAULT"))
    }
    if vectors == "AVX512" and packs and torch.bfloat16 not in supported:
        vectors = "AVX2"  # oneDNN's, whatever torch's own kernels use
    name = capabilities.get("cpu_name") or platform.processor() or platform.machine()
    return Processor(name, vectors, frozenset(products), packs)


def _get_capabilities() -> dict[str, Any]:
    """Get the instructions of the chip; older versions of torch name only some."""
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    if platform.machine() in ("aarch64", "arm64"):
        return {"bf16": _is_supported(torch.bfloat16)}  # there, support means native instructions
    return {
        "avx512_bf16": getattr(torch.cpu, "_is_avx512_bf16_supported", bool)(),
        "amx_bf16": getattr(torch.cpu, "_is_amx_tile_supported", bool)(),
    }


def _is_supported(dtype: torch.dtype) -> bool:
    """Tell whether oneDNN supports a dtype here."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", bool)
    return torch.backends.mkldnn.is_available() and ask()


def choose_fast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Choose the dtype of internal products: float32 instead of an emulated dtype."""
    is_fast = device.type != "cpu" or this_processor().is_fast(dtype)
    return dtype if is_fast else torch.float32


@lru_cache
def warn_if_slow(setting: str, dtype: torch.dtype, device: torch.device) -> None:
    """Print once, on the first process, that a setting's dtype (e.g. `train.dtype`) is emulated."""
    group = torch.distributed
    first = not (group.is_available() and group.is_initialized() and group.get_rank())
    if first and choose_fast_dtype(dtype, device) is not dtype:
        value = str(dtype).removeprefix("torch.")
        print(  # noqa: T201
            f"{setting}={value}: products of many rows will be slow, as {this_processor()} "
            f"emulates them; set {setting}=float32",
            file=sys.stderr,
        )


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let the C library reuse large freed blocks, up to 2 GB, rather than return them at once.

    By default glibc maps each tensor above 32 MB anew, and the kernel fills it with zeros page by
    page. On a CPU this took longer than most operations on such tensors: doubling a tensor of 40 MB
    took 5 times as long. Nothing happens where the C library has no such settings.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if set_option is not None:
        set_option(M_MMAP_MAX, 0)
        set_option(M_TRIM_THRESHOLD, 2**31 - 1)


def to_device(values: list[Any] | Tensor, device: torch.device | str) -> Tensor:
    """Copy numbers to a device as a tensor, without waiting for the copy."""
    tensor = torch.as_tensor(values)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
