"""Shared part of the training commands: checks, data, plan, loop, last message.

A `TrainingCommand` is a run from its settings to its last line. Settings that are `auto`, in epochs
or in tokens become numbers here.
"""

import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType

from conf.command import run_record
from conf.command.entry import Command
from conf.command.environment import check_compile, find_missing_toolchain
from conf.command.forms import PACKAGE, ROOT, name_commands
from conf.command.run_record import collect_provenance, make_fingerprint, to_json
from conf.errors import InputError
from conf.settings.checks import AUTO
from conf.settings.training import Optimizer, Schedule, TrainConfig, TrainRun
from data.features.store_reader import FeatureStore, TrainingData
from data.prepared.packing import PackedDataset
from data.servers.http_client import Endpoint
from eval.measure.acceptance_stats import FEWEST_DIALOGUES
from eval.measure.data_statement import DataStatement, format_setting_changes
from eval.measure.verdict import COSTS, SUFFIXES, WEAK_TAU
from eval.preflight_checks import check_run_folder, check_training
from heads.draft_head import DraftHead
from heads.export.writer import list_serving_warnings
from heads.kinds import find_kind_name, load_head
from heads.target_model.dequantise import resolve_target_folder
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.identity import format_target_change
from heads.target_model.kernels import kernel_notice
from heads.vocab import DraftVocab, format_coverage, format_heldout_coverage
from train.loop import loop, memory
from train.loop.evaluation import INTERVAL, NUM_PROMPTS, format_basis, format_count
from train.loop.loop import Evaluate, Outcome, TrainingJob
from train.loop.rollouts import API_KEY, Rollouts
from train.loop.sources import (
    ServedSequences,
    TrainingSource,
    check_feature_layers,
    count_prefetch_steps,
    format_authorship,
    load_store,
    load_store_source,
    load_target_source,
)
from train.objective import LaunchSpec, Objective
from train.parallel import processes
from train.parallel.strategies import get_strategy_name

NUM_TOKENS_TO_READ = 30_000_000
MIN_NUM_EPOCHS, MAX_NUM_EPOCHS = 3.0, 10.0
"""Tokens that a run reads over all its passes, and the passes within which it does; measured in
docs/results/training.md, "Passes over the data"."""
WARMUP_FRACTION = 0.04
TRAINED_HEAD_RATE_FRACTION = 0.2
"""Fraction of the usual learning rate for a head that was trained before. At the full rate an
EAGLE-3.1 head of 2.5 million tokens fell from tau 3.18 to 3.01 in 100 steps; at a fifth it rose to
3.24."""
MIN_COMPILED_LOGITS = 3e10
"""Logits from which compiling pays on a CPU: it costs about 20 s and saves 4 ns per logit of
EAGLE's loss."""
NEEDED_TOKENS = {
    10_000_000: "that a try takes (10,000 conversations)",
    100_000_000: "that a first head takes (100,000 conversations)",
    500_000_000: "of the usual advice (500,000 conversations)",
}
"""Tokens that heads need, in conversations of 1,000 tokens; see docs/training.md."""


@dataclass(frozen=True)
class TrainingCommand:
    """`main` of a training command: trains to `out_dir/head`.

    Attributes:
        head: class of the head.
        objective: function from a head, its target and the settings `head` to the objective.
        command: command as its script declares it.
    """

    head: type[DraftHead]
    objective: Callable[[Any, Any, Any], Objective]
    command: Command[Any]

    def __call__(self, config: TrainRun) -> None:
        """Train a head with a command's settings."""
        check_training(config)
        if config.data.features is None and config.target.path is not None:
            # Before ZeRO-3, which shards weights while they are read.
            resolve_target_folder(config.target)
        store = None if config.data.features is None else load_store(config.data, config.target)
        accelerator = processes.start_accelerator(config.train)
        with processes.hold_folder(accelerator, Path(config.out_dir)):
            # Another run may have ended there.
            check_run_folder(Path(config.out_dir), config.train.resume)
            self._train_locked(config, store, accelerator)
        processes.end_processes(accelerator)

    def build_evaluation(
        self, config: Any, source: TrainingSource, objective: Objective
    ) -> Evaluate | None:
        """Build a function that replays tau on held-out prompts; None without prompts."""
        del config
        assert source.make_replay is not None
        replay = source.make_replay(objective.depth, objective.head.taps)
        return replay if replay.prompts else None

    def build_objective(
        self, config: Any, target: EmbeddingsAndOutputHead, data: Any
    ) -> tuple[Objective, list[str]]:
        """Build the objective of a head, and lines about it.

        Args:
            config: settings of the command.
            target: the target; beside a feature store, its embedding and output head.
            data: packed sequences to train on.
        """
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
        has_vocab_setting = hasattr(settings, "draft_vocab_size")
        head: Any
        if settings.path is not None:
            layers = getattr(settings, "layers", None)
            head = load_head(settings.path, settings.revision, layers)
            if type(head) is not self.head:
                raise InputError(
                    f"head.path={settings.path}: {head.name_with_article}, but this command trains "
                    f"{self.head.name_with_article}; use train/{find_kind_name(head)}.py"
                )
            head.attach(target)
            if not (has_vocab_setting or head.vocab.is_full):
                raise InputError(
                    f"head.path={settings.path}: drafts {len(head.vocab.ids)} of {head.vocab.size} "
                    f"ids, but {head.title} learn all; name the head before pruning"
                )
        else:
            vocab = DraftVocab.make_full(target.vocab_size)
            if has_vocab_setting and settings.draft_vocab_size is not None:
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

    def _train_locked(
        self, config: TrainRun, store: FeatureStore | None, accelerator: Accelerator
    ) -> None:
        """Train in a launch that holds `out_dir`."""
        device, world = accelerator.device, accelerator.num_processes
        check_compile("train.compile", config.train.compile, device.type)
        source = (
            load_target_source(config, accelerator)
            if store is None
            else load_store_source(config, store, device)
        )
        size, length = len(source.train), len(source.train[0]["input_ids"])
        config.train = resolve_length(config.train, size, length, world)
        objective, lines = self.build_objective(config, source.target, source.train)
        lines += format_vocab_check(source, objective)
        head: Any = config.head  # type: ignore[attr-defined]  # settings of the kind
        if head.path is not None:
            other = format_target_change("head.path", head.path, head.revision, source.identity)
            lines += [] if other is None else [other]
            if (earlier := DataStatement.from_head(head.path, head.revision)) is not None:
                was, is_now = f"head.path={head.path}: was trained", "is trained further"
                lines += format_setting_changes(
                    earlier.to_json(), source.statement.to_json(), was, is_now
                )
                source = replace(source, statement=source.statement.add_prompts(earlier))
        config.train, optimizer = resolve_optimizer(
            config.train,
            objective,
            deepspeed=accelerator.distributed_type is DistributedType.DEEPSPEED,
            trained=head.path is not None,
        )
        if needs_compile(config.train, length, objective, accelerator):
            if lacking := find_missing_toolchain(device.type):
                lines.append(f"not compiled, which is slower: torch.compile needs {lacking}")
            else:
                objective.compile_parts()
        if store is not None:
            check_feature_layers(store, objective.head.taps)
        num_read = min(size, config.train.num_steps * config.train.batch_size)
        num_tokens = source.report.estimate_num_tokens(num_read)
        about_data = format_data_need(num_tokens)
        if config.rollout.steps is None:
            about_data = format_authorship(source.report.path, source.identity) + about_data
        else:
            about_data.insert(0, "answers: the target writes them while it trains (rollout.steps)")
        run_length = f"training: {format_run_length(config.train, size, length)}"
        if accelerator.is_main_process:
            plan = [
                run_length,
                f"devices: {world} process(es), {device.type}, {torch.get_num_threads()} thread(s) "
                f"each{', compiled on first use' if objective.compiled else ''}; the head goes to "
                f"{config.out_dir}",
                f"target: {source.target.name}", *source.lines, *about_data,
                *kernel_notice(device), *lines,
                *list_serving_warnings(objective.head, source.target), optimizer,
            ]  # fmt: skip
            print("\n".join(plan))  # noqa: T201
        parts = estimate_and_check_memory(accelerator, objective, config.train, length)
        with source.open_states(objective.head.taps) as source:
            rollouts = make_rollouts(config, source)
            answers = {} if rollouts is None else {"answers": rollouts.generation_settings}
            provenance = collect_provenance(config, source.target.name, source.report) | {
                "trained_on": source.statement.to_json(),
                "target_identity": to_json(source.identity),
                "about_head": [run_length, *about_data, *lines, *source.server_lines],
            }
            job = TrainingJob(
                config=config.train,
                log=config.log,
                seed=config.seed,
                out_dir=Path(config.out_dir),
                objective=objective,
                train=source.train,
                heldout=source.heldout,
                provenance=provenance,
                head_documents=source.statement.build_documents(),
                fingerprint=make_fingerprint(
                    target=source.identity, data={"checksum": source.checksum}, **answers
                ),
                has_trained_head=head.path is not None,
                rollouts=rollouts,
                evaluate=self.build_evaluation(config, source, objective),
                num_prefetch_steps=count_prefetch_steps(
                    getattr(source.train, "pool", None), config.train.batch_size * length // world
                ),
            )
            outcome = loop.fit_head(accelerator, job)
        if accelerator.is_main_process:
            if parts and device.type == "cuda":
                measured = torch.cuda.max_memory_allocated(device) / 1e9
                print(  # noqa: T201
                    f"memory: {sum(parts.values()) / 1e9:.1f} GB estimated, {measured:.1f} GB "
                    "measured at most"
                )
            print_end(outcome, Path(config.out_dir), config.data.eval_path)
            if outcome.finished:
                print(f"verdict: {format_verdict(outcome.evaluation, num_tokens)}")  # noqa: T201
                run_record.print_next_command(
                    "train", build_measure_settings(config, source.target.name)
                )


def resolve_length(
    config: TrainConfig, num_sequences: int, length: int, num_processes: int
) -> TrainConfig:
    """Replace `batch_tokens`, unset `max_steps` and `warmup_steps` by sequences and steps.

    Unset `num_epochs` are `NUM_TOKENS_TO_READ` over the tokens of the data, within their limits;
    `num_epochs` becomes the passes that the steps make.

    Args:
        config: settings `train` of the run; if `batch_tokens` is unset, the processes must be able
            to share `batch_size` evenly (`processes.check_batch` has checked it).
        num_sequences: packed sequences to train on.
        length: tokens of a packed sequence.
        num_processes: number of processes of the launch.

    Raises:
        InputError: a warm-up longer than the run.
    """
    if config.batch_tokens is not None:
        share = num_processes * config.micro_batch_size
        number = share * round(config.batch_tokens / length / share)
        config = replace(config, batch_size=max(share, number), batch_tokens=None)
    if config.max_steps is None:
        num_epochs = config.num_epochs
        if num_epochs is None:
            enough = NUM_TOKENS_TO_READ / max(1, num_sequences * length)
            num_epochs = min(max(enough, MIN_NUM_EPOCHS), MAX_NUM_EPOCHS)
        num_steps = math.ceil(num_epochs * num_sequences / config.batch_size)
        config = replace(config, max_steps=max(1, num_steps))
    if config.warmup_steps is None:
        config = replace(config, warmup_steps=round(WARMUP_FRACTION * config.num_steps))
    return replace(config, num_epochs=count_epochs(config, num_sequences))


def count_epochs(config: TrainConfig, num_sequences: int) -> float:
    """Count the passes over `num_sequences` packed sequences, once the steps are known."""
    return config.num_steps * config.batch_size / num_sequences


def resolve_optimizer(
    config: TrainConfig, objective: Objective, deepspeed: bool, trained: bool = False
) -> tuple[TrainConfig, str]:
    """Replace `auto` by an optimizer, learning rates and a schedule.

    Args:
        config: settings `train` of the run.
        objective: objective with the defaults of its head.
        deepspeed: whether DeepSpeed lays out the parameters, flat, which Muon cannot read.
        trained: whether the head was trained before.

    Returns:
        The settings, with numbers for rates; and a line for the user.
    """
    optimizer = config.optimizer
    if optimizer is Optimizer.auto:
        optimizer = Optimizer.adamw if deepspeed else objective.default_optimizer
    fraction = TRAINED_HEAD_RATE_FRACTION if trained else 1.0
    given = config.learning_rate, config.adam_learning_rate
    usual = (fraction * rate for rate in objective.compute_default_rates(optimizer))
    pairs = list(zip(given, usual, strict=True))
    rate, adam = (own if value == AUTO else float(value) for value, own in pairs)
    first, other = (
        f"{own:.2g} (auto)" if value == AUTO else f"{float(value):.2g}" for value, own in pairs
    )
    line = f"optimizer: AdamW at {first}"
    if optimizer is Optimizer.muon:
        line = f"optimizer: Muon at {first} for hidden matrices, AdamW at {other} for the rest"
    config = replace(config, optimizer=optimizer, learning_rate=rate, adam_learning_rate=adam)
    if config.schedule is Schedule.auto:
        config = replace(config, schedule=objective.default_schedule)
    return config, f"{line}; schedule: {config.schedule.value}"


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
    sequences = config.num_steps * config.batch_size // accelerator.num_processes
    return sequences * length * objective.loss_logits_per_token > MIN_COMPILED_LOGITS


def estimate_and_check_memory(
    accelerator: Accelerator, objective: Objective, config: TrainConfig, length: int
) -> memory.BytesByPart | None:
    """Estimate the memory of a run on packed sequences of `length` tokens, by part, if it is known.

    Rank 0 prints the estimate.

    Raises:
        InputError: the device has too little.
    """
    setting = LaunchSpec.from_config(config, length, get_strategy_name(accelerator), accelerator)
    parts = memory.estimate_memory(objective, setting)
    total, device = None, accelerator.device
    if device.type == "cuda":  # what this process has or can get
        total = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if parts is not None:
        if accelerator.is_main_process:
            print(memory.format_memory(parts, total))  # noqa: T201
        if total is not None:
            memory.check_memory_fits(parts, total)
    return parts


def make_rollouts(config: TrainRun, source: TrainingSource) -> Rollouts | None:
    """Make the rounds of the target's own answers, if asked for; None otherwise."""
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


def format_run_length(config: TrainConfig, num_sequences: int, length: int) -> str:
    """Format the length of a run for people, and the share of the data that it does not read.

    Example: `290 steps of 4 x 512 tokens = 593,920 tokens, 1.2 epochs`.
    """
    epochs = count_epochs(config, num_sequences)
    num_tokens = config.num_steps * config.batch_size * length
    text = (
        f"{config.num_steps:,} steps of {config.batch_size} x {length} tokens = {num_tokens:,} "
        f"tokens, {epochs:.1f} epochs"
    )
    if epochs >= 1:
        return text
    return f"{text}; {1 - epochs:.1%} of the data is not read (unset train.max_steps reads all)"


def print_end(outcome: Outcome, out_dir: Path, eval_path: str | None) -> None:
    """Print where the head is, or how to continue."""
    if outcome.finished:
        tau = outcome.evaluation.get("eval/tau")
        whose = "held out of data.path" if eval_path is None else "of data.eval_path"
        measured = ""
        if tau is not None:
            num_prompts = int(outcome.evaluation[f"eval/{NUM_PROMPTS}"])
            measured = f", tau {tau:.2f} on {format_count(num_prompts)} {whose} (chain)"
        change = outcome.evaluation.get("eval/target_change_percent")
        if change is not None:
            measured += f", the target's own held-out loss {change:+.2f}%"
        if not outcome.evaluation:
            measured = "; its last evaluation failed, see above"
        print(f"head saved to {out_dir / 'head'}{measured}")  # noqa: T201
        if outcome.kept["step"] < outcome.step:
            print(f"kept: step {outcome.kept['step']}, as {outcome.kept['why']}")  # noqa: T201
    else:
        head = out_dir / loop.STOPPED
        export = {"head.path": head, "format": "ENGINE", "out_dir": f"{out_dir}-stopped"}
        place, *typed = sys.argv
        script = os.path.relpath(place, ROOT) if PACKAGE else place
        words = [script, *(word for word in typed if not word.startswith("train.resume="))]
        launcher, options = ["python"], ""
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            launcher = ["accelerate", "launch"]
            options = " (with your options of accelerate launch)"
        again = shlex.join([*launcher, *words, "train.resume=auto"])
        print(  # noqa: T201
            f"stopped at step {outcome.step}; continue with train.resume=auto\n"
            f"the head so far lies in {head}; to export it (your engine in place of ENGINE):\n"
            f"  {run_record.format_command('scripts/export.py', export)}\n\n"
            f"next, train on{options}:\n  {name_commands(again)}"
        )


def format_vocab_check(source: TrainingSource, objective: Objective) -> list[str]:
    """Format how much of the held-out text a head's draft vocabulary covers, unless it is full."""
    vocab = objective.head.vocab
    if vocab.is_full:
        return []
    assert not isinstance(source.heldout, ServedSequences), "no server is open yet"
    counts = source.heldout.count_token_ids(source.target.vocab_size)
    return [format_heldout_coverage(counts, vocab.to("cpu"))]


def format_data_need(num_tokens: int) -> list[str]:
    """Format the tokens to learn from beside those that heads need; nothing if there are enough."""
    for needed, purpose in NEEDED_TOKENS.items():
        if num_tokens < needed:
            return [
                f"tokens to learn from: {num_tokens:,}, {num_tokens / needed:.1%} of the "
                f"{needed / 1e6:.0f} million {purpose} (docs/training.md)"
            ]
    return []


def format_verdict(evaluation: Mapping[str, float], num_tokens: int) -> str:
    """Judge a trained head by its held-out tau and what that rests on, in a sentence or two.

    Args:
        evaluation: figures of the last evaluation, by name with the prefix `eval/`; none if it
            failed.
        num_tokens: different tokens that the head has read.
    """
    figures = {name.removeprefix("eval/"): value for name, value in evaluation.items()}
    low, high = (figures.get(name) for name in INTERVAL)
    basis = format_basis(figures) if NUM_PROMPTS in figures else ""
    tau = f"tau {figures['tau']:.2f}" if basis else ""
    if not basis:
        why = "held no prompt" if evaluation else "failed"
        judged = f"not to be published unmeasured, as the last evaluation {why}"
    elif figures[NUM_PROMPTS] < FEWEST_DIALOGUES or low is None or high is None:
        judged = (
            f"not to be published yet, as {tau} rests on {basis}; an interval takes "
            f"{FEWEST_DIALOGUES} prompts, and a decision 50 or more "
            f"({name_commands('eval/acceptance.py')})"
        )
    elif high < WEAK_TAU:
        judged = f"not to be published, as {tau} ({basis}) lies below {COSTS}; {SUFFIXES}"
    elif low < WEAK_TAU:
        judged = f"undecided, as the interval of {tau} ({basis}) holds {COSTS}; {SUFFIXES}"
    else:
        judged = f"worth measuring, as {tau} ({basis}) lies above {WEAK_TAU}"
    needed, purpose = next(iter(NEEDED_TOKENS.items()))
    if num_tokens >= needed:
        return judged
    return (
        f"{judged}. The head read {num_tokens:,} tokens of the {needed / 1e6:.0f} million {purpose}"
    )


def build_measure_settings(config: TrainRun, target: str) -> dict[str, Any]:
    """Build the settings under which a measurement takes the trained head and its target."""
    out_dir = Path(config.out_dir)
    adapter = out_dir / "adapter"  # of train/medusa2.py
    adapter_setting = {"target.adapter": adapter} if adapter.is_dir() else {}
    return {
        "head.path": out_dir / "head",
        "target.path": target,
        **run_record.collect_changed_settings(config, "target"),
        **adapter_setting,
        **run_record.prompts_for(target),
        "out_dir": config.out_dir,
    }
