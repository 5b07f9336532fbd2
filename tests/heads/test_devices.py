"""Dtypes that each kind of CPU multiplies fast, and the notice about others: to whom, and when."""

import ctypes
import resource
from typing import Any

import pytest
import torch

import heads.devices
from heads.devices import (
    Processor,
    choose_fast_dtype,
    keep_freed_memory,
    make_processor,
    this_processor,
    warn_if_slow,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
OLD = Processor("EPYC", "AVX2", packs=True)
NEW = Processor("EPYC", "AVX512", frozenset({"avx512_bf16"}), packs=True)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        # Haswell to Zen 3.
        (([], "AVX2", [], True, ""), ("EPYC, AVX2", [FP32], [FP32], False)),
        # Skylake: oneDNN takes bfloat16, and imitates its products.
        (([], "AVX512", [BF16], True, ""), ("EPYC, AVX-512", [FP32], [FP32], True)),
        # Zen 4, Sapphire Rapids, Granite Rapids.
        (
            (["avx512_bf16"], "AVX512", [BF16], True, "ALL"),
            ("EPYC, AVX-512 with bfloat16", [FP32, BF16], [FP32, BF16], True),
        ),
        (
            (["avx512_bf16", "amx_bf16"], "AVX512", [BF16], True, ""),
            ("EPYC, AVX-512, AMX with bfloat16", [FP32, BF16], [FP32, BF16], True),
        ),
        (
            (["amx_bf16", "avx512_fp16", "amx_fp16"], "AVX512", [BF16, FP16], True, "DEFAULT"),
            (
                "EPYC, AVX-512, AMX with bfloat16 and float16",
                [FP32, BF16, FP16], [FP32, BF16], True,
            ),
        ),
        # Lunar Lake: converts bfloat16 fast, multiplies float32.
        (
            (["avx_ne_convert"], "AVX2", [BF16, FP16], True, ""),
            ("EPYC, AVX2", [FP32], [FP32], False),
        ),
        # Graviton 2, Graviton 3, and a torch without oneDNN.
        (([], "DEFAULT", [], False, ""), ("EPYC", [FP32], [], False)),
        (
            (["bf16"], "SVE256", [BF16], False, ""),
            ("EPYC, SVE256 with bfloat16", [FP32, BF16], [], False),
        ),
        ((["bf16"], "DEFAULT", [], False, ""), ("EPYC", [FP32], [], False)),
        # New ones that the environment makes old: by all variables, by ONEDNN_MAX_CPU_ISA alone.
        ((["avx512_bf16"], "AVX2", [], True, "AVX2"), ("EPYC, AVX2", [FP32], [FP32], False)),
        ((["avx512_bf16"], "AVX512", [], True, "avx2"), ("EPYC, AVX2", [FP32], [FP32], False)),
        (
            (["avx512_bf16", "amx_bf16"], "AVX512", [BF16], True, "avx512_core"),
            ("EPYC, AVX-512", [FP32], [FP32], True),
        ),
        (
            (["avx512_bf16", "amx_bf16"], "AVX512", [BF16], True, "AVX512_CORE_BF16"),
            ("EPYC, AVX-512 with bfloat16", [FP32, BF16], [FP32, BF16], True),
        ),
    ],
)  # fmt: skip
def test_what_each_kind_multiplies_fast(told: Any, expected: Any) -> None:
    """By capabilities, ATen's vectors, dtypes of oneDNN, whether it packs, and its limit."""
    has, *others = told
    found = make_processor({"cpu_name": "EPYC", **dict.fromkeys(has, True)}, *others)
    kinds = FP32, BF16, FP16
    fast = [each for each in kinds if found.is_fast(each)]
    packed = [each for each in kinds if found.multiplies_packed(each)]
    assert (str(found), fast, packed, found.pads_few_rows) == expected
    assert [found.packs_for_one_row(threads) for threads in (1, 2)] == [found.pads_few_rows, True]


def test_this_one_multiplies_float32_fast_and_float64_as_fast_as_it_can() -> None:
    assert this_processor().is_fast(FP32)
    assert this_processor().is_fast(torch.float64)


def use(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads.devices, "this_processor", lambda: processor)
    warn_if_slow.cache_clear()


def test_products_that_would_be_imitated_are_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    use(OLD, monkeypatch)
    assert choose_fast_dtype(BF16, CPU) is FP32
    assert choose_fast_dtype(FP32, CPU) is FP32
    assert choose_fast_dtype(BF16, torch.device("cuda")) is BF16
    use(NEW, monkeypatch)
    assert choose_fast_dtype(BF16, CPU) is BF16
    assert choose_fast_dtype(FP16, CPU) is FP32


def test_a_slow_dtype_is_told_once_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(OLD, monkeypatch)
    for _ in range(2):
        warn_if_slow("train.dtype", BF16, CPU)
    assert capsys.readouterr().err == (
        "train.dtype=bfloat16: products of many rows will be slow, as EPYC, AVX2 emulates them; "
        "set train.dtype=float32\n"
    )
    warn_if_slow("target.dtype", FP16, CPU)
    assert capsys.readouterr().err.startswith("target.dtype=float16: products ")


def test_what_is_fast_or_on_another_process_is_not_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(OLD, monkeypatch)
    warn_if_slow("train.dtype", FP32, CPU)
    warn_if_slow("train.dtype", BF16, torch.device("cuda"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    warn_if_slow("train.dtype", BF16, CPU)
    use(NEW, monkeypatch)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    warn_if_slow("train.dtype", BF16, CPU)
    assert capsys.readouterr() == ("", "")
    warn_if_slow("train.dtype", FP16, CPU)
    assert capsys.readouterr().err.startswith("train.dtype=float16")


def test_a_torch_without_a_list_of_capabilities_is_asked_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = heads.devices._get_capabilities()
    assert found == {"avx512_bf16": True, "amx_bf16": False}
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(heads.devices, "_is_supported", lambda dtype: dtype is BF16)
    assert heads.devices._get_capabilities() == {"bf16": True}


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc has such settings")
def test_freed_memory_is_kept_for_the_next_tensor() -> None:
    keep_freed_memory()
    num_faults = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(64 << 18)  # 64 MiB, of 16,384 pages
        num_faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(num_faults[1:]) < 1_000
