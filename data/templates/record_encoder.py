r"""Encoder of records: renders with the target's chat template, marks the tokens to learn.

The learnt tokens are those that the model writes after its generation prompt in each assistant
turn: the text with its end-of-turn token, and channel headers and thinking if the template renders
them (`turns.py`). Turns share a sample if the text that the model had read before the later turn
begins with the earlier turn. A template that drops earlier thinking gives one sample per turn.

Worked example, ChatML, span in characters, mask in tokens:

    <|im_start|>assistant\n Hello there <|im_end|> \n
    0            0       0  1     1     1          0
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from conf.errors import InputError
from data.rows.messages import Messages
from data.rows.records import Record
from data.templates.chat_template import ChatTemplate, Tools
from data.templates.turns import (
    Turn,
    TurnMarkers,
    find_turns,
    is_left_out,
    is_rendered,
    remove_turn_ending,
    split_thinking,
)

Span = tuple[int, int]


@dataclass(frozen=True)
class Sample:
    """Tokenised document."""

    input_ids: list[int]
    loss_mask: list[bool]
    """True for the tokens to learn."""
    unrendered_parts: tuple[str, ...] = ()
    """Names of record parts that the template does not render, one entry for each such part."""


class RecordEncoder:
    """Encoder of records as samples, for one tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Keep tokenizer and settings; render later.

        Args:
            tokenizer: the target's tokenizer.
            template_kwargs: `data.chat_template_kwargs`. The kwargs of a record take precedence.
        """
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._template = cache(self._make_template)

    def build_template(self, record_kwargs: Mapping[str, Any], tools: Tools) -> ChatTemplate:
        """Build the chat template for the settings and a record's own variables; builds are cached.

        Args:
            record_kwargs: a record's own template variables.
            tools: function schemas of the record.

        Raises:
            InputError: the tokenizer has no template, or no character offsets.
        """
        kwargs = self.template_kwargs | dict(record_kwargs)
        return self._template(json.dumps(kwargs, sort_keys=True), bool(tools))

    def encode_prompt(
        self,
        messages: Messages,
        tools: Tools = None,
        record_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokenise a conversation up to the start of the assistant's turn.

        Args:
            messages: the conversation.
            tools: function schemas for the prompt.
            record_kwargs: a record's own template variables.

        Raises:
            InputError: the template refuses the conversation.
        """
        text = self.build_template(record_kwargs or {}, tools).render_prompt(messages, tools)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_record(self, record: Record) -> list[Sample]:
        """Tokenise a record and mark the tokens to learn.

        Returns:
            One sample, or several if the model had read another text before some turn than the
            rendering of the whole conversation shows.

        Raises:
            InputError: the tokenizer has no template or no offsets, or the template refuses the
                conversation or does not render the text of an assistant turn.
        """
        if record.tokens is not None:
            return [Sample(*record.tokens)]
        if record.messages is None:
            ids = self._encode_text_ids(record.text)
            return [Sample(ids, [True] * len(ids))]
        try:
            return self._encode_chat(record, record.messages)
        except InputError as error:
            raise InputError(f"{record.where}: {error}") from None

    @cached_property
    def turn_markers(self) -> TurnMarkers:
        """Markers of dialogues rendered for the target; empty if its template renders none."""
        try:
            return TurnMarkers.from_template(self.build_template({}, None))
        except InputError:
            return TurnMarkers()

    def _encode_text_ids(self, text: str | None) -> list[int]:
        """Tokenise a plain text, with the tokenizer's begin and end tokens only once."""
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        begin, end = self._added_ids
        ids = ids[1:] if begin and ids[:2] == 2 * begin else ids
        return ids[:-1] if end and ids[-2:] == 2 * end else ids

    @cached_property
    def _added_ids(self) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer puts before and after any text, at most one on each side."""
        ids: list[int] = self.tokenizer("")["input_ids"]
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        firsts, lasts = ids[:1], ids[-1:]
        return (firsts if firsts == [begin] else []), (lasts if lasts == [end] else [])

    def _make_template(self, kwargs: str, with_tools: bool) -> ChatTemplate:
        if not self.tokenizer.is_fast:
            raise InputError(
                f"target {self.tokenizer.name_or_path or '(unnamed)'}: "
                f"{type(self.tokenizer).__name__} gives no character offsets, which the loss mask "
                "needs; save a tokenizer.json beside the model"
            )
        return ChatTemplate(self.tokenizer, json.loads(kwargs), with_tools=with_tools)

    def _encode_chat(self, record: Record, messages: Messages) -> list[Sample]:
        template = self.build_template(record.template_kwargs, record.tools)
        # Assistant messages are learnt if they answer something.
        asked = (i for i, message in enumerate(messages) if message["role"] in ("user", "tool"))
        first_question = next(asked, 0)
        answers = (i for i, message in enumerate(messages) if message["role"] == "assistant")
        indices = [i for i in answers if i > first_question and i not in record.unlearnt_messages]
        found = find_turns(messages, indices, template, record.tools)
        turns = dict(zip(indices, found, strict=True))
        last = turns[indices[-1]] if indices else None
        given = record.written_ids.keys()
        left_out = [name for turn in turns.values() for name in turn.unrendered_parts]
        left_out += _list_unshown_parts(record, messages, last.prompt if last else "")
        learnt = {}
        for i, turn in turns.items():
            if i in given or not is_left_out(messages[i], turn):
                ended = i in given or i not in record.truncated_messages
                learnt[i] = turn if ended else remove_turn_ending(turn, messages[i], template)
        if record.written_ids:
            for i in given & learnt.keys():
                self._check_written(messages[i], record.written_ids[i], i)
            written = [record.written_ids.get(i) for i in learnt]
            samples = self._join_ids([*learnt.values()], written)
        else:
            if last and indices[-1] == len(messages) - 1:
                whole = last.conversation_text
            else:
                whole = template.render_conversation(messages, record.tools)
            texts = _join_turns([*learnt.values()], whole)
            samples = [self._build_sample(text, spans) for text, spans in texts]
        return [replace(samples[0], unrendered_parts=tuple(left_out)), *samples[1:]]

    def _build_sample(self, text: str, spans: list[Span]) -> Sample:
        """Tokenise a rendering; mark the tokens inside the character spans as learnt."""
        cuts = sorted({edge for span in spans for edge in span})
        tokens = encode_text(text, cuts, self.tokenizer)
        mask = [False] * len(tokens.ids)
        for low, high in spans:
            begin, end = bisect_right(tokens.ends, low), bisect_left(tokens.starts, high)
            # Phi-3's header token includes the following newlines, even those of the answer.
            added = self.tokenizer.added_tokens_decoder
            if begin < end and tokens.starts[begin] < low and tokens.ids[begin] in added:
                begin += 1
            mask[begin:end] = [True] * (end - begin)
        return Sample(tokens.ids, mask)

    def _join_ids(self, turns: list[Turn], written: list[list[int] | None]) -> list[Sample]:
        """Join turns as token ids; use the ids that the model wrote if the record has them."""
        samples: list[Sample] = []
        for turn, given in zip(reversed(turns), reversed(written), strict=True):
            sample = self._build_sample(turn.text, [(len(turn.prompt), len(turn.text))])
            if given is not None:
                prompt = sample.input_ids[: sample.loss_mask.index(True)]
                mask = [False] * len(prompt) + [True] * len(given)
                sample = Sample(prompt + given, mask)
            later = samples[-1] if samples else None
            length = len(sample.input_ids)
            if later is not None and later.input_ids[:length] == sample.input_ids:
                rest = later.loss_mask[length:]
                head = zip(sample.loss_mask, later.loss_mask, strict=False)
                samples[-1] = Sample(later.input_ids, [a or b for a, b in head] + rest)
            else:
                samples.append(sample)
        return samples[::-1] or [self._build_sample("", [])]

    def _check_written(self, message: dict, ids: list[int], index: int) -> None:
        text = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if not is_rendered(split_thinking(message)[2], text):
            raise InputError(
                f"messages[{index}].token_ids: give {text[:80]!r} in this target's tokenizer, but "
                f"'content' is {message['content'][:80]!r}, so they are of another tokenizer, or "
                "their server hides special tokens; remove them, or regenerate the data with this "
                "target"
            )


def _list_unshown_parts(record: Record, messages: Messages, prompt: str) -> list[str]:
    """List the parts of a conversation that the template does not show to the model."""
    if not prompt:
        return []
    unshown = []
    tools = (tool.get("function", tool) for tool in record.tools or ())
    if any(str(tool.get("name")) not in prompt for tool in tools):
        unshown.append("tools")
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    for message in messages[:last]:
        is_prompt = message["role"] in ("system", "developer", "user")
        if is_prompt and not is_rendered(message["content"], prompt):
            unshown.append(f"a {message['role']} message")
    has_greeting = messages[0]["role"] == "assistant"
    return [*unshown, *(["a greeting"] if has_greeting else [])]


def _join_turns(turns: list[Turn], whole: str) -> list[tuple[str, list[Span]]]:
    """Group turns into texts. A turn joins the next turn if the next one's text begins with it.

    Args:
        turns: turns in order.
        whole: rendering of the whole conversation, which the last turns join.

    Returns:
        Texts, each with the character spans that the model wrote.
    """
    texts: list[tuple[str, list[Span]]] = [(whole, [])]
    for turn in reversed(turns):
        if not texts[-1][0].startswith(turn.text):
            texts.append((turn.text, []))
        texts[-1][1].append((len(turn.prompt), len(turn.text)))
    joined = [text for text in reversed(texts) if text[1]]
    return joined or texts


@dataclass(frozen=True)
class Tokens:
    """Token ids of a text, with the first and the end character of each token, without gaps."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


def encode_text(text: str, cuts: list[int], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenise a text so that no token crosses a border of the model's own text.

    A token that crosses a border is split, unless the split tokens decode to another text.

    Args:
        text: rendered text.
        cuts: character positions where the model started or stopped writing, rising.
        tokenizer: the target's tokenizer.
    """
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    # Tokens must cover the text without gaps. Some tokenizers cut spaces off their offsets: ` b` of
    # `a b` is (2, 3), not (1, 3), and a token of spaces is empty. Each token therefore starts where
    # the previous one ended. Tokens that share a character (an emoji) keep it.
    starts, ends, covered = [], [], 0
    for low, high in encoding["offset_mapping"]:
        starts.append(min(low, covered))
        ends.append(high)
        covered = max(covered, high)
    tokens = Tokens(encoding["input_ids"], starts, ends)
    for cut in cuts:
        index = bisect_right(tokens.ends, cut)
        crosses = index < len(tokens.ids) and tokens.starts[index] < cut
        if not crosses or tokens.ids[index] in tokenizer.added_tokens_decoder:
            continue
        # A space before a word belongs to the word, so a trailing space is ignored.
        before, after = text[tokens.starts[index] : cut], text[cut : tokens.ends[index]]
        if before.strip(" ") or not after.strip():
            left = encode_text(text[:cut], [other for other in cuts if other < cut], tokenizer)
            later = [other - cut for other in cuts if other > cut]
            right = encode_text(text[cut:], later, tokenizer)
            split = Tokens(
                left.ids + right.ids,
                left.starts + [cut + start for start in right.starts],
                left.ends + [cut + end for end in right.ends],
            )
            same = tokenizer.decode(split.ids) == tokenizer.decode(tokens.ids)
            return split if same else tokens
    return tokens
