"""Which target: checksums of what decides its hidden states, found without loading its weights."""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import cached_file

from conf.schema import InputError, TargetConfig

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Identity:
    """A target and how it is changed; checksums are SHA-256.

    Attributes:
        name: Hub id or folder.
        revision: commit of a Hub id.
        config: checksum of `config.json`.
        tokenizer: checksum of the tokenizer.
        template: checksum of its chat template; None without one.
        weights: checksum of the names, sizes and some bytes of the weight files; None if they are
            not on this machine.
        adapter: Hub id or folder.
        adapter_weights: like `weights`.
        quantization: of the weights.
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

    def differences(self, other: "Identity") -> list[str]:
        """The attributes in which the other is another target.

        A model may lie in several places: names count only where nothing says more.
        """
        unlike = {f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)}
        optional = ("revision", "weights", "adapter_weights")
        unknown = {n for n in optional if None in (getattr(self, n), getattr(other, n))}
        if "weights" not in unknown or "revision" not in unknown:
            unlike.discard("name")
        if self.adapter and other.adapter and "adapter_weights" not in unknown:
            unlike.discard("adapter")
        return sorted(unlike - unknown)


def identify(config: TargetConfig, tokenizer: Any) -> Identity:
    """The identity of a target.

    Args:
        config: where it is; `path` is set.
        tokenizer: its tokenizer, loaded.

    Raises:
        InputError: there is no config at `config.path`.
    """
    assert config.path is not None
    stored = _config(config.path, config.revision)
    commit = stored.pop("_commit_hash", None)
    stored.pop("transformers_version", None)  # of whoever saved it last
    template = tokenizer.chat_template
    return Identity(
        name=config.path,
        revision=commit,
        config=_sha256(stored),
        tokenizer=_sha256(_tokenizer(tokenizer)),
        template=None if template is None else _sha256(template),
        weights=_weights(config.path, config.revision, "config.json", "model"),
        adapter=config.adapter,
        adapter_weights=config.adapter
        and _weights(config.adapter, None, "adapter_config.json", "adapter_model"),
        quantization=config.quantization.value,
    )


def _config(path: str, revision: str | None) -> dict[str, Any]:
    """The content of `config.json`, with `_commit_hash` if it comes from the Hub."""
    try:
        return dict(PreTrainedConfig.get_config_dict(path, revision=revision)[0])
    except (OSError, ValueError) as error:
        raise InputError(f"target.path={path}: cannot read its config.json: {error}") from error


def _tokenizer(tokenizer: Any) -> Any:
    """What a tokenizer does, but for cutting and padding, which its callers set."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return sorted(tokenizer.get_vocab().items())
    return {**json.loads(backend.to_str()), "truncation": None, "padding": None}


def _weights(path: str, revision: str | None, beside: str, name: str) -> str | None:
    """Checksum of a sample of the weight files in the folder where `beside` lies."""
    found = cached_file(
        path, beside, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    if found is None:
        return None
    folder = Path(found).parent
    index = folder / f"{name}.safetensors.index.json"
    names = {f"{name}.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    files = [folder / each for each in sorted(names)]
    if not all(file.is_file() for file in files):
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        digest.update(_sample(file))
    return digest.hexdigest()


def _sample(file: Path) -> bytes:
    """Bytes from places spread evenly over a file, its beginning and end among them."""
    last = max(0, file.stat().st_size - SAMPLE_BYTES)
    parts = []
    with file.open("rb") as stream:
        for number in range(NUM_SAMPLES):
            stream.seek(last * number // (NUM_SAMPLES - 1))
            parts.append(stream.read(SAMPLE_BYTES))
    return b"".join(parts)


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
