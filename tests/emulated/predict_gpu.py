"""Predicted times of a step on an H100, by arithmetic.

`python tests/emulated/predict_gpu.py` runs training steps of every kind of head and decoding steps,
all at 8B sizes, on a device without numbers. That needs a C++ compiler, but
no GPU. Each operation that our code dispatches costs 5 microseconds of the host (a captured step is
one operation). On the device it costs 2 microseconds, or the time of its bytes at 3.35 TB/s or of
its products at 990 TFLOP/s if longer. A step takes as long as the slower of host and device. This
is a lower bound, as kernels reach neither rate. On the other hand, every document counts as the
longest of its sequence, compilation fuses nothing, and a target is assumed to fit one GPU.
Measured on an H200: 1 to 1.45 times as long (docs/results/gpu.md).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import emulated.guard  # before torch
import torch
from emulated.device import Mode, counted
from emulated.hollow import Meter, hollow, metered
from omegaconf import OmegaConf

import eval.decode.cuda_graphs
from conf.settings.medusa import Medusa2Run
from conf.settings.training import TrainConfig
from eval.decode.cuda_graphs import GraphDecoder
from eval.decode.engine import NoDraft, Request
from eval.measure.results import build_markdown_table
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree
from heads.eagle.eagle import EagleHead
from heads.kinds import build_variant_table, make_untrained_head
from heads.medusa import MedusaHead
from heads.target_model.adapter import Adapter
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts.bench import training as bench_train
from scripts.bench.harness import format_figure
from scripts.bench.training import RunSizes, make_objective
from train import eagle
from train.medusa2 import AdaptedMedusa, Medusa2Objective

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
LAUNCH_S, PEAK_FLOPS = 5e-6, 990e12
TARGET = {"hidden": 4096, "layers": 32, "vocab": 128256}
TRAINING = {"length": 4096, "batch_size": 2, "micro_batch_size": 1}
DECODING = {"length": 2048}
SHORTER, LONGER = 6, 10
DRAFT_VOCAB = 32000
PREDICTIONS_FILE = ROOT / "scripts/bench/predicted.json"
"""Figures by stage, which `scripts/bench/gpu.py` shows beside its measurements."""
TRAINED = ("medusa", "eagle1", "eagle3", "dflash", "peagle")
DECODED = (
    ("eagle3", "chain"), ("eagle3", "tree"), ("medusa", "chain"), ("dflash", "chain"),
    ("dflash", "tree"),
)  # fmt: skip
RECIPES = ("medusa", "medusa2", *sorted(file.stem for file in (ROOT / "conf/head").glob("*.yaml")))
DRAFTING = [name for name in RECIPES if name not in ("medusa2", "hass", "eagle3_1")]
"""The others draft like `medusa`, `eagle1` and `eagle3`."""

# A job has `hidden`, `layers`, `vocab`, `length` (tokens of a sequence, or of the text that is
# answered), for training `batch_size` and `micro_batch_size`, and `name` of a recipe (`none` drafts
# nothing).


def trained(job: dict[str, Any]) -> Row:
    """The second step of a run: the first makes what lasts."""
    sizes = sizes_of(job)
    objective = patch.object(bench_train, "make_objective", objective_of)
    with hollow(), objective, tempfile.TemporaryDirectory() as folder:
        run, _ = bench_train.start_run(sizes, Path(folder) / "out")
        run.optimizer_step()
        with metered() as meter, counted() as counts:
            run.optimizer_step()
        run.close()
    num_tokens = sizes.batch_size * sizes.max_length
    return {**told(meter), "num_tokens": num_tokens, "num_waits": counts.num_waits}


def decoded(job: dict[str, Any], shape: str) -> Row:
    """A captured step of one text: what more steps add, by their number.

    Args:
        shape: `chain` or `tree`.
    """
    found: list[tuple[Meter, int, int]] = []
    with hollow(), patch.object(eval.decode.cuda_graphs, "CudaGraph", Whole):
        target = make_target(job)
        make = drafter_of(job, shape, target)
        for length in (SHORTER, SHORTER, LONGER):  # the first makes what lasts
            with metered() as meter, counted() as counts, Whole.launched_by(meter):
                texts = GraphDecoder(target, make, length).decode_requests(
                    [Request([5] * job["length"])], 1
                )
            # The clock looks at events that have long happened.
            waits = [n for (_, line), n in counts.waits.items() if "command/clock" not in line]
            found.append((meter, sum(waits), len(texts[0].steps)))
    _, (few, fewer_waits, less), (many, more_waits, more) = found
    of_step = {**told(many - few), "num_waits": more_waits - fewer_waits}
    of_step = {name: value / (more - less) for name, value in of_step.items()}
    return {**of_step, "num_shapes": len(many.attended)}


class Whole:
    """In place of a CUDA graph: what it holds runs anew, for the host one launch."""

    meter: Meter

    def __init__(self, call: Callable[[], Any], _pool: Any) -> None:
        self.call = call

    @classmethod
    @contextmanager
    def launched_by(cls, meter: Meter) -> Iterator[None]:
        """Inside, graphs tell a meter of their launches."""
        cls.meter = meter
        yield

    def launch_graph(self) -> Any:
        """All at once."""
        before = self.meter.num_launches
        output = self.call()
        self.meter.num_launches = before + 1
        return output


def objective_of(name: str, target: Target, vocab: DraftVocab) -> Any:
    """The objective of a recipe, with an untrained head."""
    if name == "medusa2":
        run = Medusa2Run(train=TrainConfig(max_steps=1000))
        run.joint.heads_only_steps = 0
        heads = MedusaHead.from_settings(target, run.head, vocab, seed=0)
        adapter = Adapter(target, run.adapter, seed=0)
        return Medusa2Objective(AdaptedMedusa(heads, adapter), target, run)
    if name in build_variant_table():
        return make_objective(name, target, vocab)
    composed = eagle.main.command.compose_settings([f"head={name}"])
    config: Any = OmegaConf.to_object(composed.head)
    head = EagleHead.from_settings(target, config, vocab, seed=0)
    return eagle.EagleObjective(head, target, config)


def drafter_of(job: dict[str, Any], shape: str, target: Target) -> Callable[[list[int]], Drafter]:
    """What makes the drafter of a job."""
    if job["name"] == "none":
        return lambda _: NoDraft()
    vocab = DraftVocab.from_counts(torch.arange(target.vocab_size), DRAFT_VOCAB, [])
    head = make_untrained_head(job["name"], target, vocab)
    head.attach(target, target.dtype).eval()
    chain = Tree.make_chain(head.default_depth)
    drafts = chain if shape == "chain" else head.make_default_shape(gpu=True)
    return lambda seeds: head.make_drafter(drafts, GREEDY, seeds)


def make_target(job: dict[str, Any]) -> Target:
    """A target with room for what is answered."""
    room = {**job, "length": 2 * job["length"]}
    return bench_train.make_random_target(sizes_of(room), torch.device("cuda"))


def sizes_of(job: dict[str, Any]) -> RunSizes:
    """Sizes of `scripts/bench/training.py`."""
    return RunSizes(
        job["name"], job["hidden"], job["layers"], job["vocab"], max_length=job["length"],
        batch_size=job.get("batch_size", 1), micro_batch_size=job.get("micro_batch_size", 1),
        dtype="bfloat16",
    )  # fmt: skip


def told(meter: Meter) -> Row:
    """Figures of a meter, those that add up."""
    return {
        "num_launches": meter.num_launches, "num_kernels": meter.num_kernels, "bytes": meter.bytes,
        "flops": meter.flops, "device_s": meter.device_s, "product_s": meter.product_s,
        "num_shapes": len(meter.attended),
    }  # fmt: skip


def step_seconds(step: Row) -> float:
    """Seconds of a step: of host or device, whichever is slower, as they work side by side."""
    return max(LAUNCH_S * step["num_launches"], step["device_s"])


def training_row(name: str) -> dict[str, float]:
    """A training step of a recipe, by the columns of the table."""
    print(f"{name}, train", file=sys.stderr, flush=True)
    step = trained({"name": name, **TARGET, **TRAINING})
    seconds = step_seconds(step)
    return {
        "launches": step["num_launches"], "waits": step["num_waits"],
        "shapes of attention": step["num_shapes"],
        "host, ms": 1000 * LAUNCH_S * step["num_launches"], "device, ms": 1000 * step["device_s"],
        "products": step["product_s"] / seconds, "tokens/s": step["num_tokens"] / seconds,
        "of peak": step["flops"] / seconds / PEAK_FLOPS,
    }  # fmt: skip


def decoding_row(name: str, shape: str, plain_ms: float = 0.0) -> dict[str, float]:
    """A decoding step by the columns of the table, beside one that drafts nothing."""
    print(f"{name}, {shape}", file=sys.stderr, flush=True)
    step = decoded({"name": name, **TARGET, **DECODING}, shape)
    ms = 1000 * step_seconds(step)
    return {
        "launches": step["num_launches"], "waits": step["num_waits"],
        "shapes of attention": step["num_shapes"], "kernels": step["num_kernels"],
        "GB": step["bytes"] / 1e9, "ms": ms, "over a plain step": ms / (plain_ms or ms),
    }  # fmt: skip


def save_predictions() -> None:
    """Writes what `scripts/bench/gpu.py` shows of its stages that run at 8B sizes."""
    stages: dict[str, dict[str, float]] = {
        f"train {name}": {"tokens/s": round(training_row(name)["tokens/s"])} for name in TRAINED
    }
    plain_ms = decoding_row("none", "chain")["ms"]
    stages["decode"] = {"ms per token, captured": round(plain_ms, 2)}
    for name, shape in DECODED:
        cost = decoding_row(name, shape, plain_ms)["over a plain step"]
        stages["decode"][f"speed-up / tau, {name} {shape}"] = round(1 / cost, 2)
    PREDICTIONS_FILE.write_text(json.dumps(stages, indent=1) + "\n")
    print(f"{PREDICTIONS_FILE.read_text()}written to {PREDICTIONS_FILE}")


def print_table(title: str, steps: dict[str, dict[str, float]]) -> None:
    """Prints a table with a row for each step."""
    lines = [("step", *next(iter(steps.values())))]
    lines += [(name, *map(format_figure, step.values())) for name, step in steps.items()]
    print(f"\n{title}\n\n{build_markdown_table(lines)}", flush=True)


def main() -> None:
    """Prints the tables, or writes the predictions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--save", action="store_true", help=f"write {PREDICTIONS_FILE.name} and no table"
    )
    options = parser.parse_args()
    if not emulated.guard.is_loaded():  # it must be there before torch
        if emulated.guard.compiler() is None:
            sys.exit("error: no C++ compiler found; install g++ or clang++, or name one in CXX")
        folder = ROOT / "outputs/emulated"
        folder.mkdir(parents=True, exist_ok=True)
        environ = {**os.environ, emulated.guard.VARIABLE: str(emulated.guard.compiled(folder))}
        os.execve(sys.executable, [sys.executable, *sys.argv], environ)
    from emulated import cuda

    cuda.install()
    with Mode():
        if options.save:
            save_predictions()
            return
        steps = {name: training_row(name) for name in RECIPES}
        print_table("Training, 2 x 4,096 tokens a step", steps)
        steps = {"none": decoding_row("none", "chain")}
        steps |= {
            f"{name} {shape}": decoding_row(name, shape, steps["none"]["ms"])
            for name, shape in product(DRAFTING, ("chain", "tree"))
        }
        print_table("A captured step of one text behind 2,048 tokens", steps)


if __name__ == "__main__":
    main()
