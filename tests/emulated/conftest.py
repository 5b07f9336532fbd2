"""Collected only in a process that has no way back: the one that `test_emulated.py` starts.

One test alone, once that has compiled the guard:
`HEADSMITH_EMULATED_GUARD=$(ls .pytest_cache/d/emulated/*.so) pytest tests/emulated -k ...`.
"""

from collections.abc import Iterator

import pytest
from emulated import guard  # before torch

if not guard.is_loaded():
    collect_ignore_glob = ["*.py"]
else:
    from emulated import cuda, device

    cuda.install()

    @pytest.fixture(autouse=True, scope="session")
    def emulated() -> Iterator[None]:
        with device.Mode():
            yield
