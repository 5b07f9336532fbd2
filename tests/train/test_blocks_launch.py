"""`train/dflash.py` and its like as users start them: processes, a tiny target, a small file."""

import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.parallel.test_launch import ROOT, TWO, begin, curve, inputs, run, trained, wait_for
from tests.train.parallel.test_strategies import launched

LAYOUTS = ("ddp", "fsdp2", "zero2", "zero3")
SMALL = ["head.layers=[0,1]", "head.num_layers=2", "head.num_anchors=6", "head.mask_token_id=0"]
KINDS = {
    "dflash": ["head.block_size=4", "head.causal=true", "head.window=8"],
    "dflash2": [
        "head.block_size=4", "head.selector_rank=4", "head.selector_top_k=6",
        "head.conv_group_size=8",
    ],
    "dspark": [
        "head.block_size=4", "head.markov_head_type=rnn", "head.markov_rank=4",
        "head.own_output_head=true", "head.draft_vocab_size=12",
    ],
    "peagle": ["head.num_steps=3", "head.draft_vocab_size=12", "head.num_segments=2"],
}  # fmt: skip
__all__ = ["inputs"]


def arguments(inputs: Path, kind: str, out_dir: Path, *more: str) -> list[str]:
    return [
        str(ROOT / "train" / f"{kind}.py"), f"target.path={inputs / 'target'}",
        f"data.path={inputs / 'chat.jsonl'}", f"out_dir={out_dir}", "data.max_length=32",
        "data.eval_fraction=0.1", "train.batch_size=4", "train.warmup_steps=2",
        "train.max_steps=12", "train.save_steps=2", "train.eval_steps=6", "train.log_steps=1",
        "train.learning_rate=0.01", "train.adam_learning_rate=0.01", *SMALL, *KINDS[kind], *more,
    ]  # fmt: skip


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(out_dir / "head" / "model.safetensors")


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("dflash", "dflash2", "peagle")]


@pytest.fixture(scope="module", params=[*SLOW, "dspark"])
def straight(
    request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    command = arguments(inputs, request.param, folder / "out")
    text = trained([sys.executable, *command], folder)
    assert "2 layers over hidden states [0, 1]" in text
    assert ("blocks of 4 rows" in text) == (request.param != "peagle")
    assert "tau" in text
    return request.param, folder / "out"


def test_evaluations_tell_of_every_depth(straight: tuple[str, Path]) -> None:
    _, out_dir = straight
    for name in ("loss", "loss_d3", "top1_d3", "alpha_d3", "greedy_alpha_d3", "tau"):
        found = curve(out_dir, f"eval/{name}")
        assert len(found) == 2, name
        assert all(map(math.isfinite, found)), name


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(
    straight: tuple[str, Path], inputs: Path, tmp_path: Path
) -> None:
    kind, out_dir = straight
    process = begin([sys.executable, *arguments(inputs, kind, tmp_path / "out")], tmp_path)
    wait_for(tmp_path / "out/checkpoints/step-000004", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    if kind == "dflash":
        other = arguments(inputs, kind, tmp_path / "out", "train.resume=auto", "head.window=9")
        refused = run([sys.executable, *other], tmp_path)
        assert refused.returncode == 2
        assert "head.window" in refused.stderr
    again = arguments(inputs, kind, tmp_path / "out", "train.resume=auto")
    trained([sys.executable, *again], tmp_path)
    for name, expected in weights(out_dir).items():
        assert torch.equal(weights(tmp_path / "out")[name], expected), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_equal_one_in_every_layout(
    straight: tuple[str, Path], inputs: Path, tmp_path: Path, layout: str
) -> None:
    kind, out_dir = straight
    expected, more = out_dir, list[str]()
    launcher = TWO if layout == "ddp" else launched(layout)
    if layout.startswith("zero"):
        more = ["train.optimizer=adamw"]
        trained([sys.executable, *arguments(inputs, kind, tmp_path / "one", *more)], tmp_path)
        expected = tmp_path / "one"
    trained([*launcher, *arguments(inputs, kind, tmp_path / "out", *more)], tmp_path)
    for name in ("train/loss", "eval/loss", "eval/tau"):
        assert curve(tmp_path / "out", name) == pytest.approx(curve(expected, name), abs=1e-4)
    for name, each in weights(expected).items():
        # A hundredth of the learning rate: AdamW enlarges the rounding of small gradients' sums.
        torch.testing.assert_close(weights(tmp_path / "out")[name], each, atol=1e-4, rtol=0)
