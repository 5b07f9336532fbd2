"""An EAGLE head computed from an engine's names, one chain of drafts after another.

Plain torch in float32. Letters: S rows, D depths, H hidden, Ht hidden of the target, I input of
the attention, Q heads, K key-value heads, d head size, V vocabulary, W drafted ids.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eval.parity.rope import Rope

LAYER = "layers.0."
FLAGS = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")


@dataclass(frozen=True)
class EagleShape:
    """What an engine builds from `config.json`.

    Attributes:
        eagle3: three fused features and norms of their own; otherwise EAGLE-1.
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: H, -, Q, K, d.
        target_hidden_size: Ht.
        vocab_size, draft_vocab_size: V and W.
        eps: of every norm.
        layers: indices of `output_hidden_states` of the features that are read.
        flags: the names of `FLAGS` that are on.
        fc_bias: whether the fusion layer has a bias.
        biased: projections of the layer that have one.
        qk_norm: norms on queries and keys.
        own_head: whether the head has an output head of its own.
        logit_scale: factor of the logits.
        rope: of queries and keys.
    """

    eagle3: bool
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    eps: float
    layers: tuple[int, ...]
    flags: frozenset[str]
    fc_bias: bool
    biased: frozenset[str]
    qk_norm: bool
    own_head: bool
    logit_scale: float
    rope: Rope

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that must be there, by name."""
        hidden, width = self.hidden_size, self.target_hidden_size
        found = self.layer_tensors(LAYER, two_inputs=self.eagle3)
        read = len(self.layers) * width if self.eagle3 else hidden + width
        found["fc.weight"] = (hidden, read)
        if self.fc_bias:
            found["fc.bias"] = (hidden,)
        if "norm_before_fc" in self.flags:
            found["input_norm.weight"] = (read,)
        if "fc_norm" in self.flags:
            found |= {f"fc_norm.{i}.weight": (width,) for i in range(len(self.layers))}
        if self.eagle3:
            found["norm.weight"] = (hidden,)
        if self.own_head:
            found["lm_head.weight"] = (self.draft_vocab_size, hidden)
        return found

    def layer_tensors(self, layer: str, two_inputs: bool) -> dict[str, tuple[int, ...]]:
        """Those of a layer, whose names start so, with EAGLE-3's two inputs or with one."""
        hidden, mlp = self.hidden_size, self.intermediate_size
        inputs = 2 * hidden if two_inputs else hidden
        projections = {
            "self_attn.q_proj": (self.num_heads * self.head_dim, inputs),
            "self_attn.k_proj": (self.num_kv_heads * self.head_dim, inputs),
            "self_attn.v_proj": (self.num_kv_heads * self.head_dim, inputs),
            "self_attn.o_proj": (hidden, self.num_heads * self.head_dim),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        norms = {"post_attention_layernorm": hidden}
        if two_inputs:
            norms |= {"input_layernorm": hidden, "hidden_norm": hidden}
        if self.qk_norm:
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        return {
            **{f"{layer}{name}.weight": shape for name, shape in projections.items()},
            **{f"{layer}{name}.bias": projections[name][:1] for name in self.biased},
            **{f"{layer}{name}.weight": (size,) for name, size in norms.items()},
        }


class Chain:
    """Drafts along stored tokens, as when every draft is accepted.

    Args:
        shape: of the head.
        weights: float32, by the names of `EagleShape.tensors`.
    """

    def __init__(self, shape: EagleShape, weights: dict[str, Tensor]) -> None:
        self.shape, self.weights = shape, weights

    def states(self, features: Tensor, embeds: Tensor, position_ids: Tensor) -> Iterator[Tensor]:
        """[S, H] what the output head projects, at depth 0, 1, ...

        Args:
            features: [S, n * Ht], the target's, side by side as the engine fuses them.
            embeds: [S + D, H], of the token after each feature and of those drafted then.
            position_ids: [S] int64, of the features.
        """
        fed, num_rows = self.fused(features), len(features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for depth in range(len(embeds) - num_rows):
            positions = position_ids + depth
            inputs, residual = self.inputs(fed, embeds[depth : depth + num_rows])
            keys.append(self.shape.rope.rotate(self.heads(inputs, "k"), positions))
            values.append(self.heads(inputs, "v"))
            queries = self.shape.rope.rotate(self.heads(inputs, "q"), positions)
            seen = [
                self.attend(queries[row], _seen(keys, row), _seen(values, row))
                for row in range(num_rows)
            ]
            outputs = self.finish(residual, torch.stack(seen))
            normed = self.norm(outputs, "norm.weight") if self.shape.eagle3 else outputs
            yield normed
            fed = normed if "norm_output" in self.shape.flags else outputs

    def fused(self, features: Tensor) -> Tensor:
        """[S, H] of [S, n * Ht]; EAGLE-1 reads its one feature as it is."""
        if not self.shape.eagle3:
            return features
        if "norm_before_fc" in self.shape.flags:
            features = self.norm(features, "input_norm.weight")
        if "fc_norm" in self.shape.flags:
            parts = features.split(self.shape.target_hidden_size, dim=-1)
            normed = [self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
            features = torch.cat(normed, dim=-1)
        return self.linear(features, "fc")

    def inputs(self, fed: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """[S, I] the attention's input and [S, H] the residual."""
        if not self.shape.eagle3:
            inputs = self.linear(torch.cat([embeds, fed], dim=-1), "fc")
            return inputs, inputs
        states = self.norm(fed, f"{LAYER}hidden_norm.weight")
        embeds = self.norm(embeds, f"{LAYER}input_layernorm.weight")
        residual = states if "norm_before_residual" in self.shape.flags else fed
        return torch.cat([embeds, states], dim=-1), residual

    def heads(self, inputs: Tensor, which: str, layer: str = LAYER) -> Tensor:
        """[S, Q or K, d] of inputs [S, I]."""
        projected = self.linear(inputs, f"{layer}self_attn.{which}_proj")
        states = projected.view(len(inputs), -1, self.shape.head_dim)
        if self.shape.qk_norm and which in "qk":
            states = self.norm(states, f"{layer}self_attn.{which}_norm.weight")
        return states

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[Q * d] of a query [Q, d] over keys and values [T, K, d]."""
        group = len(query) // keys.shape[1]
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
        scores = torch.einsum("qd,tqd->qt", query, keys) * self.shape.head_dim**-0.5
        return torch.einsum("qt,tqd->qd", scores.softmax(dim=-1), values).flatten()

    def finish(self, residual: Tensor, attended: Tensor, layer: str = LAYER) -> Tensor:
        """[S, H] a layer's output, of its residual [S, H] and what was attended to [S, Q * d]."""
        hidden = residual + self.linear(attended, f"{layer}self_attn.o_proj")
        normed = self.norm(hidden, f"{layer}post_attention_layernorm.weight")
        gate = functional.silu(self.linear(normed, f"{layer}mlp.gate_proj"))
        up = self.linear(normed, f"{layer}mlp.up_proj")
        return hidden + self.linear(gate * up, f"{layer}mlp.down_proj")

    def linear(self, states: Tensor, name: str) -> Tensor:
        """A projection."""
        bias = self.weights.get(f"{name}.bias")
        return functional.linear(states, self.weights[f"{name}.weight"], bias)

    def norm(self, states: Tensor, name: str) -> Tensor:
        """An RMS norm."""
        square = states.pow(2).mean(dim=-1, keepdim=True)
        return states * torch.rsqrt(square + self.shape.eps) * self.weights[name]


def _seen(stored: list[Tensor], row: int) -> Tensor:
    """[T, K, d] of the features up to a row and of the row's own drafts since."""
    return torch.cat([stored[0][: row + 1], *(each[row : row + 1] for each in stored[1:])])
