"""What holds for every test."""

import gc


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not among what was imported, which is much."""
    gc.freeze()
