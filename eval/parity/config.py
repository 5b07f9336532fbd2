"""Keys of `config.json` as a serving engine reads them. A value that it would guess is an error."""

from pathlib import Path
from typing import Any

from conf.errors import InputError

MISSING = object()


class EngineConfig:
    """JSON object of `config.json`.

    Args:
        values: the object.
        file: file name in messages.
        engine: serving engine in messages.
        prefix: prefix of its keys in messages.
    """

    def __init__(self, values: dict[str, Any], file: Path, engine: str, prefix: str = "") -> None:
        self._values, self.file, self.engine, self._prefix = values, file, engine, prefix

    def get(self, key: str) -> Any:
        """Value of a key, or None."""
        return self._values.get(key)

    def has_key(self, key: str) -> bool:
        """Tell whether the key exists, even as null."""
        return key in self._values

    def list_keys(self) -> list[str]:
        """All keys."""
        return list(self._values)

    def require_key(self, key: str, kind: type, otherwise: str) -> Any:
        """Value of a required key.

        Args:
            key: name of the key.
            kind: type of the value; float allows int.
            otherwise: what the serving engine would do without the key.

        Raises:
            InputError: the key is missing, null or of another type.
        """
        value = self._values.get(key, MISSING)
        if value is MISSING or value is None:
            found = "absent" if value is MISSING else "null"
            raise InputError(
                f"{self.file}: {self._prefix}{key} is {found}: without it {self.engine} "
                f"{otherwise}; must be a value of type {kind.__name__}"
            )
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise self.make_error(key, f"a value of type {kind.__name__}")
        return value

    def get_section(self, key: str) -> "EngineConfig":
        """Nested object; empty if missing or null.

        InputError: the value is no object.
            InputError: something else.
        """
        value = self._values.get(key) or {}
        if not isinstance(value, dict):
            raise self.make_error(key, "an object")
        return EngineConfig(value, self.file, self.engine, f"{self._prefix}{key}.")

    def check_allowed(self, key: str, *allowed: object) -> None:
        """Check an optional key.

        InputError: the value is not allowed.
            InputError: it has a value that is not allowed.
        """
        if key in self._values and self._values[key] not in allowed:
            raise self.make_error(key, " or ".join(map(repr, allowed)))

    def check_equal(self, key: str, expected: object, why: str, otherwise: str) -> None:
        """Check a key that must have one value.

        Args:
            key: name of the key.
            expected: required value.
            why: origin of the value.
            otherwise: what the serving engine would do without the key.

        InputError: the key is missing, or has another value.
            InputError: absent or another value.
        """
        if self.require_key(key, type(expected), otherwise) != expected:
            raise self.make_error(key, f"{expected!r}, {why}")

    def make_error(self, key: str, allowed: str) -> InputError:
        """Make an error about the value of a key."""
        found = repr(self._values[key]) if key in self._values else "absent"
        return InputError(
            f"{self.file}: {self._prefix}{key} is {found}: {self.engine} needs {allowed}"
        )


def require_same_value(key: str, kind: type, otherwise: str, *places: EngineConfig) -> Any:
    """Value of a key that may occur in several places, but must be equal in all.

    Raises:
        InputError: the key is missing, of another type, or has two values.
    """
    having = [place for place in places if place.has_key(key)] or [places[0]]
    first = having[0].require_key(key, kind, otherwise)
    for place in having[1:]:
        if place.require_key(key, kind, otherwise) != first:
            raise place.make_error(key, f"{first!r}, as at the other place in the file")
    return first
