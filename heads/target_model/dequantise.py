"""A GGUF target as a folder like any other: dequantised once on a machine, by transformers.

transformers reads a GGUF anew for config, tokenizer and weights, and in every process holds all
weights in memory: SmolLM2 of 135M parameters (Q4_1) takes 19 s of an AVX2 core each time, 4 of them
for the weights and the rest for its 49,152 words; the folder takes 0.2 s. So it does that once, for
the folder, and what it would have left out without a word is found here.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.utils.quantization_config import GgufConfig

from conf.errors import InputError
from conf.files import cache_dir, gguf_parts, make_folder
from conf.settings.target import TargetConfig
from heads.gguf_target import ROPE_FACTORS, GgufTarget, find_gguf
from heads.storage import write_folder
from heads.target_model import sizes
from heads.target_model.errors import naming_target
from heads.target_model.language import language_class
from heads.target_model.weight_files import checksum, complete

FORMAT = 1
"""Version of the folders; a change of their content counts it up."""
BYTES_PER_VALUE = 4
STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Tokens of a GGUF's vocabulary at which llama.cpp ends a text."""
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""Names that a GGUF has for a tokenizer's special tokens."""
VOCABULARIES = ("gpt2", "llama", "gemma4", "t5")
"""Types of vocabularies of which transformers makes a tokenizer."""
SCALED = {"linear", "dynamic", "yarn", "llama3", "longrope"}
"""Types of RoPE that a GGUF tells by metadata or tensors."""
STATED = {
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.key_length": "head_dim",
}
"""Facts of a GGUF that shapes do not show, and what a config calls them."""


def folder_of(config: TargetConfig) -> str:
    """The folder or Hub id of a target's files; a GGUF's is on this machine, and made if need be.

    Raises:
        InputError: a GGUF that transformers does not read, or reads otherwise than llama.cpp.
    """
    assert config.path is not None
    if gguf_parts(config.path) is None:
        return config.path
    gguf = find_gguf(config.path, config.revision)
    made = json.dumps([FORMAT, transformers.__version__, gguf.header, weights_of(gguf), _own(gguf)])
    key = sha256(made.encode()).hexdigest()[:16]
    folder = cache_dir() / "gguf" / f"{gguf.file.stem}-{key}"
    if not folder.is_dir():
        _check_readable(gguf)
        make_folder(folder.parent)
        # Several processes start at once: one makes it, the others wait.
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                _check_room(gguf, folder.parent)
                with naming_target(config):
                    write_folder(folder, partial(_fill, config, gguf))
    return str(folder)


def weights_of(gguf: GgufTarget) -> str:
    """Checksum of a sample of every tensor of a file."""
    return checksum([(gguf.file, gguf.tensors)])


def described(gguf: GgufTarget) -> dict[str, Any]:
    """Facts that decide the architecture: the file's own, and the config beside it."""
    return gguf.stated | {"beside": _config_beside(gguf)}


def read_config(file: Path) -> dict[str, Any]:
    """The content of a `config.json`, whichever version of transformers saved it last."""
    stored: dict[str, Any] = json.loads(file.read_text())
    stored.pop("transformers_version", None)
    return stored


def _own(gguf: GgufTarget) -> dict[str, str]:
    """Checksums of the files beside."""
    return {name: sha256(file.read_bytes()).hexdigest() for name, file in gguf.beside.items()}


def _config_beside(gguf: GgufTarget) -> dict[str, Any] | None:
    """The config beside the file; None if it is none, or names no more than a type."""
    file = gguf.beside.get("config.json")
    stored = None if file is None else read_config(file)
    return stored if stored and "architectures" in stored else None


def _check_readable(gguf: GgufTarget) -> None:
    def plain(name: str) -> str:
        return name.replace("-", "").replace("_", "")

    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

    known = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer"}
    if plain(gguf.architecture) not in {plain(name) for name in known}:
        raise InputError(
            f"{gguf.what}: of architecture {gguf.architecture}, which transformers does not "
            f"dequantise (it does {', '.join(sorted(known))}): name the model that the file was "
            "made of"
        )


def _check_room(gguf: GgufTarget, place: Path) -> None:
    needed, free = gguf.num_values * BYTES_PER_VALUE, shutil.disk_usage(place).free
    if needed > free:
        raise InputError(
            f"{gguf.what}: dequantised it takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
            f"free in {place}: make room, or name a folder on another disk as HEADSMITH_CACHE"
        )
    print(  # noqa: T201
        f"{gguf.what}: dequantising {gguf.quantization} to {place}, once: "
        f"{needed / 1e9:.1f} GB there, and as much memory meanwhile",
        file=sys.stderr,
    )


def _fill(config: TargetConfig, gguf: GgufTarget, staging: Path) -> None:
    """Writes config, tokenizer and weights as transformers has them."""
    of_file = {"gguf_file": gguf.name}
    whole = _config_beside(gguf) is not None
    model_config = AutoConfig.from_pretrained(gguf.folder, **({} if whole else of_file))
    _check_stated(gguf, model_config.get_text_config())
    model, info = language_class(model_config).from_pretrained(
        gguf.folder,
        config=model_config,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        **of_file,
    )
    _check_all_read(gguf, complete(config, model, info), info["unexpected_keys"])
    for parameter in model.parameters():
        parameter.data = _narrowest(parameter.data)
    model.generation_config = _generation_config(gguf, model)
    model.save_pretrained(staging)
    _save_tokenizer(gguf, staging)


def _check_stated(gguf: GgufTarget, config: Any) -> None:
    """Refuses a config by which transformers would compute otherwise than llama.cpp."""
    by_layer = getattr(config, "per_layer_attributes", None) or ()
    found = {
        name: None if key in by_layer else getattr(config, key, None)
        for name, key in STATED.items()
    }
    found["block_count"] = sizes.num_layers(config) + (gguf.about("nextn_predict_layers") or 0)
    found["rope.freq_base"] = sizes.rope(config)["rope_theta"]
    for name, other in found.items():
        value = gguf.about(name)
        if value is None or other is None or isinstance(value, list):  # of one layer each
            continue
        if not math.isclose(value, other, rel_tol=1e-5):
            raise InputError(
                f"{gguf.what}: says {name}={value:g}, and its config {other:g}: {_put_config(gguf)}"
            )
    kinds = _rope_types(config)
    kind = gguf.about("rope.scaling.type")
    scales = [name for name in gguf.tensors if name.startswith(ROPE_FACTORS)]
    scales += [f"rope.scaling.type={kind}"] if kind not in (None, "none") else []
    if scales and kinds == {"default"}:
        raise InputError(
            f"{gguf.what}: scales RoPE ({scales[0]}), which transformers does not read from a "
            f"GGUF: {_put_config(gguf)}"
        )
    if kinds & SCALED and not scales:
        raise InputError(
            f"{gguf.what}: does not scale RoPE, and its config does ({sorted(kinds & SCALED)[0]}): "
            f"{_put_config(gguf)}"
        )


def _put_config(gguf: GgufTarget) -> str:
    return f"put the config.json of the model that it was made of into {gguf.folder}"


def _rope_types(config: Any) -> set[str]:
    """The types of RoPE of all layers."""
    stated = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [rope for rope in stated.values() if isinstance(rope, dict)]
    return {rope.get("rope_type", "default") for rope in by_layer_type or [stated]}


def _check_all_read(gguf: GgufTarget, model: Any, unexpected: Iterable[str]) -> None:
    """Refuses a file of whose tensors some were left out, mostly without a word."""
    layers = sizes.num_layers(model.config.get_text_config())
    values = {
        name: math.prod(tensor["shape"])
        for name, tensor in gguf.tensors.items()
        # Beyond the last layer lie those that predict several tokens.
        if not name.startswith(ROPE_FACTORS) and _layer(name) < layers
    }
    read = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    if sum(values.values()) <= sum(read.values()):
        return
    processor = TENSOR_PROCESSORS.get(gguf.architecture, TensorProcessor)(config={})
    known = get_gguf_hf_weights_map(model, processor)
    left = sorted(unexpected) or [name for name in values if name not in known]
    raise InputError(
        f"{gguf.what}: transformers leaves out {', '.join(left[:1])} and {len(left) - 1} more of "
        "its tensors, and would compute something else: name the model that the file was made of"
    )


def _layer(name: str) -> int:
    """The number of a tensor's layer; -1 outside them."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else -1


def _narrowest(values: Tensor) -> Tensor:
    """The same float32 values in the smallest dtype that holds them."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if torch.equal(narrow.float(), values):
            return narrow
    return values


def _generation_config(gguf: GgufTarget, model: Any) -> GenerationConfig:
    """The generation config beside the file, or the model's with all of llama.cpp's stop tokens."""
    if "generation_config.json" in gguf.beside:
        return GenerationConfig.from_pretrained(gguf.folder)
    found = [gguf.fact(f"tokenizer.ggml.{name}") for name in STOPS]
    stops = list(dict.fromkeys(stop for stop in found if stop is not None))
    model.generation_config.eos_token_id = stops or None
    return model.generation_config


def _save_tokenizer(gguf: GgufTarget, staging: Path) -> None:
    """Writes that beside the file, or else the file's own."""
    own = not {"tokenizer.json", "tokenizer_config.json"} & set(gguf.beside)
    of_file = {"gguf_file": gguf.name} if own else {}
    tokens, kind = gguf.fact("tokenizer.ggml.tokens"), gguf.fact("tokenizer.ggml.model")
    if own and (kind not in VOCABULARIES or not tokens):
        raise InputError(
            f"{gguf.what}: its vocabulary is of type {kind}, and transformers reads "
            f"{', '.join(VOCABULARIES)}: put the tokenizer.json of the model that it was made of "
            f"into {gguf.folder}"
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf.folder, **of_file)
    if own:  # in whose place transformers 5.17 has its own
        for name, key in SPECIAL.items():
            number = gguf.fact(f"tokenizer.ggml.{key}")
            setattr(tokenizer, name, None if number is None else tokens[number])
    if tokenizer.chat_template is None:
        tokenizer.chat_template = gguf.fact("tokenizer.chat_template")
    tokenizer.save_pretrained(staging)
    if own:
        # transformers adds GPT-2's special token where a vocabulary has none, behind its end.
        rules = json.loads((staging / "tokenizer.json").read_text())
        rules["added_tokens"] = [each for each in rules["added_tokens"] if each["id"] < len(tokens)]
        (staging / "tokenizer.json").write_text(json.dumps(rules, ensure_ascii=False))
