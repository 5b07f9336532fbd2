"""Training from start to end on an emulated GPU: losses are the CPU's, the host seldom waits."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from emulated.device import Counts, counted, off
from emulated.test_decoding import HEADS, PROMPTS
from feature_heads import fresh, settings_of
from stores import save_chat
from torch import Tensor
from torch.distributed.utils import _to_kwargs
from torch.nn.modules.module import register_module_forward_pre_hook
from toys import noisy_head, save_target

from conf.command import environment
from conf.errors import InputError
from conf.settings.blocks import (
    DFlash2Run,
    DFlashRun,
    DSparkRun,
)
from conf.settings.data import DataConfig, TeacherKind
from conf.settings.drafting import SelfDraftConfig
from conf.settings.eagle import (
    Divergence,
    EagleRun,
    PEagleRun,
    TokenNormalizer,
)
from conf.settings.measure import SpeedupRun
from conf.settings.medusa import (
    AdapterConfig,
    JointConfig,
    Labels,
    Medusa2Run,
    MedusaConfig,
    MedusaRun,
)
from conf.settings.scripts import CaptureRun
from conf.settings.target import Dtype, TargetConfig
from conf.settings.training import TrainConfig
from data.features.store_reader import FeatureStore
from eval import speedup
from eval.compare import timing
from eval.decode.drafters.self_speculation import SelfDraft, list_skipped_layers
from eval.decode.engine import NoDraft, decode_batch
from heads.decoding.drafting import Drafter
from heads.decoding.tree import DynamicShape, make_static_tree
from heads.eagle.network import EagleDrafter
from heads.medusa import MedusaDrafter
from heads.target_model.load import load_target
from scripts.capture import capture
from train import dflash, dflash2, dspark, eagle, medusa, medusa2, peagle
from train.loop import evaluation, loop, sources
from train.objective import Objective

NUM_STEPS = 3
MOST_WAITS = 2
"""Waits of an optimizer step: one to see if all was finite, one for the figures to show."""
Settings = dict[str, Any]

EAGLE_1: Settings = {
    "num_steps": 1, "token_normalizer": TokenNormalizer.supervised, "divergence_weight": 0.1,
    "noise": 0.2,
}  # fmt: skip
REDUCED: Settings = {"draft_vocab_size": 120}
BLOCK: Settings = {"mask_token_id": None, "num_anchors": 12}
ADAPTED = Medusa2Run(
    head=MedusaConfig(num_heads=2),
    adapter=AdapterConfig(rank=4, alpha=8, dropout=0.0),
    joint=JointConfig(heads_only_steps=1),
)
HEADS_OF: dict[str, tuple[Callable[[Any], None], Any]] = {
    "medusa": (medusa.main, MedusaRun(head=MedusaConfig(num_heads=3))),
    "medusa, soft labels": (
        medusa.main, MedusaRun(head=MedusaConfig(num_heads=3, labels=Labels.soft)),
    ),
    "medusa-2": (medusa2.main, ADAPTED),
    "eagle-1": (eagle.main, EagleRun(head=settings_of("eagle1", **EAGLE_1))),
    "eagle-3": (eagle.main, EagleRun(head=settings_of("eagle3", **REDUCED))),
    "eagle-3.1": (
        eagle.main,
        EagleRun(head=settings_of("eagle3.1", **REDUCED, divergence=Divergence.hybrid)),
    ),
    "dflash": (dflash.main, DFlashRun(head=settings_of("dflash, causal in a window", **BLOCK))),
    # All ids: of two that are as likely in bfloat16, either may be the last of a few.
    "dflash-2": (
        dflash2.main, DFlash2Run(head=settings_of("dflash2", **BLOCK, selector_top_k=300)),
    ),
    "dspark": (dspark.main, DSparkRun(head=settings_of("dspark, rnn", **BLOCK, **REDUCED))),
    "p-eagle": (peagle.main, PEagleRun(head=settings_of("peagle", **BLOCK, **REDUCED))),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with grouped heads, others, and conversations of different lengths."""
    folder = tmp_path_factory.mktemp("inputs")
    save_target(folder / "target", num_hidden_layers=4, **HEADS)
    for family in FAMILIES:
        save_target(folder / family, family)
    save_chat(folder / "chat.jsonl")
    return folder


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Evaluations are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "MAX_REPLAY_TOKENS", 4)
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
    target: Settings | None = None,
    data: DataConfig | None = None,
    **train: Any,
) -> Callable[[], None]:
    """`train/*.py` of a head; the target in float32 unless told, the head in bfloat16."""
    main, config = HEADS_OF[name]
    where = {"path": str(inputs / "target"), "dtype": Dtype.float32} | (target or {})
    steps: Settings = {
        "max_steps": NUM_STEPS, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3,
        "warmup_steps": 1, "eval_steps": NUM_STEPS, "save_steps": NUM_STEPS,
        "log_steps": NUM_STEPS, "num_eval_sequences": 3, "num_replay_prompts": 1,
        "dtype": Dtype.bfloat16, "compile": False,
    }  # fmt: skip
    given = replace(
        config,
        target=TargetConfig(**where),
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


def on_cuda(run: Callable[[], None]) -> Counts:
    """Counts of the second step: the first makes what lasts, the last logs, evaluates, saves."""
    found: list[Counts] = []
    step = loop.TrainingLoop.optimizer_step

    def marked(run: loop.TrainingLoop) -> float:
        found.append(deepcopy(counts))
        return step(run)

    with pytest.MonkeyPatch.context() as patch, counted() as counts:
        patch.setattr(loop.TrainingLoop, "optimizer_step", marked)
        forget()
        hook = register_module_forward_pre_hook(stays_where_it_is)
        try:
            run()
        finally:
            hook.remove()
    return found[-1] - found[-2] if len(found) == NUM_STEPS else counts


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


# The last has both what a mixture has and what recurrent layers have.
FAMILIES = ("gpt_oss", "qwen3_moe", "lfm2", "qwen3_next")
HALF: Settings = {"dtype": Dtype.bfloat16}
SPREAD: Settings = {"device_map": "auto"}
STORED: Settings = {"path": None, "dtype": Dtype.auto}
# Heads, of a target on the device that may differ, from a store or not. What DFlash has of its own
# DFlash-2 and DSpark have too; Medusa-2 is Medusa with an adapted target.
ALONE = ("medusa", "eagle-3.1", "dspark", "p-eagle")
OFTEN = [
    *((name, {}, None) for name in ALONE),
    *(("medusa", {"family": name}, None) for name in ("gpt_oss", "qwen3_next")),
    ("eagle-3", HALF, None), ("eagle-1", STORED, TeacherKind.hidden),
    ("eagle-3", STORED, TeacherKind.top_k), ("eagle-3.1", SPREAD, None),
]  # fmt: skip
SELDOM = [
    *((name, {}, None) for name in HEADS_OF if name not in ALONE),
    *(("medusa", {"family": name}, None) for name in ("qwen3_moe", "lfm2")),
    ("medusa, soft labels", STORED, TeacherKind.hidden), ("medusa, soft labels", SPREAD, None),
    ("eagle-1", SPREAD, None),
]  # fmt: skip
CASES = [*OFTEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in SELDOM)]


@pytest.mark.parametrize(("name", "there", "teacher"), CASES)
def test_losses_are_those_of_the_cpu_and_a_step_waits_twice_at_most(
    *,
    name: str,
    there: Settings,
    teacher: TeacherKind | None,
    inputs: Path,
    stores: Callable[[TeacherKind], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = dict(there)
    if "family" in there:
        there["path"] = str(inputs / there.pop("family"))
    data = DataConfig(features=str(stores(teacher))) if teacher else None
    torch.backends.cuda.enable_cudnn_sdp(True)
    on_cpu(run_of(name, inputs, tmp_path / "cpu", {} if there == SPREAD else there, data))
    assert torch.backends.cuda.cudnn_sdp_enabled()
    told = "attention on cuda: PyTorch's flash and memory-efficient kernels, cuDNN's is off\n"
    assert told not in capsys.readouterr().out
    counts = on_cuda(run_of(name, inputs, tmp_path / "cuda", there, data))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert teacher or told in capsys.readouterr().out
    close = {"rel": 0.05} if there == HALF else {"rel": 5e-3, "abs": 2e-4}
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), **close)
    assert counts.num_waits <= MOST_WAITS, str(counts)
    for folder in ("head", "checkpoints/step-000003"):
        mine, theirs = (
            sorted(path.name for path in (tmp_path / at / folder).iterdir())
            for at in ("cuda", "cpu")
        )
        assert mine == theirs


def test_a_micro_batch_is_one_pass_whatever_it_holds(inputs: Path, tmp_path: Path) -> None:
    def operations(micro_batch_size: int) -> int:
        out_dir = tmp_path / str(micro_batch_size)
        run = run_of("eagle-3", inputs, out_dir, HALF, micro_batch_size=micro_batch_size)
        return on_cuda(run).operations.total()

    # Four sequences in one, against one after another.
    assert operations(4) < 0.4 * operations(1)


@pytest.mark.parametrize("name", ["eagle-3.1", "dflash"])
def test_gradients_in_bfloat16_are_those_in_float32(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    once: Settings = {"max_steps": 1, "warmup_steps": 0}
    expected = gradients(
        lambda: on_cpu(run_of(name, inputs, tmp_path / "cpu", **once, dtype=Dtype.float32))
    )
    found = gradients(lambda: on_cuda(run_of(name, inputs, tmp_path / "cuda", **once)))
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 0.05 * theirs.norm()


# --- Stores, and a target over two devices.


def store_of(inputs: Path, out_dir: Path, teacher: TeacherKind) -> Path:
    target = TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32)
    run = CaptureRun(
        target=target, data=conversations(inputs), out_dir=str(out_dir), micro_batch_size=2,
        num_replay_prompts=1, teacher=teacher, top_k=8,
    )  # fmt: skip
    capture(run, 20_000)
    return out_dir


@pytest.fixture(scope="module")
def stores(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[TeacherKind], Path]:
    """Captured on the CPU, each when it is first asked for."""
    folder = tmp_path_factory.mktemp("stores")

    def made(teacher: TeacherKind) -> Path:
        if not (folder / teacher.value).exists():
            on_cpu(partial(store_of, inputs, folder / teacher.value, teacher))
        return folder / teacher.value

    return made


@pytest.mark.parametrize(
    "teacher", [pytest.param(TeacherKind.hidden, marks=pytest.mark.slow), TeacherKind.top_k]
)
def test_a_capture_holds_what_the_cpus_does(
    teacher: TeacherKind, inputs: Path, stores: Callable[[TeacherKind], Path], tmp_path: Path
) -> None:
    forget()
    mine = FeatureStore(store_of(inputs, tmp_path / "store", teacher))
    theirs = FeatureStore(stores(teacher))
    assert len(mine.train) == len(theirs.train) > 1
    for number in range(len(mine.train)):
        found, expected = mine.train[number], theirs.train[number]
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], atol=0.02, rtol=0.02)


def test_a_target_over_two_devices_decodes(inputs: Path) -> None:
    config = TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32)
    target = load_target(replace(config, **SPREAD), torch.device("cuda", 0))
    assert {str(each.device) for each in target.model.parameters()} == {"cuda:0", "cuda:1"}
    eagle3 = fresh(target, settings_of("eagle3", draft_vocab_size=120, layers=[0, 1, 2]))
    drafters: list[Drafter] = [
        NoDraft(),
        MedusaDrafter(noisy_head(target), make_static_tree(3, 16)),
        EagleDrafter(eagle3, DynamicShape(3, 3, 8)),
        SelfDraft(target, list_skipped_layers(target, 2), 3, seeds=[1, 2, 3]),
    ]
    with off():
        plain = load_target(config, torch.device("cpu"))
        expected = [each.token_ids for each in decode_batch(plain, NoDraft(), PROMPTS, 10)]
    for drafter in drafters:
        found = decode_batch(target, drafter, PROMPTS, 10)
        assert [each.token_ids for each in found] == expected


# --- A GPU beside which torch.compile's needs are not met, as Triton is not here.


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda _: object())
    monkeypatch.setattr(environment, "which", lambda _: None)


@pytest.mark.usefixtures("no_compiler")
def test_training_goes_on_without_a_compiler_and_says_what_is_missing(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    used: list[Objective] = []
    monkeypatch.setattr(Objective, "compile_parts", used.append)
    on_cuda(run_of("medusa", inputs, tmp_path / "run", compile=None))
    told = capsys.readouterr().out
    assert "not compiled, which is slower: torch.compile needs a C compiler (gcc or clang" in told
    assert "compiled on first use" not in told
    assert not used


@pytest.mark.usefixtures("no_compiler")
def test_who_asks_to_compile_is_refused_before_anything_is_loaded(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flex = TargetConfig(path=str(inputs / "target"), attention="flex_attention")
    with pytest.raises(InputError, match=r"flex_attention: .* which needs a C compiler"):
        load_target(flex, torch.device("cuda"))
    monkeypatch.setattr(sources, "load_target", lambda *_: pytest.fail("loaded"))
    forget()
    with pytest.raises(InputError, match=r"^train\.compile=true: torch\.compile lacks a C comp"):
        run_of("medusa", inputs, tmp_path / "run", compile=True)()


def test_speedup_captures_steps_and_passes(
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Minutes, as each emulated operation is many real ones.
    monkeypatch.setattr(timing, "_profile_busy_seconds", lambda *_: None)
    forget()
    speedup.main(
        SpeedupRun(
            target=TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32),
            data=DataConfig(path=str(inputs / "chat.jsonl"), num_prompts=2),
            methods=["suffix", "skip_layers"],
            self_draft=SelfDraftConfig(skip=[1]),
            max_new_tokens=8,
            num_turns=1,
            num_warmups=0,
            num_repeats=1,
            concurrency=[2],
            out_dir=str(tmp_path / "out"),
        )
    )
    assert "cuDNN's is off" in capsys.readouterr().err
    result = json.loads((tmp_path / "out" / "speedup.json").read_text())
    assert result["lossless"]["num_equal"] == 2
    rows = result["methods"]
    assert {name: row.get("captured") for name, row in rows.items()} == {
        "vanilla": "step", "generate": None, "suffix": "verify pass", "skip_layers": "step",
    }  # fmt: skip
    captures = {name: row["captures"] for name, row in rows.items() if name != "generate"}
    assert all(each["num"] > 0 < each["seconds"] for each in captures.values()), captures
    assert "step" in rows["vanilla"]["breakdown"].keys() - rows["suffix"]["breakdown"].keys()
    assert (tmp_path / "out" / "speedup.html").exists()
