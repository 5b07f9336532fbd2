import pytest
from toys import tokenizer

from conf.schema_measure import SpeedupRun
from eval.clock import Times
from eval.compare.methods import Method
from eval.compare.timing import BatchRun, _origins, _pieces, _spread, summarise
from eval.decode.engine import Generation, Step
from eval.measure.bench import Bench, batches, seed_of
from eval.measure.prompts import Prompt
from heads.sampling import GREEDY, drafter_seeds
from heads.tree import Tree


def prompt(category: str, dialogue: int = 0, turn: int = 1) -> Prompt:
    return Prompt(category, [5, 6], dialogue, turn)


def text(num_tokens: int, seconds: float, prefill: float = 0.0, **more) -> Generation:
    return Generation(list(range(num_tokens)), times=Times(prefill, total=seconds), **more)


def test_batches_hold_one_turn_and_category() -> None:
    prompts = [prompt("a"), prompt("b"), prompt("a"), prompt("a"), prompt("a", turn=2)]
    assert list(batches(prompts, 2)) == [[0, 2], [3], [1], [4]]


def test_no_two_texts_share_a_seed() -> None:
    prompts = [prompt("a", d, t) for d in range(50) for t in (1, 2)]
    seeds = [seed_of(p, seed) for p in prompts for seed in (0, 1)]
    assert len({*seeds, *drafter_seeds(seeds)}) == 400


def test_origins_of_tokens() -> None:
    # The prompt's own token; 2 accepted and the bonus; none; 2 accepted where the text ends.
    steps = [Step(2, 3, 6), Step(0, 1, 3), Step(2, 2, 2)]
    assert _origins(Generation([], steps)) == [0, 1, 2, 0, 0, 1, 2]


def test_pieces_join_to_the_text_and_keep_characters_whole() -> None:
    ids = tokenizer()("héllo \N{GRINNING FACE} you").input_ids
    pieces = _pieces(tokenizer(), ids)
    assert "".join(pieces) == "héllo \N{GRINNING FACE} you"
    assert len(pieces) == len(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "\N{GRINNING FACE}" in pieces


def test_texts_to_show_come_from_every_category() -> None:
    found = [
        BatchRun([prompt("a"), prompt("a", 1)], {}),
        BatchRun([prompt("a", 2)], {}),
        BatchRun([prompt("b", 3)], {}),
    ]
    shown = [batch.prompts[row].dialogue for batch, row in _spread(found, 3)]
    assert shown == [0, 3, 1]


def test_figures_by_hand() -> None:
    """Two batches, three repeats: 10 tokens a second without drafting, 20 with it."""
    tree = Tree.from_paths([[0], [1], [0, 0]])
    steps = [Step(2, 3, 9), Step(1, 2, 6), Step(0, 1, 4), Step(2, 3, 3)]
    drafted = {"steps": steps, "paths": [(1, 3), (2,), (), (1, 3)]}
    found = []
    for number, category in enumerate("ab"):
        plain = [[text(10, s, 0.1, steps=[Step(0, 1, 9 - i) for i in range(9)])] for s in (1, 9, 1)]
        quick = [[text(10, s, 0.1, **drafted)] for s in (0.5, 0.5, 7)]
        others = [[text(10, 2.0, num_passes=5)]] * 3
        runs = {"vanilla": plain, "tree": quick, "generate": others}
        found.append(BatchRun([prompt(category, number)], runs))
    methods = {
        "vanilla": Method(lambda *_: []),
        "tree": Method(lambda *_: [], tree),
        "generate": Method(lambda *_: [], lossy=True),
    }
    bench = Bench(None, [], [], GREEDY, {}, True)
    result = summarise(bench, SpeedupRun(num_texts=0), methods, found)
    own = result["methods"]["tree"]
    assert result["methods"]["vanilla"]["tokens_per_s"] == pytest.approx(10)
    assert own["tokens_per_s"] == pytest.approx(20)
    assert own["speedup"] == pytest.approx(2)
    assert own["speedup_ci95"] == pytest.approx([2, 2])
    assert own["decode_tokens_per_s"] == pytest.approx(9 / 0.4)
    assert own["decode_speedup"] == pytest.approx(0.9 / 0.4)
    assert own["tau"] == pytest.approx(9 / 4)
    assert own["efficiency"] == pytest.approx(2 / (9 / 4))
    assert (own["num_tokens"], own["num_steps"], own["num_passes"]) == (20, 8, 8)
    assert own["tree"]["acceptance"] == [1.0, 0.5, 0.25, 0.5]
    assert own["by_category"]["b"]["speedup"] == pytest.approx(2)
    assert result["methods"]["generate"]["tau"] == pytest.approx(2)
    assert result["methods"]["generate"]["lossy"]
    assert result["lossless"] == {"num_prompts": 2, "num_equal": 2, "first_divergences": []}
