"""Gradients are clipped by norm, by value, by both or by neither, in every layout."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conf.errors import InputError
from tests.train.loop.test_loop import ToyObjective, settings
from tests.train.parallel.test_placement import UNIT, batch, layout, one_step, placed
from train.parallel import processes
from train.parallel.placement import Placement

__all__ = ["layout"]


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("max_value", [None, 0.03])
def test_what_the_optimizer_gets(
    layout: type[Placement], max_norm: float | None, max_value: float | None
) -> None:
    placement = placed(max_grad_norm=max_norm, max_grad_value=max_value)
    plain = ToyObjective()
    seen: list[Tensor] = []
    placement.optimizers[0].register_step_pre_hook(
        lambda *_args: seen.extend(whole(p.grad) for p in placement.trained.values())
    )
    plain(batch(0), UNIT).total.backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert norm > 1  # both clip
    assert one_step(placement, 0) == pytest.approx(float(norm))
    for found, parameter in zip(seen, plain.head.parameters(), strict=True):
        assert parameter.grad is not None
        expected = parameter.grad * (1 if max_norm is None else max_norm / norm)
        expected = expected if max_value is None else expected.clamp(-max_value, max_value)
        torch.testing.assert_close(found, expected)
    if max_value is not None:
        assert max(float(each.abs().max()) for each in seen) == pytest.approx(max_value)


def whole(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def test_deepspeed_does_not_clip_by_value() -> None:
    accelerator: Any = SimpleNamespace(distributed_type="DEEPSPEED")
    with pytest.raises(InputError, match=r"max_grad_value=0\.5: DeepSpeed clips by norm only"):
        processes._set_up_deepspeed(accelerator, settings(max_grad_value=0.5))


def test_no_clipping_is_none_and_not_zero() -> None:
    for name in ("max_grad_norm", "max_grad_value"):
        with pytest.raises(InputError, match=rf"train\.{name}=0: must be above 0"):
            settings(**{name: 0})
