"""The identity of a target: checksums of all that decides its hidden states, without loading it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from conf.command.statement import changed, differences, stated
from conf.errors import InputError
from conf.files import gguf_parts
from conf.settings.target import TargetConfig
from heads.folders import PROVENANCE
from heads.gguf_target import find_gguf
from heads.storage import locate
from heads.target_model.dequantise import described, read_config, weights_of
from heads.target_model.weight_files import checksum, tensors, weight_files


@dataclass(frozen=True)
class Identity:
    """A target and how it is changed; checksums are SHA-256.

    Attributes:
        name: Hub id, folder or GGUF file.
        revision: commit of a Hub id.
        config: checksum of `config.json`, or of what a GGUF file says of its architecture.
        tokenizer: checksum of the tokenizer.
        template: checksum of its chat template; None without one.
        weights: checksum of the names, shapes, dtypes and some bytes of the tensors in the weight
            files, in however many; None if they are not on this machine.
        adapter: Hub id or folder, or its name on a server.
        adapter_weights: like `weights`.
        quantization: of the weights: `none`, bitsandbytes' as set, or the type of a GGUF file.
        dtype: of what is computed, e.g. `float32`.
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


def identify(config: TargetConfig, tokenizer: Any, dtype: torch.dtype) -> Identity:
    """The identity of a target with its tokenizer, loaded in a dtype.

    Raises:
        InputError: there is no config at `config.path` or `config.adapter`.
    """
    assert config.path is not None
    own: Mapping[str, Any]
    if gguf_parts(config.path):
        gguf = find_gguf(config.path, config.revision)
        own = {
            "config": _sha256(described(gguf)),
            "weights": weights_of(gguf),
            "quantization": gguf.quantization,
        }
        file = gguf.file
    else:
        file = _resolved("target.path", config.path, "config.json", config.revision)
        own = {
            "config": _sha256(read_config(file)),
            "weights": weights_checksum(file.parent, "model"),
            "quantization": config.quantization.value,
        }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = sorted(tokenizer.get_vocab().items())
    else:  # but for cutting and padding, which callers set
        rules = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    template = tokenizer.chat_template
    adapter = config.adapter and _resolved(
        "target.adapter", config.adapter, "adapter_config.json", None
    )
    return Identity(
        name=config.path,
        revision=extract_commit_hash(file.as_posix(), None),
        tokenizer=_sha256(rules),
        template=None if template is None else _sha256(template),
        adapter=config.adapter or config.adapter_name,
        adapter_weights=weights_checksum(adapter.parent, "adapter_model") if adapter else None,
        dtype=str(dtype).removeprefix("torch."),
        **own,
    )


def other_target_notice(key: str, path: str, revision: str | None, target: Identity) -> str | None:
    """A line about a head that was not trained for `target`; None if it was, or nothing is known.

    The head is that of the setting `key`, a folder or a Hub id with a revision.
    """
    file = locate(path, revision) / PROVENANCE
    noted = json.loads(file.read_text()).get("target_identity") if file.is_file() else None
    if noted is None:
        return None
    before, now = stated(target=noted), stated(target=target)
    # Of what rounds otherwise, no head need know.
    keys = [name for name in changed(before, now) if name != "target.dtype"]
    if not keys:
        return None
    return (
        f"{key}={path} was trained for another target ({differences(before, now, keys)}): less of "
        "its drafts may be accepted here; go on training it (docs/data.md, A target that has "
        "changed)"
    )


def _resolved(key: str, path: str, name: str, revision: str | None) -> Path:
    """A file of a folder or Hub repository, on this machine."""
    try:
        return Path(str(cached_file(path, name, revision=revision)))
    except OSError as error:
        raise InputError(f"{key}={path}: {error}") from error


def weights_checksum(folder: Path, name: str) -> str | None:
    """Checksum of a sample of every tensor in a folder; None if its files are not all there.

    The name is `model` or `adapter_model`.
    """
    files = weight_files(folder, name)
    return None if files is None else checksum((file, tensors(file)) for file in files)


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
