"""What measurements of the tests leave out, as it is checked elsewhere."""

import pytest


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of intervals of few bootstrap draws."""
    monkeypatch.setattr("eval.measure.acceptance_stats.NUM_BOOTSTRAPS", 40)


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture of acceptance."""
    monkeypatch.setattr("eval.acceptance.plot_acceptance", lambda *_: None)
