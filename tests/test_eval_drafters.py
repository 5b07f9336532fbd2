"""What every drafter must do alike."""

import pytest
from drafters import EVERY_DRAFTER, each_way, small_target

from eval.decode.engine import decode, decode_batch
from heads.sampling import GREEDY, Sampling
from heads.target.ends import TargetEnds

PROMPTS = [[90, 17, 240, 8, 77, 123, 61], [105, 17], [61, 23, 77, 8, 40, 17, 5] * 2]
WARM = Sampling(temperature=0.7, top_k=8)


@pytest.mark.parametrize(("name", "sampling"), each_way(EVERY_DRAFTER, WARM))
def test_a_text_is_drafted_in_a_batch_as_it_is_alone(name: str, sampling: Sampling) -> None:
    """Texts and steps; what others of the batch draft, and for how long, is their own affair."""
    target, make, seeds = small_target(), EVERY_DRAFTER[name], [7, 8, 9]
    together = decode_batch(target, make(sampling, seeds), PROMPTS, 20, sampling, seeds)
    for prompt, seed, found in zip(PROMPTS, seeds, together, strict=True):
        alone = decode(target, make(sampling, [seed]), prompt, 20, sampling, seed)
        assert (found.token_ids, found.steps) == (alone.token_ids, alone.steps)


@pytest.mark.parametrize("name", EVERY_DRAFTER)
def test_a_prompt_that_comes_in_parts_is_drafted_for_as_a_whole(name: str, monkeypatch) -> None:
    target, make, prompt = small_target(), EVERY_DRAFTER[name], PROMPTS[2]
    whole = decode(target, make(GREEDY, [7]), prompt, 20)
    monkeypatch.setattr(TargetEnds, "prefill_chunk", 4)
    found = decode(target, make(GREEDY, [7]), prompt, 20)
    assert found.token_ids == whole.token_ids
    if name != "lookahead":  # its first guesses are drawn from the first part
        assert found.steps == whole.steps
