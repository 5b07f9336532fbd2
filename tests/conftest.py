"""Rules for every test."""

import gc
import os

# Before torch is imported. Matrices are small here: threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not among what was imported, which is much."""
    gc.freeze()
