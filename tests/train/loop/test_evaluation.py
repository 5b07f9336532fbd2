"""Held-out figures, by position."""

from pathlib import Path

import pytest
import torch

from tests.train.loop.test_loop import T, fit, lines, rows, settings
from train.loop import evaluation


def test_accuracies_are_told_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "short", settings())
    assert not any("1k" in key for line in lines(tmp_path / "short") for key in line)
    monkeypatch.setattr(evaluation, "EDGES", torch.tensor([2, 4]))
    monkeypatch.setattr(evaluation, "RANGES", ("0-2", "2-4", "4-"))
    fit(tmp_path / "long", settings())
    found = [line for line in lines(tmp_path / "long") if "eval/loss" in line][-1]
    whole = [line for line in lines(tmp_path / "short") if "eval/loss" in line][-1]
    assert found["eval/loss"] == pytest.approx(whole["eval/loss"], rel=1e-6)
    assert found["eval/top1_d1"] == whole["eval/top1_d1"]
    x, learnt = (torch.stack([row[name] for row in rows(3)]) for name in ("x", "loss_mask"))
    positive = (x[..., 0] > 0) & learnt
    for name, places in (("0-2", slice(0, 2)), ("2-4", slice(2, 4)), ("4-", slice(4, T))):
        share = positive[:, places].sum() / learnt[:, places].sum()
        assert found[f"eval/{name}/top1_d1"] == pytest.approx(float(share))
