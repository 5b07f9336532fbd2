"""Documents are attended to as documents: what the target reads, and what that allocates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from toys import FAMILIES, random_target

from conf.settings.medusa import AdapterConfig
from heads.layers.documents import Documents
from heads.target_model.adapter import Adapter
from heads.target_model.architecture import AttentionPattern
from heads.target_model.attention import FLASH, FUSED, PLAIN, ScoreRule, attend_by_document
from heads.target_model.check import check_target_support
from heads.target_model.model import FeatureLayers, Target
from scripts.bench.harness import measure_peak_bytes
from tests.heads.target_model.test_attention import in_order, textbook

CPU = torch.device("cpu")
# Two packed sequences of three documents, the first with padding; windows are of 12 tokens.
NUMBERS = torch.tensor([[0] * 20 + [1] * 17 + [-1] * 3, [0] * 40])
POSITIONS = torch.tensor([[*range(20), *range(17), *range(3)], [*range(40)]])
TEXTS = [(0, slice(0, 20)), (0, slice(20, 37)), (1, slice(0, 40))]


def target_of(family: str) -> Target:
    """A toy whose scores are scaled in a way of the family's own, where it has one."""
    scaled = {"query_pre_attn_scalar": 8} if family.startswith("gemma") else {}
    return random_target(family, **scaled)


def packed_ids() -> Tensor:
    return torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))


def read(target: Target, taps: FeatureLayers | None = None) -> Any:
    return target.encode_documents(packed_ids(), POSITIONS, Documents.from_ids(NUMBERS), taps)


def alone(target: Target, row: int, place: slice) -> Tensor:
    """[n, D] what the model itself gives on one document."""
    ids = packed_ids()[row : row + 1, place]
    return target.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]


def assert_read_alone(target: Target) -> None:
    found = read(target).hidden_states
    for row, place in TEXTS:
        torch.testing.assert_close(
            found[row, place], alone(target, row, place), rtol=1e-4, atol=1e-4
        )


def test_documents_of_packed_sequences() -> None:
    found = Documents.from_ids(torch.tensor([[0, 0, 1, -1, -1], [0, 0, 0, 0, 0]]))
    assert found.lengths == (2, 1, 2, 5)
    assert (found.cu_seqlens.tolist(), found.cu_seqlens.dtype) == ([0, 2, 3, 5, 10], torch.int32)
    assert found.max_length == 5


def test_documents_are_cut_in_chunks_from_their_own_beginning() -> None:
    found = Documents.from_ids(torch.tensor([[0] * 7 + [1] * 2 + [2] * 3])).split_documents(3)
    assert found.lengths == (3, 3, 1, 2, 3)
    assert (found.cu_seqlens.tolist(), found.cu_seqlens.dtype) == ([0, 3, 6, 7, 9, 12], torch.int32)
    assert found.split_documents(3).lengths == found.lengths


def test_a_document_is_longer_than_a_number_of_tokens_or_not() -> None:
    found = Documents.from_ids(torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]))
    longer = [[bool(each) for each in found.longer_than(n)] for n in (2, 3, 4)]
    assert longer[0] == [True] * 3 + [False] * 2 + [True] * 4 + [False]
    assert longer[1] == [False] * 5 + [True] * 4 + [False]
    assert not any(longer[2])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_read_without_masks_and_each_document_alone(family: str) -> None:
    target = target_of(family)
    check_target_support(target)
    assert target.needs_masks == ""
    assert_read_alone(target)
    plain = [PLAIN if family in ("gemma2", "gpt_oss") else FUSED]
    assert target.attention_calls == [(size, *plain) for size in target.attention_pattern.windows]


def test_layers_are_tapped_in_a_read() -> None:
    target = random_target(num_key_value_heads=2)
    output = read(target, FeatureLayers((0, 1)))
    for row, place in TEXTS:
        ids = packed_ids()[row : row + 1, place]
        theirs = target.model(input_ids=ids, output_hidden_states=True).hidden_states
        for layer in (0, 1):
            torch.testing.assert_close(output.layers[layer][row, place], theirs[layer][0])


def test_a_read_leaves_the_model_as_it_was() -> None:
    target = random_target()
    before = target.model(input_ids=packed_ids()).logits
    read(target)
    assert target.model.config._attn_implementation == "sdpa"
    assert torch.equal(target.model(input_ids=packed_ids()).logits, before)


# --- The kernel of a GPU, which is not here.


def flash_in_plain_torch(
    query: Tensor, keys: Tensor, values: Tensor, *where: Any, scale: float | None,
    window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The promises of aten::_flash_attention_forward for documents, and its demands."""
    starts, same_starts, longest, same_longest, *no_dropout_causal_no_debug = where
    assert starts is same_starts
    assert (starts.dtype, starts[0], starts[-1]) == (torch.int32, 0, len(query))
    assert longest == same_longest == starts.diff().max()
    assert (no_dropout_causal_no_debug, window_size_right) == ([0.0, True, False], 0)
    assert all(each.dim() == 3 and each.stride(-1) == 1 for each in (query, keys, values))
    groups = query.shape[1] // keys.shape[1]
    outputs, norms = [], []
    for first, last in zip(starts.tolist(), starts[1:].tolist(), strict=False):
        q, k, v = query[first:last], keys[first:last], values[first:last]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) * (scale or q.shape[-1] ** -0.5)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = distance >= 0
        if window_size_left >= 0:
            seen &= distance <= window_size_left
        scores = scores.masked_fill(~seen, -torch.inf)
        outputs.append(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v))
        norms.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(norms, 1), torch.empty(0), torch.empty(0), torch.empty(0)


@pytest.fixture
def flash_kernel(monkeypatch) -> None:
    use_flash(monkeypatch)


def use_flash(monkeypatch) -> None:
    monkeypatch.setattr("heads.target_model.attention.can_use_flash", lambda _query: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_in_plain_torch)


@pytest.mark.usefixtures("flash_kernel")
# Windows, chunks, scales, sinks, and layers of other kinds beside.
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma3_text", "llama4_text", "gpt_oss", "gemma4_text", "lfm2"]
)
def test_the_kernel_for_documents_is_told_bounds_windows_and_scale(family: str) -> None:
    target = target_of(family)
    assert_read_alone(target)
    assert target.attention_calls == [(size, FLASH) for size in target.attention_pattern.windows]


@pytest.mark.usefixtures("flash_kernel")
def test_soft_caps_do_not_go_to_the_kernel() -> None:
    target = target_of("gemma2")
    assert_read_alone(target)
    assert {kernel for _, kernel in target.attention_calls} == {PLAIN}


def gradients(kernel: str) -> list[Tensor]:
    """Gradients of an adapter that is trained through a read."""
    target = random_target("mistral")
    adapter = Adapter(target, AdapterConfig(rank=2), seed=0)
    read(target).hidden_states.square().mean().backward()
    assert {found for _, found in target.attention_calls} == {kernel}
    return [each.grad for each in adapter.factors.values()]


def test_an_adapter_learns_through_the_kernel_what_it_learns_elsewhere(monkeypatch) -> None:
    expected = gradients(FUSED)
    use_flash(monkeypatch)
    for found, each in zip(gradients(FLASH), expected, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-4, atol=1e-6)


# --- A model that does not attend through transformers' interface.


def test_an_attention_outside_the_interface_is_given_masks(monkeypatch) -> None:
    from transformers.models.llama import modeling_llama

    usual = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]
    own = {"get_interface": lambda _self, _name, _default: usual}
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", type("Own", (), own)())
    target = random_target()
    check_target_support(target)
    assert "LlamaForCausalLM does not attend through transformers' interface" in target.needs_masks
    assert "masks of tokens by tokens" in target.attention_description
    assert_read_alone(target)


def test_a_feature_that_nobody_knows_is_given_masks() -> None:
    target = random_target()

    def add(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "more": torch.zeros(2)}

    for layer in target.decoder.layers:
        layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)
    check_target_support(target)
    assert "LlamaAttention attends with ['more']" in target.needs_masks
    assert_read_alone(target)


def test_a_layer_that_asks_for_another_window_is_given_masks(monkeypatch) -> None:
    target = random_target("mistral")
    monkeypatch.setattr(AttentionPattern, "windows", [12, None])
    check_target_support(target)
    assert "does not attend through transformers' interface" in target.needs_masks


# --- Nothing is of tokens by tokens.

T = 4096


def largest_allocation(run: Callable[[], object]) -> int:
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = found.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_nothing_is_allocated_of_tokens_by_tokens(family: str) -> None:
    target = random_target(family, num_hidden_layers=2)
    ids, positions = torch.full((1, T), 7), torch.arange(T)[None]

    @torch.no_grad()
    def run() -> None:
        target.encode_documents(ids, positions, Documents.from_lengths([T], CPU))

    assert largest_allocation(run) < T * T


@pytest.mark.parametrize("scores", [ScoreRule(), ScoreRule(window=300), ScoreRule(cap=5.0)])
def test_nor_with_a_gradient(scores: ScoreRule) -> None:
    heads = [torch.randn(T // 2, number, 8, requires_grad=True) for number in (4, 2, 2)]
    documents = Documents.from_lengths([T // 2], CPU)

    def run() -> None:
        attend_by_document(*heads, documents, scores).sum().backward()
        for each in heads:
            each.grad = None

    scores_of_four_heads = 4 * 4 * (T // 2) ** 2
    assert measure_peak_bytes(run, CPU) < scores_of_four_heads


SINKS = torch.tensor([-1.0, 0.0, 2.0, 5.0])


@pytest.mark.parametrize(
    "scores",
    [
        ScoreRule(300), ScoreRule(300, 0.5), ScoreRule(None, None, 2.0), ScoreRule(300, 0.5, 2.0),
        ScoreRule(sinks=SINKS), ScoreRule(300, 0.5, None, SINKS), ScoreRule(300, 0.5, 2.0, SINKS),
    ],
)  # fmt: skip
def test_chunks_give_what_masks_give(scores: ScoreRule) -> None:
    torch.manual_seed(0)
    query, keys, values = (torch.randn(700, number, 8) for number in (4, 2, 2))
    documents = Documents.from_ids(torch.tensor([[0] * 600 + [1] * 100]))
    found = attend_by_document(query, keys, values, documents, scores)
    seen = in_order(700, scores.window)
    seen[600:, :600] = False
    heads = (states.transpose(0, 1)[None] for states in (query, keys, values))
    expected = textbook(*heads, seen, scores)[0].transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
