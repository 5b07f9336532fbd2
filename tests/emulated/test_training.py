"""Training from start to end on an emulated GPU: feed, optimizer steps, evaluation, saving."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from emulated.device import Counts, counted
from torch import Tensor
from toys import save_target

from conf.schema import (
    DataConfig,
    Dtype,
    Labels,
    MedusaConfig,
    MedusaRun,
    TargetConfig,
    TrainConfig,
)
from conf.schema_eagle import (
    Divergence,
    EagleConfig,
    EagleForm,
    EagleRun,
    StepNormalizer,
    TokenNormalizer,
)
from conf.schema_medusa2 import AdapterConfig, JointConfig, Medusa2Run
from train import eagle, loop, medusa, medusa2, replay

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
NUM_STEPS = 3
MOST_WAITS = 2

EAGLE_1 = EagleConfig(
    form=EagleForm.eagle1, num_steps=1, token_normalizer=TokenNormalizer.supervised,
    divergence_weight=0.1, regression_weight=1.0, noise=0.2,
)  # fmt: skip
HASS = replace(
    EAGLE_1, num_steps=3, step_decay=1.0, step_normalizer=StepNormalizer.mean,
    detach_features=True, top_k_weight=1.0,
)  # fmt: skip
EAGLE_3 = EagleConfig(num_steps=3, draft_vocab_size=120)
EAGLE_3_1 = replace(EAGLE_3, fc_norm=True, norm_output=True, divergence=Divergence.hybrid)
HEADS_OF: dict[str, tuple[Callable[[Any], None], Any]] = {
    "medusa": (medusa.main, MedusaRun(head=MedusaConfig(num_heads=3))),
    "medusa, soft labels": (
        medusa.main, MedusaRun(head=MedusaConfig(num_heads=3, labels=Labels.soft)),
    ),
    "medusa-2": (
        medusa2.main,
        Medusa2Run(
            head=MedusaConfig(num_heads=2),
            adapter=AdapterConfig(rank=4, alpha=8, dropout=0.0),
            joint=JointConfig(heads_only_steps=1),
        ),
    ),
    "eagle-1": (eagle.main, EagleRun(head=EAGLE_1)),
    "hass": (eagle.main, EagleRun(head=HASS)),
    "eagle-3": (eagle.main, EagleRun(head=EAGLE_3)),
    "eagle-3.1": (eagle.main, EagleRun(head=EAGLE_3_1)),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with grouped heads, and conversations of different lengths."""
    folder = tmp_path_factory.mktemp("inputs")
    save_target(folder / "target", num_hidden_layers=6, **HEADS)
    rows = []
    for n in range(24):
        messages = [
            {"role": "user", "content": f"hello number {n}"},
            {"role": "assistant", "content": "fine, thanks. " * (1 + n % 3)},
        ]
        rows.append(json.dumps({"messages": messages}) + "\n")
    (folder / "chat.jsonl").write_text("".join(rows))
    return folder


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Evaluations are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "MAX_NEW_TOKENS", 4)
        yield


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def run_of(name: str, inputs: Path, out_dir: Path, **train: Any) -> Callable[[], None]:
    main, config = HEADS_OF[name]
    steps: dict[str, Any] = {
        "max_steps": NUM_STEPS, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3,
        "warmup_steps": 1, "eval_steps": NUM_STEPS, "save_steps": NUM_STEPS,
        "log_steps": NUM_STEPS, "num_eval_sequences": 3, "num_replay_prompts": 2,
        "dtype": Dtype.bfloat16, "compile": False,
    }  # fmt: skip
    given = replace(
        config,
        target=TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32),
        data=DataConfig(path=str(inputs / "chat.jsonl"), max_length=64, eval_fraction=0.2),
        train=TrainConfig(**{**steps, **train}),
        out_dir=str(out_dir),
    )
    return lambda: main(given)


def on_cpu(run: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        forget()
        run()


def on_cuda(run: Callable[[], None]) -> list[Counts]:
    """What was counted before each optimizer step began."""
    found: list[Counts] = []
    step = loop.Run.optimizer_step

    def marked(run: loop.Run) -> float:
        found.append(counts.copy())
        return step(run)

    with pytest.MonkeyPatch.context() as patch, counted() as counts:
        patch.setattr(loop.Run, "optimizer_step", marked)
        forget()
        run()
    return found


def losses(out_dir: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    found = {key: value for line in lines for key, value in line.items() if "loss" in key}
    assert found
    return found


@dataclass(frozen=True)
class Ran:
    """The same run on the CPU and on the device, and what the device was waited for in a step."""

    cpu: Path
    cuda: Path
    waits: Counts


@pytest.fixture(scope="module", params=HEADS_OF)
def ran(
    request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Ran:
    folder = tmp_path_factory.mktemp("ran")
    on_cpu(run_of(request.param, inputs, folder / "cpu"))
    counts = on_cuda(run_of(request.param, inputs, folder / "cuda"))
    return Ran(folder / "cpu", folder / "cuda", counts[2] - counts[1])


def test_losses_are_those_of_the_cpu_and_a_head_is_saved(ran: Ran) -> None:
    assert losses(ran.cuda) == pytest.approx(losses(ran.cpu), rel=5e-3, abs=2e-4)
    for folder in ("head", "checkpoints/step-000003"):
        names = [
            sorted(path.name for path in (at / folder).iterdir()) for at in (ran.cpu, ran.cuda)
        ]
        assert names[0] == names[1]


def test_an_optimizer_step_waits_twice_at_most(ran: Ran) -> None:
    assert ran.waits.num_waits <= MOST_WAITS, ran.waits


@pytest.mark.parametrize("name", ["medusa", "eagle-1", "eagle-3.1"])
def test_gradients_in_bfloat16_are_those_in_float32(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    once: dict[str, Any] = {"max_steps": 1, "warmup_steps": 0}
    expected = gradients(
        lambda: on_cpu(run_of(name, inputs, tmp_path / "cpu", **once, dtype=Dtype.float32))
    )
    found = gradients(lambda: on_cuda(run_of(name, inputs, tmp_path / "cuda", **once)))
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 0.05 * theirs.norm()


def gradients(run: Callable[[], Any]) -> list[Tensor]:
    """What the optimizer is given in its first step, on the CPU."""
    found: list[Tensor] = []
    step = torch.optim.AdamW.step

    def recorded(self: torch.optim.AdamW) -> None:
        if not found:
            groups = self.param_groups
            found.extend(p.grad.cpu().clone() for group in groups for p in group["params"])
        step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", recorded)
        run()
    return found
