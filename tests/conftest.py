"""Rules for every test."""

import functools
import gc
import os
import ssl

from hypothesis import HealthCheck, settings

# Before torch is imported. Matrices are small here: threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Every client of a server would read all certificates, though no server here has one.
ssl.create_default_context = functools.cache(ssl.create_default_context)

settings.register_profile(
    "fixed", derandomize=True, max_examples=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("fixed")


def pytest_collection_finish() -> None:
    """Keep what was imported, which is much, out of every search for garbage."""
    gc.freeze()
