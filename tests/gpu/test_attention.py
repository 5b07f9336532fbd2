"""Attention by PyTorch's own flash kernel on a GPU, against the CPU's in float32."""

import pytest
import torch
from torch import Tensor

from heads.decoding.cache import TreeCache
from heads.target_model import attention
from heads.target_model.attention import CachedPass
from heads.target_model.kernels import ScoreRule, choose_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NUM_SLOTS, SIZE = 1536, 64
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()[None]


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


def attended(
    heads: list[Tensor], cache: TreeCache, mask: Tensor | None, scores: ScoreRule, in_order: bool
) -> Tensor:
    """[B, n, Q, d] of queries and all slots' keys and values, behind what the cache holds."""
    query, *text = heads
    num_texts, num_new = len(query), query.shape[2]
    cache.num_certain = [num_new] * num_texts if mask is None else []
    cache.start_pass(num_new, num_new)
    draft = None if mask is None else (mask, mask.sum(2) - 1)
    found = CachedPass(None, cache, num_new, draft, {}, in_order)
    with torch.no_grad():
        return found.attend(None, query, *(each[:, :, : cache.read_width] for each in text), scores)


@pytest.mark.parametrize("num_kv_heads", [2, 8])
@pytest.mark.parametrize("committed", [[1300], [1300, 7, 129]])
@pytest.mark.parametrize("drafted", ["token", "chain", "tree", "sure"])
@pytest.mark.parametrize("kind", ["plain", "sinks", "window"])
@pytest.mark.parametrize("long", [0, NUM_SLOTS])
def test_tokens_behind_texts_of_which_a_graph_learns_how_long_they_are(
    num_kv_heads: int,
    committed: list[int],
    drafted: str,
    kind: str,
    long: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "LONG", long)
    choose_kernels(torch.device("cuda"))
    num_texts, num_new = len(committed), 1 if drafted == "token" else 4
    mask = (
        None if drafted == "sure" else TREE if drafted == "tree" else torch.ones_like(TREE).tril()
    )
    mask = None if mask is None else mask[:, :num_new, :num_new]
    heads = [drawn(num_texts, 8, num_new, SIZE)]
    heads += [drawn(num_texts, num_kv_heads, NUM_SLOTS, SIZE) for _ in range(2)]
    sinks = torch.linspace(-1, 2, 8) if kind == "sinks" else None
    scores = ScoreRule(100 if kind == "window" else None, sinks=sinks)
    slots = TreeCache(num_texts, torch.device("cpu"), 1)
    slots.slots.commit([list(range(length)) for length in committed])
    expected = attended([e.float() for e in heads], slots, mask, scores, drafted == "chain")

    there = [each.to("cuda") for each in heads]
    mask = None if mask is None else mask.to("cuda")
    scores = scores._replace(sinks=None if sinks is None else sinks.to("cuda"))
    held = TreeCache(num_texts, torch.device("cuda"), 1)
    held.fix_width(NUM_SLOTS, num_new, NUM_SLOTS)
    held.slots.committed.fill_(1)
    attended(there, held, mask, scores, drafted == "chain")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attended(there, held, mask, scores, drafted == "chain")
    held.slots.committed.copy_(torch.tensor(committed, device="cuda").unsqueeze(1))
    graph.replay()
    torch.testing.assert_close(found.cpu().float(), expected, atol=2e-2, rtol=2e-2)
