"""Parts of a Llama layer, and of Qwen3's, that heads draft with; sized like a target's.

Letters: N rows, H hidden, I input width, Q heads, K key-value heads, d head size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.target_model import sizes

LLAMA_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size"),
    *("attention_bias", "mlp_bias"),
)


def llama_like(config: Any, vocab_size: int) -> LlamaConfig:
    """A Llama layer of the target's sizes, whatever the target's own layers are.

    It is as wide as the target's embedding, which it reads.

    Raises:
        InputError: the config names no hidden size, or a size that is none.
    """
    width = sizes.embedding_size(config)
    heads = sizes.attention(config, width)
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=sizes.mlp_size(config),
        num_attention_heads=heads.num_heads,
        num_key_value_heads=heads.num_key_value_heads,
        head_dim=heads.head_dim,
        hidden_act="silu",  # engines know no other for draft layers
        rms_norm_eps=sizes.norm_epsilon(config),
        rope_parameters=sizes.rope(config),
        max_position_embeddings=sizes.num_positions(config),
        num_hidden_layers=1,
    )


def old_rope(rope: dict[str, Any], short: bool = False) -> dict[str, Any] | None:
    """RoPE scaling as before transformers 5, whose first readers took two keys and no more."""
    rope_type = rope["rope_type"]
    if rope_type == "default":
        return None
    if short:
        return {"type": rope_type, "factor": float(rope["factor"])}
    return {"type": rope_type} | {name: v for name, v in rope.items() if name != "rope_theta"}


class RmsNorm(nn.RMSNorm):
    """Llama's norm in float32, by one kernel where there is one.

    The result has the dtype of the product after it: under autocast its dtype, so that several
    products of the same states do not round them each anew; otherwise the wider one of states and
    weight.
    """

    def forward(self, states: Tensor) -> Tensor:
        """[..., size] of the same shape."""
        device_type = states.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        else:
            dtype = torch.promote_types(states.dtype, self.weight.dtype)
        weight = self.weight.float()
        return functional.rms_norm(states.float(), weight.shape, weight, self.eps).to(dtype)


class LlamaAttention(nn.Module):
    """Llama's attention with an input of its own width, and Qwen3's norms if asked for.

    Args:
        config: sizes, biases and RoPE.
        input_size: I.
        qk_norm: norms on queries and keys per head.
    """

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
        self.q_norm = RmsNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RmsNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        # Outside the modules: its float32 frequencies must survive a cast of the head.
        self._rotary = (LlamaRotaryEmbedding(config),)

    def rotation(self, inputs: Tensor, position_ids: Tensor) -> Tensor:
        """[N, 2, d] by which queries and keys of inputs [N, I] at positions [N] are turned."""
        cos, sin = self._rotary[0].to(inputs.device)(inputs, position_ids.unsqueeze(0))
        # The sign that the half which comes from behind has in Llama's `rotate_half`.
        behind, ahead = sin[0].chunk(2, dim=-1)
        return torch.stack([cos[0], torch.cat([-behind, ahead], dim=-1)], dim=1)

    def query(self, inputs: Tensor, rotation: Tensor) -> Tensor:
        """[N, Q, d] rotated queries of inputs [N, I]."""
        return self._rotated(self.q_proj(inputs), self.q_norm, rotation)

    def keys_values(self, inputs: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Two [N, K, d], the keys rotated, of inputs [N, I]."""
        keys = self._rotated(self.k_proj(inputs), self.k_norm, rotation)
        return keys, self._heads(self.v_proj(inputs))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(len(projected), -1, self.head_dim)

    def _rotated(self, projected: Tensor, norm: RmsNorm | None, rotation: Tensor) -> Tensor:
        states = self._heads(projected)
        if norm is not None:
            states = norm(states)
        cos, sin = rotation.unsqueeze(2).unbind(1)
        return states * cos + states.roll(self.head_dim // 2, dims=-1) * sin


def normed(states: Tensor, norms: nn.ModuleList) -> Tensor:
    """[..., n * H] with each of its n parts normed by its own norm."""
    parts = states.chunk(len(norms), dim=-1)
    return torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)
