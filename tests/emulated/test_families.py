"""Training beside targets that are no plain Llama, on an emulated GPU: losses and waits."""

from pathlib import Path
from typing import Any

import pytest
from emulated.runs import (
    MOST_WAITS,
    conversations,
    inputs,
    losses,
    on_cpu,
    on_cuda,
    run_of,
    short,
    waits_of_step,
)
from toys import save_target

__all__ = ["inputs", "short"]


# The last has both what a mixture has and what recurrent layers have.
@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_moe", "lfm2")),
        "qwen3_next",
    ],
)
def test_losses_are_those_of_the_cpu(family: str, inputs: Path, tmp_path: Path) -> None:
    target: dict[str, Any] = {"path": str(save_target(tmp_path / "target", family))}
    data = conversations(inputs)
    on_cpu(run_of("medusa", inputs, tmp_path / "cpu", target, data))
    counts = on_cuda(run_of("medusa", inputs, tmp_path / "cuda", target, data))
    expected = losses(tmp_path / "cpu")
    assert losses(tmp_path / "cuda") == pytest.approx(expected, rel=5e-3, abs=2e-4)
    waits = waits_of_step(counts)
    assert waits.num_waits <= MOST_WAITS, str(waits)
