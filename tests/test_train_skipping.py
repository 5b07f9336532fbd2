"""Sequences whose loss is not finite: left out, counted, remembered, and few."""

import json
import sys
from pathlib import Path

import pytest
import torch
from test_train_launch import ROOT, TWO, arguments, curve, inputs, trained
from test_train_loop import ToyObjective, fit, lines, rows, settings, weights
from test_train_placement import assert_same_run
from torch import Tensor

from conf.schema import InputError
from train import schedule
from train.loop.skipping import Skipped
from train.loss.losses import Batch, Sums

__all__ = ["inputs"]
BAD = 5


def spoiled(value: float = torch.nan) -> list[dict[str, Tensor]]:
    data = rows(7)
    data[BAD]["x"][2] = value
    data[BAD]["loss_mask"][2] = True
    return data


def padded() -> list[dict[str, Tensor]]:
    """As if nothing had ever been in that place."""
    data = rows(7)
    data[BAD] = {name: torch.zeros_like(tensor) for name, tensor in data[BAD].items()}
    data[BAD]["document_ids"] -= 1
    return data


def shown(out_dir: Path, name: str) -> list[float]:
    return [each[name] for each in lines(out_dir) if name in each]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_goes_on_as_if_it_were_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, size: int
) -> None:
    config = settings(micro_batch_size=size)
    met = next(step for step in range(6) if BAD in schedule.sequences(step, 4, 7, seed=0))
    assert fit(tmp_path / "out", config, noise=0.3, train=spoiled(value)).finished
    said = capsys.readouterr().out
    wanted = f"step {met + 1}: the loss of packed training sequences [{BAD}] is not finite: they"
    assert said.count(wanted) == said.count("not finite") == 1
    assert "(1 of at most 8)" in said
    fit(tmp_path / "padded", config, noise=0.3, train=padded())
    assert weights(tmp_path / "out") == weights(tmp_path / "padded")
    for name in ("train/loss", "train/tokens"):
        assert shown(tmp_path / "out", name) == shown(tmp_path / "padded", name)
    assert shown(tmp_path / "out", "train/skipped_sequences") == [int(s >= met) for s in range(6)]


@pytest.mark.parametrize("begin", ["step-000002", "step-000004"])
def test_what_is_left_out_is_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], begin: str
) -> None:
    """The checkpoint before it was met finds it again, the one after it knows it."""
    config = settings(num_checkpoints=9)
    fit(tmp_path / "out", config, train=spoiled())
    saved = tmp_path / "out/checkpoints" / begin
    known = json.loads((saved / "state.json").read_text())["skipped"]
    seen = {i for step in range(int(begin[5:])) for i in schedule.sequences(step, 4, 7, seed=0)}
    assert known == ([BAD] if BAD in seen else [])
    again = settings(num_checkpoints=9, resume=str(saved))
    capsys.readouterr()
    fit(tmp_path / "again", again, train=spoiled())
    assert ("is not finite" in capsys.readouterr().out) == (not known)
    assert weights(tmp_path / "again") == weights(tmp_path / "out")


def test_a_step_in_which_all_is_bad_ends_the_run(tmp_path: Path) -> None:
    data = [{**row, "x": torch.full_like(row["x"], torch.nan)} for row in rows(7)]
    with pytest.raises(InputError, match="the loss is not finite at step 1"):
        fit(tmp_path, settings(), train=data)


def test_sequences_that_are_bad_in_company_alone_are_left_out_together(tmp_path: Path) -> None:
    class Jealous(ToyObjective):
        def forward(self, batch: Batch, scale: Tensor) -> Sums:
            sums = super().forward(batch, scale)
            worse = len(batch["x"]) > 1 and bool((batch["x"] == 7).any())
            return sums._replace(terms=sums.terms * (torch.nan if worse else 1))

    data = rows(7)
    data[BAD]["x"][2] = 7
    fit(tmp_path, settings(), train=data, objective=Jealous())
    saved = json.loads((tmp_path / "checkpoints/step-000006/state.json").read_text())
    drawn = [schedule.sequences(step, 4, 7, seed=0) for step in range(6)]
    pairs = [{*step[at : at + 2]} for step in drawn for at in (0, 2)]
    assert {*saved["skipped"]} == next(pair for pair in pairs if BAD in pair)


def test_one_percent_may_be_left_out_or_eight() -> None:
    assert (Skipped(799).most, Skipped(800).most, Skipped(5000).most) == (8, 8, 50)
    skipped = Skipped(10, known=range(6))
    said = skipped.add([8, 7], step=3)
    assert "step 3: the loss of packed training sequences [7, 8]" in said
    assert "(8 of at most 8)" in said
    with pytest.raises(
        InputError, match=r"at step 5 .* 9 packed .* of which 8 .* newest are \[9\]"
    ):
        skipped.add([9], step=5)


def test_padding_takes_the_place_of_everything() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2], [3, 4]]), "document_ids": torch.zeros(2, 2).long(),
        "hidden_states": torch.full((2, 2, 1), torch.nan),
    }  # fmt: skip
    skipped = Skipped(2000, known=[12])
    assert skipped.blanked(batch, [3, 4]) is batch
    found = skipped.blanked(batch, [3, 12])
    assert found["input_ids"].tolist() == [[1, 2], [0, 0]]
    assert found["document_ids"].tolist() == [[0, 0], [-1, -1]]
    assert found["hidden_states"][1].tolist() == [[0.0], [0.0]]
    assert found["hidden_states"][0].isnan().all()
    assert batch["input_ids"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.slow
def test_two_processes_leave_out_what_one_does(inputs: Path, tmp_path: Path) -> None:
    fault = [str(ROOT / "tests/launched_fault.py"), "spoiled-sequences"]
    _, *given = arguments(inputs, tmp_path / "one", "train.micro_batch_size=2")
    said = trained([sys.executable, *fault, *given], tmp_path)
    assert "is not finite" in said
    given[given.index(f"out_dir={tmp_path / 'one'}")] = f"out_dir={tmp_path / 'two'}"
    assert "is not finite" in trained([*TWO, *fault, *given], tmp_path)
    assert_same_run(tmp_path / "two", tmp_path / "one")
    name = "train/skipped_sequences"
    assert curve(tmp_path / "two", name) == curve(tmp_path / "one", name)
    assert curve(tmp_path / "two", name)[-1] > 0
