"""Checks the few types of values that rows are made of."""

import json
from typing import Any


class MalformedRowError(Exception):
    """A field of a row is not what its form asks for."""

    def __init__(self, name: str, found: str, allowed: str):
        super().__init__(name, found, allowed)  # all of them, so that processes can hand it on
        self.name, self.found, self.allowed = name, found, allowed

    def __str__(self) -> str:
        return f"field '{self.name}': found {self.found}; allowed: {self.allowed}"


def show(value: object) -> str:
    """A value with its type for a message, shortened."""
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except RecursionError:
        text = "deeply nested"
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def show_fields(value: object) -> str:
    """The names of a row's fields for a message."""
    if not isinstance(value, dict):
        return show(value)
    return "the fields " + ", ".join(map(str, value)) if value else "no fields"


def parse_json(text: str) -> Any:
    """Decodes JSON.

    Raises:
        ValueError: with the reason, whatever it is (also too deep, or too long a number).
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except ValueError as error:  # Python refuses integers beyond some thousand digits
        raise ValueError(f"JSON with a number that is too long ({error})") from None


def empty(value: object) -> bool:
    """True if a field says nothing: absent columns of tables, empty texts, lists and objects."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def text_of(value: object, name: str, allowed: str = "a string") -> str:
    """A text that has something in it.

    Raises:
        MalformedRowError: it is something else, empty or not valid Unicode.
    """
    if not isinstance(value, str):
        raise MalformedRowError(name, show(value), allowed)
    if not value or value.isspace():
        raise MalformedRowError(name, "empty text", "a non-empty string")
    return unicode_of(value, name)


def unicode_of(value: str, name: str) -> str:
    """Checks that a text can be encoded.

    Raises:
        MalformedRowError: it holds half of a surrogate pair.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MalformedRowError(name, "half of a surrogate pair", "valid Unicode") from None
    return value


def list_of(value: object, name: str, items: str) -> list:
    """A list with something in it, also one that is written as JSON.

    Raises:
        MalformedRowError: it is something else or empty.
    """
    content = decoded(value)
    if not isinstance(content, list) or not content:
        raise MalformedRowError(name, show(value), f"a non-empty list of {items}")
    return content


def object_of(value: object, name: str, allowed: str) -> dict[str, Any]:
    """An object, also one that is written as JSON.

    Raises:
        MalformedRowError: it is something else, or cannot be written as JSON again.
    """
    content = decoded(value)
    if not isinstance(content, dict):
        raise MalformedRowError(name, show(value), allowed)
    try:
        unicode_of(json.dumps(content, ensure_ascii=False), name)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRowError(name, f"what is not JSON ({error})", allowed) from None
    return content


def decoded(value: object) -> object:
    """The content of a JSON string; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parse_json(value)
        except ValueError:
            return value
    return value
