"""Acceptance without decoding: what greedy tree decoding would have accepted.

Given the target's own greedy text, the acceptance of a draft token depends only on what the head
has read of that text. So one pass per depth scores all positions, and the steps follow from the
accepted lengths. These steps equal the steps of `eval.decode.engine.decode`. n: response tokens.
"""

import torch

from eval.decode.engine import Step
from heads.decoding.cache import TreeCache
from heads.decoding.drafting import PAD, CommittedTokens, Draft, Drafter, Roots
from heads.decoding.tree import Tree
from heads.draft_head import DraftHead
from heads.target_model.model import Target, TargetOutput


@torch.no_grad()
def replay_response(
    target: Target, head: DraftHead, tree: Tree, prompt_ids: list[int], response_ids: list[int]
) -> list[Step]:
    """Compute the verify passes that decoding this response would have taken.

    Args:
        target: the frozen target.
        head: attached to the target.
        tree: static tree or chain.
        prompt_ids: the rendered prompt.
        response_ids: [n] the target's greedy continuation, including the stop token.
    """
    output = target.encode_response(prompt_ids, response_ids, head.taps)
    ranked = rank_candidates(head, tree, output, prompt_ids, response_ids)
    return replay_tree(tree, ranked, response_ids)


def replay_tree(tree: Tree, ranked: list[list[list[int]]], response_ids: list[int]) -> list[Step]:
    """Replay verify passes with a tree over a response [n], by its `rank_candidates`."""
    return build_steps(compute_accepted_lengths(tree, ranked, response_ids), len(response_ids))


def rank_candidates(
    head: DraftHead,
    tree: Tree,
    output: TargetOutput,
    prompt_ids: list[int],
    response_ids: list[int],
) -> list[list[list[int]]]:
    """Rank the best tokens of each depth for passes with each response token as their root.

    Returns [n][depth][width] ids, best first.

    Args:
        head: head that drafts.
        tree: static tree or chain.
        output: the target's states of prompt and response without the last token.
        prompt_ids: the rendered prompt.
        response_ids: [n] tokens of the response.
    """
    first = len(prompt_ids) - 1
    candidates = head.compute_candidates(
        output, prompt_ids + response_ids, first, tree.depth, tree.width
    )
    ranked = candidates.transpose(0, 1).tolist()
    switch, begin = output.switch_length or 0, len(prompt_ids)
    # Draft tokens beyond a switch are not accepted.
    for root in range(begin, min(switch, begin + len(ranked))):
        for depth in range(switch - root, tree.depth + 1):
            ranked[root - begin][depth - 1] = [PAD] * tree.width
    return ranked


@torch.inference_mode()
def replay_drafter(
    drafter: Drafter, output: TargetOutput, prompt_ids: list[int], response_ids: list[int]
) -> tuple[list[Step], list[int]]:
    """Replay, step by step, a drafter whose drafts depend on its earlier samples.

    Args:
        drafter: new drafter of a head.
        output: the target's states of prompt and response without the last token.
        prompt_ids: the rendered prompt.
        response_ids: [n], the target's greedy text.

    Returns:
        The steps, and the number of draft tokens that each step verified.
    """
    device, ids = output.hidden_states.device, prompt_ids + response_ids
    cache = TreeCache(1, device, num_layers=0)

    def commit(first: int, last: int) -> CommittedTokens:
        cache.slots.rewind_texts([last])
        places = torch.arange(first, last, device=device).unsqueeze(0)
        return CommittedTokens([ids[first:last]], output.select_tokens(places), cache)

    accepted, drafted = [0] * len(response_ids), []
    root, seen = len(prompt_ids), 0
    while root < len(ids) - 1:
        drafter.observe(commit(seen, root))
        draft = drafter.propose(Roots.from_ids([ids[root]], device))
        length = _count_accepted(draft, ids[root + 1 :])
        if output.switch_length is not None and root < output.switch_length:
            # Draft tokens beyond a switch are not accepted.
            length = min(length, output.switch_length - 1 - root)
        accepted[root - len(prompt_ids)] = length
        drafted.append(int((draft.tokens != PAD).sum()))
        seen, root = root, root + length + 1
    return build_steps(accepted, len(response_ids)), drafted


def _count_accepted(draft: Draft, following: list[int]) -> int:
    """Count draft tokens that match a text's next tokens."""
    parents, tokens = draft.build_layout().parents[0].tolist(), draft.tokens[0].tolist()
    node, length = 0, 0
    for wanted in following:
        below = (n for n in range(1, len(parents)) if parents[n] == node)
        node = next((n for n in below if tokens[n - 1] == wanted), -1)
        if node < 0:
            break
        length += 1
    return length


def compute_accepted_lengths(
    tree: Tree, ranked: list[list[list[int]]], response_ids: list[int]
) -> list[int]:
    """Count the draft tokens that a pass would accept at each root [n], ignoring the text's end."""
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


def compare_first_choices(
    ranked: list[list[list[int]]], response_ids: list[int]
) -> list[list[bool]]:
    """Tell per depth and token whether the head's first choice was the target's.

    Unlike acceptance, this covers every token, whether or not earlier draft tokens were right. So
    depths are compared on the same tokens, and the difference shows how well the head continues its
    own states.
    """
    return [
        [
            candidates[d][0] == after
            for candidates, after in zip(ranked, response_ids[d + 1 :], strict=False)
        ]
        for d in range(len(ranked[0]))
    ]


def build_steps(accepted: list[int], num_tokens: int) -> list[Step]:
    """Build steps from accepted lengths per root; the first token comes from the prefill.

    Example: `build_steps([2, 0, 0, 1], 4)`: root 0 accepts tokens 1 and 2,
    3 is the bonus token.
    """
    steps, root = [], 0
    while root < num_tokens - 1:
        num_left = num_tokens - 1 - root
        num_emitted = min(accepted[root] + 1, num_left)
        steps.append(Step(min(accepted[root], num_left), num_emitted, num_left))
        root += num_emitted
    return steps
