"""The CPU of this process: its fast products decide wherever a dtype or a kernel is chosen.

Torch computes in bfloat16 and float16 on every CPU. Without instructions for their products it
imitates them, and products of many rows take several times as long as in float32.

`get_cpu_capability` of torch follows ATEN_CPU_CAPABILITY, and oneDNN's support follows
ONEDNN_MAX_CPU_ISA; `get_capabilities` names the instructions of the chip, whatever these say. Who
makes a new CPU behave as an old one by these variables finds an old one here.
"""

import os
import platform
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

PRODUCTS = {
    torch.bfloat16: {"amx_bf16", "avx512_bf16", "bf16"},
    torch.float16: {"amx_fp16", "avx512_fp16"},
}
"""Instructions that multiply in a dtype, as `torch.cpu.get_capabilities` names them."""
WITHOUT_PRODUCTS = ("AVX512_CORE", "AVX512_CORE_VNNI", "AVX2_VNNI_2")
"""Values of ONEDNN_MAX_CPU_ISA under which oneDNN takes bfloat16 and imitates its products."""


@dataclass(frozen=True)
class Processor:
    """A CPU, as torch may use it.

    Attributes:
        name: of the chip.
        vectors: the widest that are used: AVX512, AVX2, ...; DEFAULT is neither.
        products: those of `PRODUCTS` that it has.
        packs: whether oneDNN and MKL are there, which is on x86 alone.
    """

    name: str
    vectors: str
    products: frozenset[str] = frozenset()
    packs: bool = False

    def is_fast(self, dtype: torch.dtype) -> bool:
        """True where products in a dtype have instructions of their own, as float32 always has."""
        return dtype not in PRODUCTS or not self.products.isdisjoint(PRODUCTS[dtype])

    def multiplies_packed(self, dtype: torch.dtype) -> bool:
        """True where products over weights that are packed once are faster than torch's own."""
        return self.packs and dtype in (torch.float32, torch.bfloat16) and self.is_fast(dtype)

    @property
    def packs_for_one_row(self) -> bool:
        """True where also one row of float32 is faster: AVX2 takes up to twice as long."""
        return self.vectors == "AVX512"

    def __str__(self) -> str:
        amx = any(product.startswith("amx") for product in self.products)
        vectors = {"AVX512": "AVX-512", "DEFAULT": ""}.get(self.vectors, self.vectors)
        narrow = [str(dtype).removeprefix("torch.") for dtype in PRODUCTS if self.is_fast(dtype)]
        known = ", ".join(part for part in (self.name, vectors, "AMX" if amx else "") if part)
        return f"{known} with {' and '.join(narrow)}" if narrow else known


@lru_cache(maxsize=1)
def this_processor() -> Processor:
    """The CPU of this process; the environment counts as it was at the first call."""
    return read(
        _capabilities(),
        torch.backends.cpu.get_cpu_capability(),
        {dtype for dtype in PRODUCTS if _is_supported(dtype)},
        torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available(),
        os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
    )


def read(
    capabilities: dict[str, Any],
    vectors: str,
    supported: Collection[torch.dtype],
    packs: bool,
    limit: str,
) -> Processor:
    """A processor by the facts that torch and the environment give.

    Args:
        capabilities: of `torch.cpu.get_capabilities`.
        vectors: of `torch.backends.cpu.get_cpu_capability`.
        supported: dtypes besides float32 that oneDNN takes. With AVX-512 it takes bfloat16, though
            products of it came later.
        packs: whether oneDNN and MKL are there.
        limit: of ONEDNN_MAX_CPU_ISA.
    """
    limit = limit.upper()
    products = {
        product
        for dtype in supported
        for product in PRODUCTS[dtype]
        if capabilities.get(product)
        and limit not in WITHOUT_PRODUCTS
        and ("amx" not in product or "AMX" in limit or limit in ("", "ALL", "DEFAULT"))
    }
    if vectors == "AVX512" and packs and torch.bfloat16 not in supported:
        vectors = "AVX2"  # of oneDNN, whatever torch's own kernels use
    name = capabilities.get("cpu_name") or platform.processor() or platform.machine()
    return Processor(name, vectors, frozenset(products), packs)


def fast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """A dtype for products that nobody sees: float32 in place of one that is imitated."""
    is_fast = device.type != "cpu" or this_processor().is_fast(dtype)
    return dtype if is_fast else torch.float32


@lru_cache
def tell_if_slow(setting: str, dtype: torch.dtype, device: torch.device) -> None:
    """Prints once, on the first process, that a setting's dtype, as `train.dtype`, is imitated."""
    group = torch.distributed
    first = not (group.is_available() and group.is_initialized() and group.get_rank())
    if first and fast_dtype(dtype, device) is not dtype:
        value = str(dtype).removeprefix("torch.")
        print(  # noqa: T201
            f"{setting}={value}: products of many rows will be slow, as {this_processor()} "
            f"imitates them; set {setting}=float32",
            file=sys.stderr,
        )


def _is_supported(dtype: torch.dtype) -> bool:
    """True where oneDNN takes a dtype here."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", bool)
    return torch.backends.mkldnn.is_available() and ask()


def _capabilities() -> dict[str, Any]:
    """Instructions of the chip; those that older versions of torch tell, which have no list."""
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    if platform.machine() in ("aarch64", "arm64"):
        return {"bf16": _is_supported(torch.bfloat16)}  # asks for the instructions, there
    return {
        "avx512_bf16": getattr(torch.cpu, "_is_avx512_bf16_supported", bool)(),
        "amx_bf16": getattr(torch.cpu, "_is_amx_tile_supported", bool)(),
    }
