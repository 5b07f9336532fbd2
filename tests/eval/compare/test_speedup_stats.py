"""The content of `speedup.json`, and batch sizes beside each other, by hand."""

import re
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import approx
from rich.console import Console
from toys import endless_target, tokenizer

from conf.command.clock import DecodingTimes
from conf.errors import InputError
from conf.settings.measure import SpeedupRun
from eval.compare.methods import Method
from eval.compare.speedup_stats import (
    find_break_even_size,
    print_concurrency,
    summarise_batch_size,
    summarise_speedup,
)
from eval.compare.timing import PromptRun
from eval.decode.engine import Generation, NoDraft, Step, decode
from eval.measure.measurement import Measurement
from eval.measure.prompts import Prompt
from eval.report.plots import compute_step_ms, plot_concurrency
from heads.decoding.sampling import GREEDY, Sampling
from heads.decoding.tree import Tree
from tests.eval.report.test_plots import drawn, lines, said, ticks  # noqa: F401

TARGET = SimpleNamespace(tokenizer=tokenizer())


def prompt(category: str, dialogue: int = 0, turn: int = 1) -> Prompt:
    return Prompt(category, [5, 6], dialogue, turn)


def asked(category: str, dialogue: int) -> Prompt:
    return replace(prompt(category, dialogue), messages=[{"content": f"question {dialogue}"}])


def text(num_tokens: int, seconds: float, prefill: float = 0.0, **more) -> Generation:
    return Generation(list(range(num_tokens)), times=DecodingTimes(prefill, total=seconds), **more)


def summarised(
    found: list[PromptRun],
    methods: dict[str, Method] | None = None,
    target: Any = TARGET,
    sampling: Sampling = GREEDY,
    **settings: Any,
) -> dict[str, Any]:
    """The result of runs, by methods of which only the names are known."""
    methods = methods or {name: Method(lambda *_: []) for name in found[0].texts}
    bench = Measurement(target, [], [], sampling, {}, True)
    return summarise_speedup(bench, SpeedupRun(**{"num_texts": 0, **settings}), methods, found)


def compared(found: list[PromptRun], **settings: Any) -> dict[str, Any]:
    return summarised(found, **settings)["methods"]["tree"]


def alone(number: int, plain: list[float], drafted: list[float], turn: int = 1) -> PromptRun:
    """A prompt, its seconds per repeat."""
    seconds = {"vanilla": plain, "tree": drafted}
    runs = {name: [text(10, s) for s in each] for name, each in seconds.items()}
    return PromptRun(prompt("a", number, turn), runs)


def test_texts_are_shown_with_the_depth_at_which_each_token_was_accepted() -> None:
    ids = tokenizer()("z\N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE}").input_ids
    # The prompt's own token; 2 accepted and the bonus; none; 2 accepted where the text ends.
    steps = [Step(2, 3, 6), Step(0, 1, 3), Step(2, 2, 2)]
    seconds = DecodingTimes(total=1.0)
    plain = [Step(0, 1, left) for left in range(6, 0, -1)]
    texts = {
        "vanilla": Generation(ids[:1] * 2, [Step(0, 1, 1)], times=seconds),
        "tree": Generation(ids, steps, times=seconds, drafted=[4, 4, 4]),
        "generate": Generation(ids, plain, times=seconds, drafted=[0] * 6),
        # Two draft tokens and one more came with the prompt's own pass.
        "lookup": Generation(ids, steps[1:], times=seconds, drafted=[0, 2]),
    }
    found = [
        PromptRun(asked(*own), {name: [each] for name, each in texts.items()})
        for own in [("a", 0), ("a", 1), ("a", 2), ("b", 3)]
    ]
    target = SimpleNamespace(tokenizer=tokenizer())
    # The bytes of a character are shown where it is whole.
    pieces = ["z", "", "\N{LATIN SMALL LETTER E WITH ACUTE}", "", "", "", "\N{GRINNING FACE}"]
    tree = list(zip(pieces, [0, 1, 2, 0, 0, 1, 2], strict=True))
    lookup = list(zip(pieces, [1, 2, 3, 0, 0, 1, 2], strict=True))
    # Of every category in turn; a loop that drafts nothing writes what vanilla does.
    shown = {"methods": {"vanilla": [("z", 0), ("z", 0)], "tree": tree, "lookup": lookup}}
    result = summarised(found, target=target, sampling=Sampling(1.0), num_texts=3)
    assert result["lossless"] is None  # chance alone makes sampled texts differ
    assert result["texts"] == [
        {"prompt": 0, "category": "a", "turn": 1, "question": "question 0", **shown},
        {"prompt": 1, "category": "b", "turn": 1, "question": "question 3", **shown},
        {"prompt": 2, "category": "a", "turn": 1, "question": "question 1", **shown},
    ]


def test_where_texts_part_and_how_sure_the_target_was() -> None:
    target = endless_target()
    target.tokenizer = tokenizer()
    own = decode(target, NoDraft(), [5, 6], 6).token_ids
    other = [*own[:3], own[3] + 1, *own[4:]]
    texts = {"vanilla": [own, own], "tree": [own, other], "chain": [own, own[:4]]}
    seconds = DecodingTimes(total=1.0)
    found = [
        PromptRun(
            prompt("a", place),
            {name: [Generation(two[place], times=seconds)] for name, two in texts.items()},
        )
        for place in range(2)
    ]
    result = summarised(found, target=target)["lossless"]
    margins = []
    for ids in ([5, 6, *own[:3]], [5, 6, *own[:4]]):
        logits = target.model(torch.tensor([ids])).logits[0, -1].sort().values
        margins.append(approx((logits[-1] - logits[-2]).item(), abs=1e-5))
    assert result == {
        "num_prompts": 2,
        "num_equal": 1,
        "first_divergences": [
            {"prompt": 1, "method": "tree", "position": 3, "top2_margin": margins[0]},
            {"prompt": 1, "method": "chain", "position": 4, "top2_margin": margins[1]},
        ],
    }


def test_the_interval_of_a_speedup_leaves_out_a_fortieth_at_each_end() -> None:
    # Batches without drafting take 1 or 2 seconds, with it 1: like the interval of tau, 1 + k / 8
    # with k binomial.
    found = [alone(number, [1.0 + number % 2] * 3, [1.0] * 3) for number in range(8)]
    row = compared(found, seed=1)
    assert (row["speedup"], row["speedup_ci95"]) == (1.5, (1.125, 1.875))


def test_the_interval_of_a_speedup_knows_of_other_repeats() -> None:
    """Dialogues alike, repeats of 1, 2 and 3 s: the median of three drawn is 1, 2 or 3."""
    row = compared([alone(number, [1.0, 2.0, 3.0], [1.0] * 3) for number in range(4)])
    assert (row["speedup"], row["speedup_ci95"]) == (2.0, (1.0, 3.0))


def test_turns_of_a_dialogue_stand_together() -> None:
    turns = [alone(0, [1.0], [1.0]), alone(0, [2.0], [1.0], turn=2)]
    assert compared(turns)["speedup_ci95"] is None
    two = [*turns, alone(1, [1.0], [1.0]), alone(1, [2.0], [1.0], turn=2)]
    assert compared(two)["speedup_ci95"] == (1.5, 1.5)


def test_speedups_are_over_the_faster_of_what_drafts_nothing() -> None:
    steps = [Step(0, 1, left) for left in range(9, 0, -1)]
    drafted = [Step(2, 3, left) for left in (9, 6, 3)]

    def measured(**seconds: float) -> dict:
        runs = {n: [text(10, s, 0.5, steps=steps)] for n, s in seconds.items()}
        runs["tree"] = [text(10, 1.0, 0.5, steps=drafted)]
        return summarised([PromptRun(prompt("a"), runs)])

    result = measured(vanilla=4.0, generate=2.0)
    assert (result["baseline"], result["baselines"]) == ("generate", ["vanilla", "generate"])
    rows = result["methods"]
    assert [rows[n]["speedup"] for n in ("vanilla", "generate", "tree")] == [0.5, 1.0, 2.0]
    # Of 1.5 s after the prompt 0.5 are left, with 3 tokens a pass.
    assert rows["tree"]["decode_speedup"] == approx(3.0)
    assert rows["tree"]["efficiency"] == approx(1.0)
    assert rows["vanilla"]["efficiency"] == approx(1.5 / 3.5)
    assert measured(vanilla=2.0, generate=4.0)["baseline"] == "vanilla"
    assert measured(vanilla=2.0)["baselines"] == ["vanilla"]


def test_what_a_gpu_stood_still_is_the_hosts() -> None:
    """Half of the draft's span and a quarter of the verify pass's, as the first batch showed."""
    times = DecodingTimes(1.0, draft=2.0, verify=4.0, accept=1.0, total=9.0)
    runs = {"vanilla": [Generation([5], times=times)]}
    busy = {"vanilla": {"draft": 1.0, "verify": 3.0, "accept": 1.5}}
    found = [PromptRun(prompt("a", 0), runs, busy), PromptRun(prompt("a", 1), runs)]
    result = summarised(found)
    parts = {"prefill": 2.0, "draft": 2.0, "verify": 6.0, "accept": 2.0, "host": 6.0}
    assert result["methods"]["vanilla"]["breakdown"] == approx(parts)


def test_a_captured_step_is_a_part_of_its_own() -> None:
    times = DecodingTimes(1.0, step=6.0, total=9.0, capture=0.25, num_captures=0.5)
    runs = {"vanilla": [Generation([5], times=times)] * 4}
    found = [PromptRun(prompt("a", 0), runs, {"vanilla": {"step": 4.5}})]
    methods = {"vanilla": Method(lambda *_: [], settings={"captured": True})}
    row = summarised(found, methods)["methods"]["vanilla"]
    parts = {"prefill": 1.0, "draft": 0, "verify": 0, "accept": 0, "step": 4.5, "host": 3.5}
    assert row["breakdown"] == approx(parts)
    assert row["captured"] is True
    assert row["captures"] == {"num": 2, "seconds": 1.0}
    assert compute_step_ms({**row, "num_steps": 2})["step"] == approx(2250)


def test_every_pass_of_every_prompt_is_in_the_result() -> None:
    steps = [Step(2, 3, 4), Step(0, 1, 1)]
    texts = [text(5, s, 0.5, steps=steps, drafted=[4, 2]) for s in (1.0, 2.0)]
    found = [PromptRun(prompt("a", 7, 2), {"vanilla": texts})]
    methods = {"vanilla": Method(lambda *_: [], settings={"skip": [1]})}
    [row] = summarised(found, methods)["methods"].values()
    assert row["prompts"] == [
        {
            "dialogue": 7, "turn": 2, "category": "a", "prompt_tokens": 2, "spans": {},
            "drafted": [4, 2], "accepted": [2, 0], "emitted": [3, 1], "num_tokens": 5,
            "seconds": {
                "prefill": [0.5, 0.5], "draft": [0, 0], "verify": [0, 0], "accept": [0, 0],
                "step": [0, 0],
                "total": [1.0, 2.0],
            },
        }
    ]  # fmt: skip
    assert (row["num_drafted"], row["num_accepted"], row["skip"]) == (6, 2, [1])


def test_all_intervals_are_those_of_the_seed() -> None:
    found = []
    for number in range(12):
        steps = [Step(number, number + 1, 99)]
        quick = text(10, 1.0 + number**2, 0.5, steps=steps)
        plain = text(10, 5.0, 0.5, steps=steps)
        found.append(PromptRun(prompt("a", number), {"vanilla": [plain], "tree": [quick]}))

    def intervals(seed: int) -> list[list[float]]:
        own = compared(found, seed=seed)
        rows = (own, own["by_category"]["a"])
        return [list(row[name]) for row in rows for name in ("speedup_ci95", "tau_ci95")]

    assert intervals(1) == intervals(1)
    assert intervals(1)[:2] == intervals(1)[2:]
    assert all(one != two for one, two in zip(intervals(1), intervals(2), strict=True))


def test_figures_by_hand() -> None:
    """Two prompts, three repeats: 10 tokens a second without drafting, 20 with it."""
    tree = Tree.from_paths([[0], [1], [0, 0]])
    steps = [Step(2, 3, 9), Step(1, 2, 6), Step(0, 1, 4), Step(2, 3, 3)]
    drafted = {"steps": steps, "paths": [(1, 3), (2,), (), (1, 3)]}
    found = []
    for number, category in enumerate("ab"):
        plain = [
            text(10, s, 0.1, steps=[Step(0, 1, 9 - i) for i in range(9)]) for s in (1, 9, 0.25)
        ]
        quick = [text(10, s, 0.1, **drafted) for s in (0.5, 0.25, 7)]
        others = [text(10, 2.0, 0.2, steps=[Step(2, 3, 9)] * 3)] * 3
        one = [text(10, 1.0, steps=[Step(0, 1, 1)], paths=[(1,)])] * 3
        runs = {"vanilla": plain, "tree": quick, "generate": others, "one": one, "root": plain}
        runs["silent"] = [text(10, 1.0)] * 3
        found.append(PromptRun(prompt(category, number), runs))
    methods = {
        "vanilla": Method(lambda *_: []),
        "tree": Method(lambda *_: [], tree),
        "generate": Method(lambda *_: [], lossy=True),
        "one": Method(lambda *_: [], Tree.make_chain(1)),
        "root": Method(lambda *_: [], Tree.make_chain(0)),
        "silent": Method(lambda *_: []),
    }
    result = summarised(found, methods, batch_size=4, num_repeats=3)
    assert (result["baseline"], result["batch_size"], result["num_repeats"]) == ("vanilla", 4, 3)
    assert result["texts"] == []
    own = result["methods"]["tree"]
    assert result["methods"]["vanilla"]["tokens_per_s"] == approx(10)
    assert own["tokens_per_s"] == approx(20)
    assert own["speedup"] == approx(2)
    assert own["decode_tokens_per_s"] == approx(9 / 0.4)
    assert own["decode_speedup"] == approx(0.9 / 0.4)
    assert own["tau"] == approx(9 / 4)
    assert own["efficiency"] == approx(0.9 / 0.4 / (9 / 4))
    assert (own["num_tokens"], own["num_steps"]) == (20, 8)
    spent = {"prefill": 0.2, "draft": 0, "verify": 0, "accept": 0, "host": 0.8}
    assert own["breakdown"] == approx(spent)
    shape = {"parents": [-1, 0, 0, 1], "ranks": [-1, 0, 1, 0]}
    assert own["tree"] == {**shape, "acceptance": [1.0, 0.5, 0.25, 0.5]}
    chain = {"parents": [-1, 0], "ranks": [-1, 0], "acceptance": [1.0, 1.0]}
    assert result["methods"]["one"]["tree"] == chain
    assert not any("tree" in result["methods"][name] for name in ("vanilla", "generate", "root"))
    assert result["methods"]["silent"]["tau"] == 1.0
    assert own["by_category"]["a"]["num_prompts"] == 1
    assert own["by_category"]["a"]["tau"] == approx(9 / 4)
    assert own["by_category"]["b"]["speedup"] == approx(2)
    assert result["methods"]["generate"]["tau"] == approx(3)
    assert result["methods"]["generate"]["lossy"]
    assert result["lossless"] == {"num_prompts": 2, "num_equal": 2, "first_divergences": []}


def arriving(seconds: float, *arrivals: float) -> Generation:
    steps = [Step(0, 1, 9)] * (len(arrivals) - 1)
    return Generation([1, 2, 3, 4], steps, [], DecodingTimes(total=seconds), [], list(arrivals))


def test_waits_are_of_all_texts_and_the_median_of_repeats() -> None:
    """Three repeats; in each 200 waits of 1 to 200 ms, and first tokens after 1 and 2 s or so."""
    walk = [0.0]
    for number in range(1, 101):
        walk.append(walk[-1] + number / 1000)
    later = [walk[-1]]
    for number in range(101, 201):
        later.append(later[-1] + number / 1000)
    found = []
    for number, path in enumerate([walk, later]):
        runs = [
            arriving(2.0, *(first + factor * (at - path[0]) for at in path))
            for first, factor in ((1.0 + number, 1), (9.0, 9), (0.5 + number, 0.5))
        ]
        silent = [arriving(4.0)] * 3
        found.append(PromptRun(Prompt("a", [5], number, 1), {"vanilla": silent, "tree": runs}))
    result = summarise_batch_size(["vanilla", "tree"], found, 0)
    assert result["baseline"] == "vanilla"
    row = result["methods"]["tree"]
    assert (row["tokens_per_s"], row["speedup"]) == (2.0, 2.0)
    assert row["first_token_ms"] == {"p50": approx(1000.0), "p99": approx(1000.0)}
    assert row["between_tokens_ms"] == {"p50": approx(100.0), "p99": approx(198.0)}
    plain = result["methods"]["vanilla"]
    assert (plain["first_token_ms"], plain["between_tokens_ms"]) == (None, None)


def sizes(**speedups: list[float]) -> dict[str, Any]:
    waits = {"p50": 12.25, "p99": 1234.5}
    return {
        str(size): {
            "methods": {
                name: {
                    "speedup": gains[place], "tokens_per_s": size * gains[place],
                    "speedup_ci95": None if name == "vanilla" else (0.4, 2.6),
                    "first_token_ms": waits, "between_tokens_ms": waits,
                }
                for name, gains in speedups.items()
            }
        }
        for place, size in enumerate((1, 4, 16))
    }  # fmt: skip


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [([2, 1.5, 1.1], None), ([2, 1.5, 1.0], 16), ([2, 0.9, 0.8], 4), ([0.9] * 3, 1),
     ([0.9, 0.8, 1.1], None), ([2, 0.9, 1.1], None)],
)  # fmt: skip
def test_where_drafting_stops_paying(speedups: list[float], expected: int | None) -> None:
    assert find_break_even_size(sizes(tree=speedups), "tree") == expected


def test_the_table_says_what_pays_and_what_does_not() -> None:
    out = StringIO()
    found = sizes(vanilla=[1, 1, 1], tree=[2, 1.5, 0.5], copy=[2, 2, 2])
    result = {"concurrency": found, "methods": found["1"]["methods"], "baselines": ["vanilla"]}
    print_concurrency(result, Console(file=out, width=80))
    shown = out.getvalue()
    title, _, names, *_ = shown.splitlines()
    assert title.strip() == "Texts at a time; ms to the first token and between tokens, p50 and p99"
    assert re.split(r"\s*┃\s*", names)[1:-1] == [
        "texts", "method", "tokens/s", "speed-up, 95%", "first", "between",
    ]  # fmt: skip
    assert "│    16 │ tree    │      8.0 │ 0.50 0.40-2.60 │ 12.2 1234 │ 12.2 1234 │\n" in shown
    assert "│    16 │ vanilla │     16.0 │           1.00 │ 12.2 1234 │ 12.2 1234 │\n" in shown
    assert shown.endswith("tree: no longer pays from 16 on\ncopy: pays at all of them\n")


def test_a_picture_of_sizes(drawn) -> None:  # noqa: F811
    speed, gain, waits = drawn(
        plot_concurrency, {"concurrency": sizes(vanilla=[1, 1, 1], tree=[2, 1.5, 0.5])}
    )
    assert lines(speed) == [[(1, 1), (4, 4), (16, 16)], [(1, 2), (4, 6), (16, 8)]]
    assert lines(gain)[1] == [(1, 2), (4, 1.5), (16, 0.5)]
    assert lines(waits)[0] == [(1, 12.25), (4, 12.25), (16, 12.25)]
    assert said(speed, gain, waits) == [
        "texts at a time", "tokens per second, prompts included",
        "texts at a time", "speed-up over the baseline",
        "texts at a time", "ms between tokens, p50",
    ]  # fmt: skip
    for panel in (speed, gain, waits):
        assert (panel.get_xscale(), ticks(panel)) == ("log", ["1", "4", "16"])
        assert panel.get_ylim()[0] == 0
    assert lines(gain)[-1] == [(0, 1), (1, 1)]


def test_every_size_is_measured_once() -> None:
    assert SpeedupRun(batch_size=4, concurrency=[16, 1, 4]).batch_sizes == [1, 4, 16]
    assert SpeedupRun().batch_sizes == [1]
    with pytest.raises(InputError, match=r"concurrency=\[4, 0\]"):
        SpeedupRun(concurrency=[4, 0])
