"""Acceptance keeps the target's distribution, whoever drafts.

Most statistical tests walk texts over a vocabulary of V = 6 in which the next token depends on
the last one alone, so the distribution of the first two tokens is known exactly; the last ones
run the engine on a toy target. Which path is accepted is for test_accept_rules.py.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from toys import accept, endless_target, noisy_head, tree_of

from eval.decode import verification
from eval.decode.drafters.draft_model import sample_distinct
from eval.decode.engine import NoDraft, decode, decode_batch
from eval.decode.verification import AcceptedPaths
from heads.decoding.cache import RecurrentStates
from heads.decoding.drafting import PAD, CommittedTokens, Draft, Roots
from heads.decoding.sampling import Generators, Sampling, Typical, drafter_seeds
from heads.decoding.tree import Tree
from heads.medusa import MedusaDrafter, MedusaHead
from heads.target_model.model import Target

V, ROOT = 6, 0
NUM_TEXTS = 100_000
CHAIN = Tree.make_chain(2)
TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
PLAIN = Sampling(temperature=1.0)
WARM = Sampling(0.7)
SAMPLINGS = {
    "plain": PLAIN,
    "temperature, top_p": Sampling(0.7, top_p=0.9),
    "all": Sampling(1.4, top_p=0.95, top_k=4),
}
slow = pytest.mark.slow


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


def fits(counts: Tensor, expected: Tensor) -> bool:
    """Says whether counts may have been drawn from probabilities of the same shape.

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


def keeps_distribution(proposal: str, rule: Rule, sampling: Sampling) -> bool:
    counts, probs = first_two(proposal, rule, sampling), sampling.compute_probabilities(LOGITS)
    joint = probs[ROOT].unsqueeze(1) * probs
    return fits(counts.sum(1), probs[ROOT]) and fits(counts, joint)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(each, id=name, marks=[slow] if name == "temperature, top_p" else [])
        for name, each in SAMPLINGS.items()
    ],
)
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_sampling_keeps_the_distribution(proposal: str, sampling: Sampling) -> None:
    assert keeps_distribution(proposal, accept, sampling)


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
    "p/q for a greedy chain": ("one-hot", as_if_sampled, PLAIN),
    "rejected child stays in p": ("ranked", with_part("accept_ranked", p_in_full), PLAIN),
    "q stays in p: chain": ("chain", Q_STAYS, PLAIN),
    "q stays in p: tree": ("tree", Q_STAYS, PLAIN),
    "p - q not divided": ("tree", NOT_DIVIDED, PLAIN),
    "bonus from p, not the rest: ranked": ("ranked", WHEN_REJECTED, PLAIN),
    "bonus from p, not the rest: chain": ("chain", WHEN_REJECTED, PLAIN),
    "bonus from p, not the rest: tree": ("tree", WHEN_REJECTED, PLAIN),
    "bonus without the temperature: ranked": ("ranked", AT_LEAVES, WARM),
    "bonus without the temperature: chain": ("chain of one", AT_LEAVES, WARM),
    "bonus without the temperature: tree": ("tree", AT_LEAVES, WARM),
}


ONE_OF_EACH = (
    "p/q for children not sampled", "q stays in p: chain", "bonus from p, not the rest: tree",
    "bonus without the temperature: ranked",
)  # fmt: skip


@pytest.mark.parametrize(
    ("proposal", "rule", "sampling"),
    [
        pytest.param(*each, id=name, marks=[] if name in ONE_OF_EACH else slow)
        for name, each in BROKEN.items()
    ],
)
def test_the_check_finds_a_wrong_rule(proposal: str, rule: Rule, sampling: Sampling) -> None:
    assert not keeps_distribution(proposal, rule, sampling)


def test_the_check_accepts_what_is_replaced_by_the_same() -> None:
    assert keeps_distribution("tree", as_if_sampled, PLAIN)
    assert keeps_distribution(
        "ranked", with_part("accept_ranked", verification.accept_ranked), PLAIN
    )
    assert keeps_distribution("ranked", AT_LEAVES, PLAIN)


PROMPT = [5, 17, 40, 8, 77]
NUM_DECODES, NUM_SAID = 1000, 4
KINDS = ["ranked", "chain", "tree"]
FAMILIES = {"llama": 0, "lfm2": 0, "qwen3_next": 7, "falcon_h1": 1}
"""With seeds of which the drafts are sometimes right."""


class SampledMedusa:
    """Samples the children of a node from the head of their depth, by randomness of its own."""

    def __init__(self, head: MedusaHead, tree: Tree, sampling: Sampling, seeds: list[int]) -> None:
        self.head, self.tree, self.sampling, self.taps = head, tree, sampling, head.taps
        self.generators = Generators.from_seeds(drafter_seeds(seeds), torch.device("cpu"))

    def observe(self, seen: CommittedTokens) -> None:
        self.hidden = seen.last_output.hidden_states[:, 0]

    def propose(self, roots: Roots) -> Draft:
        heads = [self.head.head_logits(k, self.hidden) for k in range(self.tree.depth)]
        q = self.sampling.compute_probabilities(torch.stack(heads, 1))
        probs = q[:, self.tree.depths[: max(self.tree.parents) + 1]]
        tokens = torch.empty(len(roots), self.tree.num_nodes, dtype=torch.int64)
        for node, children in enumerate(self.tree.children):
            if children:
                own = sample_distinct(probs[:, [node]], len(children), self.generators)
                tokens[:, children] = own[:, 0]
        return Draft.from_tree(self.tree, tokens[:, 1:], probs)

    def select_rows(self, rows: list[int]) -> None:
        self.generators = self.generators.select_rows(rows)


def drafter(kind: str, head: MedusaHead, sampling: Sampling, seeds: list[int]):
    if kind == "ranked":
        return MedusaDrafter(head, TREE)
    return SampledMedusa(head, CHAIN if kind == "chain" else TREE, sampling, seeds)


def shared_target(family: str = "llama") -> Target:
    return endless_target(family, FAMILIES[family])


def next_probs(target: Target, ids: list[int], sampling: Sampling) -> Tensor:
    """[V] after `ids`, by the model's own pass."""
    return sampling.compute_probabilities(target.model(torch.tensor([ids])).logits[:, -1])[0]


def text_probs(target: Target, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probabilities of all first tokens that the target may say after PROMPT."""
    found = {(): 1.0}
    for _ in range(NUM_SAID):
        found = {
            (*said, token): probability * float(probs[token])
            for said, probability in found.items()
            for probs in [next_probs(target, [*PROMPT, *said], sampling)]
            for token in probs.nonzero().flatten().tolist()
        }
    return found


def keeps_what_is_said(family: str, kind: str) -> bool:
    """Says whether a target's texts with drafts have the distribution of those without."""
    target, sampling = shared_target(family), Sampling(3.0, top_k=3)
    seeds = list(range(NUM_DECODES))
    made = drafter(kind, noisy_head(target), sampling, seeds)
    found = decode_batch(target, made, [PROMPT] * NUM_DECODES, NUM_SAID, sampling, seeds)
    # So that drafts, and not the bonus alone, make the text.
    assert sum(step.num_accepted for g in found for step in g.steps) > NUM_DECODES / 4
    counts = Counter(tuple(generation.token_ids) for generation in found)
    expected = text_probs(target, sampling)
    said = [counts.pop(text, 0) for text in expected]
    return fits(torch.tensor([*said, counts.total()]), torch.tensor([*expected.values(), 0.0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family", ["llama", "lfm2", pytest.param("qwen3_next", marks=slow), "falcon_h1"]
)
def test_decoding_keeps_the_targets_distribution(family: str, kind: str) -> None:
    assert keeps_what_is_said(family, kind)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("lfm2", "ranked"),
        pytest.param("falcon_h1", "chain", marks=slow),
        pytest.param("qwen3_next", "tree", marks=slow),
    ],
)
def test_states_of_what_was_rejected_change_it(monkeypatch, family: str, kind: str) -> None:
    """States go on from the last node, not from the last one that was kept."""
    commit = RecurrentStates.commit

    def forward_only(states: RecurrentStates, kept: list[list[int]]) -> None:
        commit(states, [[states._num_pending - 1] for _ in kept])

    monkeypatch.setattr(RecurrentStates, "commit", forward_only)
    assert not keeps_what_is_said(family, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_seed_gives_one_text_alone_or_in_a_batch(family: str, kind: str) -> None:
    target, sampling, seeds = shared_target(family), Sampling(1.0, top_p=0.9), [0, 1, 0, 7]
    prompts, head = [PROMPT, PROMPT, PROMPT, PROMPT[:2]], noisy_head(target)

    def texts(rows: list[int]) -> list[list[int]]:
        mine = [seeds[row] for row in rows]
        made = drafter(kind, head, sampling, mine)
        found = decode_batch(target, made, [prompts[row] for row in rows], 20, sampling, mine)
        return [generation.token_ids for generation in found]

    together = texts([0, 1, 2, 3])
    assert together == [texts([row])[0] for row in range(4)]
    assert together[0] == together[2] != together[1]


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_from_one_token_is_greedy(kind: str) -> None:
    target, sampling = shared_target(), Sampling(1.0, top_k=1)
    expected = decode(target, NoDraft(), PROMPT, 40)
    assert decode(target, NoDraft(), PROMPT, 40, sampling).token_ids == expected.token_ids
    drafted = decode(target, drafter(kind, noisy_head(target), sampling, [0]), PROMPT, 40, sampling)
    assert drafted.token_ids == expected.token_ids
    assert len(drafted.steps) < len(expected.steps)
