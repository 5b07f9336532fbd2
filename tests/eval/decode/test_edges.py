"""The end of a window, for every drafter."""

import pytest
from drafters import (
    EVERY_DRAFTER,
    SHORT_WINDOW,
    WINDOW,
    positions_read,
    small_models,
    small_target,
)
from toys import eagle_head, endless_target, texts

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from eval.decode.drafters.self_speculation import SelfDraft
from eval.decode.engine import NoDraft, decode, decode_batch
from eval.measure.prompts import Prompt, check_prompt
from eval.measure.replay import replay_response
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree
from heads.eagle.network import EagleDrafter

PROMPTS = [[90, 17, 240, 8, 77, 123, 61], [105, 17], [61, 23, 77, 8, 40, 17, 5] * 2]
READ_BY = {
    "eagle chain": "eagle",
    "eagle tree": "eagle",
    "other tokenizer": "other",
    "dflash tree": "blocks",
    "dspark chain": "blocks",
    "peagle chain": "blocks",
    "peagle tree": "blocks",
} | dict.fromkeys(("draft chain", "draft tree", "heuristic", "confidence", "both"), "draft")


@pytest.mark.parametrize("name", EVERY_DRAFTER)
def test_no_model_reads_beyond_its_window(name: str) -> None:
    """Texts that end with the target's window, beyond that of whatever drafts."""
    target, make = small_target(), EVERY_DRAFTER[name]
    prompts = [PROMPTS[0], PROMPTS[2] * 2, PROMPTS[2] * 2 + PROMPTS[0]]  # the last beyond by itself
    rooms = [WINDOW - len(prompt) for prompt in prompts]
    columns = list(zip(prompts, rooms, strict=True))
    texts = [decode(target, NoDraft(), prompt, room).token_ids for prompt, room in columns]
    with positions_read() as furthest:
        alone = [decode(target, make(GREEDY, [1]), prompt, room) for prompt, room in columns]
        together = decode_batch(target, make(GREEDY, [1, 1, 1]), prompts, rooms[-1])
    assert [found.token_ids for found in alone] == texts
    assert [found.token_ids for found in together] == [text[: rooms[-1]] for text in texts]
    assert WINDOW - 2 <= furthest.pop("target") < WINDOW
    assert furthest == ({READ_BY[name]: SHORT_WINDOW - 1} if name in READ_BY else {})
    for prompt, found in zip(prompts, alone, strict=True):
        length = len(prompt)  # up to the root, which stands there
        for step, path in zip(found.steps, found.paths, strict=True):
            assert length + len(path) < WINDOW
            # The last draft of a model follows the last token that it can read.
            assert not path or name not in READ_BY or length + len(path) <= SHORT_WINDOW + 1
            length += step.num_emitted


@pytest.mark.parametrize("name", ["draft chain", "other tokenizer"])
def test_what_no_draft_can_follow_is_not_read(name: str) -> None:
    target, models = (
        small_target(),
        dict(zip(("eagle", "draft", "other"), small_models(), strict=True)),
    )
    sizes: list[int] = []
    hook = models[READ_BY[name]].decoder.register_forward_pre_hook(
        lambda _module, _args, inputs: sizes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    prompt = (PROMPTS[2] * 3)[: SHORT_WINDOW - 2]
    decode(target, EVERY_DRAFTER[name](GREEDY, [1]), prompt, 2)
    assert sum(sizes) == SHORT_WINDOW  # all that can be read, in as many passes as that takes
    sizes.clear()
    prompts = [PROMPTS[1], [*prompt, *PROMPTS[0]]]
    decode_batch(target, EVERY_DRAFTER[name](GREEDY, [1, 1]), prompts, 2)
    hook.remove()
    assert max(sizes) == SHORT_WINDOW


def test_a_window_is_filled_to_its_last_token() -> None:
    """Every draft is right; the last one has as many tokens as there is room."""
    target = small_target()
    prompt, last = PROMPTS[0], WINDOW - len(PROMPTS[0])
    found = decode(target, SelfDraft(target, (), 5), prompt, last)
    assert [len(path) for path in found.paths] == [5] * 6 + [4]
    with pytest.raises(
        InputError,
        match=r"rows:3, turn 1: 7 prompt tokens and max_new_tokens=42 are 49, above the target's "
        r"window of 48; lower max_new_tokens or num_turns, or set data.on_bad_row=skip",
    ):
        check_prompt(target, Prompt("all", prompt, location="rows:3, turn 1"), last + 1)
    check_prompt(target, Prompt("all", prompt), last)


def test_replay_knows_the_window_of_a_head() -> None:
    target = endless_target()
    head, counts = eagle_head(target, EagleForm.eagle1), []
    for head.max_positions in (20, 256):
        steps = []
        for text in texts(target, 6, 10):
            found = decode(target, EagleDrafter(head, 4), text, 30)
            assert (
                replay_response(target, head, Tree.make_chain(4), text, found.token_ids)
                == found.steps
            )
            steps += found.steps
        assert {step.num_accepted for step in steps} == {0, 1, 2, 3, 4}
        counts.append(len(steps))
    assert counts[0] > counts[1]
