"""Markov head, which changes a slot's logits by previous tokens, and confidence head.

Source: DSpark, arXiv 2607.05147; deepseek-ai/DeepSpec `modeling/dspark/markov_head.py`. Letters: N
rows, H hidden, r rank, W draft vocabulary, V vocabulary.
"""

import torch
from torch import Tensor, nn

from conf.settings.blocks import Markov


class MarkovHead(nn.Module):
    """Low-rank logits: states [N, r] of the previous tokens, times `markov_w2` [W, r].

    Args:
        kind: how the states are made.
        hidden_size: H.
        rank: r.
        vocab_size: V.
        num_draft_ids: W.
    """

    def __init__(
        self, kind: Markov, hidden_size: int, rank: int, vocab_size: int, num_draft_ids: int
    ) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_draft_ids, bias=False)
        if kind is Markov.gated:
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind is Markov.rnn:
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(
        self, outputs: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[N, r] input of `markov_w2`, and the state for the next slot.

        Args:
            outputs: [N, H] outputs of the slot.
            before: [N] int64 target ids of the previous tokens.
            state: [N, r] state of the previous slot; None for the first.
        """
        told = self.markov_w1(before).to(outputs)
        if self.kind is Markov.vanilla:
            return told, None
        if self.kind is Markov.gated:
            return told * self.gate_proj(torch.cat([outputs, told], -1)).sigmoid(), None
        state = torch.zeros_like(told) if state is None else state
        joint = self.joint_proj(torch.cat([state, told, outputs], -1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()


class ConfidenceHead(nn.Module):
    """Logit of the chance that a slot's token is accepted if the previous ones are.

    Args:
        size: width of the input.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, read: Tensor) -> Tensor:
        """[...] logits of [..., size], in float32 throughout."""
        with torch.autocast(read.device.type, enabled=False):
            weight, bias = self.proj.weight.float(), self.proj.bias.float()
            return nn.functional.linear(read.float(), weight, bias).squeeze(-1)
