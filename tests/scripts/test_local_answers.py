import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conf.errors import InputError
from conf.settings.data import DataConfig, OnBadRow
from conf.settings.scripts import RegenerateRun
from conf.settings.target import Dtype, TargetConfig
from data.rows.records import Record
from scripts import regenerate
from scripts.regenerate import ConversationAnswerer, Dialogue
from tests.chats import chats, rows_in, write_rows
from tests.toys import random_model, tokenizer


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("target"), "llama")


def saved(folder: Path, family: str) -> Path:
    words = tokenizer()
    model = random_model(family, vocab_size=len(words))
    # A shipped penalty that would change greedy text if it were obeyed.
    model.generation_config.repetition_penalty = 1.5
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def run_local(target_path: Path, data: Path, out_dir: Path, **changes: Any) -> list[dict]:
    on_bad_row = changes.pop("on_bad_row", OnBadRow.error)
    config = RegenerateRun(
        target=TargetConfig(path=str(target_path), dtype=Dtype.float32),
        data=DataConfig(path=str(data), on_bad_row=on_bad_row),
        out_dir=str(out_dir),
        **{"max_new_tokens": 12, **changes},
    )
    regenerate.main(config)
    return rows_in(out_dir)


RARE = [pytest.param(each, marks=pytest.mark.slow) for each in ("lfm2", "gpt_oss", "qwen3_next")]


@pytest.mark.parametrize("family", ["llama", *RARE])
def test_batched_answers_are_those_of_generate(tmp_path: Path, family: str) -> None:
    """Its penalty included, of what each text holds and not of what fills up the batch."""
    target_path = saved(tmp_path / "target", family)
    data = chats(tmp_path / "in.jsonl", num_rows=7)
    batched = run_local(target_path, data, tmp_path / "out4", batch_size=4)
    plain = run_local(target_path, data, tmp_path / "plain", batch_size=4, plain=True)
    assert batched == run_local(target_path, data, tmp_path / "out1", batch_size=1)
    assert [row["id"] for row in batched] == list(range(7))
    answers = {row["messages"][-1]["content"] for row in batched}
    assert len(answers) > 3, "the toy target says the same to everybody"
    target = regenerate.load_target(TargetConfig(path=str(target_path)), torch.device("cpu"))
    (question, answer) = batched[1]["messages"]
    asked = Dialogue(1, Record([question], None, "in.jsonl:2"), seed=0)
    assert asked.advance_to_question()
    config = RegenerateRun(batch_size=4, max_new_tokens=12)
    ids = ConversationAnswerer(target, config).encode_prompt(asked)
    prompt_length = len(ids)
    own = AutoModelForCausalLM.from_pretrained(target_path)
    text = own.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0]
    assert answer["token_ids"] == text[prompt_length:].tolist()
    (question, answer) = plain[1]["messages"]
    with torch.no_grad():
        while len(ids) < prompt_length + 12 and ids[-1] not in target.stop_ids:
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert answer["token_ids"] == ids[prompt_length:]
    said = target.tokenizer.decode(ids[prompt_length:], skip_special_tokens=True)
    assert answer["content"] == said.strip()


def test_the_target_multiplies_over_packed_weights(target_path, tmp_path, monkeypatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(regenerate, "pack_weights", lambda *modules: found.extend(modules))
    run_local(target_path, chats(tmp_path / "in.jsonl", num_rows=1), tmp_path / "out")
    assert [type(each).__name__ for each in found] == ["LlamaForCausalLM", "Linear"]


def test_answers_end_with_the_stop_texts_of_the_generation_config(tmp_path: Path) -> None:
    target_path = saved(tmp_path / "target", "llama")
    rows = [{"prompt": "why?"}, {"prompt": "who are you, there?"}]
    data = write_rows(tmp_path / "in.jsonl", rows)
    before = [row["messages"][1] for row in run_local(target_path, data, tmp_path / "before")]
    pieces = [tokenizer().decode([token]) for token in before[0]["token_ids"]]
    stop = next(each for each in pieces[1:] if each.isascii() and len(each) > 1)
    config = json.loads((target_path / "generation_config.json").read_text())
    (target_path / "generation_config.json").write_text(json.dumps(config | {"stop_strings": stop}))
    # Also where the question has them.
    rows[1]["prompt"] += stop
    data = write_rows(tmp_path / "in.jsonl", rows)
    first, second = (r["messages"][1] for r in run_local(target_path, data, tmp_path / "after"))
    assert first["token_ids"] == before[0]["token_ids"][: pieces.index(stop) + 1]
    assert len(second["token_ids"]) == 12
    with pytest.raises(InputError, match=r"generation_config was .*, is None"):
        run_local(target_path, data, tmp_path / "after", plain=True)


def test_the_bar_tells_tokens_and_forecasts_once_two_batches_have_ended(
    target_path, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    data = chats(tmp_path / "in.jsonl", num_rows=7)
    for batch_size, forecasts in ((4, False), (3, True)):
        rows = run_local(target_path, data, tmp_path / str(batch_size), batch_size=batch_size)
        assert len(rows) == 7
        said = capsys.readouterr().err
        assert said.rindex("Loading weights") < said.index("answering")
        last = said[said.rindex("answering: 100%") :]
        assert (" tokens/s]" in last, "row/s" in last) == (True, forecasts), last


def test_resumed_answers_equal_uninterrupted_ones(target_path, tmp_path, monkeypatch) -> None:
    data = chats(tmp_path / "in.jsonl", num_rows=7)
    settings = {"batch_size": 3, "temperature": 0.8}
    monkeypatch.setattr(regenerate, "BATCHES_AT_A_TIME", 1)
    clean = run_local(target_path, data, tmp_path / "clean", **settings)
    answer_group = regenerate.iter_group_outcomes
    calls: list[int] = []

    def killed_in_the_second_group(group: Any, local: Any) -> Any:
        for outcome in answer_group(group, local):
            calls.append(len(group))
            if len(calls) == 5:
                raise KeyboardInterrupt
            yield outcome

    monkeypatch.setattr(regenerate, "iter_group_outcomes", killed_in_the_second_group)
    with pytest.raises(KeyboardInterrupt):
        run_local(target_path, data, tmp_path / "out", **settings)
    # The last row is torn off too.
    path = tmp_path / "out/conversations.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert path.read_bytes().count(b"\n") == 3
    assert run_local(target_path, data, tmp_path / "out", **settings) == clean
    monkeypatch.undo()
    assert run_local(target_path, data, tmp_path / "other", **settings, seed=1) != clean


def test_rows_that_do_not_fit_the_window(target_path, tmp_path, capsys) -> None:
    data = write_rows(tmp_path / "in.jsonl", [{"turns": ["x" * 600]}, {"turns": ["short?"]}])
    with pytest.raises(InputError, match=r"in\.jsonl:1: \d+ prompt tokens leave no room"):
        run_local(target_path, data, tmp_path / "out")
    rows = run_local(target_path, data, tmp_path / "out", on_bad_row=OnBadRow.skip)
    assert [row["id"] for row in rows] == [1]
    assert "1 conversations skipped, refused:" in capsys.readouterr().out
    with pytest.raises(InputError, match="max_new_tokens=256: leaves no room"):
        run_local(target_path, data, tmp_path / "out2", max_new_tokens=256)


def test_other_weights_do_not_go_on_with_the_answers(tmp_path: Path) -> None:
    folder = saved(tmp_path / "target", "llama")
    data = chats(tmp_path / "in.jsonl", num_rows=2)
    run_local(folder, data, tmp_path / "out")
    random_model("llama", vocab_size=len(tokenizer()), seed=1).save_pretrained(folder)
    with pytest.raises(InputError, match=r"in another way: target\.weights was \w{12}, is"):
        run_local(folder, data, tmp_path / "out")
