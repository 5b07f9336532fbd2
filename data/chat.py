r"""Renders records with the target's own chat template and marks the assistant's tokens.

Few templates carry `{% generation %}` tags, so the assistant's share of the rendered text is
found in one of three ways, turn by turn: the tags; else rendering the conversation up to the
turn and through it; else, where the template rewrites earlier turns (Qwen3 drops their
thinking), looking for the contents in order. Each turn is then checked by decoding its tokens.

Worked example, ChatML, span in characters, mask in tokens:

    <|im_start|>assistant\n Hello there <|im_end|> \n
    0            0       0  1     1     1          0
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from conf.schema import InputError
from data.records import Messages, Record

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")

Span = tuple[int, int]


@dataclass(frozen=True)
class Sample:
    """A tokenised record."""

    input_ids: list[int]
    loss_mask: list[bool]
    """True on the tokens that are learnt: the assistant's, its end-of-turn token included."""
    truncated: bool


def encode(record: Record, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Sample:
    """Tokenises a record and marks what is learnt.

    Raises:
        InputError: the tokenizer has no template or no offsets, the template refuses the
            conversation, or the assistant's text cannot be found in what it renders.
    """
    if record.messages is None:
        ids = tokenizer(record.text, verbose=False)["input_ids"]
        mask = [True] * len(ids)
    else:
        ids, mask = _encode_chat(record.messages, tokenizer, record.where)
    return Sample(ids[:max_length], mask[:max_length], len(ids) > max_length)


def encode_prompt(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenises a conversation up to where the assistant starts to write."""
    check_tokenizer(tokenizer)
    text = _render(messages, tokenizer, prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer that cannot render and align conversations.

    Raises:
        InputError: no chat template, or no character offsets.
    """
    if not tokenizer.chat_template:
        raise InputError(
            f"target {tokenizer.name_or_path or '(unnamed)'} has no chat template, but the data "
            "are conversations: take the chat version of the model, put a chat_template.jinja "
            "into its folder, or give plain text (rows with a 'text' field)"
        )
    if not tokenizer.is_fast:
        raise InputError(
            f"target {tokenizer.name_or_path or '(unnamed)'}: {type(tokenizer).__name__} gives no "
            "character offsets, which the loss mask needs; save a tokenizer.json beside the model"
        )


def _encode_chat(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[bool]]:
    check_tokenizer(tokenizer)
    try:
        text, spans = _assistant_spans(messages, tokenizer)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoding["input_ids"]
    mask = [False] * len(ids)
    starts, ends = _token_bounds(encoding["offset_mapping"])
    added = tokenizer.added_tokens_decoder
    learnt = []
    for low, high in spans:
        turn = [i for i in range(len(ids)) if starts[i] < high and ends[i] > low]
        # Phi-3's header token swallows the newlines after it, the answer's own included.
        if turn and starts[turn[0]] < low and ids[turn[0]] in added:
            del turn[0]
        learnt.append([ids[i] for i in turn])
        for i in turn:
            mask[i] = True
    contents = [m["content"] for m in messages if m["role"] == "assistant"]
    _check_turns(contents, learnt, tokenizer, f"{where}: ", text)
    return ids, mask


def _token_bounds(offsets: list[Span]) -> tuple[list[int], list[int]]:
    """Lets tokens cover the text without gaps.

    Some tokenizers trim spaces off their offsets, down to nothing for a token of spaces:
    ` b` of `a b` is (2, 3), not (1, 3). Each token is therefore taken to start where the one
    before it ended. Tokens that share one character (bytes of an emoji) keep sharing it.
    """
    starts, ends, covered = [], [], 0
    for low, high in offsets:
        starts.append(min(low, covered))
        ends.append(high)
        covered = max(covered, high)
    return starts, ends


def _render(messages: Messages, tokenizer: PreTrainedTokenizerBase, *, prompt: bool) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        )
    except TemplateError as error:
        raise InputError(f"the target's chat template refuses the conversation: {error}") from None


def _assistant_spans(
    messages: Messages, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[Span]]:
    """Returns the rendered text and the characters of it that each assistant turn wrote."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    template = tokenizer.get_chat_template()
    if GENERATION_TAG.search(template):
        text, tagged = _render_tagged(messages, tokenizer, template)
        # Some templates tag thinking and answer apart; those are aligned like untagged ones.
        if len(tagged) == len(turns):
            pairs = zip(tagged, turns, strict=True)
            return text, [
                _fit_tagged(span, messages[: i + 1], text, tokenizer) for span, i in pairs
            ]
    else:
        text = _render(messages, tokenizer, prompt=False)
    return text, _untagged_spans(messages, turns, text, tokenizer)


def _render_tagged(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, template: str
) -> tuple[str, list[Span]]:
    variables: dict[str, Any] = tokenizer.special_tokens_map
    try:
        rendered: Any = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **variables,
        )
    except TemplateError as error:
        raise InputError(f"the target's chat template refuses the conversation: {error}") from None
    (text,), (spans,) = rendered
    return text, [(low, high) for low, high in spans]


def _fit_tagged(
    span: Span, through: Messages, text: str, tokenizer: PreTrainedTokenizerBase
) -> Span:
    """Takes the role header out of a tagged span, and its end-of-turn token in."""
    low, high = span
    content = through[-1]["content"].strip()
    if not text[low:high].lstrip().startswith(content):
        header = _prefix(through[:-1], text, tokenizer, prompt=True)
        low = header if header is not None and low < header < high else low
    low += _empty_thinking(text[low:high], content)
    high = low + len(text[low:high].rstrip())
    if text[low:high].endswith(content):
        high = _close(through, text, high, tokenizer)
    return low, high


def _untagged_spans(
    messages: Messages, turns: list[int], text: str, tokenizer: PreTrainedTokenizerBase
) -> list[Span]:
    spans: list[Span] = []
    cursor, done = 0, 0
    for turn in turns:
        through = messages[: turn + 1]
        low = _prefix(messages[:turn], text, tokenizer, prompt=True)
        high = _prefix(through, text, tokenizer, prompt=False)
        if low is not None and high is not None and low < high:
            low += _empty_thinking(text[low:high], through[-1]["content"])
            high = low + len(text[low:high].rstrip())
            high -= _appended_eos(messages[:turn], text, high, tokenizer)
        else:
            start = low or _skip(messages[done:turn], messages[:turn], text, cursor, tokenizer)
            low, high = _locate(through[-1]["content"], text, start)
            high = _close(through, text, high, tokenizer)
        spans.append((low, high))
        cursor, done = high, turn + 1
    return spans


def _prefix(
    messages: Messages, text: str, tokenizer: PreTrainedTokenizerBase, *, prompt: bool
) -> int | None:
    """Returns how far the rendered `messages` reach into `text`, if they are a prefix of it."""
    try:
        prefix = _render(messages, tokenizer, prompt=prompt)
    except InputError:
        return None
    return len(prefix) if text.startswith(prefix) else None


def _appended_eos(
    before: Messages, text: str, high: int, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Returns the length of an eos token that closes the whole text, not the turn.

    Phi-4-mini ends turns in `<|end|>`, and any rendered conversation in `<|endoftext|>`.
    """
    eos = tokenizer.eos_token
    inner = text[:high].removesuffix(eos) if eos else text[:high]
    if len(inner) == high or not inner.endswith(_special_tokens(tokenizer)):
        return 0
    opened = _render(before, tokenizer, prompt=False)
    appended = not text.startswith(opened) and text.startswith(opened.removesuffix(eos))
    return len(eos) if appended else 0


def _empty_thinking(inside: str, content: str) -> int:
    """Returns the length of an empty thinking block that the template put before the content.

    The model never writes it: with thinking off it belongs to the prompt.
    """
    block = EMPTY_THINKING.match(inside)
    return block.end() if block and not EMPTY_THINKING.match(content) else 0


def _skip(
    between: Messages,
    before: Messages,
    text: str,
    cursor: int,
    tokenizer: PreTrainedTokenizerBase,
) -> int:
    """Returns a place past the messages `between` two turns and past the next turn's header."""
    for message in between:
        content = message["content"].strip()
        found = text.find(content, cursor)
        cursor = found + len(content) if found >= 0 else cursor
    closed = _render(before, tokenizer, prompt=False)
    header = _render(before, tokenizer, prompt=True).removeprefix(closed)
    header = header.split("<think>")[0].strip()
    found = text.find(header, cursor)
    return found + len(header) if found >= 0 else cursor


def _locate(content: str, text: str, cursor: int) -> Span:
    candidates = [content.strip(), _answer(content)]
    found = [(text.find(candidate, cursor), candidate) for candidate in candidates if candidate]
    # The nearest wins: a stripped turn may be repeated in full further down.
    places = [(low, low + len(candidate)) for low, candidate in found if low >= 0]
    if places:
        return min(places, key=lambda place: place[0])
    raise InputError(
        f"the chat template does not render the assistant's text {content[:80]!r}; rendered "
        f"text:\n{_excerpt(text)}"
    )


def _answer(content: str) -> str:
    """Returns what remains of a turn when a template strips its thinking."""
    return content.rsplit("</think>", 1)[-1].strip()


def _close(through: Messages, text: str, high: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns where the turn whose text ends at `high` is closed."""
    alone = _render(through, tokenizer, prompt=False)
    closing = alone.rpartition(_answer(through[-1]["content"]) or "</think>")[2].rstrip()
    if text.startswith(closing, high):
        return high + len(closing)
    return high + len(_special_token_at(text, high, tokenizer))


def _special_token_at(text: str, position: int, tokenizer: PreTrainedTokenizerBase) -> str:
    for token in _special_tokens(tokenizer):
        if text.startswith(token, position):
            return token
    return ""


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    tokens = (token.content for token in tokenizer.added_tokens_decoder.values())
    return tuple(sorted(tokens, key=len, reverse=True))


def _check_turns(
    contents: list[str],
    learnt: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    text: str,
) -> None:
    for content, ids in zip(contents, learnt, strict=True):
        decoded = _decode(ids, tokenizer)
        wanted = _answer(content) or content.strip()
        if wanted in decoded or _squash(_round_trip(wanted, tokenizer)) in _squash(decoded):
            continue
        what = f"learns {decoded[:80]!r} for" if ids else "is empty for"
        raise InputError(
            f"{where}the loss mask {what} the assistant's text {content[:80]!r}; "
            f"rendered text:\n{_excerpt(text)}"
        )


def _round_trip(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text as the tokenizer normalises it (case, accents, unknown characters)."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return _decode(ids, tokenizer)


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _squash(text: str) -> str:
    return "".join(text.split())


def _excerpt(text: str) -> str:
    return text if len(text) <= 2000 else text[:2000] + f" ... ({len(text)} characters)"
