import json
import re

import pytest
import torch
from rich.console import Console
from toys import Clock, eagle_head, noisy_head, random_target, texts

from conf.command import clock as eval_clock
from conf.errors import InputError
from conf.settings.eagle import EagleForm
from conf.settings.measure import TreeSearchRun
from eval.decode.engine import NoDraft, decode
from eval.measure.acceptance_stats import PromptSteps, tau
from eval.measure.measured_head import MeasuredHead
from eval.measure.measurement import Measurement
from eval.measure.prompts import Prompt
from eval.tune import batch_size_advice as advice
from eval.tune import step_costs as cost
from eval.tune.batch_size_advice import (
    Advice,
    BatchSizeAdvice,
    compute_chain_taus,
    estimate_speedups,
    measure_advice,
    measure_full_batch,
)
from eval.tune.step_costs import NUM_PLAIN, CostCurve, load_cost_curve, measure_step_costs
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import DynamicShape, Tree
from heads.eagle.network import EagleDrafter
from heads.medusa import MedusaDrafter

PROMPT = [5, 6, 7, 8]


def test_a_curve_is_straight_between_its_sizes_and_beyond_them() -> None:
    curve = CostCurve("gpu", [1, 2, 4, 8], [0.010, 0.011, 0.012, 0.020])
    sizes = (1, 2, 3, 4, 5, 8, 9, 16)
    expected = [0.010, 0.011, 0.0115, 0.012, 0.014, 0.020, 0.022, 0.036]
    assert [curve.estimate_seconds(size) for size in sizes] == pytest.approx(expected)
    # It never falls beyond them.
    assert CostCurve("gpu", [1, 8], [0.02, 0.01]).estimate_seconds(100) == 0.01
    assert [CostCurve("gpu", [4], [0.02]).estimate_seconds(size) for size in (1, 9)] == [0.02] * 2


@pytest.mark.parametrize("name", ["rtx3090_llama7b_q4", "sequoia_demo"])
def test_recorded_curves_say_where_they_come_from(name: str) -> None:
    curve = load_cost_curve(f"conf/curves/{name}.json")
    assert curve.source.startswith("https://github.com/")
    assert curve.sizes[0] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2", "not a cost curve .JSONDecodeError"),
        ("[1, 2]", "not a cost curve .TypeError"),
        ({"device": "gpu", "sizes": [1]}, "not a cost curve .TypeError.*'seconds'"),
        ({"device": "gpu", "sizes": [1], "seconds": [1], "speed": 3}, "'speed'.*allowed: JSON"),
        ({"device": "gpu", "sizes": ["1"], "seconds": [1]}, r"sizes \['1'\] must be rising"),
        ({"device": "gpu", "sizes": [], "seconds": []}, r"sizes \[\] must be rising"),
        ({"device": "gpu", "sizes": [1, 1], "seconds": [1, 1]}, r"sizes \[1, 1\] must be rising"),
        ({"device": "gpu", "sizes": [1, 2], "seconds": [1]}, r"seconds \[1\] each"),
        ({"device": "gpu", "sizes": [0, 1], "seconds": [1, 1]}, "sizes must be at least 1"),
        ({"device": "gpu", "sizes": [1], "seconds": [0]}, "seconds above 0"),
        (
            {"device": "gpu", "sizes": [1], "seconds": [1], "draft_seconds": -1},
            "draft_seconds at least 0",
        ),
    ],
)
def test_a_bad_curve_is_named(tmp_path, content, message: str) -> None:
    path = tmp_path / "curve.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match=rf"curve=.*curve\.json: .*{message}"):
        load_cost_curve(str(path))


@pytest.fixture(scope="module")
def target():
    return random_target(num_hidden_layers=4)


def test_drafts_that_read_layers_are_timed_in_batches(target, monkeypatch) -> None:
    monkeypatch.setattr(cost, "NUM_ROUNDS", 1)
    eagle = eagle_head(target, EagleForm.eagle3, num_updates=1)
    chain = EagleDrafter(eagle, 1, seeds=range(3))
    drafters = {1: chain, "tree": EagleDrafter(eagle, DynamicShape(2, 3, 4))}
    curve, drafts = measure_step_costs(target, drafters, PROMPT, 3, (2, 3))
    assert (curve.device, curve.batch_size, curve.context) == ("cpu", 3, 4)
    assert drafts.keys() == drafters.keys()


def test_a_pass_of_every_size_and_a_draft_cost_what_they_took(monkeypatch) -> None:
    """A pass takes a second per token; behind the drafter "b", which takes 4 and not 2, one more.

    All but the last of three rounds takes 100 more. Nothing has more chances to be quick: of
    passes over one token in a row the last counts, and the drafts before passes of 7 tokens,
    which take 3 more, count as much as the others.
    """
    target, clock, passes, behind = random_target(), Clock(), [0], [""]
    rounds = 2 + 2 * 2 * (NUM_PLAIN + 3)  # passes: two that read, then two rounds of two drafters
    sizes: list[int] = []

    def pass_seconds(_cache, tokens: torch.Tensor, *_: object, **__: object) -> float:
        passes[0] += 1
        num_tokens = tokens.shape[1]
        sizes.append(num_tokens)
        extra = behind[0] == "b" and num_tokens > 1
        lucky = 0.5 * (num_tokens == 1 and sizes[-NUM_PLAIN:] != [1] * NUM_PLAIN)
        return num_tokens + extra - lucky + (100 if passes[0] <= rounds else 0)

    def draft_seconds(name: str, seconds: float):
        def found(_roots: list[int]) -> float:
            behind[0] = name
            late = 3 * (sizes[-1:] == [3])
            return seconds + late + (100 if passes[0] < rounds else 0)

        return found

    drafters = {"a": NoDraft(), "b": NoDraft()}
    for (name, drafter), seconds in zip(drafters.items(), (2.0, 4.0), strict=True):
        drafter.propose = clock.taking(draft_seconds(name, seconds), drafter.propose)
    monkeypatch.setattr(target, "run_pending", clock.taking(pass_seconds, target.run_pending))
    monkeypatch.setattr(eval_clock, "time", clock)
    monkeypatch.setattr(cost, "NUM_ROUNDS", 3)
    curve, drafts = measure_step_costs(target, drafters, PROMPT, 1, (2, 3, 7))
    assert curve.sizes == [1, 2, 3, 7]
    assert curve.seconds == [1.0, 2.5, 3.5, 7.5]
    assert drafts == {"a": 3.0, "b": 5.0}


def test_the_speedup_of_chains_by_hand() -> None:
    curve = CostCurve("gpu", [1, 2, 3, 4], [1.0, 1.0, 2.0, 3.0])
    # A draft costs 0.5 for one token and 0.25 for each further one.
    found = estimate_speedups([1.5, 2.0, 2.25], curve, {1: 0.5, 3: 1.0})
    assert found == pytest.approx([1.5 / 1.5, 2.0 / 2.75, 2.25 / 4.0])
    assert estimate_speedups([1.8], curve, {1: 0.5}) == pytest.approx([1.8 / 1.5])


@pytest.mark.parametrize(
    ("best", "stops"),
    [
        ({1: 1.5, 2: 1.2, 4: 0.9, 8: 0.8}, 4),
        ({1: 1.5, 2: 0.9, 4: 1.1, 8: 0.8}, 8),  # what is paid for once more is no stop
        ({1: 0.9, 2: 0.8}, 1),
        ({1: 1.5, 2: 1.2}, None),
    ],
)
def test_where_drafting_stops_paying(best: dict[int, float], stops: int | None) -> None:
    found = Advice([BatchSizeAdvice(size, [0.5, speedup]) for size, speedup in best.items()])
    assert found.stops_paying == stops
    assert found.describe_advice()["stops_paying_at_batch_size"] == stops
    lengths = [point["best_length"] for point in found.describe_advice()["points"]]
    assert lengths == [2 if speedup > 1 else 0 for speedup in best.values()]


def test_advice_has_a_row_for_each_batch_size(capsys) -> None:
    points = [BatchSizeAdvice(1, [1.25, 1.5], {1: 1.375, 2: 1.75}), BatchSizeAdvice(4, [0.75, 0.5])]
    Advice(points).print_advice(Console(width=80))
    title, *lines, end = capsys.readouterr().out.splitlines()
    assert title.strip() == "Chains by batch size: speed-up while the whole batch goes on"
    assert [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in lines if line[0] in "│┃"] == [
        ["batch", "best length", "predicted", "measured"],
        ["1", "2", "1: 1.25, 2: 1.50", "1: 1.38, 2: 1.75"],
        ["4", "0", "1: 0.75", "-"],
    ]
    assert end == "drafting stops paying at batch size 4"
    Advice(points[:1]).print_advice(Console(width=80))
    assert capsys.readouterr().out.endswith("\ndrafting pays at every batch size tried\n")


def test_what_is_advised_is_measured_at_both_ends_and_in_the_middle(target, monkeypatch) -> None:
    """Seconds of 10 tokens: plain, drafted; in turns, the first pair of each size a warm-up."""
    seconds = {1: [9, 1, 4, 2, 6, 2, 5, 5], 2: [7, 1, 3, 2, 3, 2, 3, 2], 4: []}
    lengths = []

    def batch(_target, drafter, prompts: list[list[int]], max_new_tokens: int):
        lengths.append((len(prompts), 0 if isinstance(drafter, NoDraft) else drafter.shape.depth))
        assert max_new_tokens == 9
        return 10, seconds[len(prompts)].pop(0)

    monkeypatch.setattr(advice, "measure_full_batch", batch)
    bench_head = MeasuredHead("", noisy_head(target), Tree.make_chain(3), Tree.make_chain(3))
    prompts = [Prompt("all", [number]) for number in range(2)]
    bench = Measurement(target, [bench_head], prompts, GREEDY, {}, True)
    points = [
        BatchSizeAdvice(1, [1.1, 1.3, 1.2]),
        BatchSizeAdvice(1, [2.0]),
        BatchSizeAdvice(2, [1.5, 1.2]),
        BatchSizeAdvice(4, [2.0]),
    ]
    config = TreeSearchRun(max_new_tokens=9, num_repeats=3)
    seconds[1] = [s for s in seconds[1] for _ in prompts]  # two batches of one text
    found = measure_advice(Advice(points), bench, config).points
    # Of 4/2, 6/2 and 5/5; of batch size 4 there are too few prompts.
    assert [point.measured for point in found] == [{2: 2.0}, {}, {1: 1.5}, {}]
    assert lengths[:4] == [(1, 0), (1, 0), (1, 2), (1, 2)]
    assert lengths[16:18] == [(2, 0), (2, 1)]


def test_what_ends_with_its_prompt_is_not_measured(target, monkeypatch) -> None:
    monkeypatch.setattr(advice, "measure_full_batch", lambda *_: (0, 0.0))
    bench_head = MeasuredHead("", noisy_head(target), Tree.make_chain(3), Tree.make_chain(3))
    bench = Measurement(target, [bench_head], [Prompt("all", [5])], GREEDY, {}, True)
    found = measure_advice(Advice([BatchSizeAdvice(1, [2.0])]), bench, TreeSearchRun())
    assert found.points == [BatchSizeAdvice(1, [2.0], {})]


@pytest.mark.parametrize("family", ["medusa", "eagle"])
def test_one_replay_gives_tau_of_chains_of_every_length(target, family: str) -> None:
    medusa = family == "medusa"
    learnt = {"num_updates": 15, "num_texts": 2}
    head = noisy_head(target) if medusa else eagle_head(target, EagleForm.eagle3, **learnt)
    bench_head = MeasuredHead("", head, Tree.make_chain(3), Tree.make_chain(3))
    prompts = [Prompt("all", text[:4]) for text in texts(target, 2, 1)]
    found = compute_chain_taus(target, bench_head, prompts, 20)
    assert len(found) == bench_head.draft_head.max_chain_depth
    for length in (1, 3):
        answers = [
            decode(
                target, head.make_drafter(Tree.make_chain(length), GREEDY, [0]), each.token_ids, 20
            )
            for each in prompts
        ]
        assert found[length - 1] == tau([PromptSteps("", text.steps) for text in answers])
    assert found[2] > found[0] > 1


def test_a_batch_is_timed_until_its_first_text_ends(target, monkeypatch) -> None:
    prompts, clock = [PROMPT, [9, 10, 11]], Clock()
    with monkeypatch.context() as patch:  # passes of a second
        patch.setattr(eval_clock, "time", clock)
        patch.setattr(target, "run_pending", clock.taking(lambda *_, **__: 1.0, target.run_pending))
        # The prompts give the first token of each.
        assert measure_full_batch(target, NoDraft(), prompts, 7) == (2 * 6, 6.0)
    drafter = MedusaDrafter(noisy_head(target), Tree.make_chain(3))
    assert 0 < measure_full_batch(target, drafter, prompts, 7)[0] <= 2 * 6
    text = decode(target, NoDraft(), PROMPT, 5).token_ids
    other = decode(target, NoDraft(), prompts[1], 5).token_ids
    stop = next(n for n, token in enumerate(text) if token not in other)
    target.model.generation_config.eos_token_id, before = (
        text[stop], target.model.generation_config.eos_token_id,
    )  # fmt: skip
    try:
        assert measure_full_batch(target, NoDraft(), prompts, 7)[0] == 2 * stop
        assert measure_full_batch(target, NoDraft(), [PROMPT], 1) == (0, 0.0)
    finally:
        target.model.generation_config.eos_token_id = before
