"""The emulated devices and kernels themselves: what they refuse, count and compute."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from emulated.device import MixedDevicesError, counted, off
from emulated.hollow import hollow, metered
from emulated.kernels import KernelError
from torch import Tensor
from torch.nn import functional

from heads.decoding.cache import TreeCache
from heads.layers.block_attention import BlockRange, block_attention, plain_block_attention
from heads.layers.documents import Documents, flash_attention
from heads.target_model import attention
from heads.target_model.attention import CachedPass
from heads.target_model.kernels import ScoreRule, choose_kernels

CUDA = torch.device("cuda", 0)
aten: Any = torch.ops.aten


@pytest.fixture(autouse=True, scope="module")
def as_ever() -> None:
    choose_kernels(CUDA)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers whenever they are asked for, on the device."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(CUDA, dtype)


def test_devices_do_not_mix() -> None:
    here = drawn(3)
    assert (here.ceil() * 0 + 1.0 + torch.tensor(2.0)).tolist() == [3.0] * 3
    mixtures: list[Callable[[], Any]] = [
        lambda: here + torch.ones(3),
        lambda: here + torch.ones(3, device="cuda:1"),
        lambda: torch.ones(3)[here.long()],
        lambda: torch.rand(3, device="cuda:1", generator=torch.Generator(CUDA)),
    ]
    for mixture in mixtures:
        with pytest.raises(MixedDevicesError):
            mixture()
    assert here[torch.tensor([0, 0])].tolist() == [here[0].item()] * 2


WAITS: dict[str, tuple[int, Callable[[Tensor, Tensor], Any]]] = {
    "a number": (1, lambda x, _: float(x[0])),
    "a list": (1, lambda x, _: x.tolist()),
    "a copy to the host": (1, lambda x, _: x.cpu()),
    "a copy to pinned memory": (0, lambda x, _: x.to("cpu", non_blocking=True)),
    "a copy that is wanted at once": (1, lambda _, host: host.to(CUDA)),
    "a copy of pageable memory": (1, lambda _, host: host.to(CUDA, non_blocking=True)),
    "a copy of pinned memory": (0, lambda _, host: host.pin_memory().to(CUDA, non_blocking=True)),
    "and of another dtype": (
        1, lambda _, host: host.pin_memory().to(CUDA, torch.bfloat16, non_blocking=True),
    ),
    "numbers of the host": (1, lambda _x, _: torch.tensor([1, 2], device=CUDA)),
    "a constant": (0, lambda x, _: x.new_zeros(3).fill_(2.0) + 1),
    "places": (1, lambda x, _: (x > 0).nonzero()),
    "a mask": (1, lambda x, _: x[x > 0]),
    "indices": (0, lambda x, _: x[x.long().clamp(0, 2)]),
    "indices of the host": (1, lambda x, host: x[host.long()]),
    "numbers at a mask": (1, lambda x, _: x.index_put_((x > 0,), x[: 3].clone())),
    "a number at a mask": (0, lambda x, _: x.masked_fill_(x > 0, 1.0)),
    "repeats": (1, lambda x, _: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64))),
    "an event": (1, lambda _x, _: torch.cuda.Event().synchronize()),
}  # fmt: skip


@pytest.mark.parametrize(("number", "act"), WAITS.values(), ids=list(WAITS))
def test_what_the_host_waits_for(number: int, act: Callable[[Tensor, Tensor], Any]) -> None:
    on_device, host = torch.ones(3, device=CUDA), torch.zeros(3)
    with counted() as counts:
        act(on_device, host)
    assert counts.num_waits == number, str(counts)


def test_cudnn_s_attention_is_refused() -> None:
    query = drawn(1, 4, 9, 16, dtype=torch.bfloat16)
    with (
        torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION]),
        pytest.raises(KernelError, match=r"cuDNN's attention was chosen: \(1, 4, 9, 16\)"),
    ):
        functional.scaled_dot_product_attention(query, query, query)


def efficient(query: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_efficient_attention(query, query, query, bias, True)


def test_the_efficient_kernel_refuses_what_it_cannot_read() -> None:
    query = drawn(1, 2, 9, 16, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="aligned"):
        efficient(query, torch.zeros(9, 9, dtype=query.dtype, device=CUDA).expand(1, 2, 9, 9))
    with pytest.raises(KernelError, match="dtype"):
        efficient(query, torch.zeros(9, 16, device=CUDA)[:, :9].expand(1, 2, 9, 9))
    with pytest.raises(KernelError, match="last dimension"):
        efficient(query.mT.contiguous().mT)


def test_the_efficient_kernel_reads_an_output_by_strides_of_its_own() -> None:
    for dtype, misread in ((torch.float32, False), (torch.bfloat16, True)):
        query = drawn(2, 4, 32, 16, dtype=dtype)
        grad, (out, *rest) = torch.ones_like(query), efficient(query)
        # Texts and heads beside each other in memory, not heads alone.
        by_rows = out.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
        found = [
            aten._scaled_dot_product_efficient_attention_backward(
                grad, query, query, query, None, each, *rest, 0.0, [True, True, True, False]
            )[0]
            for each in (out, by_rows)
        ]
        assert torch.equal(out.cpu(), by_rows.cpu())
        assert torch.equal(found[0].cpu(), found[1].cpu()) is not misread


def test_flash_refuses_what_it_does_not_take() -> None:
    documents = Documents.from_lengths([4], CUDA)
    halves = drawn(4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="fp16 and bf16"):
        flash_attention(halves.float(), halves.float(), halves.float(), documents)
    with pytest.raises(KernelError, match="head size 12"):
        flash_attention(halves[..., :12], halves[..., :12], halves[..., :12], documents)
    with pytest.raises(KernelError, match="int32"):
        flash_attention(halves, halves, halves, Documents((4,), documents.cu_seqlens.long()))
    with pytest.raises(MixedDevicesError):
        flash_attention(halves, halves, halves, Documents((4,), documents.cu_seqlens.cpu()))


# --- Texts in the slots of a cache.


def slots_of(num_texts: int, num_slots: int, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values of two heads in buffers that have more slots than are read."""
    return [drawn(num_texts, 2, num_slots + 7, 16, n)[..., 0].to(dtype) for n in (1, 2)]


DRAFTS = ("sure", "chain", "tree")


@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize("committed", [[9], [9, 2, 7]])
@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("long", [0, 99])
def test_tokens_behind_texts_whose_lengths_the_device_knows(
    window: int | None, committed: list[int], num_new: int, long: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(attention, "LONG", long)
    num_texts, found = len(committed), {}
    chain = torch.ones(1, num_new, num_new).tril().bool()
    tree = chain.clone()
    tree[:, -1, 1:-1] = False  # the last is a sibling of those before it
    for device, drafted in product(("cpu", CUDA), DRAFTS):
        cache = TreeCache(num_texts, torch.device(device), 1)
        cache.slots.commit([list(range(length)) for length in committed])
        if device != "cpu":
            cache.slots.fix_width(32, num_new)
        mask = (tree if drafted == "tree" else chain).to(device)
        draft = None if drafted == "sure" else (mask, mask.sum(2) - 1)
        cache.num_certain = [num_new] * num_texts if draft is None else []
        cache.start_pass(num_new, num_new)
        behind = CachedPass(None, cache, num_new, draft, {}, in_order=drafted == "chain")
        heads = [drawn(num_texts, 8, num_new, 16, dtype=torch.float16)]
        heads += slots_of(num_texts, 32, torch.float16)
        query, *text = (each.to(device) for each in heads)
        if device == "cpu":
            query, text = query.float(), [each.float() for each in text]
        sinks = torch.linspace(-1, 2, 8, device=device) if (window, long) == (40, 0) else None
        scores = ScoreRule(window, 0.3, sinks=sinks)
        with torch.no_grad():
            text = [each[:, :, : cache.read_width] for each in text]
            found[device, drafted] = behind.attend(None, query, *text, scores)
        if device != "cpu":
            is_tree = drafted == "tree" and num_new > 1
            assert bool(behind._masks) is (is_tree and window != 4 and long > 0)
            assert bool(behind._near) is (is_tree and window == 4)
    for drafted in DRAFTS:
        mine, theirs = found["cpu", drafted], found[CUDA, drafted].cpu().float()
        torch.testing.assert_close(theirs, mine, atol=2e-3, rtol=2e-3)


# --- The attention of block drafters: what is launched, in which shapes, and the numbers.

NUM_LAYERS = NUM_DOCUMENTS = 3
MOST_FORWARD, MOST_BACKWARD, MOST_SHAPES = 60, 120, 16


class Drawn:
    """Blocks of a sequence of documents, and what they attend with.

    Args:
        num_blocks: A.
        size: R.
        num_tokens: S.
        seed: of anchors and numbers.
        window: see `BlockRange`.
        heads: Q, K and d.
    """

    def __init__(
        self, num_blocks: int, size: int, num_tokens: int, seed: int = 0,
        window: int | None = None, heads: tuple[int, int, int] = (4, 2, 8),
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        with off():
            anchors = torch.randperm(num_tokens - 1, generator=generator)[:num_blocks].sort().values
            length = -(-num_tokens // NUM_DOCUMENTS)
            self.host = anchors // length * length, anchors + 1
            own, text = (num_blocks, size), (1, num_tokens)
            many, few, size_of_head = heads
            shapes = [(*own, many), *[(*text, few)] * 2, *[(*own, few)] * 2, (*own, many)]
            self.numbers = [
                torch.randn(*each, size_of_head, generator=generator) for each in shapes
            ]
        self.size, self.window = size, window

    def sight(self, device: torch.device) -> BlockRange:
        first, end = (each.pin_memory().to(device, non_blocking=True) for each in self.host)
        return BlockRange(first, end, self.size, self.window is not None, self.window, self.host)

    def run(self, attend: Any, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Output and gradients."""
        *leaves, grad = (each.to(device, dtype) for each in self.numbers)
        query, k, v, own_k, own_v = leaves = [each.requires_grad_() for each in leaves]
        found = attend(query, (k, v), (own_k, own_v), self.sight(device))
        return [found.detach(), *torch.autograd.grad(found, leaves, grad)]


def test_launches_of_a_layer_and_shapes_of_a_run() -> None:
    with hollow(), metered() as run:
        for step in range(4):
            # In the last one there is less to learn from than wanted.
            drawn = Drawn(300 if step == 3 else 512, 16, 4096, seed=step, heads=(32, 8, 128))
            *leaves, grad = (each.to(CUDA, torch.bfloat16) for each in drawn.numbers)
            query, k, v, own_k, own_v = (each.requires_grad_() for each in leaves)
            sight, found = drawn.sight(CUDA), query
            forward = []
            with counted() as counts:
                for _ in range(NUM_LAYERS):
                    with metered() as layer:
                        found = block_attention(found, (k, v), (own_k, own_v), sight)
                    forward.append(layer.num_launches)
                with metered() as backward:
                    torch.autograd.grad(found, query, grad)
            assert counts.num_waits == 0, str(counts)
            # What hides tokens is made in the first layer for all.
            assert max(forward[1:]) <= MOST_FORWARD
            assert forward[0] <= 2 * MOST_FORWARD
            assert backward.num_launches <= NUM_LAYERS * MOST_BACKWARD
    assert len(run.attended) <= MOST_SHAPES, run.attended


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(
    ("num_blocks", "size", "num_tokens", "heads"),
    [(70, 16, 1100, (4, 2, 8)), (5, 5, 33, (3, 3, 8)), (1, 3, 4, (4, 1, 8))],
)
def test_numbers_are_those_of_the_definition(
    num_blocks: int,
    size: int,
    num_tokens: int,
    heads: tuple[int, int, int],
    window: int | None,
    dtype: torch.dtype,
) -> None:
    drawn = Drawn(num_blocks, size, num_tokens, window=window, heads=heads)
    with off():
        expected = drawn.run(plain_block_attention, torch.device("cpu"), torch.float32)
    found = drawn.run(block_attention, CUDA, dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu().float(), theirs, rtol=tolerance, atol=tolerance)
