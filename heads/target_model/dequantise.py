"""Dequantisation of a GGUF target into a normal folder, once per machine, with transformers.

transformers parses a GGUF file anew for config, tokenizer and weights, and holds all weights in
memory in every process. SmolLM2 of 135M parameters (Q4_1) takes 19 s of an AVX2 core each time, 4
of them for the weights and the rest for its 49,152 tokens; the folder takes 0.2 s. Tensors that
transformers drops silently are found here.
"""

import json
import math
import re
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
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.utils.quantization_config import GgufConfig

from conf.errors import InputError
from conf.files import cache_dir, make_folder, split_gguf_path
from conf.settings.target import TargetConfig
from heads.folders import write_folder
from heads.gguf_target import ROPE_FACTORS, GgufTarget, load_gguf_target
from heads.target_model.architecture import count_layers, find_rope
from heads.target_model.decoder import find_language_class
from heads.target_model.weight_files import check_complete, compute_checksum, report_target_errors

FORMAT = 1
"""Version of the folders' content."""
BYTES_PER_VALUE = 4
STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Token keys of a GGUF file at which llama.cpp ends a text."""
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""GGUF names of a tokenizer's special tokens."""
VOCABULARIES = ("gpt2", "llama", "gemma4", "t5")
"""Types of vocabularies that transformers turns into a tokenizer."""
SCALED = {"linear", "dynamic", "yarn", "llama3", "longrope"}
"""Types of RoPE that metadata or tensors of a GGUF file name."""
STATED = {
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.key_length": "head_dim",
}
"""Facts of a GGUF file that shapes do not show, with their config names."""


def resolve_target_folder(config: TargetConfig) -> str:
    """Resolve the folder or Hub id of a target's files.

    Of a GGUF file, this is a local folder, which is made if needed.

    Raises:
        InputError: transformers cannot read the GGUF file, or reads it differently from llama.cpp.
    """
    assert config.path is not None
    if split_gguf_path(config.path) is None:
        return config.path
    gguf = load_gguf_target(config.path, config.revision)
    with gguf.file.open("rb") as opened:
        header = opened.read(gguf.content.start)
    beside = {name: file.read_bytes() for name, file in gguf.original_files.items()}
    checksums = {name: sha256(content).hexdigest() for name, content in beside.items()}
    facts = [FORMAT, transformers.__version__, sha256(header).hexdigest()]
    facts += [compute_checksum([(gguf.file, gguf.tensor_table)]), checksums]
    key = sha256(json.dumps(facts).encode()).hexdigest()[:16]
    folder = cache_dir() / "gguf" / f"{gguf.file.stem}-{key}"
    if not folder.is_dir():
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

        known = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer"}
        names = [re.sub("[-_]", "", name) for name in (gguf.architecture, *known)]
        if names[0] not in names[1:]:
            raise InputError(
                f"{gguf.label}: transformers cannot dequantise architecture {gguf.architecture}; "
                f"allowed: {', '.join(sorted(known))}. Name the original model"
            )
        make_folder(folder.parent)
        # Of several processes that start at once, one makes it and the others wait.
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                _check_room(gguf, folder.parent)
                with report_target_errors(config):
                    write_folder(folder, partial(_write_dequantised, config, gguf))
    return str(folder)


def collect_gguf_facts(gguf: GgufTarget) -> dict[str, Any]:
    """Collect the facts that decide the architecture: metadata, and the config beside the file."""
    metadata = gguf.collect_metadata(f"{gguf.architecture}.")
    return {"architecture": gguf.architecture, **metadata, "beside": _load_config_beside(gguf)}


def collect_tokenizer_facts(gguf: GgufTarget) -> dict[str, Any] | None:
    """Collect the metadata that decide the tokenizer; None if files beside decide.

    What transformers makes of the metadata is written otherwise by each of its versions.
    """
    if _has_tokenizer_beside(gguf):
        return None
    facts = gguf.collect_metadata("tokenizer.")
    facts.pop("tokenizer.chat_template", None)
    return facts


def _has_tokenizer_beside(gguf: GgufTarget) -> bool:
    return bool({"tokenizer.json", "tokenizer_config.json"} & set(gguf.original_files))


def load_config_file(file: Path) -> dict[str, Any]:
    """Load a config file, without the version of transformers that saved it."""
    stored: dict[str, Any] = json.loads(file.read_text())
    stored.pop("transformers_version", None)
    return stored


def _load_config_beside(gguf: GgufTarget) -> dict[str, Any] | None:
    """Load the config beside the file; None if missing, or without architectures."""
    file = gguf.original_files.get("config.json")
    stored = None if file is None else load_config_file(file)
    return stored if stored and "architectures" in stored else None


def _check_room(gguf: GgufTarget, place: Path) -> None:
    num_values = sum(math.prod(tensor["shape"]) for tensor in gguf.tensor_table.values())
    needed, free = num_values * BYTES_PER_VALUE, shutil.disk_usage(place).free
    if needed > free:
        raise InputError(
            f"{gguf.label}: dequantised it takes {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} "
            f"GB are free in {place}; make room, or set HEADSMITH_CACHE to a folder on another disk"
        )
    print(  # noqa: T201
        f"{gguf.label}: dequantising {gguf.quantization} to {place}, once; takes "
        f"{needed / 1e9:.1f} GB of disk, and as much memory meanwhile",
        file=sys.stderr,
    )


def _write_dequantised(config: TargetConfig, gguf: GgufTarget, staging: Path) -> None:
    """Write config, tokenizer and weights in transformers' format."""
    file_option = {"gguf_file": gguf.name}
    has_config = _load_config_beside(gguf) is not None
    model_config = AutoConfig.from_pretrained(gguf.folder, **({} if has_config else file_option))
    _check_stated(gguf, model_config.get_text_config())
    model, info = find_language_class(model_config).from_pretrained(
        gguf.folder,
        config=model_config,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        **file_option,
    )
    _check_all_read(gguf, check_complete(config, model, info), info["unexpected_keys"])
    for parameter in model.parameters():  # in the smallest dtype that holds the values exactly
        values = parameter.data
        narrow = (values.to(dtype) for dtype in (torch.bfloat16, torch.float16))
        parameter.data = next((each for each in narrow if each.float().equal(values)), values)
    if "generation_config.json" in gguf.original_files:
        model.generation_config = GenerationConfig.from_pretrained(gguf.folder)
    else:  # with llama.cpp's stops
        stated = [gguf.get_metadata(f"tokenizer.ggml.{name}") for name in STOPS]
        stops = list(dict.fromkeys(stop for stop in stated if stop is not None))
        model.generation_config.eos_token_id = stops or None
    model.save_pretrained(staging)
    _save_tokenizer(gguf, staging)


def _check_stated(gguf: GgufTarget, config: Any) -> None:
    """Refuse a config with which transformers would compute differently from llama.cpp."""
    by_layer = getattr(config, "per_layer_attributes", None) or ()
    stated = {
        name: None if key in by_layer else getattr(config, key, None)
        for name, key in STATED.items()
    }
    num_further = gguf.get_arch_metadata("nextn_predict_layers") or 0
    stated["block_count"] = count_layers(config) + num_further
    stated["rope.freq_base"] = find_rope(config)["rope_theta"]
    advice = f"put the config.json of the original model into {gguf.folder}"
    for name, config_value in stated.items():
        value = gguf.get_arch_metadata(name)
        if value is None or config_value is None or isinstance(value, list):  # of one layer each
            continue
        if not math.isclose(value, config_value, rel_tol=1e-5):
            raise InputError(
                f"{gguf.label}: has {name}={value:g}, but its config {config_value:g}; {advice}"
            )
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [each for each in rope.values() if isinstance(each, dict)]
    kinds = {each.get("rope_type", "default") for each in by_layer_type or [rope]}
    kind = gguf.get_arch_metadata("rope.scaling.type")
    scales = [name for name in gguf.tensor_table if name.startswith(ROPE_FACTORS)]
    scales += [f"rope.scaling.type={kind}"] if kind not in (None, "none") else []
    if scales and kinds == {"default"}:
        raise InputError(
            f"{gguf.label}: scales RoPE ({scales[0]}), which transformers does not read from a "
            f"GGUF file; {advice}"
        )
    if kinds & SCALED and not scales:
        raise InputError(
            f"{gguf.label}: does not scale RoPE, but its config does "
            f"({sorted(kinds & SCALED)[0]}); {advice}"
        )


def _check_all_read(gguf: GgufTarget, model: Any, unexpected: Iterable[str]) -> None:
    """Refuse a file with tensors that transformers would silently drop."""
    # Layers after the last predict several tokens (MTP).
    layer = re.compile(r"blk\.(\d+)\.")
    num_layers = count_layers(model.config.get_text_config())
    values = {
        name: math.prod(tensor["shape"])
        for name, tensor in gguf.tensor_table.items()
        if not name.startswith(ROPE_FACTORS)
        and int((layer.match(name) or ("", -1))[1]) < num_layers
    }
    read = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    if sum(values.values()) <= sum(read.values()):
        return
    processor = TENSOR_PROCESSORS.get(gguf.architecture, TensorProcessor)(config={})
    known = get_gguf_hf_weights_map(model, processor)
    lost = sorted(unexpected) or [name for name in values if name not in known]
    raise InputError(
        f"{gguf.label}: transformers would drop {', '.join(lost[:1])} and {len(lost) - 1} more "
        "of its tensors and compute something else; name the original model"
    )


def _save_tokenizer(gguf: GgufTarget, staging: Path) -> None:
    """Write the tokenizer beside the file, or else the file's own."""
    own = not _has_tokenizer_beside(gguf)
    of_file = {"gguf_file": gguf.name} if own else {}
    tokens, kind = (gguf.get_metadata(f"tokenizer.ggml.{key}") for key in ("tokens", "model"))
    if own and (kind not in VOCABULARIES or not tokens):
        raise InputError(
            f"{gguf.label}: its vocabulary has type {kind}, but transformers reads "
            f"{', '.join(VOCABULARIES)}; put the tokenizer.json of the original model into "
            f"{gguf.folder}"
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf.folder, **of_file)
    if own:  # transformers 5.17 would write its own
        for name, key in SPECIAL.items():
            number = gguf.get_metadata(f"tokenizer.ggml.{key}")
            setattr(tokenizer, name, None if number is None else tokens[number])
    if tokenizer.chat_template is None:
        tokenizer.chat_template = gguf.get_metadata("tokenizer.chat_template")
    tokenizer.save_pretrained(staging)
    if own:
        # transformers appends GPT-2's special token to vocabularies without one.
        rules = json.loads((staging / "tokenizer.json").read_text())
        rules["added_tokens"] = [each for each in rules["added_tokens"] if each["id"] < len(tokens)]
        (staging / "tokenizer.json").write_text(json.dumps(rules, ensure_ascii=False))
