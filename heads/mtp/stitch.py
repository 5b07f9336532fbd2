"""Writer of a target's folder with another MTP layer; other tensors stay identical.

Format: Hugging Face's sharded safetensors, `model.safetensors.index.json`. Files without tensors of
the layer are linked, not copied, if the disk allows it.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import InputError
from heads.draft_head import format_size_mismatch
from heads.folders import write_folder
from heads.mtp.checkpoint import (
    count_decoder_layers,
    find_family,
    find_mtp_tensors,
    load_model_config,
    split_experts,
)
from heads.mtp.families import FAMILIES, KNOWN, MtpFamily
from heads.mtp.mtp import MtpHead
from heads.target_model.weight_files import find_weight_files, load_tensor_table

LISTS = (
    "modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules",
    "llm_int8_skip_modules",
)  # fmt: skip
USUAL = {"bitsandbytes": "llm_int8_skip_modules", "compressed-tensors": "ignore"}
"""The skip list of a method if its config has none; for other methods, the first of `LISTS`."""


def find_unlisted_modules(
    quantisation: dict[str, Any], modules: Iterable[str]
) -> dict[str, list[str]]:
    """Modules that each skip list of a quantisation lacks, by the list's key.

    Args:
        quantisation: `quantization_config`; empty for a model that is not quantised.
        modules: names of matrices, as in the model's files.
    """
    if not quantisation:
        return {}
    lists = {key: quantisation[key] for key in LISTS if isinstance(quantisation.get(key), list)}
    usual = USUAL.get(str(quantisation.get("quant_method")), LISTS[0])
    missing = {
        key: [name for name in modules if not any(_is_match(each, name) for each in listed)]
        for key, listed in (lists or {usual: []}).items()
    }
    return {key: names for key, names in missing.items() if names}


def add_unquantized_modules(quantisation: dict[str, Any], modules: Iterable[str]) -> None:
    """Add modules to the skip lists of a quantisation, in place."""
    for key, missing in find_unlisted_modules(quantisation, modules).items():
        # Without a list, readers skip the output head.
        quantisation[key] = [*(quantisation.get(key) or ["lm_head"]), *missing]


def _is_match(entry: str, module: str) -> bool:
    """Tell whether an entry is a module, a parent of it, or a pattern of either."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    parts = module.split(".")
    holders = (".".join(parts[: n + 1]) for n in range(len(parts)))
    return any(fnmatchcase(holder, entry) for holder in holders)


INDEX, SHARD = "model.safetensors.index.json", "model-mtp.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Dtypes of plain numbers, as safetensors names them."""


def stitch_layer(folder: Path, head: MtpHead, final: Path) -> list[str]:
    """Write a model's folder with a head's layer, atomically.

    Args:
        folder: folder of the model, with or without such a layer.
        head: head that holds the layer.
        final: folder to write; replaced if it exists.

    Returns:
        Names of the files with tensors of the layer.

    Raises:
        InputError: the model has another family, sizes or vocabulary, shards are missing, the disk
            is full, or the written layer differs.
    """
    config, what = load_model_config(folder), f"target.path={folder}"
    family = _find_matching_family(config, head, what)
    num_layers = count_decoder_layers(config)
    files = find_weight_files(folder, "model")
    if files is None:
        raise InputError(f"{what}: some of its safetensors files are missing; download it again")
    places = find_mtp_tensors(folder, family, num_layers, what)
    layer = _name_stored_tensors(head, family, num_layers, places, _find_common_dtype(files))
    layer |= _lacking_copies(family.copy_names(num_layers), files)
    written = sorted({places[name].name for name in layer if name in places} | {SHARD})

    def fill(staging: Path) -> None:
        for path in folder.iterdir():
            if path.is_file() and path not in files and path.name not in (INDEX, "config.json"):
                _link_or_copy(path, staging / path.name)
        rest: dict[str, Tensor] = dict(layer)
        weight_map: dict[str, str] = {}
        for file in files:
            kept = [name for name in load_tensor_table(file) if name not in places]
            own = {name: rest.pop(name) for name in list(rest) if places.get(name) == file}
            # Once there is a second file, readers need an index and look for this name.
            name = "model-00001-of-00001.safetensors" if file.stem == "model" else file.name
            if not own and len(kept) == len(load_tensor_table(file)):
                _link_or_copy(file, staging / name)
            elif own or kept:
                save_file(
                    _load_tensors(file, kept) | own, staging / name, metadata={"format": "pt"}
                )
            weight_map |= dict.fromkeys([*kept, *own], name)
        if rest:
            save_file(rest, staging / SHARD, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(rest, SHARD)
        index = {"metadata": _build_index_metadata(staging, weight_map), "weight_map": weight_map}
        (staging / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        changed = _with_layer(config, family, {name: t.shape for name, t in layer.items()})
        (staging / "config.json").write_text(json.dumps(changed, indent=2))
        _check_written_layer(staging, head)

    write_folder(final, fill)
    return [name for name in written if (final / name).is_file()]


def _check_written_layer(folder: Path, head: MtpHead) -> None:
    """Read a layer back and compare.

    Raises:
        InputError: it is not the head's layer, rounded to the dtype of the model's files.
    """
    found = MtpHead.from_folder(folder, str(folder), None)
    assert found is not None
    read = found.build_files().tensors
    for name, tensor in head.build_files().tensors.items():
        if not torch.allclose(read[name], tensor.cpu(), rtol=2**-7, atol=1e-6):
            raise InputError(
                f"{folder}: {name} was written with other values; check the disk and start again"
            )


def _find_matching_family(config: Mapping[str, Any], head: MtpHead, what: str) -> MtpFamily:
    """Table entry of the model's family.

    Raises:
        InputError: the model has none, or the head has another family or other sizes.
    """
    name = find_family(config)
    if name is None:
        raise InputError(
            f"{what}: is {config.get('architectures')}, whose MTP layer is unknown; allowed: "
            f"{KNOWN}"
        )
    if FAMILIES[name] != head.config.family_entry:
        raise InputError(
            f"head.path: an MTP layer of {head.config.family}, but {what} is {name}; name a layer "
            "of its own kind"
        )
    text = config.get("text_config") or config
    for key in ("hidden_size", "vocab_size"):
        mine = getattr(head.config, key)
        if text[key] != mine:
            raise InputError(format_size_mismatch(key, mine, head.config.target, what, text[key]))
    return FAMILIES[name]


def _name_stored_tensors(
    head: MtpHead,
    family: MtpFamily,
    num_layers: int,
    places: Mapping[str, Path],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The layer's tensors under the names of the model's files, with experts as stored there."""
    held = head.build_files().tensors
    joined = any(name.endswith(".experts.down_proj") for name in places)
    stored: dict[str, Tensor] = {}
    for name, tensor in (held if joined else split_experts(held)).items():
        theirs = family.to_stored_name(name, num_layers)
        before = places.get(theirs)
        wanted = dtype
        if before is not None:
            with safe_open(before, "pt") as opened:
                wanted = opened.get_tensor(theirs).dtype
        stored[theirs] = tensor.to("cpu", wanted).contiguous().clone()
    return stored


def _lacking_copies(names: list[str], files: list[Path]) -> dict[str, Tensor]:
    """Copies of the model's embedding and output head that its files lack.

    None for quantised ones; engines then share the model's own.
    """
    held = {name: (file, held) for file in files for name, held in load_tensor_table(file).items()}
    is_tied = not any(name.startswith("lm_head.") for name in held)
    copies: dict[str, Tensor] = {}
    for name, end in zip(names, (EMBEDDING, EMBEDDING if is_tied else HEAD), strict=False):
        if name not in held and end in held and held[end][1]["dtype"] in DTYPES:
            copies[name] = _load_tensors(held[end][0], [end])[end].clone()
    return copies


def _find_common_dtype(files: list[Path]) -> torch.dtype:
    """Dtype of most unquantised bytes; bfloat16 if a model has none."""
    sizes = Counter[str]()
    for tensor in chain.from_iterable(load_tensor_table(file).values() for file in files):
        begin, end = tensor["data_offsets"]
        sizes[tensor["dtype"]] += end - begin
    known = [name for name, _ in sizes.most_common() if name in DTYPES]
    return DTYPES[known[0]] if known else torch.bfloat16


def _load_tensors(file: Path, names: list[str]) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in names}


def _link_or_copy(path: Path, copy: Path) -> None:
    """Link the same bytes under another name; on another disk, copy them."""
    try:
        os.link(path.resolve(), copy)
    except OSError:
        shutil.copyfile(path, copy)


def _build_index_metadata(folder: Path, weight_map: Mapping[str, str]) -> dict[str, int]:
    total = 0
    for file in set(weight_map.values()):
        for tensor in load_tensor_table(folder / file).values():
            begin, end = tensor["data_offsets"]
            total += end - begin
    return {"total_size": total}


def _with_layer(
    config: dict[str, Any], family: MtpFamily, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Config that counts the layer and excludes it from the model's quantisation."""
    changed = json.loads(json.dumps(config))
    text = changed.get("text_config") or changed
    found = ((at, key) for at in (text, changed) for key in family.counts if key in at)
    place, key = next(found, (text, family.counts[0]))
    place[key] = place.get(key) or 1
    add_unquantized_modules(changed.get("quantization_config") or {}, find_matrix_modules(shapes))
    return changed


def find_matrix_modules(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Modules whose weights are matrices, from tensors by name."""
    return sorted(
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) > 1
    )
