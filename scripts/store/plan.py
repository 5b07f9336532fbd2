"""Plans a capture: the contents of the store, its shards, and their disk space."""

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from conf.command.run_record import to_json
from conf.errors import InputError
from conf.files import find_local_path
from conf.settings.data import StateFormat, TeacherKind
from conf.settings.scripts import CaptureRun
from data.features.store_format import SPLITS, Split, StoreContents, StorePlan
from data.features.store_writer import PlannedShard, plan_shards
from data.prepared.dataset_cache import NON_CONTENT_SETTINGS
from data.prepared.packing import PackedDataset
from data.prepared.prepare import DataReport, prepare_datasets
from heads.kinds import HEADS
from heads.target_model import architecture as sizes
from heads.target_model.identity import identify_target
from heads.target_model.load import load_config_and_tokenizer, load_generation_config, resolve_dtype
from train.loop.evaluation import MAX_REPLAY_TOKENS, select_heldout_prompts

GIB = 2**30


@dataclass(frozen=True)
class CaptureJob:
    """One capture: its data, and the place of each part.

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
    """Tokenise, pack and plan; this does not need the target's weights yet.

    Raises:
        InputError: bad data, or layers that the target does not have.
    """
    model_config, tokenizer = load_config_and_tokenizer(config.target)
    contents = choose_contents(config, model_config.get_text_config())
    train, heldout, report = prepare_datasets(
        config.data, tokenizer, config.seed, state.is_main_process
    )
    sets = {"train": train, "heldout": heldout}
    prompts = select_heldout_prompts(heldout, config.num_replay_prompts)
    lengths = {name: packed.parse_accepted_lengths for name, packed in sets.items()}
    lengths["replay"] = [len(prompt) + MAX_REPLAY_TOKENS for prompt in prompts]
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
    data = {
        name: value
        for name, value in to_json(config.data).items()
        if name not in NON_CONTENT_SETTINGS
    }
    plan = StorePlan(
        target=describe_target(config, tokenizer, state.device, loaded=False),
        contents=contents,
        data=data,
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
    num_layers = sizes.count_layers(model_config)
    layers = config.layers
    if layers is None:
        asked = filter(None, (head.default_layers for head in HEADS.values()))
        layers = sorted({layer for usual in asked for layer in usual(num_layers, "layers")})
    if [i for i in layers if not 0 <= i <= num_layers] or len(set(layers)) < len(layers):
        raise InputError(
            f"layers={layers}: target.path={config.target.path} has hidden states 0..{num_layers}; "
            "name some of them, each once"
        )
    width, ends = sizes.find_hidden_size(model_config), sizes.find_embedding_size(model_config)
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
    """Identity of the target, and how it runs.

    Args:
        config: settings with the target's location.
        tokenizer: the target's tokenizer.
        device: device of the pass.
        loaded: whether weights from the Hub are already on this machine.
    """
    target = config.target
    identity = identify_target(target, tokenizer, resolve_dtype(target.dtype, device))
    # The commit suffices; an adapter's is not known.
    if not (loaded or find_local_path("target.path", str(target.path))):
        identity = replace(identity, weights=None)
    if not (loaded or find_local_path("target.adapter", str(target.adapter))):
        identity = replace(identity, adapter_weights=None)
    return {
        **asdict(identity),
        "by_engine": bool(config.target.engine),
        "generation_config": load_generation_config(target)
        if config.num_replay_prompts > 0
        else None,
    }


def check_disk(work: CaptureJob, print_sizes: bool) -> None:
    """Print how much will be written, in each format, and refuse what does not fit.

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
