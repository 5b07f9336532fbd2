r"""Renders records with the target's own chat template and marks what is learnt.

Learnt is what the model writes, given its generation prompt, in each assistant turn: the turn's
text, its end-of-turn token included, and channel headers and thinking where the template renders
them (`template.py`). Turns share a sample as long as what the model had read of the later one
begins with all of the earlier; a template that drops earlier thinking makes a sample of each.

Worked example, ChatML, span in characters, mask in tokens:

    <|im_start|>assistant\n Hello there <|im_end|> \n
    0            0       0  1     1     1          0
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from conf.errors import InputError
from data.rows.forms import Record
from data.rows.messages import Messages
from data.templates.markers import Markers
from data.templates.template import ChatTemplate, Tools
from data.templates.turns import Turn, cut_off, find_turns, is_shown, says_nothing

Span = tuple[int, int]
EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Sample:
    """A tokenised document."""

    input_ids: list[int]
    loss_mask: list[bool]
    """True on the tokens that are learnt."""
    left_out: tuple[str, ...] = ()
    """Names of the parts of the record that the template does not render, one each time."""


class Encoder:
    """Makes samples of records, for one tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Renders nothing yet.

        Args:
            tokenizer: the target's.
            template_kwargs: `data.chat_template_kwargs`; a record's own come before them.
        """
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._template = cache(self._make_template)

    def template(self, record_kwargs: Mapping[str, Any], tools: Tools) -> ChatTemplate:
        """The chat template, as settings and a record's own arguments have it.

        Raises:
            InputError: the tokenizer has none, or no character offsets.
        """
        kwargs = self.template_kwargs | dict(record_kwargs)
        return self._template(json.dumps(kwargs, sort_keys=True), bool(tools))

    def prompt(
        self, messages: Messages, tools: Tools = None, record_kwargs: Mapping[str, Any] = EMPTY
    ) -> list[int]:
        """Tokenises a conversation up to where the assistant starts to write.

        Args:
            messages: the conversation.
            tools: function schemas that the prompt shows.
            record_kwargs: a record's own arguments of the template.

        Raises:
            InputError: the template refuses it.
        """
        text = self.template(record_kwargs, tools).prompt(messages, tools)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode(self, record: Record) -> list[Sample]:
        """Tokenises a record and marks what is learnt.

        Returns:
            One sample, or several where turns were written after other texts than the last
            rendering shows.

        Raises:
            InputError: the tokenizer has no template or no offsets, the template refuses the
                conversation, or does not render what an assistant's turn says.
        """
        if record.tokens is not None:
            return [Sample(*record.tokens)]
        if record.messages is None:
            ids = self._text_ids(record.text)
            return [Sample(ids, [True] * len(ids))]
        try:
            return self._encode_chat(record, record.messages)
        except InputError as error:
            raise InputError(f"{record.where}: {error}") from None

    @cached_property
    def markers(self) -> Markers:
        """Marks of a dialogue that is rendered for the target; none without a template."""
        try:
            return Markers.of(self.template({}, None))
        except InputError:
            return Markers()

    def _text_ids(self, text: str | None) -> list[int]:
        """Tokenises a plain text; ids that begin and end any text stand there once."""
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        begin, end = self._added
        ids = ids[1:] if begin and ids[:2] == 2 * begin else ids
        return ids[:-1] if end and ids[-2:] == 2 * end else ids

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and behind any text, one or none of each."""
        ids: list[int] = self.tokenizer("")["input_ids"]
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return [first for first in ids[:1] if first == begin], [
            last for last in ids[-1:] if last == end
        ]

    def _make_template(self, kwargs: str, with_tools: bool) -> ChatTemplate:
        if not self.tokenizer.is_fast:
            raise InputError(
                f"target {self.tokenizer.name_or_path or '(unnamed)'}: "
                f"{type(self.tokenizer).__name__} gives no character offsets, which the loss mask "
                "needs; save a tokenizer.json beside the model"
            )
        return ChatTemplate(self.tokenizer, json.loads(kwargs), with_tools=with_tools)

    def _encode_chat(self, record: Record, messages: Messages) -> list[Sample]:
        template = self.template(record.template_kwargs, record.tools)
        # To be learnt are the assistant's messages that answer something.
        asked = next((i for i, m in enumerate(messages) if m["role"] in ("user", "tool")), 0)
        answers = (i for i, message in enumerate(messages) if message["role"] == "assistant")
        indices = [i for i in answers if i > asked and i not in record.unlearnt]
        turns = dict(
            zip(indices, find_turns(messages, indices, template, record.tools), strict=True)
        )
        last = turns[indices[-1]] if indices else None
        given = record.written.keys()
        left_out = [name for turn in turns.values() for name in turn.left_out]
        left_out += _unshown(record, messages, last.prompt if last else "")
        learnt = {
            i: cut_off(turn, messages[i], template) if i in record.cut_off - given else turn
            for i, turn in turns.items()
            if i in given or not says_nothing(messages[i], turn)
        }
        if record.written:
            for i in given & learnt.keys():
                self._check_written(messages[i], record.written[i], i)
            samples = self._join_ids([*learnt.values()], [record.written.get(i) for i in learnt])
        else:
            ends = bool(indices) and indices[-1] == len(messages) - 1
            whole = last.through if last and ends else template.through(messages, record.tools)
            samples = [self._mark(text, spans) for text, spans in _join([*learnt.values()], whole)]
        return [replace(samples[0], left_out=tuple(left_out)), *samples[1:]]

    def _mark(self, text: str, spans: list[Span]) -> Sample:
        """Tokenises a rendering; tokens in the spans of its characters are learnt."""
        cuts = sorted({edge for span in spans for edge in span})
        tokens = tokenise(text, cuts, self.tokenizer)
        mask = [False] * len(tokens.ids)
        for low, high in spans:
            begin, end = bisect_right(tokens.ends, low), bisect_left(tokens.starts, high)
            # Phi-3's header token swallows the newlines after it, the answer's own included.
            added = self.tokenizer.added_tokens_decoder
            if begin < end and tokens.starts[begin] < low and tokens.ids[begin] in added:
                begin += 1
            mask[begin:end] = [True] * (end - begin)
        return Sample(tokens.ids, mask)

    def _join_ids(self, turns: list[Turn], written: list[list[int] | None]) -> list[Sample]:
        """Joins turns as token ids, as the model wrote them where the record has them."""
        samples: list[Sample] = []
        for turn, given in zip(reversed(turns), reversed(written), strict=True):
            sample = self._mark(turn.text, [(len(turn.prompt), len(turn.text))])
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
        return samples[::-1] or [self._mark("", [])]

    def _check_written(self, message: dict, ids: list[int], index: int) -> None:
        said = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if not is_shown(message["content"].rpartition("</think>")[2], said):
            raise InputError(
                f"messages[{index}].token_ids say {said[:80]!r} in this target's tokenizer, and "
                f"'content' {message['content'][:80]!r}: they are of another tokenizer, or the "
                "server that gave them hides special tokens; remove them, or regenerate the data "
                "with this target"
            )


def _unshown(record: Record, messages: Messages, prompt: str) -> list[str]:
    """Names the parts of the conversation that the template does not show to the model."""
    if not prompt:
        return []
    lost = []
    tools = (tool.get("function", tool) for tool in record.tools or ())
    if any(str(tool.get("name")) not in prompt for tool in tools):
        lost.append("tools")
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    for message in messages[:last]:
        said = message["role"] in ("system", "developer", "user")
        if said and not is_shown(message["content"], prompt):
            lost.append(f"a {message['role']} message")
    greeted = messages[0]["role"] == "assistant"
    return [*lost, *(["a greeting"] if greeted else [])]


def _join(turns: list[Turn], whole: str) -> list[tuple[str, list[Span]]]:
    """Groups turns into texts: a turn joins the next one if that one's text begins with its own.

    Args:
        turns: in the order of the conversation.
        whole: the rendering of all of it, which the last ones join.
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
    """Token ids of a text and the characters that each covers, without gaps."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


def tokenise(text: str, cuts: list[int], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenises a text so that a line break never joins the prompt with the model's own text.

    Args:
        text: rendered.
        cuts: characters at which the model began or ceased to write, ascending.
        tokenizer: the target's.
    """
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    # Tokens shall cover the text without gaps. Some tokenizers trim spaces off their offsets, down
    # to nothing for a token of spaces: ` b` of `a b` is (2, 3), not (1, 3). Each token therefore
    # starts where the one before it ended; those that share a character (an emoji's) keep it.
    starts, ends, covered = [], [], 0
    for low, high in encoding["offset_mapping"]:
        starts.append(min(low, covered))
        ends.append(high)
        covered = max(covered, high)
    tokens = Tokens(encoding["input_ids"], starts, ends)
    for cut in cuts:
        at = bisect_right(tokens.ends, cut)
        within = at < len(tokens.ids) and tokens.starts[at] < cut
        if not within or tokens.ids[at] in tokenizer.added_tokens_decoder:
            continue
        # A space before a word is the word's: what ends in one is read as if it did not.
        before, after = text[tokens.starts[at] : cut], text[cut : tokens.ends[at]]
        if before.strip(" ") or not after.strip():
            left = tokenise(text[:cut], [place for place in cuts if place < cut], tokenizer)
            later = [place - cut for place in cuts if place > cut]
            right = tokenise(text[cut:], later, tokenizer)
            apart = Tokens(
                left.ids + right.ids,
                left.starts + [cut + start for start in right.starts],
                left.ends + [cut + end for end in right.ends],
            )
            same = tokenizer.decode(apart.ids) == tokenizer.decode(tokens.ids)
            return apart if same else tokens
    return tokens
