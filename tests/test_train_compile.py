from types import SimpleNamespace

import pytest
import torch

from conf.schema import TrainConfig
from train.loop.command import LOGITS_THAT_PAY, wants_compile

MILLION = 10**6


def asked(device: str = "cpu", processes: int = 1, logits: int = 3, **train: object) -> bool:
    """Of a run of 1,000 steps of 10 sequences of 1,000 tokens."""
    config = TrainConfig(**{"max_steps": 1000, "batch_size": 10, "warmup_steps": 0, **train})
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
    return wants_compile(config, 1000, SimpleNamespace(slow_logits=logits), accelerator)


def test_a_gpu_compiles_and_a_setting_has_the_last_word() -> None:
    assert asked("cuda", logits=0)
    assert not asked("cuda", compile=False)
    assert asked("cpu", logits=0, compile=True)


def test_a_cpu_compiles_where_the_run_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/g++")
    least = int(LOGITS_THAT_PAY) // (10 * MILLION)
    assert not asked(logits=least)
    assert asked(logits=least + 1)
    assert not asked(logits=least + 1, processes=2)
    assert not asked(logits=0)


def test_without_a_compiler_a_cpu_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert not asked(logits=MILLION)
