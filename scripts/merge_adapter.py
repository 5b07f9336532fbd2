"""Merges a target and its adapter into one model, for engines without adapters.

`python scripts/merge_adapter.py target.path=... target.adapter=outputs/medusa2/adapter`
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.command.forms import name_commands
from conf.errors import InputError
from conf.files import check_empty_folder
from conf.settings.export import MergeAdapterRun
from conf.settings.target import Dtype, Quantization
from eval.preflight_checks import check_inputs


def check_merge(config: MergeAdapterRun) -> None:
    """Refuse a target without an adapter, a quantised target, and an `out_dir` with files.

    Raises:
        InputError: names the setting and its allowed values.
    """
    for name in ("path", "adapter"):
        if getattr(config.target, name) is None:
            raise InputError(f"target.{name} is unset; name a folder or Hub id to merge")
    if config.target.quantization is not Quantization.none:
        raise InputError(
            f"target.quantization={config.target.quantization.value}: merged weights are not "
            "quantised; leave target.quantization unset"
        )
    check_empty_folder(config.out_dir)
    check_inputs(config)


COMMAND = Command(__doc__, MergeAdapterRun, "merge_adapter", check=check_merge)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import torch

from heads.folders import write_folder
from heads.mtp.checkpoint import find_mtp_layers
from heads.target_model.adapter import apply_adapter, merge_into_weights
from heads.target_model.load import load_config, load_model, load_target_tokenizer, resolve_dtype


def main(config: MergeAdapterRun) -> None:
    """Write model, tokenizer, chat template and generation config to `out_dir`."""
    check_merge(config)
    target, out_dir, device = config.target, Path(config.out_dir), torch.device("cpu")
    model_config, tokenizer = load_config(target), load_target_tokenizer(target)
    dtype = "auto" if target.dtype is Dtype.auto else resolve_dtype(target.dtype, device)
    model = load_model(target, model_config, dtype, device, towers=True)
    whole = merge_into_weights(apply_adapter(model, str(target.adapter)), str(target.adapter))

    def fill(staging: Path) -> None:
        whole.save_pretrained(staging)
        tokenizer.save_pretrained(staging)

    write_folder(out_dir, fill)
    print(f"merged {target.path} and {target.adapter} into {out_dir}")
    if find_mtp_layers(str(target.path), target.revision)[1]:
        print(
            "the target's MTP layer is missing, as transformers does not load it; to add "
            f"it:\n{name_commands('python scripts/mtp.py')} action=stitch target.path={out_dir} "
            f"head.path={target.path} out_dir={out_dir}-mtp"
        )


if __name__ == "__main__":
    COMMAND.run(main)
