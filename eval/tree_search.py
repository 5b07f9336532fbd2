"""The draft shape with the most expected tokens per second, for one head, dataset and machine.

`python eval/tree_search.py head.path=outputs/medusa/head data.path=prompts.jsonl`

Half of the prompts show how often each node would be right, the other half checks what was
found, in real decoding. What is found is written into the head's folder, where decoding looks.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from conf.entry import run
from conf.schema import InputError
from conf.schema_measure import SpeedupRun, TreeSearchRun
from eval.accept import GREEDY
from eval.advice import Advice, advise, check
from eval.bench import Bench, device_name, greedy_responses, open_bench, write_result
from eval.cost import CostCurve, draft_seconds, load_curve, verify_curve
from eval.eagle import DynamicShape
from eval.engine import NoDraft, Step, decode_batch
from eval.figures import plot_tree_search
from eval.heads import EAGLE_LONGEST, SHAPE_FILE, BenchHead, usual_shape, usual_tree
from eval.methods import BASELINE, Method
from eval.prompts import Prompt
from eval.replay import ranked_drafts
from eval.stats import PromptSteps, tau
from eval.timing import summarise, time_methods
from eval.tree_values import (
    Drawn,
    best_trees,
    draw_everywhere,
    dynamic_steps,
    node_values,
    static_steps,
)
from heads.eagle import EagleHead
from heads.tree import Tree

WIDTH = 10  # candidates per depth that a static tree may use
Shape = Tree | DynamicShape


@dataclass(frozen=True)
class Candidate:
    """A shape with what it is expected to do.

    Attributes:
        shape: the shape.
        num_tokens: draft tokens that it checks.
        tau: tokens per verify pass on the prompts of the search.
        draft_s: seconds of a draft.
        step_s: seconds of a draft and its verify pass.
    """

    shape: Shape
    num_tokens: int
    tau: float
    draft_s: float
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        """Expected, prompts not counted."""
        return self.tau / self.step_s

    def described(self) -> dict[str, Any]:
        """For a results file."""
        return {
            "shape": described(self.shape),
            "num_tokens": self.num_tokens,
            "tau": self.tau,
            "draft_s": self.draft_s,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
        }


def described(shape: Shape) -> dict[str, Any]:
    """A shape as SHAPE_FILE holds it."""
    if isinstance(shape, DynamicShape):
        return {"dynamic_tree": asdict(shape)}
    return {"tree": paths_of(shape)}


def paths_of(tree: Tree) -> list[list[int]]:
    """The paths of candidate ranks that `Tree.from_paths` takes."""
    paths: list[list[int]] = [[]]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        paths.append([*paths[parent], rank])
    return paths[1:]


@dataclass(frozen=True)
class Search:
    """What the search works on.

    Attributes:
        bench: with one head.
        config: the settings.
        prompts: those that show how often drafts are right.
        curve: of a verify pass; seconds, or the unit of a recorded one.
        baseline_s: seconds of a pass over one token as measured here, to bring drafting times
            onto the scale of a recorded curve.
    """

    bench: Bench
    config: TreeSearchRun
    prompts: list[Prompt]
    curve: CostCurve
    baseline_s: float

    @property
    def head(self) -> BenchHead:
        """The one that is searched for."""
        return self.bench.head

    def candidate(
        self, shape: Shape, num_tokens: int, steps: list[list[Step]], draft_s: float
    ) -> Candidate:
        """With its expected step time."""
        scale = self.curve.at(1) / self.baseline_s
        expected = tau([PromptSteps("all", each) for each in steps])
        step_s = draft_s * scale + self.curve.at(num_tokens + 1)
        return Candidate(shape, num_tokens, expected, draft_s * scale, step_s)

    def draft_seconds(self, shape: Shape) -> float:
        """Measured seconds of a draft of that shape."""
        head = replace(self.head, tree=shape)
        return draft_seconds(
            self.bench.target,
            lambda num_texts: head.drafter("tree", GREEDY, [0] * num_texts),
            middle(self.prompts).token_ids,
        )


def middle(prompts: Sequence[Prompt]) -> Prompt:
    """The one of median length."""
    return sorted(prompts, key=lambda prompt: len(prompt.token_ids))[len(prompts) // 2]


def search_static(search: Search) -> tuple[Candidate, list[Candidate]]:
    """The usual tree, and the best one of every size and depth."""
    bench, head, config = search.bench, search.head, search.config
    depth = head.longest
    wide = Tree.from_paths([[0] * d + [rank] for d in range(depth) for rank in range(WIDTH)])
    responses = greedy_responses(bench.target, search.prompts, config.max_new_tokens)
    ranked = []
    for prompt, response in zip(search.prompts, responses, strict=True):
        output = bench.target.read_text(prompt.token_ids + response[:-1], head.head.reads)
        ranked.append(ranked_drafts(head.head, wide, output, prompt.token_ids, response))
    values = node_values(ranked, responses)
    found = []
    for limit in range(1, depth + 1):
        trees = best_trees(values, limit, config.max_nodes)
        if not trees:
            raise InputError(f"head.path={head.path}: not one draft was right on these prompts")
        draft_s = search.draft_seconds(trees[-1])
        for tree in tqdm(trees, desc=f"trees of depth {limit}", leave=False):
            steps = static_steps(tree, ranked, responses)
            found.append(search.candidate(tree, tree.num_nodes - 1, steps, draft_s))
    usual = usual_tree(depth)
    steps = static_steps(usual, ranked, responses)
    draft_s = search.draft_seconds(usual)
    return search.candidate(usual, usual.num_nodes - 1, steps, draft_s), found


def search_dynamic(search: Search) -> tuple[Candidate, list[Candidate]]:
    """EAGLE's usual limits, and all others on a grid of depth, top-k and total."""
    usual = usual_shape()
    texts: dict[int, list[tuple[list[Drawn], list[int]]]] = {}
    for top_k in sorted({*search.config.top_ks, usual.top_k}):
        texts[top_k] = [
            draw_everywhere(
                search.bench.target, search.head.head, prompt.token_ids,  # type: ignore[arg-type]
                search.config.max_new_tokens, EAGLE_LONGEST, top_k,
            )
            for prompt in tqdm(search.prompts, desc=f"drafts, top {top_k}", unit="prompt")
        ]  # fmt: skip

    def candidate(shape: DynamicShape) -> Candidate:
        steps = [
            dynamic_steps(drawn, response, shape.depth, shape.num_tokens)
            for drawn, response in texts[shape.top_k]
        ]
        first, last = drafting[shape.top_k]
        draft_s = first + (last - first) * (shape.depth - 1) / (EAGLE_LONGEST - 1)
        return search.candidate(shape, shape.num_tokens, steps, draft_s)

    drafting = {
        top_k: [search.draft_seconds(DynamicShape(d, top_k, 8)) for d in (1, EAGLE_LONGEST)]
        for top_k in texts
    }
    sizes = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n <= search.config.max_nodes]
    grid = [
        DynamicShape(depth, top_k, num_tokens)
        for top_k in texts
        for depth in range(1, EAGLE_LONGEST + 1)
        for num_tokens in sizes
        if depth <= num_tokens <= top_k + (depth - 1) * top_k**2
    ]
    return candidate(usual), [candidate(shape) for shape in tqdm(grid, desc="limits", leave=False)]


def measure(search: Search, prompts: list[Prompt], shapes: dict[str, Shape]) -> dict[str, Any]:
    """Real decoding with each shape, interleaved with the engine without drafting."""
    config, bench = search.config, search.bench

    def method(shape: Shape | None) -> Method:
        head = None if shape is None else replace(bench.head, tree=shape)

        def decode(ids: Sequence[list[int]], seeds: Sequence[int]) -> Any:
            drafter = NoDraft() if head is None else head.drafter("tree", GREEDY, list(seeds))
            return decode_batch(bench.target, drafter, ids, config.max_new_tokens)

        return Method(decode, shape if isinstance(shape, Tree) else None)

    methods = {BASELINE: method(None)} | {name: method(s) for name, s in shapes.items()}
    settings = SpeedupRun(seed=config.seed, num_repeats=config.num_repeats, num_texts=0)
    checked = replace(bench, prompts=prompts, sampling=GREEDY)
    return summarise(checked, settings, methods, time_methods(checked, settings, methods))


def write_shape(head: BenchHead, best: Candidate, device: str, out_dir: Path) -> Path:
    """Writes SHAPE_FILE beside the head, or into `out_dir` for one that lies on the Hub."""
    folder = Path(head.path) if Path(head.path).is_dir() else out_dir
    path = folder / SHAPE_FILE
    content = {**described(best.shape), "device": device, "tau": best.tau}
    temporary = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"head.path={head.path}: cannot write {path}: {error}") from error
    return path


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the gain over the usual shape, predicted and measured, and the advice."""
    table = Table(title=f"Draft shape on {result['curve']['device']}")
    for column in ("shape", "draft tokens", "tau", "predicted", "measured tau", "measured"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    rows = result["measured"]["methods"] if result["measured"] else {}
    for name in ("default", "found"):
        row, real = result[name], rows.get(name)
        table.add_row(
            name, str(row["num_tokens"]), f"{row['tau']:.3f}",
            f"{row['predicted_speedup']:.2f}",
            f"{real['tau']:.3f}" if real else "-",
            f"{real['decode_speedup']:.2f}" if real else "-",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"gain over the default: predicted {result['predicted_gain']:.3f}, measured "
        + (f"{result['measured_gain']:.3f}" if rows else "not (a recorded curve)")
    )


def main(config: TreeSearchRun) -> None:
    """Searches, checks, advises, writes the shape, `tree_search.json` and a picture."""
    curve = None if config.curve is None else load_curve(config.curve)
    bench = open_bench(config, "tree_search.json")
    if len(bench.prompts) < 2:
        raise InputError("data.num_prompts=1: searching and checking need a prompt each")
    device = device_name(bench.target.device)
    prompts, check_prompts = bench.prompts[::2], bench.prompts[1::2]
    own = verify_curve(bench.target, middle(prompts).token_ids, device)
    search = Search(bench, config, prompts, curve or own, own.at(1))
    searcher = search_dynamic if isinstance(bench.head.head, EagleHead) else search_static
    usual, found = searcher(search)
    best = max([usual, *found], key=lambda candidate: candidate.tokens_per_s)
    console = Console()
    shapes = {"default": usual.shape, "found": best.shape}
    measured = None if curve else measure(search, check_prompts, shapes)
    advice = None if curve else _advice(search, check_prompts, console)
    result = _result(search, usual, best, found, measured, advice)
    show(result, console)
    path = write_result(config, "tree_search.json", result, bench)
    plot_tree_search(result, path.with_suffix(".png"))
    console.print(f"wrote {path} and {path.with_suffix('.png')}")
    if config.write and not curve:
        where = write_shape(bench.head, best, device, Path(config.out_dir))
        console.print(f"wrote {where}: decoding with this head uses it from now on")


def _advice(search: Search, prompts: list[Prompt], console: Console) -> Advice:
    advice = advise(search.bench, search.config, search.prompts)
    advice = check(advice, search.bench, search.config, prompts)
    advice.show(console)
    return advice


def _result(
    search: Search,
    usual: Candidate,
    best: Candidate,
    found: list[Candidate],
    measured: dict[str, Any] | None,
    advice: Advice | None,
) -> dict[str, Any]:
    plain = 1 / search.curve.at(1)
    rows = measured["methods"] if measured else {}
    gain = (
        rows["found"]["decode_tokens_per_s"] / rows["default"]["decode_tokens_per_s"]
        if rows
        else None
    )
    return {
        "default": {**usual.described(), "predicted_speedup": usual.tokens_per_s / plain},
        "found": {**best.described(), "predicted_speedup": best.tokens_per_s / plain},
        "predicted_gain": best.tokens_per_s / usual.tokens_per_s,
        "measured_gain": gain,
        "curve": search.curve.described(),
        "candidates": [
            {key: c.described()[key] for key in ("num_tokens", "tau", "tokens_per_s")}
            for c in found
        ],
        "measured": measured,
        "advice": None if advice is None else advice.described(),
    }


if __name__ == "__main__":
    run(main, TreeSearchRun, "tree_search")
