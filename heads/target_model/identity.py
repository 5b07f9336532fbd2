"""The identity of a target: checksums of all that decides its hidden states, without loading it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from conf.command.statement import changed, differences, stated
from conf.errors import InputError
from conf.settings.target import TargetConfig
from heads.folders import PROVENANCE
from heads.storage import locate
from heads.target_model.weight_files import tensors, weight_files

SAMPLE_BYTES = 2048


@dataclass(frozen=True)
class Identity:
    """A target and how it is changed; checksums are SHA-256.

    Attributes:
        name: Hub id or folder.
        revision: commit of a Hub id.
        config: checksum of `config.json`.
        tokenizer: checksum of the tokenizer.
        template: checksum of its chat template; None without one.
        weights: checksum of the names, shapes, dtypes and some bytes of the tensors in the weight
            files, in however many; None if they are not on this machine.
        adapter: Hub id or folder.
        adapter_weights: like `weights`.
        quantization: of the weights.
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
    file = _resolved("target.path", config.path, "config.json", config.revision)
    stored = json.loads(file.read_text())
    stored.pop("transformers_version", None)  # of whoever saved it last
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
        config=_sha256(stored),
        tokenizer=_sha256(rules),
        template=None if template is None else _sha256(template),
        weights=weights_checksum(file.parent, "model"),
        adapter=config.adapter,
        adapter_weights=weights_checksum(adapter.parent, "adapter_model") if adapter else None,
        quantization=config.quantization.value,
        dtype=str(dtype).removeprefix("torch."),
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
        "its drafts may be accepted here; go on training it (data/README.md, A target that has "
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
    if files is None:
        return None
    samples = sorted(sample for file in files for sample in _samples(file))
    return hashlib.sha256(b"".join(samples)).hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    """Name, dtype, shape and some bytes of three places of every tensor."""
    with file.open("rb") as stream:
        for name, tensor in tensors(file).items():
            begin, end = tensor["data_offsets"]
            parts = [json.dumps([name, tensor["dtype"], tensor["shape"]]).encode()]
            last = max(begin, end - SAMPLE_BYTES)
            for place in sorted({begin, (begin + last) // 2, last}):
                stream.seek(place)
                parts.append(stream.read(min(SAMPLE_BYTES, end - begin)))
            yield b"".join(parts)


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
