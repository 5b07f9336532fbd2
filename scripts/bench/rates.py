"""Whether the rates that a run takes itself are the best: tau over multiples of them, by width.

`python scripts/bench/rates.py [--widths 128 256 512] [--heads medusa eagle1 eagle3_1]`
takes the embedded default, makes its like in other widths, or takes `--target` and `--data`, trains
each head at each multiple of both its rates on the same tokens, and prints tau on held-out prompts
and the share of the best that the rates as they are reach. A second start goes on.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.launch import rest_while_waiting

rest_while_waiting()

import argparse
import json
import subprocess
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from conf.command.entry import head_recipe
from conf.settings.eagle import EagleConfig
from conf.settings.target import TargetConfig
from conf.settings.training import Optimizer
from data.embedded import CONVERSATIONS, TARGET
from heads.target_model.load import load_target
from heads.vocab import DraftVocab
from scripts.bench.objectives import fresh_objective
from scripts.embedded.make import make
from scripts.embedded.target import Recipe

ROOT = Path(__file__).resolve().parents[2]
HEAD_DIM = 32


@dataclass(frozen=True)
class Place:
    """A target and conversations to train its heads on."""

    target: str
    data: str
    width: int


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="*", default=[128, 256, 512])
    parser.add_argument("--target", help="folder or Hub id of another target, besides")
    parser.add_argument("--data", help="conversations for it")
    parser.add_argument("--heads", nargs="+", default=["medusa", "eagle1", "eagle3_1"])
    parser.add_argument("--factors", type=float, nargs="+", default=[0.3, 0.6, 1.0, 1.7, 3.0])
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of 4 sequences")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--optimizer", default="muon", choices=("muon", "adamw"))
    parser.add_argument("--out-dir", type=Path, default=Path("outputs/rates"))
    options = parser.parse_args(given)
    if 1.0 not in options.factors:
        parser.error(f"--factors {options.factors}: 1.0 must be among them")
    if (options.target is None) != (options.data is None):
        parser.error("--target and --data go together")
    return options


def recipe(width: int) -> Recipe:
    """The embedded default's in another width; its target is trained for a fifth as long."""
    num_heads = max(2, width // HEAD_DIM)
    shape = {"hidden_size": width, "intermediate_size": width * 11 // 4}
    return Recipe(**shape, num_heads=num_heads, num_kv_heads=num_heads // 2, num_steps=480)


def places(options: argparse.Namespace) -> list[Place]:
    """Every target, made where it must be."""
    found = []
    for width in options.widths:
        if width == Recipe.hidden_size:
            found.append(Place(TARGET, CONVERSATIONS, width))
            continue
        folder = options.out_dir / f"embedded-{width}"
        if not (folder / "recipe.json").exists():
            make(folder, recipe(width))
        found.append(Place(str(folder / "target"), str(folder / "train.jsonl"), width))
    if options.target is not None:
        target = load_target(TargetConfig(options.target), torch.device("cpu"))
        found.append(Place(options.target, options.data, target.hidden_size))
    return found


def usual_rates(place: Place, head: str, optimizer: str) -> tuple[float, float]:
    """The rates that a run takes itself."""
    form = "medusa" if head == "medusa" else head_recipe(EagleConfig, head).form.value
    target = load_target(TargetConfig(place.target), torch.device("cpu"))
    objective = fresh_objective(form, target, DraftVocab.everything(target.vocab_size))
    return objective.usual_rates(Optimizer(optimizer))


def trained(place: Place, head: str, factor: float, options: argparse.Namespace) -> float:
    """tau of a head that was trained with `factor` times the usual rates."""
    out_dir = options.out_dir / f"{Path(place.target).name}-{place.width}" / head / f"x{factor:g}"
    metrics = out_dir / "metrics.jsonl"
    if not (out_dir / "head").exists():
        rate, adam = usual_rates(place, head, options.optimizer)
        entry = ["medusa.py"] if head == "medusa" else ["eagle.py", f"head={head}"]
        settings = {
            "target.path": place.target, "data.path": place.data, "out_dir": out_dir,
            "data.max_length": options.max_length, "train.batch_size": 4,
            "train.micro_batch_size": 4, "train.max_steps": options.steps,
            "train.optimizer": options.optimizer, "train.learning_rate": factor * rate,
            "train.adam_learning_rate": factor * adam, "train.eval_steps": options.steps,
            "train.save_steps": options.steps, "train.num_replay_prompts": 64,
        }  # fmt: skip
        words = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, str(ROOT / "train" / entry[0]), *entry[1:], *words]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(f"{' '.join(command)}\n{ended.stderr[-2000:]}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["eval/tau"] for line in lines if "eval/tau" in line][-1]


def main(given: list[str] | None = None) -> None:
    """Prints a row for every target and head."""
    options = arguments(given)
    runs = [(place, head) for place in places(options) for head in options.heads]
    table = Table(title=f"tau by multiples of the usual rates, {options.optimizer}")
    columns = ("target", "width", "head", *(f"x {f:g}" for f in options.factors), "usual / best")
    for column in columns:
        table.add_column(column, justify="right")
    bar = tqdm(total=len(runs) * len(options.factors), unit="run")
    for place, head in runs:
        taus = {}
        for factor in options.factors:
            taus[factor] = trained(place, head, factor, options)
            bar.update()
        share = taus[1.0] / max(taus.values())
        cells = [f"{tau:.3f}" for tau in taus.values()]
        table.add_row(Path(place.target).name, str(place.width), head, *cells, f"{share:.1%}")
    bar.close()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
