"""What every training command does around its own head: checks, data, plan, loop, last words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.provenance import provenance
from conf.schema import InputError, MedusaRun
from conf.schema_eagle import EagleRun
from data.embedded import ensure_embedded
from data.pack import PackedDataset, prepare
from heads.load_target import load_target
from heads.target import Target
from train import launch, loop, processes
from train.replay import HeldoutReplay, heldout_prompts

Run = MedusaRun | EagleRun
Build = Callable[[Target, PackedDataset], tuple[Any, list[str]]]
"""From the target and the training data to the objective and what to say about it."""


def train(config: Run, build: Build) -> None:
    """Trains what `build` makes, to `out_dir/head`."""
    out_dir = Path(config.out_dir)
    launch.check_out_dir(out_dir, config.train.resume)
    check_data(config)
    accelerator = processes.start(config.train)
    with accelerator.main_process_first():
        fill_defaults(config, accelerator.is_main_process)

    target = load_target(config.target, accelerator.device)
    with accelerator.main_process_first():
        train_data, heldout, report = prepare(
            config.data,
            target.tokenizer,
            path=str(config.data.path),
            eval_path=config.data.eval_path,
            seed=config.seed,
            progress=accelerator.is_main_process,
        )
    objective, lines = build(target, train_data)
    if accelerator.is_main_process:
        where = f"{accelerator.num_processes} process(es), {accelerator.device.type}"
        print_plan(config, [*report.lines(), *lines], where)
    prompts = heldout_prompts(heldout, config.train.num_replay_prompts)
    depth, reads = len(objective.weights), objective.head.reads
    replay = HeldoutReplay(target, prompts, depth, reads)
    job = loop.Job(
        config=config.train,
        log=config.log,
        seed=config.seed,
        out_dir=out_dir,
        objective=objective,
        train=train_data,
        heldout=heldout,
        provenance=provenance(config, target.name, report),
        evaluate=replay if prompts else None,
    )
    outcome = loop.fit(accelerator, job)
    if accelerator.is_main_process:
        print_end(outcome, out_dir)
    accelerator.end_training()


def check_data(config: Run) -> None:
    """Refuses a missing file before anything heavy is loaded.

    Raises:
        InputError: a path that can only be a local one is not there.
    """
    for key in ("path", "eval_path"):
        path = getattr(config.data, key)
        if path is None or Path(path).expanduser().exists():
            continue
        local = path.startswith((".", "/", "~")) or path.count("/") != 1
        if local or Path(path).suffix in (".jsonl", ".json", ".parquet"):
            raise InputError(f"data.{key}={path}: no such file or folder")


def fill_defaults(config: Run, progress: bool) -> None:
    """Puts the embedded default where target or data are unset."""
    if config.target.path is None or config.data.path is None:
        embedded = ensure_embedded(progress=progress)
        config.target.path = config.target.path or embedded.target_path
        config.data.path = config.data.path or embedded.train_path


def print_plan(config: Run, lines: list[str], where: str) -> None:
    """Says what will be trained on what."""
    print(f"target: {config.target.path}")  # noqa: T201
    for line in lines:
        print(line)  # noqa: T201
    print(f"training: {config.train.max_steps} steps on {where}, to {config.out_dir}")  # noqa: T201


def print_end(outcome: loop.Outcome, out_dir: Path) -> None:
    """Says where the head is, or how to continue."""
    if outcome.finished:
        tau = outcome.evaluation.get("eval/tau")
        measured = "" if tau is None else f", tau {tau:.2f} on held-out prompts (chain)"
        print(f"head saved to {out_dir / 'head'}{measured}")  # noqa: T201
    else:
        print(f"stopped at step {outcome.step}, continue with train.resume=auto")  # noqa: T201
