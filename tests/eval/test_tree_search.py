"""Trees replayed on texts, the best trees, and the command that finds them."""

import itertools
import json
import math
import re
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_heads import feature_head, fresh, settings_of
from rich.console import Console
from toys import eagle_head, noisy_head, random_target, save_target

from conf.command import run_record as following
from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.measure import AcceptanceRun, Mode, TreeSearchRun
from conf.settings.target import TargetConfig
from eval import acceptance, tree_search
from eval.decode.engine import decode
from eval.measure.measured_head import MeasuredHead, store_shape
from eval.measure.measurement import Measurement
from eval.measure.prompts import Prompt
from eval.tree_search import ShapeCosts
from eval.tune import batch_size_advice as advice
from eval.tune import step_costs as cost
from eval.tune.step_costs import CostCurve
from eval.tune.tree_acceptance import (
    DrawnTree,
    DynamicTreeReplay,
    StaticTreeReplay,
    build_best_trees,
    build_widest_tree,
    compute_node_values,
)
from heads.blocks.block_head import BlockDrafter
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import DynamicShape, Tree
from heads.eagle.network import EagleDrafter
from heads.eagle.peagle import PEagleDrafter
from heads.medusa import MedusaDrafter
from heads.target_model.load import load_target
from tests.chats import write_rows
from tests.conf.command.test_following import pasted
from tests.eval.test_commands import settings

PROMPTS = [Prompt("all", [n, 6, 7, 8]) for n in (5, 9, 30)]
PAD = [[0, 0, 0]] * 2

RANKED = [[[3, 4, 9], [5, 6, 9]], [[4, 8, 9], [5, 6, 9]], [[5, 9, 4], [6, 9, 8]], PAD]
RESPONSE = [1, 4, 5, 9]
"""Place 0 is followed by 4 5: ranks 1, 0. Place 1 by 5: none. Place 2 by 9: rank 1."""


def test_values_by_hand() -> None:
    texts = StaticTreeReplay([RESPONSE, [7, 4]], [RANKED, [[[4, 1, 2], [4, 4, 4]], PAD]])
    # Four places: three of the first text, one of the second, followed by 4: rank 0.
    assert compute_node_values(texts) == {(1,): 2 / 4, (1, 0): 1 / 4, (0,): 1 / 4}
    assert compute_node_values(StaticTreeReplay([[1]], [[PAD]])) == {}  # a text of one token


def text_statistics(seed: int) -> dict[tuple[int, ...], float]:
    """Values of a random text of three tokens over random candidates, depth 3, width 3."""
    draw = torch.Generator().manual_seed(seed)
    response = torch.randint(3, (60,), generator=draw).tolist()
    orders = torch.rand(60, 3, 3, generator=draw).argsort(-1).tolist()
    return compute_node_values(StaticTreeReplay([response], [orders]))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_best_trees_are_the_best_of_all(seed: int, depth: int) -> None:
    values = text_statistics(seed)
    nodes = [path for path in values if len(path) <= depth]
    trees = build_best_trees(values, depth, 4)
    assert len(trees) == min(4, len(nodes))
    for size, tree in enumerate(trees, start=1):
        best = max(
            sum(values[path] for path in paths)
            for paths in itertools.combinations(nodes, size)
            if all(path[:-1] in ((), *paths) for path in paths)
        )
        paths = [tuple(path) for path in tree_search.describe_shape(tree)["tree"]]
        assert sum(values[path] for path in paths) == pytest.approx(best)
        assert tree.num_nodes - 1 == size
        assert tree.depth <= depth
        assert all(path[:-1] in ((), *paths) for path in paths)


pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture(scope="module")
def target():
    return random_target(num_hidden_layers=4)


@pytest.fixture(scope="module")
def eagle(target):
    return eagle_head(target, EagleForm.eagle3, num_updates=10)


def test_static_steps_are_those_of_decoding(target) -> None:
    head = noisy_head(target)
    texts = StaticTreeReplay.from_prompts(target, head, PROMPTS, 20, build_widest_tree(3))
    for paths in ([[0]], [[1], [3], [3, 0]], [[0], [1], [0, 0], [1, 2], [0, 0, 0], [0, 0, 9]]):
        tree = Tree.from_paths(paths)
        found = [decode(target, MedusaDrafter(head, tree), p.token_ids, 20) for p in PROMPTS]
        assert texts.replay_shape(tree) == [each.steps for each in found]
        assert texts.responses == [each.token_ids for each in found]
    assert any(
        step.num_accepted for text in texts.replay_shape(build_widest_tree(3)) for step in text
    )


def test_what_was_drawn_is_followed_by_hand() -> None:
    # Numbered from 1: tokens 7 and 8 below the root, then 7 and 9 below each of them.
    tokens, parents = [7, 8, 7, 9, 7, 9], [0, 0, 1, 1, 2, 2]
    scores = [-1.0, -0.5, -2.0, -1.5, -1.0, -3.0]  # in order: nodes 2, 1, 5, 4, 3, 6
    drawn = DrawnTree.from_expanded_tree(tokens, scores, parents, [8, 9, 9])
    # Of one level only node 2 counts, and stands first; node 6 stands last of all.
    assert drawn.ahead == [[0], [0, 5]]
    assert [drawn.count_accepted(2, n) for n in (1, 5, 6)] == [1, 1, 2]
    # Node 1 comes first of those equal to it; a level that is not looked at stands before none.
    assert DrawnTree.from_expanded_tree(tokens, scores, parents, [7, 9]).ahead == [[1], [1, 3]]
    assert DrawnTree.from_expanded_tree(tokens, scores, parents, [9, 7]).count_accepted(2, 6) == 0
    assert DrawnTree.from_expanded_tree(tokens, scores, parents, []).count_accepted(1, 6) == 0


MADE = {
    "dflash": lambda target: partial(BlockDrafter, feature_head(target, "dflash", 20)),
    "dspark": lambda target: partial(BlockDrafter, feature_head(target, "dspark, rnn", 10)),
    "peagle": lambda target: partial(PEagleDrafter, feature_head(target, "peagle", 20)),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dflash", "peagle")]


@pytest.fixture(scope="module", params=["eagle", *SLOW, "dspark"])
def make(request, target, eagle):
    return partial(EagleDrafter, eagle) if request.param == "eagle" else MADE[request.param](target)


@pytest.mark.parametrize("top_k", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_dynamic_steps_are_those_of_decoding(target, make, top_k: int) -> None:
    """Blocks are checked too: they draft other tokens where fewer are asked for."""
    prompts = PROMPTS[1:]
    texts = DynamicTreeReplay.from_prompts(target, make, prompts, 12, 4, [top_k])
    for depth, num_tokens in [(1, 1), (3, 5), (4, 100)]:
        shape = DynamicShape(depth, top_k, num_tokens)
        found = [decode(target, make(shape), p.token_ids, 12) for p in prompts]
        assert texts.replay_shape(shape) == [each.steps for each in found]
        assert texts.responses == [each.token_ids for each in found]
    assert any(step.num_accepted for text in texts.replay_shape(shape) for step in text)


def test_trees_are_drawn_no_deeper_than_a_head_drafts(target) -> None:
    """A block of five has four slots to draft in."""
    head, chain = fresh(target, settings_of("dflash")), Tree.make_chain(4)
    opened = MeasuredHead("", head.attach(target).eval(), DynamicShape(4, 4, 8), chain)
    bench = Measurement(target, [opened], PROMPTS[:1], GREEDY, {}, is_main_process=True)
    config = TreeSearchRun(max_new_tokens=3, top_ks=[1])
    texts = tree_search.replay_target_texts(bench, config)
    assert (texts.depth, texts.top_ks) == (4, [1, 4])


def test_what_a_step_costs_by_hand() -> None:
    curve = CostCurve("gpu", [1, 9], [1.0, 3.0])
    tree = Tree.from_paths([[0], [1], [0, 0]])
    costs = ShapeCosts(curve, {build_widest_tree(1): 0.1, build_widest_tree(2): 0.2}, scale=2.0)
    assert costs.draft_s(tree) == 0.4
    assert costs.step_s(tree) == pytest.approx(0.4 + 1.75)
    ends = {DynamicShape(depth, 3, 1): seconds for depth, seconds in ((1, 0.1), (8, 0.8))}
    shape = DynamicShape(4, 3, 8)
    assert ShapeCosts(curve, ends).draft_s(shape) == pytest.approx(0.4)
    ends = {DynamicShape(depth, 3, 1): seconds for depth, seconds in ((1, 0.1), (5, 0.5))}
    assert ShapeCosts(curve, ends).draft_s(shape) == pytest.approx(0.4)
    one = {DynamicShape(1, 3, 1): 0.1}
    assert ShapeCosts(curve, one).draft_s(DynamicShape(1, 3, 2)) == pytest.approx(0.1)
    assert ShapeCosts(curve, ends).step_s(shape) == pytest.approx(0.4 + 3.0)
    known = CostCurve("gpu", [1, 9], [1.0, 3.0], draft_seconds=0.5)
    assert ShapeCosts(known, ends, 7.0).draft_s(shape) == 2.0
    assert ShapeCosts(known, {}, 7.0).draft_s(tree) == 0.5


FREE = CostCurve("gpu", [1, 2], [1.0, 1.0], draft_seconds=0.0)
DEAR = CostCurve("gpu", [1, 2], [1.0, 3.0], draft_seconds=0.0)


def test_a_big_tree_where_tokens_are_free_and_a_small_one_where_each_costs_passes(
    target, eagle
) -> None:
    static = StaticTreeReplay.from_prompts(
        target, noisy_head(target), PROMPTS, 20, build_widest_tree(3)
    )
    dynamic = DynamicTreeReplay.from_prompts(
        target, partial(EagleDrafter, eagle), PROMPTS, 14, 8, [4]
    )
    config = TreeSearchRun(max_nodes=24, top_ks=[4])
    for texts in (static, dynamic):
        usual, best, found = tree_search.search_shapes(texts, ShapeCosts(FREE, {}), config)
        assert best.tau == max(each.tau for each in (usual, *found))
        assert tree_search.count_draft_tokens(best.shape) > 8
        assert best.speedup == best.tau
        usual, best, found = tree_search.search_shapes(texts, ShapeCosts(DEAR, {}), config)
        assert tree_search.count_draft_tokens(best.shape) == 1
        assert best.speedup == best.tau / 3


def test_all_shapes_that_are_compared_can_be_drawn(target, eagle) -> None:
    texts = DynamicTreeReplay.from_prompts(
        target, partial(EagleDrafter, eagle), PROMPTS[:1], 8, 8, [1, 4]
    )
    usual, found = tree_search.build_candidate_shapes(
        texts, TreeSearchRun(max_nodes=20, top_ks=[1, 4])
    )
    assert usual == DynamicShape(2, 4, 5)
    assert [shape.num_tokens for shape in found if shape.top_k == 1] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert max(shape.num_tokens for shape in found) == 20
    assert DynamicShape(1, 4, 5) not in found  # four are drawn
    shallow = DynamicTreeReplay(texts.responses, {(1, 4): texts.drawn[8, 4]}, has_nested_trees=True)
    usual, found = tree_search.build_candidate_shapes(
        shallow, TreeSearchRun(max_nodes=20, top_ks=[4])
    )
    assert usual == DynamicShape(1, 4, 5)
    assert max(shape.depth for shape in found) == 1


@pytest.fixture(autouse=True)
def quick_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "NUM_ROUNDS", 1)
    monkeypatch.setattr(cost, "NUM_PLAIN", 1)
    monkeypatch.setattr(
        tree_search, "measure_step_costs", partial(cost.measure_step_costs, sizes=(2, 4, 12))
    )
    monkeypatch.setattr(advice, "SIZES", (2, 4))


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("search")
    path = str(save_target(folder / "target", num_hidden_layers=4))
    toy = load_target(TargetConfig(path=path), torch.device("cpu"))
    noisy_head(toy).save(folder / "medusa")
    eagle_head(toy, EagleForm.eagle3, 150, num_updates=5).save(folder / "eagle")
    words = ("there", "you", "today", "how are you")
    rows = [{"category": "all", "turns": [f"hello {word}"]} for word in words]
    prompts = write_rows(folder / "prompts.jsonl", rows)
    return {"target": path, "data": str(prompts), "head": "", "folder": folder}


def searched(setting: dict, head: Path, out_dir: Path, **changes: Any) -> dict:
    own = {**settings(setting, out_dir), "head": HeadRef(path=str(head)), "max_new_tokens": 6}
    small = {"max_nodes": 12, "top_ks": [4], "num_repeats": 1, "batch_sizes": [1, 4]}
    tree_search.main(TreeSearchRun(**{**own, **small, **changes}))
    return json.loads((out_dir / "tree_search.json").read_text())


@pytest.mark.parametrize("family", ["medusa", pytest.param("eagle", marks=pytest.mark.slow)])
def test_the_command_finds_a_shape_that_decoding_then_uses(
    setting, tmp_path, family: str, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(tree_search, "MOST_OVER_TAU", math.inf)  # whatever else runs here
    head = Path(shutil.copytree(setting["folder"] / family, tmp_path / "head"))
    result = searched(setting, head, tmp_path / "s")
    assert (tmp_path / "s/tree_search.png").is_file()
    out = capsys.readouterr().out
    assert "  Speed-up over passes of one token, " in out
    assert "Too few prompts to judge this shape: " in out
    assert "(measured, 2 other dialogues)." in out
    script, speedup = pasted(out)
    assert (script, speedup.head.path) == ("eval/speedup.py", str(head))
    assert speedup.data.path == following.PROMPTS_PLACEHOLDER  # others
    kind = "tree" if family == "medusa" else "dynamic_tree"
    for name in ("default", "found"):
        row = result[name]
        assert row[kind]
        # The other prompts are replayed exactly.
        assert row["simulated_tau"] == pytest.approx(row["measured_tau"])
        assert row["speedup"] == pytest.approx(
            row["tau"] / row["step_s"] * result["curve"]["seconds"][0]
        )
        assert row["measured_speedup"] == result["measured"]["methods"][name]["decode_speedup"]
    default, found = result["default"], result["found"]
    assert result["predicted_gain"] == found["speedup"] / default["speedup"] >= 1
    for way in ("simulated", "measured"):
        gain = found[f"{way}_speedup"] / default[f"{way}_speedup"]
        assert result[f"{way}_gain"] == pytest.approx(gain)
    assert result["measured"]["lossless"]["num_equal"] == 2
    assert result["curve"]["sizes"][:2] == [1, 2]
    assert max(each["num_tokens"] for each in result["candidates"]) <= 12
    points = result["advice"]["points"]
    assert [point["batch_size"] for point in points] == [1, 4]
    # Two prompts are left to check on: too few for a batch of four.
    assert [len(point["measured"]) for point in points] == [1, 0]

    stored = json.loads((head / "draft_tree.json").read_text())
    assert stored[kind] == result["found"][kind]
    assert (stored["device"], stored["tau"]) == ("cpu", result["found"]["tau"])
    own = {**settings(setting, tmp_path / "a"), "head": HeadRef(path=str(head))}
    own["max_new_tokens"] = 4
    acceptance.main(AcceptanceRun(**own, mode=Mode.replay))
    said = " ".join(capsys.readouterr().err.split())
    assert "its draft tree was searched on data.path itself" in said
    used = json.loads((tmp_path / "a/acceptance.json").read_text())["tree"]
    expected = stored[kind]
    assert used == (list(Tree.from_paths(expected).parents) if family == "medusa" else expected)


@pytest.mark.parametrize(
    ("gain", "speedup", "found", "dialogues", "sentence"),
    [
        (1.2, 1.5, [[0]], 7, "Too few prompts to judge this shape: "),
        (1.2, 0.9, [[0]], 8, "No shape makes drafts of this head pay here: "),
        (1.0, 1.5, [[1]], 8, "No shape is better than the default: "),
        (0.9, 1.5, [[0]], 8, "The found shape is no faster than the default, keep that: "),
        (1.2, 1.5, [[0]], 8, "The found shape is faster than the default: "),
        (1.2, 1.8, [[0]], 7,
         "The clock was disturbed, as a step with drafts takes no less than one without: "),
    ],
)  # fmt: skip
def test_the_verdict_follows_the_figures(gain, speedup, found, dialogues, sentence) -> None:
    ways = {f"{way}_speedup": speedup for way in ("measured", "simulated")}
    result = {
        "default": {"tree": [[1]]},
        "found": {"tree": found, "measured_tau": 1.6, "simulated_tau": 1.6, **ways},
        "measured": {}, "measured_gain": gain, "simulated_gain": gain,
    }  # fmt: skip
    figure = f"{gain:.2f} of the default's speed and {speedup:.2f} of plain decoding's"
    again = " at tau 1.60; no shape is written, search again while the machine is idle"
    advice = again if speedup > 1.6 else ""
    said = f"{sentence}{figure} (measured, {dialogues} other dialogues){advice}."
    assert tree_search.judge_tree(result, dialogues) == said
    replayed = tree_search.judge_tree(result | {"measured": None}, dialogues)
    assert replayed == said.replace("measured", "simulated")


def test_what_is_checked_was_never_searched_on(setting, tmp_path, monkeypatch) -> None:
    """Both turns of a dialogue stand on one side; what is found may be left unwritten."""
    rows = [{"category": "chat", "turns": [f"hello {n}?", "and now?"]} for n in range(4)]
    prompts = write_rows(tmp_path / "turns.jsonl", rows)
    seen: dict[str, list[tuple[int, int]]] = {}
    monkeypatch.setattr(tree_search, "plot_tree_search", lambda *_: None)

    def watch(name: str, place: int) -> None:
        function = getattr(tree_search, name)

        def watched(*given):
            prompts = given[place].prompts
            seen.setdefault(name, [(prompt.dialogue, prompt.turn) for prompt in prompts])
            return function(*given)

        monkeypatch.setattr(tree_search, name, watched)

    for name in ("replay_target_texts", "estimate_advice", "decode_with_shapes"):
        watch(name, 0)
    watch("measure_advice", 1)
    own, head = {**setting, "data": str(prompts)}, setting["folder"] / "medusa"
    few = {"num_turns": 2, "max_new_tokens": 4, "batch_sizes": [1], "max_nodes": 3}
    assert searched(own, head, tmp_path / "o", **few, write=False)["measured_gain"]
    monkeypatch.setattr(tree_search, "MOST_OVER_TAU", 0.0)
    searched(own, head, tmp_path / "disturbed", **few)
    assert not (head / "draft_tree.json").exists()
    assert (
        seen["replay_target_texts"] == seen["estimate_advice"] == [(0, 1), (2, 1), (0, 2), (2, 2)]
    )
    assert seen["decode_with_shapes"] == seen["measure_advice"] == [(1, 1), (3, 1), (1, 2), (3, 2)]


def test_all_figures_are_shown(capsys) -> None:
    row = {
        "num_tokens": 9, "tau": 1.5, "speedup": 1.25, "simulated_tau": 1.75,
        "simulated_speedup": 1.375, "measured_speedup": None,
    }  # fmt: skip
    result = {
        "curve": {"device": "cpu"}, "default": row, "found": row | {"measured_speedup": 2.0},
        "predicted_gain": 1.125, "simulated_gain": 1.0625, "measured_gain": 1.5,
    }  # fmt: skip
    tree_search.print_tree_search(result, Console(width=110))
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "Speed-up over passes of one token, cpu"
    assert [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in lines if line[0] in "│┃"] == [
        ["shape", "draft tokens", "tau", "predicted", "tau, other prompts", "simulated",
         "measured"],
        ["default", "9", "1.500", "1.250", "1.750", "1.375", "-"],
        ["found", "9", "1.500", "1.250", "1.750", "1.375", "2.000"],
        ["gain", "", "", "1.125", "", "1.062", "1.500"],
    ]  # fmt: skip


def test_a_recorded_curve_predicts_and_writes_no_shape(setting, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tree_search, "plot_tree_search", lambda *_: None)
    head, curve = setting["folder"] / "medusa", tmp_path / "dear.json"
    curve.write_text(json.dumps(asdict(DEAR)))
    result = searched(setting, head, tmp_path / "o", curve=str(curve))
    assert not (head / "draft_tree.json").exists()
    assert result["curve"] == asdict(DEAR)
    assert result["measured"] is result["measured_gain"] is result["advice"] is None
    found = result["found"]
    assert found["measured_tau"] is found["measured_speedup"] is None
    assert found["num_tokens"] == 1
    gain = result["simulated_gain"]
    assert gain == found["simulated_speedup"] / result["default"]["simulated_speedup"]


def test_a_shape_for_a_head_on_the_hub_goes_to_the_results(tmp_path) -> None:
    chain = Tree.make_chain(1)
    head = MeasuredHead("somebody/head", noisy_head(random_target()), chain, chain)
    content = {**tree_search.describe_shape(DynamicShape(3, 2, 4)), "device": "cpu"}
    path = store_shape(head, content, tmp_path)
    assert path == tmp_path / "draft_tree.json"
    assert json.loads(path.read_text()) == {
        "dynamic_tree": {"depth": 3, "top_k": 2, "num_tokens": 4}, "device": "cpu",
    }  # fmt: skip
    with pytest.raises(InputError, match=r"head\.path=somebody/head: cannot write .*gone"):
        store_shape(head, content, tmp_path / "gone")
