"""Measure the figures of `scripts/bench/gpu.py`; their floors and their predictions.

A stage is a function that takes small sizes, or those of 8B parameters, and yields names and values
as soon as they are known. Some stages compare a part of a training step with its plain form, which
stands beside the stage.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from conf.command.clock import Stopwatch, measure_seconds
from conf.settings.eagle import EagleConfig
from data.prepared.packing import PackedDataset
from heads.layers.branch_attention import (
    BranchCache,
    branch_attention,
    build_causal_range,
    plain_branch_attention,
)
from heads.layers.documents import Documents
from heads.target_model.attention import build_dense_mask
from heads.target_model.embeddings_and_output_head import Projection
from heads.vocab import DraftVocab
from scripts.bench import training
from scripts.bench.harness import (
    ROOT,
    Footprint,
    best_device,
    measure_footprint,
    measure_peak_bytes,
    run_worker,
)
from train.batch.batch import SortedIndices
from train.loss.fused_linear import Student, compute_fused_loss
from train.loss.teachers import HiddenTeacher
from train.step_objective import StepCriterion

Figures = Iterator[tuple[str, float]]
Row = dict[str, Any]

REPEATS = 3
LARGE_SIZES = {"hidden": 4096, "layers": 32, "vocab": 128256}
"""Llama-3-8B's shape."""
TRAINING_SIZES = {"max-length": 4096, "batch-size": 2, "micro-batch-size": 1}
PROMPT_LENGTH, NUM_TOKENS, ACCEPTANCE = 512, 96, 0.8
SHAPES = {"eagle3": (4, (8, 10, 59)), "medusa": (4, None), "dflash": (7, (7, 10, 59))}
"""Depth of chains; depth, width and number of draft tokens of trees, by head."""
FLOORS: dict[str, dict[str, float]] = {
    "loss": {"textbook's time over ours": 1.0, "textbook's memory over ours": 6.0},
    "documents": {"time of a written mask over ours": 1.5, "its memory over ours": 1.2},
    "unroll": {"time of full masks over ours, 7 steps": 1.5, "their memory over ours": 20.0},
    "eagle3": {"eager over compiled, 3 steps": 1.2},
    "eagle3_7": {"eager over compiled, 7 steps": 1.2},
    "medusa": {"original's time over ours": 1.5, "original's memory over ours": 1.8},
    "train medusa": {"FLOP/s over those of a matmul": 0.25},
    "train eagle1": {"FLOP/s over those of a matmul": 0.2},
    "train eagle3": {"FLOP/s over those of a matmul": 0.45},
    "train dflash": {"FLOP/s over those of a matmul": 0.45},
    "train peagle": {"FLOP/s over those of a matmul": 0.1},
    "decode": {
        "same tokens, captured or not": 1.0,
        **{f"speed-up / tau, {head} chain": 0.55 for head in SHAPES},
        **{f"speed-up / tau, {head} tree": 0.4 for head in ("eagle3", "dflash")},
    },
    "capture": {"int8, hidden over the bare pass": 0.7, "int8, top_k over pass and logits": 0.7},
}
"""Lowest allowed values by stage; other figures are printed only. Ratios compare measurements of
one process, so they hold on any GPU. Those of memory lie below what torch's allocator counts where
nothing is computed: 8.9, 1.27, 52.8 and 2.0."""
PREDICTED: dict[str, dict[str, float]] = json.loads(
    (ROOT / "scripts/bench/predicted.json").read_text()
)
"""Figures by stage for an H100, written by `scripts/bench/predict_gpu.py --save`."""
METRIC_NAMES = ("train/loss", "train/tokens", "train/tokens_per_s", "eval/loss", "eval/tau")
"""Figures of a training; the last value of each is shown."""
USUAL_MOST_S = 80.0
MOST_S = {"ceilings": 30.0, "decode": 90.0, "train medusa": 70.0}
"""Seconds after which a stage is ended; other stages have `USUAL_MOST_S`."""


def measure_ceilings(small: bool) -> Figures:
    """Measure the card's most FLOP/s and bytes/s, and the cost of a launch and a graph's node."""
    device = best_device()
    dtype = torch.float32 if small else torch.bfloat16
    yield "matmul, TFLOP/s", training.measure_matmul_flops(device, dtype) / 1e12
    source = torch.empty(1 << 20 if small else 1 << 30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    seconds = statistics.median(
        measure_seconds(lambda: target.copy_(source), device) for _ in range(20)
    )
    yield "copy, TB/s read and written", 2 * source.nbytes / seconds / 1e12
    number = torch.zeros(1, device=device)
    watch = Stopwatch(device)
    for _ in range(2000):
        number.add_(1)
    yield "launch, microseconds of the host", 1e6 * watch.host_seconds() / 2000
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                number.add_(1)
        seconds = statistics.median(measure_seconds(graph.replay, device) for _ in range(10))
        yield "node of a graph, microseconds", 1e6 * seconds / 1000


def measure_training(head: str, small: bool) -> Figures:
    """Measure the training loop with an untrained head: speed, memory, shares of its parts."""
    options = training.parse_arguments(_build_size_arguments(head, small))
    with training.open_run(options) as (run, data):
        estimated = training.estimate_bytes(run, options)
        speed = training.measure_steps(run, data, options)
        yield "tokens/s", speed.tokens_per_s
        yield "ms per step", 1000 * speed.step_s
        yield "FLOP/s over those of a matmul", speed.utilisation
        yield "matmul, TFLOP/s", speed.matmul / 1e12
        yield "peak, GB", speed.peak_gib * 2**30 / 1e9
        if estimated is not None:
            yield "peak, GB, estimated", estimated / 1e9
        yield "padding", speed.padding
        for name, share in training.measure_part_fractions(run, 3).items():
            yield f"share of {name}", share


def _build_size_arguments(head: str, small: bool) -> list[str]:
    """Build the arguments of `scripts/bench/training.py` for a head and a size."""
    if small:
        return [head, "--hidden=64", "--layers=6", "--vocab=256", "--max-length=128", "--steps=2"]
    sizes = [f"--{name}={value}" for name, value in (LARGE_SIZES | TRAINING_SIZES).items()]
    return [head, *sizes, "--steps=12", "--dtype=bfloat16", "--compile"]


@torch.inference_mode()
def measure_decoding(small: bool) -> Figures:
    """Measure steps without and with drafts of a random target of 8B's shape."""
    from eval.decode.engine import NoDraft, Request, decode_many
    from eval.decode.hf_generate import hf_generate
    from heads.decoding.sampling import GREEDY
    from scripts.bench.engine import make_sure

    target = training.make_random_target(
        training.parse_arguments(_build_size_arguments("eagle3", small)), best_device()
    )
    make_sure(target.model)
    num_prompt, num_tokens = (32, 16) if small else (PROMPT_LENGTH, NUM_TOKENS)
    generator = torch.Generator().manual_seed(1)
    prompt: Any = torch.randint(10, target.vocab_size, (num_prompt,), generator=generator)
    prompt = prompt.tolist()

    def plainly(length: int) -> Any:
        return decode_many(target, lambda _: NoDraft(), [Request(prompt)], length, 1)[0]

    plainly(num_tokens)
    eager = plainly(num_tokens)
    yield "ms per token, launched one by one", _compute_step_ms(eager)
    for _ in range(2):
        (generated,) = hf_generate(target, [prompt], num_tokens, GREEDY, 0)
    yield "ms per token, generate", _compute_step_ms(generated)
    plain = _decode_captured(target, lambda _: NoDraft(), prompt, num_tokens)
    yield "ms per token, captured", _compute_step_ms(plain)
    yield "same tokens, captured or not", float(plain.token_ids == eager.token_ids)
    sampled = _decode_captured(target, lambda _: NoDraft(), prompt, num_tokens, temperature=1.0)
    yield "ms per token, captured, temperature 1", _compute_step_ms(sampled)
    answer = plainly(num_tokens + 16).token_ids
    for kind in SHAPES:
        yield from _iter_head_figures(kind, target, prompt, answer, (plain, sampled), small)
    if target.device.type == "cuda":
        yield "peak, GB", torch.cuda.max_memory_allocated() / 1e9


def _iter_head_figures(
    kind: str, target: Any, prompt: list[int], answer: list[int], base: tuple[Any, Any], small: bool
) -> Figures:
    """Measure steps of an untrained head, and of one whose drafts an oracle corrects.

    Args:
        kind: key of `SHAPES`.
        target: the target.
        prompt: token ids.
        answer: the target's own tokens after the prompt, some more than are decoded.
        base: texts without drafts, greedy and at temperature 1.
        small: draft chains only, without trees.
    """
    from heads.decoding.sampling import GREEDY, Sampling
    from heads.decoding.tree import DynamicShape, Tree
    from heads.kinds import make_untrained_head
    from heads.vocab import DraftVocab
    from scripts.bench.engine import Oracle, OracleCorrectedDrafter

    plain, sampled = base
    num_tokens, size = len(plain.token_ids), target.vocab_size
    vocab = DraftVocab.make_full(size)
    if kind == "eagle3":
        vocab = DraftVocab.from_counts(torch.arange(size), min(size, 32000), [])
    head = make_untrained_head(kind, target, vocab)
    head.attach(target, target.dtype).eval()
    depth, tree_sizes = SHAPES[kind]
    chain = Tree.make_chain(min(depth, head.max_chain_depth))
    shapes: dict[str, Any] = {"chain": chain}
    if tree_sizes is not None and not small:
        shapes["tree"] = DynamicShape(*tree_sizes)
    for name, shape in shapes.items():
        make = partial(head.make_drafter, shape, GREEDY)
        step = _compute_step_ms(_decode_captured(target, make, prompt, num_tokens))
        yield f"ms per step, {kind} {name}", step
        yield f"speed-up / tau, {kind} {name}", _compute_step_ms(plain) / step

    def corrected(seeds: list[int]) -> Any:
        oracle = Oracle([answer], chain, ACCEPTANCE, size)
        return OracleCorrectedDrafter(head.make_drafter(chain, GREEDY, seeds), oracle)

    text = _decode_captured(target, corrected, prompt, num_tokens)
    yield f"tau at {ACCEPTANCE:.0%}, {kind} chain", (num_tokens - 1) / len(text.steps)
    yield f"speed-up at {ACCEPTANCE:.0%}, {kind} chain", plain.times.decode / text.times.decode
    if kind == "eagle3":
        make = partial(head.make_drafter, chain, Sampling(temperature=1.0))
        step = _compute_step_ms(_decode_captured(target, make, prompt, num_tokens, temperature=1.0))
        yield f"speed-up / tau, {kind} chain, temperature 1", _compute_step_ms(sampled) / step


def _decode_captured(
    target: Any, make: Any, prompt: list[int], num_tokens: int, temperature: float = 0.0
) -> Any:
    """Decode two texts in captured steps, after a first one, and return the faster.

    On a CPU nothing is captured, and one text is decoded.
    """
    from eval.decode.cuda_graphs import GraphDecoder
    from eval.decode.engine import Request, decode_many
    from heads.decoding.sampling import Sampling

    sampling, requests = Sampling(temperature=temperature), [Request(prompt)]
    if target.device.type != "cuda":
        return decode_many(target, make, requests, num_tokens, 1, sampling)[0]
    way = GraphDecoder(target, make, num_tokens, sampling)
    way.decode_requests(requests, 1)
    texts = [way.decode_requests(requests, 1)[0] for _ in range(2)]
    return min(texts, key=lambda text: text.times.decode)


def _compute_step_ms(text: Any) -> float:
    return 1000 * text.times.decode / max(1, len(text.steps))


def measure_loss(small: bool) -> Figures:
    """Compare time and memory of the fused loss with those of complete logits."""
    sizes = (256, 64, 512) if small else (8192, 4096, 128256)
    costs = measure_loss_costs(*sizes, torch.float32 if small else torch.bfloat16)
    fused, whole = costs["fused"], costs["whole"]
    yield "textbook's time over ours", whole.seconds / fused.seconds
    yield "textbook's memory over ours", whole.peak_bytes / fused.peak_bytes


def measure_loss_costs(
    num_tokens: int, hidden: int, vocab_size: int, dtype: torch.dtype
) -> dict[str, Footprint]:
    """Measure KL(teacher || student), forward and backward, in two ways.

    Letters of the measured parts: J steps, T tokens, H hidden, V vocabulary, Q query heads, d
    channels of a head. The student and the teacher are [T, H] states, each with its own [V, H]
    matrix.

    Returns:
        Costs of `fused`, the loss of training, and of `whole`, [T, V] logits by autograd.
    """
    device = best_device()
    torch.manual_seed(0)
    draw = partial(torch.randn, device=device, dtype=dtype)
    student, teacher = draw(num_tokens, hidden).requires_grad_(), draw(num_tokens, hidden)
    projection, output_head = (draw(vocab_size, hidden) * 2 * hidden**-0.5 for _ in range(2))
    vocab = DraftVocab.make_full(vocab_size).to(device)
    target: Any = SimpleNamespace(
        vocab_size=vocab_size, compute_logits=lambda states: F.linear(states, output_head)
    )
    numbers = torch.arange(num_tokens)
    rows = SortedIndices(numbers, numbers.to(device))
    weights = torch.ones(num_tokens, device=device)
    criterion, judge = StepCriterion(EagleConfig(), vocab), HiddenTeacher(target, vocab, teacher)

    def fused() -> Tensor:
        part = Student(student, Projection(projection), rows, weights)
        return compute_fused_loss([part], judge, criterion)[0]

    def whole() -> Tensor:
        log_probs = F.linear(student, projection).float().log_softmax(-1)
        probs = F.linear(teacher, output_head).float().softmax(-1)
        return F.kl_div(log_probs, probs, reduction="sum")

    def step(loss: Callable[[], Tensor]) -> None:
        student.grad = None
        loss().backward()

    return {
        run.__name__: measure_footprint(partial(step, run), device, REPEATS)
        for run in (fused, whole)
    }


def measure_documents(small: bool) -> Figures:
    """Compare the target's pass over packed documents with a pass under a written mask."""
    sizes = "--max-length 512 --hidden 64 --layers 4"
    if not small:
        sizes = "--max-length 8192 --hidden 2048 --layers 8 --vocab 32000 --dtype bfloat16"
    costs = measure_document_costs(training.parse_arguments(sizes.split()))
    ours, mask = costs["read"], costs["mask"]
    yield "time of a written mask over ours", mask.seconds / ours.seconds
    yield "its memory over ours", mask.peak_bytes / ours.peak_bytes
    yield "milliseconds", 1000 * ours.seconds


@torch.no_grad()
def measure_document_costs(options: argparse.Namespace) -> dict[str, Footprint]:
    """Measure the target over a packed sequence of documents, in two ways.

    Args:
        options: options of `scripts.bench.training`.

    Returns:
        Costs of `read`, which is `Target.encode_documents`, and of a pass with an explicit `mask`.

    Raises:
        RuntimeError: the two give different states.
    """
    device = best_device()
    target = training.make_random_target(options, device)
    row = PackedDataset(training.iter_documents(options, 4), options.max_length, seed=0)[0]
    documents = Documents.from_ids(row["document_ids"][None]).to_device(device)
    ids, positions = (row[name][None].to(device) for name in ("input_ids", "position_ids"))
    allowed = build_dense_mask(documents, 1)
    ways = {
        "read": lambda: target.encode_documents(ids, positions, documents),
        "mask": lambda: target.forward(ids, positions, allowed, positions),
    }
    ours, exact = (way().hidden_states.float() for way in ways.values())
    bound = 1e-4 if target.dtype is torch.float32 else 5e-2
    error = float((ours - exact).norm() / exact.norm())
    if not error < bound:
        raise RuntimeError(f"the states differ by {error:.1e}, more than {bound}")
    return {name: measure_footprint(way, device, REPEATS) for name, way in ways.items()}


def measure_unroll(small: bool) -> Figures:
    """Compare ways to compute attention of the training-time test at 7 steps."""
    costs = measure_unroll_costs(
        *((128, torch.float32) if small else (4096, torch.bfloat16)), num_steps=7
    )
    fused, plain, full = (costs[name] for name in ("fused", "plain", "full"))
    yield "time of full masks over ours, 7 steps", full.seconds / fused.seconds
    yield "their memory over ours", full.peak_bytes / fused.peak_bytes
    yield "time of plain torch over ours", plain.seconds / fused.seconds


def measure_unroll_costs(
    num_tokens: int, dtype: torch.dtype, num_steps: int
) -> dict[str, Footprint]:
    """Measure the training-time test's attention over one text, forward and backward.

    Returns:
        Costs of `fused`, which is `branch_attention` as in training; of `plain`, which is
        `plain_branch_attention` and writes the scores of some rows at a time; and of `full`, which
        is `run_unrolled_full_masks` over [T, J * T] scores with an explicit mask.
    """
    device = best_device()
    torch.manual_seed(0)
    tensors = [
        torch.randn(num_steps, num_tokens, count, 64, device=device, dtype=dtype)
        for count in (16, 4, 4)
    ]

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        query, keys, values = (tensor.clone().requires_grad_() for tensor in tensors)
        attend(query, keys, values).sum().backward()

    runs = {
        "fused": partial(run, partial(run_unrolled_attention, branch_attention)),
        "plain": partial(run, partial(run_unrolled_attention, plain_branch_attention)),
        "full": partial(run, run_unrolled_full_masks),
    }
    peaks = {name: measure_peak_bytes(call, device) for name, call in runs.items()}
    # They take turns, so that other load affects all.
    turns = [[measure_seconds(call, device) for call in runs.values()] for _ in range(REPEATS)]
    medians = map(statistics.median, zip(*turns, strict=True))
    return {name: Footprint(next(medians), peak) for name, peak in peaks.items()}


def run_unrolled_attention(
    attend: Callable[[Tensor, BranchCache], Tensor], query: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Compute [J, T, Q, d]: at every step each token sees the text and its own earlier drafts."""
    places = torch.arange(query.shape[1], device=query.device)
    text = Documents.from_length(len(places), places.device)
    branches = BranchCache(keys[:1], values[:1], build_causal_range(text, places))
    outputs = []
    for step in range(len(query)):
        if step:
            branches.draft_keys.append(keys[step])
            branches.draft_values.append(values[step])
        outputs.append(attend(query[step], branches))
    return torch.stack(outputs)


def run_unrolled_full_masks(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute the same [J, T, Q, d] by one softmax over all [T, (step + 1) * T] scores."""
    groups = query.shape[2] // keys.shape[2]
    diagonal = torch.eye(query.shape[1], dtype=torch.bool, device=query.device)
    causal = torch.ones_like(diagonal).tril()
    outputs = []
    for step in range(len(query)):
        mask = torch.cat([causal, *[diagonal] * step], dim=1)
        k = keys[: step + 1].flatten(0, 1).repeat_interleave(groups, 1)
        v = values[: step + 1].flatten(0, 1).repeat_interleave(groups, 1)
        scores = torch.einsum("tqd,sqd->qts", query[step], k) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("qts,sqd->tqd", weights, v))
    return torch.stack(outputs)


def measure_eagle3(depth: int, small: bool) -> Figures:
    """Compare EAGLE-3 steps on stored states, at a given depth: eager, compiled, speculators."""
    eager, compiled = (_run_peer_step(path, depth, small) for path in ("eagle3", "eagle3_compiled"))
    yield f"eager over compiled, {depth} steps", eager["seconds"] / compiled["seconds"]
    python = os.environ.get("HEADSMITH_SPECULATORS_PYTHON")
    if python is not None:
        peer = _run_peer_step("speculators", depth, small, python)
        yield f"speculators' over compiled, {depth} steps", peer["seconds"] / compiled["seconds"]


def measure_medusa(small: bool) -> Figures:
    """Compare a Medusa step on stored states with the step of the original repository."""
    ours, original = _run_peer_step("medusa", 4, small), _run_peer_step("original_medusa", 4, small)
    yield "original's time over ours", original["seconds"] / ours["seconds"]
    yield "original's memory over ours", original["peak_bytes"] / ours["peak_bytes"]


def _run_peer_step(
    path: str, depth: int, small: bool, python: str = sys.executable
) -> dict[str, Any]:
    job: dict[str, Any] = {
        "tokens": 256, "hidden": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
        "intermediate": 96, "vocab": 512, "draft_vocab": 256,
    }  # fmt: skip
    if not small:
        job = {
            "tokens": 4096, "hidden": 2048, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128,
            "intermediate": 5632, "vocab": 32000, "draft_vocab": 32000,
        }  # fmt: skip
    job |= {"path": path, "depth": depth, "threads": torch.get_num_threads(), "repeats": 3}
    return run_worker("peer_steps", job, python)


def measure_capture(small: bool) -> Figures:
    """Compare storing the states of a random target with its bare pass."""
    from scripts.bench import capture

    with tempfile.TemporaryDirectory() as folder:
        target, data = _make_inputs(Path(folder), small)
        few = ["--tokens", "128", "--sequences", "6", "--group", "2"]
        given = few if small else ["--sequences", "60"]
        options = ["--target", target, "--data", data, *given]
        speeds = capture.measure_capture_rates(capture.parse_arguments(options))
    median = {name: statistics.median(each) for name, each in speeds.items()}
    bare, with_logits = median["target.read"], median["target.read and logits"]
    yield "int8, hidden over the bare pass", median["int8, hidden"] / bare
    yield "int8, top_k over pass and logits", median["int8, top_k"] / with_logits
    yield "tokens/s of int8, hidden", median["int8, hidden"]


def _make_inputs(folder: Path, small: bool) -> tuple[str, str]:
    """Make a random Llama with a tokenizer, and texts of the standard library's source.

    Returns:
        The paths of the target and of the texts.
    """
    from scripts.embedded.make import find_source_files, read_source, train_tokenizer

    files = find_source_files(8 if small else 150)
    texts = list(read_source(files, files.train).values())
    tokenizer = train_tokenizer(texts[:20], 1024, 4096)
    shape = "--hidden 64 --layers 6" if small else "--hidden 2048 --layers 16 --dtype bfloat16"
    sizes = f"{shape} --vocab {len(tokenizer)} --max-length 4096"
    target = training.make_random_target(
        training.parse_arguments(sizes.split()), torch.device("cpu")
    )
    target.model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    data = folder / "texts.jsonl"
    pieces = [text[start : start + 4000] for text in texts for start in range(0, len(text), 4000)]
    data.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return str(folder / "target"), str(data)


MAIN: dict[str, Callable[[bool], Figures]] = {
    "ceilings": measure_ceilings,
    "train eagle3": partial(measure_training, "eagle3"),
    "decode": measure_decoding,
    "train dflash": partial(measure_training, "dflash"),
    "train medusa": partial(measure_training, "medusa"),
}
MORE: dict[str, Callable[[bool], Figures]] = {
    "loss": measure_loss,
    "documents": measure_documents,
    "unroll": measure_unroll,
    "eagle3": partial(measure_eagle3, 3),
    "eagle3_7": partial(measure_eagle3, 7),
    "medusa": measure_medusa,
    "train eagle1": partial(measure_training, "eagle1"),
    "train peagle": partial(measure_training, "peagle"),
    "capture": measure_capture,
}
FIGURES = MAIN | MORE
"""Stages by name, most important first."""


def build_row(stage: str, figure: str, value: float, judged: bool) -> Row:
    """Build the line of a figure; `passed` is None where no floor is looked at."""
    floor = FLOORS.get(stage, {}).get(figure) if judged else None
    return {
        "stage": stage, "figure": figure, "value": value, "floor": floor,
        "predicted": PREDICTED.get(stage, {}).get(figure) if judged else None,
        "passed": None if floor is None else value >= floor,
    }  # fmt: skip


def iter_result_figures(folder: Path) -> Figures:
    """Yield the figures in the results of a command: losses, tau, tokens/s, speed-ups."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        last: dict[str, float] = {}
        for line in metrics.read_text().splitlines():
            last |= json.loads(line)
        yield from ((name, last[name]) for name in METRIC_NAMES if name in last)
    for file in (folder / "acceptance.json", folder / "speedup.json"):
        content = json.loads(file.read_text()) if file.exists() else {}
        if "tau" in content:
            yield "tau", content["tau"]
        sizes = {**content.get("concurrency", {}), str(content.get("batch_size")): content}
        for size, result in sizes.items():
            for method, row in result.get("methods", {}).items():
                at_a_time = "" if size == "1" else f", {size} at a time"
                for name in ("tau", "tokens_per_s", "speedup"):
                    if row.get(name) is not None:
                        yield f"{method}{at_a_time}, {name.replace('_per_s', '/s')}", row[name]
