"""Acceptance keeps the target's distribution, whoever drafts.

Texts are walked over a vocabulary of V = 6 in which the next token depends on the last one alone,
so the distribution of the first two tokens is known exactly. Which path is accepted is for
test_accept_rules.py, texts of drafters for test_drafters.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
from drafters import fits, next_probs  # noqa: F401
from torch import Tensor
from toys import accept, tree_of

from eval.decode import verification
from eval.decode.verification import AcceptedPaths
from heads.decoding.drafting import PAD, Draft
from heads.decoding.sampling import Generators, Sampling, Typical
from heads.decoding.tree import Tree

V, ROOT = 6, 0
NUM_TEXTS = 50_000
CHAIN = Tree.make_chain(2)
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
PLAIN = Sampling(temperature=1.0)
WARM = Sampling(0.7)
SAMPLINGS = {
    "plain": PLAIN,
    "temperature, top_p": Sampling(0.7, top_p=0.9),
    "all": Sampling(1.4, top_p=0.95, top_k=4),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOGITS = torch.randn(V, V, generator=generator(1))
"""The target's, row per last token."""
DRAFT_LOGITS = LOGITS + torch.randn(V, V, generator=generator(2))

Proposal = Callable[[Tensor, Tensor, torch.Generator], Draft]
"""Drafts below roots [B], from the drafter's distribution [V, V] by last token."""
Rule = Callable[[Draft, Tensor, Tensor, Sampling, Generators], AcceptedPaths]


def ranked(tree: Tree, roots: Tensor, q: Tensor) -> Tensor:
    """[B, N - 1] tokens: those of each rank after their parents."""
    order, tokens = q.argsort(descending=True), [roots]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        tokens.append(order[tokens[parent], rank])
    return torch.stack(tokens[1:], 1)


def best(roots: Tensor, q: Tensor, rng: torch.Generator) -> Draft:
    """The likeliest tokens below each node."""
    return Draft.from_tree(TREE, ranked(TREE, roots, q))


def best_chain(roots: Tensor, q: Tensor, rng: torch.Generator) -> Draft:
    """The likeliest token, and the likeliest after that: q is one-hot."""
    return Draft.from_tree(CHAIN, ranked(CHAIN, roots, q))


def repeating(roots: Tensor, q: Tensor, rng: torch.Generator) -> Draft:
    """`best`, but the root's third child says what its first says."""
    draft = best(roots, q, rng)
    return replace(draft, tokens=draft.tokens[:, [0, 1, 0, 3, 4, 5]])


def padded(roots: Tensor, q: Tensor, rng: torch.Generator) -> Draft:
    """`best`, but nodes are missing, others in every text."""
    draft = best(roots, q, rng)
    missing = torch.rand(draft.tokens.shape, generator=rng) < 0.3
    return replace(draft, tokens=draft.tokens.masked_fill(missing, PAD))


def shapes(roots: Tensor, q: Tensor, rng: torch.Generator) -> Draft:
    """The likeliest tokens in trees of three shapes, the text's chosen by its root and by rng."""
    parents = [(0, 0, 0, 1, 1, 2), (0, 1, 2, 0, 2, 1), (0, 0, 2, 2, 2, 0)]
    which = (roots + torch.randint(2, roots.shape, generator=rng)) % 3
    texts = torch.arange(len(roots))
    tokens = torch.stack([ranked(tree_of(each), roots, q) for each in parents])
    return Draft(torch.tensor(parents)[which], tokens[which, texts], depth=3)


def sampled(tree: Tree, roots: Tensor, q: Tensor, rng: torch.Generator) -> Draft:
    """Siblings sampled from q without replacement; only as many as q has tokens."""
    tokens = torch.zeros(len(roots), tree.num_nodes, dtype=torch.int64)
    tokens[:, 0] = roots
    num_inner = max(tree.parents) + 1
    for parent, children in enumerate(tree.children[:num_inner]):
        if children:
            rows, gone = q[tokens[:, parent].clamp_min(0)], tokens[:, parent] < 0
            found = torch.multinomial(rows, len(children), generator=rng)
            gone = gone.unsqueeze(1) | (rows.gather(1, found) == 0)
            tokens[:, children] = found.masked_fill(gone, PAD)
    return Draft.from_tree(tree, tokens[:, 1:], q[tokens[:, :num_inner].clamp_min(0)])


PROPOSALS: dict[str, Proposal] = {
    "ranked": best,
    "one-hot": best_chain,
    "repeating": repeating,
    "padded": padded,
    "shapes": shapes,
    "chain": partial(sampled, CHAIN),
    "chain of one": partial(sampled, Tree.make_chain(1)),
    "tree": partial(sampled, TREE),
}


def first_two(proposal: str, rule: Rule, sampling: Sampling) -> Tensor:
    """[V, V] counts of the first two tokens after ROOT, over NUM_TEXTS texts."""
    rng, q = generator(3), sampling.compute_probabilities(DRAFT_LOGITS)
    draws = Generators.from_seeds(range(NUM_TEXTS), torch.device("cpu"))

    def step(roots: Tensor, generators: Generators) -> tuple[Tensor, Tensor]:
        """The tokens given [B, 2] and how many [B]; a third is forgotten."""
        draft = PROPOSALS[proposal](roots, q, rng)
        tokens = torch.cat([roots.unsqueeze(1), draft.tokens], 1)
        accepted = rule(draft, tokens, LOGITS[tokens.clamp_min(0)], sampling, generators)
        kept = tokens.gather(1, accepted.nodes[:, 1:3])
        bonus_at = torch.arange(2) == accepted.num_accepted.unsqueeze(1)
        return kept.where(~bonus_at, accepted.bonus.unsqueeze(1)), accepted.num_accepted + 1

    text, length = step(torch.full((NUM_TEXTS,), ROOT), draws)
    short = length == 1
    rest = Generators(draws.keys[short], draws.counts[short])
    text[short, 1] = step(text[short, 0], rest)[0][:, 0]
    return (text[:, 0] * V + text[:, 1]).bincount(minlength=V * V).view(V, V).float()


def keeps_distribution(proposal: str, rule: Rule, sampling: Sampling) -> bool:
    counts, probs = first_two(proposal, rule, sampling), sampling.compute_probabilities(LOGITS)
    joint = probs[ROOT].unsqueeze(1) * probs
    return fits(counts.sum(1), probs[ROOT]) and fits(counts, joint)


@pytest.mark.parametrize(
    ("proposal", "sampling"),
    [*zip(PROPOSALS, cycle(SAMPLINGS)), ("ranked", "all"), ("tree", "plain"), ("chain", "plain")],
)
def test_sampling_keeps_the_distribution(proposal: str, sampling: str) -> None:
    assert keeps_distribution(proposal, accept, SAMPLINGS[sampling])


def test_typical_acceptance_does_not_keep_the_distribution() -> None:
    lossy = replace(PLAIN, typical=Typical())
    assert not keeps_distribution("ranked", accept, lossy)
    assert lossy.is_lossy
    assert not any(sampling.is_lossy for sampling in SAMPLINGS.values())


def as_if_sampled(draft, tokens, logits, sampling, generators) -> AcceptedPaths:
    """`accept_paths`, but told that the tokens were sampled from q."""
    last = tokens[:, : max(draft.tree.parents) + 1].clamp_min(0)
    q = sampling.compute_probabilities(DRAFT_LOGITS)[last]
    return accept(replace(draft, draft_probs=q), tokens, logits, sampling, generators)


def raw_bonus(at_leaves: bool) -> Rule:
    """`accept_paths`, but the bonus is drawn from softmax: at leaves, or elsewhere."""

    def rule(draft, tokens, logits, sampling, generators) -> AcceptedPaths:
        accepted = accept(draft, tokens, logits, sampling, generators)
        end = accepted.nodes.gather(1, accepted.num_accepted.unsqueeze(1))
        raw = logits.take_along_dim(end.unsqueeze(2), 1)[:, 0].softmax(-1)
        inner = torch.isin(end[:, 0], torch.tensor(draft.tree.parents))
        return replace(
            accepted, bonus=generators.sample_indices(raw).where(inner != at_leaves, accepted.bonus)
        )

    return rule


def with_part(name: str, broken: Callable[..., Tensor]) -> Rule:
    """`accept_paths`, but with one of its parts replaced."""

    def rule(*arguments) -> AcceptedPaths:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, name, broken)
            return accept(*arguments)

    return rule


def p_in_full(layout, tokens, probs, uniforms) -> Tensor:
    """`accept_ranked`, but what was rejected stays in p."""
    return uniforms < verification._look_up_token_probs(layout, tokens, probs)


AT_LEAVES = raw_bonus(at_leaves=True)
WHEN_REJECTED = raw_bonus(at_leaves=False)
Q_STAYS = with_part("_normalise_weights", lambda weights, otherwise: otherwise)
NOT_DIVIDED = with_part("_normalise_weights", lambda weights, otherwise: weights)
BROKEN: dict[str, tuple[str, Rule, Sampling]] = {
    "p/q for children not sampled": ("ranked", as_if_sampled, PLAIN),
    "rejected child stays in p": ("ranked", with_part("accept_ranked", p_in_full), PLAIN),
    "q stays in p": ("chain", Q_STAYS, PLAIN),
    "p - q not divided": ("tree", NOT_DIVIDED, PLAIN),
    "bonus from p, not the rest": ("tree", WHEN_REJECTED, PLAIN),
    "bonus without the temperature": ("ranked", AT_LEAVES, WARM),
}


@pytest.mark.parametrize(("proposal", "rule", "sampling"), BROKEN.values(), ids=BROKEN)
def test_the_check_finds_a_wrong_rule(proposal: str, rule: Rule, sampling: Sampling) -> None:
    assert not keeps_distribution(proposal, rule, sampling)


def test_the_check_accepts_what_is_replaced_by_the_same() -> None:
    assert keeps_distribution("tree", as_if_sampled, PLAIN)
    assert keeps_distribution(
        "ranked", with_part("accept_ranked", verification.accept_ranked), PLAIN
    )
    assert keeps_distribution("ranked", AT_LEAVES, PLAIN)
