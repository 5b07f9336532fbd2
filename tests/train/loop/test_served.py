"""Training from the states of serving engines: the weights of training with the target itself."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from stores import NUM_LAYERS, save_inputs
from toys import Clock, random_target, texts

from conf.errors import InputError
from conf.settings.blocks import DFlashConfig, DFlashRun
from conf.settings.data import DataConfig
from conf.settings.eagle import EagleConfig, EagleRun
from conf.settings.medusa import MedusaConfig, MedusaRun
from conf.settings.target import Dtype, TargetConfig
from conf.settings.training import RolloutConfig, TrainConfig
from data.prepared.packing import PackedDataset
from data.servers import http_client as endpoint
from data.servers import state_files as files
from data.templates.record_encoder import Sample
from eval.measure import engine_answers as engines
from heads.target_model.identity import identify_target
from heads.target_model.load import load_target, load_target_tokenizer
from tests.servers import EngineServer, relaying, serving
from tests.train.runs import ONE, TWO, arguments, curve, kill_at
from tests.train.runs import trained as launched
from train import dflash, eagle, medusa
from train.loop import evaluation as replay
from train.loop.sources import (
    WaitTimer,
    count_prefetch_steps,
    find_longest_document,
    format_server_balance,
)

RUNS: dict[str, tuple[Any, Any]] = {
    "medusa": (medusa, MedusaRun(head=MedusaConfig(num_heads=2))),
    "eagle": (eagle, EagleRun(head=EagleConfig(layers=[0, 1, 2], draft_vocab_size=20))),
    "dflash": (
        dflash,
        DFlashRun(head=DFlashConfig(layers=[1, 2], num_features=2, num_layers=1, block_size=4)),
    ),
}
NONE = RolloutConfig()
NUM_PROBED = 22
"""Requests that a probe makes, no fewer than."""
LAYERS = {"medusa": [], "eagle": [0, 1, 2], "dflash": [1, 2]}


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr(replay, "MAX_REPLAY_TOKENS", 12)
        patch.setattr(endpoint, "FIRST_DELAY_S", 0.01)
        patch.setattr(files, "VISIBLE_S", 0.05)
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_inputs(tmp_path_factory.mktemp("inputs"))


def trained(
    kind: str,
    inputs: Path,
    out_dir: Path,
    engines: list[str],
    rollout: RolloutConfig = NONE,
    relays: Sequence[str] = (),
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """The weights of a short run."""
    module, usual = RUNS[kind]
    usual_train: dict[str, Any] = {
        "max_steps": 2, "batch_size": 2, "warmup_steps": 0, "log_steps": 1, "num_eval_sequences": 2,
        "num_replay_prompts": 1, "learning_rate": 1e-2, "adam_learning_rate": 1e-2,
    }  # fmt: skip
    train = TrainConfig(**usual_train | changes)
    target = TargetConfig(
        path=str(inputs / "target"), dtype=Dtype.float32, engine=engines, relay=[*relays]
    )
    data = DataConfig(path=str(inputs / "chat.jsonl"), max_length=128, eval_fraction=0.2)
    run = type(usual)(
        head=usual.head, train=train, target=target, data=data, rollout=rollout,
        out_dir=str(out_dir),
    )  # fmt: skip
    module.main(run)
    (weights,) = (out_dir / "head").glob("*.safetensors")
    return load_file(weights)


def served(inputs: Path, folder: Path, kind: str) -> EngineServer:
    folder.mkdir(exist_ok=True)
    config = TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32)
    target = load_target(config, torch.device("cpu"))
    return serving(target, folder, sorted({*LAYERS[kind], NUM_LAYERS}))


def test_heads_learn_the_same_from_engines(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two, whose folders are seen by their relays alone."""
    expected = trained("eagle", inputs, tmp_path / "here", [])
    with ExitStack() as stack:
        servers = [served(inputs, tmp_path / name, "eagle") for name in "ab"]
        urls = [stack.enter_context(each).url for each in servers]
        relays = [stack.enter_context(relaying(each.folder)).url for each in servers]
        for each in servers:
            each.told_folder = Path("/elsewhere") / each.folder.name
        found = trained("eagle", inputs, tmp_path / "served", urls, relays=relays)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
    for name in ("eval/loss", "eval/tau"):
        found, expected = (curve(tmp_path / way, name) for way in ("served", "here"))
        assert found == pytest.approx(expected, 1e-4)
    assert all(list(each.folder.iterdir()) == [] for each in servers)
    asked = [[len(body["prompt"]) for body in each.bodies] for each in servers]
    assert min(map(len, asked)) > 5
    assert {lengths[1] for lengths in asked} == {max(map(max, asked))}  # the longest comes first
    assert "training waits for hidden states" in capsys.readouterr().out
    assert 0 <= curve(tmp_path / "served", "train/waiting")[-1] <= 1
    about = json.loads((tmp_path / "served/head/headsmith.json").read_text())["about_head"]
    assert f"target.engine={urls[0]}: log-probabilities 0.0000 nats" in "".join(about)


def test_engines_answer_what_the_target_answers_here(inputs: Path, tmp_path: Path) -> None:
    """Rounds of own words, and the states of these."""
    own = RolloutConfig(steps=1, max_new_tokens=6)
    expected = trained("medusa", inputs, tmp_path / "here", [], own)
    with served(inputs, tmp_path / "a", "medusa") as server:
        found = trained("medusa", inputs, tmp_path / "served", [server.url], own)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
    asked = [body for body in server.bodies if body["max_tokens"] == 6]
    assert {(each["temperature"], each["top_p"], each["top_k"]) for each in asked} == {(0, 1, 0)}
    assert not any("include_output_tokens" in json.dumps(body) for body in asked)
    assert list(server.folder.iterdir()) == []


@pytest.mark.parametrize("fault", ["no file", "hangs"])
def test_a_fault_that_passes_changes_nothing(
    fault: str, inputs: Path, tmp_path: Path, undisturbed: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server, hit = served(inputs, tmp_path / "a", "medusa"), []

    def due() -> bool:
        if len(server.bodies) > NUM_PROBED and not hit:
            hit.append(fault)
            return True
        return False

    if fault == "hangs":
        monkeypatch.setattr(engines, "TIMEOUT_S", 2.0)
        server.change = lambda _: time.sleep(2.5) if due() else None
    else:
        server.change = lambda tensors: tensors.clear() if due() else None
    with server:
        found = trained("medusa", inputs, tmp_path / "out", [server.url])
    assert hit
    for name, tensor in undisturbed.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with served(inputs, folder / "a", "medusa") as server:
        return trained("medusa", inputs, folder / "out", [server.url])


def test_a_document_that_is_lost_is_not_learnt_from(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = served(inputs, tmp_path / "a", "medusa")
    with server:
        lost: list[list[int]] = []

        def fault(body: dict) -> tuple[int, dict[str, str]] | None:
            if len(server.bodies) > NUM_PROBED and not lost and len(body["prompt"]) > 1:
                lost.append(body["prompt"])
            return (422, {}) if body["prompt"] in lost else None

        server.fault_for = fault
        found = trained("medusa", inputs, tmp_path / "out", [server.url])
    assert lost
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert " is left out (number 1 of this run): target.engine=http" in capsys.readouterr().out


def test_an_adapter_of_the_server_is_part_of_the_target(inputs: Path) -> None:
    engine = ["http://localhost:1/v1"]
    target = TargetConfig(path=str(inputs / "target"), adapter_name="tuned", engine=engine)
    assert identify_target(target, load_target_tokenizer(target), torch.float32).adapter == "tuned"
    with pytest.raises(InputError, match="runs the target in its own process"):
        load_target(target, torch.device("cpu"))


@pytest.mark.slow
def test_two_trainers_and_two_servers_equal_one_of_each_and_a_killed_trainer_goes_on(
    inputs: Path, tmp_path: Path
) -> None:
    def command(name: str, urls: list[str], *more: str) -> list[str]:
        engine = f"target.engine=[{','.join(urls)}]"
        own = ("target.dtype=float32", engine, "train.num_replay_prompts=2", *more)
        return arguments(inputs, tmp_path / name, *own)

    def weights(name: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / name / "head/medusa_lm_head.safetensors")

    with ExitStack() as stack:
        servers = [served(inputs, tmp_path / name, "medusa") for name in "ab"]
        urls = [stack.enter_context(each).url for each in servers]
        launched([*ONE, *command("one", urls[:1])], tmp_path)
        launched([*TWO, *command("two", urls)], tmp_path)
        killed = [*ONE, *command("killed", urls, "train.resume=auto")]
        kill_at(tmp_path / "killed/checkpoints/step-000004", killed, tmp_path)
        launched(killed, tmp_path)
    for name, expected in weights("one").items():
        torch.testing.assert_close(weights("two")[name], expected, atol=1e-5, rtol=1e-4)
        assert torch.equal(weights("killed")[name], expected), name


# --- Which of two sides waits.


def test_the_share_is_of_the_time_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("conf.command.clock.time", clock)
    waiting = WaitTimer()
    for waits_s, works_s, expected in ((0.3, 0.1, 0.75), (0.0, 0.2, 0.0)):
        with waiting.measure_wait():
            clock.now += waits_s
        clock.now += works_s
        assert waiting.pop_wait_fraction() == pytest.approx(expected)
    assert waiting.num_looks == 2


def test_the_side_that_waits_is_named() -> None:
    assert format_server_balance(0.6).endswith(
        "60% of the time; 2.5 times as many servers in target.engine would keep it busy"
    )
    assert "the servers keep up" in format_server_balance(0.04)


@pytest.mark.parametrize(("processes", "steps"), [("1", 3), ("2", 1), ("64", 1)])
def test_as_many_steps_are_asked_for_as_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch, processes: str, steps: int
) -> None:
    """A step of 1,000 tokens of 2 layers of 64 numbers takes 512,000 bytes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 * 1_600_000))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    pool = SimpleNamespace(taps=SimpleNamespace(layers=(1, 2), hidden_size=64))
    assert count_prefetch_steps(pool, 1000) == steps  # type: ignore[arg-type]


def test_the_longest_document_is_of_any_sequence() -> None:
    target = random_target()
    samples = [Sample(text, [True] * len(text)) for text in texts(target, 3, 5)]
    samples += [Sample(text, [True] * len(text)) for text in texts(target, 1, 19)]
    rows = PackedDataset(samples, 24, seed=0)
    longest = max(int(torch.bincount(row["document_ids"] + 1)[1:].max()) for row in rows)
    assert len(find_longest_document(rows)) == longest
