"""Token shared by a relay of hidden states and its readers."""

import os

from conf.errors import InputError

RELAY_TOKEN_VARIABLE = "HEADSMITH_RELAY_TOKEN"


def find_relay_token() -> str | None:
    """Token in this machine's environment; None if unset.

    Raises:
        InputError: the token cannot be sent.
    """
    found = os.environ.get(RELAY_TOKEN_VARIABLE)
    if found and not (found.isascii() and found.isprintable() and " " not in found):
        raise InputError(
            f"{RELAY_TOKEN_VARIABLE}: cannot be sent; allowed are ASCII letters, digits and "
            "signs, without spaces"
        )
    return found or None
