"""A target's generation config is followed, and texts end, as in `generate`."""

import copy
from collections import Counter

import pytest
import torch
from drafters import EVERY_DRAFTER, fits, small_target, text_probs
from toys import random_target, tree_of
from transformers import GenerationConfig

from conf.errors import InputError
from eval.decode.engine import NoDraft, Step, decode, decode_batch
from eval.decode.generation_config import (
    LogitsProcessors,
    StopRules,
    apply_generation_config,
    build_node_rows,
    parse_logits_settings,
)
from eval.decode.hf_generate import hf_generate
from heads.decoding.drafting import PAD, TreeLayout, build_tree_layout
from heads.decoding.sampling import GREEDY, Sampling
from heads.target_model.model import Target

PROMPTS = [[90, 17, 240, 8, 77, 123, 61], [105, 17], [61, 23, 77, 8, 40, 17, 5] * 2]
ASKED = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[142], [241, 241]],
    "suppress_tokens": [213, 222],
    "sequence_bias": [[[149], -8.0], [[241, 241], -5.0]],
}
RULES = {name: {name: value} for name, value in ASKED.items()}
RULES["all"] = {**ASKED, "begin_suppress_tokens": [8]}
TREES = ["none", "medusa tree", "eagle tree", "draft tree", "lookahead", "self draft"]


@pytest.fixture
def target() -> Target:
    """Its text comes back to tokens that it has said, so that rules have work."""
    return small_target()


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target()
    for name in ("logits_processing", "stop_strings", "ignores_stops", "generation_config"):
        monkeypatch.setattr(target, name, getattr(target, name))
    monkeypatch.setattr(target.model, "generation_config", GenerationConfig())


def asks(target: Target, **settings: object) -> None:
    target.generation_config = target.model.generation_config
    target.generation_config.update(**settings)
    target.logits_processing = parse_logits_settings(target)


@pytest.mark.parametrize(
    ("name", "drafters"),
    [
        (name, TREES if name == "no_repeat_ngram_size" else ["none", "medusa tree"])
        for name in RULES
    ],
)
def test_generate_and_every_drafter_follow_the_generation_config(
    target: Target, name: str, drafters: list[str]
) -> None:
    """A rule sees nodes and texts, whoever drafted them."""
    plain = [text.token_ids for text in decode_batch(target, NoDraft(), PROMPTS, 16)]
    asks(target, **RULES[name])
    alone = [hf_generate(target, [prompt], 16, GREEDY, 0)[0].token_ids for prompt in PROMPTS]
    assert alone != plain
    for drafter in drafters:
        found = decode_batch(target, EVERY_DRAFTER[drafter](GREEDY, [1, 2, 3]), PROMPTS, 16)
        assert [text.token_ids for text in found] == alone


def test_some_tokens_do_not_begin_a_text(target: Target) -> None:
    first, prompt = [241], PROMPTS[2]
    assert decode(target, NoDraft(), prompt, 1).token_ids == first
    asks(target, begin_suppress_tokens=first)
    expected = hf_generate(target, [prompt], 16, GREEDY, 0)[0].token_ids
    assert expected.index(first[0]) > 0
    assert decode(target, NoDraft(), prompt, 16).token_ids == expected


def test_sampled_text_has_the_distribution_of_rules_and_min_p(target: Target) -> None:
    asks(target, repetition_penalty=3.0, no_repeat_ngram_size=2)
    how, draws, prompt = Sampling(8.0, top_k=4, min_p=0.05), 1500, PROMPTS[2]
    drafter = EVERY_DRAFTER["draft tree"](how, range(draws))
    drawn = decode_batch(target, drafter, [prompt] * draws, 2, how, range(draws))
    counts = Counter(tuple(text.token_ids) for text in drawn)
    exact = text_probs(target, prompt, how, 2, scored_by_generate)
    assert set(counts) <= set(exact)
    assert len(exact) > 8
    found = torch.tensor([counts[text] for text in exact])
    assert fits(found, torch.tensor([*exact.values()]))
    assert sum(step.num_accepted for text in drawn for step in text.steps) > draws / 20


def scored_by_generate(target: Target, ids: list[int], how: Sampling) -> torch.Tensor:
    """[V] after `ids`, by `generate`'s own scores."""
    settings = GenerationConfig(
        do_sample=True, temperature=how.temperature, top_k=how.top_k, min_p=how.min_p,
        max_new_tokens=1, output_scores=True, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    row = torch.tensor([ids])
    output = target.model.generate(
        row, attention_mask=torch.ones_like(row), generation_config=settings
    )
    return output.scores[0][0].softmax(-1)


def test_a_node_stands_behind_its_text_and_its_path() -> None:
    history, committed = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[3], [1]])
    layout = build_tree_layout(tree_of([0, 0, 2]), torch.device("cpu"))
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, PAD, 4]])
    assert build_node_rows(history, committed, tokens, layout, 9).tolist() == [
        [
            [9, 9, 9, 5, 6, 7, 1],
            [9, 9, 5, 6, 7, 1, 2],
            [9, 9, 5, 6, 7, 1, 3],
            [9, 5, 6, 7, 1, 3, 4],
        ],
        [
            [9, 9, 9, 9, 9, 8, 1],
            [9, 9, 9, 9, 8, 1, 2],
            [9, 9, 9, 9, 8, 1, 9],
            [9, 9, 9, 8, 1, 9, 4],
        ],
    ]
    own = TreeLayout.from_parents(torch.tensor([[0, 0, 2], [0, 0, 2]]), 2)
    assert torch.equal(
        build_node_rows(history, committed, tokens, own, 9),
        build_node_rows(history, committed, tokens, layout, 9),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4, "repetition_penalty": 1.1}, "asks for num_beams=4, which drafts cannot"),
        ({"min_new_tokens": 3, "guidance_scale": 2.0}, "guidance_scale=2.0, min_new_tokens=3, wh"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0: .*; plain=true ignores it"),
    ],
)
def test_what_cannot_be_asked_of_a_draft_is_refused(settings: dict, message: str) -> None:
    target = random_target()
    target.generation_config.update(**settings)
    with pytest.raises(InputError, match=f"target.path=llama: its generation config .*{message}"):
        parse_logits_settings(target)


def test_what_changes_nothing_is_not_asked_for() -> None:
    target = random_target()
    same = {"repetition_penalty": 1.0, "num_beams": 1, "min_length": 0, "bad_words_ids": None}
    target.generation_config.update(**same, temperature=0.6, top_p=0.9, top_k=20, min_p=0.1)
    assert parse_logits_settings(target) == {}
    assert not LogitsProcessors({}, [2]).first


def test_nothing_else_of_a_generation_config_reaches_generate(target: Target) -> None:
    """Without a cache `generate` reads its whole text for each token; others end in a traceback."""
    whole = decode(target, NoDraft(), PROMPTS[0], 12).token_ids
    ours = GenerationConfig(
        use_cache=False, cache_implementation="static", return_dict_in_generate=True,
        is_assistant=True, stop_strings="no such text",
    )  # fmt: skip
    target.generation_config = target.model.generation_config = ours
    apply_generation_config(target)
    widths: list[int] = []
    hook = target.embedding.register_forward_pre_hook(lambda _, a: widths.append(a[0].shape[1]))
    assert hf_generate(target, PROMPTS[:1], 12, GREEDY, 0)[0].token_ids == whole
    hook.remove()
    assert widths == [7] + [1] * 11
    [drafted] = hf_generate(target, PROMPTS[:1], 12, GREEDY, 0, prompt_lookup_num_tokens=3)
    assert drafted.token_ids == whole
    # What is stored of a target says what its files do.
    assert (ours.use_cache, ours.stop_strings) == (False, "no such text")


def test_a_text_ends_with_a_string(target: Target) -> None:
    prompts = PROMPTS[1::-1]
    whole = decode(target, NoDraft(), prompts[0], 30).token_ids
    pieces = [target.tokenizer.decode([token]) for token in whole]
    assert pieces[17:19] == ["=", " there"]
    target.stop_strings = ("= th", "no such text")
    for name in ("none", "medusa tree", "lookahead"):
        found = decode_batch(target, EVERY_DRAFTER[name](GREEDY, [1, 2]), prompts, 30)[0]
        assert found.token_ids == whole[:19]
        assert sum(step.num_emitted for step in found.steps) == 18
    passes: list[int] = []
    hook = target.decoder.register_forward_hook(lambda *_: passes.append(1))
    generated = hf_generate(target, prompts[:1], 30, GREEDY, 0)[0]
    hook.remove()
    assert (generated.token_ids, len(generated.steps), len(passes)) == (whole[:19], 18, 19)


def test_a_string_that_begins_in_the_prompt_ends_nothing(target: Target) -> None:
    """Such as a line break of the prompt's and the first word behind it."""
    asked = [9, 8]
    whole = decode(target, NoDraft(), asked, 12).token_ids
    assert target.tokenizer.decode([*asked, whole[0]]) == "&% thanks"
    target.stop_strings = ("% th",)
    assert decode(target, NoDraft(), asked, 12).token_ids == whole
    for settings in ({}, {"prompt_lookup_num_tokens": 3}):
        assert hf_generate(target, [asked], 12, GREEDY, 0, **settings)[0].token_ids == whole


def test_what_transformers_writes_beyond_a_string_is_no_step(target: Target) -> None:
    """Chains of 3, always right: 4 tokens with the prompt's own pass, then 4 a pass."""
    assistant = copy.deepcopy(target.model)
    how = assistant.generation_config
    how.num_assistant_tokens, how.num_assistant_tokens_schedule = 3, "constant"
    how.assistant_confidence_threshold = 0.0
    whole = decode(target, NoDraft(), PROMPTS[1], 30).token_ids
    target.stop_strings = ("= th",)  # with token 19, inside the fourth pass
    [text] = hf_generate(target, PROMPTS[1:2], 30, GREEDY, 0, assistant_model=assistant)
    assert text.token_ids == whole[:19]
    assert text.steps == [Step(3, 4, 15), Step(3, 4, 11), Step(3, 4, 7), Step(2, 3, 3)]
    assert text.drafted == [3, 3, 3, 3]


def test_stops_look_no_further_back_than_they_must() -> None:
    tokenizer = small_target().tokenizer
    ids = tokenizer("hello there, größe").input_ids
    stops = StopRules([], ["größe"], tokenizer)
    assert [n for n in range(1, len(ids) + 1) if stops.has_ended(ids[:n])] == [len(ids)]
    assert stops.cut_after_end(ids[:-2], [*ids[-2:], 5, 6]) == ids[-2:]
    assert stops.cut_after_end([], [*ids, 5]) == ids
    assert stops.cut_after_end([], ids[:-1]) == ids[:-1]
    assert StopRules([7, 9]).cut_after_end([1], [2, 9, 7]) == [2, 9]
    assert not StopRules([7]).has_ended([7, 8])


def test_stop_tokens_may_be_ignored(target: Target) -> None:
    whole = decode(target, NoDraft(), PROMPTS[0], 30).token_ids
    asks(target, eos_token_id=whole[9])
    short = whole[: whole.index(whole[9]) + 1]
    assert decode(target, NoDraft(), PROMPTS[0], 30).token_ids == short
    assert hf_generate(target, PROMPTS[:1], 30, GREEDY, 0)[0].token_ids == short
    target.ignores_stops = True
    for name in ("none", "lookahead"):
        assert decode(target, EVERY_DRAFTER[name](GREEDY, [1]), PROMPTS[0], 30).token_ids == whole
    assert hf_generate(target, PROMPTS[:1], 30, GREEDY, 0)[0].token_ids == whole


def test_a_run_says_itself_how_is_sampled(target: Target) -> None:
    asks(target, temperature=0.1, top_k=1, top_p=0.1, min_p=0.9)
    greedy = decode(target, NoDraft(), PROMPTS[0], 12).token_ids
    for how, same in ((Sampling(9.0), False), (Sampling(9.0, min_p=1.0), True)):
        found = hf_generate(target, PROMPTS[:1], 12, how, 0)[0].token_ids
        assert (found == greedy) == same
        assert (decode(target, NoDraft(), PROMPTS[0], 12, how).token_ids == greedy) == same
