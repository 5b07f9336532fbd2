"""Decoder layer of a block drafter: Qwen3's, with keys and values from the target's hidden states.

Letters: T texts, S tokens, A blocks, R rows of a block, H hidden, K key-value heads, d head size.
"""

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from heads.blocks.attention import BlockRange, block_attention
from heads.layers.llama import LlamaAttention, RmsNorm


class BlockLayer(nn.Module):
    """One decoder layer of a block drafter.

    Args:
        config: sizes, norms and RoPE.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = LlamaAttention(config, hidden, qk_norm=True)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, states: Tensor, rotation: Tensor, text: tuple[Tensor, Tensor], sight: BlockRange
    ) -> Tensor:
        """[A, R, H] output of the layer.

        Args:
            states: [A, R, H].
            rotation: [A * R, 2, d] of the rows' positions.
            text: the layer's keys and values [T, S, K, d] of the hidden states.
            sight: sight of the blocks.
        """
        states = states + self.compute_attention(
            self.input_layernorm(states), rotation, text, sight
        )
        return states + self.mlp(self.post_attention_layernorm(states))

    def compute_attention(
        self, inputs: Tensor, rotation: Tensor, text: tuple[Tensor, Tensor], sight: BlockRange
    ) -> Tensor:
        """[A, R, H] attention of normalised inputs [A, R, H]; other arguments as in `forward`."""
        rows, shape = inputs.flatten(0, 1), inputs.shape[:2]
        query = self.self_attn.compute_query(rows, rotation).unflatten(0, shape)
        keys, values = self.self_attn.keys_values(rows, rotation)
        own = keys.unflatten(0, shape), values.unflatten(0, shape)
        found = block_attention(query, text, own, sight)
        return self.self_attn.o_proj(found.flatten(2))
