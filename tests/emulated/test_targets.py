"""Targets on emulated GPUs: one in bfloat16, one over two devices, one in a store."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated.device import off
from emulated.runs import (
    MOST_WAITS,
    conversations,
    forget,
    inputs,
    losses,
    on_cpu,
    on_cuda,
    run_of,
    short,
    waits_of_step,
)
from emulated.test_decoding import PROMPTS
from feature_heads import fresh, settings_of
from toys import noisy_head

from conf.settings.data import DataConfig, TeacherKind
from conf.settings.scripts import CaptureRun
from conf.settings.target import Dtype, TargetConfig
from data.features.store_reader import FeatureStore
from eval.decode.drafters.self_speculation import SelfDraft, list_skipped_layers
from eval.decode.engine import NoDraft, decode_batch
from heads.decoding.drafting import Drafter
from heads.decoding.tree import DynamicShape, make_static_tree
from heads.eagle.network import EagleDrafter
from heads.medusa import MedusaDrafter
from heads.target_model.load import load_target
from heads.target_model.model import Target
from scripts.capture import capture

__all__ = ["inputs", "short"]
BFLOAT16 = {"dtype": Dtype.bfloat16}
SPREAD = {"device_map": "auto"}
SHARD_BYTES = 20_000


ATTENTION = "attention on cuda: PyTorch's flash and memory-efficient kernels, cuDNN's is off\n"


def test_a_target_in_bfloat16(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    on_cpu(run_of("eagle-3", inputs, tmp_path / "cpu", BFLOAT16))
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert ATTENTION not in capsys.readouterr().out
    counts = on_cuda(run_of("eagle-3", inputs, tmp_path / "cuda", BFLOAT16))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert ATTENTION in capsys.readouterr().out
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=0.05)
    waits = waits_of_step(counts)
    assert waits.num_waits <= MOST_WAITS, str(waits)


def store_of(inputs: Path, out_dir: Path, **changes: Any) -> None:
    target = TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32)
    given: dict[str, Any] = {"micro_batch_size": 2, "num_replay_prompts": 1, **changes}
    data, out = conversations(inputs), str(out_dir)
    capture(CaptureRun(target=target, data=data, out_dir=out, **given), SHARD_BYTES)


@pytest.fixture(scope="module")
def stores(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captured on the CPU, `hidden` and `top_k`."""
    folder = tmp_path_factory.mktemp("stores")
    for teacher in TeacherKind:
        on_cpu(partial(store_of, inputs, folder / teacher.value, teacher=teacher, top_k=8))
    return folder


@pytest.mark.parametrize(
    "teacher", [pytest.param(TeacherKind.hidden, marks=pytest.mark.slow), TeacherKind.top_k]
)
def test_a_capture_holds_what_the_cpus_does(
    teacher: TeacherKind, inputs: Path, stores: Path, tmp_path: Path
) -> None:
    forget()
    store_of(inputs, tmp_path / "store", teacher=teacher, top_k=8)
    mine, theirs = FeatureStore(tmp_path / "store"), FeatureStore(stores / teacher.value)
    assert len(mine.train) == len(theirs.train) > 1
    for number in range(len(mine.train)):
        found, expected = mine.train[number], theirs.train[number]
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("name", "teacher"),
    [
        pytest.param("medusa, soft labels", TeacherKind.hidden, marks=pytest.mark.slow),
        ("eagle-1", TeacherKind.hidden),
        ("eagle-3", TeacherKind.top_k),
    ],
)
def test_training_from_a_store(
    name: str, teacher: TeacherKind, inputs: Path, stores: Path, tmp_path: Path
) -> None:
    data = DataConfig(features=str(stores / teacher.value))
    unset = {"path": None, "dtype": Dtype.auto}
    on_cpu(run_of(name, inputs, tmp_path / "cpu", unset, data))
    torch.backends.cuda.enable_cudnn_sdp(True)
    counts = on_cuda(run_of(name, inputs, tmp_path / "cuda", unset, data))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    expected = losses(tmp_path / "cpu")
    assert losses(tmp_path / "cuda") == pytest.approx(expected, rel=5e-3, abs=2e-4)
    waits = waits_of_step(counts)
    assert waits.num_waits <= MOST_WAITS, str(waits)


@pytest.fixture
def spread(inputs: Path) -> Target:
    config = TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32, **SPREAD)
    target = load_target(config, torch.device("cuda", 0))
    places = {str(each.device) for each in target.model.parameters()}
    assert places == {"cuda:0", "cuda:1"}
    return target


def drafters_of(target: Target) -> list[Drafter]:
    eagle = fresh(target, settings_of("eagle3", draft_vocab_size=120, layers=[0, 1, 2]))
    return [
        NoDraft(),
        MedusaDrafter(noisy_head(target), make_static_tree(3, 16)),
        EagleDrafter(eagle, DynamicShape(3, 3, 8)),
        SelfDraft(target, list_skipped_layers(target, 2), 3, seeds=[1, 2, 3]),
    ]


def test_a_target_over_two_devices_decodes(spread: Target, inputs: Path) -> None:
    config = TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32)
    with off():
        plain = load_target(config, torch.device("cpu"))
        expected = [each.token_ids for each in decode_batch(plain, NoDraft(), PROMPTS, 10)]
    for drafter in drafters_of(spread):
        found = decode_batch(spread, drafter, PROMPTS, 10)
        assert [each.token_ids for each in found] == expected


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("medusa, soft labels", "eagle-1")
        ),
        "eagle-3.1",
    ],
)
def test_a_target_over_two_devices_trains(name: str, inputs: Path, tmp_path: Path) -> None:
    on_cpu(run_of(name, inputs, tmp_path / "cpu"))
    counts = on_cuda(run_of(name, inputs, tmp_path / "cuda", SPREAD))
    expected = losses(tmp_path / "cpu")
    assert losses(tmp_path / "cuda") == pytest.approx(expected, rel=5e-3, abs=2e-4)
    waits = waits_of_step(counts)
    assert waits.num_waits <= MOST_WAITS, str(waits)
