"""The loop in one process, on a toy objective: order, stopping, resuming, trackers, tau."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import noisy_head, random_target

from conf.command.environment import check_launch
from conf.errors import InputError
from conf.settings.target import Dtype
from conf.settings.training import Keep, LogConfig, Schedule, Tracker, TrainConfig
from data.prepared.packing import PackedDataset
from data.templates.record_encoder import Sample
from eval import preflight_checks as refusals
from eval.decode.engine import decode
from eval.measure.acceptance_stats import PromptSteps, compute_tau, compute_tau_interval, tau
from eval.measure.target_answers import LocalAnswerSource
from heads.decoding.tree import Tree
from heads.folders import write_head_folder
from heads.medusa import MedusaDrafter
from train.batch import data_loader as schedule
from train.batch.batch import NOISE_SEEDS, Batch
from train.loop import command, evaluation, loop
from train.loop import metric_logger as tracking
from train.loop.evaluation import (
    MAX_REPLAY_TOKENS,
    HeldoutFigures,
    KeptHead,
    choose_kept_head,
    format_figures,
    make_heldout_replay,
    select_heldout_prompts,
)
from train.loop.loop import Outcome, TrainingJob
from train.loss.fused_linear import LossSums
from train.objective import Objective
from train.parallel import processes

T, D = 6, 4


class ToyHead(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(D, 1)

    def find_output_heads(self) -> list[Tensor]:
        return []

    find_embeddings = find_output_heads

    def collect_tensors(self) -> dict[str, Tensor]:
        return self.state_dict()

    def save(
        self, folder: Path, provenance: dict, _documents: dict, tensors: dict | None = None
    ) -> None:
        tensors = tensors or self.state_dict()
        write_head_folder(folder, "head.safetensors", tensors, {"headsmith.json": provenance})


class ToyObjective(Objective):
    """Squared error with noise, so that resuming has random draws to get right."""

    metric_names = ("top1", "top5")

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.head = ToyHead()
        self.term_weights = torch.tensor([0.5])
        self.noise = noise

    def compute_divisors(self, batch: Batch) -> Tensor:
        return batch["loss_mask"].sum()[None].float()

    def prepare_batch(self, batch: Batch) -> Batch:
        draws = []
        for seed in batch.get(NOISE_SEEDS, [0] * len(batch["x"])):
            generator = torch.Generator().manual_seed(seed)
            draws.append(self.noise * torch.randn(T, D, generator=generator))
        return {**batch, "x": batch["x"] + torch.stack(draws)}

    def forward(self, batch: Batch, scale: Tensor) -> LossSums:
        error = (self.head(batch["x"]).squeeze(-1) - 1).pow(2) * batch["loss_mask"]
        positive = ((batch["x"][..., 0] > 0) & (batch["loss_mask"] > 0)).sum()
        terms = [error.sum(), batch["loss_mask"].sum(), positive, torch.zeros(())]
        return LossSums(scale[0] * error.sum(), torch.stack(terms).float()[:, None].detach())


def rows(number: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(T, D, generator=generator),
            "loss_mask": torch.rand(T, generator=generator) < 0.7,
            "document_ids": torch.zeros(T, dtype=torch.int64),
            "position_ids": torch.arange(T),
        }
        for _ in range(number)
    ]


def settings(**changes: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "max_steps": 6, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 0.05,
        "warmup_steps": 2, "eval_steps": 3, "num_eval_sequences": 3, "save_steps": 2,
        "log_steps": 1, "dtype": Dtype.float32, "schedule": Schedule.wsd,
    }  # fmt: skip
    return TrainConfig(**{**defaults, **changes})


def fit(out_dir: Path, config: TrainConfig, noise: float = 0.0, **changes: Any) -> Outcome:
    job = TrainingJob(config, LogConfig(), 0, out_dir, ToyObjective(noise), rows(7), rows(3))
    return loop.fit_head(processes.start_accelerator(config), replace(job, **changes))


def weights(out_dir: Path) -> dict[str, list[float]]:
    tensors = load_file(out_dir / "head" / "head.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


def lines(out_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def test_prompts_are_learnt_if_wanted_and_evaluations_look_at_answers(tmp_path: Path) -> None:
    padded = rows(7)
    for row in padded:
        row["document_ids"][-1] = -1
    whole = [{**row, "loss_mask": row["document_ids"] >= 0} for row in padded]
    objective = ToyObjective()
    objective.learns_prompts = True
    fit(tmp_path / "prompts", settings(), train=padded, objective=objective)
    fit(tmp_path / "whole", settings(), train=whole)
    fit(tmp_path / "answers", settings(), train=padded)
    assert weights(tmp_path / "prompts") == weights(tmp_path / "whole")
    assert weights(tmp_path / "prompts") != weights(tmp_path / "answers")
    found, expected = (
        [line["eval/loss"] for line in lines(tmp_path / name) if "eval/loss" in line]
        for name in ("prompts", "whole")
    )
    assert found == expected


def test_run_leaves_head_metrics_and_checkpoints(tmp_path: Path) -> None:
    # With nothing there, `auto` begins.
    measured = HeldoutFigures({"tau": 1.5, "tau_prompts": 3})
    outcome = fit(tmp_path, settings(resume="auto"), evaluate=lambda head: measured)
    assert outcome.finished
    assert outcome.evaluation["eval/tau"] == 1.5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "head", "metrics.jsonl"]
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000006"]
    assert (tmp_path / "head" / "headsmith.json").is_file()
    train = [line for line in lines(tmp_path) if "train/loss" in line]
    assert [line["step"] for line in train] == [1, 2, 3, 4, 5, 6]
    assert train[-1]["train/loss"] < train[0]["train/loss"]
    assert train[-1]["train/tokens"] == 6 * 4 * T


def test_every_sequence_of_every_step_has_noise_of_its_own(tmp_path: Path) -> None:
    class Seeded(ToyObjective):
        def __init__(self) -> None:
            super().__init__()
            self.seeds: list[int] = []

        def prepare_batch(self, batch: Batch) -> Batch:
            self.seeds += batch.get(NOISE_SEEDS, ())  # a batch held out has none
            return super().prepare_batch(batch)

    drawn = []
    for size in (1, 4):
        objective = Seeded()
        fit(tmp_path / str(size), settings(micro_batch_size=size), objective=objective)
        drawn.append(objective.seeds)
    wanted = {
        (step, i) for step in range(6) for i in schedule.draw_global_batch(step, 4, 7, seed=0)
    }
    assert len(set(drawn[0])) == len(wanted) > 20
    assert drawn[0] == drawn[1]
    first = schedule.draw_global_batch(0, 4, 7, seed=0)
    assert drawn[0][:4] == [schedule.hash_seed(0, 0, index) for index in first]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_are_adamws_however_a_batch_is_cut(tmp_path: Path, size: int) -> None:
    """Three of torch, each on the mean over the supervised tokens of all four sequences."""
    changes = {"adam_beta2": 0.5, "weight_decay": 0.1, "max_grad_norm": None}
    config = settings(max_steps=3, schedule=Schedule.constant, micro_batch_size=size, **changes)
    fit(tmp_path, config)
    head, data, losses = ToyHead(), rows(7), []
    adamw = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.5), weight_decay=0.1)
    for step, rate in enumerate([0.025, 0.05, 0.05]):
        picked = [data[i] for i in schedule.draw_global_batch(step, 4, 7, seed=0)]
        errors = [(head(r["x"]).squeeze(-1) - 1).pow(2)[r["loss_mask"]] for r in picked]
        loss = 0.5 * torch.cat(errors).mean()
        losses.append(loss.item())
        loss.backward()
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        adamw.zero_grad()
    found = [line["train/loss"] for line in lines(tmp_path) if "train/loss" in line]
    assert found == pytest.approx(losses, rel=1e-5)
    for name, parameter in head.state_dict().items():
        assert weights(tmp_path)[name] == pytest.approx(parameter.flatten().tolist(), rel=1e-4)


def test_sigterm_saves_and_resuming_equals_never_having_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path / "straight", settings(), noise=0.3)
    objective = ToyObjective(0.3)
    prepare, prepared = objective.prepare_batch, []

    def interrupt(batch: Batch) -> Batch:
        prepared.append(batch)
        if len(prepared) == 5:  # in the third step
            os.kill(os.getpid(), signal.SIGTERM)
        return prepare(batch)

    objective.prepare_batch = interrupt
    out_dir = tmp_path / "stopped"
    stopped = fit(out_dir, settings(), objective=objective)
    assert (stopped.finished, stopped.step) == (False, 3)
    assert not (out_dir / "head").exists()
    said = capfd.readouterr().err
    assert (
        said.count(
            "\nstops after this step (3 of 6) and saves a checkpoint. To stop at once, type Ctrl-C "
            f"after two seconds, or kill -INT {os.getpid()} where the prompt is back already; that "
            "loses the steps since the last checkpoint\n"
        )
        == 1
    )
    assert "held-out losses: 100%" in said
    so_far = load_file(out_dir / "stopped/head/head.safetensors")
    saved = load_file(out_dir / "checkpoints/step-000003/head.safetensors")
    assert {name: tensor.tolist() for name, tensor in so_far.items()} == {
        name: tensor.tolist() for name, tensor in saved.items()
    }
    typed = ["train/medusa.py", "train.resume=checkpoints/1", "data.columns={prompt: ask}"]
    monkeypatch.setattr("sys.argv", typed)
    command.print_end(stopped, out_dir, None)
    assert capfd.readouterr().out == (
        "stopped at step 3; continue with train.resume=auto\n"
        f"the head so far lies in {out_dir}/stopped/head; to export it (your engine in place of "
        "ENGINE):\n"
        f"  python scripts/export.py head.path={out_dir}/stopped/head format=ENGINE "
        f"out_dir={out_dir}-stopped\n\n"
        "next, train on:\n"
        "  python train/medusa.py 'data.columns={prompt: ask}' train.resume=auto\n"
    )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    torch.manual_seed(12345)
    assert fit(out_dir, settings(resume="auto"), noise=0.3).finished
    assert sorted(p.name for p in out_dir.iterdir()) == ["checkpoints", "head", "metrics.jsonl"]
    assert weights(out_dir) == weights(tmp_path / "straight")
    assert [line["step"] for line in lines(out_dir) if "train/loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("compiled", "micro", "left"), [(False, 1, 5), (True, 2, 10)])
def test_the_first_micro_batch_tells_the_hours_and_a_stop_tells_its_minutes(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    compiled: bool,
    micro: int,
    left: int,
) -> None:
    """A compiled objective's first one compiles, so the second is timed.

    A step has two, each of 300 s. The stop is asked for in the second, or in the third, with which
    the next step begins.
    """
    objective = ToyObjective()
    prepare, asked = objective.prepare_batch, []

    class Clock:
        def __init__(self) -> None:
            self.begun = len(asked)

        def seconds(self) -> float:
            return 300.0 * (len(asked) - self.begun)

    def count(batch: Batch) -> Batch:
        if len(asked) <= micro:  # the estimate comes before the next micro batch
            assert ("hours" in capfd.readouterr().out) == (len(asked) == micro)
        if len(asked) == micro:
            os.kill(os.getpid(), signal.SIGTERM)
        asked.append(batch)
        return prepare(batch)

    monkeypatch.setattr(loop, "Stopwatch", Clock)
    objective.prepare_batch, objective.compiled = count, compiled
    fit(tmp_path, settings(max_steps=4000, eval_steps=9999), objective=objective)
    assert f" of 4,000), in about {left} minutes, and saves a checkpoint." in capfd.readouterr().err


def test_an_estimate_says_what_to_lower_if_it_is_long() -> None:
    assert loop.format_estimate(28.5, 8000) == [
        "about 63 hours to train, then the evaluation, by the first micro batch: 8,000 of 28.5 s; "
        "lower train.num_epochs, train.max_steps, data.num_prompts or data.max_length"
    ]
    assert loop.format_estimate(0.5, 1200) == [
        "about 10 minutes to train, then the evaluation, by the first micro batch: 1,200 of 0.5 s"
    ]
    assert loop.format_estimate(0.5, 100) == []


def test_damaged_newest_checkpoint_still_gives_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, settings())
    before, log = weights(tmp_path), lines(tmp_path)
    (tmp_path / "checkpoints/step-000006/head.safetensors").write_bytes(b"x")
    fit(tmp_path, settings(resume="auto"))
    assert "step-000006 is damaged" in capsys.readouterr().out
    assert weights(tmp_path) == before
    assert [line["step"] for line in lines(tmp_path)] == [line["step"] for line in log]


def test_resuming_on_other_data_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, settings())
    with pytest.raises(InputError, match="packed sequences was 7, is 5"):
        fit(tmp_path, settings(resume="auto"), train=rows(5))
    shorter = [{name: value[:-1] for name, value in row.items()} for row in rows(7)]
    with pytest.raises(InputError, match=rf"data.max_length was {T}.*\(type data.max_length={T}\)"):
        fit(tmp_path, settings(resume="auto"), train=shorter)


def test_accuracies_are_told_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "short", settings())
    assert not any("1k" in key for line in lines(tmp_path / "short") for key in line)
    monkeypatch.setattr(evaluation, "EDGES", torch.tensor([2, 4]))
    monkeypatch.setattr(evaluation, "RANGES", ("0-2", "2-4", "4-"))
    fit(tmp_path / "long", settings())
    found = [line for line in lines(tmp_path / "long") if "eval/loss" in line][-1]
    whole = [line for line in lines(tmp_path / "short") if "eval/loss" in line][-1]
    assert found["eval/loss"] == pytest.approx(whole["eval/loss"], rel=1e-6)
    assert found["eval/top1_d1"] == whole["eval/top1_d1"]
    x, learnt = (torch.stack([row[name] for row in rows(3)]) for name in ("x", "loss_mask"))
    positive = (x[..., 0] > 0) & learnt
    for name, places in (("0-2", slice(0, 2)), ("2-4", slice(2, 4)), ("4-", slice(4, T))):
        share = positive[:, places].sum() / learnt[:, places].sum()
        assert found[f"eval/{name}/top1_d1"] == pytest.approx(float(share))


@pytest.mark.parametrize("error", [InputError, torch.OutOfMemoryError])
def test_an_evaluation_that_fails_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    fit(tmp_path / "straight", settings())
    there: list[list[str]] = []

    def fail(_head: Any) -> dict[str, float]:
        there.append(sorted(p.name for p in tmp_path.glob("out/*/*") if p.is_dir()))
        there[-1] += [p.name for p in tmp_path.glob("out/head")]
        raise error("on another device")

    outcome = fit(tmp_path / "out", settings(save_steps=3), evaluate=fail)
    assert (outcome.finished, outcome.evaluation) == (True, {})
    assert there == [["step-000003"], ["step-000003", "step-000006", "head"]]
    assert weights(tmp_path / "out") == weights(tmp_path / "straight")
    assert not [line for line in lines(tmp_path / "out") if "eval/loss" in line]
    said = capsys.readouterr().err
    assert said.count("the evaluation failed in process 0, training goes on") == 2
    assert f"{error.__name__}: " in said
    assert "in fail\n    raise error" in said
    command.print_end(outcome, tmp_path, None)
    assert capsys.readouterr().out.endswith("head; its last evaluation failed, see above\n")


def test_the_end_names_the_prompts_of_its_tau(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for eval_path, count, prompts in (
        (None, 1.0, "1 prompt held out of data.path"),
        ("held.jsonl", 16.0, "16 prompts of data.eval_path"),
    ):
        figures = {"eval/tau": 1.5, "eval/tau_prompts": count}
        command.print_end(Outcome(True, 3, figures, {"step": 3}), tmp_path, eval_path)
        said = f"head saved to {tmp_path}/head, tau 1.50 on {prompts} (chain)\n"
        assert capsys.readouterr().out == said


# --- The step whose head stays. One evaluation replays 8 texts of 10 passes.

GOOD = [(20, 10)] * 8
POOR = [(20, 12)] * 7 + [(20, 10)]
"""Tokens and passes of texts: tau 2.0, and less on seven of eight texts."""
UNEVEN = [(20, 13), (20, 8)] * 4
"""On half of the texts more."""
OTHER = [(10, 10)] * 8
"""Texts of 11 tokens instead of 21."""


def choose(*texts: list[tuple[int, int]]) -> KeptHead:
    kept = None
    for step, each in enumerate(texts, start=1):
        kept = choose_kept_head(kept, step, HeldoutFigures({"eval/tau": float(step)}, each))
    assert kept is not None
    return kept


@pytest.mark.parametrize(
    ("texts", "step", "best_step", "why"),
    [
        ([GOOD], 1, 1, "its tau, 2.000, is the first"),
        ([POOR, GOOD], 2, 2, "its tau, 2.000, is the largest"),
        ([GOOD, GOOD], 2, 2, "its tau, 2.000, is the largest"),
        (
            [GOOD, UNEVEN], 2, 1,
            "its tau, 1.905, is as good as that of step 1, 2.000 (-0.095, 95% interval "
            "-0.384 to 0.319)",
        ),
        (
            [GOOD, POOR], 1, 1,
            "the tau of step 2, 1.702, is below that of step 1, 2.000 (-0.298, 95% interval "
            "-0.333 to -0.222)",
        ),
        # After an equal step, too, the best is what later ones are compared with.
        (
            [GOOD, UNEVEN, POOR], 2, 1,
            "the tau of step 3, 1.702, is below that of step 1, 2.000 (-0.298, 95% interval "
            "-0.333 to -0.222)",
        ),
        (
            [GOOD[:7], POOR[:7]], 2, 1,
            "7 texts cannot tell its tau, 1.667, from that of step 1, 2.000",
        ),
        # A run that goes on may have other texts, or fewer.
        ([GOOD, OTHER], 2, 2, "its tau, 1.000, is the first"),
        ([GOOD, POOR[:7]], 2, 2, "its tau, 1.667, is the first"),
    ],
)  # fmt: skip
def test_the_latest_step_stays_that_is_not_below_the_best(
    texts: list, step: int, best_step: int, why: str
) -> None:
    kept = choose(*texts)
    assert (kept.step, kept.best_step, kept.why) == (step, best_step, why)
    assert kept.figures == {"eval/tau": float(step)}


def peaks(*texts: list[tuple[int, int]]) -> Callable[[Any], HeldoutFigures]:
    """Evaluations that replay these texts in turn; a further one fails."""
    each = iter(texts)

    def evaluate(_head: Any) -> HeldoutFigures:
        found = next(each)
        return HeldoutFigures({"tau": compute_tau(found), "tau_prompts": len(found)}, found)

    return evaluate


def kept_of(out_dir: Path) -> dict[str, Any]:
    return json.loads((out_dir / "head/headsmith.json").read_text())["kept"]


@pytest.mark.parametrize("decay", [None, 0.5])
def test_the_head_of_a_run_that_peaks_is_that_of_the_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], decay: float | None
) -> None:
    """The weights of step 2, whose tau the steps 4 and 6 do not reach."""
    config = settings(eval_steps=2, average_decay=decay, schedule=Schedule.constant, warmup_steps=1)
    fit(tmp_path / "short", replace(config, max_steps=2))
    outcome = fit(tmp_path / "out", config, evaluate=peaks(GOOD, POOR, POOR))
    assert weights(tmp_path / "out") == weights(tmp_path / "short")
    why = (
        "the tau of step 6, 1.702, is below that of step 2, 2.000 (-0.298, 95% interval "
        "-0.333 to -0.222)"
    )
    assert kept_of(tmp_path / "out") == {"step": 2, "num_steps": 6, "why": why} == outcome.kept
    assert outcome.evaluation["eval/tau"] == 2.0
    command.print_end(outcome, tmp_path, None)
    said = capsys.readouterr().out
    assert "the head of step 2 stays: the tau of step 4, 1.702, is below" in said
    assert said.endswith(f"\nkept: step 2, as {why}\n")


def test_a_run_that_goes_on_leaves_the_same_head(tmp_path: Path) -> None:
    """From the checkpoint of step 4, which its evaluation follows; a run that ended kept step 2."""
    config = settings(eval_steps=2, num_checkpoints=9)
    fit(tmp_path / "out", config, evaluate=peaks(GOOD, POOR, POOR))
    saved = tmp_path / "out/checkpoints/step-000004"
    again = tmp_path / "again"
    fit(again, replace(config, resume=str(saved)), evaluate=peaks(POOR, POOR))
    assert weights(again) == weights(tmp_path / "out")
    assert kept_of(again) == kept_of(tmp_path / "out")
    again = tmp_path / "best"
    fit(again, replace(config, resume=str(saved)), evaluate=peaks(POOR, GOOD))
    assert (kept_of(again)["step"], kept_of(again)["why"]) == (6, "its tau, 2.000, is the largest")
    fit(tmp_path / "out", replace(config, resume=str(saved)), evaluate=peaks(POOR, POOR))
    evaluated = [line["step"] for line in lines(tmp_path / "out") if "eval/loss" in line]
    assert evaluated == [2, 4, 6]


def test_a_head_that_training_makes_worse_stays_as_it_was(tmp_path: Path) -> None:
    objective = ToyObjective()
    before = objective.head.weight.flatten().tolist()
    evaluate = peaks(GOOD, POOR, POOR)
    fit(tmp_path, settings(), objective=objective, has_trained_head=True, evaluate=evaluate)
    assert (kept_of(tmp_path)["step"], weights(tmp_path)["weight"]) == (0, before)


@pytest.mark.parametrize(
    ("keep", "texts", "why"),
    [
        (Keep.last, [GOOD, POOR], "train.keep=last"),
        # No texts, and an evaluation that fails at the end.
        (Keep.best, [[], []], "the last, as its evaluation gave no tau to compare"),
        (Keep.best, [GOOD], "the last, as its evaluation gave no tau to compare"),
    ],
)
def test_the_last_head_stays_if_asked_or_not_compared(
    tmp_path: Path, keep: Keep, texts: list, why: str
) -> None:
    fit(tmp_path / "straight", settings())
    outcome = fit(tmp_path / "out", settings(keep=keep), evaluate=peaks(*texts))
    assert weights(tmp_path / "out") == weights(tmp_path / "straight")
    assert kept_of(tmp_path / "out") == {"step": 6, "num_steps": 6, "why": why} == outcome.kept


def test_who_ends_the_program_in_an_evaluation_ends_it(tmp_path: Path) -> None:
    def interrupt(_head: Any) -> dict[str, float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, settings(), evaluate=interrupt)


def test_a_norm_that_is_not_finite_names_step_and_sequences(tmp_path: Path) -> None:
    class Steep(ToyObjective):
        def forward(self, batch: Batch, scale: Tensor) -> LossSums:
            sums = super().forward(batch, scale)
            return sums._replace(total=sums.total * 1e30)

    config = settings(save_steps=1)
    drawn = schedule.draw_global_batch(0, 4, 7, seed=0)
    with pytest.raises(InputError, match="the gradient's norm is not finite at step 1") as caught:
        fit(tmp_path, config, objective=Steep())
    assert str(drawn) in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()


def test_batch_that_does_not_divide() -> None:
    with pytest.raises(InputError, match="batch_size=4: not divisible by 1 processes x"):
        processes.start_accelerator(settings(micro_batch_size=3))
    with pytest.raises(InputError, match="set a multiple of 6"):
        processes.check_batch(settings(batch_size=8, micro_batch_size=2), 3)
    with pytest.raises(InputError, match="float16: not trained in"):
        processes.start_accelerator(settings(dtype=Dtype.float16))


def test_processes_that_do_not_see_each_other() -> None:
    check_launch({}, 1)
    check_launch({"WORLD_SIZE": "2", "MASTER_PORT": "1", "ACCELERATE_MIXED_PRECISION": "no"}, 2)
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        with pytest.raises(InputError, match=f"{name}=2: .* but only 1 of them sees the others"):
            check_launch({name: "2"}, 1)
    silent = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500", "MASTER_ADDR": "x"}
    with pytest.raises(InputError, match="asked for several processes and started one"):
        check_launch(silent, 1)


def test_out_dir_that_holds_something(tmp_path: Path) -> None:
    refusals.check_run_folder(tmp_path, None)
    refusals.check_run_folder(tmp_path / "new", None)
    (tmp_path / "a").write_text("")
    with pytest.raises(InputError, match=r"is not empty.*train\.resume=auto"):
        refusals.check_run_folder(tmp_path, None)
    refusals.check_run_folder(tmp_path, "auto")
    with pytest.raises(InputError, match="is a file"):
        refusals.check_run_folder(tmp_path / "a", None)
    with pytest.raises(InputError, match="no such folder; type auto"):
        refusals.check_run_folder(tmp_path / "new", "latest")


# --- Trackers: what they get, and that none of them stops a run.


@pytest.mark.parametrize("where", ["start", "log", "close"])
def test_a_tracker_that_fails_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    class Broken:
        def __init__(self, *_args: object) -> None:
            self.fail("start")

        def fail(self, here: str) -> None:
            if here == where:
                raise RuntimeError("no network")

        def log(self, metrics: dict[str, float], step: int) -> None:
            self.fail("log")

        def finish(self) -> None:
            self.fail("close")

    monkeypatch.setattr(tracking, "_start_wandb", Broken)
    assert fit(tmp_path, settings(), log=LogConfig(tracker=Tracker.wandb)).finished
    assert capsys.readouterr().out.count("wandb failed, so the run goes on without it") == 1
    assert len(lines(tmp_path)) == 8


def test_a_run_that_goes_on_is_one_run_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, str]] = []

    def init(**settings: Any) -> Any:
        begun.append((settings["id"], settings["resume"]))
        return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    log = LogConfig(tracker=Tracker.wandb)
    for changes in ({}, {"resume": "auto"}, {}):
        fit(tmp_path, settings(**changes), log=log)
    first, again, anew = begun
    assert first == again != anew
    assert {how for _, how in begun} == {"allow"}


def test_a_tracker_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(tracking, "_start_wandb", lambda *_args: release.wait(30))
    monkeypatch.setattr(tracking, "START_TIMEOUT_S", 0.2)
    said: list[str] = []
    begun = time.monotonic()
    tracking.MetricLogger(tmp_path, LogConfig(tracker=Tracker.wandb), {}, said.append).log(
        1, {"a": 1.0}
    )
    release.set()
    assert time.monotonic() - begun < 5
    assert "no answer within" in said[0]


def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    fit(tmp_path, settings(max_steps=3), log=LogConfig(tracker=Tracker.tensorboard))
    assert list((tmp_path / "tensorboard").glob("events.*"))


# --- Evaluations: which prompts are held out, and the tau of replaying them.


def test_prompts_end_where_the_first_learnt_token_is() -> None:
    chat = Sample([5, 6, 7, 8, 9], [False, False, True, True, False])
    text = Sample(list(range(10, 50)), [True] * 40)
    heldout = PackedDataset([chat, text], 64, seed=0)
    assert sorted(select_heldout_prompts(heldout, 8)) == [[5, 6], list(range(10, 42))]
    assert len(select_heldout_prompts(heldout, 1)) == 1


def test_the_replayed_tau_is_that_of_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    target = random_target()
    head = noisy_head(target)
    prompts = [[5, 17, 40, 8], [61, 23, 77]]
    replayed, texts = make_heldout_replay(LocalAnswerSource(target), prompts, 3, head.taps)(head)
    steps = [
        decode(target, MedusaDrafter(head, Tree.make_chain(3)), prompt, MAX_REPLAY_TOKENS).steps
        for prompt in prompts
    ]
    prompts_steps = [PromptSteps("all", each, dialogue=n) for n, each in enumerate(steps)]
    assert replayed["tau"] == tau(prompts_steps)
    assert texts == [(sum(s.num_emitted for s in each), len(each)) for each in steps]
    assert replayed["tau_prompts"] == 2
    assert (replayed["tau_low"], replayed["tau_high"]) == compute_tau_interval(prompts_steps, 0)
    depths = {"greedy_alpha_d1", "greedy_alpha_d2", "greedy_alpha_d3"}
    assert set(replayed) == {"tau", "tau_prompts", "tau_low", "tau_high", *depths}
    said = capsys.readouterr().err
    assert ("target's own text: 100%" in said, "held-out tau: 100%" in said) == (True, True)


def test_a_line_of_figures_says_what_tau_rests_on() -> None:
    figures = {
        "eval/loss": 2.5,
        "eval/0-1k/top1_d1": 0.5,
        "eval/tau": 1.26,
        "eval/tau_prompts": 1.0,
    }
    assert format_figures(figures) == "loss 2.500, tau 1.260 (1 prompt)"
    more = {"eval/tau_prompts": 16.0, "eval/tau_low": 1.1, "eval/tau_high": 1.4, "eval/tau_b": 3.0}
    assert format_figures(figures | more) == (
        "loss 2.500, tau 1.260 (16 prompts, 95% interval 1.10-1.40), tau_b 3.000"
    )


def test_training_the_head_does_not_change_the_answers() -> None:
    target = random_target()
    head = noisy_head(target)
    replay = make_heldout_replay(LocalAnswerSource(target), [[5, 17, 40]], 3, head.taps)
    replay(head)
    first = replay.answers[0][0]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    assert replay(head).figures["tau"] == 1.0  # drafts nothing but token 0
    assert replay.answers[0][0] is first
