"""Which draft tokens the target keeps: greedily, or so that sampling keeps its distribution.

Letters: N tree nodes (root included), V vocab; p the target's distribution, q the drafter's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.tree import Tree


@dataclass(frozen=True)
class Sampling:
    """How the target's next token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: least probability that the likeliest tokens kept must cover; 1 keeps all.
        top_k: likeliest tokens kept, ties with the last of them included; None keeps all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None

    @property
    def greedy(self) -> bool:
        """Nothing is drawn."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """[N, V] float32, what [N, V] logits are sampled by; not for temperature 0.

        Source: transformers `generation/logits_process.py`, its temperature, top-k and top-p
        warpers in the order in which `generate` applies them.
        """
        assert not self.greedy
        scores = logits.float() / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ascending, order = scores.sort()
            tail = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            tail[:, -1] = False
            scores = scores.masked_fill(tail.scatter(1, order, tail), -torch.inf)
        return scores.softmax(-1)

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """One token by [1, V] logits."""
        if self.greedy:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=generator))


GREEDY = Sampling()


def walk_greedy(tree: Tree, tokens: list[int], choices: list[int]) -> list[int]:
    """Nodes from the root down while a child holds what the target chose at its parent.

    Args:
        tree: the drafted tree.
        tokens: [N] token per node.
        choices: [N] the target's likeliest token after each node.
    """
    path = [0]
    while True:
        follower = next(
            (c for c in tree.children[path[-1]] if tokens[c] == choices[path[-1]]), None
        )
        if follower is None:
            return path
        path.append(follower)


def walk_sampled(
    tree: Tree,
    tokens: list[int],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    generator: torch.Generator,
) -> tuple[list[int], int]:
    """Accepted nodes from the root down and the bonus token; together distributed as p.

    A drafted token x is accepted with probability min(1, p(x) / q(x)); when it is refused, p
    becomes norm(max(0, p - q)) for the next sibling and for the bonus. A token that was not
    drawn has q(x) = 1: accepted with p(x), and refusing it sets p(x) to 0. Putting the
    drafter's own probability there would not keep the distribution; taking drawn tokens for
    undrawn ones does, and accepts fewer.

    Args:
        tree: the drafted tree; a chain if `draft_probs` is given.
        tokens: [N] token per node.
        target_probs: [N, V] float32, p after each node, warped.
        draft_probs: [N - 1, V] float32, row i is the q that node i + 1 was drawn from; None
            if no token was drawn.
        generator: on the device of `target_probs`.

    Source: chains, Leviathan et al., arXiv 2211.17192, algorithm 1; trees, SafeAILab/EAGLE
    `eagle/model/utils.py`, `evaluate_posterior`.
    """
    # Siblings drawn from q would need q to change along with p.
    assert draft_probs is None or tree.depth == tree.num_nodes - 1
    offered, hurdles = _tests(tree, tokens, target_probs, draft_probs, generator)
    path = [0]
    while (child := _first_kept(tree.children[path[-1]], tokens, offered, hurdles)) is not None:
        path.append(child)
    probs, refused = target_probs[path[-1]], tree.children[path[-1]]
    if draft_probs is None or not refused:
        gone = torch.tensor([tokens[child] for child in refused], device=probs.device)
        rest = probs.index_fill(0, gone.long(), 0)
    else:
        rest = (probs - draft_probs[path[-1]]).clamp(min=0)
    # Rounding can leave nothing of p although a token of it was refused.
    rest = torch.where(rest.sum() > 0, rest, probs)
    return path, int(torch.multinomial(rest, 1, generator=generator))


def _tests(
    tree: Tree,
    tokens: list[int],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    generator: torch.Generator,
) -> tuple[list[float], list[float]]:
    """[N] p(x) and [N] u * q(x) of each node's token x, u uniform; the root's are not read."""
    device = target_probs.device
    parents = torch.tensor((0, *tree.parents[1:]), device=device)
    drafted = torch.tensor(tokens, device=device)
    scaled = torch.rand(tree.num_nodes, generator=generator, device=device)
    if draft_probs is not None:
        scaled[1:] *= draft_probs[parents[1:], drafted[1:]]
    # One wait for the device, however many nodes are then tested.
    offered, hurdles = torch.stack([target_probs[parents, drafted], scaled]).tolist()
    return offered, hurdles


def _first_kept(
    children: tuple[int, ...], tokens: list[int], offered: list[float], hurdles: list[float]
) -> int | None:
    """The first child accepted, p renormalised to what is `left` after each refusal."""
    left, refused = 1.0, set()
    for child in children:
        if tokens[child] in refused:
            continue
        if hurdles[child] * left < offered[child]:
            return child
        refused.add(tokens[child])
        left -= offered[child]  # at least 0: refused means u * left >= p(x), and u < 1
    return None
