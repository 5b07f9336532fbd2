"""Prompts that leave no room for an answer: refused with their place, early, or left out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import noisy_head, save_target

from conf.errors import InputError
from conf.settings.data import DataConfig, OnBadRow
from conf.settings.drafting import HeadRef
from conf.settings.measure import AcceptanceRun
from conf.settings.target import TargetConfig
from eval.measure import target_answers as own_texts
from eval.measure.measurement import Measurement, open_measurement
from heads.target_model.load import load_target
from tests.chats import write_rows


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    path = save_target(folder / "target")
    noisy_head(load_target(TargetConfig(path=str(path)), torch.device("cpu"))).save(folder / "head")
    return folder


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the prompts that the target answers, in their order."""
    lengths: list[int] = []

    def answers(target: Any, asked: Any, length: int, _: int) -> Iterator[tuple[int, list[int]]]:
        for number, request in enumerate(asked):
            lengths.append(len(request.prompt_ids))
            yield number, target.tokenizer("y" * length)["input_ids"]

    monkeypatch.setattr(own_texts, "stream_answers", answers)
    return lengths


def opened(inputs: Path, folder: Path, turns: list[list[str]], **changes: Any) -> Measurement:
    path = write_rows(folder / "rows.jsonl", [{"turns": each} for each in turns])
    data = DataConfig(path=str(path), on_bad_row=changes.pop("on_bad_row", OnBadRow.error))
    target, head = TargetConfig(path=str(inputs / "target")), HeadRef(path=str(inputs / "head"))
    out_dir = str(folder / "out")
    run = AcceptanceRun(target=target, data=data, head=head, out_dir=out_dir, max_new_tokens=24)
    run.num_turns = 2
    return open_measurement(run, "acceptance.json")


def places(found: Measurement) -> list[tuple[int, int]]:
    return [(prompt.dialogue, prompt.turn) for prompt in found.prompts]


def test_a_first_turn_is_refused_or_left_out(inputs, tmp_path, answered, capsys) -> None:
    turns = [["Hi"], ["x" * 300], ["Ho"]]
    with pytest.raises(InputError, match=r"rows.jsonl:2, turn 1: \d+ prompt tokens and max_new_to"):
        opened(inputs, tmp_path, turns)
    found = opened(inputs, tmp_path, turns, on_bad_row=OnBadRow.skip)
    assert (places(found), found.data["num_bad"]) == ([(0, 1), (2, 1)], 1)
    assert "left out: " in capsys.readouterr().err
    with pytest.raises(
        InputError, match=r"no prompt can be used, the first because: .*rows.jsonl:1,"
    ):
        opened(inputs, tmp_path, [["x" * 300]], on_bad_row=OnBadRow.skip)
    assert answered == []


@pytest.mark.parametrize(
    ("second", "num_before"), [(["Hi", "x" * 300], 0), (["x" * 170, "So?"], 1)]
)
def test_a_later_turn_without_room_is_refused_before_any_answer_or_behind_its_own(
    inputs, tmp_path, answered, second, num_before
) -> None:
    """The longest first turn is answered first."""
    turns = [["Hi", "So?"], second, ["Ho", "And?"]]
    with pytest.raises(InputError, match=r"rows.jsonl:2, turn 2: "):
        opened(inputs, tmp_path, turns)
    assert len(answered) == num_before
    found = opened(inputs, tmp_path, turns, on_bad_row=OnBadRow.skip)
    assert places(found) == [(0, 1), (1, 1), (2, 1), (0, 2), (2, 2)]
    assert len(answered) == num_before + 3
