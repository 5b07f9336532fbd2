"""Demands on every drafter."""

import pytest
import torch
from drafters import EVERY_DRAFTER, WITHOUT_MODELS, ending_early, small_target
from toys import random_target

from eval.decode.drafters.draft_model import commit_tokens
from eval.decode.engine import decode, decode_batch
from heads.decoding.drafting import CommittedTokens
from heads.decoding.sampling import GREEDY, Sampling
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import TargetOutput

PROMPTS = [[90, 17, 240, 8, 77, 123, 61], [105, 17], [61, 23, 77, 8, 40, 17, 5] * 2]
WARM = Sampling(temperature=0.7, top_k=8)


@pytest.mark.parametrize("name", EVERY_DRAFTER)
def test_a_prompt_that_comes_in_parts_is_drafted_for_as_a_whole(name: str, monkeypatch) -> None:
    target, make, prompt = small_target(), EVERY_DRAFTER[name], PROMPTS[2]
    whole = decode(target, make(GREEDY, [7]), prompt, 20)
    monkeypatch.setattr(EmbeddingsAndOutputHead, "prefill_chunk", 4)
    found = decode(target, make(GREEDY, [7]), prompt, 20)
    assert found.token_ids == whole.token_ids
    if name != "lookahead":  # its first guesses are drawn from the first part
        assert found.steps == whole.steps


LONG = [[61, 23, 77, 8, 40, 17, 5] * 2, [105], [90, 17, 240, 8, 77], [105, 17, 33]]


@pytest.mark.parametrize("name", EVERY_DRAFTER)
def test_the_prompts_of_a_batch_come_in_parts(name: str, monkeypatch) -> None:
    """Texts end in the first, the second and the last of four parts; one has a single token."""
    target, make, seeds = small_target(), EVERY_DRAFTER[name], [7, 8, 9, 10]
    whole = decode_batch(target, make(GREEDY, seeds), LONG, 20, seeds=seeds)
    monkeypatch.setattr(EmbeddingsAndOutputHead, "prefill_chunk", 4)
    widths, drafter = [], make(GREEDY, seeds)
    observe = drafter.observe

    def watch(seen: CommittedTokens) -> None:
        states = [seen.output.hidden_states, *seen.output.layers.values()]
        widths.extend(each.shape[1] for each in states)
        observe(seen)

    monkeypatch.setattr(drafter, "observe", watch)
    found = decode_batch(target, drafter, LONG, 20, seeds=seeds)
    assert [text.token_ids for text in found] == [text.token_ids for text in whole]
    # These guess from the first part, and translate what comes at a time.
    if name not in ("lookahead", "other tokenizer"):
        assert [text.steps for text in found] == [text.steps for text in whole]
    assert max(widths[:4]) == 4


SMALL = [[5, 17, 40, 8, 77, 23, 61], [5, 17, 40] * 3, [61, 23, 77, 8, 40, 17, 5] * 2, [9]]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "qwen3_moe"])
@pytest.mark.parametrize("name", WITHOUT_MODELS)
def test_a_batch_gives_the_targets_texts_greedy_and_sampled(name: str, family: str) -> None:
    target, make = random_target(family), WITHOUT_MODELS[name]
    texts = ending_early(target, SMALL, 50)
    greedy = decode_batch(target, make(), SMALL, 50)
    assert [text.token_ids for text in greedy] == texts
    assert any(step.num_accepted for text in greedy for step in text.steps)
    likeliest = Sampling(temperature=0.7, top_k=1)
    sampled = decode_batch(target, make(), SMALL, 50, likeliest, [3, 4, 5, 6])
    assert [text.token_ids for text in sampled] == texts
    assert [text.steps for text in sampled] == [text.steps for text in greedy]


def test_of_long_texts_a_draft_model_keeps_the_last_states_alone(monkeypatch) -> None:
    model, asked = small_target(), []
    expected = commit_tokens(model, model.new_cache(3), LONG[:3])
    monkeypatch.setattr(EmbeddingsAndOutputHead, "prefill_chunk", 4)
    joined = TargetOutput.concat
    monkeypatch.setattr(TargetOutput, "concat", lambda each: asked.append(each) or joined(each))
    found = commit_tokens(model, model.new_cache(3), LONG[:3])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert asked == []
