"""Modes: which text a pass writes, tau of each, and what is said of those in which drafts fail."""

from pathlib import Path
from typing import Any

import pytest
from templates import CALLS, FAMILIES, LOOK, assistant, encoder
from toys import CHATML, random_target, tokenizer

from conf.command.clock import DecodingTimes
from conf.settings.data import Form, RowsConfig
from conf.settings.measure import SpeedupRun
from data.rows.records import Record, load_records
from data.templates.record_encoder import RecordEncoder
from data.templates.turns import find_turn
from eval.compare.methods import Method
from eval.compare.speedup_stats import summarise_speedup
from eval.compare.timing import PromptRun
from eval.decode.engine import Generation, Step
from eval.measure import modes
from eval.measure.acceptance_stats import PromptSteps
from eval.measure.measurement import Measurement
from eval.measure.modes import (
    build_mode_rows,
    classify_passes,
    compute_mode_figures,
    find_fallen_modes,
    find_text_spans,
    group_passes,
    list_modes,
)
from eval.measure.prompts import Prompt, format_unread_settings, render_first_turns
from heads.decoding.sampling import GREEDY

THINKS, CHANNELS = (
    Path(__file__).with_name(f"{name}.jinja").read_text() for name in ("thinks", "channels")
)
SETS = Path(modes.__file__).parent / "sets"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
TAGS = {"thinking": (("<think>", "</think>"),)}
HERMES = {"call_tags": ("<tool_call>", "</tool_call>"), "tools": [LOOK]}


@pytest.mark.parametrize(
    ("template", "kwargs", "thinking", "answer"),
    [
        (THINKS, {}, "<think>\nhow are you?\n</think>", "\n\nfine<|im_end|>"),
        (THINKS, {}, "<think>\nhow are you", ""),
        (THINKS, {}, "", "fine</think><|im_end|>"),
        (THINKS, {"opens": True}, "how are you?\n</think>", "\n\nfine<|im_end|>"),
        (THINKS, {"opens": True}, "how are", ""),
        (THINKS, {"enable_thinking": False}, "", "fine<|im_end|>"),
        (CHANNELS, {}, "[think]how are you?[/think]", "fine<|im_end|>"),
        (CHATML, {}, "", "fine<|im_end|>"),
    ],
)
def test_thinking_ends_with_what_the_template_puts_behind_it(
    template: str, kwargs: dict, thinking: str, answer: str
) -> None:
    made = tokenizer(template)
    prompt = render_first_turns([Record(HELLO, None, "here")], RecordEncoder(made, kwargs))[0]
    before, after = (made(text, add_special_tokens=False).input_ids for text in (thinking, answer))
    found = find_text_spans(prompt, before + after, made)
    assert found == ({"thinking": [[0, len(before)]]} if thinking else {})


class Letters:
    """A tokenizer with a token for each character."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


def divided(answer: str, **about: Any) -> list[tuple[str, str]]:
    """The spans of an answer, as texts in order."""
    found = find_text_spans(Prompt("all", [1], **about), [*map(ord, answer)], Letters())
    spans = sorted((low, high, kind) for kind, ranges in found.items() for low, high in ranges)
    return [(kind, answer[low:high]) for low, high, kind in spans]


@pytest.mark.parametrize(
    ("answer", "about", "spans"),
    [
        ("So:\n```python\na = 1\n```\nDone.", {}, [("code block", "```python\na = 1\n```")]),
        ("1. So\n   ~~~\n   a\n   ~~~\n2.", {}, [("code block", "   ~~~\n   a\n   ~~~")]),
        # A longer fence holds a shorter one; a fence that nothing closes goes to the end.
        ("````\n```\na\n```\n````\nb", {}, [("code block", "````\n```\na\n```\n````")]),
        ("```\na\n", {}, [("code block", "```\na\n")]),
        ("Write ```a``` or `b` there.", {}, []),
        ("```\na\n```\nor\n```\nb\n```", {},
         [("code block", "```\na\n```"), ("code block", "```\nb\n```")]),
        # What lies inside another span is of the outer kind.
        ("<think>a\n```\nb\n```\n</think>c", TAGS,
         [("thinking", "<think>a\n```\nb\n```\n</think>")]),
        ("```\n<think>\n```\n", TAGS, [("code block", "```\n<think>\n```\n")]),
        # Later thinking counts where it ends; the tag alone is prose.
        ("a <think>b</think> c", TAGS, [("thinking", "<think>b</think>")]),
        ("The tag <think> opens it.", TAGS, []),
        ("I look.\n<tool_call>\n{\"name\": 1}\n</tool_call>.", HERMES,
         [("tool call", '<tool_call>\n{"name": 1}\n</tool_call>')]),
        # As models write calls that do not keep to their template.
        ('{"name": "look", "arguments": {"at": "}"}} yes', HERMES,
         [("tool call", '{"name": "look", "arguments": {"at": "}"}}')]),
        ('{ "name": "look", "parameters": {"at": "O', HERMES,
         [("tool call", '{ "name": "look", "parameters": {"at": "O')]),
        ('```json\n[{"name": "look",\n "arguments": {}}]\n```\n', HERMES,
         [("tool call", '```json\n[{"name": "look",\n "arguments": {}}]\n```\n')]),
        ("```json\n{\"at\": 1}\n```", HERMES, [("code block", "```json\n{\"at\": 1}\n```")]),
        # Without tools nothing is a call.
        ('<tool_call>{"name": "look", "arguments": {}}</tool_call>', {**HERMES, "tools": None}, []),
    ],
)  # fmt: skip
def test_texts_are_told_apart(
    answer: str, about: dict[str, Any], spans: list[tuple[str, str]]
) -> None:
    assert divided(answer, **about) == spans


@pytest.mark.parametrize(
    ("tokens", "span"),
    [
        (["ab", "\n`", "``", "\nc", "\n`", "``", "\nd"], [1, 6]),
        (["a\n", "``", "`\n", "c\n", "``", "`\n", "d"], [1, 6]),
    ],
)
def test_a_token_across_a_border_belongs_to_the_span(tokens: list[str], span: list[int]) -> None:
    class Pieces:
        def decode(self, ids: list[int], **_: object) -> str:
            return "".join(tokens[number] for number in ids)

    prompt = Prompt("all", [0])
    assert find_text_spans(prompt, range(len(tokens)), Pieces()) == {"code block": [span]}


def texts_of(prompt: Prompt, answer: str, tokenizer) -> list[tuple[str, str]]:
    """The spans of an answer, as texts."""
    ids = tokenizer(answer, add_special_tokens=False).input_ids
    return [
        (kind, tokenizer.decode(ids[low:high], clean_up_tokenization_spaces=False))
        for kind, ranges in find_text_spans(prompt, ids, tokenizer).items()
        for low, high in ranges
    ]


@pytest.mark.parametrize(
    "family",
    [name for name, family in FAMILIES.items() if family.call and name != "functionary-3.2"],
)
def test_a_call_is_found_in_the_notation_of_each_family(family: str) -> None:
    """But of Functionary 3.2, which has no sign before a tool's name."""
    own = encoder(family)
    [prompt] = render_first_turns([Record(HELLO, None, "here", tools=[LOOK])], own)
    template = own.build_template({}, [LOOK])
    written = find_turn([*HELLO, assistant(CALLS)], template, [LOOK]).written
    call = FAMILIES[family].call.strip()
    read = own.tokenizer.decode(prompt.token_ids).rstrip()
    opened = [end for begin, end in prompt.thinking if read.endswith(begin)]
    thought = f"Hm.{opened[0]}" if opened else ""
    *before, (kind, text) = texts_of(prompt, thought + written, own.tokenizer)
    assert (kind, call in text) == ("tool call", True)
    assert before == ([("thinking", thought)] if opened else [])


SPACED = '<tool_call>{ "name" : "look", "arguments": {"at": "Oslo"}}</tool_call>'


@pytest.mark.parametrize(
    ("family", "call"),
    [
        *(
            (name, FAMILIES[name].call)
            for name in ("qwen2.5", "qwen3-coder", "exaone-4", "glm-5", "kimi-k2", "deepseek-v3.1")
        ),
        ("qwen2.5", SPACED),
    ],
)
def test_a_call_ends_with_what_the_template_puts_behind_it(family: str, call: str) -> None:
    own = encoder(family)
    [prompt] = render_first_turns([Record(HELLO, None, "here", tools=[LOOK])], own)
    thought = "Hm.</think>" if family == "glm-5" else ""  # its prompt opens the thinking
    *_, found = texts_of(prompt, f"{thought}{call} Done.", own.tokenizer)
    assert found == ("tool call", call)


def test_the_end_of_an_answer_is_of_the_text_before_it() -> None:
    made = tokenizer(CHATML)
    prompt = Prompt("all", [5], tools=[LOOK])
    call = '{"name": "look", "arguments": {}}'
    ends = {" \n<|im_end|>": f"{call} \n<|im_end|>", " Bye.<|im_end|>": call}
    for end, text in ends.items():
        assert texts_of(prompt, call + end, made) == [("tool call", text)]
    assert texts_of(prompt, "<|im_end|>", made) == []


def test_a_pass_belongs_to_the_text_of_its_first_token() -> None:
    spans = {"thinking": [[0, 4]], "code block": [[6, 7], [9, 12]]}
    # Passes begin at tokens 1, 3, 6, 7 and 9.
    written = ["thinking", "thinking", "code block", "prose", "code block"]
    assert classify_passes([2, 3, 1, 2, 3], spans) == written
    assert classify_passes([1, 1], {}) == ["prose", "prose"]


def row(
    dialogue: int, accepted: list[int], spans: dict[str, list[list[int]]], **about: Any
) -> dict[str, Any]:
    steps = [Step(n, n + 1, 99) for n in accepted]
    drafted = [4 * (n > 0) for n in accepted]
    given = {"category": "all", "prompt_tokens": 9, **about}
    return PromptSteps(
        steps=steps, drafted=drafted, dialogue=dialogue, spans=spans, **given
    ).build_row()


def test_passes_are_grouped_by_every_mode() -> None:
    rows = [
        row(0, [1, 0, 3], {"code block": [[3, 9]]}, category="b", prompt_tokens=2_000),
        row(0, [2], {}, category="b", turn=2),
        row(1, [4, 1], {"thinking": [[0, 4]]}, category="a"),
    ]
    found = {
        mode: {
            value: [(each["dialogue"], each["accepted"], each["drafted"]) for each in own]
            for value, own in values.items()
        }
        for mode, values in group_passes(rows).items()
    }
    first, second, third = (0, [1, 0, 3], [4, 0, 4]), (0, [2], [4]), (1, [4, 1], [4, 4])
    assert found == {
        "category": {"a": [third], "b": [first, second]},
        "prompt length": {"<1k": [second, third], "2k": [first]},
        "turn": {"1": [first, third], "2": [second]},
        "thinking": {"off": [first, second], "on": [third]},
        "text": {
            "thinking": [(1, [4], [4])],
            "code block": [(0, [0, 3], [0, 4])],
            "prose": [(0, [1], [4]), (0, [2], [4]), (1, [1], [4])],
        },
    }
    assert [[*values] for values in found.values()][1:] == [
        ["<1k", "2k"], ["1", "2"], ["off", "on"], ["thinking", "code block", "prose"],
    ]  # fmt: skip
    conditions = [{**each, "condition": str(9 - n)} for n, each in enumerate(rows)]
    assert [*group_passes(conditions)["condition"]] == ["9", "8", "7"]
    # Files of earlier versions do not say what an answer holds.
    old = [{key: value for key, value in rows[0].items() if key != "spans"}]
    assert group_passes(old).keys() == {"category", "prompt length", "turn"}


def test_figures_of_a_mode_by_hand() -> None:
    rows = [
        row(0, [1, 0, 3], {"code block": [[3, 9]]}),
        row(0, [2], {}, turn=2),
        row(1, [2], {"code block": [[0, 9]]}),
    ]
    found = compute_mode_figures(rows, seed=0)
    assert found.keys() == {"turn", "thinking", "text"}
    code, prose = found["text"].values()
    # Of the first dialogue passes of 1 and 4 tokens, of the second one of 3; one has no draft.
    assert code == {
        "tau": 8 / 3, "tau_ci95": (2.5, 3.0), "per_draft": 1 + 5 / 2, "num_dialogues": 2,
        "num_prompts": 2, "num_tokens": 8,
    }  # fmt: skip
    assert prose == {
        "tau": 2.5, "tau_ci95": None, "per_draft": 2.5, "num_dialogues": 1, "num_prompts": 2,
        "num_tokens": 5,
    }  # fmt: skip
    assert compute_mode_figures(rows, 0, left_out=["text"]).keys() == {
        "category", "prompt length", "turn", "thinking",
    }  # fmt: skip


def figures(tau: float, **by_text: tuple[float, float, int]) -> dict[str, Any]:
    """Figures of a result; of each text tau, the upper end of its interval, and its dialogues."""
    rows = {
        text.replace("_", " "): {
            "tau": value, "tau_ci95": [1.0, high], "num_dialogues": number,
        }
        for text, (value, high, number) in by_text.items()
    }  # fmt: skip
    return {"tau": tau, "by_category": {}, "by_mode": {"text": rows}}


def test_modes_in_which_drafts_fail_are_named() -> None:
    prose = (3.2, 3.4, 20)
    found = find_fallen_modes(figures(3.0, tool_call=(1.75, 2.0, 8), prose=prose))
    assert found == ["text: tool call 0.75 (0.00-1.00, 8 dialogues)"]
    # The interval reaches above half, or rests on few dialogues, or there is none.
    assert not find_fallen_modes(figures(3.0, tool_call=(1.75, 2.01, 8), prose=prose))
    assert not find_fallen_modes(figures(3.0, tool_call=(1.75, 1.9, 7), prose=prose))
    alone = figures(3.0, tool_call=(1.75, 1.9, 8), prose=prose)
    alone["by_mode"]["text"]["tool call"]["tau_ci95"] = None
    assert not find_fallen_modes(alone)
    # Categories and lengths are modes too; a mode of one value divides nothing.
    low, high = ({"tau": tau, "ci95": [tau, tau], "num_dialogues": 8} for tau in (1.25, 3.5))
    split = {"tau": 3.0, "by_category": {"code": high, "chat": low}, "by_input_length": {"8k": low}}
    assert find_fallen_modes(split) == ["category: chat 0.25 (0.25-0.25, 8 dialogues)"]
    assert list_modes(split).keys() == {"category"}
    # Files of earlier versions do not count the dialogues of a category.
    assert not find_fallen_modes(
        {"tau": 3.0, "by_category": {"code": high, "chat": {"tau": 1.25, "ci95": [1.2, 1.3]}}}
    )


def test_a_row_of_each_mode_stands_in_a_table() -> None:
    chain = figures(3.0, code_block=(2.0, 2.25, 8), prose=(3.5, 4.0, 7))
    chain["by_category"] = {name: {"tau": 3.0, "ci95": None} for name in "ab"}
    tree = figures(3.5, prose=(4.0, 4.5, 7), thinking=(1.0, 1.0, 1))
    assert build_mode_rows(chain, tree) == [
        ["mode", "dialogues", "tau", "95% interval", "tau, tree"],
        ["text: code block", "8", "2.000", "1.00-2.25", "-"],
        ["text: prose", "7", "3.500", "few", "4.000"],
    ]
    assert build_mode_rows(figures(3.0, prose=(3.0, 3.1, 9)), tree) == []


def test_a_speedup_has_tau_by_mode_too() -> None:
    target = random_target()
    target.tokenizer = made = tokenizer(THINKS)
    record = Record(HELLO, None, "here")
    [prompt] = render_first_turns([record], RecordEncoder(made, {"opens": True}))
    before, after = (made(t, add_special_tokens=False).input_ids for t in ("hi</think>", "fine"))
    steps = [Step(1, len(before), 9), Step(0, 1, 2)]  # the second after all of the thinking
    text = Generation([*before, *after], steps, times=DecodingTimes(total=1.0))
    bench = Measurement(target, [], [prompt], GREEDY, {}, True)
    found = [PromptRun(prompt, {"vanilla": [text]})]
    method = {"vanilla": Method(lambda *_: [text])}
    [own] = summarise_speedup(bench, SpeedupRun(num_texts=0), method, found)["methods"].values()
    assert own["by_mode"] == compute_mode_figures(own["prompts"], 0)
    assert [*own["by_mode"]["text"]] == ["thinking", "prose"]


@pytest.mark.parametrize(
    ("template", "kwargs", "tools", "lines"),
    [
        (CHATML, {}, None, []),
        (CHATML, {}, [LOOK], [
            "1 of 1 prompts have tools that the target's chat template does not show, so no answer "
            "to them calls a tool; measure a target whose template reads 'tools'",
        ]),
        (FAMILIES["qwen3"].template, {}, [LOOK], []),
        (THINKS, {"enable_thinking": True}, None, []),
        (CHATML, {"enable_thinking": True}, None, [
            "data.chat_template_kwargs: the target's chat template reads no 'enable_thinking', so "
            "this changes no prompt",
        ]),
    ],
)  # fmt: skip
def test_a_template_that_lacks_tools_or_thinking_is_told(
    template: str, kwargs: dict[str, Any], tools: list[dict] | None, lines: list[str]
) -> None:
    own = RecordEncoder(tokenizer(template), kwargs)
    prompts = render_first_turns([Record(HELLO, None, "here", tools=tools)], own)
    assert format_unread_settings(prompts, own) == lines


@pytest.mark.parametrize(("name", "num_turns"), [("tool_calls", 2), ("thinking", 1)])
def test_the_sets_load(name: str, num_turns: int) -> None:
    path = str(SETS / f"{name}.jsonl")
    loaded = load_records(path, RowsConfig(path))
    assert (loaded.form, len(loaded.records), loaded.num_copies) == (Form.turns, 28, 0)
    assert not loaded.unread
    categories = [record.category for record in loaded.records]
    assert all(categories.count(each) >= 8 for each in {*categories})
    for record in loaded.records:
        assert len(record.messages or []) == num_turns
        assert bool(record.tools) == (name == "tool_calls")
