"""A capture asks little more pinned memory of torch than it fills."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.features.writer import ALIGNMENT, Copies

LENGTHS = [400, 371, 512, 512, 90, 488, 512, 33, 505, 460, 512, 512]


def given(size: int) -> int:
    """Bytes, as torch rounds them."""
    return 1 << (size - 1).bit_length()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each pinned tensor, on a device whose copies are done at once."""
    sizes, empty = list[int](), torch.empty

    def noted(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        found: Tensor = empty(*shape, **options)
        if pin_memory:
            sizes.append(found.numel() * found.element_size())
        return found

    stream = SimpleNamespace(wait_stream=lambda _other: None, device=None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    for name, fake in {
        "Stream": lambda _device: stream, "current_stream": lambda _device: stream,
        "stream": nullcontext, "Event": lambda: event,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch, "empty", noted)
    return sizes


@pytest.mark.parametrize("width", [80, 130, 256])
@pytest.mark.parametrize("expected", [1.0, 1.1])
def test_little_of_what_is_pinned_is_wasted(width: int, expected: float, asked: list[int]) -> None:
    taken, kept = [], []
    lengths = LENGTHS * 8
    total = sum(lengths) * (3 * 2 * width + 2)
    copies = Copies(torch.device("cuda"), 1, int(expected * total))
    for length in lengths:
        tensors = {str(n): torch.randn(length, width).bfloat16() for n in range(3)}
        tensors["scale"] = torch.randn(length).half()
        kept.append(tensors)
        taken.append(copies.take(tensors).wait())
    for found, wanted in zip(taken, kept, strict=True):
        assert all(found[name].equal(wanted[name]) for name in wanted)
        assert all(
            each.data_ptr() % ALIGNMENT == taken[0]["0"].data_ptr() % ALIGNMENT
            for each in found.values()
        )
    assert sum(map(given, asked)) < 1.12 * total


def test_a_tensor_larger_than_was_expected_has_a_block_of_its_own(asked: list[int]) -> None:
    copies = Copies(torch.device("cuda"), 1, 10)
    for tensor in (torch.arange(1000), torch.zeros(0, 3), torch.tensor(5)):
        assert copies.take({"x": tensor}).wait()["x"].equal(tensor)
    assert asked == [8192]
