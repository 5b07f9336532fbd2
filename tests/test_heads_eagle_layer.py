import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from heads.eagle_layer import ROWS_PER_CHUNK, Branches, EagleLayer, branch_attention, causal_rows

DOCUMENTS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, -1])
T = len(DOCUMENTS)


def literal_mask(num_steps: int) -> Tensor:
    """[T, num_steps * T] the mask that the training-time test stands for, cell by cell."""
    mask = torch.zeros(T, num_steps * T, dtype=torch.bool)
    for query in range(T):
        for key in range(T):
            mask[query, key] = key <= query and DOCUMENTS[key] == DOCUMENTS[query]
        for step in range(1, num_steps):
            mask[query, step * T + query] = True
    return mask


def literal_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[T, Q, d] with keys repeated per group and one softmax over all of them."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
    scores = torch.einsum("tqd,sqd->qts", query, keys) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("qts,sqd->tqd", weights, values)


def test_the_mask_of_two_steps_is_a_causal_block_and_a_diagonal() -> None:
    rows = causal_rows(torch.tensor([0, 0, 1, 1]), torch.arange(4))
    assert rows.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert literal_mask(2)[2].int().tolist() == [1, 1, 1, *[0] * 7, 0, 0, 1, *[0] * 7]


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("chunk", [3, ROWS_PER_CHUNK])
def test_branch_attention_equals_the_full_mask_forward_and_backward(
    num_steps: int, chunk: int, monkeypatch
) -> None:
    monkeypatch.setattr("heads.eagle_layer.ROWS_PER_CHUNK", chunk)
    torch.manual_seed(0)
    query = torch.randn(T, 4, 8, requires_grad=True)
    keys = torch.randn(num_steps, T, 2, 8, requires_grad=True)
    values = torch.randn(num_steps, T, 2, 8, requires_grad=True)
    upstream = torch.randn(T, 4, 8)
    expected = literal_attention(
        query, keys.flatten(0, 1), values.flatten(0, 1), literal_mask(num_steps)
    )
    wanted = torch.autograd.grad((expected * upstream).sum(), (query, keys, values))
    branches = Branches(
        keys[:1], values[:1], causal_rows(DOCUMENTS, torch.arange(T)), [*keys[1:]], [*values[1:]]
    )
    found = branch_attention(query, branches)
    grads = torch.autograd.grad((found * upstream).sum(), (query, keys, values))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_selected_branches_take_their_drafts_along() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2, 8)
    allowed = causal_rows(torch.zeros(4), torch.arange(4))
    branches = Branches(keys[:1], values[:1], allowed, [keys[1]], [values[1]])
    query, rows = torch.randn(4, 2, 8), torch.tensor([2, 0, 2])
    whole = branch_attention(query, branches)
    torch.testing.assert_close(branch_attention(query[rows], branches.select(rows)), whole[rows])


def test_the_layer_is_llamas_own_where_the_input_is_the_normed_residual() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-5, attn_implementation="eager",
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 16},
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = LlamaDecoderLayer(config, 0)
    ours = EagleLayer(config, two_inputs=False, qk_norm=False)
    state = theirs.state_dict()
    norm = state.pop("input_layernorm.weight")
    ours.load_state_dict(state)
    residual, positions = torch.randn(9, 64), torch.arange(9)
    rotary = LlamaRotaryEmbedding(config)(residual[None], positions[None])
    causal = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    expected = theirs(residual[None], causal, positions[None], position_embeddings=rotary)
    inputs = theirs.input_layernorm(residual)
    assert norm.equal(torch.ones(64))
    keys, values = ours.self_attn.keys_values(inputs, positions)
    branches = Branches(keys[None], values[None], causal_rows(torch.zeros(9), positions))
    torch.testing.assert_close(
        ours(inputs, residual, positions, branches), expected[0], rtol=1e-5, atol=1e-5
    )
