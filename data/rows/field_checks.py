"""Checks of the values in a row's fields, with errors that name the field."""

import json
from collections.abc import Callable
from typing import Any


class MalformedRowError(Exception):
    """A field of a row has a value that its form does not allow."""

    def __init__(self, name: str, found: str, allowed: str):
        super().__init__(name, found, allowed)  # all arguments, so that the error can be pickled
        self.name, self.found, self.allowed = name, found, allowed

    def __str__(self) -> str:
        return f"field '{self.name}': found {self.found}; allowed: {self.allowed}"


def format_found_value(value: object) -> str:
    """Format a value and its type for a message, shortened to 60 characters."""
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except RecursionError:
        text = "deeply nested"
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def make_value_error(name: str, value: object, allowed: str) -> MalformedRowError:
    """Make the error about a field with this value."""
    return MalformedRowError(name, format_found_value(value), allowed)


def show_fields(value: object) -> str:
    """Format the names of a row's fields for a message."""
    if not isinstance(value, dict):
        return format_found_value(value)
    return "the fields " + ", ".join(map(str, value)) if value else "no fields"


def parse_json(text: str, object_hook: Callable[[dict], dict] | None = None) -> Any:
    """Decode JSON, with a hook that replaces each object.

    Raises:
        ValueError: the text is not JSON, or has too deep nesting or too long numbers.
    """
    try:
        return json.loads(text, object_hook=object_hook)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("JSON with too deep nesting") from None
    except ValueError as error:  # Python refuses integers of some thousand digits
        raise ValueError(f"JSON with too long a number ({error})") from None


def is_empty(value: object) -> bool:
    """Tell whether a field has no value: None, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def parse_text(value: object, name: str, allowed: str = "a string") -> str:
    """Check that a value is a non-empty text, and return it.

    Raises:
        MalformedRowError: the value is no text, empty, or not valid Unicode.
    """
    if not isinstance(value, str):
        raise make_value_error(name, value, allowed)
    if not value or value.isspace():
        raise MalformedRowError(name, "empty text", "a non-empty string")
    return parse_unicode(value, name)


def parse_unicode(value: str, name: str) -> str:
    """Check that a text can be encoded, and return it.

    Raises:
        MalformedRowError: the text has half of a surrogate pair.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MalformedRowError(name, "half of a surrogate pair", "valid Unicode") from None
    return value


def remove_white_space(text: str) -> str:
    """Remove white space from a text."""
    return "".join(text.split())


def parse_list(value: object, name: str, items: str) -> list:
    """Check that a value is a non-empty list, or the JSON text of one; return the list.

    Raises:
        MalformedRowError: the value is no list or empty.
    """
    content = parse_if_json(value)
    if not isinstance(content, list) or not content:
        raise make_value_error(name, value, f"a non-empty list of {items}")
    return content


def parse_object(value: object, name: str, allowed: str) -> dict[str, Any]:
    """Check that a value is an object, or the JSON text of one; return the object.

    Raises:
        MalformedRowError: the value is no object, or cannot be written as JSON.
    """
    content = parse_if_json(value)
    if not isinstance(content, dict):
        raise make_value_error(name, value, allowed)
    try:
        parse_unicode(json.dumps(content, ensure_ascii=False), name)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRowError(name, f"a value that JSON cannot hold ({error})", allowed) from None
    return content


def parse_if_json(value: object) -> object:
    """Decode a JSON text of a list or object; return anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parse_json(value)
        except ValueError:
            return value
    return value
