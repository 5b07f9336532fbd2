"""Reader of MTP tensors in a model's own files, which transformers does not load.

Format: safetensors with the names of `heads/mtp/families.py`; experts in one tensor each, or all in
one.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from conf.errors import InputError
from heads.folders import find_weight_files, load_model_config
from heads.mtp.families import FAMILIES, UNSUPPORTED_REASONS, MtpFamily
from heads.target_model.weight_files import load_tensor_table

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
JOINED_EXPERTS = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}
"""Expert tensors of transformers' modules, each with the projections that it holds."""


def find_family(config: Mapping[str, Any]) -> str | None:
    """Find the family of the model with this `config.json`; None if the table lacks it."""
    return next((name for name in config.get("architectures") or () if name in FAMILIES), None)


def find_unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Find the reason why the MTP layer of a whole model cannot be read; None without one."""
    model_type = (config.get("text_config") or config).get("model_type", "")
    whole = any(re.match("(?!Eagle).*For(CausalLM|Cond)", n) for n in config["architectures"] or ())
    return UNSUPPORTED_REASONS.get(model_type) if whole else None


def count_declared_layers(config: Mapping[str, Any], family: MtpFamily) -> int:
    """Count the MTP layers that a `config.json` names."""
    places = (config.get("text_config") or config, config)
    return next(
        (section[key] for section in places for key in family.counts if section.get(key)), 0
    )


def find_mtp_tensors(
    folder: Path, family: MtpFamily, num_layers: int, path: str
) -> dict[str, Path]:
    """Find the MTP tensors in a model's folder: their names, each with its file.

    Raises:
        InputError: a shard or a tensor of the index is missing, or a file is damaged.
    """
    return {
        name: file
        for file in find_weight_files(path, folder)
        for name in load_tensor_table(file)
        if family.to_own_name(name, num_layers) is not None
    }


def load_mtp_tensors(folder: Path, config: Mapping[str, Any], path: str) -> dict[str, Tensor]:
    """Load the MTP tensors of a model in float32, by their names in `MtpHead`; empty without any.

    Args:
        folder: folder of the model.
        config: content of the model's `config.json`, whose family is in the table.
        path: name of the model in messages.

    Raises:
        InputError: a shard is missing, a tensor is quantised, or the layer that the config names is
            missing.
    """
    family = FAMILIES[str(find_family(config))]
    num_layers = count_decoder_layers(config)
    files_by_name = find_mtp_tensors(folder, family, num_layers, path)
    promised = count_declared_layers(config, family)
    if not files_by_name and promised:
        raise InputError(f"{path}: {format_dropped_layers(promised)}; name the original model")
    tensors: dict[str, Tensor] = {}
    for name, file in files_by_name.items():
        with safe_open(file, "pt") as opened:
            tensor = opened.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise InputError(
                f"{path}: {name} is {tensor.dtype}, but a quantised MTP layer cannot be read; name "
                "the model before quantisation"
            )
        tensors[str(family.to_own_name(name, num_layers))] = tensor.float()
    return join_experts(tensors)


def format_dropped_layers(promised: int) -> str:
    """Format the message about MTP layers that a config names but no file holds."""
    return (
        f"config.json names {promised} MTP layers, but no file holds them, so fine-tuning, merging "
        "or quantising has dropped them"
    )


def count_decoder_layers(config: Mapping[str, Any]) -> int:
    """Count the decoder layers of a model, without MTP layers."""
    text = config.get("text_config") or config
    return text.get("num_hidden_layers") or len(text["layers_block_type"])


def find_mtp_layers(path: str, revision: str | None = None) -> tuple[int, bool]:
    """Count the MTP layers that a model's config names, and tell whether its files hold one.

    Args:
        path: folder, or Hub id, of which only the config and the index of shards are downloaded.
        revision: revision of a Hub id.

    Returns:
        The number of MTP layers, 0 if unknown, and whether the files hold one.
    """
    folder = Path(path)
    try:
        file = cached_file(path, "config.json", revision=revision)
        config = load_model_config(Path(str(file)).parent)
        name = find_family(config)
        if name is None:
            return 0, False
        family, num_layers = FAMILIES[name], count_decoder_layers(config)
        promised = count_declared_layers(config, family)
        if folder.is_dir():
            return promised, bool(find_mtp_tensors(folder, family, num_layers, path))
        index = cached_file(path, "model.safetensors.index.json", revision=revision)
        weight_map = json.loads(Path(str(index)).read_text())["weight_map"]
    except (OSError, InputError):
        return 0, False
    return promised, any(family.to_own_name(stored, num_layers) for stored in weight_map)


def join_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the tensors of single experts into those of transformers' modules."""
    single: dict[str, dict[tuple[int, str], Tensor]] = {}
    joined: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts, number, kind = match.groups()
            single.setdefault(experts, {})[int(number), kind] = tensor
        else:
            joined[name] = tensor
    for experts, tensors_by_projection in single.items():
        numbers = sorted({number for number, _ in tensors_by_projection})
        has_gates = (0, "gate") in tensors_by_projection
        for name in ("gate_up_proj" if has_gates else "up_proj", "down_proj"):
            kinds = JOINED_EXPERTS[name]
            rows = [
                torch.cat([tensors_by_projection[number, kind] for kind in kinds])
                for number in numbers
            ]
            joined[f"{experts}.{name}"] = torch.stack(rows)
    return joined


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split joined experts into one tensor per projection and expert, as `join_experts` reads."""
    single: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, last = name.rpartition(".")
        if last not in JOINED_EXPERTS or not experts.endswith(".experts"):
            single[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = expert.chunk(len(JOINED_EXPERTS[last]))
            for kind, part in zip(JOINED_EXPERTS[last], parts, strict=True):
                single[f"{experts}.{number}.{kind}_proj.weight"] = part.contiguous()
    return single
