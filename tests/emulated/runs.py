"""Training runs, each on the CPU and on the emulated device."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from emulated.device import Counts, counted, off
from torch import Tensor
from torch.distributed.utils import _to_kwargs
from torch.nn.modules.module import register_module_forward_pre_hook
from toys import save_target

from conf.settings.blocks import (
    DFlash2Config,
    DFlash2Run,
    DFlashConfig,
    DFlashRun,
    DSparkConfig,
    DSparkRun,
    Markov,
)
from conf.settings.data import DataConfig
from conf.settings.eagle import (
    Divergence,
    EagleConfig,
    EagleForm,
    EagleRun,
    PEagleConfig,
    PEagleRun,
    StepNormalizer,
    TokenNormalizer,
)
from conf.settings.medusa import (
    AdapterConfig,
    JointConfig,
    Labels,
    Medusa2Run,
    MedusaConfig,
    MedusaRun,
)
from conf.settings.target import Dtype, TargetConfig
from conf.settings.training import TrainConfig
from train import dflash, dflash2, dspark, eagle, medusa, medusa2, peagle
from train.loop import evaluation as replay
from train.loop import loop
from train.objective import Objective

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
NUM_STEPS = 3
MOST_WAITS = 2
"""Waits of an optimizer step: one to see if all was finite, one for the figures to show."""

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
BLOCK: dict[str, Any] = {
    "num_layers": 2, "block_size": 4, "num_features": 2, "num_anchors": 12,
    "divergence_weight": 1.0,
}  # fmt: skip
# All ids: of two that are as likely in bfloat16, either may be the last of a few.
SELECTOR: dict[str, Any] = {"selector_rank": 8, "selector_top_k": 300}
RNN: dict[str, Any] = {
    "markov_head_type": Markov.rnn, "markov_rank": 8, "own_output_head": True,
    "draft_vocab_size": 120,
}  # fmt: skip
BEHIND: dict[str, Any] = {
    "num_layers": 2, "num_steps": 4, "layers": [1, 2, 3], "draft_vocab_size": 120,
    "num_anchors": 20,
}  # fmt: skip
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
    "dflash": (dflash.main, DFlashRun(head=DFlashConfig(**BLOCK, causal=True, window=20))),
    "dflash-2": (dflash2.main, DFlash2Run(head=DFlash2Config(**BLOCK, **SELECTOR))),
    "dspark": (dspark.main, DSparkRun(head=DSparkConfig(**BLOCK, **RNN))),
    "p-eagle": (peagle.main, PEagleRun(head=PEagleConfig(**BEHIND))),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with grouped heads, and conversations of different lengths."""
    folder = tmp_path_factory.mktemp("inputs")
    save_target(folder / "target", num_hidden_layers=4, **HEADS)
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
        patch.setattr(replay, "MAX_REPLAY_TOKENS", 4)
        yield


def conversations(inputs: Path) -> DataConfig:
    return DataConfig(path=str(inputs / "chat.jsonl"), max_length=64, eval_fraction=0.2)


def forget() -> None:
    """A launch begins."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def run_of(
    name: str,
    inputs: Path,
    out_dir: Path,
    target: dict[str, Any] | None = None,
    data: DataConfig | None = None,
    **train: Any,
) -> Callable[[], None]:
    """`train/*.py` of a head; the target in float32 unless told, the head in bfloat16."""
    main, config = HEADS_OF[name]
    where = {"path": str(inputs / "target"), "dtype": Dtype.float32}
    steps: dict[str, Any] = {
        "max_steps": NUM_STEPS, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3,
        "warmup_steps": 1, "eval_steps": NUM_STEPS, "save_steps": NUM_STEPS,
        "log_steps": NUM_STEPS, "num_eval_sequences": 3, "num_replay_prompts": 1,
        "dtype": Dtype.bfloat16, "compile": False,
    }  # fmt: skip
    given = replace(
        config,
        target=TargetConfig(**(where if target is None else where | target)),
        data=data or conversations(inputs),
        train=TrainConfig(**{**steps, **train}),
        out_dir=str(out_dir),
    )
    return lambda: main(given)


def on_cpu(run: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch, off():
        patch.setenv("ACCELERATE_USE_CPU", "true")
        forget()
        run()


def stays_where_it_is(objective: Any, given: tuple[Any, ...]) -> None:
    """Does to what an objective gets what DDP does, FSDP2 too: nothing may move."""
    if isinstance(objective, Objective) and torch.is_grad_enabled():
        with counted() as counts:
            _to_kwargs(given, {}, torch.device("cuda", 0), False)
        assert counts.num_up == 0, f"DDP would move what is for the host: {counts}"


def on_cuda(run: Callable[[], None]) -> list[Counts]:
    """Counts before each optimizer step; batches are as a wrapper leaves them."""
    found: list[Counts] = []
    step = loop.TrainingLoop.optimizer_step

    def marked(run: loop.TrainingLoop) -> float:
        found.append(counts.copy())
        return step(run)

    with pytest.MonkeyPatch.context() as patch, counted() as counts:
        patch.setattr(loop.TrainingLoop, "optimizer_step", marked)
        forget()
        hook = register_module_forward_pre_hook(stays_where_it_is)
        try:
            run()
        finally:
            hook.remove()
    return found


def waits_of_step(counts: list[Counts]) -> Counts:
    """Counts of the second step: the first makes what lasts, the last logs, evaluates, saves."""
    return counts[2] - counts[1]


def losses(out_dir: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    found = {key: value for line in lines for key, value in line.items() if "loss" in key}
    assert found
    return found


def gradients(run: Callable[[], Any]) -> list[Tensor]:
    """The gradients of the optimizer's first step, on the CPU."""
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
