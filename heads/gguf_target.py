"""Target in a GGUF file: facts from the file's header, and whether it can be read.

Source: ggml `docs/gguf.md`; types of tensors and of files by the package `gguf`.
"""

import math
import re
from collections import Counter
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from conf.errors import InputError
from conf.files import find_local_path, split_gguf_path

DRAFT_HEADS = ("eagle3", "dflash")
"""llama.cpp's architectures of draft heads."""
ORIGINAL_FILES = (
    *("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json"),
    *("merges.txt", "added_tokens.json"),
)
"""Files of the original model, which say more if they lie beside a GGUF file."""
ROPE_FACTORS = "rope_f"
"""Start of the names of RoPE tensors: `rope_freqs`, `rope_factors_long`, ..."""


class GgufTarget:
    """A target's GGUF file, of which at first only the header is read.

    Args:
        key: setting that names the file, for messages.
        path: path as the user typed it.
        folder: folder of the file.
        name: name of the file.

    Raises:
        InputError: no GGUF file, cut off, or not a whole target.
    """

    def __init__(self, key: str, path: str, folder: Path, name: str) -> None:
        self.label, self.folder, self.name = f"{key}={path}", folder, name
        from heads.export.gguf import GgufFile  # imports torch, which takes seconds

        self.file = folder / name
        self.content = GgufFile(self.file, key)
        self.architecture = str(self.get_metadata("general.architecture"))
        if self.architecture in DRAFT_HEADS:
            raise InputError(
                f"{self.label}: a draft head ({self.architecture}), not a target; name it as "
                "head.path, and its target's file here"
            )
        if (kind := self.get_metadata("general.type")) not in (None, "model"):
            raise InputError(
                f"{self.label}: holds no model (general.type is {kind!r}); name the file of a model"
            )
        num_parts = self.get_metadata("split.count") or 1
        if num_parts > 1:
            raise InputError(
                f"{self.label}: one of {num_parts} parts, which transformers cannot join; run "
                f"llama-gguf-split --merge FIRST_PART WHOLE.gguf, and set {key}=WHOLE.gguf"
            )
        size = self.file.stat().st_size
        for each, tensor in self.tensor_table.items():
            if tensor["data_offsets"][1] > size:
                raise InputError(
                    f"{self.label}: cut off, as {each} lies beyond its end; download it again"
                )

    def get_metadata(self, key: str) -> Any:
        """Get a metadata value by its key; None if missing."""
        value = self.content.metadata.get(key)
        return None if value is None else value.content

    def get_arch_metadata(self, key: str) -> Any:
        """Get a metadata value of the architecture by its key; None if missing."""
        return self.get_metadata(f"{self.architecture}.{key}")

    @cached_property
    def tensor_table(self) -> dict[str, dict[str, Any]]:
        """Return the tensors by name; entries as in `weight_files.load_tensor_table`."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        table = {}
        for name, (number, shape, start) in self.content.table.items():
            try:
                kind = GGMLQuantizationType(number)
            except ValueError as error:
                raise InputError(
                    f"{self.label}: {name} has type {number}, which the package gguf does not "
                    "know; install a newer gguf, or name the original model"
                ) from error
            values, size = GGML_QUANT_SIZES[kind]
            begin = self.content.start + start
            places = [begin, begin + math.prod(shape) // values * size]
            table[name] = {"dtype": kind.name, "shape": list(shape), "data_offsets": places}
        return table

    @cached_property
    def quantization(self) -> str:
        """Return llama.cpp's type of the file, e.g. `Q4_K_M`, or else the type of most values."""
        from gguf.constants import LlamaFileType

        stated = self.get_metadata("general.file_type")
        if stated in set(LlamaFileType):
            return re.sub("^(MOSTLY|ALL)_", "", LlamaFileType(stated).name)
        values: Counter[str] = Counter()
        for tensor in self.tensor_table.values():
            values[tensor["dtype"]] += math.prod(tensor["shape"])
        return values.most_common(1)[0][0]

    def collect_metadata(self, prefix: str) -> dict[str, Any]:
        """Collect the metadata whose keys begin with a prefix."""
        return {
            key: value.content
            for key, value in self.content.metadata.items()
            if key.startswith(prefix)
        }

    @property
    def original_files(self) -> dict[str, Path]:
        """Return the existing files of `ORIGINAL_FILES` beside the GGUF file, by name."""
        files = {name: self.folder / name for name in ORIGINAL_FILES}
        return {name: file for name, file in files.items() if file.is_file()}

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes that a head must agree with, named as in `config.json`."""
        embedding = self.tensor_table.get("token_embd.weight")
        size = embedding["shape"][0] if embedding else None
        return {
            "model_type": self.architecture,
            "hidden_size": self.get_arch_metadata("embedding_length"),
            "vocab_size": size,
        }


def load_gguf_target(
    path: str, revision: str | None = None, key: str = "target.path"
) -> GgufTarget:
    """Open the target in a GGUF file of a folder or of a Hub repository.

    Raises:
        InputError: the file is missing (with the names of others), or see `GgufTarget`.
    """
    parts = split_gguf_path(path)
    assert parts is not None
    place, name = parts
    folder = find_local_path(key, place)
    if folder is None:
        folder = _download_snapshot(key, path, place, name, revision)
    file = folder / name
    if not file.is_file():
        raise InputError(f"{key}={path}: no such file; {_format_gguf_files(folder.glob('*.gguf'))}")
    stat = file.stat()
    return _open_target(key, path, folder, name, (stat.st_mtime_ns, stat.st_size))


@cache
def _open_target(
    key: str, path: str, folder: Path, name: str, _state: tuple[int, int]
) -> GgufTarget:
    return GgufTarget(key, path, folder, name)


def _format_gguf_files(names: Any) -> str:
    files = sorted(Path(name).name for name in names)
    return f"GGUF files there: {', '.join(files) or 'none'}"


@cache
def _download_snapshot(key: str, path: str, place: str, name: str, revision: str | None) -> Path:
    """Download a GGUF file of a Hub repository and the original files beside it."""
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(place, revision=revision, allow_patterns=[name, *ORIGINAL_FILES])
        )
        if not (folder / name).is_file():
            names = list_repo_files(place, revision=revision)
            there = [each for each in names if each.endswith(".gguf")]
            raise InputError(f"{key}={path}: no such file; {_format_gguf_files(there)}")
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise InputError(
            f"{key}={path}: not here, and the Hub answers: {error}; check the name"
        ) from error
    return folder
