"""Runs a target once over a dataset and stores the hidden states that draft heads read.

    accelerate launch scripts/capture.py target.path=Qwen/Qwen3-8B data.path=chats.jsonl
    accelerate launch train/eagle.py data.features=outputs/features

Training then needs neither the target nor the data. Each process writes its own shards; on several
machines the folder must be visible to all. A second start continues.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command import run_record as following
from conf.command.entry import Command
from conf.settings.scripts import CaptureRun
from eval.preflight_checks import check_inputs

COMMAND = Command(__doc__, CaptureRun, "capture", check=check_inputs)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import torch
from accelerate import PartialState
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from conf.command.run_record import collect_provenance
from conf.errors import InputError
from conf.files import compute_file_checksum, lock_file, make_folder, retry_io, write_atomically
from data.embedded import fill_default_paths
from data.features.store_format import (
    EMBEDDINGS_AND_HEAD,
    TOKEN_COUNTS,
    Manifest,
    ShardEntry,
    ShardIndex,
    is_shard_whole,
)
from data.features.store_writer import (
    SHARD_BYTES,
    HostCopier,
    PlannedShard,
    ShardWriterPool,
    write_shard,
)
from eval.decode.generation_config import try_generation_config
from eval.measure.measurement import join_processes
from eval.measure.target_answers import AnswerSource
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.load import load_config_and_tokenizer, load_target
from heads.target_model.remote import RemoteTarget
from scripts.store.plan import CaptureJob, check_disk, describe_target, plan_capture
from scripts.store.states import (
    StatesSource,
    build_stored_tensors,
    open_source,
    select_token_fields,
)
from train.loop import evaluation as replay
from train.loop.sources import find_longest_document

TARGET_FOLDER = Path(EMBEDDINGS_AND_HEAD).parent


def main(config: CaptureRun) -> None:
    """Write a store to `out_dir`, or its missing and damaged shards."""
    capture(config, SHARD_BYTES)


def capture(config: CaptureRun, shard_bytes: int) -> None:
    """Run `main` with shards of any size."""
    check_inputs(config)
    state = join_processes()
    fill_default_paths(config)
    work = plan_capture(config, state, shard_bytes)
    work.plan.check_folder(work.folder)
    check_disk(work, print_sizes=state.is_main_process)
    state.wait_for_everyone()  # all have read the folder
    make_folder(work.folder)
    lock = lock_file(work.folder / ".lock") if state.is_main_process else nullcontext()
    with lock, report_write_errors(work.folder, state):
        if state.is_main_process:
            work.plan.save(work.folder)
        state.wait_for_everyone()
        write_shards(work, state)
        state.wait_for_everyone()
        if state.is_main_process:
            write_manifest(work, state)
    if state.is_main_process:
        print(f"features saved to {work.folder}")
        following.print_next_command("capture", {"data.features": work.folder})


@contextmanager
def report_write_errors(folder: Path, state: PartialState) -> Iterator[None]:
    """Also name files that could not be written in processes other than the first.

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
    mine = work.shards[state.process_index :: state.num_processes]
    quiet = not state.is_main_process
    checked = tqdm(mine, desc="checking what is there", disable=quiet, unit="shard", leave=False)
    todo = [shard for shard in checked if not is_shard_whole(work.folder, shard.name)]
    of_target = work.folder / TARGET_FOLDER
    lacks_head = state.is_main_process and not of_target.is_dir()
    if not todo and not lacks_head:
        return
    target = load_capture_target(work.config, state.device)
    for packed in work.packed_by_split.values():
        packed.check_token_ids(target)
    if lacks_head:
        save_embeddings_and_head(target, of_target)
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


def load_capture_target(config: CaptureRun, device: torch.device) -> EmbeddingsAndOutputHead:
    """The complete target, or only the parts that an engine leaves to us."""
    target: EmbeddingsAndOutputHead
    if config.target.engine:
        target = RemoteTarget.from_config(config.target, torch.device("cpu"))
    else:
        target = load_target(config.target, device)
    told = try_generation_config(target)
    if told is not None:
        print(told, file=sys.stderr)
    return target


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


def capture_shard(
    work: CaptureJob,
    shard: PlannedShard,
    target: EmbeddingsAndOutputHead,
    source: StatesSource,
    writers: ShardWriterPool,
    bar: tqdm,
) -> None:
    """Compute the states of the sequences of a shard and pass them to a writer."""
    contents = work.plan.contents
    num_bytes = shard.num_tokens * contents.bytes_per_token
    copies = HostCopier(target.device, work.config.micro_batch_size, num_bytes)
    sequences = []
    for rows in iter_batches(work, shard, source.texts):
        writers.raise_job_error()
        states = source.compute_states(
            {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        )
        for number, row in enumerate(rows):
            tokens = select_token_fields(row)
            num_tokens = len(tokens["input_ids"])
            own = {name: each[number, :num_tokens] for name, each in states.items()}
            sequences.append(
                (tokens, copies.start_copy(build_stored_tensors(target, contents, own, tokens)))
            )
            bar.update(num_tokens)

    def write() -> None:
        there = [tokens | copied.wait_for_tensors() for tokens, copied in sequences]
        write_shard(work.folder, shard.name, contents.tensor_specs, there)

    writers.submit_job(write)


def iter_batches(
    work: CaptureJob, shard: PlannedShard, texts: AnswerSource
) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the sequences of a shard, in batches that run together."""
    if shard.split == "replay":
        prompts = work.prompts[shard.first : shard.last]
        answers = dict(texts.stream_answers(prompts, replay.MAX_REPLAY_TOKENS))
        for number, prompt in enumerate(prompts):
            answer = answers[number]
            # A packed sequence of one document, without padding.
            ids = torch.tensor(prompt + answer)
            places = torch.arange(len(ids))
            row = {"input_ids": ids, "loss_mask": places >= len(prompt)}
            yield [row | {"position_ids": places, "document_ids": torch.zeros_like(ids)}]
        return
    size = work.config.micro_batch_size
    for first in range(shard.first, shard.last, size):
        last = min(first + size, shard.last)
        yield [work.packed_by_split[shard.split][index] for index in range(first, last)]


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
    files = {
        name: retry_io(partial(compute_file_checksum, folder / name))
        for name in (EMBEDDINGS_AND_HEAD, TOKEN_COUNTS)
    }
    origin = collect_provenance(work.config, stored_target.name, work.report)
    tokenizer = load_config_and_tokenizer(work.config.target)[1]
    target = describe_target(work.config, tokenizer, state.device, loaded=True)
    Manifest(replace(work.plan, target=target), entries, files, origin).save(folder)


if __name__ == "__main__":
    COMMAND.run(main)
