"""Where this machine keeps what is made once."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$HEADSMITH_CACHE`, or `~/.cache/headsmith`."""
    return Path(os.environ.get("HEADSMITH_CACHE") or "~/.cache/headsmith").expanduser().absolute()
