"""Weight files of a model: their tensors, unused and missing weights, and errors of reading them.

Format: safetensors, https://github.com/huggingface/safetensors.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file

from conf.errors import InputError
from conf.settings.target import TargetConfig
from heads.folders import find_weight_files
from heads.target_model.decoder import MODEL_ERRORS

MAX_HEADER_BYTES = 100_000_000
"""Largest header in bytes, as in the reference reader of safetensors."""
CODES = ("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2")
"""Dtypes of quantised weights in safetensors."""
SAMPLE_BYTES = 2048
OF_QUANTISATION = ("scale", "zero", "qweight", "g_idx", "SCB", "absmax")
CONSTANTS = ("inv_freq", "cos_cached", "sin_cached", "masked_bias", "position_ids")
"""Constants that older versions of transformers stored with the weights."""
OF_ENGINES = ("k_scale", "v_scale", "kv_scale", "_extra_state")
"""Scales of quantised caches in serving engines, and states of layers trained in FP8, which no
weight needs."""
LONGEST_REASON = 300
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of a config that count layers for multi-token prediction, which follow the others."""
MTP_WEIGHTS = {"enorm.weight", "hnorm.weight", "eh_proj.weight"}
"""Names of weights, within a layer, that only a layer for multi-token prediction has."""


def load_tensor_table(file: Path) -> dict[str, dict[str, Any]]:
    """Load the table of a file's tensors by name, with `dtype`, `shape` and `data_offsets`.

    Offsets count from the start of the file, in bytes.

    Raises:
        InputError: the file is no safetensors file.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(size, MAX_HEADER_BYTES)))
            header.pop("__metadata__", None)
            for tensor in header.values():
                tensor["data_offsets"] = [8 + size + place for place in tensor["data_offsets"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{file}: not a safetensors file ({error!r}); download it again"
            ) from error
    return header


def compute_checksum(files: Iterable[tuple[Path, dict[str, dict[str, Any]]]]) -> str:
    """Compute the checksum of samples of every tensor: name, dtype, shape and some bytes.

    The bytes are `SAMPLE_BYTES` at three places.

    Args:
        files: files with their tensors, as from `load_tensor_table`. The result does not depend on
            the division into files.
    """
    samples: list[bytes] = []
    for file, table in files:
        with file.open("rb") as stream:
            for name, tensor in table.items():
                begin, end = tensor["data_offsets"]
                parts = [json.dumps([name, tensor["dtype"], tensor["shape"]]).encode()]
                last = max(begin, end - SAMPLE_BYTES)
                for place in sorted({begin, (begin + last) // 2, last}):
                    stream.seek(place)
                    parts.append(stream.read(min(SAMPLE_BYTES, end - begin)))
                samples.append(b"".join(parts))
    return hashlib.sha256(b"".join(sorted(samples))).hexdigest()


def check_complete(config: TargetConfig, model: Any, info: dict[str, Any]) -> Any:
    """Return a model if its files had weights for all parameters.

    Raises:
        InputError: naming parameters without weights, which transformers would initialise randomly.
    """
    lacking = sorted(info["missing_keys"])
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise InputError(
            f"target.path={config.path}: its files lack weights of {type(model).__name__}: "
            f"{lacking[0]}{more}"
        )
    return model


def refuse_untied_weights(config: TargetConfig, model: Any) -> None:
    """Refuse files with two weights where the config says that one serves for both.

    transformers then takes both weights, and engines take one.

    Raises:
        InputError: naming both weights.
    """
    stated = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, other in stated.items():
        if name not in model.all_tied_weights_keys:
            raise InputError(
                f"target.path={config.path}: config.json says tie_word_embeddings=true, but its "
                f"files hold {name} and {other}, which differ; set tie_word_embeddings to false, "
                f"or take {name} out of the files"
            )


def check_unused_weights(config: TargetConfig, model: nn.Module, unexpected: Iterable[str]) -> None:
    """Refuse unused weights that should change the computation; print other unused weights.

    These are weights of computing modules, of existing and further layers, and of adapters. Layers
    for multi-token prediction and whole further modules do not change it.

    Args:
        config: target settings.
        model: loaded model.
        unexpected: names of weights in the files that the model lacks.

    Raises:
        InputError: naming the first such weight, or both numbers of layers.
    """
    buffers = {name for name, _ in model.named_buffers()}
    modules = dict(model.named_modules())
    computing, beside = [], set()
    further: dict[tuple[str, int], list[str]] = {}
    for key in sorted(unexpected):
        if key in buffers or key.endswith(CONSTANTS + OF_ENGINES):
            continue
        parts = key.split(".")
        depth = max(n for n in range(len(parts)) if ".".join(parts[:n]) in modules)
        within = [modules[".".join(parts[:n])] for n in range(depth + 1)]
        # The path of a further layer ends at the list of existing layers.
        in_layer = any(isinstance(module, nn.ModuleList) for module in within[:-1])
        if isinstance(within[-1], nn.ModuleList) and not in_layer and parts[depth].isdigit():
            layer = (".".join(parts[:depth]), int(parts[depth]))
            further.setdefault(layer, []).append(".".join(parts[depth + 1 :]))
        if in_layer or not list(within[-1].children()) or "lora_" in key:
            computing.append(key)
        else:
            beside.add(".".join(parts[: depth + 1]))
    if computing:
        first, more = computing[0], f" and {len(computing) - 1} more" if len(computing) > 1 else ""
        advice = "Its config.json belongs to another model: name the right one"
        if "lora_" in first:
            advice = "They belong to an adapter: merge it, or set target.adapter to its folder"
        elif any(word in first for word in OF_QUANTISATION):
            advice = (
                "They are of a quantisation that transformers does not read: name the model without"
            )
        raise InputError(
            f"target.path={config.path}: its files hold weights that {type(model).__name__} would "
            f"leave out and compute something else: {first}{more}. {advice}"
        )
    _check_layer_count(config, model, further)
    if beside:
        print(  # noqa: T201
            f"target.path={config.path}: left out, as the language model does not use them: "
            f"{', '.join(sorted(beside))}",
            file=sys.stderr,
        )


def _check_layer_count(
    config: TargetConfig, model: nn.Module, further: dict[tuple[str, int], list[str]]
) -> None:
    """Refuse files with more decoder layers than a model.

    Args:
        config: target settings.
        model: loaded model.
        further: names of weights within a layer, by the list and the number of the layer.
    """
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    num_promised = max(getattr(text, key, None) or 0 for key in MTP_COUNTS)
    for (name, number), weights in sorted(further.items(), reverse=True):
        num_layers = len(model.get_submodule(name))  # type: ignore[arg-type]
        if number >= num_layers + num_promised and not MTP_WEIGHTS.intersection(weights):
            raise InputError(
                f"target.path={config.path}: its config.json asks for {num_layers} layers "
                f"({name}), but its files hold {number + 1}, so the model would compute something "
                f"else. Set num_hidden_layers={number + 1} there, or name the right model"
            )


def can_read_quantization(model_config: Any) -> bool:
    """Tell whether transformers knows the quantisation of a model's weights.

    The config is that before loading, which may remove the quantisation.
    """
    stored = getattr(model_config, "quantization_config", None)
    stored = stored or getattr(model_config.get_text_config(), "quantization_config", None) or {}
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    # A config says `bitsandbytes`, but the table `bitsandbytes_4bit` and `bitsandbytes_8bit`.
    return any(f"{name}_".startswith(f"{method}_") for name in AUTO_QUANTIZATION_CONFIG_MAPPING)


def check_quantized_codes(config: TargetConfig, place: str, is_read: Callable[[str], bool]) -> None:
    """Refuse quantised one-byte weights that would be read as plain numbers.

    Args:
        config: target settings, for the message.
        place: folder or Hub id of the files.
        is_read: function that tells whether a tensor is read, by its name.

    Raises:
        InputError: naming the first such tensor.
    """
    config_file = cached_file(
        place, "config.json", revision=config.revision, local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
    )  # fmt: skip
    folder = Path(str(config_file)).parent
    files = find_weight_files(f"target.path={config.path}", folder) if config_file else []
    for file in files:
        for name, tensor in load_tensor_table(file).items():
            if tensor["dtype"] in CODES and is_read(name):
                raise InputError(
                    f"target.path={config.path}: {name} holds codes of dtype {tensor['dtype']}, "
                    "of a quantisation that transformers does not read: name the model without"
                )


@contextmanager
def report_target_errors(config: TargetConfig, setting: str = "path") -> Iterator[None]:
    """Turn errors of files or their content into an `InputError` inside this context.

    The message names the setting.
    """
    try:
        yield
    except InputError:
        raise
    except (OSError, ImportError, SafetensorError, StrictDataclassError, *MODEL_ERRORS) as error:
        # Some messages list everything that transformers knows.
        reason = shorten(str(error), LONGEST_REASON, placeholder=" ...")
        raise InputError(
            f"target.{setting}={getattr(config, setting)}: cannot load it: {reason}"
        ) from error
