"""Muon against torch's own and against singular values; who updates what; averages of weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heads.devices
from conf.settings.target import Dtype
from conf.settings.training import Optimizer, Schedule, TrainConfig
from heads.devices import Processor, warn_if_slow
from tests.train.loop.test_loop import ToyObjective, fit, settings, weights
from tests.train.loop.test_memory import eagle, medusa
from train.loop.evaluation import HeldoutFigures
from train.objective import Objective
from train.parallel import processes
from train.parallel.optimizers import (
    COEFFICIENTS,
    Muon,
    compute_rate_fraction,
    make_optimizers,
    orthogonalise_matrix,
    state_keys,
)

SHAPES = ((6, 4), (4, 6), (5, 5))


def moved(kind: Any, steps: int = 3, **given: Any) -> list[list[float]]:
    """Matrices after steps with the same gradients."""
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = kind([{"params": matrices}], lr=0.1, weight_decay=0.3, **given)
    for each in matrices:
        optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each)
    for _ in range(steps):
        for each in matrices:
            each.grad = torch.randn(each.shape, generator=generator)
        optimizer.step()
    return [each.flatten().tolist() for each in matrices]


def test_muon_in_bfloat16_is_torchs_and_in_float32_differs_by_rounding() -> None:
    theirs = moved(torch.optim.Muon)
    assert moved(Muon, dtype=torch.bfloat16) == theirs
    for mine, each in zip(moved(Muon, dtype=torch.float32), theirs, strict=True):
        assert mine != each
        assert mine == pytest.approx(each, abs=0.02)


@pytest.mark.parametrize(
    ("products", "dtype", "expected"),
    [
        ([], Dtype.bfloat16, torch.float32), ([], Dtype.auto, torch.float32),
        (["avx512_bf16"], Dtype.bfloat16, torch.bfloat16),
        (["amx_bf16"], Dtype.auto, torch.float32),
    ],
)  # fmt: skip
def test_muon_iterates_in_the_dtype_of_the_run_where_the_processor_has_its_products(
    products: list[str], dtype: Dtype, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = Processor("a CPU", "AVX512", frozenset(products))
    monkeypatch.setattr(heads.devices, "this_processor", lambda: processor)
    rates = {"learning_rate": 0.4, "adam_learning_rate": 0.1}
    config = TrainConfig(optimizer=Optimizer.muon, dtype=dtype, **rates)
    (muon,) = (each for each in make_optimizers(medusa(), config) if isinstance(each, Muon))
    assert muon.dtype is expected


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_go_through_the_polynomial_and_vectors_stay(shape: tuple) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, found, right = torch.linalg.svd(matrix, full_matrices=False)
    found = found / found.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        found = a * found + b * found**3 + c * found**5
    torch.testing.assert_close(orthogonalise_matrix(matrix), left @ found.diag() @ right)
    assert found[:-1].min() > 0.6
    assert found.max() < 1.3


def test_a_matrix_without_gradient_stays_and_zeros_do_no_harm() -> None:
    still, zero = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    muon = Muon([{"params": [still, zero]}], torch.float32, lr=0.1, weight_decay=0.5)
    muon.state[zero]["momentum_buffer"] = torch.zeros(2, 3)
    zero.grad = torch.zeros(2, 3)
    muon.step()
    assert still.equal(torch.ones(2, 3))
    torch.testing.assert_close(zero.detach(), torch.full((2, 3), 0.95))


def updated(objective: Objective) -> dict[str, list[tuple[set[str], float, float]]]:
    """By optimizer, its groups: parameters, share of the rate, weight decay."""
    names = {id(each): name for name, each in objective.head.named_parameters()}
    rates = {"learning_rate": 0.4, "adam_learning_rate": 0.1}
    config = TrainConfig(optimizer=Optimizer.muon, weight_decay=0.1, **rates)
    found = {}
    for optimizer in make_optimizers(objective, config):
        groups = optimizer.param_groups
        found[type(optimizer).__name__] = [
            ({names[id(p)] for p in g["params"]}, g["rate"], g["weight_decay"]) for g in groups
        ]
    return found


def test_muon_has_the_matrices_between_states_and_adamw_the_rest() -> None:
    parts = updated(eagle(vocab_size=120))
    ((muon, rate, decay),) = parts["Muon"]
    assert (rate, decay) == (1.0, 0.1)
    layer = [f"layer.self_attn.{each}_proj.weight" for each in "qkvo"]
    layer += [f"layer.mlp.{each}_proj.weight" for each in ("gate", "up", "down")]
    assert muon == {"fc.weight", *layer}
    ((adamw, rate, decay),) = parts["AdamW"]
    assert (rate, decay) == (0.25, 0.1)
    norms = [f"layer.{each}.weight" for each in (
        "hidden_norm", "input_layernorm", "post_attention_layernorm",
    )]  # fmt: skip
    assert adamw == {"lm_head.weight", "norm.weight", *norms}
    (adamw,) = make_optimizers(eagle(), TrainConfig(optimizer=Optimizer.adamw))
    (group,) = adamw.param_groups
    assert len(group["params"]) == len(list(eagle().head.parameters()))
    assert group["rate"] == 1.0
    parts = updated(medusa())
    assert parts["Muon"][0][0] == {"heads.0.0.linear.weight", "heads.1.0.linear.weight"}
    assert {"heads.0.1.weight", "heads.0.0.linear.bias"} < parts["AdamW"][0][0]


def test_what_a_checkpoint_holds_of_each_parameter() -> None:
    head = eagle().head
    head.lm_head.requires_grad_(False)
    keys = state_keys(head, TrainConfig(optimizer=Optimizer.muon, average_decay=0.9))
    assert keys["fc.weight"] == ("momentum_buffer", "average")
    assert keys["norm.weight"] == ("exp_avg", "exp_avg_sq", "average")
    assert "lm_head.weight" not in keys
    plain = state_keys(head, TrainConfig(optimizer=Optimizer.adamw))
    assert set(plain.values()) == {("exp_avg", "exp_avg_sq")}


def test_the_average_is_what_is_evaluated_and_saved(tmp_path: Path) -> None:
    """By hand from the weights after each step of a run that keeps none."""
    average = ToyObjective().head.weight.detach().flatten()
    for steps, decay in ((1, 1 / 10), (2, 2 / 11), (3, 3 / 12)):
        config = settings(max_steps=steps, warmup_steps=0, schedule=Schedule.constant)
        fit(tmp_path / str(steps), config)
        after = torch.tensor(weights(tmp_path / str(steps))["weight"])
        average = decay * average + (1 - decay) * after
    shown: list[list[float]] = []

    def evaluate(head: nn.Linear) -> HeldoutFigures:
        shown.append(head.weight.flatten().tolist())
        return HeldoutFigures({})

    config = settings(
        max_steps=3, warmup_steps=0, schedule=Schedule.constant, average_decay=0.5
    )  # fmt: skip
    fit(tmp_path / "average", config, evaluate=evaluate)
    assert weights(tmp_path / "average")["weight"] == pytest.approx(average.tolist(), rel=1e-5)
    assert shown == [weights(tmp_path / "average")["weight"]]


def test_a_run_in_a_dtype_that_the_processor_imitates_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heads.devices, "this_processor", lambda: Processor("a CPU", "AVX2"))
    warn_if_slow.cache_clear()
    processes.start_accelerator(settings(dtype=Dtype.auto))
    assert capsys.readouterr().err == ""
    processes.start_accelerator(settings(dtype=Dtype.bfloat16))
    assert capsys.readouterr().err == (
        "train.dtype=bfloat16: products of many rows will be slow, as a CPU, AVX2 emulates them; "
        "set train.dtype=float32\n"
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Schedule.constant, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (Schedule.cosine, [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
        (Schedule.wsd, [0.5, 1.0, 1.0, 1.0, 2 / 3, 1 / 3]),
    ],
)
def test_schedules(kind: Schedule, expected: list[float]) -> None:
    config = TrainConfig(
        max_steps=6, warmup_steps=2, learning_rate=1.0, schedule=kind, decay_fraction=0.5
    )
    found = [compute_rate_fraction(config, step) for step in range(6)]
    assert found == pytest.approx(expected, abs=1e-6)
