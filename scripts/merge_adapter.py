"""Merges a target and its adapter into one model, for engines that take no adapter.

`python scripts/merge_adapter.py target.path=... target.adapter=outputs/medusa2/adapter`
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.entry import Command
from conf.schema_medusa2 import MergeAdapterRun

COMMAND = Command(__doc__, MergeAdapterRun, "merge_adapter")
if __name__ == "__main__":
    COMMAND.begin()

import torch

from conf.schema import Dtype, InputError, Quantization
from heads.storage import write_folder
from heads.target.load import load_model, load_tokenizer, resolve_dtype, with_adapter


def main(config: MergeAdapterRun) -> None:
    """Writes model, tokenizer, chat template and generation config to `out_dir`."""
    check(config)
    target, out_dir, device = config.target, Path(config.out_dir), torch.device("cpu")
    model_config, tokenizer = load_tokenizer(target)
    dtype = "auto" if target.dtype is Dtype.auto else resolve_dtype(target.dtype, device)
    model = load_model(target, model_config, dtype, device, towers=True)
    adapted = with_adapter(model, str(target.adapter))
    merged = adapted.merge_and_unload()

    def fill(staging: Path) -> None:
        merged.save_pretrained(staging)
        tokenizer.save_pretrained(staging)

    write_folder(out_dir, fill)
    print(f"merged {target.path} and {target.adapter} into {out_dir}")


def check(config: MergeAdapterRun) -> None:
    """Refuses what cannot be merged, before anything heavy is loaded.

    Raises:
        InputError: which setting, and what it may be.
    """
    for name in ("path", "adapter"):
        if getattr(config.target, name) is None:
            raise InputError(f"target.{name} is unset: name what is merged, a folder or Hub id")
    if config.target.quantization is not Quantization.none:
        raise InputError(
            f"target.quantization={config.target.quantization.value}: merged weights are written "
            "whole; leave it unset"
        )
    out_dir = Path(config.out_dir)
    if out_dir.is_file() or (out_dir.is_dir() and any(out_dir.iterdir())):
        raise InputError(f"out_dir={out_dir} is there and not empty: name another folder")


if __name__ == "__main__":
    COMMAND.run(main)
