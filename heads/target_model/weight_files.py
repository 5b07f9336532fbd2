"""The weight files of a model, and what their headers say of the tensors in them.

Format: safetensors, https://github.com/huggingface/safetensors.
"""

import json
from pathlib import Path
from typing import Any

from conf.errors import InputError

MAX_HEADER_BYTES = 100_000_000
"""As the format's own reader has it."""


def weight_files(folder: Path, name: str) -> list[Path] | None:
    """The files of a folder that are loaded; None if they are not all there.

    Like transformers, which reads one file of all weights before it looks for shards.

    Args:
        folder: of a model or an adapter.
        name: `model` or `adapter_model`.
    """
    index, one = folder / f"{name}.safetensors.index.json", folder / f"{name}.safetensors"
    names = {one.name}
    if index.is_file() and not one.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    files = [folder / each for each in sorted(names)]
    return files if all(file.is_file() for file in files) else None


def tensors(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a file by name: `dtype`, `shape`, and `data_offsets` from its beginning.

    Raises:
        InputError: it is not a safetensors file.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            found = json.loads(stream.read(min(size, MAX_HEADER_BYTES)))
            found.pop("__metadata__", None)
            for each in found.values():
                each["data_offsets"] = [8 + size + place for place in each["data_offsets"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file}: not a safetensors file ({error!r})") from error
    return found
