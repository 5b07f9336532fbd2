"""Reading and writing head folders: safetensors and JSON, whole or not at all."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.errors import InputError
from conf.files import gguf_parts, here, retried
from heads.folders import folder_with, gguf_in


def locate(path: str, revision: str | None) -> Path:
    """The local place of a head: its folder, with a `config.json` or a GGUF file, or such a file.

    Raises:
        InputError: nothing there, or no such file.
    """
    place, *names = gguf_parts(path) or (path,)
    folder = here("head.path", place) or _download(place, revision, *names)
    if names:
        folder_with("head.path", path, folder, *names)
        return folder / names[0]
    if gguf_in(folder) is not None:
        return folder
    return folder_with("head.path", path, folder, "config.json")


def _download(path: str, revision: str | None, *names: str) -> Path:
    """The snapshot of a Hub repository: the files of these names, or those of a head."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                path,
                revision=revision,
                allow_patterns=list(names) or ["*.json", "*.safetensors", "*.gguf", "*.md"],
                ignore_patterns=None if names else ["*/*"],  # the head's exports
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise InputError(f"head.path={path}: no such folder, and the Hub says: {error}") from error


def load_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU.

    Raises:
        InputError: corrupt or truncated.
    """
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: corrupt or truncated safetensors file: {error}") from error


def write_folder(final: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder, whole or not at all; tries again what a network file system refused.

    Args:
        final: replaced if it exists.
        fill: writes into the folder that it is given, which then becomes `final`; it may be
            called again after an error that may pass.

    Raises:
        InputError: the disk is full or cannot be written; what was there before is untouched.
    """
    try:
        retried(partial(_write_folder, final, fill))
    except OSError as error:
        raise InputError(
            f"cannot write {final}: {error}. What was there before is untouched: free space or "
            "fix the folder, and start again (training: with train.resume=auto)"
        ) from error


def _write_folder(final: Path, fill: Callable[[Path], None]) -> None:
    temporary = final.parent / f".writing-{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        for path in (*(p for p in temporary.rglob("*") if p.is_file()), temporary):
            _flush(path)
        _swap(temporary, final)
    except SafetensorError as error:
        # safetensors names the system's error in its text alone.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(*([int(number[1])] if number else []), str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush(path: Path) -> None:
    """Has the disk hold what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(temporary: Path, final: Path) -> None:
    """Renames; a folder cannot be renamed onto a full one, so that is moved away first."""
    old = final.parent / f".old-{final.name}"
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.replace(old)
    try:
        temporary.replace(final)
    except OSError:
        if old.exists():
            old.replace(final)
        raise
    shutil.rmtree(old, ignore_errors=True)
    _flush(final.parent)


def save_head(
    folder: Path, weights: str, tensors: dict[str, Tensor], documents: dict[str, object]
) -> None:
    """Writes a head folder, whole or not at all.

    Args:
        folder: replaced if it exists.
        weights: name of the safetensors file.
        tensors: saved as float32, or as they are if they hold integers or booleans.
        documents: JSON content by file name.

    Raises:
        InputError: the disk is full or not writable; what was there before is untouched.
    """

    def fill(staging: Path) -> None:
        for name, content in documents.items():
            (staging / name).write_text(json.dumps(content, indent=2) + "\n")
        stored = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        stored = {n: t.float() if t.is_floating_point() else t for n, t in stored.items()}
        save_file(stored, staging / weights, metadata={"format": "pt"})

    write_folder(folder, fill)
