"""What a head was trained on beside what it is measured on: counted, compared and said."""

import json
from pathlib import Path

import pytest
import torch
import xxhash
from toys import noisy_head, save_target

from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.measure import AcceptanceRun
from conf.settings.target import TargetConfig
from data.rows.row_digests import PROMPTS_FILE, PromptDigests
from eval import acceptance
from eval.measure.data_statement import DataStatement, format_training_notes
from heads.target_model.load import load_target
from tests.chats import write_rows

WORDS = ("there", "you", "today", "fine")


def digest(question: str) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(question).encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a head that was trained on three prompts, two of them measured."""
    tmp_path = tmp_path_factory.mktemp("stated")
    target_path = save_target(tmp_path / "target")
    head = noisy_head(load_target(TargetConfig(path=str(target_path)), torch.device("cpu")))
    rows = [{"turns": [f"hello {word}?", "and now?"]} for word in WORDS]
    write_rows(tmp_path / "prompts.jsonl", rows)
    known = [digest("hello you?"), digest("hello fine?"), digest("and now?")]
    stated = DataStatement(
        "chats.jsonl", "ab", {"enable_thinking": False}, "bfloat16",
        PromptDigests.from_values(known),
    )  # fmt: skip
    head.save(tmp_path / "head", {"trained_on": stated.to_json()}, stated.build_documents())
    return tmp_path


def measure(folder: Path, name: str, **settings: object) -> dict:
    run = AcceptanceRun(
        target=TargetConfig(path=str(folder / "target")),
        head=HeadRef(path=str(folder / "head")),
        data=DataConfig(path=str(folder / "prompts.jsonl"), **settings),
        max_new_tokens=4,
        out_dir=str(folder / name),
    )
    acceptance.main(run)
    return json.loads((folder / name / "acceptance.json").read_text())["data"]


@pytest.mark.usefixtures("no_picture")
def test_dialogues_that_were_trained_on_are_counted_in_terminal_and_file(
    folder: Path, capsys
) -> None:
    data = measure(folder, "all")
    said = capsys.readouterr().err.splitlines()
    head = str(folder / "head")
    assert [line for line in said if line.startswith(head)] == [
        f"{head}: was trained on the first prompts of 2 of 4 dialogues, so its figures are too "
        "good; measure on other prompts",
        f'{head}: was trained with data.chat_template_kwargs={{"enable_thinking": false}}, but is '
        "measured with data.chat_template_kwargs={}, so it sees other prompts",
        f"{head}: was trained with the target in bfloat16, but is measured with the target in "
        "float32, so its states are rounded otherwise",
    ]
    assert data["trained_on"] == [
        {
            "head": head, "path": "chats.jsonl", "sha256": "ab",
            "chat_template_kwargs": {"enable_thinking": False}, "target_dtype": "bfloat16",
            "num_prompts": 3, "num_trained": 2, "num_dialogues": 4,
        }
    ]  # fmt: skip
    assert (data["chat_template_kwargs"], data["target_dtype"]) == ({}, "float32")
    first = measure(folder, "first", num_prompts=1, chat_template_kwargs={"enable_thinking": False})
    assert first["trained_on"][0]["num_trained"] == 0
    assert "of 1 dialogues" not in (said := capsys.readouterr().err)
    assert "was trained with data.chat_template_kwargs" not in said


@pytest.mark.usefixtures("no_picture")
def test_a_published_head_without_digests_is_known_by_the_file(folder: Path) -> None:
    (folder / "head" / PROMPTS_FILE).unlink()
    trained = DataStatement.from_head(str(folder / "head"), None)
    assert trained is not None
    assert trained.prompts is None
    [compared] = measure(folder, "o")["trained_on"]
    assert (compared["num_trained"], compared["num_prompts"]) == (None, None)
    same = compared | {"chat_template_kwargs": {}, "target_dtype": "float32"}
    measured = {"chat_template_kwargs": {}, "target_dtype": "float32", "sha256": "ab"}
    assert list(format_training_notes(measured, same, "h")) == [
        "h: was trained on data.path itself, perhaps without a held-out share, so its figures may "
        "be too good; measure on other prompts"
    ]
    assert list(format_training_notes(measured | {"sha256": "cd"}, same, "h")) == []


def test_prompts_of_an_earlier_training_stay_known() -> None:
    def stated(*values: int) -> DataStatement:
        return DataStatement("p", "ab", {}, "float32", PromptDigests.from_values(values))

    both = stated(1, 2).add_prompts(stated(2, 3))
    assert both.to_json()["num_prompts"] == 3
    unknown = DataStatement("p", "ab", {}, "float32")
    assert unknown.add_prompts(stated(2, 3)).to_json()["num_prompts"] == 2
    assert unknown.build_documents() == {}
