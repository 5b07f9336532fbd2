"""Shared part of the training commands: checks, data, plan, loop, last message."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType

from conf.command import run_record as following
from conf.command.entry import Command, head_recipe
from conf.command.environment import check_compile, find_missing_toolchain
from conf.command.run_record import collect_provenance, make_fingerprint, to_json
from conf.errors import InputError
from conf.settings.target import TargetConfig
from conf.settings.training import TrainConfig, TrainRun
from data.embedded import fill_default_paths
from data.features.store_reader import FeatureStore, TrainingData
from data.prepared.packing import PackedDataset
from data.prepared.prepare import DataReport, prepare_datasets
from data.servers.http_client import Endpoint
from eval.decode.generation_config import apply_generation_config
from eval.measure.engine_answers import EngineAnswerSource, build_request_settings, open_states_pool
from eval.measure.target_answers import LocalAnswerSource
from eval.preflight_checks import check_training
from heads.draft_head import DraftHead
from heads.kinds import find_kind_name, load_head
from heads.target_model.dequantise import resolve_target_folder
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.identity import TargetIdentity, format_target_change, identify_target
from heads.target_model.kernels import kernel_notice
from heads.target_model.load import load_target
from heads.target_model.model import FeatureLayers, Target
from heads.target_model.remote import RemoteTarget
from heads.vocab import DraftVocab, format_coverage
from train.batch.prefetch import Dataset
from train.loop import loop, memory
from train.loop.auto_settings import format_run_length, resolve_length, resolve_optimizer
from train.loop.loop import Evaluate, Outcome, TrainingJob
from train.loop.replay import HeldoutReplay, Replay, StoredReplay, select_heldout_prompts
from train.loop.rollouts import API_KEY, Rollouts
from train.loop.served import ServedSequences, count_prefetch_steps, find_longest_document
from train.loop.stored import (
    check_feature_layers,
    identity_of,
    load_embeddings_and_head,
    load_store,
)
from train.loss.sizes import LaunchSpec
from train.objective import Objective
from train.parallel import processes
from train.parallel.placement import strategy_name

MIN_COMPILED_LOGITS = 3e10
"""Logits from which compiling pays on a CPU: it costs about 20 s and saves 4 ns per logit of
EAGLE's loss."""

Build = Callable[[Any, Any], tuple[Any, list[str]]]
"""Function from the target (`EmbeddingsAndHead` beside a feature store) and the training data to
the objective and the lines to print about it."""


@dataclass(frozen=True)
class TrainingSource:
    """Target and data to train a head on.

    Attributes:
        target: the whole target, or its ends beside a feature store.
        identity: identity of the target.
        checksum: checksum of all training data.
        train: packed sequences, with or without the target's hidden states.
        heldout: packed sequences to evaluate on.
        report: counts of the prepared data.
        lines: lines to print about the data.
        make_replay: makes a replay of tau on held-out prompts from a depth and the layers the head
            reads.
        served_by: names the servers that give hidden states, if any.
        prompts: held-out prompts for these servers to answer.
        server_lines: lines about these servers.
    """

    target: EmbeddingsAndOutputHead
    identity: TargetIdentity
    checksum: str
    train: TrainingData | ServedSequences
    heldout: TrainingData | ServedSequences
    report: DataReport
    lines: list[str]
    make_replay: Callable[[int, FeatureLayers], Replay] | None
    served_by: TargetConfig | None = None
    prompts: Sequence[list[int]] = ()
    server_lines: Sequence[str] = ()

    @contextmanager
    def open_states(self, taps: FeatureLayers) -> Iterator["TrainingSource"]:
        """Add the hidden states that a head reads, if servers give them.

        Raises:
            InputError: a server does not give them.
        """
        if self.served_by is None:
            yield self
            return
        target = self.target
        assert isinstance(target, RemoteTarget)
        assert isinstance(self.train, PackedDataset)
        assert isinstance(self.heldout, PackedDataset)
        layers = sorted({*taps.layers, target.num_layers})
        text = find_longest_document(self.train)
        with open_states_pool(self.served_by, target, layers, text) as pool:
            replay = partial(HeldoutReplay, EngineAnswerSource(pool, target), list(self.prompts))
            train, heldout = ServedSequences(self.train, pool), ServedSequences(self.heldout, pool)
            yield replace(
                self,
                train=train,
                heldout=heldout,
                make_replay=replay,
                server_lines=pool.server_lines,
            )

    def count_prefetch_steps(self, num_tokens: int) -> int:
        """Optimizer steps to load in advance, with `num_tokens` tokens per step and process."""
        if not isinstance(self.train, ServedSequences):
            return 1
        return count_prefetch_steps(self.train.pool, num_tokens)


Measure = Callable[[Any, TrainingSource, Objective], Evaluate | None]


@dataclass(frozen=True)
class TrainingCommand:
    """`main` of a training command: trains to `out_dir/head`.

    Attributes:
        head: kind of the head.
        objective: makes the objective from a head, its target and the settings `head`.
        command: command as its script declares it.
    """

    head: type[DraftHead]
    objective: Callable[[Any, Any, Any], Objective]
    command: Command[Any]

    def __call__(self, config: TrainRun) -> None:
        """Train a head with a command's settings."""
        train_head(config, partial(self.build_objective, config))

    def build_objective(
        self, config: Any, target: EmbeddingsAndOutputHead, data: TrainingData
    ) -> tuple[Objective, list[str]]:
        """Make the objective of a head, and lines about it."""
        head, lines = self.make_head(config, target, data)
        objective = self.objective(head, target, config.head)
        trained = sum(each.numel() for each in head.parameters() if each.requires_grad)
        return objective, [
            *lines,
            f"head: {objective.description}, {trained / 1e6:.1f} M parameters",
        ]

    def make_head(
        self, config: Any, target: EmbeddingsAndOutputHead, data: TrainingData
    ) -> tuple[Any, list[str]]:
        """Make a new head, or load a saved one that fits the target, with lines about its ids.

        Raises:
            InputError: the saved head does not fit, is of another kind, was pruned although its
                kind learns all ids, or has a mask token that the data use.
        """
        settings, always = config.head, target.special_ids
        counts = cache(lambda: data.count_token_ids(target.vocab_size))
        chooses = hasattr(settings, "draft_vocab_size")
        head: Any
        if settings.path is not None:
            head = self._load_saved_head(settings).attach(target)
            if not (chooses or head.vocab.full):
                raise InputError(
                    f"head.path={settings.path}: drafts {len(head.vocab.ids)} of {head.vocab.size} "
                    f"ids, but {head.variants[head.variant].title} learn all; name the head before "
                    "pruning"
                )
        else:
            vocab = DraftVocab.make_full(target.vocab_size)
            if chooses and settings.draft_vocab_size is not None:
                vocab = DraftVocab.from_counts(counts(), settings.draft_vocab_size, always)
            head = self.head.from_settings(target, settings, vocab, config.seed)
            mask = getattr(head.config, "mask_token_id", None)
            if mask is not None and mask < len(counts()) and counts()[mask]:
                raise InputError(
                    f"head.mask_token_id={mask}: occurs {int(counts()[mask])} times in the data; "
                    "name a token that no text uses"
                )
        if not head.find_output_heads() and not target.output_head.weight.is_floating_point():
            raise InputError(
                f"target.path={target.name}: its output head is quantised, but this head trains "
                "through it; name the model before quantisation (target.quantization keeps the "
                "output head)"
            )
        full = head.vocab.is_full
        return head, [] if full else format_coverage(counts(), head.vocab.to("cpu"), always)

    def _load_saved_head(self, settings: Any) -> DraftHead:
        layers = getattr(settings, "layers", None)
        head = load_head(settings.path, settings.revision, layers)
        if type(head) is not self.head:
            raise InputError(
                f"head.path={settings.path}: {head.name_with_article}, but this command trains "
                f"{self.head.name_with_article}; use train/{find_kind_name(head)}.py"
            )
        return head

    def build_default_objective(
        self, head: DraftHead, target: EmbeddingsAndOutputHead
    ) -> Objective:
        """Make an objective with the settings of the head's recipe, for benchmarks."""
        schema, name = type(self.command.schema().head), head.variant
        return self.objective(
            head, target, head_recipe(schema, name) if name in self.command.recipes else schema()
        )


def build_replay_evaluation(
    _config: TrainRun, source: TrainingSource, objective: Objective
) -> Evaluate | None:
    """Replay tau on held-out prompts, if there are any."""
    assert source.make_replay is not None
    replay = source.make_replay(objective.depth, objective.head.taps)
    return replay if replay.prompts else None


def train_head(config: TrainRun, build: Build, measure: Measure = build_replay_evaluation) -> None:
    """Train the objective that `build` makes, to `out_dir/head`.

    Args:
        config: settings of the command.
        build: function that makes the objective.
        measure: function that makes further figures for evaluations.
    """
    out_dir = Path(config.out_dir)
    check_training(config)
    if config.data.features is None and config.target.path is not None:
        resolve_target_folder(
            config.target
        )  # before ZeRO-3, which shards weights while they are read
    store = None if config.data.features is None else load_store(config.data, config.target)
    accelerator = processes.start_accelerator(config.train)
    check_compile("train.compile", config.train.compile, accelerator.device.type)
    source = (
        load_target_source(config, accelerator)
        if store is None
        else load_store_source(config, store, accelerator.device)
    )
    length = len(source.train[0]["input_ids"]) if len(source.train) else config.data.max_length
    size, world = len(source.train), accelerator.num_processes
    config.train = resolve_length(config.train, size, length, world)
    head: Any = config.head  # type: ignore[attr-defined]  # settings of the kind
    objective, lines = build(source.target, source.train)
    if head.path is not None:
        other = format_target_change("head.path", head.path, head.revision, source.identity)
        lines += [] if other is None else [other]
    deepspeed = accelerator.distributed_type is DistributedType.DEEPSPEED
    config.train, optimizer = resolve_optimizer(
        config.train, objective, deepspeed, trained=head.path is not None
    )
    compiled = needs_compile(config.train, length, objective, accelerator)
    if compiled and (lacking := find_missing_toolchain(accelerator.device.type)):
        lines.append(f"not compiled, which is slower: torch.compile needs {lacking}")
        compiled = False
    if compiled:
        objective.compile_parts()
    if store is not None:
        check_feature_layers(store, objective.head.taps)
    if accelerator.is_main_process:
        where = f"{accelerator.num_processes} process(es), {accelerator.device.type}"
        where += ", compiled on first use" if compiled else ""
        lines_of_run = [*source.lines, *kernel_notice(accelerator.device), *lines, optimizer]
        lines_of_run.append(format_run_length(config.train, size, length))
        print_plan(config, source.target.name, lines_of_run, where)
    parts = estimate_and_check_memory(accelerator, objective, config.train, source.train)
    with source.open_states(objective.head.taps) as opened_source:
        rollouts = rollouts_of(config, opened_source)
        answers = {} if rollouts is None else {"answers": rollouts.generation_settings}
        job = TrainingJob(
            config=config.train,
            log=config.log,
            seed=config.seed,
            out_dir=out_dir,
            objective=objective,
            train=opened_source.train,
            heldout=opened_source.heldout,
            provenance=collect_provenance(config, source.target.name, source.report)
            | {
                "target_identity": to_json(source.identity),
                "about_head": [*lines, *opened_source.server_lines],
            },
            fingerprint=make_fingerprint(
                target=source.identity, data={"checksum": source.checksum}, **answers
            ),
            has_trained_head=head.path is not None,
            rollouts=rollouts,
            evaluate=measure(config, opened_source, objective),
            num_prefetch_steps=opened_source.count_prefetch_steps(
                config.train.batch_size * length // world
            ),
            has_served_states=source.served_by is not None,
        )
        outcome = loop.fit_head(accelerator, job)
    if accelerator.is_main_process:
        if parts and accelerator.device.type == "cuda":
            print(memory.format_measured_memory(parts, accelerator.device))  # noqa: T201
        print_end(outcome, out_dir)
        if outcome.finished:
            following.print_next_command(
                "train", build_measure_settings(config, source.target.name)
            )
    processes.end_processes(accelerator)


def build_measure_settings(config: TrainRun, target: str) -> dict[str, Any]:
    """The settings under which a measurement takes the trained head and its target."""
    out_dir = Path(config.out_dir)
    adapter = out_dir / "adapter"  # of train/medusa2.py
    own = {"target.adapter": adapter} if adapter.is_dir() else {}
    return {
        "head.path": out_dir / "head",
        **{"target.path": target, **following.collect_changed_settings(config, "target"), **own},
        **following.prompts_for(target),
        "out_dir": config.out_dir,
    }


def rollouts_of(config: TrainRun, source: TrainingSource) -> Rollouts | None:
    """Make rounds of the target's own answers, if asked for."""
    if config.rollout.steps is None:
        return None
    size, folder = config.train.batch_size, Path(config.out_dir) / "rollouts"
    url, key = config.rollout.endpoint, os.environ.get(API_KEY)
    server = None if url is None else Endpoint(url, api_key=key, setting="rollout.endpoint")
    served = source.train if isinstance(source.train, ServedSequences) else None
    data = source.train if served is None else served.rows
    assert isinstance(data, PackedDataset)  # settings refuse a store
    made_of = make_fingerprint(target=source.identity)
    return Rollouts(
        config.rollout, source.target, data, size, config.seed, folder, server, served, made_of
    )


def estimate_and_check_memory(
    accelerator: Accelerator, objective: Objective, config: TrainConfig, train_data: Dataset
) -> memory.BytesByPart | None:
    """Estimate the memory of a run by part, if a formula is known; rank 0 prints it.

    Raises:
        InputError: the device has too little.
    """
    if not len(train_data):
        return None
    length = len(train_data[0]["input_ids"])
    setting = LaunchSpec.from_config(config, length, strategy_name(accelerator), accelerator)
    parts = memory.estimate_memory(objective, setting)
    total = memory.get_available_bytes(accelerator.device)
    if parts is not None:
        if accelerator.is_main_process:
            print(memory.format_memory(parts, total))  # noqa: T201
        if total is not None:
            memory.check_memory_fits(parts, total)
    return parts


def load_target_source(config: TrainRun, accelerator: Accelerator) -> TrainingSource:
    """Load the target, or its ends if engines run its layers, and prepare the data."""
    fill_default_paths(config)
    target, told = load_training_target(config, accelerator.device)
    train_data, heldout, report = prepare_datasets(
        config.data, target.tokenizer, config.seed, accelerator.is_main_process
    )
    for data in (train_data, heldout):
        data.check_token_ids(target)
    processes.wait_for_processes()  # other nodes may read slower disks
    prompts = select_heldout_prompts(heldout, config.train.num_replay_prompts)
    lines = [*told, *report.format_lines()]
    replay = None
    if isinstance(target, Target):
        replay = partial(HeldoutReplay, LocalAnswerSource(target), prompts)
        lines.append(f"attention of the target: {target.attention_description}")
    identity = identify_target(config.target, target.tokenizer, target.dtype)
    checksum = train_data.checksum
    return TrainingSource(
        target, identity, checksum, train_data, heldout, report, lines, replay,
        config.target if config.target.engine else None, prompts,
    )  # fmt: skip


def load_training_target(
    config: TrainRun, device: torch.device
) -> tuple[EmbeddingsAndOutputHead, list[str]]:
    """Load the target, whole or without the layers that engines run, and lines about it.

    Raises:
        InputError: the target must answer, but its generation config cannot be followed.
    """
    urls = config.target.engine
    target = (RemoteTarget.from_config if urls else load_target)(config.target, device)
    lines = [f"hidden states: from {', '.join(urls)}"] if urls else []
    try:
        apply_generation_config(target)
        if urls:
            build_request_settings(target)
    except InputError as error:
        if config.rollout.steps is not None:
            raise
        apply_generation_config(target, plain=True)
        lines.append(f"tau is measured on plain greedy answers: {error}")
    return target, lines


def needs_compile(
    config: TrainConfig, length: int, objective: Objective, accelerator: Accelerator
) -> bool:
    """Tell whether to compile: `train.compile`, or if unset on CUDA and in long runs on a CPU.

    Args:
        config: settings without `auto`, epochs and batch tokens.
        length: tokens of a sequence; a feature store has its own length.
        objective: the loss to compile.
        accelerator: accelerator of the run.
    """
    if config.compile is not None:
        return config.compile
    if accelerator.device.type == "cuda":
        return True
    sequences = config.max_steps * config.batch_size // accelerator.num_processes
    return sequences * length * objective.loss_logits_per_token > MIN_COMPILED_LOGITS


def load_store_source(
    config: TrainRun, store: FeatureStore, device: torch.device
) -> TrainingSource:
    """Take target and data from a feature store."""
    ends = load_embeddings_and_head(store, device)
    replay = partial(StoredReplay, ends, store.replay, config.train.num_replay_prompts)
    lines = [f"features: {store.folder} ({store.manifest.plan.contents.format_line()})"]
    for data in (store.train, store.heldout, store.replay):
        data.check_token_ids(ends)
    report = store.manifest.report
    plan = store.manifest.plan
    return TrainingSource(
        ends, identity_of(plan), plan.splits["train"].checksum, store.train, store.heldout, report,
        [*lines, *report.format_lines()], replay,
    )  # fmt: skip


def print_plan(config: TrainRun, target: str, lines: list[str], where: str) -> None:
    """Print the target, the data and the length of the training."""
    print(f"target: {target}")  # noqa: T201
    for line in lines:
        print(line)  # noqa: T201
    print(f"training: {config.train.max_steps} steps on {where}, to {config.out_dir}")  # noqa: T201


def print_end(outcome: Outcome, out_dir: Path) -> None:
    """Print where the head is, or how to continue."""
    if outcome.finished:
        tau = outcome.evaluation.get("eval/tau")
        measured = (
            "" if tau is None else f", tau {tau:.2f} on prompts held out of data.path (chain)"
        )
        change = outcome.evaluation.get("eval/target_change_percent")
        if change is not None:
            measured += f", the target's own held-out loss {change:+.2f}%"
        if not outcome.evaluation:
            measured = "; its last evaluation failed, see above"
        print(f"head saved to {out_dir / 'head'}{measured}")  # noqa: T201
    else:
        print(f"stopped at step {outcome.step}; continue with train.resume=auto")  # noqa: T201
