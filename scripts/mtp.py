"""Checks, extracts or replaces the MTP layer in a target's files.

    python scripts/mtp.py action=check target.path=DIR
    python scripts/mtp.py action=extract target.path=DIR out_dir=outputs/layer
    python scripts/mtp.py action=stitch target.path=DIR head.path=outputs/mtp/head out_dir=whole

`stitch` can also return the original model's layer (`head.path`) to a model that lost it by
fine-tuning, merging or quantising.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.errors import InputError
from conf.files import check_empty_folder
from conf.settings.export import MtpAction, MtpFilesRun
from heads.folders import check_head_files, check_target_files


def check_mtp(config: MtpFilesRun) -> None:
    """Refuse to overwrite anything, and missing folders.

    Raises:
        InputError: names the setting and its allowed values.
    """
    stitches = config.action is MtpAction.stitch
    if config.target.path is None:
        raise InputError("target.path is unset; type the folder of a model")
    if stitches is (config.head.path is None):
        raise InputError(
            f"action={config.action.value}, head.path={config.head.path}: only stitch takes a "
            "head.path, and needs one; for check and extract leave it unset"
        )
    if stitches and not Path(config.target.path).is_dir():
        raise InputError(
            f"target.path={config.target.path}: stitch needs a folder; run hf download "
            f"{config.target.path} --local-dir DIR"
        )
    if config.action is not MtpAction.check:
        check_empty_folder(config.out_dir)
    check_target_files(config.target)
    check_head_files(config.head, None)


COMMAND = Command(__doc__, MtpFilesRun, "mtp_files", check=check_mtp)
if __name__ == "__main__":
    COMMAND.parse_command_line()

from statistics import median
from typing import Any

from safetensors import safe_open

from heads.folders import (
    find_head_gguf,
    find_weight_files,
    list_tensor_names,
    load_model_config,
    locate_head,
)
from heads.mtp.checkpoint import (
    count_declared_layers,
    count_decoder_layers,
    find_family,
    find_mtp_tensors,
)
from heads.mtp.families import FAMILIES
from heads.mtp.mtp import MtpHead
from heads.mtp.stitch import find_matrix_modules, find_unlisted_modules, stitch_layer
from heads.target_model.weight_files import load_tensor_table


def main(config: MtpFilesRun) -> None:
    """Check, extract or stitch an MTP layer, as `action` says.

    Raises:
        InputError: no layer, an incomplete layer, or a head of another kind.
    """
    check_mtp(config)
    target = str(config.target.path)
    folder = locate_head(target, config.target.revision)
    if config.action is MtpAction.stitch:
        path = str(config.head.path)
        head = load_mtp_layer(locate_head(path, config.head.revision), path, "head.path")
        files = stitch_layer(folder, head, Path(config.out_dir))
        print(f"wrote {config.out_dir}; its MTP layer is in {', '.join(files)}")
        return
    head = load_mtp_layer(folder, target, "target.path")
    if config.action is MtpAction.extract:
        head.save(Path(config.out_dir), {"target": target, "extracted": True})
        print(f"wrote {config.out_dir}: measure it with head.path={config.out_dir}")
        return
    check_norms(folder, head, target)
    settings = load_model_config(folder)
    family = FAMILIES[str(find_family(settings))]
    places = find_mtp_tensors(folder, family, count_decoder_layers(settings), target)
    shapes = {name: load_tensor_table(file)[name]["shape"] for name, file in places.items()}
    check_excluded_from_quantization(settings, shapes, target)
    promised = count_declared_layers(settings, family)
    numbers = sum(tensor.numel() for tensor in head.build_files().tensors.values())
    print(
        f"{target}: an MTP layer of {head.config.family}, {numbers / 1e6:.1f} M numbers, complete"
    )
    if promised != 1:
        print(
            f"config.json names {promised} such layers; the first is read, and used at every depth"
        )


def load_mtp_layer(folder: Path, path: str, key: str) -> MtpHead:
    """Load the MTP layer in a folder, named by setting `key`, as a head.

    Raises:
        InputError: no layer, or an incomplete one.
    """
    try:
        head = None if find_head_gguf(folder) else MtpHead.from_folder(folder, path, None)
    except InputError as error:
        # A reader of heads cannot know that the setting is another.
        raise InputError(str(error).replace("head.path=", f"{key}=", 1)) from error
    if head is None:
        raise InputError(
            f"{key}={path}: has no MTP layer; name a model that has one, or a layer of train/mtp.py"
        )
    return head


def check_excluded_from_quantization(
    settings: dict[str, Any], shapes: dict[str, list[int]], path: str
) -> None:
    """Refuse a quantised model whose config does not exclude its MTP layer from quantisation.

    Raises:
        InputError: engines would read the layer's weights as quantised codes.
    """
    missing = find_unlisted_modules(
        settings.get("quantization_config") or {}, find_matrix_modules(shapes)
    )
    if missing:
        key, modules = next(iter(missing.items()))
        raise InputError(
            f"{path}: quantization_config.{key} of config.json does not name {modules[0]} and "
            f"{len(modules) - 1} more modules of the MTP layer, which are not quantised; write the "
            f"list again: action=stitch head.path={path} out_dir=DIR"
        )


def check_norms(folder: Path, head: MtpHead, path: str) -> None:
    """Refuse norms whose weights a converter raised by the 1 that such norms add themselves.

    In norms that multiply by 1 + weight, the target's own weights are near 0, and the layer's must
    be too.

    Raises:
        InputError: they are near 1.
    """
    fresh: Any = None if head.norm is None else type(head.norm)(1)
    if fresh is None or fresh.weight.item() != 0:
        return
    norms = [t.mean().item() for name, t in head.named_parameters() if "norm" in name]
    targets: list[float] = []  # of the target's own layers
    for file in find_weight_files(path, folder):
        names = [name for name in list_tensor_names(file) if name.endswith("layernorm.weight")]
        with safe_open(file, "pt") as opened:
            norms_of_file = (opened.get_tensor(name) for name in names if "mtp" not in name)
            targets += [norm.float().mean().item() for norm in norms_of_file]
    if targets and median(norms) - median(targets) > 0.5:
        raise InputError(
            f"{path}: the MTP layer's norms have weights around {median(norms):.2f}, the target's "
            f"own around {median(targets):.2f}; a converter added 1 to them, which the norm adds "
            "itself; take the layer of the original model (action=stitch head.path=ORIGINAL)"
        )


if __name__ == "__main__":
    COMMAND.run(main)
