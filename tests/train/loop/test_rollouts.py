"""Rounds of the target's own answers, which a run learns in place of those of its data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from toys import noisy_head, random_target, texts, tokenizer

from conf.errors import InputError
from conf.settings.training import RolloutConfig
from data.prepared.packing import PackedDataset
from data.servers.http_client import Endpoint
from data.templates.record_encoder import Sample
from eval.decode.engine import NoDraft, decode
from heads.target_model.model import Target
from tests.servers import ChatServer
from train.batch import data_loader as schedule
from train.loop.rollouts import TEXTS, Rollouts
from train.parallel import checkpoint as resume

SEED = 3


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target()


@pytest.fixture
def data(target: Target) -> PackedDataset:
    """Eight documents of 12 tokens, of which the last 6 are learnt, two to a sequence."""
    samples = [Sample(text, [n >= 6 for n in range(len(text))]) for text in texts(target, 8, 8)]
    return PackedDataset(samples, 24, seed=0)


def rollouts(target: Target, data: PackedDataset, folder: Path, **changes: Any) -> Rollouts:
    config = replace(RolloutConfig(steps=2, max_new_tokens=9, batch_size=1), **changes)
    return Rollouts(config, target, data, batch_size=1, seed=SEED, folder=folder)


def answered(made: Rollouts, step: int = 0) -> list[tuple[list[int], list[bool]]]:
    return documents(made.load_or_write_round(step, noisy_head(made.target))[0].data)


def documents(sequences: Any) -> list[tuple[list[int], list[bool]]]:
    """Ids and loss masks of all documents, in rising order."""
    found = []
    for index in range(len(sequences)):
        row = sequences[index]
        for number in row["document_ids"].unique():
            here = row["document_ids"] == number
            if number >= 0:
                found.append((row["input_ids"][here].tolist(), row["loss_mask"][here].tolist()))
    return sorted(found)


def test_a_round_is_what_the_target_says_to_the_prompts_of_its_steps(
    target: Target, data: PackedDataset, tmp_path: Path
) -> None:
    head = noisy_head(target)
    for step, first in ((0, 0), (1, 0), (2, 2), (3, 2)):
        found, figures = rollouts(target, data, tmp_path / str(step)).load_or_write_round(
            step, head
        )
        assert (found.first, found.last) == (first, first + 2)
        numbers = [schedule.draw_global_batch(each, 1, 4, SEED)[0] for each in (first, first + 1)]
        prompts = [ids[:6] for n in numbers for ids, _ in documents([data[n]])]
        assert len(prompts) == 4
        answers = [decode(target, NoDraft(), prompt, 9).token_ids for prompt in prompts]
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        expected = sorted((text, [n >= 6 for n in range(len(text))]) for text in texts)
        assert documents(found.data) == expected
        assert figures["rollout/tokens"] == sum(map(len, answers))
        assert 1 < figures["rollout/tau"] <= 5


def test_a_round_s_sequences_come_in_an_order_of_its_own(
    target: Target, data: PackedDataset, tmp_path: Path
) -> None:
    first, _ = rollouts(target, data, tmp_path).load_or_write_round(0, noisy_head(target))
    later, _ = rollouts(target, data, tmp_path).load_or_write_round(2, noisy_head(target))
    assert first.draw_global_batch(1, 2) == schedule.draw_global_batch(1, 2, len(first.data), SEED)
    assert later.draw_global_batch(3, 2) == schedule.draw_global_batch(
        1, 2, len(later.data), SEED + 1
    )


def test_a_round_is_written_once(target: Target, data: PackedDataset, tmp_path: Path) -> None:
    made = rollouts(target, data, tmp_path)
    first, figures = made.load_or_write_round(0, noisy_head(target))
    again, nothing = made.load_or_write_round(1, noisy_head(target))
    assert figures
    assert not nothing
    assert documents(again.data) == documents(first.data)
    file = tmp_path / "round-0000" / TEXTS
    kept = load_file(file)
    assert kept["prompts"].tolist() == [6] * 4
    # Another run's prompts.
    other = replace(made, seed=SEED + 1)
    found, figures = other.load_or_write_round(0, noisy_head(target))
    assert figures
    assert documents(found.data) != documents(first.data)


def test_a_round_that_was_written_in_another_way_is_written_again(
    target: Target, data: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as of a run that was stopped before its first checkpoint, and started again."""

    def answers(folder: str, **changes: Any) -> Any:
        return answered(rollouts(target, data, tmp_path / folder, **changes))

    greedy = answers("kept")
    drawn = answers("kept", temperature=1.0)
    assert drawn == answers("new", temperature=1.0) != greedy
    assert [ids[:6] for ids, _ in drawn] == [ids[:6] for ids, _ in greedy]
    assert answers("kept") == greedy
    monkeypatch.setattr(target, "logits_processing", {"repetition_penalty": 1.5})
    assert answers("kept") == answers("penalty") != greedy
    assert (
        rollouts(target, data, tmp_path / "kept").load_or_write_round(0, noisy_head(target))[1]
        == {}
    )


def test_prompts_without_room_are_left_out(
    target: Target, data: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.config, "max_position_embeddings", 14)
    with pytest.raises(
        InputError, match=r"rollout\.max_new_tokens=9: too many for every prompt of"
    ):
        rollouts(target, data, tmp_path).load_or_write_round(0, noisy_head(target))


class Served(ChatServer):
    """A vLLM server of a target.

    Attributes:
        first: in place of the first token of each answer.
        stops: whether it knows of the target's stop texts.
    """

    path = "/v1/completions"
    first: int | None = None
    stops = True

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock, pytest.MonkeyPatch.context() as patch:
            if not self.stops:
                patch.setattr(self.target, "stop_strings", ())
            ids = decode(self.target, NoDraft(), body["prompt"], body["max_tokens"]).token_ids
        first = ids[0] if self.first is None else self.first
        return {"choices": [{"token_ids": [first, *ids[1:]]}]}


def test_a_server_answers_in_place_of_the_target(
    target: Target, data: PackedDataset, tmp_path: Path
) -> None:
    head = noisy_head(target)
    here, _ = rollouts(target, data, tmp_path / "here").load_or_write_round(0, head)
    with Served(target) as server:
        made = rollouts(target, data, tmp_path / "served", batch_size=2, temperature=0.7)
        made = replace(made, server=Endpoint(server.url, setting="rollout.endpoint"))
        found, figures = made.load_or_write_round(0, head)
        assert documents(found.data) == documents(here.data)
        assert server.most_at_once <= 2
        seeds = {body.pop("seed") for body in server.bodies}
        assert seeds == {schedule.hash_seed(SEED, 0, index) for index in range(4)}
        assert [body.pop("prompt")[:0] for body in server.bodies] == [[]] * 4
        assert server.bodies == 4 * [
            {"model": "toy", "max_tokens": 9, "temperature": 0.7, "top_p": 1.0, "top_k": 0,
             "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
        ]  # fmt: skip
        assert "tau" not in Rollouts.format_round(figures)
        server.bodies.clear()
        replace(made, config=replace(made.config, temperature=0.0)).load_or_write_round(2, head)
        assert [body["temperature"] for body in server.bodies] == [0.0] * 4
        assert all("seed" not in body for body in server.bodies)
        server.first = target.vocab_size
        with pytest.raises(
            InputError, match=r"rollout\.endpoint=http.*: answers with token \d+, but"
        ):
            made.load_or_write_round(4, head)
        server.answer = lambda _: {"choices": [{"text": ""}]}  # type: ignore[method-assign]
        with pytest.raises(InputError, match=r"no choices\[0\]\.token_ids: the server must be"):
            made.load_or_write_round(4, head)
        server.fault_for = lambda _: (400, {})
        with pytest.raises(InputError, match=r"rollout\.endpoint=http.*HTTP 400: .*injected"):
            made.load_or_write_round(4, head)


def test_a_server_answers_as_the_generation_config_says(
    target: Target, data: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is told the penalty, and does not know of stop texts."""
    monkeypatch.setattr(target, "tokenizer", tokenizer())
    first = answered(rollouts(target, data, tmp_path / "0"))[0][0][6:]
    monkeypatch.setattr(target, "logits_processing", {"repetition_penalty": 1.5})
    monkeypatch.setattr(target, "stop_strings", (target.tokenizer.decode(first[2:3]),))
    here = answered(rollouts(target, data, tmp_path / "here"))
    with Served(target) as server:
        made = rollouts(target, data, tmp_path / "served")
        made = replace(made, server=Endpoint(server.url, setting="rollout.endpoint"))
        monkeypatch.setattr(server, "stops", False)
        assert answered(made) == here
        assert {body["repetition_penalty"] for body in server.bodies} == {1.5}
        monkeypatch.setattr(target, "logits_processing", {"no_repeat_ngram_size": 2})
        with pytest.raises(InputError, match=r"rollout\.endpoint=http.*no_repeat_ngram_size=2"):
            answered(made, 2)


def test_a_run_goes_on_wherever_its_target_is_served() -> None:
    here = resume.collect_resume_settings("rollout", RolloutConfig(steps=5))
    served = RolloutConfig(steps=5, endpoint="http://localhost:8000/v1")
    assert resume.collect_resume_settings("rollout", served) == here
    assert resume.collect_resume_settings("rollout", replace(served, max_new_tokens=9)) != here
