"""Low-rank output heads for drafting, as logits are most of a draft's cost.

All logits come from the state's part along the `rank` directions with the largest weight in the
output head; the logits of the likeliest ids are then computed exactly. Drafts are verified as
usual, so texts stay the target's own.

Letters: N rows, D hidden, V rows of the output head, r rank, C candidates.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from conf.errors import InputError
from heads.head import DraftHead
from heads.target_model.embeddings_and_head import EmbeddingsAndOutputHead

NUM_CANDIDATES = 32
"""Number of ids with exact logits. For a chat model of 8M parameters at a quarter of the
directions, 8 ids lost 2% of the drafts' length and 32 ids nothing."""


class LowRankOutputHead(nn.Module):
    """Logits of an output head W [V, D]: (W P)(P^T h), and W h for the likeliest C ids.

    P [D, r] holds the eigenvectors of W^T W with the largest eigenvalues, so W P P^T is the nearest
    matrix of rank r (Eckart and Young).

    Args:
        weight: W [V, D] of any float dtype, which the logits get too.
        rank: r, at most D.
        bias: [V] bias of all logits, or None.

    Source: SVD-softmax, Shim et al., NeurIPS 2017, which ranks by the same preview.
    """

    def __init__(self, weight: Tensor, rank: int, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.num_candidates = min(NUM_CANDIDATES, len(weight))
        gram = torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)
        for rows in weight.detach().split(1 << 14):  # in parts, as a large W is too much in float32
            gram.addmm_(rows.float().T, rows.float())
        directions = torch.linalg.eigh(gram).eigenvectors[:, -rank:].to(weight)
        self.directions = nn.Parameter(directions.T.contiguous(), requires_grad=False)
        self.reduced = nn.Parameter(weight.detach() @ directions, requires_grad=False)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that one row of logits reads."""
        exact = self.num_candidates * self.weight[0].nbytes
        return self.directions.nbytes + self.reduced.nbytes + exact

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., V] logits of states [..., D]."""
        seen = functional.linear(hidden, self.directions)
        rough = functional.linear(seen, self.reduced, self.bias)
        ids = rough.topk(self.num_candidates, dim=-1).indices
        exact = (self.weight[ids] @ hidden.unsqueeze(-1)).squeeze(-1)
        if self.bias is not None:
            exact += self.bias[ids]
        return rough.scatter(-1, ids, exact)


def check_rank(key: str, rank: int, target: EmbeddingsAndOutputHead) -> None:
    """Refuse ranks that are not below the width of a target's hidden states.

    Raises:
        InputError: naming the hidden size.
    """
    if rank >= target.hidden_size:
        raise InputError(
            f"{key}={rank}: must be below {target.hidden_size}, the hidden size of {target.name}"
        )


def make_low_rank_target(target: EmbeddingsAndOutputHead, rank: int) -> EmbeddingsAndOutputHead:
    """Join a target's embedding with a low-rank output head, for drafting.

    Raises:
        InputError: the rank is too large, or the output head is quantised.
    """
    check_rank("output_rank", rank, target)
    if target.head_is_quantized:
        raise InputError(
            f"output_rank={rank}: the output head of target.path={target.name} is quantised; leave "
            "output_rank unset"
        )
    whole = target.output_head
    head = LowRankOutputHead(whole.weight, rank, getattr(whole, "bias", None))
    return EmbeddingsAndOutputHead(
        model_config=target.config,
        embedding=target.embedding,
        output_head=head,
        generation_config=target.generation_config,
        tokenizer=target.tokenizer,
        name=target.name,
    )


def reduce_rank(
    head: DraftHead, target: EmbeddingsAndOutputHead, rank: int
) -> list[LowRankOutputHead]:
    """Make a head draft with output heads of low rank, its own or the target's.

    Returns:
        The low-rank output heads.

    Raises:
        InputError: the rank is too large, or the output head is quantised.
    """
    check_rank("output_rank", rank, target)
    own = {id(weight) for weight in head.find_output_heads()}
    if not own:
        lent = make_low_rank_target(target, rank)
        head.attach(lent)
        return [lent.output_head]
    made = []
    for parent in [*head.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear) and id(child.weight) in own:
                made.append(LowRankOutputHead(child.weight, rank))
                setattr(parent, name, made[-1])
    return made
