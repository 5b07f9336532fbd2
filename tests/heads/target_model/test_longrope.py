"""Texts on both sides of a LongRoPE switch, and across it, are read as each is alone."""

import pytest
import torch
from toys import eagle_head, endless_target, noisy_head, random_model, random_target

from conf.settings.eagle import EagleForm
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.engine import NoDraft, Request, decode, decode_batch, decode_many
from eval.measure.replay import replay_drafter, replay_response
from heads.decoding.tree import DynamicShape, Tree
from heads.eagle.network import EagleDrafter
from heads.layers.documents import Documents
from heads.medusa import MedusaDrafter
from heads.target_model.check import check_target_support
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from heads.target_model.model import prefill as read_rows
from tests.eval.decode.test_engine import Oracle

SWITCH, NUM_NEW = 24, 23
HALF = 8  # of a head
LONGROPE = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": SWITCH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": SWITCH,
        "short_factor": [1.0 + 0.1 * n for n in range(2 * HALF)],
        "long_factor": [3.0 + 2.0 * n for n in range(2 * HALF)],
    },
}
TREE = Tree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0], [1, 1, 1]])


@pytest.fixture(scope="module")
def target() -> Target:
    return endless_target("phi3", **LONGROPE)


def ids(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(
        3, 90, (num_tokens,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


PROMPTS = [ids(5), ids(SWITCH - 3, 1), ids(SWITCH, 2), ids(SWITCH + 9, 3)]
"""The first three cross the switch as they go on."""


def by_whole_passes(prompt: list[int]) -> list[int]:
    """The greedy text of a model that nobody has touched, read anew for every token."""
    model, text = random_model("phi3", **LONGROPE), list(prompt)
    with torch.no_grad():
        for _ in range(NUM_NEW):
            text.append(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax().item())
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return [by_whole_passes(prompt) for prompt in PROMPTS]


def test_the_switch_is_known_and_matters(target: Target) -> None:
    assert target.long_rope.switch == SWITCH
    assert random_target("llama").long_rope.switch is None
    text = ids(SWITCH + 1)
    short, long = (target.encode_text(text[: SWITCH + n]).hidden_states[0, 5] for n in (0, 1))
    assert (short - long).abs().max() > 0.1


def test_its_own_check_passes_on_both_sides(target: Target) -> None:
    check_target_support(target)
    assert target.needs_masks == ""


def test_documents_of_both_kinds_are_read_as_each_alone(target: Target) -> None:
    lengths = [SWITCH, SWITCH + 1, 6, SWITCH + 30, 2]
    texts = [ids(length, length) for length in lengths]
    numbers = torch.cat([torch.full((length,), n) for n, length in enumerate(lengths)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = torch.cat([torch.tensor(text) for text in texts])
    found = target.encode_documents(
        packed[None], positions[None], Documents.from_ids(numbers[None])
    )
    own = random_model("phi3", **LONGROPE)
    for text, states in zip(texts, found.hidden_states[0].split(lengths), strict=True):
        expected = own(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_texts_that_cross_it_are_the_targets_and_replayed(
    target: Target, texts: list[list[int]], number: int
) -> None:
    prompt, text = PROMPTS[number], texts[number]
    for drafter in (NoDraft(), PromptLookup(3), Oracle([text], [prompt], TREE)):
        assert decode(target, drafter, prompt, NUM_NEW).token_ids == text
    head = noisy_head(target)
    decoded = decode(target, MedusaDrafter(head, TREE), prompt, NUM_NEW)
    assert decoded.token_ids == text
    assert replay_response(target, head, TREE, prompt, text) == decoded.steps
    assert sum(step.num_accepted for step in decoded.steps) > 0


def test_a_batch_of_short_and_long_texts_gives_what_each_gives_alone(
    target: Target, texts: list[list[int]]
) -> None:
    head = noisy_head(target)
    for drafter in (NoDraft(), MedusaDrafter(head, TREE), Oracle(texts, PROMPTS, TREE)):
        found = decode_batch(target, drafter, PROMPTS, NUM_NEW)
        assert [each.token_ids for each in found] == texts
    requests = [Request(prompt) for prompt in PROMPTS]
    found = decode_many(target, lambda _: MedusaDrafter(head, TREE), requests, NUM_NEW, 2)
    assert [each.token_ids for each in found] == texts


def test_keys_are_computed_anew_once(target: Target, monkeypatch) -> None:
    made, new_cache = [], target.new_cache

    def counted(num_texts: int) -> object:
        made.append(num_texts)
        return new_cache(num_texts)

    monkeypatch.setattr(target, "new_cache", counted)
    decode_batch(target, NoDraft(), PROMPTS, NUM_NEW)
    assert made == [4, 1, 1, 1]


def test_nothing_is_accepted_across_it(target: Target, texts: list[list[int]]) -> None:
    """A draft of all that follows ends where the text becomes long, and goes on from there."""
    prompt, text = PROMPTS[1], texts[1]
    chain = Tree.from_paths([[1] * depth for depth in range(1, 8)])
    steps = decode(target, Oracle([text], [prompt], chain), prompt, NUM_NEW).steps
    # 21 tokens were read, and the root is the 22nd: two more, and the bonus token, are short.
    assert [step.num_accepted for step in steps][:2] == [2, 7]


def test_replay_of_features_equals_decoding() -> None:
    target = endless_target("phi3", **LONGROPE, num_hidden_layers=4)
    head = eagle_head(target, EagleForm.eagle3, num_updates=10, num_texts=2)
    for prompt in PROMPTS[1::2]:  # across the switch, and beyond it
        found = decode(target, EagleDrafter(head, 3), prompt, NUM_NEW)
        assert (
            replay_response(target, head, Tree.make_chain(3), prompt, found.token_ids)
            == found.steps
        )
        found = decode(target, head.drafter(head, DynamicShape(3, 3, 8)), prompt, NUM_NEW)
        output = target.encode_response(prompt, found.token_ids, head.taps)
        tree = head.drafter(head, DynamicShape(3, 3, 8))
        assert replay_drafter(tree, output, prompt, found.token_ids) == (found.steps, found.drafted)


@torch.no_grad()
def test_a_response_is_read_as_decoding_read_it(target: Target, texts: list[list[int]]) -> None:
    prompt, text = PROMPTS[0], texts[0]
    whole = target.encode_text(prompt + text[:-1]).hidden_states
    found = target.encode_response(prompt, text).hidden_states
    short = target.encode_text((prompt + text)[:SWITCH]).hidden_states
    assert torch.equal(found, torch.cat([short, whole[:, SWITCH:]], dim=1))
    assert (found - whole)[:, :SWITCH].abs().max() > 1e-2
    long = PROMPTS[-1]
    assert torch.equal(
        target.encode_response(long, texts[-1]).hidden_states,
        target.encode_text(long + texts[-1][:-1]).hidden_states,
    )


def test_a_long_prompt_in_parts_is_long_from_its_first(target: Target, monkeypatch) -> None:
    rows = [PROMPTS[3], PROMPTS[0]]
    whole = read_rows(target, target.new_cache(2), rows).hidden_states
    monkeypatch.setattr(EmbeddingsAndOutputHead, "prefill_chunk", 8)
    found = read_rows(target, target.new_cache(2), rows).hidden_states
    for one, other, row in zip(found, whole, rows, strict=True):
        torch.testing.assert_close(one[: len(row)], other[: len(row)], rtol=1e-3, atol=1e-4)
