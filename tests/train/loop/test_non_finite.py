"""Sequences whose loss is not finite: left out, counted, remembered, and few."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.errors import InputError
from tests.train.loop.test_loop import ToyObjective, fit, lines, rows, settings, weights
from train.batch import data_loader as schedule
from train.batch.batch import Batch
from train.batch.data_loader import SkippedSequences
from train.loss.fused_linear import LossSums

BAD = 5


def spoiled(value: float = torch.nan, numbers: Sequence[int] = (BAD,)) -> list[dict[str, Tensor]]:
    data = rows(7)
    for number in numbers:
        data[number]["x"][2], data[number]["loss_mask"][2] = value, True
    return data


def padded() -> list[dict[str, Tensor]]:
    """As if nothing had ever been in that place."""
    data = rows(7)
    data[BAD] = {name: torch.zeros_like(tensor) for name, tensor in data[BAD].items()}
    data[BAD]["document_ids"] -= 1
    return data


def shown(out_dir: Path, name: str) -> list[float]:
    return [each[name] for each in lines(out_dir) if name in each]


def skipped(checkpoint: Path) -> list[int]:
    return json.loads((checkpoint / "state.json").read_text())["skipped"]


@pytest.mark.parametrize(("value", "size"), [(torch.nan, 1), (torch.inf, 2)])
def test_a_run_goes_on_as_if_it_were_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, size: int
) -> None:
    config = settings(micro_batch_size=size)
    met = next(step for step in range(6) if BAD in schedule.draw_global_batch(step, 4, 7, seed=0))
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
    known = skipped(saved)
    seen = {
        i for step in range(int(begin[5:])) for i in schedule.draw_global_batch(step, 4, 7, seed=0)
    }
    assert known == ([BAD] if BAD in seen else [])
    again = settings(num_checkpoints=9, resume=str(saved))
    capsys.readouterr()
    fit(tmp_path / "again", again, train=spoiled())
    assert ("is not finite" in capsys.readouterr().out) == (not known)
    assert weights(tmp_path / "again") == weights(tmp_path / "out")


class Diverging(ToyObjective):
    """Finds no loss finite from a step on, counted from 0."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.diverged = first, False

    def start_step(self, step: int) -> Tensor:
        self.diverged = step >= self.first
        return super().start_step(step)

    def forward(self, batch: Batch, scale: Tensor) -> LossSums:
        sums = super().forward(batch, scale)
        return sums._replace(terms=sums.terms * (torch.nan if self.diverged else 1))


def test_a_head_that_diverges_on_single_sequences_forgets_none(tmp_path: Path, capsys) -> None:
    config = settings(batch_size=1, micro_batch_size=1)
    (drawn,) = schedule.draw_global_batch(3, 1, 7, seed=0)
    with pytest.raises(InputError, match=rf"the loss is not finite at step 4, .* \[{drawn}\]"):
        fit(tmp_path, config, objective=Diverging(3))
    assert "left out" not in capsys.readouterr().out


def test_a_head_that_diverges_beside_a_sequence_that_is_left_out_forgets_no_other(
    tmp_path: Path,
) -> None:
    config = settings(batch_size=2, micro_batch_size=1, max_steps=9)
    drawn = [schedule.draw_global_batch(step, 2, 7, seed=0) for step in range(9)]
    _met, again = (step for step in range(9) if BAD in drawn[step])
    (other,) = {*drawn[again]} - {BAD}
    wanted = rf"the loss is not finite at step {again + 1}, .* \[{other}\]"
    with pytest.raises(InputError, match=wanted):
        fit(tmp_path, config, objective=Diverging(again), train=spoiled())


@pytest.mark.parametrize("size", [1, 2])
def test_bad_sequences_that_are_all_of_a_step_are_left_out(tmp_path: Path, size: int) -> None:
    """The head is finite on most of what else there is."""
    bad = schedule.draw_global_batch(2, size, 7, seed=0)
    config = settings(batch_size=size, micro_batch_size=1)
    assert fit(tmp_path, config, train=spoiled(numbers=bad)).finished
    assert skipped(tmp_path / "checkpoints/step-000006") == sorted(bad)


def test_a_step_that_stays_bad_without_what_is_left_out_ends_the_run(tmp_path: Path) -> None:
    class Padded(ToyObjective):
        def forward(self, batch: Batch, scale: Tensor) -> LossSums:
            sums = super().forward(batch, scale)
            empty = bool((batch["document_ids"] < 0).all())
            return sums._replace(terms=sums.terms * (torch.nan if empty else 1))

    config = settings(batch_size=1, micro_batch_size=1)
    with pytest.raises(InputError, match=rf"the loss is not finite .* \[{BAD}\]"):
        fit(tmp_path, config, objective=Padded(), train=spoiled())


def test_sequences_that_are_bad_in_company_alone_are_left_out_together(tmp_path: Path) -> None:
    class Jealous(ToyObjective):
        def forward(self, batch: Batch, scale: Tensor) -> LossSums:
            sums = super().forward(batch, scale)
            worse = len(batch["x"]) > 1 and bool((batch["x"] == 7).any())
            return sums._replace(terms=sums.terms * (torch.nan if worse else 1))

    fit(tmp_path, settings(), train=spoiled(7.0), objective=Jealous())
    drawn = [schedule.draw_global_batch(step, 4, 7, seed=0) for step in range(6)]
    pairs = [{*step[at : at + 2]} for step in drawn for at in (0, 2)]
    saved = skipped(tmp_path / "checkpoints/step-000006")
    assert {*saved} == next(pair for pair in pairs if BAD in pair)


def test_one_percent_may_be_left_out_or_eight() -> None:
    assert [SkippedSequences(size).most for size in (799, 800, 5000)] == [8, 8, 50]
    left_out = SkippedSequences(10, known=range(6))
    said = left_out.skip_sequences([8, 7], step=3)
    assert "step 3: the loss of packed training sequences [7, 8]" in said
    assert "(8 of at most 8)" in said
    with pytest.raises(InputError, match=r"step 5: .* 9 packed .* at most 8 .* newest are \[9\]"):
        left_out.skip_sequences([9], step=5)


def test_most_of_eight_sequences_tell_a_head_that_has_diverged_from_bad_data() -> None:
    shown: list[int] = []

    def asked(bad: list[int], own: list[int], others: set[int], known: tuple = (9,)) -> bool:
        def is_bad(number: int) -> bool:
            shown.append(number)
            return number in others

        around = [[9, 10, 11], [11, 12, 13], [14, 15, 16, 17], [18]]
        return SkippedSequences(100, known).has_diverged(bad, own, around, is_bad)

    assert not asked([1], [1], others={10, 11, 12})  # four of eight
    assert shown == [10, 11, 12, 13, 14, 15, 16]
    assert asked([1], [1], others={10, 11, 12, 13})
    assert asked([1], [1, 9], others={13, 14, 15, 16})
    shown.clear()
    assert not asked([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9], others=set())
    assert asked([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], others=set())
    assert shown == []


def test_padding_takes_the_place_of_everything() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2], [3, 4]]), "document_ids": torch.zeros(2, 2).long(),
        "hidden_states": torch.full((2, 2, 1), torch.nan),
    }  # fmt: skip
    left_out = SkippedSequences(2000, known=[12])
    assert left_out.blank_skipped(batch, [3, 4]) is batch
    found = left_out.blank_skipped(batch, [3, 12])
    assert found["input_ids"].tolist() == [[1, 2], [0, 0]]
    assert found["document_ids"].tolist() == [[0, 0], [-1, -1]]
    assert found["hidden_states"][1].tolist() == [[0.0], [0.0]]
    assert found["hidden_states"][0].isnan().all()
    assert batch["input_ids"].tolist() == [[1, 2], [3, 4]]
