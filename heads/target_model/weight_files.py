"""The weight files of a model: their tensors, and which of them the model would leave out.

Format: safetensors, https://github.com/huggingface/safetensors.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file

from conf.errors import InputError
from conf.settings.target import TargetConfig

MAX_HEADER_BYTES = 100_000_000
"""Most bytes of a header, as the reader of the safetensors format has it."""
CODES = ("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2")
"""Dtypes of quantised weights, as safetensors calls them."""
SAMPLE_BYTES = 2048
OF_QUANTISATION = ("scale", "zero", "qweight", "g_idx", "SCB", "absmax")
CONSTANTS = ("inv_freq", "cos_cached", "sin_cached", "masked_bias", "position_ids")
"""Constants that older versions of transformers kept among the weights."""
OF_ENGINES = ("k_scale", "v_scale", "kv_scale", "_extra_state")
"""Scales of caches that serving engines quantise, and states of layers that trained in FP8; no
weight needs one."""


def weight_files(folder: Path, name: str) -> list[Path] | None:
    """The files of a folder that are loaded; None if they are not all there.

    Like transformers, which reads one file of all weights before it looks for shards. The name is
    `model` or `adapter_model`.
    """
    index, one = folder / f"{name}.safetensors.index.json", folder / f"{name}.safetensors"
    names = {one.name}
    if index.is_file() and not one.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    files = [folder / file_name for file_name in sorted(names)]
    return files if all(file.is_file() for file in files) else None


def tensors(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a file by name: `dtype`, `shape`, and `data_offsets` from its beginning.

    Raises:
        InputError: it is not a safetensors file.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(size, MAX_HEADER_BYTES)))
            header.pop("__metadata__", None)
            for tensor in header.values():
                tensor["data_offsets"] = [8 + size + place for place in tensor["data_offsets"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file}: not a safetensors file ({error!r})") from error
    return header


def checksum(files: Iterable[tuple[Path, dict[str, dict[str, Any]]]]) -> str:
    """Checksum of a sample of every tensor: its name, dtype, shape, and bytes of three places.

    Args:
        files: each with its tensors, as `tensors` has them; which file holds a tensor, and in
            which order, makes no difference.
    """
    samples = sorted(sample for file, held in files for sample in _samples(file, held))
    return hashlib.sha256(b"".join(samples)).hexdigest()


def _samples(file: Path, held: dict[str, dict[str, Any]]) -> Iterator[bytes]:
    with file.open("rb") as stream:
        for name, tensor in held.items():
            begin, end = tensor["data_offsets"]
            parts = [json.dumps([name, tensor["dtype"], tensor["shape"]]).encode()]
            last = max(begin, end - SAMPLE_BYTES)
            for place in sorted({begin, (begin + last) // 2, last}):
                stream.seek(place)
                parts.append(stream.read(min(SAMPLE_BYTES, end - begin)))
            yield b"".join(parts)


def complete(config: TargetConfig, model: Any, info: dict[str, Any]) -> Any:
    """A model for all of whose parameters there were weights.

    Raises:
        InputError: with those for which there were none; transformers draws them.
    """
    lacking = sorted(info["missing_keys"])
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise InputError(
            f"target.path={config.path}: its files lack weights of {type(model).__name__}: "
            f"{lacking[0]}{more}"
        )
    return model


def check_used(config: TargetConfig, model: nn.Module, unexpected: Iterable[str]) -> None:
    """Refuses weights that would change what a model computes; prints which others are left out.

    A weight of a module that computes, of one of the layers or of an adapter changes that; whole
    layers and modules beside them, such as those for multi-token prediction, do not.

    Args:
        config: where the model is.
        model: as it was loaded.
        unexpected: names of weights in its files that it does not have.

    Raises:
        InputError: naming the first of them.
    """
    buffers = {name for name, _ in model.named_buffers()}
    modules = dict(model.named_modules())
    computing, beside = [], set()
    for key in sorted(unexpected):
        if key in buffers or key.endswith(CONSTANTS + OF_ENGINES):
            continue
        parts = key.split(".")
        depth = max(n for n in range(len(parts)) if ".".join(parts[:n]) in modules)
        within = [modules[".".join(parts[:n])] for n in range(depth + 1)]
        # A whole layer that the model does not have ends at the list of those that it has.
        in_layer = any(isinstance(module, nn.ModuleList) for module in within[:-1])
        if in_layer or not list(within[-1].children()) or "lora_" in key:
            computing.append(key)
        else:
            beside.add(".".join(parts[: depth + 1]))
    if computing:
        first, more = computing[0], f" and {len(computing) - 1} more" if len(computing) > 1 else ""
        advice = "Its config.json is that of another model: name the right one"
        if "lora_" in first:
            advice = "They are of an adapter: merge it, or name its folder as target.adapter"
        elif any(word in first for word in OF_QUANTISATION):
            advice = (
                "They are of a quantisation that transformers does not read: name the model without"
            )
        raise InputError(
            f"target.path={config.path}: its files hold weights that {type(model).__name__} would "
            f"leave out and compute something else: {first}{more}. {advice}"
        )
    if beside:
        print(  # noqa: T201
            f"target.path={config.path}: left out, as the language model does not use them: "
            f"{', '.join(sorted(beside))}",
            file=sys.stderr,
        )


def reads_codes(model_config: Any) -> bool:
    """True where transformers knows what quantised weights in a model's files stand for.

    The config is that before the model is loaded, which may take the quantisation away.
    """
    stored = getattr(model_config, "quantization_config", None)
    stored = stored or getattr(model_config.get_text_config(), "quantization_config", None) or {}
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    # A config says `bitsandbytes`, the table `bitsandbytes_4bit` and `bitsandbytes_8bit`.
    return any(f"{name}_".startswith(f"{method}_") for name in AUTO_QUANTIZATION_CONFIG_MAPPING)


def check_codes(config: TargetConfig, place: str, is_read: Callable[[str], bool]) -> None:
    """Refuses one-byte weights of files that `is_read` into the model as if they were numbers.

    Args:
        config: of the target, for the message.
        place: folder or Hub id that its files are read from.
        is_read: of the name of a tensor.

    Raises:
        InputError: naming the first of them.
    """
    config_file = cached_file(
        place, "config.json", revision=config.revision, local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
    )  # fmt: skip
    files = config_file and weight_files(Path(str(config_file)).parent, "model")
    for file in files or ():
        for name, tensor in tensors(file).items():
            if tensor["dtype"] in CODES and is_read(name):
                raise InputError(
                    f"target.path={config.path}: {name} holds codes of dtype {tensor['dtype']}, "
                    "of a quantisation that transformers does not read: name the model without"
                )
