"""Collected only in the process that `test_emulated.py` starts: there is no way back from here."""

import ctypes
import os
from collections.abc import Iterator

import pytest

GUARD = os.environ.get("HEADSMITH_EMULATED_GUARD")
if GUARD is None:
    collect_ignore_glob = ["*.py"]
else:
    ctypes.CDLL(GUARD)  # before torch
    from emulated import device

    device.install()

    @pytest.fixture(autouse=True, scope="session")
    def emulated() -> Iterator[None]:
        with device.Mode():
            yield
