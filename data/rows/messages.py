"""Published messages in one shape: roles, parts, reasoning, tool calls."""

import json
import re
from typing import Any

from data.rows.field_checks import (
    MalformedRowError,
    format_found_value,
    is_empty,
    make_value_error,
    parse_if_json,
    parse_list,
    parse_object,
    parse_text,
    parse_unicode,
)

Message = dict[str, Any]
"""Message with `role` (system, developer, user, assistant or tool) and `content`, a string.
Optional: `reasoning_content`, `tool_calls`, `tool_call_id` and `name`, as chat templates read
them; `content_parts`, the texts of a content of several parts, which `content` has a line each."""
Messages = list[Message]

CALL = "tool call"
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool", "developer")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "bot"), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), CALL),
}
"""Role of each published name of a role."""
SYSTEM = ("system", "developer")
REASONING = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = ("text", "input_text", "output_text")
MASKING = re.compile(
    r"(.+_)?(loss|mask|masked|train|training|trainable|learn|learnable|weight|supervised|ignored?)(_.+)?"
)
"""Names of masks, whoever uses them."""
MEDIA = (
    "image", "images", "image_url", "input_image", "video", "videos", "video_url", "audio",
    "audios", "audio_url", "input_audio", "pixel_values",
)  # fmt: skip
MOST_IDS = 2**31
LEARNT = (
    "weight", "train", "training", "loss", "loss_mask", "loss_weight", "loss_scale", "trainable",
    "train_on_turn", "learnable", "mask",
)  # fmt: skip
"""Fields of OpenAI, axolotl, ms-swift, verl, tinker and home-llm: 0 or false is not learnt."""
LEARNT_RANGES = ("train_detail", "training_detail")
"""Fields of axolotl: ranges of characters to learn."""
END_REASONS = ("finish_reason", "stop_reason")
"""Fields in which servers of OpenAI and Anthropic say why an answer ended."""
CUT_OFF = ("length", "max_tokens")
"""Reasons of an answer that a server cut off."""
PLACE = re.compile(r"\[\d+\]")


class Conversation:
    """Messages of a row.

    Attributes:
        messages: messages so far.
        unlearnt: indices of messages that the row excludes from learning.
        written: token ids by message index, for messages that the target wrote.
        unread: names of fields that are not read, e.g. `messages[].annotations`.
    """

    def __init__(self, system: str | None = None):
        """Begin a conversation.

        Args:
            system: system text that the row has beside its messages, if any.
        """
        self.messages: Messages = []
        self.unlearnt: set[int] = set()
        self.written: dict[int, list[int]] = {}
        self.cut_off: set[int] = set()
        self.unread: dict[str, None] = {}
        self._num_given = 0
        if system:
            self.messages.append({"role": "system", "content": system})
            self._num_given = 1

    def add_text(self, role: str, value: object, name: str) -> None:
        """Add a message of a role with the text of the field `name`.

        Raises:
            MalformedRowError: the text is missing.
        """
        self.messages.append({"role": role, "content": parse_text(value, name)})

    def add_message(self, item: object, key: str, index: int) -> None:
        """Add a message in the one shape.

        Args:
            item: message as stored in the row.
            key: field of the row.
            index: index in that field.

        Raises:
            MalformedRowError: the item is no message, or does not fit the messages before it.
        """
        name, item = f"{key}[{index}]", parse_if_json(item)
        if not isinstance(item, dict):
            raise make_value_error(name, item, "an object with 'role' and 'content'")
        fields = dict(item)
        refuse_media(fields, f"{name}.")
        if "input" in fields and "output" in fields and "content" not in fields:  # Capybara's turns
            self.add_text("user", fields.pop("input"), f"{name}.input")
            self.add_text("assistant", fields.pop("output"), f"{name}.output")
            if parse_unlearnt(fields, f"{name}."):
                self.unlearnt.add(len(self.messages) - 1)
        else:
            self._add_message(fields, name)
        self._note_unread_fields(fields, name)

    def add_messages(self, items: list, key: str) -> None:
        """Add the messages of a field. Raises as `add_message` does."""
        for index, item in enumerate(items):
            self.add_message(item, key, index)

    def _note_unread_fields(self, fields: dict[str, Any], name: str) -> None:
        for field, value in fields.items():
            if not is_empty(value):
                self.unread[f"{PLACE.sub('[]', name)}.{field}"] = None

    def _add_message(self, fields: dict[str, Any], name: str) -> None:
        key = "role" if "role" in fields or "from" not in fields else "from"
        given = fields.pop(key, None)
        role = ROLES.get(given.strip().lower()) if isinstance(given, str) else None
        if role is None:
            raise make_value_error(f"{name}.{key}", given, ", ".join(ROLES))
        message: Message = {"role": role, "content": ""}
        absent = "value" if key == "from" else "content"
        content_key = next((k for k in ("content", "value") if k in fields), absent)
        content = fields.pop(content_key, None)
        if role == CALL:
            message["role"] = role = "assistant"
            message["tool_calls"] = self._parse_calls(content, f"{name}.{content_key}")
            content = None
        if role == "assistant":
            self._parse_assistant_fields(fields, message, name)
        elif role == "tool" and all(m["role"] != "assistant" for m in self.messages):
            raise MalformedRowError(f"{name}.role", "a tool's result before any call", "after it")
        elif not is_empty(fields.get("tool_calls")):
            raise MalformedRowError(f"{name}.tool_calls", f"calls of the {role}", "the assistant's")
        may_be_empty = len(message) > 2 or role in ("tool", *SYSTEM)
        message |= self._parse_content(content, f"{name}.{content_key}", may_be_empty)
        for key in ("tool_call_id", "name"):
            if not is_empty(fields.get(key)):
                message[key] = parse_text(fields.pop(key), f"{name}.{key}")
        if role in SYSTEM and self._says_nothing_new(message, name):
            return
        if role == "assistant" and not is_empty(fields.get("token_ids")):
            key = f"{name}.token_ids"
            ids = parse_list(fields.pop("token_ids"), key, "token ids")
            self.written[len(self.messages)] = parse_token_ids(ids, key)
        if role == "assistant" and pop_cut_off(fields):
            self.cut_off.add(len(self.messages))
        if parse_unlearnt(fields, f"{name}.", role):
            self.unlearnt.add(len(self.messages))
        self.messages.append(message)

    def _says_nothing_new(self, message: Message, name: str) -> bool:
        if not message["content"].strip():
            return True
        if not self._num_given or len(self.messages) > self._num_given:
            return False
        given = self.messages[0]["content"]
        if given.strip() != message["content"].strip():
            raise MalformedRowError(
                f"{name}.content",
                f"another system text, {format_found_value(message['content'])}, than the row's "
                "own",
                "one of them",
            )
        self.messages[0] = message
        return True

    def _parse_content(self, value: object, name: str, may_be_empty: bool) -> Message:
        """Parse a content into `content`, and `content_parts` if it has several parts."""
        parts = value if isinstance(value, list) else []
        texts = [self._parse_part(part, name, index) for index, part in enumerate(parts)]
        if isinstance(value, list):
            value = "\n".join(texts)
        is_blank = value is None or (isinstance(value, str) and not value.strip())
        content = value or "" if may_be_empty and is_blank else parse_text(value, name)
        return {"content": content} | ({"content_parts": texts} if len(texts) > 1 else {})

    def _parse_part(self, part: object, name: str, index: int) -> str:
        name = f"{name}[{index}]"
        if isinstance(part, str):
            return parse_unicode(part, name)
        if not isinstance(part, dict):
            raise make_value_error(name, part, "an object with 'type' and 'text'")
        fields = dict(part)
        kind = fields.pop("type", "text")
        if kind not in TEXT_PARTS:
            raise MalformedRowError(name, f"a part of type {kind!r}", "parts of type 'text'")
        refuse_media(fields, f"{name}.")
        text = fields.pop("text", None)
        if not isinstance(text, str):
            raise make_value_error(f"{name}.text", text, "a string")
        self._note_unread_fields(fields, name)
        return parse_unicode(text, name)

    def _parse_assistant_fields(self, fields: dict[str, Any], message: Message, name: str) -> None:
        """Move the reasoning and the calls from the fields of a row into an assistant's message."""
        for key in REASONING:
            if is_empty(fields.get(key)):
                continue
            text = parse_text(fields.pop(key), f"{name}.{key}")
            if message.setdefault("reasoning_content", text) != text:
                raise MalformedRowError(f"{name}.{key}", "another reasoning", "one per message")
        for key in ("tool_calls", "function_call"):
            if not is_empty(fields.get(key)):
                calls = self._parse_calls(fields.pop(key), f"{name}.{key}")
                message["tool_calls"] = message.get("tool_calls", []) + calls

    def _parse_calls(self, value: object, name: str) -> list[Message]:
        calls = parse_if_json(value)
        if isinstance(calls, dict):
            return [self._parse_call(calls, name)]
        calls = parse_list(calls, name, "tool calls")
        return [self._parse_call(call, f"{name}[{index}]") for index, call in enumerate(calls)]

    def _parse_call(self, value: object, name: str) -> Message:
        """Rewrite a call as OpenAI does, with arguments as an object, as templates need them."""
        given = parse_object(value, name, "a call with 'function', or with 'name' and 'arguments'")
        call = dict(given)
        function = call.pop("function", None)
        kind, call_id = call.pop("type", None), call.pop("id", None)
        if kind not in (None, "function"):
            raise make_value_error(f"{name}.type", kind, "function")
        if function is None:
            function, call = call, {}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise make_value_error(f"{name}.function", function, "an object with a 'name'")
        rest = {k: v for k, v in function.items() if k not in ("name", "arguments")}
        self._note_unread_fields(call | rest, name)
        arguments = parse_call_arguments(function.get("arguments"), f"{name}.arguments")
        ids = {} if is_empty(call_id) else {"id": call_id}
        function = {"name": function["name"], "arguments": arguments}
        return {"type": "function", **ids, "function": function}


def parse_call_arguments(value: object, name: str) -> dict[str, Any]:
    """Parse the arguments of a call into an object. Every usual spelling of none gives {}.

    Raises:
        MalformedRowError: the value is neither an object nor a JSON object.
    """
    if is_empty(value) or (isinstance(value, str) and value.strip() in ("", "null")):
        return {}
    return parse_object(value, name, "an object, or one written as JSON")


def format_call_arguments(message: Message) -> Message:
    """Copy a message with call arguments as JSON text, as servers and some templates need."""
    if "tool_calls" not in message:
        return message
    functions = (call["function"] for call in message["tool_calls"])
    texts = [function | {"arguments": json.dumps(function["arguments"])} for function in functions]
    calls = zip(message["tool_calls"], texts, strict=True)
    return message | {"tool_calls": [call | {"function": text} for call, text in calls]}


def refuse_media(fields: dict[str, Any], prefix: str = "") -> None:
    """Refuse images, audio and the like, as the target's text lacks them.

    Args:
        fields: fields of a row or a message.
        prefix: start of the field's name in the error.

    Raises:
        MalformedRowError: the error names the first such field.
    """
    for key in MEDIA:
        value = fields.get(key)
        if not is_empty(value) and value is not False:
            raise make_value_error(prefix + key, value, "text alone, without this field")


def parse_unlearnt(fields: dict[str, Any], prefix: str = "", role: str = "assistant") -> bool:
    """Tell whether a message or a row is excluded from learning; remove the fields that say so.

    Args:
        fields: fields of the message or the row.
        prefix: start of the field's name in the error.
        role: role of the message. Only messages of the assistant are learnt.

    Raises:
        MalformedRowError: a field says neither yes nor no, or excludes a part of a message.
    """
    unlearnt = False
    for key in LEARNT:
        value = fields.get(key)
        if value is None:
            continue
        # Where `mask` is true, some tools learn the message and others leave it out.
        is_unclear = key == "mask" and isinstance(value, bool)
        if not isinstance(value, int | float) or value not in (0, 1) or is_unclear:
            allowed = "0 or 1 (learnt)" if key == "mask" else "0 or 1, false or true"
            raise make_value_error(prefix + key, value, allowed)
        if role == "assistant" or not value:
            del fields[key]
        unlearnt = unlearnt or not value
    for key, value in fields.items() if role == "assistant" else ():
        if MASKING.fullmatch(key) and isinstance(value, int | float | list) and value != []:
            allowed = "a mask of a known name: train, true or false for the whole message"
            raise make_value_error(prefix + key, value, allowed)
    return unlearnt


def pop_cut_off(fields: dict[str, Any]) -> bool:
    """Remove the reasons why an answer ended; tell whether a server had cut the answer off."""
    reasons = [fields.pop(name, None) for name in END_REASONS]
    return not set(CUT_OFF).isdisjoint(map(str, reasons))


def restore_parts(message: Message) -> Message:
    """Copy a message with its content as parts, as rows, servers and some templates have it."""
    if "content_parts" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "content_parts"}
    return rest | {"content": [{"type": "text", "text": t} for t in message["content_parts"]]}


def parse_token_ids(ids: list, name: str) -> list[int]:
    """Check that a list holds token ids, and return it.

    Raises:
        MalformedRowError: an entry is negative, no integer, or larger than any vocabulary.
    """
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < MOST_IDS:
            raise make_value_error(f"{name}[{index}]", token, "a token id")
    return ids


def parse_tools(value: object, name: str) -> list[dict] | None:
    """Parse function schemas into OpenAI's notation; wrap bare schemas; None if there are none.

    Raises:
        MalformedRowError: a schema has no name.
    """
    if is_empty(value) or is_empty(parse_if_json(value)):
        return None
    tools = []
    for index, item in enumerate(parse_list(value, name, "function schemas")):
        tool = parse_object(item, f"{name}[{index}]", "a function schema")
        bare = {key: part for key, part in tool.items() if key != "type"}
        function = tool.get("function", bare)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise make_value_error(f"{name}[{index}]", item, "a function with a 'name'")
        tools.append(tool if "function" in tool else {"type": "function", "function": function})
    return tools
