import pytest

from eval.decode.engine import Step
from eval.measure.stats import PromptSteps, alpha, per_position, summary, tau, tau_interval

# Three passes: both depths kept; first refused; first kept and the text then ends.
STEPS = PromptSteps("a", [Step(2, 3, 5), Step(0, 1, 2), Step(1, 1, 1)])


def test_tau_is_tokens_per_pass_bonus_included() -> None:
    assert tau([STEPS]) == pytest.approx(5 / 3)


def test_alpha_is_conditional_and_leaves_out_depths_beyond_the_text() -> None:
    # Depth 1: 2 of 3 passes. Depth 2: the pass that ended could not test it, so 1 of 1.
    assert alpha([STEPS], 3) == [pytest.approx(2 / 3), 1.0, 0.0]


def test_per_position_counts_every_pass() -> None:
    assert per_position([STEPS], 2) == [pytest.approx(2 / 3), pytest.approx(1 / 3)]


def test_categories_and_intervals() -> None:
    other = PromptSteps("b", [Step(0, 1, 2), Step(0, 1, 1)])
    result = summary([STEPS, other], 2, seed=0)
    assert result["by_category"]["b"]["tau"] == 1.0
    assert result["by_category"]["a"]["num_prompts"] == 1
    assert (result["num_tokens"], result["num_steps"], result["num_prompts"]) == (7, 5, 2)
    low, high = tau_interval([STEPS, other], seed=0)
    assert (low, high) == (1.0, pytest.approx(5 / 3))


def test_nothing_to_verify_is_one_token_per_pass() -> None:
    assert tau([PromptSteps("a", [])]) == 1.0
