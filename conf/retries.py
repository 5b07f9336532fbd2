"""Trying again what a network file system refused for a moment."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

FINAL = (errno.ENOSPC, errno.ENOENT, errno.EACCES)
"""A full disk, a missing file and a forbidden one are the same a second later."""


def retried(action: Callable[[], Result], attempts: int = 4, wait_s: float = 0.5) -> Result:
    """Runs an action again, after a growing pause, where it failed with an OSError that may pass.

    Args:
        action: starts from the beginning each time.
        attempts: at most.
        wait_s: seconds before the second attempt; each later pause is twice the one before.

    Raises:
        OSError: the last one, or one of `FINAL` at once.
    """
    for attempt in range(attempts - 1):
        try:
            return action()
        except OSError as error:
            if error.errno in FINAL:
                raise
            time.sleep(wait_s * 2**attempt)
    return action()
