"""Parts of Llama's and Qwen3's layers for heads, with a target's sizes.

Letters: N rows, H hidden, I input width, Q heads, K key-value heads, d head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conf.errors import InputError
from heads.target_model.architecture import (
    FULL,
    SLIDING,
    compute_attention_heads,
    compute_mlp_size,
    find_embedding_size,
    find_max_positions,
    find_norm_epsilon,
    find_rope,
)

LLAMA_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size"),
    *("attention_bias", "mlp_bias"),
)

SCALED_ROPE = ("linear", "yarn", "llama3")
MROPE_KEYS = {"mrope_section", "mrope_interleaved"}
"""Keys of multimodal RoPE, whose three positions are equal for text."""


def make_llama_config(config: Any, vocab_size: int) -> LlamaConfig:
    """Make the config of a Llama layer with the sizes of a target of any architecture.

    The layer reads the target's embedding and has its width.

    Raises:
        InputError: the config has no hidden size, or an invalid size.
    """
    width = find_embedding_size(config)
    num_heads, num_key_value_heads, head_dim = compute_attention_heads(config, width)
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=compute_mlp_size(config),
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        hidden_act="silu",  # the only one that engines support in draft layers
        rms_norm_eps=find_norm_epsilon(config),
        rope_parameters=find_rope(config),
        max_position_embeddings=find_max_positions(config),
        num_hidden_layers=1,
    )


def parse_rope(
    settings: dict[str, Any], default_theta: float, make_error: Callable[[str], InputError]
) -> dict[str, Any]:
    """Parse the RoPE settings of a head's config, old or new, into the form of transformers 5.

    transformers 5 reads `rope_scaling` before `rope_parameters`, and `rope_theta` in either before
    the one beside them. vLLM with transformers 4 reads the one beside them first.

    Args:
        settings: content of `config.json`.
        default_theta: theta if no key names one.
        make_error: function that makes an error of a problem.

    Raises:
        InputError: two keys contradict each other, or the scaling is not implemented.
    """
    found = [("rope_theta", settings.get("rope_theta"))]
    for place in ("rope_parameters", "rope_scaling"):
        section = settings.get(place) or {}
        by_kind = [part for part in section.values() if isinstance(part, dict)]
        if SLIDING in settings.get("layer_types", ()) and by_kind[1:] != by_kind[:-1]:
            raise make_error(
                f"config.json says {place}={section}, another RoPE for each kind of layer, which "
                "is not implemented"
            )
        section = section.get(FULL, section)
        found += [(f"{place}.{name}", value) for name, value in section.items()]
    rope: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place, value in found:
        name = place.rpartition(".")[2]
        name = "rope_type" if name == "type" else name
        if value is None:
            continue
        given = "default" if value == "mrope" else value
        if rope.setdefault(name, given) != given:
            raise make_error(
                f"config.json says {places[name]}={rope[name]}, but {place}={value}, and readers "
                "differ in which they take; keep the right one"
            )
        places.setdefault(name, place)
    kind, theta = rope.pop("rope_type", None), rope.pop("rope_theta", default_theta)
    part, scaling = rope.pop("partial_rotary_factor", 1.0), sorted(rope.keys() - MROPE_KEYS)
    if kind is None and scaling:
        raise make_error(
            f"config.json has {places[scaling[0]]}={rope[scaling[0]]}, but no rope_type; add "
            f"rope_type, one of {', '.join(SCALED_ROPE)}, or remove {places[scaling[0]]}"
        )
    if part == 1.0 and kind in (None, "default"):
        return {"rope_type": "default", "rope_theta": theta}
    if part == 1.0 and kind in SCALED_ROPE:
        return rope | {"rope_type": kind, "rope_theta": theta}
    raise make_error(
        f"config.json says RoPE is {kind} over {part} of each head, which is not implemented; must "
        f"be default, mrope, {', '.join(SCALED_ROPE)} over 1.0"
    )


def format_legacy_rope(rope: dict[str, Any], short: bool = False) -> dict[str, Any] | None:
    """Format RoPE scaling as before transformers 5; None without scaling.

    Args:
        rope: `rope_parameters` of a config.
        short: whether to keep only the two keys that first readers knew.
    """
    rope_type = rope["rope_type"]
    if rope_type == "default":
        return None
    if short:
        return {"type": rope_type, "factor": float(rope["factor"])}
    return {"type": rope_type} | {name: v for name, v in rope.items() if name != "rope_theta"}


class RmsNorm(nn.RMSNorm):
    """Llama's norm in float32, in one kernel if available.

    The result has the dtype of the following product: autocast's dtype, so that several products do
    not round the states separately; otherwise the wider dtype of states and weight.
    """

    def forward(self, states: Tensor) -> Tensor:
        """Normalise [..., size]."""
        device_type = states.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        else:
            dtype = torch.promote_types(states.dtype, self.weight.dtype)
        weight = self.weight.float()
        return functional.rms_norm(states.float(), weight.shape, weight, self.eps).to(dtype)


class LlamaAttention(nn.Module):
    """Llama's attention with a separate input width, and Qwen3's norms if asked for.

    Args:
        config: sizes, biases and RoPE.
        input_size: I.
        qk_norm: normalise queries and keys per head.
    """

    def __init__(self, config: LlamaConfig, input_size: int, qk_norm: bool) -> None:
        super().__init__()
        # transformers fills these in if a config omits them.
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
        # Not a submodule, as its float32 frequencies must survive a cast of the head.
        self._rotary = (LlamaRotaryEmbedding(config),)

    def compute_rotation(self, inputs: Tensor, position_ids: Tensor) -> Tensor:
        """Compute the rotation [N, 2, d] of inputs [N, I] at positions [N]."""
        cos, sin = self._rotary[0].to(inputs.device)(inputs, position_ids.unsqueeze(0))
        # Llama's `rotate_half` negates the second half.
        behind, ahead = sin[0].chunk(2, dim=-1)
        return torch.stack([cos[0], torch.cat([-behind, ahead], dim=-1)], dim=1)

    def compute_query(self, inputs: Tensor, rotation: Tensor) -> Tensor:
        """Compute rotated queries [N, Q, d] of inputs [N, I]."""
        return self._rotate_heads(self.q_proj(inputs), self.q_norm, rotation)

    def keys_values(self, inputs: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rotated keys, and values, [N, K, d] each, of inputs [N, I]."""
        keys = self._rotate_heads(self.k_proj(inputs), self.k_norm, rotation)
        return keys, self._split_heads(self.v_proj(inputs))

    def _split_heads(self, projected: Tensor) -> Tensor:
        return projected.view(len(projected), -1, self.head_dim)

    def _rotate_heads(self, projected: Tensor, norm: RmsNorm | None, rotation: Tensor) -> Tensor:
        states = self._split_heads(projected)
        if norm is not None:
            states = norm(states)
        cos, sin = rotation.unsqueeze(2).unbind(1)
        return states * cos + states.roll(self.head_dim // 2, dims=-1) * sin
