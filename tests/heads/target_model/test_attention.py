"""Attention of new tokens behind a cache, against the textbook's scores and softmax."""

import math

import pytest
import torch
from torch import Tensor

from conf.settings.target import TargetConfig
from heads.decoding.cache import TreeCache
from heads.target_model import kernels
from heads.target_model.attention import CachedPass
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.kernels import (
    ScoreRule,
    build_folded_mask,
    causal_attention,
    masked_attention,
)
from heads.target_model.load import load_target
from heads.target_model.model import FeatureLayers, Target, iter_prefill
from heads.target_model.model import prefill as read_rows
from scripts.bench.harness import measure_peak_bytes
from tests.toys import random_target, save_target, texts

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
PLAIN = ScoreRule()
KINDS = {
    "plain": PLAIN,
    "scale": ScoreRule(scale=0.2),
    "window": ScoreRule(window=4),
    "cap": ScoreRule(cap=1.5),
    "sinks": ScoreRule(sinks=SINKS),
    "all": ScoreRule(window=5, scale=0.3, cap=2.0, sinks=SINKS),
}


def test_cudnns_attention_is_off_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", told.append)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for device in (cpu, cuda):
        kernels.choose_kernels(device)
    assert told == [False]
    assert kernels.kernel_notice(cpu) == []
    assert kernels.kernel_notice(cuda) == [
        "attention on cuda: PyTorch's flash and memory-efficient kernels, cuDNN's is off"
    ]


def heads(num_texts: int, num_tokens: int, value_size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Four query heads, of which two share a key-value head."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (2, 8), (2, value_size))
    return tuple(  # type: ignore[return-value]
        torch.randn(num_texts, number, num_tokens, size, generator=generator)
        for number, size in shapes
    )


def textbook(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scores: ScoreRule = PLAIN
) -> Tensor:
    """Attention of queries [B, Q, n, d], by `seen` [n, m] or [B, 1, n, m] bool."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(groups, 1) for each in (keys, values))
    scale = 1 / math.sqrt(query.shape[-1]) if scores.scale is None else scores.scale
    found = torch.einsum("bhnd,bhmd->bhnm", query, keys) * scale
    if scores.cap is not None:
        found = scores.cap * torch.tanh(found / scores.cap)
    weights = found.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if scores.sinks is not None:
        total = total + scores.sinks.exp().view(1, -1, 1, 1)
    return weights / total @ values


def in_order(num_tokens: int, window: int | None, chunk: int | None = None) -> Tensor:
    places = torch.arange(num_tokens)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (window or num_tokens))
    return seen if chunk is None else seen & (places[:, None] // chunk == places // chunk)


@pytest.mark.parametrize("rows", [256, 3])
@pytest.mark.parametrize("num_new", [9, 4, 1])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_last_tokens_see_what_comes_before(
    kind: str, num_new: int, rows: int, monkeypatch
) -> None:
    monkeypatch.setattr(kernels, "LONGEST_CHUNK", rows)
    (query, *text), scores = heads(2, 9), KINDS[kind]
    expected = textbook(query, *text, in_order(9, scores.window), scores)
    with torch.no_grad():
        found = causal_attention(query[:, :, -num_new:], *text, scores)
    torch.testing.assert_close(found, expected[:, :, -num_new:])


@pytest.mark.parametrize("num_new", [9, 4])
def test_nothing_before_its_own_chunk_is_seen(num_new: int, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "LONGEST_CHUNK", 3)
    query, *text = heads(1, 9)
    expected = textbook(query, *text, in_order(9, None, chunk=4))
    torch.testing.assert_close(
        causal_attention(query[:, :, -num_new:], *text, ScoreRule(), chunk=4),
        expected[:, :, -num_new:],
    )


def test_values_may_have_another_size_than_keys() -> None:
    query, *text = heads(1, 6, value_size=5)
    expected = textbook(query, *text, in_order(6, None))
    torch.testing.assert_close(
        causal_attention(query[:, :, 2:], *text, ScoreRule()), expected[:, :, 2:]
    )


def test_tokens_behind_others_need_no_mask(monkeypatch) -> None:
    (query, *text), masks = heads(1, 300), []
    usual = kernels.masked_attention
    monkeypatch.setattr(kernels, "masked_attention", lambda *a: masks.append(1) or usual(*a))
    with torch.no_grad():
        causal_attention(query[:, :, -200:], *text, ScoreRule())
    assert masks == []


@pytest.mark.parametrize("kind", ["plain", "cap", "sinks"])
def test_each_text_has_a_mask_of_its_own(kind: str) -> None:
    (query, *text), scores = heads(2, 5), KINDS[kind]
    query = query[:, :, :3]
    allowed = torch.tensor(
        [
            [[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]],
            [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0]],
        ]
    ).bool()
    found = masked_attention(query, *text, build_folded_mask(allowed, 2, torch.float32), scores)
    torch.testing.assert_close(found, textbook(query, *text, allowed.unsqueeze(1), scores))


def test_a_mask_takes_no_memory_beside_itself() -> None:
    allowed = torch.ones(1, 3, 1 << 14, dtype=torch.bool)
    taken = measure_peak_bytes(
        lambda: build_folded_mask(allowed, 2, torch.float32), torch.device("cpu")
    )
    assert taken == 2 * 3 * (1 << 14) * 4


def test_without_a_mask_everything_is_seen() -> None:
    query, *text = heads(2, 5)
    found = masked_attention(query[:, :, :1], *text, None, ScoreRule())
    everything = torch.ones(1, 5, dtype=torch.bool)
    torch.testing.assert_close(found, textbook(query[:, :, :1], *text, everything))


# --- Prompts in parts.

LAYERS = FeatureLayers((0, 1))


def states(target: Target, rows: list[list[int]], behind: list[list[int]]) -> list[Tensor]:
    """The states of the tokens of each text, and of the tokens read behind the text."""
    cache = target.new_cache(len(rows))
    found = []
    for part in (rows, behind):
        output = read_rows(target, cache, part, LAYERS)
        every = torch.cat([output.hidden_states, output.layers[0], output.layers[1]], -1)
        found.append([own[: len(row)] for own, row in zip(every, part, strict=True)])
    return [torch.cat(both) for both in zip(*found, strict=True)]


@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "gemma2", "gemma4_text", "llama4_text", "lfm2", "qwen3_next", "falcon_h1"],
)
def test_prompts_together_or_in_parts_are_read_as_each_in_one(family: str, monkeypatch) -> None:
    target = random_target(family)
    rows = [row[:length] for row, length in zip(texts(target, 3, 13), (13, 5, 8), strict=True)]
    behind = [[4, 7], [9], [11, 3]]
    expected = [states(target, [row], [end])[0] for row, end in zip(rows, behind, strict=True)]
    for found, own in zip(states(target, rows, behind), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(EmbeddingsAndOutputHead, "prefill_chunk", 4)
    monkeypatch.setattr("heads.target_model.model.ROW_TOKENS", 9)  # rows of two prompts, and one
    for found, own in zip(states(target, rows, behind), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-3, atol=1e-4)


def test_parts_of_a_prompt_are_as_long_as_is_asked(tmp_path) -> None:
    config = TargetConfig(path=str(save_target(tmp_path)), prefill_chunk=3)
    target = load_target(config, torch.device("cpu"))
    found = iter_prefill(target, target.new_cache(1), [[5, 6, 7, 8, 9, 10, 11]])
    assert [rows for rows, _ in found] == [[[5, 6, 7]], [[8, 9, 10]], [[11]]]


def extension(cache: TreeCache, sure: list[int], num_new: int) -> CachedPass:
    if sure:
        cache.set_certain_tokens(sure, [])
    cache.start_pass(num_new, num_new)
    return CachedPass(None, cache, num_new, None, {})


@pytest.mark.parametrize(
    ("committed", "sure", "even"),
    [([3, 3], [2, 1], True), ([3, 1], [2, 0], True), ([3, 1], [2, 1], False)],
)
def test_texts_that_end_at_the_same_slot_need_no_mask(
    committed: list[int], sure: list[int], even: bool, monkeypatch
) -> None:
    cache = TreeCache(2, torch.device("cpu"), 1)
    cache.slots.commit([list(range(length)) for length in committed])
    found = extension(cache, sure, 2)
    masks: list[int] = []
    monkeypatch.setattr(
        cache.slots, "attention_mask", lambda *_: masks.append(1) or torch.ones(2, 2, 5).bool()
    )
    query, *text = heads(2, 5)
    found.attend(0, query[:, :, :2], *text, ScoreRule())
    assert (masks == []) is even
    assert isinstance(cache.write_slots, int) is even


def test_a_token_alone_needs_no_mask() -> None:
    cache = TreeCache(1, torch.device("cpu"), 1)
    cache.slots.commit([[0, 1, 2, 3]])
    cache.start_pass(1, 1)
    one = torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64)
    found = CachedPass(None, cache, 1, one, {})
    assert found._build_mask(None, None, 2, torch.device("cpu"), torch.float32) is None
    windowed = found._build_mask(3, None, 2, torch.device("cpu"), torch.float32)
    assert windowed is not None
    assert (windowed == 0).int().tolist() == [[[[0, 0, 1, 1, 1]] * 2]]
