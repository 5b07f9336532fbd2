"""Prompts to measure on: questions of dialogues, turn by turn, split over processes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.errors import InputError
from data.prepared.packing import check_token_ids
from data.rows.records import Messages, Record
from data.templates.chat_template import Tools
from data.templates.record_encoder import RecordEncoder
from data.templates.reply_parser import call_tags, parse_reply, thinking_tags
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt; `token_ids` end where the response begins."""

    category: str
    token_ids: list[int]
    dialogue: int = 0
    """Index of its record."""
    turn: int = 1
    """Turn, counted from 1."""
    messages: Messages = field(default_factory=list)
    """Rendered messages; the last is the user's."""
    thinking: tuple[tuple[str, str], ...] = ()
    """Pairs of tags around thinking in the response, in all their spellings."""
    call_tags: tuple[str, str] | None = None
    """Texts around tool calls in the response; None without tools, or where a template renders no
    calls."""
    location: str = ""
    """File and line of the record, and the turn."""
    tools: Tools = None
    """Function schemas that the prompt shows."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the template, including those of the settings."""

    @property
    def question(self) -> str:
        """Return the user's last words, for reports."""
        return self.messages[-1]["content"] if self.messages else ""


def render_first_turns(records: Sequence[Record], encoder: RecordEncoder) -> list[Prompt]:
    """Render every dialogue up to its first question.

    Raises:
        InputError: a record has no user message, or the template refuses it.
    """
    prompts = []
    for index, record in enumerate(records):
        messages, users = record.messages or [], select_user_messages(record)
        if not users:
            raise InputError(
                f"{record.where}: has no user message to answer, but measuring needs prompts; "
                "remove the row, or name other data"
            )
        start = messages[: messages.index(users[0]) + 1]
        prompts.append(_encode_turn(record, index, 1, start, encoder))
    return prompts


def render_next_turn(
    record: Record, prompt: Prompt, answer: list[int], encoder: RecordEncoder
) -> list[Prompt]:
    """Render the question after a prompt; an empty list if the dialogue has none.

    The dialogue continues from the target's answer, with thinking and text split, as the template
    renders an earlier turn. The data's answers and tool messages are left out, but a system message
    stays at the start. An answer without text stays as an empty turn, so the dialogues asked never
    depend on the answers. To compare methods, give all of them the same answers.

    Args:
        record: record of the prompt.
        prompt: prompt of the earlier turn.
        answer: the target's tokens after the prompt.
        encoder: encoder with the target's chat template.

    Raises:
        InputError: the template refuses the dialogue.
    """
    users = select_user_messages(record)[prompt.turn :]
    if not users:
        return []
    written = encoder.tokenizer.decode(answer, clean_up_tokenization_spaces=False)
    template = encoder.build_template(record.template_kwargs, record.tools)
    reply = parse_reply(str(written), prompt.messages, template, record.tools)
    messages = [*prompt.messages, reply, users[0]]
    return [_encode_turn(record, prompt.dialogue, prompt.turn + 1, messages, encoder)]


def select_user_messages(record: Record) -> Messages:
    """Select the messages of a record that the user wrote."""
    return [message for message in record.messages or [] if message["role"] == "user"]


def _encode_turn(
    record: Record, dialogue: int, turn: int, messages: Messages, encoder: RecordEncoder
) -> Prompt:
    location = f"{record.where}, turn {turn}"
    try:
        token_ids = encoder.encode_prompt(messages, record.tools, record.template_kwargs)
    except InputError as error:
        raise InputError(f"{location}: {error}") from None
    template = encoder.build_template(record.template_kwargs, record.tools)
    return Prompt(
        record.category, token_ids, dialogue, turn, messages,
        thinking=thinking_tags(template, record.tools),
        call_tags=call_tags(template) if record.tools else None,
        location=location, tools=record.tools,
        template_kwargs=encoder.template_kwargs | dict(record.template_kwargs),
    )  # fmt: skip


def format_unread_settings(prompts: Sequence[Prompt], encoder: RecordEncoder) -> list[str]:
    """Format a line for tools that the target's template hides, and for variables it never reads.

    Figures of such prompts say nothing of tool calls or of thinking.

    Args:
        prompts: first prompts of the dialogues.
        encoder: encoder with the target's chat template.
    """
    lines = []
    hidden = sum(not _shows_tools(prompt, encoder) for prompt in prompts)
    if hidden:
        lines.append(
            f"{hidden} of {len(prompts)} prompts have tools that the target's chat template does "
            "not show, so no answer to them calls a tool; measure a target whose template reads "
            "'tools'"
        )
    sources = {
        name: encoder.build_template(prompt.template_kwargs, prompt.tools).source
        for prompt in prompts
        for name in prompt.template_kwargs
    }
    lines += [
        f"data.chat_template_kwargs: the target's chat template reads no {name!r}, so this changes "
        "no prompt"
        for name, source in sources.items()
        if name != "chat_template" and not re.search(rf"\b{re.escape(name)}\b", source)
    ]
    return lines


def _shows_tools(prompt: Prompt, encoder: RecordEncoder) -> bool:
    """Tell whether a prompt names all of its tools; True without tools."""
    text = encoder.tokenizer.decode(prompt.token_ids) if prompt.tools else ""
    return all(str(tool.get("function", tool).get("name")) in text for tool in prompt.tools or ())


def check_prompt(target: EmbeddingsAndOutputHead, prompt: Prompt, max_new_tokens: int) -> None:
    """Refuse a prompt that the target cannot read, or that leaves no room for an answer.

    Drafts need no room.

    Raises:
        InputError: the prompt does not fit; the message names the place of the prompt.
    """
    check_token_ids(prompt.token_ids, target, lambda: prompt.location)
    length = len(prompt.token_ids)
    if target.max_positions is not None and length + max_new_tokens > target.max_positions:
        raise InputError(
            f"{prompt.location}: {length} prompt tokens and max_new_tokens={max_new_tokens} are "
            f"{length + max_new_tokens}, above the target's window of {target.max_positions}; "
            "lower max_new_tokens or num_turns, or set data.on_bad_row=skip to skip such turns"
        )


def select_process_prompts(
    prompts: Sequence[Prompt], process_index: int, num_processes: int
) -> list[Prompt]:
    """Select the prompts that a process answers.

    Dialogues are dealt in turn, so that each category is spread, and all turns of a dialogue stay
    with one process:

        dialogues 0 1 2 3 4 0 1 2, 2 processes -> 0 2 4 0 2 and 1 3 1
    """
    return [prompt for prompt in prompts if prompt.dialogue % num_processes == process_index]
