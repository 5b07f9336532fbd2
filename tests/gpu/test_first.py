"""First tests of `make test-gpu`: known faults and gaps of a GPU's kernels.

The suite of the emulated device runs it too, so that it has run before it meets a GPU.
"""

from typing import Any

import pytest
import torch
from oldest_torch import FUNCTIONS, OPERATORS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from heads.layers.block_attention import attend, attend_backward
from heads.layers.documents import Documents
from heads.target_model.attention import FLASH, DocumentPass
from heads.target_model.kernels import ScoreRule, causal_attention, choose_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda", 0)
CLOSE = {"atol": 3e-2, "rtol": 3e-2}
"""Tolerances of bfloat16, beside float32."""


@pytest.fixture(autouse=True)
def as_ever() -> None:
    choose_kernels(CUDA)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_what_is_called_is_there(operator: Any) -> None:
    assert operator._schema.is_backward_compatible_with(OPERATORS[operator])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_build_for_cuda_has_them(name: str) -> None:
    if torch.version.cuda is None:
        pytest.skip("a build without CUDA")
    assert hasattr(torch._C, name)


@pytest.mark.parametrize("num_keys", [33, 64, 65, 97, 129, 192, 320])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_masked_attention_gives_the_gradients_of_float32(num_keys: int, kv_heads: int) -> None:
    """At lengths and heads of which cuDNN gave NaN or other text (pytorch#196678, #193893)."""
    shapes = (1, 8, 16, 64), (1, kv_heads, num_keys, 64), (1, kv_heads, num_keys, 64)
    seen = torch.ones(16, num_keys, dtype=torch.bool).tril(num_keys - 16)
    found = []
    for device, dtype in (("cpu", torch.float32), (CUDA, torch.bfloat16)):
        leaves = [drawn(*s, seed=n).to(device, dtype) for n, s in enumerate(shapes)]
        leaves = [each.requires_grad_() for each in leaves]
        query, *text = leaves
        spread = [each.repeat_interleave(8 // kv_heads, 1) for each in text]
        width = num_keys + -num_keys % 16
        mask = torch.zeros(16, width, dtype=dtype).masked_fill(
            ~torch.nn.functional.pad(seen, (0, width - num_keys)), torch.finfo(dtype).min
        )
        mask = mask.to(device)[:, :num_keys]
        output = scaled_dot_product_attention(query, *spread, attn_mask=mask)
        output.backward(drawn(1, 8, 16, 64, seed=3).to(device, dtype))
        found.append([output.detach(), *(each.grad for each in leaves)])
    for exact, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine.cpu().float(), exact, **CLOSE)


def test_cudnn_is_not_what_attends() -> None:
    query = drawn(1, 8, 128, 64).to(CUDA)
    usual = scaled_dot_product_attention(query, query, query, is_causal=True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        flash = scaled_dot_product_attention(query, query, query, is_causal=True)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.equal(usual, flash)


@pytest.mark.parametrize("num_keys", [33, 65, 97, 128, 129])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_that_heads_share_without_a_copy(num_keys: int, dtype: torch.dtype) -> None:
    """Expanded ones at lengths of which the kernel is said to err (pytorch#191937)."""
    exact, found = [], []
    for device, kind, into in (("cpu", torch.float32, exact), (CUDA, dtype, found)):
        query = drawn(4, 2, 32, 64, seed=1).to(device, kind)
        keys, values = (
            drawn(1, 2, num_keys, 64, seed=n).to(device, kind).expand(4, -1, -1, -1) for n in (2, 3)
        )
        output, log_norm = attend(query, keys, values, None)
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
        grad = drawn(4, 2, 32, 64, seed=4).to(device, kind)
        back = attend_backward(grad, (query, keys, values), None, output, log_norm)
        into += [output, log_norm, *back]
    close = CLOSE if dtype is torch.bfloat16 else {"atol": 1e-3, "rtol": 1e-3}
    for theirs, mine in zip(exact, found, strict=True):
        torch.testing.assert_close(mine.cpu().float(), theirs, **close)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 16])
def test_documents_give_the_gradients_of_float32(window: int | None, sinks: bool) -> None:
    documents = Documents.from_ids(torch.tensor([[0] * 40 + [1] * 60]))
    shapes, found = ((1, 8, 100, 64), (1, 2, 100, 64), (1, 2, 100, 64), (8,)), []
    for device, dtype in (("cpu", torch.float32), (CUDA, torch.bfloat16)):
        leaves = [drawn(*s, seed=n).to(device, dtype) for n, s in enumerate(shapes)]
        leaves = [each.requires_grad_() for each in leaves]
        *text, score = leaves
        scores = ScoreRule(window, sinks=score if sinks else None)
        reading = DocumentPass(documents.to_device(torch.device(device)))
        output = reading.attend(None, *text, scores)
        output.backward(drawn(*output.shape, seed=5).to(device, dtype))
        found.append([output.detach(), *(each.grad for each in leaves[: 3 + sinks])])
    assert reading.calls == [(window, FLASH)]
    for exact, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine.cpu().float(), exact, atol=6e-2, rtol=6e-2)


def test_a_prompt_of_grouped_heads() -> None:
    shapes, found = ((2, 8, 70, 64), (2, 2, 70, 64), (2, 2, 70, 64)), []
    for device, dtype in (("cpu", torch.float32), (CUDA, torch.bfloat16)):
        text = [drawn(*s, seed=n).to(device, dtype) for n, s in enumerate(shapes)]
        found.append(causal_attention(*text, ScoreRule()))
    torch.testing.assert_close(found[1].cpu().float(), found[0], **CLOSE)
