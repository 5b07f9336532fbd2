"""Chains that are cut where they become unlikely: where they end, and that texts stay the target's.

`sigmoid(0) = 1/2`: a head whose logits of two tokens are (a, 0) gives the likelier one sigmoid(a).
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from drafters import blocks, medusa, peagle, small_models, small_target
from feature_heads import feature_head
from torch import Tensor
from toys import eagle_head, noisy_head, random_target, texts

from conf.settings.eagle import EagleForm
from eval.decode.engine import NoDraft, Request, decode, decode_batch, decode_many
from eval.decode.verification import verify
from heads.decoding.drafting import PAD, Draft, Drafter, Roots
from heads.decoding.head_drafter import Calibration, ChainSampler, compute_top_logits
from heads.decoding.sampling import GREEDY, NO_DRAWS, Generators, Sampling
from heads.decoding.tree import Tree
from heads.draft_head import DraftHead
from heads.eagle.eagle import EagleHead
from heads.vocab import DraftVocab
from tests.eval.decode.test_drafters import PROMPTS, WARM
from tests.eval.decode.test_verification import next_probs

CPU = torch.device("cpu")
SLOW = pytest.mark.slow


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_a_chance_by_hand() -> None:
    found = compute_top_logits(torch.tensor([[0.0, 0.0], [logit(0.8), 0.0], [0.0, 100.0]]))
    assert found.sigmoid().tolist() == pytest.approx([0.5, 0.8, 1.0], abs=2e-6)
    assert found.isfinite().all()
    calibration = Calibration((1.0, 2.0), (0.0, 0.0), 0.3)
    assert calibration.compute_chance(found[1:2], 1).item() == pytest.approx(0.8)
    # logit(0.8) = ln 4, and half of it is ln 2: odds of 2 to 1; ln 2 more, and they are 4 to 1.
    assert calibration.compute_chance(found[1:2], 2).item() == pytest.approx(2 / 3)
    higher = replace(calibration, offsets=(0.0, math.log(2)))
    assert higher.compute_chance(found[1:2], 2).item() == pytest.approx(0.8)


def drawn(chances: list[list[float]], calibration: Calibration | None) -> Draft:
    """Chains of texts that are as sure as given at each depth; token d at depth d, from 1."""
    draws = ChainSampler(DraftVocab.make_full(9), GREEDY, NO_DRAWS, calibration)
    tree, tokens = Tree.make_chain(len(chances[0])), []
    for depth, each in enumerate(zip(*chances, strict=True), start=1):
        if draws.has_ended:
            break
        logits = torch.zeros(len(each), 9)
        logits[:, depth] = 1.0
        tokens.append(draws.choose_token(logits, torch.tensor(each).logit()))
    return draws.make_draft(tree, torch.stack(tokens, 1))


def test_where_chains_end_by_hand() -> None:
    # Products: .8 .4 .36 .18; .9 .81 .73 .66; .4 ... of a threshold of .37.
    chances = [[0.8, 0.5, 0.9, 0.5], [0.9, 0.9, 0.9, 0.9], [0.4, 0.9, 0.9, 0.9]]
    half = Calibration((1.0,) * 4, (0.0,) * 4, 0.37)
    draft = drawn(chances, half)
    assert draft.tokens.tolist() == [[1, 2, PAD, PAD], [1, 2, 3, 4], [1, PAD, PAD, PAD]]
    assert draft.confidence is not None
    torch.testing.assert_close(draft.confidence.sigmoid(), torch.tensor(chances))
    # Without the second text the pass is as wide as the longest of the others.
    short = drawn(chances[::2], half)
    assert short.tokens.tolist() == [[1, 2], [1, PAD]]
    assert short.tree == Tree.make_chain(2)
    assert short.depth == 2
    none = drawn([[0.2, 0.9]], Calibration((1.0, 1.0), (0.0, 0.0), 0.37))
    assert none.tokens.shape == (1, 0)
    assert none.tree == Tree.make_chain(0)
    # sigmoid(logit(.8) / 2) * sigmoid(logit(.5) / .1) = 2/3 * 1/2.
    warm = Calibration((2.0, 0.1, 1.0, 1.0), (0.0,) * 4, 0.334)
    assert drawn(chances[:1], warm).tokens.tolist() == [[1]]
    assert drawn(chances[:1], replace(warm, threshold=0.333)).tokens.tolist() == [[1, 2]]


def test_a_chain_that_nothing_cuts_is_whole() -> None:
    assert drawn([[0.1, 0.1]], Calibration.make_neutral(2)).tokens.tolist() == [[1, 2]]
    assert drawn([[0.0, 0.1]], Calibration.make_neutral(2)).tokens.tolist() == [[1, 2]]
    assert drawn([[0.5]], Calibration((1.0,), (0.0,), 0.5)).tokens.tolist() == [[1]]
    plain = drawn([[0.1, 0.1]], None)
    assert plain.tokens.tolist() == [[1, 2]]
    assert plain.confidence is None


HEADS: dict[str, Callable[[], DraftHead]] = {
    "eagle": lambda: small_models()[0],
    "medusa": medusa,
    "dspark": lambda: blocks("dspark, rnn"),
    "dflash": lambda: blocks("dflash"),
    "dflash2": lambda: blocks("dflash2"),
    "peagle": peagle,
}
KINDS = [name if name in ("eagle", "medusa") else pytest.param(name, marks=SLOW) for name in HEADS]
DEPTHS = {"medusa": 3, "dflash": 4, "dflash2": 4, "peagle": 4}
SHARE = {
    "eagle": 7e-4,
    "medusa": 4e-5,
    "dspark": 0.07,
    "dflash": 8e-4,
    "dflash2": 0.05,
    "peagle": 7e-3,
}
"""Chances of two tokens of these heads, which are far from sure: half of their chains end there."""


def cutter(name: str, head: DraftHead, how: Sampling, threshold: float) -> Callable[..., Drafter]:
    depth = DEPTHS.get(name, 5)
    calibration = Calibration((0.8,) * depth, (0.0,) * depth, threshold)
    return lambda seeds: head.make_drafter(Tree.make_chain(depth), how, seeds, calibration)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", [GREEDY, WARM], ids=["greedy", "warm"])
def test_cut_chains_are_lossless_and_of_each_text_alone(name: str, how: Sampling) -> None:
    """In a batch whose places are taken by others, as alone; greedy, as without drafts."""
    target = small_target()
    make = cutter(name, HEADS[name](), how, SHARE[name])
    requests = [Request(ids, seed) for seed, ids in enumerate([*PROMPTS, [9, 8, 7, 6]], start=7)]
    found = decode_many(target, make, requests, 26, 2, how)
    lengths: set[int] = set()
    for request, text in zip(requests, found, strict=True):
        alone = decode(target, make([request.seed]), request.prompt_ids, 26, how, request.seed)
        assert (alone.token_ids, alone.steps) == (text.token_ids, text.steps)
        assert alone.drafted == text.drafted
        lengths |= set(text.drafted)
        if how.is_greedy:
            plain = decode(target, NoDraft(), request.prompt_ids, 26)
            assert text.token_ids == plain.token_ids
    assert len(lengths) > 1


@pytest.mark.parametrize("name", KINDS)
def test_a_cut_chain_is_the_first_of_the_whole_one(name: str) -> None:
    """Cut where the product falls below, whatever it would have been behind."""
    target, head = small_target(), HEADS[name]()
    whole, cut = (cutter(name, head, GREEDY, threshold)([7]) for threshold in (0.0, SHARE[name]))
    told: list[tuple[Draft, Draft]] = []

    class Both(NoDraft):
        taps = head.taps

        def observe(self, seen) -> None:
            super().observe(seen)
            whole.observe(seen)
            cut.observe(seen)

        def propose(self, roots: Roots) -> Draft:
            told.append((whole.propose(roots), cut.propose(roots)))
            return super().propose(roots)

    decode(target, Both(), PROMPTS[0], 20)
    for all_of_it, part in told:
        assert all_of_it.confidence is not None
        chances = (all_of_it.confidence[0] / 0.8).sigmoid().cumprod(0)
        kept = int((chances >= SHARE[name]).sum())
        assert part.tokens.tolist() == all_of_it.tokens[:, :kept].tolist()
    assert len({part.tokens.shape[1] for _, part in told}) > 1


def test_eagle_runs_no_further_than_the_longest_chain(monkeypatch) -> None:
    target, head = small_target(), small_models()[0]
    advance, steps = EagleHead.advance, []
    monkeypatch.setattr(EagleHead, "advance", lambda *given: steps.append(1) or advance(*given))
    drafter = cutter("eagle", head, GREEDY, SHARE["eagle"])([7])
    text = decode(target, drafter, PROMPTS[0], 26)
    # The token at which a chain ends is looked at too.
    assert len(steps) == sum(min(length, 4) for length in text.drafted)
    assert len(steps) < 4 * len(text.drafted)


Q = torch.tensor([[0.6, 0.3, 0.1], [0.8, 0.1, 0.1], [0.1, 0.45, 0.45], [0.3, 0.3, 0.4]])
P = torch.tensor([[0.3, 0.3, 0.4], [0.2, 0.4, 0.4], [0.5, 0.2, 0.3], [0.1, 0.2, 0.7]])
"""Distributions that drafter and target draw from: first, and then behind tokens 0, 1, 2."""
ONE = Sampling(temperature=1.0)
NUM_TEXTS = 6000


def emitted(calibration: Calibration) -> Counter:
    """First two tokens of texts, by chains of two and the target."""
    generators = Generators.from_seeds(range(NUM_TEXTS), CPU)
    drafts = Generators.from_seeds(range(1 << 32, (1 << 32) + NUM_TEXTS), CPU)
    draws = ChainSampler(DraftVocab.make_full(3), ONE, drafts, calibration)
    first = draws.choose_token(Q[:1].log().expand(NUM_TEXTS, -1))
    second = draws.choose_token(Q[1 + first].log())
    draft = draws.make_draft(Tree.make_chain(2), torch.stack([first, second], 1))
    tokens = torch.nn.functional.pad(draft.tokens, (1, 0))
    after = P[(1 + tokens).clamp_min(0)].log()
    after[:, 0] = P[0].log()
    found = verify(draft, tokens, after, ONE, generators)
    texts = tokens.gather(1, found.nodes)[:, 1:]
    counts: Counter = Counter()
    rest = generators.sample_indices(P[1 + found.bonus])  # as the next step would go on
    for kept, path, bonus, then in zip(
        found.num_accepted.tolist(), texts.tolist(), found.bonus.tolist(), rest.tolist(),
        strict=True,
    ):  # fmt: skip
        counts[tuple([*path[:kept], bonus, then][:2])] += 1
    return counts


def distance(counts: Counter) -> float:
    exact = {(a, b): float(P[0, a] * P[1 + a, b]) for a in range(3) for b in range(3)}
    return 0.5 * sum(abs(counts[pair] / NUM_TEXTS - p) for pair, p in exact.items())


def wrong_token(draws: ChainSampler, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
    """By the probability of the token that was drawn."""
    calibration, draws.calibration = draws.calibration, None
    token = TOKEN(draws, logits, confidence)
    draws.calibration = calibration
    assert calibration is not None
    drawn_prob = draws.probs[-1].gather(1, token.unsqueeze(1)).squeeze(1)
    draws._update_cut(calibration, drawn_prob.logit(1e-6))
    return token


TOKEN = ChainSampler.choose_token


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.61])
def test_cut_chains_keep_the_targets_distribution(threshold: float) -> None:
    """.5: behind 0 both are drafted (.6 * .8), but behind 1 and 2 (.6 * .45, .6 * .4) only one."""
    assert (
        distance(emitted(Calibration((1.0, 1.0), (0.0, 0.0), threshold))) < (8 / NUM_TEXTS) ** 0.5
    )


def test_chains_that_are_cut_by_what_was_drawn_do_not(monkeypatch) -> None:
    monkeypatch.setattr(ChainSampler, "choose_token", wrong_token)
    assert distance(emitted(Calibration((1.0, 1.0), (0.0, 0.0), 0.3))) > 3 * (8 / NUM_TEXTS) ** 0.5


class Watched:
    """Notes the chances of whole chains, by the head's own word."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps = drafter, drafter.taps
        self.observe, self.select_rows = drafter.observe, drafter.select_rows
        self.chances: list[Tensor] = []

    def propose(self, roots: Roots) -> Draft:
        draft = self.drafter.propose(roots)
        assert draft.confidence is not None
        self.chances.append(draft.confidence.sigmoid().prod(1))
        return draft


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle", "dspark", "dflash2", "peagle", "medusa"])
def test_sampled_texts_of_real_heads_keep_the_distribution(name: str) -> None:
    target, warm, draws = random_target(num_hidden_layers=4), Sampling(2.0, top_k=2), 2000
    target.model.generation_config.eos_token_id = None
    made = {
        "eagle": lambda: eagle_head(target, EagleForm.eagle3),
        "dspark": lambda: feature_head(target, "dspark", num_updates=40),
        "dflash2": lambda: feature_head(target, "dflash2", num_updates=40),
        "peagle": lambda: feature_head(target, "peagle", num_updates=40),
        "medusa": lambda: noisy_head(target),
    }[name]
    with torch.enable_grad():
        head = made()
    prompt = texts(target, 2, 1)[1][:4]

    def drafter(seeds: range, threshold: float) -> Drafter:
        calibration = Calibration((1.0, 1.0), (0.0, 0.0), threshold)
        return head.make_drafter(Tree.make_chain(2), warm, seeds, calibration)

    whole = Watched(drafter(range(50), 0.0))
    decode_batch(target, whole, [prompt] * 50, 4, warm, range(50))
    # As many chains end with the first token as have two.
    threshold = torch.cat(whole.chances).median().item()
    cut = Watched(drafter(range(1 << 32, (1 << 32) + draws), threshold))
    drawn = decode_batch(target, cut, [prompt] * draws, 3, warm, range(draws))
    counts, exact = Counter(tuple(text.token_ids) for text in drawn), {(): 1.0}
    for _ in range(3):
        exact = {
            (*said, token): share * float(p[token])
            for said, share in exact.items()
            for p in [next_probs(target, [*prompt, *said], warm)]
            for token in p.nonzero().flatten().tolist()
        }
    off = 0.5 * sum(abs(counts[said] / draws - p) for said, p in exact.items())
    assert off < (7 / draws) ** 0.5
    assert sum(step.num_accepted for text in drawn for step in text.steps) > 100
    lengths = Counter(each for text in drawn for each in text.drafted)
    assert len(lengths) > 1
