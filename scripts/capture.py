"""Runs a target once over a dataset and stores the hidden states that draft heads read.

    accelerate launch scripts/capture.py target.path=Qwen/Qwen3-8B data.path=chats.jsonl
    accelerate launch train/eagle.py data.features=outputs/features

Training then needs neither the target nor the data. Each process writes its own shards; on several
machines the folder must be visible to all. A second start continues.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.command.run_record import print_next_command
from conf.settings.scripts import CaptureRun
from eval.preflight_checks import check_inputs

COMMAND = Command(__doc__, CaptureRun, "capture", check=check_inputs)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from conf.command.run_record import collect_provenance, to_json
from conf.errors import InputError
from conf.files import (
    compute_file_checksum,
    find_local_path,
    retry_io,
    write_atomically,
)
from conf.settings.data import StateFormat, TeacherKind
from conf.settings.target import TargetConfig
from data.embedded import fill_default_paths
from data.features.store_format import (
    EMBEDDINGS_AND_HEAD,
    HIDDEN_STATES,
    NO_PROBABILITY,
    SCALE,
    SPLITS,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    TOKEN_COUNTS,
    TOKEN_FIELDS,
    Manifest,
    ShardEntry,
    ShardIndex,
    Split,
    StoreContents,
    StorePlan,
    is_shard_whole,
    quantize_states,
)
from data.features.store_writer import (
    SHARD_BYTES,
    HostCopier,
    PlannedShard,
    ShardWriterPool,
    plan_shards,
    write_shard,
)
from data.prepared.dataset_cache import NON_CONTENT_SETTINGS
from data.prepared.packing import PackedDataset
from data.prepared.prepare import DataReport, prepare_datasets
from data.rows.row_digests import PROMPTS_FILE
from eval.decode.generation_config import try_generation_config
from eval.measure.engine_answers import AnswerSource, EngineAnswerSource, open_states_pool
from eval.measure.measurement import join_processes, print_notes
from eval.measure.target_answers import LocalAnswerSource
from heads.kinds import HEADS
from heads.layers.documents import Documents
from heads.target_model.architecture import (
    count_layers,
    find_embedding_size,
    find_hidden_size,
)
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.identity import identify_target
from heads.target_model.load import (
    RemoteTarget,
    load_config,
    load_generation_config,
    load_target,
    load_target_tokenizer,
    resolve_dtype,
)
from heads.target_model.model import FeatureLayers, Target
from train.batch.data_loader import stack_sequences
from train.loop import evaluation
from train.loop.evaluation import select_heldout_prompts
from train.loop.sources import find_longest_document
from train.loss.divergences import fast_topk
from train.parallel.processes import hold_folder

# Letters of shapes: B sequences, T tokens, n tokens without padding, D hidden, V vocabulary, k
# teacher tokens.
GIB = 2**30
ROWS_PER_CHUNK = 1024
"""Tokens whose logits are computed at a time."""
GROUP = 8
"""Columns of logits per group in the search for the likeliest tokens; see `fast_topk`."""
TARGET_FOLDER = Path(EMBEDDINGS_AND_HEAD).parent


def capture(config: CaptureRun, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a store to `out_dir`, or its missing and damaged shards."""
    check_inputs(config)
    state = join_processes()
    fill_default_paths(config)
    work = plan_capture(config, state, shard_bytes)
    work.plan.check_folder(work.folder)
    check_disk(work, print_sizes=state.is_main_process)
    state.wait_for_everyone()  # all have read the folder
    with hold_folder(state, work.folder), report_write_errors(work.folder, state):
        if state.is_main_process:
            work.plan.save(work.folder)
        state.wait_for_everyone()
        write_shards(work, state)
        state.wait_for_everyone()
        if state.is_main_process:
            write_manifest(work, state)
    if state.is_main_process:
        print(f"features saved to {work.folder}")
        print_next_command("capture", {"data.features": work.folder})


@dataclass(frozen=True)
class CaptureJob:
    """Hold the data of a capture, and the place of each part.

    Attributes:
        config: settings of the command.
        folder: folder of the store.
        plan: planned contents.
        shards: all shards in order; process s % num_processes writes shard s.
        packed_by_split: packed sequences by split.
        prompts: prompts that the target answers.
        report: what happened to the rows of the data.
    """

    config: CaptureRun
    folder: Path
    plan: StorePlan
    shards: list[PlannedShard]
    packed_by_split: dict[str, PackedDataset]
    prompts: list[list[int]]
    report: DataReport


def plan_capture(config: CaptureRun, state: PartialState, shard_bytes: int) -> CaptureJob:
    """Tokenise and pack the data, and plan the shards, without loading the target's weights.

    Raises:
        InputError: bad data, or layers that the target does not have.
    """
    model_config, tokenizer = load_config(config.target), load_target_tokenizer(config.target)
    contents = choose_contents(config, model_config.get_text_config())
    train, heldout, report = prepare_datasets(
        config.data, tokenizer, config.seed, state.is_main_process
    )
    sets = {"train": train, "heldout": heldout}
    prompts = select_heldout_prompts(heldout, config.num_replay_prompts)
    lengths = {name: packed.sequence_lengths for name, packed in sets.items()}
    lengths["replay"] = [len(prompt) + evaluation.MAX_REPLAY_TOKENS for prompt in prompts]
    shards = [
        shard
        for split in SPLITS
        for shard in plan_shards(split, lengths[split], contents.bytes_per_token, shard_bytes)
    ]
    splits = {
        name: Split(len(packed), packed.num_tokens, packed.num_supervised_tokens, packed.checksum)
        for name, packed in sets.items()
    }
    splits["replay"] = Split(len(prompts), None, None, heldout.checksum)
    data = to_json(config.data)
    plan = StorePlan(
        target=describe_target(config, tokenizer, state.device, loaded=False),
        contents=contents,
        data={name: data[name] for name in data if name not in NON_CONTENT_SETTINGS},
        sha256=report.sha256,
        max_length=config.data.max_length,
        pad_id=train.pad_id if train.pad_id < model_config.get_text_config().vocab_size else 0,
        seed=config.seed,
        splits=splits,
        shard_bytes=shard_bytes,
    )
    return CaptureJob(config, Path(config.out_dir), plan, shards, sets, prompts, report)


def choose_contents(config: CaptureRun, model_config: Any) -> StoreContents:
    """Choose the parts of a target's pass to store.

    Raises:
        InputError: the target does not have a layer.
    """
    num_layers = count_layers(model_config)
    layers = config.layers
    if layers is None:
        asked = filter(None, (head.default_layers for head in HEADS.values()))
        layers = sorted({layer for usual in asked for layer in usual(num_layers, "layers")})
    if [i for i in layers if not 0 <= i <= num_layers] or len(set(layers)) < len(layers):
        raise InputError(
            f"layers={layers}: target.path={config.target.path} has hidden states 0..{num_layers}; "
            "name some of them, each once"
        )
    width, ends = find_hidden_size(model_config), find_embedding_size(model_config)
    if layers and width != ends:
        raise InputError(
            f"layers={layers}: the hidden states of target.path={config.target.path} have width "
            f"{width}, but its last ones {ends}, and a store has one width; set layers=[], or "
            "train online"
        )
    k = min(config.top_k, model_config.vocab_size) if config.teacher is TeacherKind.top_k else 0
    return StoreContents(ends, tuple(sorted(layers)), config.teacher, k, config.format)


def describe_target(
    config: CaptureRun, tokenizer: Any, device: torch.device, loaded: bool
) -> dict[str, Any]:
    """Describe the identity of the target, and how it runs, for the plan of a store.

    Args:
        config: settings with the target's location.
        tokenizer: the target's tokenizer.
        device: device of the pass.
        loaded: whether weights from the Hub are already on this machine.
    """
    target = config.target
    identity = asdict(identify_target(target, tokenizer, resolve_dtype(target.dtype, device)))
    # The commit suffices; an adapter's is not known.
    if not (loaded or find_local_path("target.path", str(target.path))):
        identity["weights"] = None
    if not (loaded or find_local_path("target.adapter", str(target.adapter))):
        identity["adapter_weights"] = None
    answers = config.num_replay_prompts > 0
    return {
        **identity,
        "by_engine": bool(target.engine),
        "generation_config": load_generation_config(target) if answers else None,
    }


def check_disk(work: CaptureJob, print_sizes: bool) -> None:
    """Print how much will be written, in each format; refuse a store that does not fit.

    Raises:
        InputError: the disk is too small; names both sizes.
    """
    tokens = sum(shard.num_tokens for shard in work.shards)
    left = [s for s in work.shards if not (work.folder / f"{s.name}.json").exists()]
    needed = sum(shard.num_tokens for shard in left) * work.plan.contents.bytes_per_token
    folder = work.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if print_sizes:
        contents = work.plan.contents
        print(*work.report.format_lines(), sep="\n")
        print(f"store: {contents.format_line()}, {tokens:,} tokens")
        for state_format in StateFormat:
            size = replace(contents, format=state_format).bytes_per_token
            print(f"  {state_format.value}: {size:,} bytes/token, {tokens * size / GIB:,.2f} GiB")
        print(f"  still to write: {needed / GIB:,.2f} GiB, free: {free / GIB:,.2f} GiB")
    if needed > free:
        raise InputError(
            f"out_dir={work.folder}: needs {needed / GIB:,.2f} GiB more, but {free / GIB:,.2f} GiB "
            "are free; name another disk, fewer layers, data.num_prompts, format=int8 or fp8, or "
            "teacher=top_k"
        )


@contextmanager
def report_write_errors(folder: Path, state: PartialState) -> Iterator[None]:
    """Print errors of writing in every process, as accelerate shows those of the first only.

    Raises:
        InputError: instead of an OSError.
    """
    try:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"out_dir={folder}: {error}; complete shards are kept, so start again to continue"
            ) from error
    except InputError as error:
        if not state.is_main_process:
            print(f"error in process {state.process_index}: {error}", file=sys.stderr)
        raise


def write_shards(work: CaptureJob, state: PartialState) -> None:
    """Write this process's incomplete shards; the first process also writes the output head."""
    own_shards = work.shards[state.process_index :: state.num_processes]
    quiet = not state.is_main_process
    checked = tqdm(
        own_shards, desc="checking what is there", disable=quiet, unit="shard", leave=False
    )
    todo = [shard for shard in checked if not is_shard_whole(work.folder, shard.name)]
    target_folder = work.folder / TARGET_FOLDER
    lacks_head = state.is_main_process and not target_folder.is_dir()
    if not todo and not lacks_head:
        return
    target: EmbeddingsAndOutputHead
    if work.config.target.engine:
        target = RemoteTarget.from_config(work.config.target, torch.device("cpu"))
    else:
        target = load_target(work.config.target, state.device)
    print_notes(try_generation_config(target))
    for packed in work.packed_by_split.values():
        packed.check_token_ids(target)
    if lacks_head:
        save_embeddings_and_head(target, target_folder)
    total, layers = sum(shard.num_tokens for shard in todo), work.plan.contents.layers
    text = find_longest_document(work.packed_by_split["train"])
    if state.is_main_process:
        print(f"{total:,} tokens to read; writing hidden states to {work.folder}")
    with (
        open_source(work.config.target, target, layers, text) as source,
        ShardWriterPool() as writers,
        tqdm(total=total, desc="capturing", unit="token", unit_scale=True, disable=quiet) as bar,
    ):
        if state.num_processes > 1:
            bar.set_postfix_str(f"each of {state.num_processes} processes")
        for shard in todo:
            capture_shard(work, shard, target, source, writers, bar)


def save_embeddings_and_head(target: EmbeddingsAndOutputHead, folder: Path) -> None:
    """Write embedding and output head, and check that they give the target's logits.

    Raises:
        InputError: they give other logits, or cannot be written.
    """
    target.save(folder)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, target.hidden_size, generator=generator).to(target.device)
    with torch.no_grad():
        same = torch.equal(
            target.compute_logits(states),
            EmbeddingsAndOutputHead.from_folder(folder, target.device).compute_logits(states),
        )
    if not same:
        shutil.rmtree(folder)
        raise InputError(
            f"target.path={target.name}: its output head ({type(target.output_head).__name__}) is "
            "more than a projection and cannot be stored; train without data.features"
        )


ComputeStates = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Function that computes hidden states. It takes a batch of packed sequences by name ([B, T]
tensors on the CPU) and returns `hidden_states` and one `layers.{i}` for each stored layer, each
[B, T, D] of any dtype."""


@dataclass(frozen=True)
class StatesSource:
    """Compute the target's states of texts, and the target's own answers."""

    compute_states: ComputeStates
    texts: AnswerSource

    @classmethod
    def from_target(cls, target: Target, layers: tuple[int, ...]) -> "StatesSource":
        """Make a source that runs a target in this process."""

        def states_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
            documents = Documents.from_ids(batch["document_ids"]).to_device(target.device)
            ids, positions = (
                batch[name].to(target.device, non_blocking=True)
                for name in ("input_ids", "position_ids")
            )
            output = target.encode_documents(ids, positions, documents, FeatureLayers(layers))
            return {HIDDEN_STATES: output.hidden_states} | {
                f"layers.{index}": states for index, states in output.layers.items()
            }

        return cls(states_of, LocalAnswerSource(target))


@contextmanager
def open_source(
    config: TargetConfig, target: EmbeddingsAndOutputHead, layers: tuple[int, ...], text: list[int]
) -> Iterator[StatesSource]:
    """Open a source of states and answers: a target in this process, or serving engines.

    Args:
        config: settings with the engines.
        target: complete target, or the parts that engines leave to this process.
        layers: layers to read.
        text: token ids of the data, to test engines with.

    Raises:
        InputError: an engine does not write these states.
    """
    if isinstance(target, Target):
        yield StatesSource.from_target(target, layers)
        return
    assert isinstance(target, RemoteTarget)
    with open_states_pool(config, target, layers, text, target.final_norm) as pool:

        def states_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
            names, columns = batch.keys(), batch.values()
            rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
            read = list(pool.stream_sequence_states(rows))
            return {name: torch.stack([states[name] for states in read]) for name in read[0]}

        yield StatesSource(states_of, EngineAnswerSource(pool, target))


def capture_shard(
    work: CaptureJob,
    shard: PlannedShard,
    target: EmbeddingsAndOutputHead,
    source: StatesSource,
    writers: ShardWriterPool,
    bar: tqdm,
) -> None:
    """Compute the states of the sequences of a shard, and hand them to a writer."""
    contents = work.plan.contents
    num_bytes = shard.num_tokens * contents.bytes_per_token
    copies = HostCopier(target.device, work.config.micro_batch_size, num_bytes)
    sequences = []
    for batch in iter_batches(work, shard, source.texts):
        writers.raise_job_error()
        states = source.compute_states(batch)
        for number, num_tokens in enumerate((batch["document_ids"] >= 0).sum(1).tolist()):
            tokens = {f.name: batch[f.name][number, :num_tokens].to(f.dtype) for f in TOKEN_FIELDS}
            real = {name: each[number, :num_tokens] for name, each in states.items()}
            stored = build_stored_tensors(target, contents, real, tokens)
            sequences.append((tokens, copies.start_copy(stored)))
            bar.update(num_tokens)

    def write() -> None:
        tensors = [tokens | wait_for_tensors() for tokens, wait_for_tensors in sequences]
        write_shard(work.folder, shard.name, contents.tensor_specs, tensors)

    writers.submit_job(write)


def iter_batches(
    work: CaptureJob, shard: PlannedShard, texts: AnswerSource
) -> Iterator[dict[str, Tensor]]:
    """Yield the sequences of a shard, in batches [B, T] that run together."""
    if shard.split == "replay":
        prompts = work.prompts[shard.first : shard.last]
        answers = dict(texts.stream_answers(prompts, evaluation.MAX_REPLAY_TOKENS))
        for number, prompt in enumerate(prompts):
            # A packed sequence of one document, without padding.
            ids = torch.tensor([prompt + answers[number]])
            places = torch.arange(ids.shape[1])[None]
            batch = {"input_ids": ids, "loss_mask": places >= len(prompt)}
            yield batch | {"position_ids": places, "document_ids": torch.zeros_like(ids)}
        return
    size, packed = work.config.micro_batch_size, work.packed_by_split[shard.split]
    for first in range(shard.first, shard.last, size):
        yield stack_sequences(packed, [*range(first, min(first + size, shard.last))])


def build_stored_tensors(
    target: EmbeddingsAndOutputHead,
    contents: StoreContents,
    states: Mapping[str, Tensor],
    tokens: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Build the tensors that a store holds of a sequence, on the target's device.

    Args:
        target: target with an output head.
        contents: contents of the store.
        states: [n, D] hidden states by name.
        tokens: [n] ids, documents and masks, without padding.
    """
    tensors: dict[str, Tensor] = {}
    for name in contents.state_names:
        tensors[name], scale = quantize_states(states[name].to(target.device), contents.format)
        if scale is not None:
            tensors[name + SCALE] = scale
    if contents.top_k:
        # Losses compare heads with the target wherever a token of the document follows.
        asked = tokens["document_ids"].roll(-1) == tokens["document_ids"]
        asked[-1] = False
        tensors |= compute_top_k(
            target, states[HIDDEN_STATES].to(target.device), contents.top_k, asked
        )
    return tensors


@torch.no_grad()
def compute_top_k(
    target: EmbeddingsAndOutputHead, hidden_states: Tensor, k: int, asked: Tensor
) -> dict[str, Tensor]:
    """Compute the target's likeliest tokens, where a loss will ask for them.

    Args:
        target: target with an output head.
        hidden_states: [n, D], after the final norm.
        k: number of tokens, at most V.
        asked: [n] bool, on the CPU: tokens where a loss asks. Elsewhere the teacher gives every
            token probability 0.

    Returns:
        [n, k] int32 ids, likeliest first, and [n, k] float16 log-probabilities over all V tokens.
    """
    shape, device = (len(hidden_states), k), hidden_states.device
    ids = torch.zeros(shape, dtype=torch.int32, device=device)
    log_probs = torch.full(shape, NO_PROBABILITY, dtype=torch.float16, device=device)
    for places in asked.nonzero().squeeze(1).to(device, non_blocking=True).split(ROWS_PER_CHUNK):
        logits = target.compute_logits(hidden_states[places]).float()
        best, which = fast_topk(logits, k, GROUP)
        ids[places] = which.int()
        log_probs[places] = (best - logits.logsumexp(-1, keepdim=True)).half()
    return {TEACHER_IDS: ids, TEACHER_LOG_PROBS: log_probs}


def write_manifest(work: CaptureJob, state: PartialState) -> None:
    """Write the manifest once every shard is complete.

    Raises:
        InputError: shards are missing because another machine writes elsewhere.
    """
    folder = work.folder
    missing = [shard.name for shard in work.shards if not (folder / f"{shard.name}.json").exists()]
    if missing:
        raise InputError(
            f"out_dir={folder}: {len(missing)} of {len(work.shards)} shards are not here, e.g. "
            f"{missing[0]}; name a folder that all machines see"
        )
    stored_target = EmbeddingsAndOutputHead.from_folder(folder / TARGET_FOLDER, torch.device("cpu"))
    counts = {
        name: packed.count_token_ids(stored_target.vocab_size)
        for name, packed in work.packed_by_split.items()
    }
    retry_io(partial(write_atomically, folder / TOKEN_COUNTS, save(counts)))
    entries = []
    for shard in work.shards:
        index = ShardIndex.from_folder(folder, shard.name)
        entries.append(ShardEntry(shard.name, shard.split, index.size, index.checksum))
    prompts = json.dumps(work.packed_by_split["train"].prompts.to_json())
    retry_io(partial(write_atomically, folder / PROMPTS_FILE, prompts))
    files = {
        name: retry_io(partial(compute_file_checksum, folder / name))
        for name in (EMBEDDINGS_AND_HEAD, TOKEN_COUNTS, PROMPTS_FILE)
    }
    origin = collect_provenance(work.config, stored_target.name, work.report)
    tokenizer = load_target_tokenizer(work.config.target)
    target = describe_target(work.config, tokenizer, state.device, loaded=True)
    Manifest(replace(work.plan, target=target), entries, files, origin).save(folder)


if __name__ == "__main__":
    COMMAND.run(capture)
