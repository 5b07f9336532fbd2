"""Identity of a target: checksums of everything that decides its hidden states, without loading."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from conf.command.run_record import find_changed_keys, format_changes, make_fingerprint
from conf.errors import InputError
from conf.files import split_gguf_path
from conf.settings.target import TargetConfig
from heads.folders import PROVENANCE, find_weight_files, locate_head
from heads.gguf_target import load_gguf_target
from heads.target_model.dequantise import (
    collect_gguf_facts,
    collect_tokenizer_facts,
    load_config_file,
)
from heads.target_model.weight_files import compute_checksum, load_tensor_table


@dataclass(frozen=True)
class TargetIdentity:
    """Identity of a target and its changes. Checksums are SHA-256.

    Attributes:
        name: Hub id, folder or GGUF file.
        revision: commit of a Hub id.
        config: checksum of `config.json`, or of a GGUF file's architecture metadata.
        tokenizer: checksum of the tokenizer.
        template: checksum of the chat template; None without one.
        weights: checksum of names, shapes, dtypes and sampled bytes of the weight tensors, over any
            number of files; None if they are not on this machine.
        adapter: Hub id or folder of an adapter, or its name on a server.
        adapter_weights: like `weights`, of the adapter.
        quantization: weight quantisation: `none`, that of bitsandbytes, or the type of a GGUF file.
        dtype: dtype of the computation, e.g. `float32`.
    """

    name: str
    revision: str | None
    config: str
    tokenizer: str
    template: str | None
    weights: str | None
    adapter: str | None
    adapter_weights: str | None
    quantization: str
    dtype: str


def identify_target(config: TargetConfig, tokenizer: Any, dtype: torch.dtype) -> TargetIdentity:
    """Compute the identity of a target with its tokenizer, loaded in a dtype.

    Raises:
        InputError: `config.path` or `config.adapter` has no config.
    """
    assert config.path is not None
    own_facts: Mapping[str, Any]
    rules: Any = None
    if split_gguf_path(config.path):
        gguf = load_gguf_target(config.path, config.revision)
        own_facts = {
            "config": _compute_sha256(collect_gguf_facts(gguf)),
            "weights": compute_checksum([(gguf.file, gguf.tensor_table)]),
            "quantization": gguf.quantization,
        }
        rules = None if config.adapter else collect_tokenizer_facts(gguf)
        file = gguf.file
    else:
        file = _resolve_file("target.path", config.path, "config.json", config.revision)
        own_facts = {
            "config": _compute_sha256(load_config_file(file)),
            "weights": compute_weights_checksum(file.parent, "model"),
            "quantization": config.quantization.value,
        }
    template = tokenizer.chat_template
    adapter_weights = None
    if config.adapter:
        adapter_file = _resolve_file("target.adapter", config.adapter, "adapter_config.json", None)
        adapter_weights = compute_weights_checksum(adapter_file.parent, "adapter_model")
    return TargetIdentity(
        name=config.path,
        revision=extract_commit_hash(file.as_posix(), None),
        tokenizer=_compute_sha256(rules or _collect_tokenizer_rules(tokenizer)),
        template=None if template is None else _compute_sha256(template),
        adapter=config.adapter or config.adapter_name,
        adapter_weights=adapter_weights,
        dtype=str(dtype).removeprefix("torch."),
        **own_facts,
    )


def _collect_tokenizer_rules(tokenizer: Any) -> Any:
    """Collect what decides a tokenizer's ids, without what callers set: truncation and padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return sorted(tokenizer.get_vocab().items())
    return {**json.loads(backend.to_str()), "truncation": None, "padding": None}


def format_target_change(
    key: str, path: str, revision: str | None, target: TargetIdentity
) -> str | None:
    """Format a line about a head trained for another target; None for the same or an unknown one.

    The head is that of setting `key`: a folder, or a Hub id with a revision.
    """
    file = locate_head(path, revision) / PROVENANCE
    recorded = json.loads(file.read_text()).get("target_identity") if file.is_file() else None
    if recorded is None:
        return None
    before, now = make_fingerprint(target=recorded), make_fingerprint(target=target)
    # Another dtype only rounds differently.
    keys = [name for name in find_changed_keys(before, now) if name != "target.dtype"]
    if not keys:
        return None
    trained_for = recorded.get("name")
    this = f"{trained_for}, not {target.name}"
    remedy = f"set target.path={trained_for}, or train the head further"
    if trained_for == target.name:
        this, remedy = f"{target.name} as it was", "train the head further"
    return (
        f"{key}={path}: trained for another target ({this}), so fewer draft tokens may be "
        f"accepted; {remedy} (docs/data.md, A target that has changed). What differs: "
        f"{format_changes(before, now, keys)}"
    )


def _resolve_file(key: str, path: str, name: str, revision: str | None) -> Path:
    """Resolve the local path of a file in a folder or Hub repository."""
    try:
        return Path(str(cached_file(path, name, revision=revision)))
    except OSError as error:
        raise InputError(f"{key}={path}: {error}") from error


def compute_weights_checksum(folder: Path, name: str) -> str | None:
    """Compute the checksum of samples of a folder's tensors; None if files are missing.

    The name is `model` or `adapter_model`.
    """
    try:
        files = find_weight_files(str(folder), folder, name)
    except InputError:
        return None
    if not files:
        return None
    return compute_checksum((file, load_tensor_table(file)) for file in files)


def _compute_sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
