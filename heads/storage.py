"""Head folders: safetensors and JSON, read and written atomically."""

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
from conf.files import find_local_path, retry_io, split_gguf_path
from heads.folders import check_folder_files, find_head_gguf


def locate_head(path: str, revision: str | None) -> Path:
    """Find the local place of a head: a folder with `config.json` or a GGUF file, or that file.

    Raises:
        InputError: nothing is there, or the file is missing.
    """
    place, *names = split_gguf_path(path) or (path,)
    folder = find_local_path("head.path", place) or _download_snapshot(place, revision, *names)
    if names:
        check_folder_files("head.path", path, folder, *names)
        return folder / names[0]
    if find_head_gguf(folder) is not None:
        return folder
    return check_folder_files("head.path", path, folder, "config.json")


def _download_snapshot(path: str, revision: str | None, *names: str) -> Path:
    """Snapshot of a Hub repository, with the named files or those of a head."""
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
        raise InputError(
            f"head.path={path}: no such folder, and the Hub answers: {error}; type an existing "
            "folder or Hub id"
        ) from error


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Load all tensors of a safetensors file to the CPU.

    Raises:
        InputError: the file is corrupt or truncated.
    """
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file}: corrupt or truncated safetensors file: {error}; download or save it again"
        ) from error


def write_folder(final: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder atomically; retry passing errors of network file systems.

    Args:
        final: folder, replaced if it exists.
        fill: function that writes into a staging folder, which then becomes `final`. Called again
            after a passing error.

    Raises:
        InputError: the disk is full or not writable. Earlier content stays untouched.
    """
    try:
        retry_io(partial(_write_folder, final, fill))
    except OSError as error:
        raise InputError(
            f"{final}: cannot be written: {error}; its earlier content is untouched. Free space or "
            "fix the folder, and start again (training: with train.resume=auto)"
        ) from error


def _write_folder(final: Path, fill: Callable[[Path], None]) -> None:
    temporary = final.parent / f".writing-{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        for path in (*(p for p in temporary.rglob("*") if p.is_file()), temporary):
            _sync_to_disk(path)
        _swap_folder(temporary, final)
    except SafetensorError as error:
        # safetensors gives the system's error only in its text.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(*([int(number[1])] if number else []), str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync_to_disk(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap_folder(temporary: Path, final: Path) -> None:
    """Rename a folder. An existing full folder must be moved away first."""
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
    _sync_to_disk(final.parent)


def write_head_folder(
    folder: Path, weights: str, tensors: dict[str, Tensor], documents: dict[str, object]
) -> None:
    """Write a head folder atomically.

    Args:
        folder: folder, replaced if it exists.
        weights: name of the safetensors file.
        tensors: saved as float32; integers and booleans stay.
        documents: JSON content by file name.

    Raises:
        InputError: the disk is full or not writable. Earlier content stays untouched.
    """

    def fill(staging: Path) -> None:
        for name, content in documents.items():
            (staging / name).write_text(json.dumps(content, indent=2) + "\n")
        stored = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        stored = {n: t.float() if t.is_floating_point() else t for n, t in stored.items()}
        save_file(stored, staging / weights, metadata={"format": "pt"})

    write_folder(folder, fill)
