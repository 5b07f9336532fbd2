"""A target in a GGUF file, by the header of the file: what it is, and whether it can be read.

Source: ggml `docs/gguf.md`; types of tensors and of files by the package `gguf`.
"""

import hashlib
import math
import re
from collections import Counter
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from conf.errors import InputError
from conf.files import gguf_parts, here

DRAFT_HEADS = ("eagle3", "dflash")
"""Architectures that llama.cpp knows draft heads by."""
BESIDE = (
    *("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json"),
    *("merges.txt", "added_tokens.json"),
)
"""Files of the model that a GGUF file was made of; where they lie beside it, they say more."""
ROPE_FACTORS = "rope_f"
"""Beginning of the names of tensors that scale RoPE: `rope_freqs`, `rope_factors_long`, ..."""


class GgufTarget:
    """A target's GGUF file; nothing but its header is read before it is asked for more.

    Args:
        key: the setting that names it, for messages.
        path: what was given.
        folder: in which the file lies.
        name: of the file there.

    Raises:
        InputError: no GGUF, cut off, or none of a whole target.
    """

    def __init__(self, key: str, path: str, folder: Path, name: str) -> None:
        self.what, self.folder, self.name = f"{key}={path}", folder, name
        from heads.export.gguf import GgufFile  # which brings torch, and that takes seconds

        self.file = folder / name
        self.content = GgufFile(self.file, key)
        self.architecture = str(self.fact("general.architecture"))
        self._check(key)

    def fact(self, key: str) -> Any:
        """A piece of metadata; None if it is not there."""
        value = self.content.metadata.get(key)
        return None if value is None else value.content

    def about(self, key: str) -> Any:
        """A piece of metadata of the architecture; None if it is not there."""
        return self.fact(f"{self.architecture}.{key}")

    def _check(self, key: str) -> None:
        if self.architecture in DRAFT_HEADS:
            raise InputError(
                f"{self.what}: a draft head ({self.architecture}), and no target: name it as "
                "head.path, and the file of its target here"
            )
        if (kind := self.fact("general.type")) not in (None, "model"):
            raise InputError(f"{self.what}: holds no model (its general.type is {kind!r})")
        num_parts = self.fact("split.count") or 1
        if num_parts > 1:
            raise InputError(
                f"{self.what}: one of {num_parts} parts, which transformers does not put together: "
                f"llama-gguf-split --merge FIRST_PART WHOLE.gguf, and {key}=WHOLE.gguf"
            )
        size = self.file.stat().st_size
        for name, tensor in self.tensors.items():
            if tensor["data_offsets"][1] > size:
                raise InputError(f"{self.what}: cut off: {name} lies beyond its end")

    @cached_property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """The tensors by name, as `heads.target_model.weight_files.tensors` has them."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        found = {}
        for name, (number, shape, start) in self.content.table.items():
            try:
                kind = GGMLQuantizationType(number)
            except ValueError as error:
                raise InputError(
                    f"{self.what}: {name} is of type {number}, which the package gguf does not "
                    "know: install a newer one, or name the model that the file was made of"
                ) from error
            values, size = GGML_QUANT_SIZES[kind]
            begin = self.content.start + start
            places = [begin, begin + math.prod(shape) // values * size]
            found[name] = {"dtype": kind.name, "shape": list(shape), "data_offsets": places}
        return found

    @property
    def num_values(self) -> int:
        """Values in all tensors."""
        return sum(math.prod(tensor["shape"]) for tensor in self.tensors.values())

    @cached_property
    def quantization(self) -> str:
        """The type of the file in llama.cpp's words, e.g. `Q4_K_M`; else that of most values."""
        from gguf.constants import LlamaFileType

        stated = self.fact("general.file_type")
        if stated in set(LlamaFileType):
            return re.sub("^(MOSTLY|ALL)_", "", LlamaFileType(stated).name)
        values: Counter[str] = Counter()
        for tensor in self.tensors.values():
            values[tensor["dtype"]] += math.prod(tensor["shape"])
        return values.most_common(1)[0][0]

    @cached_property
    def header(self) -> str:
        """Checksum of all metadata and of the table of tensors."""
        with self.file.open("rb") as opened:
            return hashlib.sha256(opened.read(self.content.start)).hexdigest()

    @cached_property
    def stated(self) -> dict[str, Any]:
        """All that the file says of its architecture."""
        names = [name for name in self.content.metadata if name.startswith(f"{self.architecture}.")]
        return {"architecture": self.architecture} | {name: self.fact(name) for name in names}

    @property
    def beside(self) -> dict[str, Path]:
        """The files of `BESIDE` that are there, by name."""
        files = {name: self.folder / name for name in BESIDE}
        return {name: file for name, file in files.items() if file.is_file()}

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes that a head must agree with, as `config.json` calls them."""
        embedding = self.tensors.get("token_embd.weight")
        size = embedding["shape"][0] if embedding else None
        return {
            "model_type": self.architecture,
            "hidden_size": self.about("embedding_length"),
            "vocab_size": size,
        }


def find_gguf(path: str, revision: str | None = None, key: str = "target.path") -> GgufTarget:
    """The target in a GGUF file of a folder, or of a Hub repository.

    Raises:
        InputError: it is not there, with the names of those that are; see `GgufTarget`.
    """
    parts = gguf_parts(path)
    assert parts is not None
    place, name = parts
    folder = here(key, place)
    if folder is None:
        folder = _downloaded(key, path, place, name, revision)
    file = folder / name
    if not file.is_file():
        raise InputError(f"{key}={path}: no such file; {_listed(folder.glob('*.gguf'))}")
    stat = file.stat()
    return _opened(key, path, folder, name, (stat.st_mtime_ns, stat.st_size))


@cache
def _opened(key: str, path: str, folder: Path, name: str, _state: tuple[int, int]) -> GgufTarget:
    return GgufTarget(key, path, folder, name)


def _listed(names: Any) -> str:
    there = sorted(Path(name).name for name in names)
    return f"GGUF files there: {', '.join(there) or 'none'}"


@cache
def _downloaded(key: str, path: str, place: str, name: str, revision: str | None) -> Path:
    """The snapshot of a Hub repository with the file, and with what lies beside it."""
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(place, revision=revision, allow_patterns=[name, *BESIDE]))
        if not (folder / name).is_file():
            names = list_repo_files(place, revision=revision)
            there = [each for each in names if each.endswith(".gguf")]
            raise InputError(f"{key}={path}: no such file; {_listed(there)}")
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise InputError(f"{key}={path}: not here, and the Hub says: {error}") from error
    return folder
