"""Acceptance without decoding: what greedy tree decoding would have accepted.

Given the target's own greedy text, whether a draft token is accepted depends only on what the
head has read of that text, so all positions are scored in one pass per depth and the accepted
lengths are then walked. Equal to `eval.decode.engine.decode` step for step. n: response tokens.
"""

from typing import Protocol

import torch
from torch import Tensor

from eval.decode.engine import Step
from heads.decoding.cache import TreeCache
from heads.decoding.drafting import PAD, Committed, Draft, Drafter, Roots
from heads.decoding.tree import Tree
from heads.target_model.model import Taps, Target, TargetOutput


class Replayable(Protocol):
    """A head whose drafts depend on the text alone."""

    taps: Taps

    def candidates(
        self, output: TargetOutput, token_ids: list[int], first: int, depth: int, width: int
    ) -> Tensor:
        """[depth, n, width] int64, the best tokens of each depth along a text itself."""
        ...


@torch.no_grad()
def replay(
    target: Target, head: Replayable, tree: Tree, prompt_ids: list[int], response_ids: list[int]
) -> list[Step]:
    """The verify passes that decoding this response would have taken.

    Args:
        target: the frozen target.
        head: attached to the target.
        tree: static tree or chain.
        prompt_ids: the rendered prompt.
        response_ids: [n] the target's greedy continuation, stop token included.
    """
    output = target.read_response(prompt_ids, response_ids, head.taps)
    ranked = ranked_drafts(head, tree, output, prompt_ids, response_ids)
    return steps_along(tree, ranked, response_ids)


def steps_along(tree: Tree, ranked: list[list[list[int]]], response_ids: list[int]) -> list[Step]:
    """The verify passes over a response [n], by its `ranked_drafts`."""
    return verify_steps(accepted_lengths(tree, ranked, response_ids), len(response_ids))


def ranked_drafts(
    head: Replayable,
    tree: Tree,
    output: TargetOutput,
    prompt_ids: list[int],
    response_ids: list[int],
) -> list[list[list[int]]]:
    """[n][depth][width] best tokens of each depth if a pass had response token i as its root.

    Args:
        head: the head.
        tree: static tree.
        output: the target's states of prompt and response, the last token left out.
        prompt_ids: the rendered prompt.
        response_ids: [n].
    """
    first = len(prompt_ids) - 1
    candidates = head.candidates(output, prompt_ids + response_ids, first, tree.depth, tree.width)
    ranked = candidates.transpose(0, 1).tolist()
    switch, begin = output.switch or 0, len(prompt_ids)
    # What is drafted across a switch is not accepted.
    for root in range(begin, min(switch, begin + len(ranked))):
        for depth in range(switch - root, tree.depth + 1):
            ranked[root - begin][depth - 1] = [PAD] * tree.width
    return ranked


@torch.inference_mode()
def replayed(
    drafter: Drafter, output: TargetOutput, prompt_ids: list[int], response_ids: list[int]
) -> tuple[list[Step], list[int]]:
    """The verify passes of a drafter whose drafts depend on what it drew before: step by step.

    Args:
        drafter: a head's, fresh.
        output: the target's states of prompt and response, the last token left out.
        prompt_ids: the rendered prompt.
        response_ids: [n], the target's greedy text.

    Returns:
        The steps, and how many draft tokens each checked.
    """
    device, ids = output.hidden_states.device, prompt_ids + response_ids
    cache = TreeCache(1, device, num_layers=0)

    def commit(first: int, last: int) -> Committed:
        cache.slots.rewind([last])
        places = torch.arange(first, last, device=device).unsqueeze(0)
        return Committed([ids[first:last]], output.at(places), cache)

    accepted, drafted = [0] * len(response_ids), []
    root, seen = len(prompt_ids), 0
    while root < len(ids) - 1:
        drafter.observe(commit(seen, root))
        draft = drafter.propose(Roots.of([ids[root]], device))
        length = _accepted(draft, ids[root + 1 :])
        if output.switch is not None and root < output.switch:
            # What is drafted across a switch is not accepted.
            length = min(length, output.switch - 1 - root)
        accepted[root - len(prompt_ids)] = length
        drafted.append(int((draft.tokens != PAD).sum()))
        seen, root = root, root + length + 1
    return verify_steps(accepted, len(response_ids)), drafted


def _accepted(draft: Draft, following: list[int]) -> int:
    """Draft tokens that a text accepts which goes on with these tokens."""
    parents, tokens = draft.layout().parents[0].tolist(), draft.tokens[0].tolist()
    node, length = 0, 0
    for wanted in following:
        below = (n for n in range(1, len(parents)) if parents[n] == node)
        node = next((n for n in below if tokens[n - 1] == wanted), -1)
        if node < 0:
            break
        length += 1
    return length


def accepted_lengths(
    tree: Tree, ranked: list[list[list[int]]], response_ids: list[int]
) -> list[int]:
    """[n] draft tokens accepted if a pass had token i as its root, text end unheeded."""
    lengths = []
    for root, candidates in enumerate(ranked):
        node, depth = 0, 0
        for wanted, of_depth in zip(response_ids[root + 1 :], candidates, strict=False):
            children = tree.children[node]
            node = next((c for c in children if of_depth[tree.ranks[c]] == wanted), -1)
            if node < 0:
                break
            depth += 1
        lengths.append(depth)
    return lengths


def agreements(ranked: list[list[list[int]]], response_ids: list[int]) -> list[list[bool]]:
    """Per depth, whether the head's first choice was the target's, wherever the text goes on.

    Unlike acceptance this asks at every token, whether or not the drafts before it were right,
    so that depths are compared on the same tokens: what is left of them is how well the head
    continues its own features.
    """
    return [
        [
            candidates[d][0] == after
            for candidates, after in zip(ranked, response_ids[d + 1 :], strict=False)
        ]
        for d in range(len(ranked[0]))
    ]


def verify_steps(accepted: list[int], num_tokens: int) -> list[Step]:
    """Steps from accepted lengths per root; the first token comes from the prefill.

    Example: `verify_steps([2, 0, 0, 1], 4)`: root 0 accepts tokens 1 and 2,
    3 is the bonus token.
    """
    steps, root = [], 0
    while root < num_tokens - 1:
        num_left = num_tokens - 1 - root
        num_emitted = min(accepted[root] + 1, num_left)
        steps.append(Step(min(accepted[root], num_left), num_emitted, num_left))
        root += num_emitted
    return steps
