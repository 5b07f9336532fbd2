"""Chances that hold, the threshold that pays, and the command that finds both."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import eagle_head

from conf.command.run_record import PROMPTS_PLACEHOLDER
from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.measure import CalibrateRun, SpeedupRun
from conf.settings.target import TargetConfig
from eval import calibrate, speedup
from eval.decode.engine import Step
from eval.preflight_checks import list_methods
from eval.tune import step_costs as cost
from eval.tune.confidence import (
    ChainCosts,
    ChainForecast,
    ChainSteps,
    FixedLength,
    build_reliability_bins,
    by_depth,
    compute_ece,
    fit_calibration,
    sigmoid,
)
from eval.tune.step_costs import CostCurve
from heads.decoding.head_drafter import Calibration
from heads.kinds import HEADS
from heads.target_model.load import load_target
from tests.conf.command.test_following import pasted
from tests.eval.test_commands import made, settings
from tests.eval.test_resume import KilledError, killed_after


def test_errors_by_hand() -> None:
    # Two bins: of three chances of .2 on average one was kept, of one of .95 none.
    chances = np.array([0.15, 0.95, 0.19, 0.11])
    kept = np.array([True, False, False, False])
    assert build_reliability_bins(chances, kept) == [
        (pytest.approx(0.15), pytest.approx(1 / 3), 3),
        (0.95, 0.0, 1),
    ]
    assert compute_ece(chances, kept) == pytest.approx(0.75 * (1 / 3 - 0.15) + 0.25 * 0.95)
    assert compute_ece(np.array([1.0, 0.999]), np.array([True, True])) == pytest.approx(0.0005)
    assert compute_ece(np.array([]), np.array([], bool)) == 0


def test_what_a_step_could_test_by_hand() -> None:
    # Left: 9, 2 (the last), 5 of a head that knew two positions more.
    steps = [Step(1, 2, 9), Step(2, 2, 2), Step(2, 3, 5)]
    told = ChainSteps.from_logits([[0.0, 1.0, 2.0], [0.0] * 3, [3.0, 0.0]], steps, [3, 3, 2], 3)
    assert told.tested.tolist() == [3, 2, 2]
    assert [each.tolist() for each in told.mask_accepted(1)] == [
        [True, True, True],
        [True, True, True],
    ]
    assert [each.tolist() for each in told.mask_accepted(2)] == [
        [True, True, True],
        [False, True, True],
    ]
    assert [each.tolist() for each in told.mask_accepted(3)] == [[True, False, False], [False]]
    doubled = Calibration((1.0, 1.0, 2.0), (0.0, 0.0, 0.0))
    chances = told.compute_path_probabilities(doubled)
    assert chances[0].tolist() == pytest.approx([0.5, 0.365529, 0.267223], rel=1e-5)
    assert chances[2, 2] == 0  # no chain is that long
    first, *_, last = by_depth(told, doubled)
    assert (len(first[0]), len(last[0])) == (3, 1)


def synthetic(temperatures: list[float], offsets: list[float], number: int = 40_000) -> ChainSteps:
    """Steps in which a head of such scales says how sure it is."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, 2.0, (number, len(temperatures)))
    passes = rng.random(logits.shape) < sigmoid(logits / temperatures + offsets)
    accepted = passes.cumprod(1).sum(1)
    return ChainSteps(logits, accepted, np.full(number, len(temperatures)), accepted + 1)


def test_temperatures_are_found_depth_by_depth() -> None:
    told = synthetic([2.0, 0.5, 1.0], [0.0, 0.0, 0.0])
    found = fit_calibration(told, [0.0])
    assert found.temperatures == pytest.approx((2.0, 0.5, 1.0), rel=0.15)
    assert found.offsets == (0.0, 0.0, 0.0)
    assert max(compute_ece(*each) for each in by_depth(told, found)) < 0.01
    assert compute_ece(*by_depth(told, Calibration.make_neutral(3))[0]) > 0.05


def test_an_offset_is_found_where_no_temperature_helps() -> None:
    told = synthetic([1.0, 1.5], [1.0, 0.6])
    alone, both = fit_calibration(told, [0.0]), fit_calibration(told)
    assert compute_ece(*by_depth(told, alone)[0]) > 0.1
    assert max(compute_ece(*each) for each in by_depth(told, both)) < 0.01
    logits = np.linspace(-3, 3, 7)
    for t, o, true in zip(both.temperatures, both.offsets, ((1.0, 1.0), (1.5, 0.6)), strict=True):
        np.testing.assert_allclose(
            sigmoid(logits / t + o), sigmoid(logits / true[0] + true[1]), atol=0.06
        )


def test_a_depth_that_nothing_tested_stays_as_it_is() -> None:
    told = synthetic([2.0, 1.0], [0.0, 0.0], 500)
    short = replace(told, tested=np.full(500, 1), accepted=np.minimum(told.accepted, 1))
    found = fit_calibration(short)
    assert (found.temperatures[1], found.offsets[1]) == (1.0, 0.0)


HALF = Calibration.make_neutral(2)
CURVE = CostCurve("cpu", [1, 3], [1.0, 2.0])


def test_what_a_threshold_is_expected_to_do_by_hand() -> None:
    """Chances .9 .81, .9 .45, .5 .25; kept 2, 1 and 2, of which the last is the text's end."""
    logits = np.log(np.array([[9.0, 9.0], [9.0, 1.0], [1.0, 1.0]]))
    told = ChainSteps(logits, np.array([2, 1, 2]), np.full(3, 2), np.array([3, 2, 2]))
    costs = ChainCosts(CURVE, [0.125, 0.25], [0.1, 0.2, 0.3])
    whole = ChainForecast.from_whole_chains(told, 2, costs)
    assert (whole.num_drafted, whole.share_accepted, whole.tau) == (2, 5 / 6, 7 / 3)
    assert whole.tokens_per_s == pytest.approx(7 / (3 * 2.25))
    # 2, 1 and 0 draft tokens: 3 + 2 + 1 tokens, passes of 2, 1.5 and 1.
    shorter = ChainForecast.from_whole_chains(told, 1, costs)
    assert (shorter.most_tokens, shorter.share_accepted, shorter.tau) == (1, 1, 2)
    assert shorter.tokens_per_s == pytest.approx(6 / (3 * 1.625))
    cut = ChainForecast.from_cut_chains(told, HALF, 0.6, costs)
    assert (cut.num_drafted, cut.share_accepted, cut.tau) == (1, 1, 2)
    assert cut.tokens_per_s == pytest.approx(6 / (0.3 + 2 + 0.2 + 1.5 + 0.1 + 1))
    # Of the last step, which had two tokens left, a chain of one gives both.
    assert ChainForecast.from_cut_chains(told, HALF, 0.5, costs).tau == 7 / 3
    assert ChainForecast.from_cut_chains(told, HALF, 0.0, costs).num_drafted == 2


@pytest.mark.parametrize(("dear", "threshold"), [(0.0, 0.0), (5.0, 0.9)])
def test_the_threshold_depends_on_what_rows_cost(dear: float, threshold: float) -> None:
    told = synthetic([1.0, 1.0], [0.0, 0.0], 2000)
    costs = ChainCosts(CostCurve("cpu", [1, 3], [1.0, 1.0 + 2 * dear]), [0.0] * 2, [0.0] * 3)
    found = calibrate.build_report(told, told, costs)
    assert (found["threshold"] >= threshold) if dear else (found["threshold"] == 0)
    assert found["checked"]["shorter"]["most_tokens"] == (1 if dear else 2)
    assert found["checked"]["cut"]["threshold"] == found["threshold"]


def test_chains_that_are_timed_end_where_they_should() -> None:
    calibration, logits = FixedLength.from_num_tokens(2), torch.tensor([-30.0, 30.0])
    told = [calibration.compute_chance(logits, depth).tolist() for depth in (1, 2, 3)]
    assert told == [[1, 1], [1, 1], [0, 0]]


@pytest.fixture(autouse=True)
def quick_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "NUM_ROUNDS", 1)
    monkeypatch.setattr(cost, "NUM_PLAIN", 1)


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> dict:
    return made(tmp_path_factory.mktemp("calibrate"), "llama")


def calibrated(setting: dict, head: Path, out_dir: Path, **changes: Any) -> dict:
    own = {**settings(setting, out_dir), "head": HeadRef(path=str(head)), "max_new_tokens": 8}
    calibrate.main(CalibrateRun(**{**own, "num_repeats": 1, **changes}))
    assert (out_dir / "calibrate.png").is_file()
    return json.loads((out_dir / "calibrate.json").read_text())


def measured(setting: dict, head: Path, out_dir: Path, **changes: Any) -> dict:
    own = {**settings(setting, out_dir), "head": HeadRef(path=str(head)), "max_new_tokens": 14}
    speedup.main(SpeedupRun(**{**own, "num_repeats": 1, "num_warmups": 0, **changes}))
    return json.loads((out_dir / "speedup.json").read_text())


def test_the_command_calibrates_what_decoding_then_uses(setting, tmp_path, capsys) -> None:
    head = Path(shutil.copytree(setting["head"], tmp_path / "head"))
    result = calibrated(setting, head, tmp_path / "c")
    assert len(result["temperatures"]) == len(result["offsets"]) == 3
    assert {name: len(row) for name, row in result["ece"].items()} == {
        "before": 3, "temperatures_alone": 3, "after": 3,
    }  # fmt: skip
    methods = result["measured"]["methods"]
    assert set(methods) == {"vanilla", "whole", "shorter", "cut"}
    assert methods["whole"]["tau"] == pytest.approx(result["checked"]["whole"]["tau"])
    assert result["measured"]["lossless"]["num_equal"] == 3
    assert [row["dialogue"] for row in methods["cut"]["prompts"]] == [1, 3, 5]
    for when in ("before", "after"):
        number = sum(number for *_, number in result["reliability"][when][0])
        assert number == result["num_steps"]["checked"] == methods["whole"]["num_steps"]
    assert len(result["costs"]["cut"]) == 4
    said = capsys.readouterr()
    assert "checked: cut" in said.out
    told = f"tokens; writing results to {tmp_path}/c/calibrate.json"
    assert told in said.err
    script, following = pasted(said.out)
    assert (script, following.head.path) == ("eval/speedup.py", str(head))
    assert following.data.path == PROMPTS_PLACEHOLDER  # others

    path = head / "draft_confidence.json"
    stored = json.loads(path.read_text())
    assert Calibration.from_json(stored) == Calibration.from_json(result)
    assert (stored["device"], stored["temperature"]) == ("cpu", 0.0)
    # Half of these heads' chains end before their second token.
    half = {**stored, "temperatures": [1.0] * 3, "offsets": [0.0] * 3, "threshold": 5e-5}
    path.write_text(json.dumps(half))
    result = measured(setting, head, tmp_path / "s", methods=["medusa_chain", "medusa_cut"])
    said = " ".join(capsys.readouterr().err.split())
    assert "its cut chain was calibrated on data.path itself" in said
    assert result["lossless"]["num_equal"] == 12
    whole, cut = (result["methods"][f"medusa_{kind}"] for kind in ("chain", "cut"))
    assert (
        0 < cut["num_drafted"] / cut["num_steps"] < 0.9 * whole["num_drafted"] / whole["num_steps"]
    )
    assert cut["tau"] <= whole["tau"]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_eagle_head_is_calibrated_for_the_way_it_decodes(setting, tmp_path, temperature) -> None:
    target = load_target(TargetConfig(path=setting["target"]), torch.device("cpu"))
    eagle_head(target, EagleForm.eagle3, 150, num_updates=40, layers=[0, 1, 2]).save(
        tmp_path / "head"
    )
    result = calibrated(
        setting, tmp_path / "head", tmp_path / "c", depth=4, temperature=temperature
    )
    assert len(result["temperatures"]) == 4
    assert (result["measured"]["lossless"] is None) == (temperature > 0)
    own = {"temperature": temperature, "depth": 4}
    found = measured(setting, tmp_path / "head", tmp_path / "s", methods="eagle_cut", **own)
    assert "eagle_cut" in found["methods"]
    with pytest.raises(InputError, match=r"needs eagle_cut .*eval/calibrate\.py.* at this depth"):
        measured(setting, tmp_path / "head", tmp_path / "t", methods="eagle_cut", depth=5)


def test_every_kind_has_a_cut_chain_which_needs_calibrating(setting, tmp_path) -> None:
    assert {f"{name}_cut" for name in HEADS} <= list_methods().keys()
    head = Path(shutil.copytree(setting["head"], tmp_path / "head"))
    with pytest.raises(
        InputError, match=r"needs medusa_cut \(a Medusa head calibrated by eval/calibrate\.py"
    ):
        measured(setting, head, tmp_path / "o", methods="medusa_cut")
    good = {"temperatures": [1.0] * 3, "offsets": [0.0] * 3, "threshold": 0.2, "device": "cpu"}
    path = head / "draft_confidence.json"
    shorter = {"temperatures": [1.0] * 2, "offsets": [0.0] * 2}
    for other in ({"device": "another"}, shorter):
        path.write_text(json.dumps(good | other))
        with pytest.raises(InputError, match="needs medusa_cut"):
            measured(setting, head, tmp_path / "o", methods="medusa_cut")
    for bad in (
        {"temperatures": [1.0, 0.0, 1.0]}, {"offsets": [0.0]}, {"threshold": 1.0},
        {"threshold": None}, {"temperatures": "hot"}, {"temperatures": [], "offsets": []},
    ):  # fmt: skip
        path.write_text(json.dumps(good | bad))
        (name,) = list(bad)[:1]
        message = rf"head\.path=.*draft_confidence\.json: .*{name}=.*must be numbers above 0"
        with pytest.raises(InputError, match=message):
            measured(setting, head, tmp_path / "o", methods="medusa_cut")
    path.write_text("{")
    with pytest.raises(InputError, match=r"draft_confidence\.json: not JSON"):
        measured(setting, head, tmp_path / "o", methods="medusa_cut")
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_it_goes_on_where_it_was_killed(setting, tmp_path, monkeypatch) -> None:
    head = Path(shutil.copytree(setting["head"], tmp_path / "head"))
    whole = calibrated(setting, head, tmp_path / "whole")
    with monkeypatch.context() as patch:
        killed_after(8, patch)  # all six texts, what passes cost, and one that is timed
        with pytest.raises(KilledError):
            calibrated(setting, head, tmp_path / "killed")
    monkeypatch.setattr(calibrate, "measure_step_costs", None)
    monkeypatch.setattr(calibrate, "decode", None)
    again = calibrated(setting, head, tmp_path / "killed")
    for name in ("temperatures", "offsets", "ece", "reliability"):
        assert again[name] == whole[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_repeats": 0}, r"num_repeats=0"),
        ({"depth": 4}, r"depth=4: this head drafts at most 3"),
        ({"max_new_tokens": 1}, r"data\.path: every answer ends with its first token"),
    ],
)
def test_bad_settings_are_named(setting, tmp_path, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        calibrated(setting, Path(setting["head"]), tmp_path / "o", **changes)
    assert not (tmp_path / "o/calibrate.json").exists()


def test_one_prompt_is_too_few(setting, tmp_path) -> None:
    own = settings(setting, tmp_path / "o")
    own["data"].num_prompts = 1
    with pytest.raises(InputError, match=r"data\.num_prompts=1: calibrating and checking"):
        calibrate.main(CalibrateRun(**own))
    assert not (tmp_path / "o").exists()
