from dataclasses import replace
from types import SimpleNamespace

import torch
from pytest import approx
from toys import random_target, tokenizer

from conf.schema_measure import SpeedupRun
from eval.clock import Times
from eval.compare.methods import Method
from eval.compare.timing import BatchRun, summarise, time_methods
from eval.decode.engine import Generation, NoDraft, Step, decode
from eval.measure.bench import Bench, batches, seed_of
from eval.measure.prompts import Prompt
from heads.sampling import GREEDY, Sampling, drafter_seeds
from heads.tree import Tree


def prompt(category: str, dialogue: int = 0, turn: int = 1) -> Prompt:
    return Prompt(category, [5, 6], dialogue, turn)


def asked(category: str, dialogue: int) -> Prompt:
    return replace(prompt(category, dialogue), messages=[{"content": f"question {dialogue}"}])


def text(num_tokens: int, seconds: float, prefill: float = 0.0, **more) -> Generation:
    return Generation(list(range(num_tokens)), times=Times(prefill, total=seconds), **more)


def test_batches_hold_one_turn_and_category() -> None:
    prompts = [prompt("a"), prompt("b"), prompt("a"), prompt("a"), prompt("a", turn=2)]
    assert list(batches(prompts, 2)) == [[0, 2], [3], [1], [4]]


def test_no_two_texts_share_a_seed() -> None:
    prompts = [prompt("a", d, t) for d in range(50) for t in (1, 2)]
    seeds = [seed_of(p, seed) for p in prompts for seed in (0, 1)]
    assert len({*seeds, *drafter_seeds(seeds)}) == 400


def test_texts_are_shown_with_the_depth_at_which_each_token_was_accepted() -> None:
    ids = tokenizer()("z\N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE}").input_ids
    # The prompt's own token; 2 accepted and the bonus; none; 2 accepted where the text ends.
    steps = [Step(2, 3, 6), Step(0, 1, 3), Step(2, 2, 2)]
    seconds = Times(total=1.0)
    texts = {
        "vanilla": Generation(ids[:1] * 2, [Step(0, 1, 1)], times=seconds),
        "tree": Generation(ids, steps, times=seconds),
        "generate": Generation(ids, times=seconds, num_passes=7),
    }
    found = [
        BatchRun([asked(*own) for own in batch], {n: [[g] * len(batch)] for n, g in texts.items()})
        for batch in ([("a", 0), ("a", 1)], [("a", 2)], [("b", 3)])
    ]
    target = SimpleNamespace(tokenizer=tokenizer())
    methods = {name: Method(lambda *_: []) for name in texts}
    bench = Bench(target, [], [], Sampling(1.0), {}, True)  # the text of each is its own
    # The bytes of a character are shown where it is whole.
    plain = ["z", "", "\N{LATIN SMALL LETTER E WITH ACUTE}", "", "", "", "\N{GRINNING FACE}"]
    tree = list(zip(plain, [0, 1, 2, 0, 0, 1, 2], strict=True))
    # Of every category in turn; somebody else's loop shows no steps.
    shown = {"methods": {"vanilla": [("z", 0), ("z", 0)], "tree": tree}}
    result = summarise(bench, SpeedupRun(num_texts=3), methods, found)
    assert result["lossless"] is None  # chance alone makes sampled texts differ
    assert result["texts"] == [
        {"prompt": 0, "category": "a", "turn": 1, "question": "question 0", **shown},
        {"prompt": 1, "category": "b", "turn": 1, "question": "question 3", **shown},
        {"prompt": 2, "category": "a", "turn": 1, "question": "question 1", **shown},
    ]


def test_methods_take_turns_after_warm_ups_on_the_first_batch() -> None:
    prompts = [prompt("a", 0), prompt("a", 1), prompt("b", 2)]
    first, second = [17, 33], [49]  # the batches, told by their seeds: 16 per dialogue, 1 per turn
    calls = []

    def method(name: str) -> Method:
        def run(ids: list[list[int]], seeds: list[int]) -> list[Generation]:
            assert ids == [[5, 6]] * len(seeds)
            calls.append((name, seeds))
            return [text(1, float(len(calls))) for _ in ids]

        return Method(run)

    methods = {"vanilla": method("vanilla"), "tree": method("tree")}
    bench = Bench(
        None, [], [replace(p, dialogue=p.dialogue + 1) for p in prompts], GREEDY, {}, True
    )
    config = SpeedupRun(num_warmups=2, num_repeats=2, batch_size=2, seed=0)
    found = time_methods(bench, config, methods)
    warm = [("vanilla", first), ("tree", first)]
    assert calls == warm * 2 + [*warm, ("vanilla", second), ("tree", second)] * 2
    assert [batch.category for batch in found] == ["a", "b"]
    assert [batch.seconds("vanilla") for batch in found] == [[5.0, 9.0], [7.0, 11.0]]
    assert [batch.seconds("tree") for batch in found] == [[6.0, 10.0], [8.0, 12.0]]


def test_a_repeat_knows_nothing_of_the_answers_of_earlier_ones() -> None:
    known: list[int] = []

    def run(_ids: list[list[int]], seeds: list[int]) -> list[Generation]:
        known.extend(seeds)
        return [text(len(known), 1.0) for _ in seeds]

    bench = Bench(None, [], [prompt("a", 0), prompt("b", 1)], GREEDY, {}, True)
    config = SpeedupRun(num_warmups=2, num_repeats=2)
    found = time_methods(bench, config, {"vanilla": Method(run, forget=known.clear)})
    lengths = [[len(g.token_ids) for [g] in batch.runs["vanilla"]] for batch in found]
    assert lengths == [[1, 1], [2, 2]]


def test_where_texts_part_and_how_sure_the_target_was() -> None:
    target = random_target()
    target.model.generation_config.eos_token_id = None
    own = decode(target, NoDraft(), [5, 6], 6).token_ids
    other = [*own[:3], own[3] + 1, *own[4:]]
    texts = {"vanilla": [own, own], "tree": [own, other], "chain": [own, own[:4]]}
    seconds = Times(total=1.0)
    runs = {n: [[Generation(ids, times=seconds) for ids in two]] for n, two in texts.items()}
    methods = {name: Method(lambda *_: []) for name in runs}
    bench = Bench(target, [], [], GREEDY, {}, True)
    found = [BatchRun([prompt("a"), prompt("a", 1)], runs)]
    result = summarise(bench, SpeedupRun(num_texts=0), methods, found)["lossless"]
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
    # Batches without drafting take 1 or 2 seconds in the median, with it 1: like the interval of
    # tau, 1 + k / 8 with k binomial.
    found = []
    for number in range(8):
        seconds = [0.5, 1.0 + number % 2, 9.0]
        plain = [[text(10, s)] for s in seconds]
        found.append(BatchRun([prompt("a")], {"vanilla": plain, "tree": [[text(10, 1.0)]] * 3}))
    bench = Bench(SimpleNamespace(tokenizer=None), [], [], GREEDY, {}, True)
    methods = {name: Method(lambda *_: []) for name in ("vanilla", "tree")}
    result = summarise(bench, SpeedupRun(num_texts=0, seed=0), methods, found)
    assert result["methods"]["tree"]["speedup"] == 1.5
    assert result["methods"]["tree"]["speedup_ci95"] == [1.125, 1.875]


def test_all_intervals_are_those_of_the_seed() -> None:
    found = []
    for number in range(12):
        steps = [Step(number, number + 1, 99)]
        quick = text(10, 1.0 + number**2, 0.5, steps=steps)
        plain = text(10, 5.0, 0.5, steps=steps)
        found.append(BatchRun([prompt("a")], {"vanilla": [[plain]], "tree": [[quick]]}))
    bench = Bench(SimpleNamespace(tokenizer=None), [], [], GREEDY, {}, True)
    methods = {name: Method(lambda *_: []) for name in ("vanilla", "tree")}

    def intervals(seed: int) -> list[list[float]]:
        config = SpeedupRun(num_texts=0, seed=seed)
        own = summarise(bench, config, methods, found)["methods"]["tree"]
        rows = (own, own["by_category"]["a"])
        return [list(row[name]) for row in rows for name in ("speedup_ci95", "tau_ci95")]

    assert intervals(1) == intervals(1)
    assert intervals(1)[:2] == intervals(1)[2:]
    assert all(one != two for one, two in zip(intervals(1), intervals(2), strict=True))


def test_figures_by_hand() -> None:
    """Two batches, three repeats: 10 tokens a second without drafting, 20 with it."""
    tree = Tree.from_paths([[0], [1], [0, 0]])
    steps = [Step(2, 3, 9), Step(1, 2, 6), Step(0, 1, 4), Step(2, 3, 3)]
    drafted = {"steps": steps, "paths": [(1, 3), (2,), (), (1, 3)]}
    found = []
    for number, category in enumerate("ab"):
        plain = [
            [text(10, s, 0.1, steps=[Step(0, 1, 9 - i) for i in range(9)])] for s in (1, 9, 0.25)
        ]
        quick = [[text(10, s, 0.1, **drafted)] for s in (0.5, 0.25, 7)]
        others = [[text(10, 2.0, num_passes=5)]] * 3
        one = [[text(10, 1.0, steps=[Step(0, 1, 1)], paths=[(1,)])]] * 3
        runs = {"vanilla": plain, "tree": quick, "generate": others, "one": one, "root": plain}
        runs["silent"] = [[text(10, 1.0)]] * 3
        found.append(BatchRun([prompt(category, number)], runs))
    methods = {
        "vanilla": Method(lambda *_: []),
        "tree": Method(lambda *_: [], tree),
        "generate": Method(lambda *_: [], lossy=True),
        "one": Method(lambda *_: [], Tree.chain(1)),
        "root": Method(lambda *_: [], Tree.chain(0)),
        "silent": Method(lambda *_: []),
    }
    bench = Bench(SimpleNamespace(tokenizer=None), [], [], GREEDY, {}, True)
    config = SpeedupRun(num_texts=0, batch_size=4, num_repeats=3)
    result = summarise(bench, config, methods, found)
    assert (result["baseline"], result["batch_size"], result["num_repeats"]) == ("vanilla", 4, 3)
    assert result["texts"] == []
    own = result["methods"]["tree"]
    assert result["methods"]["vanilla"]["tokens_per_s"] == approx(10)
    assert own["tokens_per_s"] == approx(20)
    assert own["speedup"] == approx(2)
    assert own["speedup_ci95"] == approx([2, 2])
    assert own["decode_tokens_per_s"] == approx(9 / 0.4)
    assert own["decode_speedup"] == approx(0.9 / 0.4)
    assert own["tau"] == approx(9 / 4)
    assert own["efficiency"] == approx(2 / (9 / 4))
    assert (own["num_tokens"], own["num_steps"], own["num_passes"]) == (20, 8, 8)
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
    assert result["methods"]["generate"]["tau"] == approx(2)
    assert result["methods"]["generate"]["lossy"]
    assert result["lossless"] == {"num_prompts": 2, "num_equal": 2, "first_divergences": []}
