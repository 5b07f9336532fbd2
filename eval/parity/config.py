"""Keys of `config.json` as a serving engine reads them: one that would be guessed is an error."""

from pathlib import Path
from typing import Any

from conf.errors import InputError

MISSING = object()


class Settings:
    """A JSON object of `config.json`.

    Args:
        values: the object.
        file: for messages.
        engine: the serving engine that reads it, for messages.
        prefix: of its keys, for messages.
    """

    def __init__(self, values: dict[str, Any], file: Path, engine: str, prefix: str = "") -> None:
        self._values, self.file, self.engine, self._prefix = values, file, engine, prefix

    def get(self, key: str) -> Any:
        """The value, or None."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """True if the key is there, if only as null."""
        return key in self._values

    def keys(self) -> list[str]:
        """All keys."""
        return list(self._values)

    def need(self, key: str, kind: type, otherwise: str) -> Any:
        """The value of a key that must be there.

        Args:
            key: its name.
            kind: of the value; float takes an int, too.
            otherwise: what the serving engine would do without it.

        Raises:
            InputError: absent, null or of another type.
        """
        value = self._values.get(key, MISSING)
        if value is MISSING or value is None:
            found = "absent" if value is MISSING else "null"
            raise InputError(
                f"{self.file}: {self._prefix}{key} is {found}: without it {self.engine} "
                f"{otherwise}; must be a value of type {kind.__name__}"
            )
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise self.wrong(key, f"a value of type {kind.__name__}")
        return value

    def part(self, key: str) -> "Settings":
        """A nested object; empty if it is absent or null.

        Raises:
            InputError: something else.
        """
        value = self._values.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Settings(value, self.file, self.engine, f"{self._prefix}{key}.")

    def only(self, key: str, *allowed: object) -> None:
        """Checks a key that may be absent.

        Raises:
            InputError: it has a value that is not allowed.
        """
        if key in self._values and self._values[key] not in allowed:
            raise self.wrong(key, " or ".join(map(repr, allowed)))

    def equal(self, key: str, expected: object, why: str, otherwise: str) -> None:
        """Checks a key that must have one value.

        Args:
            key: its name.
            expected: the value.
            why: where the value comes from.
            otherwise: what the serving engine would do without the key.

        Raises:
            InputError: absent or another value.
        """
        if self.need(key, type(expected), otherwise) != expected:
            raise self.wrong(key, f"{expected!r}, {why}")

    def wrong(self, key: str, allowed: str) -> InputError:
        """The error to raise about the value of a key."""
        found = repr(self._values[key]) if key in self._values else "absent"
        return InputError(
            f"{self.file}: {self._prefix}{key} is {found}: {self.engine} needs {allowed}"
        )


def one_value(key: str, kind: type, otherwise: str, *places: Settings) -> Any:
    """The value of a key that may stand in several places but must be the same in all.

    Raises:
        InputError: nowhere, of another type, or two values.
    """
    having = [place for place in places if place.has(key)] or [places[0]]
    first = having[0].need(key, kind, otherwise)
    for place in having[1:]:
        if place.need(key, kind, otherwise) != first:
            raise place.wrong(key, f"{first!r}, as the other place for it in the file says")
    return first
