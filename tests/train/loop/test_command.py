"""Epochs, batches in tokens, `auto` rates and compiling, once data and head are known."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from toys import noisy_head, random_target

from conf.command.environment import check_compile, find_missing_toolchain
from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.medusa import MedusaRun
from conf.settings.training import Optimizer, Schedule, TrainConfig
from data.embedded import CONVERSATIONS
from eval.preflight_checks import check_training
from tests.train.loop.test_memory import eagle, medusa
from train.loop.command import (
    MIN_COMPILED_LOGITS,
    estimate_and_check_memory,
    format_data_need,
    format_run_length,
    format_verdict,
    needs_compile,
    resolve_length,
    resolve_optimizer,
)
from train.loss import fused_linear as fused
from train.objective import Objective


@pytest.mark.parametrize(
    ("num_epochs", "steps"), [(1.0, 25), (2.0, 50), (0.5, 13), (1.01, 26)]
)  # fmt: skip
def test_epochs_are_whole_steps(num_epochs: float, steps: int) -> None:
    config = TrainConfig(num_epochs=num_epochs, batch_size=4, warmup_steps=5)
    found = resolve_length(config, num_sequences=100, length=512, num_processes=1)
    assert (found.max_steps, found.num_epochs, found.batch_size) == (steps, steps * 4 / 100, 4)
    with pytest.raises(InputError, match=r"train.warmup_steps=50: .* below train.max_steps=25"):
        resolve_length(TrainConfig(num_epochs=1.0, batch_size=4, warmup_steps=50), 100, 512, 1)


def test_an_unset_warm_up_is_a_share_of_the_steps() -> None:
    for changes, steps in (({}, 5), ({"max_steps": 290}, 12), ({"num_epochs": 1.0}, 1)):
        assert resolve_length(TrainConfig(**changes), 100, 512, 1).warmup_steps == steps
    assert resolve_length(TrainConfig(warmup_steps=0), 100, 512, 1).warmup_steps == 0


@pytest.mark.parametrize(
    ("tokens", "processes", "micro", "batch"),
    [(2048, 1, 1, 4), (2300, 1, 1, 4), (2305, 1, 1, 5), (100, 1, 1, 1), (8192, 3, 2, 18),
     (100, 2, 2, 4)],
)  # fmt: skip
def test_tokens_are_the_nearest_batch_that_divides(
    tokens: int, processes: int, micro: int, batch: int
) -> None:
    config = TrainConfig(batch_tokens=tokens, micro_batch_size=micro)
    found = resolve_length(config, 100, 512, processes)
    assert (found.batch_size, found.batch_tokens) == (batch, None)


@pytest.mark.parametrize(
    ("num_sequences", "epochs"),
    [(1, 10.0), (100, 10.0), (3000, 10.0), (6000, 5.0), (10_000, 3.0), (100_000, 3.0)],
)
def test_unset_epochs_read_thirty_million_tokens_in_three_to_ten_passes(
    num_sequences: int, epochs: float
) -> None:
    """Small data are read more often: 6,000 sequences of 1,000 tokens are 6 million tokens."""
    found = resolve_length(TrainConfig(), num_sequences, 1000, 1)
    assert found.max_steps == math.ceil(epochs * num_sequences / 8)
    assert found.num_epochs == pytest.approx(epochs, abs=8 / num_sequences)


def test_what_is_given_stays() -> None:
    given = TrainConfig(max_steps=1000, num_epochs=3)
    stays = TrainConfig(max_steps=1000, warmup_steps=40, num_epochs=80)  # the passes that it makes
    assert resolve_length(given, 100, 512, 2) == stays


def test_a_stream_asks_for_steps() -> None:
    data = DataConfig(path="nobody/has-this", streaming=True)
    with pytest.raises(InputError, match=r"data.streaming=true: .* type train.max_steps=N"):
        check_training(MedusaRun(data=data, out_dir="outputs/no-run"))
    check_training(MedusaRun(data=data, out_dir="outputs/no-run", train=TrainConfig(max_steps=9)))
    local = DataConfig(path=CONVERSATIONS, streaming=True)  # a file is no stream
    check_training(MedusaRun(data=local, out_dir="outputs/no-run"))


def resolved(
    objective: Objective | None = None, deepspeed: bool = False, trained: bool = False, **given: Any
) -> tuple[TrainConfig, str]:
    return resolve_optimizer(TrainConfig(**given), objective or eagle(), deepspeed, trained)


def test_rates_are_taken_by_optimizer_and_said() -> None:
    muon, adam = eagle().compute_default_rates(Optimizer.muon)
    found, said = resolved(optimizer=Optimizer.muon)
    assert (found.learning_rate, found.adam_learning_rate) == (muon, adam)
    assert said == (
        f"optimizer: Muon at {muon:.2g} (auto) for hidden matrices, "
        f"AdamW at {adam:.2g} (auto) for the rest; schedule: wsd"
    )
    found, said = resolved(optimizer=Optimizer.muon, learning_rate=1, adam_learning_rate=3e-4)
    assert (found.learning_rate, found.adam_learning_rate) == (1.0, 3e-4)
    assert said == (
        "optimizer: Muon at 1 for hidden matrices, AdamW at 0.0003 for the rest; schedule: wsd"
    )
    found, said = resolved(optimizer=Optimizer.adamw)
    assert found.learning_rate == eagle().compute_default_rates(Optimizer.adamw)[0] != muon
    assert said == f"optimizer: AdamW at {found.learning_rate:.2g} (auto); schedule: wsd"


def test_a_trained_head_goes_on_at_a_fifth_of_the_usual_rates() -> None:
    anew, _ = resolved()
    found, said = resolved(trained=True)
    assert found.learning_rate == pytest.approx(0.2 * float(anew.learning_rate))
    assert found.adam_learning_rate == pytest.approx(0.2 * float(anew.adam_learning_rate))
    assert said.startswith("optimizer: Muon at 0.006 (auto)")
    assert resolved(learning_rate=1.0, trained=True)[0].learning_rate == 1.0


def test_auto_is_what_suits_the_head_and_adamw_under_deepspeed() -> None:
    assert resolved()[0].optimizer is Optimizer.muon
    assert resolved(deepspeed=True)[0].optimizer is Optimizer.adamw
    assert resolved(deepspeed=True)[1].startswith("optimizer: AdamW at")
    assert resolved()[0].schedule is Schedule.wsd
    assert resolved(schedule=Schedule.constant)[0].schedule is Schedule.constant
    objective = eagle()
    objective.default_schedule, objective.default_optimizer = Schedule.cosine, Optimizer.adamw
    found, said = resolved(objective=objective)
    assert (found.schedule, found.optimizer) == (Schedule.cosine, Optimizer.adamw)
    assert said.endswith("; schedule: cosine")


@pytest.mark.parametrize("make", [eagle, medusa])
def test_the_rest_learns_slower_in_a_wider_head(make: type) -> None:
    narrow, wide = make(), make(hidden_size=256, num_attention_heads=8)
    for optimizer in (Optimizer.adamw, Optimizer.muon):
        assert narrow.compute_default_rates(optimizer)[1] > wide.compute_default_rates(optimizer)[1]
    assert (
        narrow.compute_default_rates(Optimizer.muon)[0]
        == wide.compute_default_rates(Optimizer.muon)[0]
    )


def test_the_length_of_a_run_in_words() -> None:
    config = TrainConfig(max_steps=1290, batch_size=4)
    said = "1,290 steps of 4 x 512 tokens = 2,641,920 tokens, "
    assert format_run_length(config, 4000, 512) == f"{said}1.3 epochs"
    assert format_run_length(config, 5160, 512) == f"{said}1.0 epochs"
    assert format_run_length(config, 20000, 512) == (
        f"{said}0.3 epochs; 74.2% of the data is not read (unset train.max_steps reads all)"
    )


def judged(num_prompts: int, tau: float, low: float, high: float, num_tokens: int) -> str:
    figures = {"tau": tau, "tau_prompts": num_prompts, "tau_low": low, "tau_high": high}
    return format_verdict({f"eval/{name}": value for name, value in figures.items()}, num_tokens)


COSTS = (
    "about the plain steps that a step with four drafts costs (8B, H200); eval/speedup.py compares "
    "it with suffixes, which need no training"
)


def test_the_verdict_follows_the_figures_and_their_interval() -> None:
    enough = 10_000_000
    assert judged(16, 1.14, 1.1, 1.18, enough) == (
        "not to be published, as tau 1.14 (16 prompts, 95% interval 1.10-1.18) lies below 1.5, "
        + COSTS
    )
    assert judged(16, 1.55, 1.4, 1.7, enough).startswith(
        "undecided, as the interval of tau 1.55 (16 prompts, 95% interval 1.40-1.70) holds 1.5, "
        + COSTS
    )
    assert judged(16, 2.4, 2.1, 2.7, enough) == (
        "worth measuring, as tau 2.40 (16 prompts, 95% interval 2.10-2.70) lies above 1.5"
    )
    assert judged(7, 2.4, 2.1, 2.7, enough) == (
        "not to be published yet, as tau 2.40 rests on 7 prompts, 95% interval 2.10-2.70; an "
        "interval takes 8 prompts, and a decision 50 or more (eval/acceptance.py)"
    )
    one = {"eval/tau": 1.37, "eval/tau_prompts": 1.0}
    assert format_verdict(one, 900) == (
        "not to be published yet, as tau 1.37 rests on 1 prompt; an interval takes 8 prompts, and "
        "a decision 50 or more (eval/acceptance.py). The head read 900 tokens of the 10 million "
        "that a try takes (10,000 conversations)"
    )
    failed = "not to be published unmeasured, as the last evaluation failed"
    assert format_verdict({}, enough) == failed
    assert format_verdict({"eval/loss": 1.0}, enough) == failed.replace("failed", "held no prompt")


def test_the_plan_says_how_far_the_data_reach() -> None:
    assert format_data_need(300) == [
        "tokens to learn from: 300, 0.0% of the 10 million that a try takes (10,000 conversations) "
        "(docs/training.md)"
    ]
    assert format_data_need(25_000_000)[0].startswith("tokens to learn from: 25,000,000, 25.0% of ")
    assert format_data_need(500_000_000) == []


def test_a_gpu_must_hold_the_run_in_what_is_free_and_what_the_process_has(monkeypatch) -> None:
    alone = {"num_processes": 1, "is_main_process": False, "distributed_type": DistributedType.NO}
    config = TrainConfig(max_steps=9, micro_batch_size=1)

    def check(free: int, device: str = "cuda") -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 10**12))
        accelerator = SimpleNamespace(device=torch.device(device), **alone)
        return sum(estimate_and_check_memory(accelerator, medusa(), config, 64).values())

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000)
    needed = check(10**9)
    assert check(needed - 1000) == needed
    with pytest.raises(InputError, match="does not fit"):
        check(needed - 1001)
    check(0, "cpu")  # whose memory is not known


# --- When a run is compiled, and what is said where it cannot be.


MILLION = 10**6


def asked(device: str = "cpu", processes: int = 1, logits: int = 3, **train: object) -> bool:
    """The answer for a run of 1,000 steps of 10 sequences of 1,000 tokens."""
    config = TrainConfig(**{"max_steps": 1000, "batch_size": 10, "warmup_steps": 0, **train})
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
    return needs_compile(config, 1000, SimpleNamespace(loss_logits_per_token=logits), accelerator)


def test_a_gpu_compiles_and_a_setting_has_the_last_word() -> None:
    assert asked("cuda", logits=0)
    assert not asked("cuda", compile=False)
    assert asked("cpu", logits=0, compile=True)


def test_a_cpu_compiles_where_the_run_is_long_enough() -> None:
    least = int(MIN_COMPILED_LOGITS) // (10 * MILLION)
    assert not asked(logits=least)
    assert asked(logits=least + 1)
    assert not asked(logits=least + 1, processes=2)
    assert not asked(logits=0)


def machine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *programs: str, header: bool = True
) -> None:
    """Has these programs, Triton, and Python.h or not."""
    (folder / "bin").mkdir()
    for name in programs:
        (folder / "bin" / name).touch(mode=0o755)
    (folder / "Python.h").touch()
    monkeypatch.setenv("PATH", str(folder / "bin"))
    include = folder if header else folder / "bin"
    monkeypatch.setattr("sysconfig.get_paths", lambda _scheme: {"include": str(include)})
    monkeypatch.setattr("conf.command.environment.find_spec", lambda _: object())
    for name in ("CC", "CXX", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("programs", "on_cuda", "on_cpu"),
    [(("gcc",), "", "a C++ compiler (g++ on PATH"), (("clang",), "", "a C++ compiler (g++ on PATH"),
     (("g++",), "a C compiler (gcc or clang on PATH", ""), (("gcc", "g++"), "", "")],
)  # fmt: skip
def test_compilers_are_looked_for_where_torch_does(
    programs: tuple[str, ...], on_cuda: str, on_cpu: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    machine(monkeypatch, tmp_path, *programs)
    for device, expected in (("cuda", on_cuda), ("cpu", on_cpu)):
        assert find_missing_toolchain(device).startswith(expected)
        assert bool(find_missing_toolchain(device)) == bool(expected)


def test_a_named_compiler_counts_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, "gcc", "own")
    monkeypatch.setenv("CC", "own")
    assert not find_missing_toolchain("cuda")
    monkeypatch.setenv("CC", "gone")
    assert "CC=gone is no program" in find_missing_toolchain("cuda")


def test_python_h_and_triton_are_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, "gcc", "g++", header=False)
    for device in ("cuda", "cpu"):
        assert find_missing_toolchain(device).startswith(
            f"Python.h (in {tmp_path}/bin; e.g. apt-get install pyt"
        )
        with pytest.raises(
            InputError, match=r"^train\.compile=true: torch\.compile lacks Python\.h"
        ):
            check_compile("train.compile", True, device)
        check_compile("train.compile", None, device)
        check_compile("train.compile", False, device)
    monkeypatch.setenv("C_INCLUDE_PATH", f":{tmp_path}")
    assert not find_missing_toolchain("cuda")
    monkeypatch.setattr("conf.command.environment.find_spec", lambda _: None)
    assert find_missing_toolchain("cuda") == "Triton (pip install triton)"
    assert not find_missing_toolchain("cpu")


@pytest.mark.parametrize(
    "compiles",
    [
        fused._compile_criterion.__wrapped__,
        lambda: noisy_head(random_target(), 1).compile_layers(),
        lambda: random_target().compile(8),
    ],
    ids=["loss", "layers of a head", "target"],
)
def test_hints_that_nobody_can_heed_stay_off_progress_bars(
    compiles: Callable, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    compiles()
    for text in (
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.",
        "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction.",
        "TensorFloat32 is of no use to softmax",
    ):
        warnings.warn(text, stacklevel=1)
    assert [str(each.message) for each in recwarn] == ["TensorFloat32 is of no use to softmax"]
