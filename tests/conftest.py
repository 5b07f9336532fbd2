"""Rules for every test, and what measurements leave out, as it is checked elsewhere."""

import functools
import gc
import json
import os
import ssl
import sys
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hypothesis import HealthCheck, settings

# Before torch is imported. Matrices are small here: threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Every client of a server would read all certificates, though no server here has one.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Hydra copies every setting for each composition, and copies again those that it takes.
ConfigStore.__deepcopy__ = lambda store, _memo: store  # type: ignore[attr-defined]

settings.register_profile(
    "fixed", derandomize=True, max_examples=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("fixed")


def pytest_report_header() -> list[str]:
    """The versions of `make test-engines`."""
    if not any(
        name.startswith("HEADSMITH_") and name.endswith(("_PYTHON", "_WHEEL"))
        for name in os.environ
    ):
        return []
    from environments import list_engines

    return [f"engines: {', '.join(list_engines())}"]


def pytest_collection_finish() -> None:
    """Search for garbage seldom, and never in what was imported, which is much."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    if checking := sys.modules.get("heads.target_model.check"):
        checking.check_target_support = remembered(checking)  # type: ignore[attr-defined]


def remembered(checking: Any) -> Any:
    """The check of a target, of which many are alike: models of one config are checked once."""
    check, known = checking.check_target_support, {}

    def check_once(target: Any) -> None:
        first = next(target.model.parameters())
        config = target.model.config.to_dict() | {"_name_or_path": ""}
        what = (type(target.model), first.dtype, first.device, target.config._attn_implementation)
        first_sum = 0.0 if first.is_meta else float(first.sum())
        key = (*what, first_sum, json.dumps(config, default=str))
        if key not in known:
            check(target)
            known[key] = {name: getattr(target, name) for name in checking.KEPT}
        for name, value in known[key].items():
            setattr(target, name, value)

    return check_once


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of intervals of few bootstrap draws."""
    monkeypatch.setattr("eval.measure.acceptance_stats.NUM_BOOTSTRAPS", 40)


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture of acceptance, of speed, of requests in flight, of sizes or of a comparison."""
    monkeypatch.setattr("eval.acceptance.plot_acceptance", lambda *_: None)
    monkeypatch.setattr("eval.serve.plot_load_curve", lambda *_: None)
    monkeypatch.setattr("eval.speedup.plot_speedup", lambda *_: None)
    monkeypatch.setattr("scripts.prune.plot_pruning", lambda *_: None)
    monkeypatch.setattr("scripts.compare.plot_comparison", lambda *_: None)
