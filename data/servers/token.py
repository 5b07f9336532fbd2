"""The token that a relay of hidden states and those who read from it share."""

import os

from conf.errors import InputError

TOKEN = "HEADSMITH_RELAY_TOKEN"


def token() -> str | None:
    """The token of this machine's environment; None for none.

    Raises:
        InputError: it cannot be sent.
    """
    found = os.environ.get(TOKEN)
    if found and not (found.isascii() and found.isprintable() and " " not in found):
        raise InputError(f"{TOKEN}: allowed are ASCII letters, digits and signs, without spaces")
    return found or None
