"""What every drafter must do, whoever it is and whatever comes before and beside its texts."""

from collections import Counter
from functools import cache

import pytest
import torch
from drafters import (
    DRAWN,
    EVERY_DRAFTER,
    SHORT_WINDOW,
    WINDOW,
    fits,
    positions_read,
    small_models,
    small_target,
    text_probs,
)
from toys import eagle_head, endless_target, texts

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from eval.decode.drafters.draft_model import commit_tokens
from eval.decode.drafters.self_speculation import SelfDraft
from eval.decode.engine import Generation, NoDraft, Request, decode, decode_batch, decode_many
from eval.measure.prompts import Prompt, check_prompt
from eval.measure.replay import replay_response
from heads.decoding.sampling import GREEDY, Sampling
from heads.decoding.tree import Tree
from heads.eagle.network import EagleDrafter
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target, TargetOutput

LONG, SHORT = [61, 23, 77, 8, 40, 17, 5], [90, 17, 240, 8, 77, 123, 61]
LEARNT = [223, 116, 129, 278]
# In parts of four, they end in the second, the first and the last of four parts.
PROMPTS = [SHORT, [5], LONG * 2, [105, 17], LEARNT, [77, 8]]
REQUESTS = [Request(ids, seed) for seed, ids in enumerate(PROMPTS, start=7)]
WARM = Sampling(temperature=0.7, top_k=8)
NEAR = LONG * 3
OF_BOTH = {"heuristic", "confidence"}
"""Their rules are those of the drafter "both", and none but these."""


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """Its texts end where they come to one of a few tokens, two with their first."""
    found = small_target()
    stops = [286, 132, 210, 119, 149]
    monkeypatch.setattr(found.model.generation_config, "eos_token_id", stops)
    return found


def alone(target: Target, name: str, how: Sampling) -> list[Generation]:
    return [
        decode(target, EVERY_DRAFTER[name](how, [each.seed]), each.prompt_ids, 8, how, each.seed)
        for each in REQUESTS
    ]


@cache
def answers() -> list[list[int]]:
    """The target's own, of several lengths."""
    texts = [text.token_ids for text in alone(small_target(), "none", GREEDY)]
    assert len(set(map(len, texts))) > 2
    return texts


def in_turns(target: Target, name: str, how: Sampling) -> list[Generation]:
    """Three at a time; where one ends, the next takes its place, and places are given up."""
    return decode_many(target, lambda seeds: EVERY_DRAFTER[name](how, seeds), REQUESTS, 8, 3, how)


@pytest.mark.parametrize("name", EVERY_DRAFTER)
def test_texts_are_the_targets_alone_in_anothers_place_and_with_prompts_in_parts(
    name: str, target: Target, monkeypatch
) -> None:
    own = alone(target, name, GREEDY)
    assert [text.token_ids for text in own] == answers()
    if name not in ("none", "other tokenizer"):  # whose model is another by chance
        assert any(step.num_accepted for text in own for step in text.steps)
    monkeypatch.setattr(EmbeddingsAndOutputHead, "prefill_chunk", 4)
    found = in_turns(target, name, GREEDY)
    assert [text.token_ids for text in found] == [text.token_ids for text in own]
    # These guess from the first part, translate what comes at a time, or learn from other texts.
    if name not in ("lookahead", "other tokenizer", "suffix", "hybrid", "recycling"):
        assert [text.steps for text in found] == [text.steps for text in own]


@pytest.mark.parametrize("name", [*sorted(DRAWN - OF_BOTH), "none", "medusa tree", "prompt lookup"])
def test_a_seed_gives_one_text_alone_and_in_anothers_place(name: str, target: Target) -> None:
    own, found = alone(target, name, WARM), in_turns(target, name, WARM)
    assert [(text.token_ids, text.steps) for text in found] == [
        (text.token_ids, text.steps) for text in own
    ]
    assert len({len(text.token_ids) for text in own}) > 1


@pytest.mark.parametrize("name", [*sorted(DRAWN - OF_BOTH), "medusa tree", "eagle tree"])
def test_sampled_texts_have_the_distribution_of_the_target(name: str) -> None:
    target, how, draws = small_target(), Sampling(3.0, top_k=4), 800
    seeds = range(draws)
    drafter = EVERY_DRAFTER[name](how, seeds)
    drawn = decode_batch(target, drafter, [LEARNT] * draws, 3, how, seeds)
    counts, probs = Counter(tuple(text.token_ids) for text in drawn), exact(how)
    assert fits(
        torch.tensor([*(counts.pop(text, 0) for text in probs), counts.total()]),
        torch.tensor([*probs.values(), 0.0]),
    )
    # So that drafts, and not the bonus alone, make the text.
    assert sum(step.num_accepted for text in drawn for step in text.steps) > draws / 20


@cache
def exact(how: Sampling) -> dict[tuple[int, ...], float]:
    return text_probs(small_target(), LEARNT, how, 3)


def test_of_long_texts_a_draft_model_keeps_the_last_states_alone(monkeypatch) -> None:
    model, asked = small_target(), []
    expected = commit_tokens(model, model.new_cache(3), PROMPTS[:3])
    monkeypatch.setattr(EmbeddingsAndOutputHead, "prefill_chunk", 4)
    joined = TargetOutput.concat
    monkeypatch.setattr(TargetOutput, "concat", lambda each: asked.append(each) or joined(each))
    found = commit_tokens(model, model.new_cache(3), PROMPTS[:3])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert [len(parts) for parts in asked] == [1]  # the row of documents


READ_BY = {
    "other tokenizer": "other",
    **dict.fromkeys(("eagle chain", "eagle tree"), "eagle"),
    **dict.fromkeys(("dflash tree", "dspark chain", "peagle chain", "peagle tree"), "blocks"),
    **dict.fromkeys(("draft chain", "draft tree", "draft gaps", "both"), "draft"),
}


@pytest.mark.parametrize("name", [name for name in EVERY_DRAFTER if name not in OF_BOTH])
def test_no_model_reads_beyond_its_window(name: str, monkeypatch) -> None:
    """Texts that end with the target's window, beyond that of whatever drafts; one ends at once."""
    target, make = small_target(), EVERY_DRAFTER[name]
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", 119)
    prompts, rest = [LONG * 4, LONG * 4 + SHORT, [5]], WINDOW - 35  # the second beyond by itself
    with positions_read() as furthest:
        found = decode(target, make(GREEDY, [1]), NEAR, WINDOW - len(NEAR))
        together = decode_batch(target, make(GREEDY, [1] * 3), prompts, rest)
    assert [found.token_ids, *(text.token_ids for text in together)] == at_the_window()
    assert WINDOW - 2 <= furthest.pop("target") < WINDOW
    assert furthest == ({READ_BY[name]: SHORT_WINDOW - 1} if name in READ_BY else {})
    length = len(NEAR)  # up to the root, which stands there
    for step, path in zip(found.steps, found.paths, strict=True):
        assert length + len(path) < WINDOW
        # The last draft of a model follows the last token that it can read.
        assert not path or name not in READ_BY or length + len(path) <= SHORT_WINDOW + 1
        length += step.num_emitted


@cache
def at_the_window() -> list[list[int]]:
    """The target's texts behind these prompts."""
    asked = [(NEAR, 27), (LONG * 4, 13), (LONG * 4 + SHORT, 13), ([5], 13)]
    return [decode(small_target(), NoDraft(), *each).token_ids for each in asked]


@pytest.mark.parametrize("name", ["draft chain", "other tokenizer"])
def test_what_no_draft_can_follow_is_not_read(name: str) -> None:
    target, model = small_target(), small_models()[1 if name == "draft chain" else 2]
    sizes: list[int] = []
    hook = model.decoder.register_forward_pre_hook(
        lambda _module, _args, inputs: sizes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    prompt = (LONG * 6)[: SHORT_WINDOW - 2]
    decode(target, EVERY_DRAFTER[name](GREEDY, [1]), prompt, 2)
    assert sum(sizes) == SHORT_WINDOW  # all that can be read, in as many passes as that takes
    sizes.clear()
    decode_batch(target, EVERY_DRAFTER[name](GREEDY, [1, 1]), [[105, 17], [*prompt, *SHORT]], 2)
    hook.remove()
    # The text beside it, read in the same row, has room and gets a whole draft.
    beside, num_drafted = (3, 4) if name == "draft chain" else (4, 3)
    assert sizes == [SHORT_WINDOW + beside] + [1] * num_drafted


def test_a_window_is_filled_to_its_last_token() -> None:
    """Every draft is right; the last one has as many tokens as there is room."""
    target, last = small_target(), WINDOW - len(SHORT)
    found = decode(target, SelfDraft(target, (), 5), SHORT, last)
    assert [len(path) for path in found.paths] == [5] * 6 + [4]
    with pytest.raises(
        InputError,
        match=r"rows:3, turn 1: 7 prompt tokens and max_new_tokens=42 are 49, above the target's "
        r"window of 48; lower max_new_tokens or num_turns, or set data.on_bad_row=skip",
    ):
        check_prompt(target, Prompt("all", SHORT, location="rows:3, turn 1"), last + 1)
    check_prompt(target, Prompt("all", SHORT), last)


def test_replay_knows_the_window_of_a_head() -> None:
    target = endless_target()
    head, counts = eagle_head(target, EagleForm.eagle1, num_texts=3), []
    for head.max_positions in (20, 256):
        steps = []
        for text in texts(target, 3, 10):  # which the head has learnt
            found = decode(target, EagleDrafter(head, 4), text, 30)
            chain = Tree.make_chain(4)
            assert replay_response(target, head, chain, text, found.token_ids) == found.steps
            steps += found.steps
        assert max(step.num_accepted for step in steps) == 4
        counts.append(len(steps))
    assert counts[0] > counts[1]
