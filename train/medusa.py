"""Trains Medusa heads: `accelerate launch train/medusa.py target.path=... data.path=...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from torch import Tensor, nn

from conf import entry
from conf.provenance import provenance
from conf.schema import InputError, Labels, MedusaConfig, MedusaRun
from data.embedded import ensure_embedded
from data.pack import prepare
from heads.medusa import MedusaHead
from heads.target import Target, load_target
from train import launch, loop, processes
from train.losses import Batch, Sums, medusa_counts, medusa_loss, medusa_weights
from train.replay import HeldoutReplay, heldout_prompts


class MedusaObjective(nn.Module):
    """The Medusa loss of a batch, with hidden states taken from the target on the way."""

    def __init__(self, head: MedusaHead, target: Target, config: MedusaConfig) -> None:
        super().__init__()
        self.head = head
        self.target = target
        self.weights = medusa_weights(head.num_heads, config.loss_decay)
        self.teacher = target.logits if config.labels is Labels.soft else None

    def counts(self, batch: Batch) -> Tensor:
        """[K] float32 supervised tokens of each head."""
        return medusa_counts(batch, self.head.num_heads)

    def forward(self, batch: Batch) -> Sums:
        """The sums of each head over `batch`, a dict of [B, T] tensors."""
        hidden = self.target.hidden_states(
            batch["input_ids"], batch["position_ids"], batch["document_ids"]
        )
        # DeepSpeed casts the head's parameters to bfloat16 and does not autocast.
        hidden = hidden.to(next(self.head.parameters()).dtype)
        return medusa_loss(self.head, hidden, batch, self.teacher)


def main(config: MedusaRun) -> None:
    """Trains to `out_dir/head`."""
    out_dir = Path(config.out_dir)
    launch.check_out_dir(out_dir, config.train.resume)
    check_data(config)
    accelerator = processes.start(config.train)
    with accelerator.main_process_first():
        fill_defaults(config, accelerator.is_main_process)

    target = load_target(config.target, accelerator.device)
    with accelerator.main_process_first():
        train, heldout, report = prepare(
            config.data,
            target.tokenizer,
            path=str(config.data.path),
            eval_path=config.data.eval_path,
            seed=config.seed,
            progress=accelerator.is_main_process,
        )
    head = make_head(config.head, target)
    if accelerator.is_main_process:
        where = f"{accelerator.num_processes} process(es), {accelerator.device.type}"
        print_plan(config, report.lines(), head, where)
    prompts = heldout_prompts(heldout, config.train.num_replay_prompts)
    job = loop.Job(
        config=config.train,
        log=config.log,
        seed=config.seed,
        out_dir=out_dir,
        objective=MedusaObjective(head, target, config.head),
        train=train,
        heldout=heldout,
        provenance=provenance(config, target.name, report),
        evaluate=HeldoutReplay(target, prompts) if prompts else None,
    )
    outcome = loop.fit(accelerator, job)
    if accelerator.is_main_process:
        print_end(outcome, out_dir)
    accelerator.end_training()


def check_data(config: MedusaRun) -> None:
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


def fill_defaults(config: MedusaRun, progress: bool) -> None:
    """Puts the embedded default where target or data are unset."""
    if config.target.path is None or config.data.path is None:
        embedded = ensure_embedded(progress=progress)
        config.target.path = config.target.path or embedded.target_path
        config.data.path = config.data.path or embedded.train_path


def make_head(config: MedusaConfig, target: Target) -> MedusaHead:
    """Untrained heads, or saved ones that fit the target."""
    if config.path is None:
        return MedusaHead.from_target(target, config.num_heads, config.num_layers)
    head = MedusaHead.load(config.path)
    head.check_target(target)
    return head.to(target.device)


def print_plan(config: MedusaRun, data_lines: list[str], head: MedusaHead, where: str) -> None:
    """Says what will be trained on what."""
    size = sum(parameter.numel() for parameter in head.parameters())
    print(f"target: {config.target.path}")  # noqa: T201
    for line in data_lines:
        print(line)  # noqa: T201
    print(f"head: {head.num_heads} Medusa heads, {size / 1e6:.1f} M parameters")  # noqa: T201
    print(f"training: {config.train.max_steps} steps on {where}, to {config.out_dir}")  # noqa: T201


def print_end(outcome: loop.Outcome, out_dir: Path) -> None:
    """Says where the head is, or how to continue."""
    if outcome.finished:
        tau = outcome.evaluation.get("eval/tau")
        measured = "" if tau is None else f", tau {tau:.2f} on held-out prompts (chain)"
        print(f"head saved to {out_dir / 'head'}{measured}")  # noqa: T201
    elif (out_dir / "checkpoints").is_dir():
        print(f"stopped at step {outcome.step}, continue with train.resume=auto")  # noqa: T201
    else:
        print(f"stopped at step {outcome.step}; no checkpoint was written")  # noqa: T201


if __name__ == "__main__":
    entry.run(main, MedusaRun, "medusa")
