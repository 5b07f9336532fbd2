"""Operations of large models' steps on a GPU, for `scripts/bench/predict_gpu.py`.

A job has `hidden`, `layers`, `vocab`, `length` (tokens of a sequence, or of the text that is
answered), for training `batch_size` and `micro_batch_size`, `name` of a recipe or of a way to draft
(`none` drafts nothing), and `shape`: `train`, `chain` or `tree`.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from emulated.device import counted
from emulated.hollow import Meter, hollow, metered
from omegaconf import OmegaConf

import eval.decode.cuda_graphs
from conf.settings.medusa import Medusa2Run
from conf.settings.training import TrainConfig
from eval.decode.cuda_graphs import GraphDecoder
from eval.decode.drafters.draft_model import DraftModel
from eval.decode.drafters.lookahead import Lookahead
from eval.decode.drafters.lookup import (
    NgramModel,
    PromptLookup,
    Recycling,
    SuccessorTable,
    build_recycling_tree,
)
from eval.decode.drafters.self_speculation import SelfDraft
from eval.decode.drafters.suffix import SuffixDrafter, SuffixTree
from eval.decode.engine import NoDraft, Request
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
from scripts.bench.training import RunSizes, make_objective
from train import eagle
from train.medusa2 import AdaptedMedusa, Medusa2Objective

Row = dict[str, Any]
SHORTER, LONGER = 6, 10
DRAFT_VOCAB = 32000


def trained(job: dict[str, Any]) -> Row:
    """The second step of a run: the first makes what lasts."""
    sizes = _sizes(job)
    objective = patch.object(bench_train, "make_objective", _objective)
    with hollow(), objective, tempfile.TemporaryDirectory() as folder:
        run, _ = bench_train.start_run(sizes, Path(folder) / "out")
        run.optimizer_step()
        with metered() as meter, counted() as counts:
            run.optimizer_step()
        run.close()
    num_tokens = sizes.batch_size * sizes.max_length
    return {**_told(meter), "num_tokens": num_tokens, "num_waits": counts.num_waits}


def decoded(job: dict[str, Any]) -> Row:
    """A captured step of one text: what more steps add, by their number."""
    found: list[tuple[Meter, int, int]] = []
    with hollow(), patch.object(eval.decode.cuda_graphs, "CudaGraph", Whole):
        target = _target(job)
        make = _drafter(job, target)
        for length in (SHORTER, SHORTER, LONGER):  # the first makes what lasts
            with metered() as meter, counted() as counts, Whole.launched_by(meter):
                texts = GraphDecoder(target, make, length).decode_requests(
                    [Request([5] * job["length"])], 1
                )
            # The clock looks at events that have long happened.
            waits = [n for (_, line), n in counts.waits.items() if "command/clock" not in line]
            found.append((meter, sum(waits), len(texts[0].steps)))
    _, (few, fewer_waits, less), (many, more_waits, more) = found
    told = {**_told(many - few), "num_waits": more_waits - fewer_waits}
    of_step = {name: value / (more - less) for name, value in told.items()}
    return {**of_step, "num_shapes": len(many.attended)}


def _target(job: dict[str, Any]) -> Target:
    """With room for what is answered."""
    room = {**job, "length": 2 * job["length"]}
    return bench_train.make_random_target(_sizes(room), torch.device("cuda"))


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


def _objective(name: str, target: Target, vocab: DraftVocab) -> Any:
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


def _drafter(job: dict[str, Any], target: Target) -> Callable[[list[int]], Drafter]:
    name, depth = job["name"], 4
    if name not in build_variant_table():
        layers = range(target.num_layers)
        behind, other = tuple(layers[len(layers) // 2 :]), tuple(layers[1::2])
        small = {**job, "hidden": job["hidden"] // 2, "layers": job["layers"] // 2}
        others: dict[str, Callable[[list[int]], Drafter]] = {
            "none": lambda _: NoDraft(),
            "prompt_lookup": lambda _: PromptLookup(depth),
            "ngram": lambda _: NgramModel(depth),
            "suffix": lambda _: SuffixDrafter(SuffixTree(8)),
            "recycling": lambda _: Recycling(SuccessorTable(), build_recycling_tree(60)),
            "lookahead": lambda _: Lookahead(),
            "early_exit": lambda seeds: SelfDraft(target, behind, depth, seeds=seeds),
            "skip_layers": lambda seeds: SelfDraft(target, other, depth, seeds=seeds),
            "draft_model": lambda seeds: DraftModel(
                _target(small), Tree.make_chain(depth), GREEDY, seeds
            ),
        }
        return others[name]
    vocab = DraftVocab.from_counts(torch.arange(target.vocab_size), DRAFT_VOCAB, [])
    head = make_untrained_head(name, target, vocab)
    head.attach(target, target.dtype).eval()
    chain = job["shape"] == "chain"
    shape = Tree.make_chain(head.default_depth) if chain else head.make_default_shape(gpu=True)
    return lambda seeds: head.make_drafter(shape, GREEDY, seeds)


def _sizes(job: dict[str, Any]) -> RunSizes:
    """Sizes of `bench_train`."""
    return RunSizes(
        job["name"], job["hidden"], job["layers"], job["vocab"], max_length=job["length"],
        batch_size=job.get("batch_size", 1), micro_batch_size=job.get("micro_batch_size", 1),
        dtype="bfloat16",
    )  # fmt: skip


def _told(meter: Meter) -> Row:
    return {
        "num_launches": meter.num_launches, "num_kernels": meter.num_kernels, "bytes": meter.bytes,
        "flops": meter.flops, "device_s": meter.device_s, "product_s": meter.product_s,
        "num_shapes": len(meter.attended),
    }  # fmt: skip


def main(question: str) -> None:
    """Prints what a job gives; both are JSON."""
    from emulated import cuda, device

    cuda.install()
    job = json.loads(question)
    with device.Mode():
        print(json.dumps(trained(job) if job["shape"] == "train" else decoded(job)))
