"""Reading and writing head folders: safetensors and JSON, whole or not at all."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.schema import InputError


def locate(path: str, revision: str | None, weights: str) -> Path:
    """The local folder of a head: itself, or a snapshot of a Hub repository.

    Raises:
        InputError: nothing there, or no `weights` file in it.
    """
    folder = Path(path) if Path(path).is_dir() else _download(path, revision)
    for name in ("config.json", weights):
        if not (folder / name).is_file():
            found = sorted(p.name for p in folder.iterdir())
            raise InputError(f"head.path={path}: no {name} there; found {found}")
    return folder


def _download(path: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise InputError(f"head.path={path}: no such folder, and not a Hub id (user/name)")
    try:
        return Path(
            snapshot_download(
                path, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.md"]
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise InputError(f"head.path={path}: no such folder, and the Hub says: {error}") from error


def config_path(folder: Path) -> Path:
    """The head's `config.json`."""
    return folder / "config.json"


def load_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU.

    Raises:
        InputError: corrupt or truncated.
    """
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: corrupt or truncated safetensors file: {error}") from error


def save_head(
    folder: Path, config: dict[str, object], weights: str, tensors: dict[str, Tensor]
) -> None:
    """Writes a head folder under a temporary name, then moves it into place.

    Raises:
        InputError: the disk is full or not writable; what was there before is untouched.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(
            {name: tensor.detach().to("cpu", torch.float32) for name, tensor in tensors.items()},
            staging / weights,
            metadata={"format": "pt"},
        )
        replace_folder(staging, folder)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder}: cannot write the head: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replace_folder(staging: Path, folder: Path) -> None:
    """Moves `staging` to `folder`, keeping the old one until the new one is there."""
    staging.chmod(0o755)
    old = folder.with_name(f".{folder.name}-old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.replace(old)
    staging.replace(folder)
    shutil.rmtree(old, ignore_errors=True)
