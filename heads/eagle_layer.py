"""The decoder layer of an EAGLE head: Llama's, over an input of its own.

Letters: N rows, H hidden, I input width, Q heads, K key-value heads, d head size.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

from heads.branch_attention import branch_attention
from heads.branches import Branches


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
        return self._rotated(self.q_proj(inputs), self.q_norm, position_ids)

    def keys_values(self, inputs: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Two [N, K, d], the keys rotated, of inputs [N, I]."""
        keys = self._rotated(self.k_proj(inputs), self.k_norm, position_ids)
        return keys, self._heads(self.v_proj(inputs))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(len(projected), -1, self.head_dim)

    def _rotated(
        self, projected: Tensor, norm: LlamaRMSNorm | None, position_ids: Tensor
    ) -> Tensor:
        states = self._heads(projected)
        if norm is not None:
            # Autocast leaves a float32 weight's product in float32.
            states = norm(states).to(states.dtype)
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


def normed(states: Tensor, norms: nn.ModuleList) -> Tensor:
    """[..., n * H] with each of its n parts normed by its own norm."""
    parts = states.chunk(len(norms), dim=-1)
    return torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)
