"""Acceptance without decoding: what greedy tree decoding would have accepted.

Given the target's own greedy text, whether a draft token is accepted depends only on the
hidden state before it, so every position is scored in one pass and the accepted lengths are
then walked. Equal to `eval.engine.decode` step for step. Letters: n response tokens, D hidden.
"""

import torch
from torch import Tensor

from eval.engine import Step
from eval.medusa import best_candidates
from heads.medusa import MedusaHead
from heads.target import Target
from heads.tree import Tree

CHUNK_ROWS = 256


@torch.no_grad()
def replay(
    target: Target, head: MedusaHead, tree: Tree, prompt_ids: list[int], response_ids: list[int]
) -> list[Step]:
    """The verify passes that decoding this response would have taken.

    Args:
        target: the frozen target.
        head: the heads, on the target's device.
        tree: static tree or chain.
        prompt_ids: the rendered prompt.
        response_ids: [n] the target's greedy continuation, stop token included.
    """
    states = response_states(target, prompt_ids, response_ids)
    accepted = accepted_lengths(head, tree, states, response_ids)
    return walk(accepted, len(response_ids))


def response_states(target: Target, prompt_ids: list[int], response_ids: list[int]) -> Tensor:
    """[n, D] the state before each response token: row i predicts `response_ids[i]`."""
    ids = torch.tensor([prompt_ids + response_ids[:-1]], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device).unsqueeze(0)
    hidden = target.hidden_states(ids, positions, torch.zeros_like(ids))
    return hidden[0, len(prompt_ids) - 1 :]


def accepted_lengths(
    head: MedusaHead, tree: Tree, states: Tensor, response_ids: list[int]
) -> list[int]:
    """[n] draft tokens accepted if a pass had token i as its root, text end unheeded.

    Args:
        head: the heads.
        tree: static tree.
        states: [n, D], as `response_states` gives them.
        response_ids: [n].
    """
    lengths: list[int] = []
    for start in range(0, len(response_ids), CHUNK_ROWS):
        candidates = best_candidates(head, states[start : start + CHUNK_ROWS], tree)
        for row, ranked in enumerate(candidates.transpose(0, 1).tolist(), start=start):
            lengths.append(_follow(tree, ranked, response_ids[row + 1 :]))
    return lengths


def _follow(tree: Tree, ranked: list[list[int]], future: list[int]) -> int:
    """Depth of the path whose tokens are the first of `future`; `ranked` is [depth][width]."""
    node, depth = 0, 0
    while depth < min(len(future), len(ranked)):
        wanted = future[depth]
        children = tree.children[node]
        node = next((c for c in children if ranked[depth][tree.ranks[c]] == wanted), -1)
        if node < 0:
            break
        depth += 1
    return depth


def walk(accepted: list[int], num_tokens: int) -> list[Step]:
    """Steps from accepted lengths per root; the first token comes from the prefill.

    Example: `walk([2, 0, 0, 1], 4)`: root 0 accepts tokens 1 and 2 and emits 3 as the bonus.
    """
    steps, root = [], 0
    while root < num_tokens - 1:
        room = num_tokens - 1 - root
        emitted = min(accepted[root] + 1, room)
        steps.append(Step(min(accepted[root], room), emitted, room))
        root += emitted
    return steps
