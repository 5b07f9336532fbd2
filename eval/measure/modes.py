"""Modes: tau by what is asked and by what is written, and the modes in which drafts fail.

A mode has a name and values. Each value holds some of the passes of a measurement:

    category       what the data say of a prompt (its source, its subject)
    prompt length  the nearest power of two
    turn           the number of the question in its dialogue
    thinking       on, if the answer thinks; off
    text           what a pass writes: thinking, a tool call, a code block, or prose

A pass belongs to the text of the first token that it writes. Texts are found in the target's own
answer: thinking by the tags of the target's template, code by its fences (CommonMark 0.31, 4.5), a
tool call by the template's tags or as an object with `name` and `arguments` (`parameters`), with or
without a fence around it, as models without such tags and small models write it. A span inside
another is of the outer kind.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import compress
from typing import Any

from eval.measure.acceptance_stats import (
    FEWEST_DIALOGUES,
    bootstrap_tau,
    compute_mean_acceptance_length,
    compute_tau,
    count_dialogues,
    format_interval,
    format_length_bucket,
    format_shown_interval,
    sum_by_dialogue,
)
from eval.measure.prompts import Prompt

THINKING, TOOL_CALL, CODE_BLOCK, PROSE = TEXTS = ("thinking", "tool call", "code block", "prose")
CATEGORY, PROMPT_LENGTH = "category", "prompt length"
OPENING_TOKENS = 32
"""Tokens at the end of a prompt that may open the thinking."""
FENCE = r"^[ \t]*(?P<fence>`{3,}|~{3,})[^`\n]*$"
JSON_CALL = r'\{\s*"name"\s*:\s*"(?:[^"\\\n]|\\.)*"\s*,\s*"(?:arguments|parameters)"\s*:'
FENCED_CALL = re.compile(rf"\s*\[?\s*{JSON_CALL}")

Spans = dict[str, list[list[int]]]
"""First token and the token behind the last one of each span, by kind of text."""
Rows = list[dict[str, Any]]
"""Rows of `PromptSteps.build_row`."""


def find_text_spans(prompt: Prompt, token_ids: Sequence[int], tokenizer: Any) -> Spans:
    """Find thinking, tool calls and code blocks in an answer; all other tokens are prose.

    Args:
        prompt: prompt of the answer, which says how its target thinks and calls tools.
        token_ids: the answer, including the stop token.
        tokenizer: the target's tokenizer.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cache
    def length(num_tokens: int) -> int:
        return len(decode(token_ids[:num_tokens]))

    read, written = decode(prompt.token_ids[-OPENING_TOKENS:]).rstrip(), decode(token_ids)
    opened = next((end for begin, end in prompt.thinking if read.endswith(begin)), None)
    spans: Spans = {}
    places, span = range(len(token_ids) + 1), [0, 0]
    for kind, begin, end in _iter_char_spans(written, prompt, opened):
        first = bisect_right(places, begin, key=length) - 1
        span = [first, bisect_left(places, end, key=length)]
        spans.setdefault(kind, []).append(span)
    if not tokenizer.decode(token_ids[span[1] :], skip_special_tokens=True).strip():
        span[1] = len(token_ids)  # what ends the answer is no prose
    return spans


def _iter_char_spans(
    written: str, prompt: Prompt, opened: str | None
) -> Iterator[tuple[str, int, int]]:
    """Yield kind, first character and end of each span, in order.

    Args:
        written: the answer.
        prompt: its prompt.
        opened: end tag of thinking that the prompt opens; None if the answer itself begins.
    """
    ends, place = dict(reversed(prompt.thinking)), 0
    if opened is not None:
        place = _find_end(written, re.escape(opened), 0)
        yield THINKING, 0, place
    before, after = (prompt.call_tags or ("", "")) if prompt.tools else ("", "")
    patterns = {
        "think": "|".join(map(re.escape, ends)),
        "tag": _escape_loosely(before),
        "json": JSON_CALL if prompt.tools else "",
        "code": FENCE,
    }
    either = "|".join(f"(?P<{name}>{each})" for name, each in patterns.items() if each)
    opening = re.compile(either, re.MULTILINE)
    while found := opening.search(written, place):
        start, place = found.span()
        which = found.groupdict()
        if which.get("think"):
            kind, tag = THINKING, re.escape(ends[which["think"]])
            if written[:start].strip() and not re.search(tag, written[place:]):
                continue  # prose about the tag
            place = _find_end(written, tag, place)
        elif which.get("tag"):
            kind, place = TOOL_CALL, _find_end(written, _escape_loosely(after), place)
        elif which.get("json"):
            kind, place = TOOL_CALL, _find_object_end(written, start)
        else:
            calls = bool(prompt.tools) and FENCED_CALL.match(written, place) is not None
            kind, sign = TOOL_CALL if calls else CODE_BLOCK, which["fence"]
            closing = rf"^[ \t]*{sign[0]}{{{len(sign)},}}[ \t]*$"
            place = _find_end(written, closing, place)
        yield kind, start, place


def _escape_loosely(text: str) -> str:
    """Escape a text for a regular expression in which white space may vary."""
    return r"\s*".join(map(re.escape, text.split()))


def _find_end(text: str, closing: str, start: int) -> int:
    """Find the end of what a pattern closes; the end of the text if nothing closes it."""
    found = re.compile(closing, re.M).search(text, start) if closing else None
    return found.end() if found else len(text)


def _find_object_end(text: str, start: int) -> int:
    """Find the end of a JSON object; the end of the text if the object is cut off or broken."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except ValueError:
        return len(text)


def classify_passes(
    emitted: Sequence[int], spans: Mapping[str, Sequence[Sequence[int]]]
) -> list[str]:
    """Name the text that each pass writes, by its first token.

    Args:
        emitted: number of tokens that each pass writes; the prompt's pass has written token 0.
        spans: spans of the answer, by `find_text_spans`; all other tokens are prose.
    """
    names, place = [], 1
    for num_tokens in emitted:
        inside = (
            kind for kind, ranges in spans.items() for low, high in ranges if low <= place < high
        )
        names.append(next(inside, PROSE))
        place += num_tokens
    return names


def group_passes(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Rows]]:
    """Group passes by mode and value.

    Args:
        rows: rows of `PromptSteps.build_row`; their `condition` is a mode too, if they have one.

    Returns:
        By mode and value, the rows with only the passes of that value.
    """
    modes: dict[str, dict[str, Rows]] = {}
    for row in rows:
        own = {
            CATEGORY: row.get("category", "all"),
            PROMPT_LENGTH: format_length_bucket(row.get("prompt_tokens", 0)),
            "turn": str(row["turn"]),
        }
        if (spans := row.get("spans")) is not None:  # files of earlier versions have none
            own["thinking"] = "on" if THINKING in spans else "off"
        if "condition" in row:
            own["condition"] = row["condition"]
        for mode, value in own.items():
            modes.setdefault(mode, {}).setdefault(value, []).append(dict(row))
        texts = [] if spans is None else classify_passes(row["emitted"], spans)
        for text in {*texts}:
            passes = _select_passes(row, [name == text for name in texts])
            modes.setdefault("text", {}).setdefault(text, []).append(passes)
    return {
        mode: dict(sorted(values.items(), key=partial(_get_order, mode)))
        for mode, values in modes.items()
    }


def _get_order(mode: str, item: tuple[str, Rows]) -> int | str:
    """Order the values of a mode: by size, by name, or as they occur."""
    value, rows = item
    if mode == PROMPT_LENGTH:
        return min(row.get("prompt_tokens", 0) for row in rows)
    return {
        "turn": rows[0]["turn"],
        "text": TEXTS.index(value) if value in TEXTS else 0,
        "condition": 0,
    }.get(mode, value)


def _select_passes(row: Mapping[str, Any], kept: Sequence[bool]) -> dict[str, Any]:
    keys = [key for key in ("accepted", "emitted", "drafted") if row.get(key)]
    return {**row, **{key: list(compress(row[key], kept)) for key in keys}}


def compute_mode_figures(
    rows: Sequence[Mapping[str, Any]],
    seed: int,
    left_out: Sequence[str] = (CATEGORY, PROMPT_LENGTH),
) -> dict[str, dict[str, dict[str, Any]]]:
    """Compute tau and its interval by mode and value.

    Args:
        rows: rows of `PromptSteps.build_row`.
        seed: seed of the intervals.
        left_out: modes to leave out, by default those that results have elsewhere.
    """
    return {
        mode: {value: _compute_figures(own, seed) for value, own in values.items()}
        for mode, values in group_passes(rows).items()
        if mode not in left_out
    }


def _compute_figures(rows: Rows, seed: int) -> dict[str, Any]:
    sums = sum_by_dialogue(rows)
    return {
        "tau": compute_tau(sums),
        "tau_ci95": bootstrap_tau(sums, seed),
        "per_draft": compute_mean_acceptance_length(rows),
        "num_dialogues": count_dialogues(rows),
        "num_prompts": len(rows),
        "num_tokens": sum(tokens for tokens, _ in sums),
    }


def list_modes(figures: Mapping[str, Any], least: int = 2) -> dict[str, dict[str, dict[str, Any]]]:
    """List the figures of every mode that divides a result.

    Args:
        figures: `acceptance.json`, its tree's part, or a method of `speedup.json`.
        least: fewest values of a mode to list.

    Returns:
        By mode and value, figures with `tau`, `tau_ci95` and, unless the file is of an earlier
        version, `num_dialogues`.
    """
    modes = {
        CATEGORY: figures.get("by_category"),
        PROMPT_LENGTH: figures.get("by_input_length"),
        **(figures.get("by_mode") or {}),
    }
    return {
        mode: {
            value: {**row, "tau_ci95": row.get("tau_ci95", row.get("ci95"))}
            for value, row in values.items()
        }
        for mode, values in modes.items()
        if values and len(values) >= least
    }


def build_mode_rows(
    chain: Mapping[str, Any], tree: Mapping[str, Any] | None = None
) -> list[list[str]]:
    """Build a header, and a row per value of each mode but categories; empty without such a mode.

    Args:
        chain: figures of chains, as of `list_modes`.
        tree: figures of trees of the same prompts; None for a table without these.
    """
    in_tree = {} if tree is None else list_modes(tree, least=1)
    lines = [["mode", "dialogues", "tau", "95% interval", "tau, tree"][: 4 if tree is None else 5]]
    for mode, values in list_modes(chain).items():
        for value, row in values.items() if mode != CATEGORY else ():
            # Sampled texts of chain and tree may differ, and files of earlier versions count less.
            number, other = row.get("num_dialogues", 0), in_tree.get(mode, {}).get(value)
            interval = format_shown_interval(row["tau_ci95"], number)
            tree_tau = "-" if other is None else f"{other['tau']:.3f}"
            line = [f"{mode}: {value}", str(number or "-"), f"{row['tau']:.3f}", interval, tree_tau]
            lines.append(line[: len(lines[0])])
    return lines if len(lines) > 1 else []


def find_fallen_modes(figures: Mapping[str, Any]) -> list[str]:
    """Describe each mode in which at most half as many draft tokens are accepted as on average.

    Counted are accepted draft tokens per pass, tau - 1, as a pass without drafts writes a token
    too: tau of 2.0 falls by half at 1.5. The mean is over all passes. The upper end of the mode's
    interval must lie at half of the mean or below, and rest on `FEWEST_DIALOGUES` dialogues: a
    result has some ten modes, so that one of them is low by chance too often.

    Args:
        figures: as of `list_modes`.
    """
    return [
        f"{mode}: {value} {row['tau'] - 1:.2f} "
        f"({format_interval([end - 1 for end in row['tau_ci95']])}, "
        f"{row['num_dialogues']} dialogues)"
        for mode, values in list_modes(figures).items()
        for value, row in values.items()
        if row.get("num_dialogues", 0) >= FEWEST_DIALOGUES
        and row["tau_ci95"] is not None
        and row["tau_ci95"][1] - 1 <= (figures["tau"] - 1) / 2
    ]
