"""The gradients that the loop itself gives of one optimizer step, on any device."""

import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import feature_heads
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from toys import random_model

from conf.settings.medusa import MedusaConfig
from conf.settings.target import Dtype
from conf.settings.training import LogConfig, Schedule, TrainConfig
from data.prepared.packing import PackedDataset
from data.templates.record_encoder import Sample
from heads.medusa import MedusaHead
from heads.target_model.model import Target
from train.loop import loop
from train.loop.loop import TrainingJob
from train.medusa import MedusaObjective
from train.parallel import processes

KINDS = ("medusa", "eagle1", "eagle3", "dflash", "dflash2", "dspark, rnn", "peagle", "mtp")
GROUPED = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 4, "intermediate_size": 384,
}  # fmt: skip


def objective_of(kind: str, target: Target) -> Any:
    """As its entry script makes it, with 3 depths; weights do not depend on the device."""
    torch.manual_seed(0)
    if kind == "medusa":
        head: Any = MedusaHead.from_target(target, 3, 1)
        return MedusaObjective(head, target, MedusaConfig(num_heads=3))
    more = {"peagle": {"num_steps": 3}, "eagle3": {"draft_vocab_size": 48}}.get(kind, {})
    settings = feature_heads.settings_of(kind, **more)
    head = feature_heads.fresh(target, settings, kind)
    return feature_heads.objective_of(head, target, settings)


def documents() -> PackedDataset:
    """Packed sequences of documents of 5 to 60 tokens."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for length in torch.randint(5, 60, (24,), generator=generator).tolist():
        ids = torch.randint(3, 90, (length,), generator=generator).tolist()
        samples.append(Sample(ids, [place >= length // 3 for place in range(length)]))
    return PackedDataset(samples, 96, seed=0)


def grouped_target(device: str, dtype: torch.dtype) -> Target:
    """Eight heads on two, with weights that bfloat16 can hold, and unsure of its next token."""
    model = random_model(**GROUPED)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(0.25)
        parameter.data.copy_(parameter.data.bfloat16())
    return Target(model.to(device, dtype), None, "llama")


def weights_on_cpu(kind: str) -> dict[str, Tensor]:
    """The weights of the untrained head."""
    return objective_of(kind, grouped_target("cpu", torch.float32)).head.state_dict()


class FirstStep(NamedTuple):
    """A step of the loop.

    Attributes:
        shown: the loss that it reports, a mean over supervised tokens.
        loss: what the gradients are of; its weights and its divisor are the objective's.
        gradients: float32, on the CPU, by the names of the head's parameters.
    """

    shown: float
    loss: float
    gradients: dict[str, Tensor]


def first_step(
    kind: str,
    device: str,
    dtype: Dtype,
    out_dir: Path,
    compiled: bool = False,
    *,
    micro_batch_size: int = 2,
    batch_size: int = 4,
) -> FirstStep:
    """The loop's first step."""
    config = TrainConfig(
        max_steps=2, batch_size=batch_size, micro_batch_size=micro_batch_size, warmup_steps=0,
        max_grad_norm=None, dtype=dtype, learning_rate=1e-3, schedule=Schedule.constant,
    )  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    with patch.dict(os.environ, {"ACCELERATE_USE_CPU": str(device == "cpu").lower()}):
        accelerator = processes.start_accelerator(config)
    assert accelerator.device.type == device
    target = grouped_target(device, getattr(torch, dtype.value))
    objective = objective_of(kind, target)
    if device != "cpu":
        objective.head.load_state_dict(weights_on_cpu(kind))
    if compiled:
        objective.compile_parts()
    data = documents()
    run = loop.TrainingLoop(
        accelerator, TrainingJob(config, LogConfig(), 0, out_dir, objective, data, data)
    )
    found: dict[str, Tensor] = {}

    def keep(*_arguments: Any) -> None:
        for name, parameter in objective.head.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.detach().float().cpu().clone()

    run.placement.optimizers[0].register_step_pre_hook(keep)
    totals, backward = [], run.placement.backward
    run.placement.backward = lambda total: (totals.append(float(total.detach())), backward(total))
    loss = run.optimizer_step()
    run.close()
    AcceleratorState._reset_state(reset_partial_state=True)
    return FirstStep(loss, sum(totals), found)


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The difference of each parameter's gradient, relative to its norm."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name] - each).norm() / each.norm()) for name, each in expected.items()
    }
