import pytest
from toys import endless_target, random_target, texts

from conf.errors import InputError
from eval.decode.drafters.self_speculation import SelfDraft, list_skipped_layers
from eval.decode.engine import decode
from eval.measure.acceptance_stats import PromptSteps, tau
from eval.tune import skip_search
from eval.tune.skip_search import (
    PassCosts,
    SkipChoice,
    measure_pass_costs,
    search_skipped_layers,
)
from heads.target_model.model import Target
from tests.eval.decode.test_self_speculation import agreeing_target, proposed

# A layer costs 1.5, the rest of a pass 1, a token more to verify 0.1.
COSTS = PassCosts(1.0, tuple(10 + 0.1 * k for k in range(9)))
IDLE = (1, 3, 4)


@pytest.fixture(scope="module")
def target() -> Target:
    """A target of six layers, three of which add nothing."""
    target = endless_target(num_hidden_layers=6)
    for layer in IDLE:
        module = target.decoder.layers[layer]
        module.self_attn.o_proj.weight.data.zero_()
        module.mlp.down_proj.weight.data.zero_()
    return target


@pytest.fixture(scope="module")
def own(target: Target) -> list[list[int]]:
    return texts(target, 2, 19)  # two whole chains of 8 behind a first token


@pytest.fixture(scope="module")
def found(target: Target, own: list[list[int]]) -> tuple[list[SkipChoice], int]:
    return search(target, own)


def search(target: Target, own: list[list[int]]):
    return search_skipped_layers(target, own, [4] * len(own), COSTS)


def test_costs_are_linear_in_the_layers_that_run() -> None:
    assert [COSTS.estimate_draft_seconds(share) for share in (0.0, 0.5, 1.0)] == [1.0, 5.5, 10.0]
    # 3 tokens in the time of two draft passes and one over three tokens.
    assert COSTS.estimate_speedup(3.0, 2, 0.5) == pytest.approx(3 * 10 / (2 * 5.5 + 10.2))


def test_layers_that_do_nothing_are_found(target, found) -> None:
    choices, num_tried = found
    best = choices[0]
    assert (best.skip, best.num_tokens) == (IDLE, 8)
    assert len(choices) == 8
    assert (best.agreement, best.tau) == (1.0, 9.0)
    assert best.speedup == pytest.approx(9 * 10 / (8 * 5.5 + 10.8))
    exits = {list_skipped_layers(target, n) for n in range(1, 6)}
    assert all(best.speedup > choice.speedup for choice in choices if choice.skip in exits)
    assert choices == sorted(choices, key=lambda choice: choice.sort_key)
    # Given up one by one, and the exits that are not among these; after three rounds that gained
    # there are two more at most.
    assert 6 + 5 + 4 + 3 + 2 < num_tried <= 6 + 5 + 4 + 3 + 2 + len(exits)


@pytest.mark.slow
def test_the_best_sets_have_the_tau_of_decoding(target, own) -> None:
    """In a target all of whose layers matter, but not much."""
    target = agreeing_target()
    own = texts(target, 2, 40)
    choices, _ = search(target, own)
    assert 0 < choices[0].agreement < 1
    for choice in choices[:3]:
        decoded = [
            decode(target, SelfDraft(target, choice.skip, choice.num_tokens), text[:4], 40)
            for text in own
        ]
        assert [g.token_ids for g in decoded] == [text[4:] for text in own]
        assert choice.tau == pytest.approx(tau([PromptSteps("", g.steps) for g in decoded]))
        share = 1 - len(choice.skip) / 6
        assert choice.speedup == COSTS.estimate_speedup(choice.tau, choice.num_tokens, share)


def test_agreement_is_the_share_of_right_first_draft_tokens() -> None:
    target = agreeing_target()
    own = texts(target, 2, 12)
    choice = search(target, own)[0][0]
    right = []
    for text in own:
        for root in range(4, len(text) - 1):
            # A chain of one behind this very token.
            step = decode(target, SelfDraft(target, choice.skip, 1), text[: root + 1], 2)
            assert step.token_ids[0] == text[root + 1]
            [drafted] = proposed(target, choice.skip, 1, text[: root + 1]).tolist()
            right.append(drafted == text[root + 1])
    assert choice.agreement == sum(right) / len(right)


def test_a_search_ends_when_no_more_layers_pay(target, own, found, monkeypatch) -> None:
    monkeypatch.setattr(skip_search, "PATIENCE", 1)
    choices, num_tried = search(target, own)
    assert choices[0].skip == IDLE
    # Three rounds that gained, and one that did not.
    exits = {list_skipped_layers(target, n) for n in range(1, 6)}
    assert 6 + 5 + 4 + 3 <= num_tried <= 6 + 5 + 4 + 3 + len(exits)
    assert num_tried < found[1]  # which came to the last layer before it lost its patience


def test_a_target_of_one_layer_is_refused() -> None:
    target = random_target(num_hidden_layers=1)
    with pytest.raises(InputError, match=r"target\.path=llama: has a single layer, which cannot"):
        search(target, [[5, 6, 7]])


def test_costs_are_measured(target, own) -> None:
    costs = measure_pass_costs(target, own[0], 2)
    assert len(costs.verify) == 3
    assert 0 < costs.bare < costs.verify[0]
