"""Rules for every test, and what measurements leave out, as it is checked elsewhere."""

import functools
import gc
import os
import ssl

import pytest
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


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of intervals of few bootstrap draws."""
    monkeypatch.setattr("eval.measure.acceptance_stats.NUM_BOOTSTRAPS", 40)


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture of acceptance, of requests in flight or of a comparison."""
    monkeypatch.setattr("eval.acceptance.plot_acceptance", lambda *_: None)
    monkeypatch.setattr("eval.serve.plot_concurrency", lambda *_: None)
    monkeypatch.setattr("scripts.compare.plot_comparison", lambda *_: None)
