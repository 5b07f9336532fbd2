"""What the target keeps of a draft; above all that sampling keeps the target's distribution.

Most statistical tests walk texts over a vocabulary of V = 6 in which the next token depends on
the last one alone, so the distribution of the first two tokens is known exactly; the last ones
run the engine on a toy target.
"""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from toys import VOCAB_SIZE, noisy_head, random_target
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eval.accept import Sampling, walk_greedy, walk_sampled
from eval.engine import Draft, NoDraft, decode
from eval.medusa import MedusaDrafter
from heads.medusa import MedusaHead
from heads.target import Target
from heads.tree import Tree

V, ROOT = 6, 0
NUM_TEXTS = 10_000
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
PLAIN = Sampling(temperature=1.0)

Offer = tuple[Tree, list[int], Tensor]
"""Tree, tokens [N] with the root's, and the drafter's distribution at each node's parent."""
Walk = Callable[[Tree, list[int], Tensor, Tensor, torch.Generator], tuple[list[int], int]]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_probabilities_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    for sampling, expected in [
        (Sampling(1.0), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(0.5), [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        (Sampling(1.0, top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1.0, top_p=0.7), [2 / 3, 1 / 3, 0, 0]),
        # Top-k comes first: two thirds of what it leaves is more than top-p asks for.
        (Sampling(1.0, top_p=0.6, top_k=2), [1.0, 0, 0, 0]),
    ]:
        torch.testing.assert_close(sampling.probabilities(logits), torch.tensor([expected]))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 5, 50, 1000])
@pytest.mark.parametrize("top_p", [0.0, 0.4, 0.95, 1.0])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p) -> None:
    logits = 3 * torch.randn(32, 50, generator=generator())
    logits[8:16] = logits[8:16].round()  # ties, inside and at the edge of what is kept
    logits[16] = 0.0
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)]
    if top_k is not None:
        warpers.insert(1, TopKLogitsWarper(top_k))
    expected = logits
    for warper in warpers:
        expected = warper(None, expected)
    found = Sampling(temperature, top_p, top_k).probabilities(logits)
    assert torch.equal(found, expected.softmax(-1))


def test_half_precision_logits_are_warped_in_single() -> None:
    logits = torch.randn(2, V, generator=generator()).bfloat16()
    found = Sampling(0.7).probabilities(logits)
    assert torch.equal(found, (logits.float() / 0.7).softmax(-1))


def test_the_greedy_walk_follows_the_targets_choices() -> None:
    tokens = [9, 4, 5, 6, 7, 4, 8]  # the root, its children 4 5 6, then 7 4 below 4, 8 below 5
    assert walk_greedy(TREE, tokens, [4, 4, 0, 0, 0, 3, 0]) == [0, 1, 5]
    assert walk_greedy(TREE, tokens, [5, 0, 7, 0, 0, 0, 0]) == [0, 2]
    assert walk_greedy(TREE, tokens, [8, 0, 0, 0, 0, 0, 0]) == [0]


def test_a_certain_target_is_followed_to_the_leaf() -> None:
    tokens = [1, 4, 5, 3, 2, 1, 0]
    probs = torch.eye(V)[[5, 0, 0, 0, 0, 0, 2]]  # 5 after the root, 0 after that, then 2
    assert walk_sampled(TREE, tokens, probs, None, generator()) == ([0, 2, 6], 2)


def test_a_refused_token_is_not_the_bonus() -> None:
    tree, probs = Tree.from_paths([[0], [1]]), torch.full((3, 4), 0.25)
    for seed in range(200):
        path, bonus = walk_sampled(tree, [0, 1, 2], probs, None, generator(seed))
        assert path in ([0, 1], [0, 2]) or bonus in (0, 3)


def test_a_sibling_that_says_the_same_again_has_no_second_chance() -> None:
    tree, probs = Tree.from_paths([[0], [1], [2]]), torch.tensor([[0.5, 0.5]] * 4)
    for seed in range(200):
        path, bonus = walk_sampled(tree, [0, 1, 1, 1], probs, None, generator(seed))
        assert path == [0, 1] or (path, bonus) == ([0], 0)


def test_what_was_drawn_from_the_targets_own_distribution_is_always_kept() -> None:
    probs = torch.randn(4, V, generator=generator()).softmax(-1)
    for seed in range(50):
        tokens = [ROOT, *torch.multinomial(probs[:3], 1, generator=generator(seed)).flatten()]
        path, _ = walk_sampled(Tree.chain(3), tokens, probs, probs[:3], generator(seed + 50))
        assert path == [0, 1, 2, 3]


def test_a_refused_draw_gives_way_to_what_the_drafter_underrates() -> None:
    probs = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    draft_probs = torch.tensor([[0.0, 0.9, 0.1]])
    assert walk_sampled(Tree.chain(1), [0, 1], probs, draft_probs, generator()) == ([0], 2)


@pytest.mark.parametrize("draft_probs", [None, torch.tensor([[0.0, 1.0]])])
def test_when_rounding_leaves_nothing_the_bonus_comes_from_p(draft_probs) -> None:
    probs = torch.tensor([[0.0, 0.5], [1.0, 0.0]])  # half of p's mass is lost, to see it often
    for seed in range(20):
        found = walk_sampled(Tree.chain(1), [0, 1], probs, draft_probs, generator(seed))
        assert found in (([0, 1], 0), ([0], 1))


def test_drawn_tokens_come_as_a_chain() -> None:
    probs = torch.full((7, V), 1 / V)
    with pytest.raises(AssertionError):
        walk_sampled(TREE, [0] * 7, probs, probs[1:], generator())


LOGITS = torch.randn(V, V, generator=generator(1))
"""The target's, row per last token."""
DRAFT_LOGITS = LOGITS + torch.randn(V, V, generator=generator(2))


def best(root: int, draft_probs: Tensor, luck: random.Random) -> Offer:
    """The likeliest tokens below each node."""
    tokens, ranked = [root], draft_probs.argsort(descending=True).tolist()
    for parent, rank in zip(TREE.parents[1:], TREE.ranks[1:], strict=True):
        tokens.append(ranked[tokens[parent]][rank])
    return TREE, tokens, draft_probs[[tokens[parent] for parent in TREE.parents[1:]]]


def repeating(root: int, draft_probs: Tensor, luck: random.Random) -> Offer:
    """`best`, but the root's third child says what its first says."""
    tree, tokens, rows = best(root, draft_probs, luck)
    return tree, [*tokens[:3], tokens[1], *tokens[4:]], rows


def drawn(root: int, draft_probs: Tensor, luck: random.Random) -> Offer:
    """A chain of two tokens drawn from the drafter's distribution."""
    tokens, rows = [root], draft_probs.tolist()
    for _ in range(2):
        tokens += luck.choices(range(V), rows[tokens[-1]])
    return Tree.chain(2), tokens, draft_probs[tokens[:2]]


def greedy_chain(root: int, draft_probs: Tensor, luck: random.Random) -> Offer:
    """A chain of the drafter's likeliest tokens."""
    tokens = [root]
    for _ in range(2):
        tokens.append(int(draft_probs[tokens[-1]].argmax()))
    return Tree.chain(2), tokens, draft_probs[tokens[:2]]


def for_best(tree, tokens, probs, draft_probs, generator) -> tuple[list[int], int]:
    return walk_sampled(tree, tokens, probs, None, generator)


def first_two(draft: Callable[..., Offer], walk: Walk, sampling: Sampling) -> Tensor:
    """[V, V] counts of the first two tokens after ROOT, over NUM_TEXTS texts."""
    probs, draft_probs = sampling.probabilities(LOGITS), sampling.probabilities(DRAFT_LOGITS)
    luck, draws, counts = random.Random(3), generator(4), torch.zeros(V, V)
    fixed = None if draft is drawn else [draft(root, draft_probs, luck) for root in range(V)]
    for _ in range(NUM_TEXTS):
        text = [ROOT]
        while len(text) < 3:
            tree, tokens, rows = fixed[text[-1]] if fixed else draft(text[-1], draft_probs, luck)
            path, bonus = walk(tree, tokens, probs[tokens], rows, draws)
            text += [tokens[node] for node in path[1:]] + [bonus]
        counts[text[1], text[2]] += 1
    return counts


def fits(counts: Tensor, expected: Tensor) -> bool:
    """Whether counts may have been drawn from probabilities of the same shape.

    Total variation of n draws over K cells is at most sqrt(K / n) / 2 on average (Jensen, then
    Cauchy-Schwarz) and one draw moves it by at most 1 / n, so it exceeds that by more than
    sqrt(log(1 / d) / 2n) with probability d (McDiarmid); d = 1e-6. Chi-square, which sees far
    smaller differences, may be as rare as 1e-4. Cells of probability 0 must be empty.
    """
    possible = expected > 0
    n, cells = float(counts.sum()), int(possible.sum())
    distance = float((counts / n - expected).abs().sum()) / 2
    bound = math.sqrt(cells / n) / 2 + math.sqrt(math.log(1e6) / (2 * n))
    found, wanted = counts[possible].double(), n * expected[possible].double()
    assert wanted.min() >= 5  # below, chi-square is no longer chi-square distributed
    chi_square = ((found - wanted) ** 2 / wanted).sum()
    rarity = torch.special.gammaincc(torch.tensor((cells - 1) / 2).double(), chi_square / 2)
    return distance < bound and float(rarity) > 1e-4 and not counts[~possible].any()


def keeps_distribution(draft: Callable[..., Offer], walk: Walk, sampling: Sampling) -> bool:
    counts, probs = first_two(draft, walk, sampling), sampling.probabilities(LOGITS)
    joint = probs[ROOT].unsqueeze(1) * probs
    return fits(counts.sum(1), probs[ROOT]) and fits(counts, joint)


@pytest.mark.parametrize(
    "sampling",
    [PLAIN, Sampling(0.7), Sampling(1.0, top_p=0.8), Sampling(1.4, top_p=0.95, top_k=4)],
    ids=["plain", "temperature", "top_p", "all"],
)
@pytest.mark.parametrize(("draft", "walk"), [(best, for_best), (drawn, walk_sampled)])
def test_sampling_keeps_the_distribution(draft, walk, sampling: Sampling) -> None:
    assert keeps_distribution(draft, walk, sampling)


def test_repeated_siblings_keep_the_distribution() -> None:
    assert keeps_distribution(repeating, for_best, PLAIN)


def draws_q(q: np.ndarray, x: int) -> np.ndarray:
    return q


def one_hot(q: np.ndarray, x: int) -> np.ndarray:
    return np.eye(V)[x]


def walk_by(
    proposal: Callable[[np.ndarray, int], np.ndarray],
    subtract: bool = True,
    bonus_probs: Tensor | None = None,
) -> Walk:
    """The rule as papers write it, to be broken in one place at a time.

    Args:
        proposal: q [V] by which x was proposed, from the drafter's distribution and x.
        subtract: whether a refusal takes q away from p.
        bonus_probs: [V, V] what the bonus after an accepted leaf is drawn from, instead of p.
    """
    luck = random.Random(5)

    def walk(tree, tokens, probs, draft_probs, generator) -> tuple[list[int], int]:
        rows, draft_rows = probs.numpy(), draft_probs.numpy()
        path, p, children = [0], rows[0], list(tree.children[0])
        while children:
            child = children.pop(0)
            x = tokens[child]
            q = proposal(draft_rows[child - 1], x)
            if luck.random() * q[x] < p[x]:
                path, p, children = [*path, child], rows[child], list(tree.children[child])
            elif subtract:
                p = np.maximum(p - q, 0)
                p = p / p.sum()
        if bonus_probs is not None and not tree.children[path[-1]]:
            p = bonus_probs[tokens[path[-1]]].numpy()
        return path, luck.choices(range(V), p)[0]

    return walk


def test_the_check_accepts_the_rules_as_papers_write_them() -> None:
    assert keeps_distribution(best, walk_by(one_hot), PLAIN)
    assert keeps_distribution(drawn, walk_by(draws_q), PLAIN)


@pytest.mark.parametrize(
    ("draft", "walk", "sampling"),
    [
        pytest.param(best, walk_by(draws_q), PLAIN, id="p/q for children that were not drawn"),
        pytest.param(greedy_chain, walk_sampled, PLAIN, id="p/q for a greedy chain"),
        pytest.param(best, walk_by(one_hot, subtract=False), PLAIN, id="children not taken away"),
        pytest.param(drawn, walk_by(draws_q, subtract=False), PLAIN, id="q not taken away"),
        pytest.param(
            best,
            walk_by(one_hot, bonus_probs=PLAIN.probabilities(LOGITS)),
            Sampling(0.7),
            id="bonus without the temperature",
        ),
    ],
)
def test_the_check_finds_a_wrong_rule(draft, walk, sampling: Sampling) -> None:
    assert not keeps_distribution(draft, walk, sampling)


PROMPT = [5, 17, 40, 8, 77]
NUM_DECODES = 600


class DrawnChain:
    """Draws the token at depth k from head k, by randomness of its own."""

    def __init__(self, head: MedusaHead, sampling: Sampling, seed: int = 0) -> None:
        self.head, self.sampling, self.reads = head, sampling, head.reads
        self.luck = generator(10**6 + seed)

    def observe(self, token_ids, output) -> None:
        self.hidden = output.hidden_states[0, -1]

    def propose(self, root: int) -> Draft:
        logits = [self.head.head_logits(k, self.hidden) for k in range(2)]
        probs = self.sampling.probabilities(torch.stack(logits))
        tokens = torch.multinomial(probs, 1, generator=self.luck).flatten()
        return Draft(Tree.chain(2), tokens, probs)


def drafters(head: MedusaHead, sampling: Sampling, seed: int = 0) -> dict:
    return {"tree": MedusaDrafter(head, TREE), "chain": DrawnChain(head, sampling, seed)}


def endless_target() -> Target:
    target = random_target()
    target.model.generation_config.eos_token_id = None
    return target


def next_probs(target: Target, ids: list[int], sampling: Sampling) -> Tensor:
    """[V] after `ids`, by the model's own pass."""
    return sampling.probabilities(target.model(torch.tensor([ids])).logits[:, -1])[0]


def three_token_probs(target: Target, sampling: Sampling) -> Tensor:
    """[V, V, V] of the first three tokens after PROMPT."""
    joint = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
    first = next_probs(target, PROMPT, sampling)
    for a in first.nonzero().flatten().tolist():
        second = next_probs(target, [*PROMPT, a], sampling)
        for b in second.nonzero().flatten().tolist():
            third = next_probs(target, [*PROMPT, a, b], sampling)
            joint[a, b] = first[a] * second[b] * third
    return joint


@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_decoding_keeps_the_targets_distribution(kind: str) -> None:
    target, sampling = endless_target(), Sampling(3.0, top_k=3)
    head, counts = noisy_head(target), torch.zeros(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
    accepted = 0
    for seed in range(NUM_DECODES):
        drafter = drafters(head, sampling, seed)[kind]
        generation = decode(target, drafter, PROMPT, 3, sampling, seed)
        counts[tuple(generation.token_ids)] += 1
        accepted += sum(step.accepted for step in generation.steps)
    assert accepted > NUM_DECODES / 2  # so that drafts, and not the bonus alone, make the text
    assert fits(counts, three_token_probs(target, sampling))


@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_a_seed_gives_one_text(kind: str) -> None:
    target, sampling = endless_target(), Sampling(1.0, top_p=0.9)
    head = noisy_head(target)

    def text(seed: int) -> list[int]:
        return decode(target, drafters(head, sampling)[kind], PROMPT, 20, sampling, seed).token_ids

    assert text(0) == text(0) != text(1)


@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_sampling_from_one_token_is_greedy(kind: str) -> None:
    target, sampling = endless_target(), Sampling(1.0, top_k=1)
    expected = decode(target, NoDraft(), PROMPT, 40)
    assert decode(target, NoDraft(), PROMPT, 40, sampling).token_ids == expected.token_ids
    drafter = drafters(noisy_head(target), sampling)[kind]
    drafted = decode(target, drafter, PROMPT, 40, sampling)
    assert drafted.token_ids == expected.token_ids
    assert len(drafted.steps) < len(expected.steps)
