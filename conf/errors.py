"""Errors that commands print without a traceback."""


class InputError(ValueError):
    """The user's input or settings are wrong."""
