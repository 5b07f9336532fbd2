"""Decoder layer of an EAGLE head: Llama's, with a separate input.

Letters: N rows, H hidden, I input width, Q heads, K key-value heads, d head size.
"""

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from heads.eagle.branch_attention import branch_attention
from heads.eagle.branches import BranchCache
from heads.layers.llama import LlamaAttention, RmsNorm


class EagleLayer(nn.Module):
    """Llama decoder layer whose input is not its residual stream.

    Args:
        config: sizes, norms and RoPE.
        two_inputs: EAGLE-3's input, a normalised embedding beside a normalised state (I = 2H);
            otherwise EAGLE-1's input, used as it is (I = H).
        qk_norm: normalise queries and keys per head, as in Qwen3.
    """

    def __init__(self, config: LlamaConfig, two_inputs: bool, qk_norm: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(hidden, eps) if two_inputs else None
        self.hidden_norm = RmsNorm(hidden, eps) if two_inputs else None
        self.self_attn = LlamaAttention(config, 2 * hidden if two_inputs else hidden, qk_norm)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, inputs: Tensor, residual: Tensor, rotation: Tensor, branches: BranchCache
    ) -> Tensor:
        """[N, H] output of the layer.

        Args:
            inputs: [N, I] inputs of the queries.
            residual: [N, H].
            rotation: [N, 2, d] of the rows' positions.
            branches: keys and values, including those of the rows themselves.
        """
        attended = branch_attention(self.self_attn.compute_query(inputs, rotation), branches)
        return self.add_attention_and_mlp(residual, attended)

    def add_attention_and_mlp(self, residual: Tensor, attended: Tensor) -> Tensor:
        """[N, H] output of the layer, from residual [N, H] and attention output [N, Q, d]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
