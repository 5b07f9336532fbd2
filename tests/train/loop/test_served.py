"""Training from the states of serving engines: the weights of training with the target itself."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stores import NUM_LAYERS, save_inputs

from conf.errors import InputError
from conf.settings.blocks import DFlashConfig, DFlashRun
from conf.settings.data import DataConfig
from conf.settings.eagle import EagleConfig, EagleRun
from conf.settings.measure import AcceptanceRun
from conf.settings.medusa import Medusa2Run, MedusaConfig, MedusaRun
from conf.settings.target import Dtype, TargetConfig
from conf.settings.training import RolloutConfig, TrainConfig
from data.servers import endpoint
from heads.target_model.load import load_target
from tests.servers import EngineServer, serving
from train import dflash, eagle, medusa
from train.loop import replay

RUNS: dict[str, tuple[Any, Any]] = {
    "medusa": (medusa, MedusaRun(head=MedusaConfig(num_heads=2))),
    "eagle": (eagle, EagleRun(head=EagleConfig(layers=[0, 1, 2], draft_vocab_size=20))),
    "dflash": (
        dflash,
        DFlashRun(head=DFlashConfig(layers=[1, 2], num_features=2, num_layers=1, block_size=4)),
    ),
}
NUM_PROBED = 22
"""Requests that a probe makes, no fewer than."""
LAYERS = {"medusa": [], "eagle": [0, 1, 2], "dflash": [1, 2]}


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr(replay, "MAX_NEW_TOKENS", 12)
        patch.setattr(endpoint, "FIRST_DELAY_S", 0.01)
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_inputs(tmp_path_factory.mktemp("inputs"))


def trained(
    kind: str, inputs: Path, out_dir: Path, engines: list[str], **changes: Any
) -> dict[str, torch.Tensor]:
    """The weights of a short run."""
    module, usual = RUNS[kind]
    train = TrainConfig(
        max_steps=6, batch_size=2, warmup_steps=0, log_steps=1, num_eval_sequences=2,
        num_replay_prompts=2, learning_rate=1e-2, adam_learning_rate=1e-2, **changes,
    )  # fmt: skip
    target = TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32, engine=engines)
    data = DataConfig(path=str(inputs / "chat.jsonl"), max_length=128, eval_fraction=0.2)
    run = type(usual)(head=usual.head, train=train, target=target, data=data, out_dir=str(out_dir))
    module.main(run)
    (weights,) = (out_dir / "head").glob("*.safetensors")
    return load_file(weights)


def served(inputs: Path, folder: Path, kind: str) -> EngineServer:
    folder.mkdir(exist_ok=True)
    config = TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32)
    target = load_target(config, torch.device("cpu"))
    return serving(target, folder, sorted({*LAYERS[kind], NUM_LAYERS}))


def last(out_dir: Path, name: str) -> float:
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return next(line[name] for line in lines[::-1] if name in line)


@pytest.mark.parametrize("kind", RUNS)
def test_heads_learn_the_same_from_engines(kind: str, inputs: Path, tmp_path: Path) -> None:
    expected = trained(kind, inputs, tmp_path / "here", [])
    with ExitStack() as stack:
        servers = [served(inputs, tmp_path / name, kind) for name in "ab"]
        urls = [stack.enter_context(each).url for each in servers]
        found = trained(kind, inputs, tmp_path / "served", urls)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
    for name in ("eval/loss", "eval/tau"):
        assert last(tmp_path / "served", name) == pytest.approx(last(tmp_path / "here", name), 1e-4)
    assert all(list(each.folder.iterdir()) == [] for each in servers)
    assert min(len(each.bodies) for each in servers) > 5


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
    assert " is left out: target.engine=http" in capsys.readouterr().out


def test_what_needs_the_layers_here_is_refused(inputs: Path, tmp_path: Path) -> None:
    target = TargetConfig(path=str(inputs / "target"), engine=["http://localhost:1/v1"])
    with pytest.raises(InputError, match="holds the states that engines would give"):
        MedusaRun(target=target, data=DataConfig(features="store"))
    with pytest.raises(InputError, match=r"scripts/regenerate\.py endpoint=URL"):
        MedusaRun(target=target, rollout=RolloutConfig(steps=2))
    with pytest.raises(InputError, match="this command trains the target itself"):
        Medusa2Run(target=target)
    run = AcceptanceRun(target=target, out_dir=str(tmp_path / "out"))
    run.head.path = str(inputs / "target")
    with pytest.raises(InputError, match="runs the target in its own process"):
        load_target(target, torch.device("cpu"))
