"""The decoder layer of an EAGLE head, and the attention of rows that draft side by side.

Every use of the layer is the same picture. A text was read with true features, which gives
keys and values for all of its S tokens. From some of its tokens, N rows draft on: a row sees
the text up to its own token, and what it drafted itself. That is the training-time test of
EAGLE-3 (causal block plus diagonals), the alignment of HASS, a chain while decoding (N = 1)
and a level of a dynamic tree (a row is a path). No row ever sees another, so J steps cost J
times N scores more, not a mask of [N, J * N].

Letters: T texts, S tokens of a text, N rows, J earlier drafts of a row, H hidden, I input
width, Q heads, K key-value heads, d head size.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

ROWS_PER_CHUNK = 256


@dataclass
class Branches:
    """What N rows look at: a text, and the drafts of each row.

    Each text has N / T rows, one text's after another's.

    Attributes:
        keys, values: [T, S, K, d], of the texts.
        allowed: [N, S] bool, the tokens of its text that a row may look at.
        own_keys, own_values: J tensors [N, K, d], of the row's drafts so far.
    """

    keys: Tensor
    values: Tensor
    allowed: Tensor
    own_keys: list[Tensor] = field(default_factory=list)
    own_values: list[Tensor] = field(default_factory=list)

    def select(self, rows: Tensor) -> "Branches":
        """The branches of other rows: [M] int64 indices, equally many of each text in order."""
        return Branches(
            self.keys,
            self.values,
            self.allowed[rows],
            [keys[rows] for keys in self.own_keys],
            [values[rows] for values in self.own_values],
        )


def branch_attention(query: Tensor, branches: Branches) -> Tensor:
    """Softmax attention of each row over its text and its own drafts, in one distribution.

    Scores of one text live for 256 rows at a time, in the backward pass too, so memory beyond
    the inputs does not grow with N * S.

    Args:
        query: [N, Q, d], rotated.
        branches: keys rotated.

    Returns:
        [N, Q, d].
    """
    chunks = []
    rows_per_chunk = ROWS_PER_CHUNK if len(branches.keys) == 1 else len(query)
    for start in range(0, len(query), rows_per_chunk):
        here = slice(start, start + rows_per_chunk)
        inputs = (query[here], branches.keys, branches.values, branches.allowed[here])
        own = [own[here] for own in (*branches.own_keys, *branches.own_values)]
        if torch.is_grad_enabled():
            chunks.append(
                checkpoint(_attend, *inputs, *own, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            chunks.append(_attend(*inputs, *own))
    return torch.cat(chunks)


def _attend(query: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, *own: Tensor) -> Tensor:
    """`own` holds J keys, then J values, each [N, K, d]."""
    num_rows, num_heads, size = query.shape
    num_texts, num_tokens, num_kv_heads, _ = keys.shape
    grouped = query.view(num_rows, num_kv_heads, -1, size) * size**-0.5
    # [T, K, N / T * Q / K, S]: one matrix product per text and key-value head
    flat = grouped.view(num_texts, -1, *grouped.shape[1:]).transpose(1, 2).flatten(2, 3)
    scores = _by_row(flat @ keys.permute(0, 2, 3, 1), num_rows)
    scores = scores.masked_fill(~allowed[:, None, None], float("-inf"))
    num_own = len(own) // 2
    if num_own:
        own_keys, own_values = torch.stack(own[:num_own], 2), torch.stack(own[num_own:], 2)
        scores = torch.cat([scores, grouped @ own_keys.transpose(2, 3)], dim=-1)
    weights = scores.float().softmax(-1).to(values.dtype)
    text, drafts = weights.split([num_tokens, num_own], dim=-1)
    text = text.reshape(num_texts, -1, *text.shape[1:]).transpose(1, 2).flatten(2, 3)
    found = _by_row(text @ values.transpose(1, 2), num_rows)
    if num_own:
        found = found + drafts @ own_values
    return found.reshape(num_rows, num_heads, size)


def _by_row(products: Tensor, num_rows: int) -> Tensor:
    """[N, K, Q / K, .] of [T, K, N / T * Q / K, .]."""
    num_texts, num_kv_heads, _, width = products.shape
    split = products.view(num_texts, num_kv_heads, num_rows // num_texts, -1, width)
    return split.transpose(1, 2).flatten(0, 1)


class EagleAttention(nn.Module):
    """Llama's attention with an input of its own width (`2H` in EAGLE-3)."""

    def __init__(self, config: LlamaConfig, input_size: int, qk_norm: bool) -> None:
        super().__init__()
        # transformers fills these in where a config leaves them out.
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        hidden, self.head_dim = config.hidden_size, config.head_dim
        bias = config.attention_bias
        width = config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        # Outside the modules: its float32 frequencies must survive a cast of the head.
        self._rotary = (LlamaRotaryEmbedding(config),)

    def query(self, inputs: Tensor, position_ids: Tensor) -> Tensor:
        """[N, Q, d] rotated queries of inputs [N, I]."""
        found = self._heads(self.q_proj(inputs))
        return self._rotate(found if self.q_norm is None else self.q_norm(found), position_ids)

    def keys_values(self, inputs: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Two [N, K, d], the keys rotated, of inputs [N, I]."""
        keys = self._heads(self.k_proj(inputs))
        keys = self._rotate(keys if self.k_norm is None else self.k_norm(keys), position_ids)
        return keys, self._heads(self.v_proj(inputs))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(len(projected), -1, self.head_dim)

    def _rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        rotary = self._rotary[0].to(states.device)
        cos, sin = rotary(states, position_ids.unsqueeze(0))
        return states * cos[0].unsqueeze(1) + rotate_half(states) * sin[0].unsqueeze(1)


class EagleLayer(nn.Module):
    """One Llama decoder layer over an input that is not its residual stream.

    Args:
        config: sizes, norms and RoPE.
        two_inputs: EAGLE-3's input, a normed embedding beside a normed feature (I = 2H);
            otherwise EAGLE-1's, which comes ready and is not normed (I = H).
        qk_norm: norms on queries and keys per head, as Qwen3 has them.
    """

    def __init__(self, config: LlamaConfig, two_inputs: bool, qk_norm: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(hidden, eps) if two_inputs else None
        self.hidden_norm = LlamaRMSNorm(hidden, eps) if two_inputs else None
        self.self_attn = EagleAttention(config, 2 * hidden if two_inputs else hidden, qk_norm)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, inputs: Tensor, residual: Tensor, position_ids: Tensor, branches: Branches
    ) -> Tensor:
        """[N, H] the layer's output.

        Args:
            inputs: [N, I], what queries are made of.
            residual: [N, H].
            position_ids: [N] int64.
            branches: keys and values, those of the rows themselves included.
        """
        attended = branch_attention(self.self_attn.query(inputs, position_ids), branches)
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def causal_rows(document_ids: Tensor, rows: Tensor) -> Tensor:
    """[N, S] bool: a row sees the tokens of its document up to its own.

    Args:
        document_ids: [S] int64 of a packed text.
        rows: [N] int64, the token that a row drafts from.
    """
    places = torch.arange(len(document_ids), device=rows.device)
    same = document_ids[rows].unsqueeze(1) == document_ids.unsqueeze(0)
    return same & (places.unsqueeze(0) <= rows.unsqueeze(1))


def normed(states: Tensor, norms: nn.ModuleList) -> Tensor:
    """[..., n * H] with each of its n parts normed by its own norm."""
    parts = states.chunk(len(norms), dim=-1)
    return torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)
