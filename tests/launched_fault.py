"""`train/medusa.py` with a fault put into it: `launched_fault.py FAULT OVERRIDES...`."""

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from conf.settings.training import TrainConfig
from data.features.store_format import HIDDEN_STATES
from train import medusa
from train.loop import evaluation, loop, sources
from train.parallel import processes

SHORT, LONG = timedelta(seconds=3), 6.0


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def slow(owner: Any, name: str, who: int) -> None:
    """One process takes longer than a collective is waited for."""
    real, start = getattr(owner, name), processes.start_accelerator

    def late(*args: Any, **named: Any) -> Any:
        if rank() == who:
            time.sleep(LONG)
        return real(*args, **named)

    def hasty(config: TrainConfig) -> Any:
        accelerator = start(config)
        _set_pg_timeout(SHORT)
        return accelerator

    setattr(owner, name, late)
    processes.start_accelerator = hasty


def failing(owner: Any, name: str, who: int) -> None:
    """One process cannot evaluate."""
    real = getattr(owner, name)

    def fail(*args: Any, **named: Any) -> Any:
        if rank() == who:
            raise RuntimeError("tensors on two devices")
        return real(*args, **named)

    setattr(owner, name, fail)


def peaking() -> None:
    """The first evaluation finds a larger tau than the later ones."""
    real, texts = loop.evaluate_heldout, [[(20, 10)] * 8]

    def measure(*args: Any) -> evaluation.HeldoutFigures:
        tokens = texts.pop() if texts else [(20, 20)] * 8
        return real(*args)._replace(texts=[] if rank() else tokens)

    loop.evaluate_heldout = measure


def spoiled() -> None:
    """The target gives no numbers for about one sequence in nine."""
    real = medusa.MedusaObjective.prepare_batch

    def spoil(self: Any, batch: Any) -> Any:
        found = real(self, batch)
        texts = batch["input_ids"]
        rows = [crc32(text.numpy().tobytes()) % 9 == 0 and bool(text.any()) for text in texts]
        found[HIDDEN_STATES][torch.tensor(rows)] = torch.nan
        return found

    medusa.MedusaObjective.prepare_batch = spoil


FAULTS = {
    "peaking": peaking,
    "spoiled-sequences": spoiled,
    "data-slow-on-first": lambda: slow(sources, "prepare_datasets", 0),
    "data-slow-on-second": lambda: slow(sources, "prepare_datasets", 1),
    "first-measures-long": lambda: slow(evaluation.Replay, "__call__", 0),
    "first-saves-long": lambda: slow(loop.checkpoint, "save_checkpoint", 0),
    "second-cannot-measure": lambda: failing(evaluation, "_add_sums", 1),
}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    sys.argv[0] = str(medusa.__file__)
    medusa.COMMAND.run(medusa.main)
