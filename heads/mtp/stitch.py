"""Writer of a target's folder with another MTP layer; other tensors stay identical.

Format: Hugging Face's sharded safetensors, `model.safetensors.index.json`. Files without tensors of
the layer are linked, not copied, if the disk allows it.

A list of unquantised modules in `quantization_config` must name the modules of the MTP layer;
otherwise an engine reads the layer's plain weights as quantised codes. Such lists are read and
extended as compressed-tensors (`ignore`), FP8, GPTQ and AWQ (`modules_to_not_convert`,
`ignored_layers`), ModelOpt (`ignore`, `exclude_modules`) and bitsandbytes write them.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import InputError
from heads.draft_head import format_size_mismatch
from heads.folders import find_weight_files, load_model_config, write_folder
from heads.mtp.checkpoint import (
    count_decoder_layers,
    find_family,
    find_mtp_tensors,
    split_experts,
)
from heads.mtp.families import FAMILIES, KNOWN, MtpFamily
from heads.mtp.mtp import MtpHead
from heads.target_model.weight_files import load_tensor_table

INDEX, SHARD = "model.safetensors.index.json", "model-mtp.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SKIP_LISTS = (
    "modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules",
    "llm_int8_skip_modules",
)  # fmt: skip
DEFAULT_LISTS = {"bitsandbytes": "llm_int8_skip_modules", "compressed-tensors": "ignore"}
"""Skip list of a method whose config has none; other methods get the first of `SKIP_LISTS`."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Dtypes of unquantised tensors by their names in safetensors."""


def stitch_layer(folder: Path, head: MtpHead, final: Path) -> list[str]:
    """Write a model's folder anew with a head's layer, atomically.

    Args:
        folder: folder of the model, with or without such a layer.
        head: head that holds the layer.
        final: folder to write; replaced if it exists.

    Returns:
        Names of the written files with tensors of the layer.

    Raises:
        InputError: the model has another family, other sizes or another vocabulary, shards are
            missing, the disk is full, or the written layer differs.
    """
    config, label = load_model_config(folder), f"target.path={folder}"
    family = _find_matching_family(config, head, label)
    num_layers = count_decoder_layers(config)
    files = find_weight_files(label, folder)
    files_by_name = find_mtp_tensors(folder, family, num_layers, label)
    layer = _name_stored_tensors(head, family, num_layers, files_by_name, _find_common_dtype(files))
    layer |= _make_missing_copies(family.list_copies(num_layers), files)
    written = sorted(
        {files_by_name[name].name for name in layer if name in files_by_name} | {SHARD}
    )

    def fill(staging: Path) -> None:
        for path in folder.iterdir():
            if path.is_file() and path not in files and path.name not in (INDEX, "config.json"):
                _link_or_copy(path, staging / path.name)
        rest: dict[str, Tensor] = dict(layer)
        weight_map: dict[str, str] = {}
        for file in files:
            kept_names = [name for name in load_tensor_table(file) if name not in files_by_name]
            layer_tensors = {
                name: rest.pop(name) for name in list(rest) if files_by_name.get(name) == file
            }
            # Once there is a second file, readers need an index and look for this name.
            name = "model-00001-of-00001.safetensors" if file.stem == "model" else file.name
            if not layer_tensors and len(kept_names) == len(load_tensor_table(file)):
                _link_or_copy(file, staging / name)
            elif layer_tensors or kept_names:
                save_file(
                    _load_tensors(file, kept_names) | layer_tensors,
                    staging / name,
                    metadata={"format": "pt"},
                )
            weight_map |= dict.fromkeys([*kept_names, *layer_tensors], name)
        if rest:
            save_file(rest, staging / SHARD, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(rest, SHARD)
        sizes = [_count_bytes(load_tensor_table(staging / name)) for name in {*weight_map.values()}]
        total_size = sum(map(Counter.total, sizes))
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (staging / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        changed = _add_layer_to_config(config, family, {name: t.shape for name, t in layer.items()})
        (staging / "config.json").write_text(json.dumps(changed, indent=2))
        _check_written_layer(staging, head)

    write_folder(final, fill)
    return [name for name in written if (final / name).is_file()]


def _find_matching_family(config: Mapping[str, Any], head: MtpHead, label: str) -> MtpFamily:
    """Find the table entry of a model's family, which must be that of the head.

    Raises:
        InputError: the table lacks the model, or the head has another family or other sizes.
    """
    name = find_family(config)
    if name is None:
        raise InputError(
            f"{label}: is {config.get('architectures')}, whose MTP layer is unknown; allowed: "
            f"{KNOWN}"
        )
    if FAMILIES[name] != head.config.family_entry:
        raise InputError(
            f"head.path: an MTP layer of {head.config.family}, but {label} is {name}; name a layer "
            "of its own kind"
        )
    text = config.get("text_config") or config
    for key in ("hidden_size", "vocab_size"):
        head_size = getattr(head.config, key)
        if text[key] != head_size:
            raise InputError(
                format_size_mismatch(key, head_size, head.config.target, label, text[key])
            )
    return FAMILIES[name]


def _name_stored_tensors(
    head: MtpHead,
    family: MtpFamily,
    num_layers: int,
    files_by_name: Mapping[str, Path],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Name the layer's tensors as in the model's files, with experts joined or split as there."""
    tensors = head.build_files().tensors
    joined = any(name.endswith(".experts.down_proj") for name in files_by_name)
    stored: dict[str, Tensor] = {}
    for name, tensor in (tensors if joined else split_experts(tensors)).items():
        stored_name = family.to_stored_name(name, num_layers)
        file = files_by_name.get(stored_name)
        like = dtype if file is None else _load_tensors(file, [stored_name])[stored_name].dtype
        stored[stored_name] = tensor.to("cpu", like).contiguous().clone()
    return stored


def _find_common_dtype(files: list[Path]) -> torch.dtype:
    """Find the dtype of most unquantised bytes of a model; bfloat16 without any."""
    sizes = sum((_count_bytes(load_tensor_table(file)) for file in files), Counter[str]())
    known = [name for name, _ in sizes.most_common() if name in DTYPES]
    return DTYPES[known[0]] if known else torch.bfloat16


def _make_missing_copies(names: list[str], files: list[Path]) -> dict[str, Tensor]:
    """Make the copies of the model's embedding and output head that its files lack.

    Quantised tensors are not copied; engines then share the model's own.
    """
    entries = {
        name: (file, entries) for file in files for name, entries in load_tensor_table(file).items()
    }
    is_tied = not any(name.startswith("lm_head.") for name in entries)
    copies: dict[str, Tensor] = {}
    for name, end in zip(names, (EMBEDDING, EMBEDDING if is_tied else HEAD), strict=False):
        if name not in entries and end in entries and entries[end][1]["dtype"] in DTYPES:
            copies[name] = _load_tensors(entries[end][0], [end])[end].clone()
    return copies


def _load_tensors(file: Path, names: list[str]) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in names}


def _link_or_copy(path: Path, copy: Path) -> None:
    """Link a file under another name; copy it to another disk."""
    try:
        os.link(path.resolve(), copy)
    except OSError:
        shutil.copyfile(path, copy)


def _count_bytes(table: Mapping[str, Any]) -> Counter[str]:
    """Count the bytes of the tensors of a file by their dtype."""
    sizes = Counter[str]()
    for tensor in table.values():
        begin, end = tensor["data_offsets"]
        sizes[tensor["dtype"]] += end - begin
    return sizes


def _add_layer_to_config(
    config: dict[str, Any], family: MtpFamily, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Copy a config so that it counts the layer and excludes it from quantisation."""
    changed = json.loads(json.dumps(config))
    text = changed.get("text_config") or changed
    places = ((at, key) for at in (text, changed) for key in family.counts if key in at)
    section, key = next(places, (text, family.counts[0]))
    section[key] = section.get(key) or 1
    quantisation = changed.get("quantization_config") or {}
    for name, missing in find_unlisted_modules(quantisation, find_matrix_modules(shapes)).items():
        # Without a list, readers skip the output head.
        quantisation[name] = [*(quantisation.get(name) or ["lm_head"]), *missing]
    return changed


def find_matrix_modules(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """List the modules whose weights are matrices, from the shapes of tensors by name."""
    return sorted(
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) > 1
    )


def find_unlisted_modules(
    quantisation: dict[str, Any], modules: Iterable[str]
) -> dict[str, list[str]]:
    """Find the modules that each skip list of a quantisation lacks, by the list's key.

    Args:
        quantisation: `quantization_config` of a model; empty without quantisation.
        modules: names of modules with matrices, as in the model's files.
    """
    if not quantisation:
        return {}
    lists = {
        key: quantisation[key] for key in SKIP_LISTS if isinstance(quantisation.get(key), list)
    }
    usual = DEFAULT_LISTS.get(str(quantisation.get("quant_method")), SKIP_LISTS[0])
    missing = {
        key: [name for name in modules if not any(_is_match(each, name) for each in listed)]
        for key, listed in (lists or {usual: []}).items()
    }
    return {key: names for key, names in missing.items() if names}


def _is_match(entry: str, module: str) -> bool:
    """Tell whether an entry names a module or a parent of the module, or matches either."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    parts = module.split(".")
    holders = (".".join(parts[: n + 1]) for n in range(len(parts)))
    return any(fnmatchcase(holder, entry) for holder in holders)


def _check_written_layer(folder: Path, head: MtpHead) -> None:
    """Read the written layer back, and compare it with the head's.

    Raises:
        InputError: a tensor differs by more than rounding to the dtype of the model's files.
    """
    written = MtpHead.from_folder(folder, str(folder), None)
    assert written is not None
    written_tensors = written.build_files().tensors
    for name, tensor in head.build_files().tensors.items():
        if not torch.allclose(written_tensors[name], tensor.cpu(), rtol=2**-7, atol=1e-6):
            raise InputError(
                f"{folder}: {name} was written with other values; check the disk and start again"
            )
