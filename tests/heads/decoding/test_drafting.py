"""Chains of drawn tokens, after which texts have the target's distribution."""

from collections import Counter

import torch
from toys import accept

from heads.decoding.drafting import ChainSampler
from heads.decoding.sampling import GREEDY, NO_DRAWS, Generators, Sampling
from heads.decoding.tree import Tree
from heads.vocab import DraftVocab

CPU = torch.device("cpu")


def test_a_greedy_chain_is_whole() -> None:
    draws = ChainSampler(DraftVocab.make_full(9), GREEDY, NO_DRAWS)
    tokens = [draws.choose_token(torch.eye(9)[[depth]]) for depth in (1, 2)]
    draft = draws.make_draft(Tree.make_chain(2), torch.stack(tokens, 1))
    assert draft.tokens.tolist() == [[1, 2]]
    assert (draft.tree, draft.depth, draft.draft_probs) == (Tree.make_chain(2), 2, None)


Q = torch.tensor([[0.6, 0.3, 0.1], [0.8, 0.1, 0.1], [0.1, 0.45, 0.45], [0.3, 0.3, 0.4]])
P = torch.tensor([[0.3, 0.3, 0.4], [0.2, 0.4, 0.4], [0.5, 0.2, 0.3], [0.1, 0.2, 0.7]])
"""Distributions that drafter and target draw from: first, and then behind tokens 0, 1, 2."""
ONE = Sampling(temperature=1.0)
NUM_TEXTS = 6000


def test_drawn_chains_keep_the_targets_distribution() -> None:
    """First two tokens of texts, by chains of two and the target."""
    generators = Generators.from_seeds(range(NUM_TEXTS), CPU)
    drafts = Generators.from_seeds(range(1 << 32, (1 << 32) + NUM_TEXTS), CPU)
    draws = ChainSampler(DraftVocab.make_full(3), ONE, drafts)
    first = draws.choose_token(Q[:1].log().expand(NUM_TEXTS, -1))
    second = draws.choose_token(Q[1 + first].log())
    draft = draws.make_draft(Tree.make_chain(2), torch.stack([first, second], 1))
    tokens = torch.nn.functional.pad(draft.tokens, (1, 0))
    after = P[(1 + tokens).clamp_min(0)].log()
    after[:, 0] = P[0].log()
    found = accept(draft, tokens, after, ONE, generators)
    texts = tokens.gather(1, found.nodes)[:, 1:]
    counts: Counter = Counter()
    rest = generators.sample_indices(P[1 + found.bonus])  # as the next step would go on
    for kept, path, bonus, then in zip(
        found.num_accepted.tolist(), texts.tolist(), found.bonus.tolist(), rest.tolist(),
        strict=True,
    ):  # fmt: skip
        counts[tuple([*path[:kept], bonus, then][:2])] += 1
    exact = {(a, b): float(P[0, a] * P[1 + a, b]) for a in range(3) for b in range(3)}
    off = 0.5 * sum(abs(counts[pair] / NUM_TEXTS - p) for pair, p in exact.items())
    assert off < (8 / NUM_TEXTS) ** 0.5
