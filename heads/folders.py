"""Folders of targets and heads: checked before heavy imports, found, loaded and written.

Refusals run before torch is imported, so torch is imported in the functions that need it.
"""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from safetensors import SafetensorError, safe_open

from conf.errors import InputError
from conf.files import SAFETENSORS_SUFFIX, find_local_path, load_json, retry_io, split_gguf_path
from conf.settings.drafting import HeadRef
from conf.settings.target import TargetConfig

if TYPE_CHECKING:
    from torch import Tensor

PROVENANCE = "headsmith.json"
"""File beside a head that records how it was made."""
PROFILE = "speculation_profile.json"
"""File beside a head that says how much was accepted, with Model-Optimizer's keys."""
SECONDS_TO_CONNECT = 3.0
WEIGHTS = ("*.safetensors", "*.bin")
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(?P<start>.+-)(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
GGUF = ".gguf"
MODEL_NAMES = re.compile(r"(?!.*(?:Eagle|Medusa))\w+For(?:CausalLM|ConditionalGeneration)")
"""Architectures of whole models. EAGLE-1's heads have the name of their target's."""
HEAD_NAMES = re.compile(r"Eagle|Medusa|DFlash|DSpark|MtpHead|Draft|Speculator")
"""Parts of the names that writers of heads give to their architectures."""
MTP_NAMES = re.compile("mtp|nextn|next_n")
"""Parts of names in configs and files of models with an MTP layer."""
HEAD_KEYS = {"speculators_model_type", "medusa_num_heads"}
FUSING = {"fc.weight", "model.fc.weight"}
"""Names of the matrix by which EAGLE heads read hidden states. No whole model has one."""


def check_target_files(config: TargetConfig) -> None:
    """Refuse a target or an adapter that is missing or incomplete.

    Raises:
        InputError: naming what is missing.
    """
    for key, path, revision, name in (
        ("target.path", config.path, config.revision, "config.json"),
        ("target.adapter", config.adapter, None, "adapter_config.json"),
    ):
        if path is None:
            continue
        content = _load_local_config(key, path, revision, name)
        if split_gguf_path(path):
            continue
        folder = find_local_path(key, path)
        if key == "target.path" and content is not None and _is_head(content, folder):
            raise InputError(
                f"{key}={path}: a head, give it as head.path={path}, and the model that it drafts "
                "for as target.path"
            )
        if folder is not None:
            if not any(file for pattern in WEIGHTS for file in folder.glob(pattern)):
                raise InputError(
                    f"{key}={path}: no weights there; must have {' or '.join(WEIGHTS)}"
                )
            for start in ("model", "adapter_model"):
                find_weight_files(f"{key}={path}", folder, start)
        if key == "target.path" and content is not None and "model_type" not in content:
            raise InputError(
                f"{key}={path}: its {name} has no model_type, which transformers needs; name "
                "another model"
            )


def _is_head(config: dict[str, Any], folder: Path | None) -> bool:
    """Tell whether a config, with its folder if that is local, is that of a draft head."""
    named = any(map(HEAD_NAMES.search, config.get("architectures") or ()))
    if named or HEAD_KEYS & config.keys():
        return True
    return folder is not None and (
        (folder / PROVENANCE).is_file()
        or (config.get("num_hidden_layers") == 1 and bool(FUSING & _list_all_tensor_names(folder)))
    )


def _is_whole_model(config: dict[str, Any], folder: Path) -> bool:
    """Tell whether a folder holds a model from which no head can be read.

    A model with an MTP layer, which its config or its tensors name, holds a head.
    """
    whole = any(map(MODEL_NAMES.fullmatch, config.get("architectures") or ()))
    if not whole or (folder / PROVENANCE).is_file():
        return False
    names = _list_all_tensor_names(folder)
    keys = {*config, *(config.get("text_config") or ())}
    if any(MTP_NAMES.search(each) for each in keys | names):
        return False
    return any("embed" in each or "wte" in each for each in names) and not FUSING & names


def _list_all_tensor_names(folder: Path) -> set[str]:
    return {name for file in folder.glob(WEIGHTS[0]) for name in list_tensor_names(file)}


def check_head_files(
    head: HeadRef | Any, target: TargetConfig | None, key: str = "head.path"
) -> None:
    """Refuse a head that is missing, or that was trained for a target of other sizes.

    Args:
        head: settings with `path` and `revision`; nothing is checked without `path`.
        target: target to draft for; None while unknown.
        key: setting that names the head.

    Raises:
        InputError: naming what is missing, or both sizes.
    """
    if head.path is None or split_gguf_path(head.path):
        return
    place = find_local_path(key, head.path)
    if place is not None and find_head_gguf(place) is not None:
        return
    head_config = _load_local_config(key, head.path, head.revision, "config.json")
    folder = find_local_path(key, head.path)
    is_model = head_config and folder is not None and _is_whole_model(head_config, folder)
    if is_model and key != "draft.path":  # a draft model is a whole one
        raise InputError(
            f"{key}={head.path}: a whole model, give it as target.path={head.path}, and a head "
            f"that drafts for it as {key}"
        )
    if head_config is None or folder is None or target is None or target.path is None:
        return
    target_config = _load_local_config("target.path", target.path, target.revision, "config.json")
    # Other writers' configs have other keys.
    if target_config is None or not (folder / PROVENANCE).is_file():
        return
    target_config = target_config.get("text_config") or target_config
    for name in ("hidden_size", "vocab_size"):
        read_size = head_config.get("target_hidden_size") if name == "hidden_size" else None
        sizes = {head_config.get(name), read_size} - {None}
        size = target_config.get(name)
        if sizes and size and size not in sizes:
            trained_for = str(head_config.get("target", "another target"))
            raise InputError(
                format_size_mismatch(name, head_config[name], trained_for, target.path, size)
            )


def format_size_mismatch(
    name: str, size: object, trained_for: str, path: str, target_size: object
) -> str:
    """Format the message for a head of another size than the target's."""
    return (
        f"head.path: this head has {name}={size} (trained for {trained_for}), but "
        f"target.path={path} has {target_size}; use the head's own target"
    )


def _load_local_config(
    key: str, path: str, revision: str | None, name: str
) -> dict[str, Any] | None:
    """Load a config without asking the Hub; None if the Hub must be asked.

    The header of a GGUF file counts as its config.

    Raises:
        InputError: the config is neither here nor in the Hub's cache, and the Hub cannot be asked,
            or it is no JSON.
    """
    parts = split_gguf_path(path)
    place, name = parts or (path, name)
    folder = find_local_path(key, place)
    if folder is not None:
        if parts is None:
            check_folder_files(key, path, folder, name)
        file = folder / name
    else:
        from huggingface_hub import constants, try_to_load_from_cache

        cached = try_to_load_from_cache(place, name, revision=revision)
        if not isinstance(cached, str):
            lacking = f"{key}={path}: no such folder here, no {name} of it in the Hub's cache, and "
            if constants.HF_HUB_OFFLINE:
                raise InputError(
                    f"{lacking}HF_HUB_OFFLINE forbids asking the Hub; name a folder, or unset "
                    "HF_HUB_OFFLINE"
                )
            if (error := _find_connection_error(constants.ENDPOINT)) is not None:
                raise InputError(
                    f"{lacking}{constants.ENDPOINT} cannot be reached ({error}); name a folder, or "
                    "connect"
                )
            return None
        file = Path(cached)
    if parts is not None:
        from heads.gguf_target import load_gguf_target

        return load_gguf_target(path, revision, key).sizes
    return load_json(file, f"{key}={path}: ")


def _find_connection_error(url: str) -> OSError | None:
    """Find the error of an unreachable server at once; libraries take half a minute.

    Behind a proxy the server is not asked, as only the proxy can tell.
    """
    place = urlsplit(url)
    if getproxies() or place.hostname is None:
        return None
    port = place.port or (80 if place.scheme == "http" else 443)
    try:
        socket.create_connection((place.hostname, port), timeout=SECONDS_TO_CONNECT).close()
    except OSError as error:
        return error
    return None


def find_weight_files(what: str, folder: Path, name: str = "model") -> list[Path]:
    """Find the safetensors files that hold the weights of a model, a head or an adapter.

    A single file of all weights precedes shards, as in transformers. Shards are those of the index,
    or else those that the number in their names promises. Other files are not read.

    Args:
        what: start of the message: setting and path.
        folder: local folder.
        name: start of the files' names: `model` or `adapter_model`.

    Returns:
        The files, sorted; empty if there is neither a file nor an index of that name.

    Raises:
        InputError: a file or a tensor that the index names is missing, or a file is damaged.
    """
    single, index = folder / f"{name}.safetensors", folder / f"{name}.safetensors.index.json"
    tensors: dict[str, str] = {}
    names = {file.name for file in folder.glob(f"{name}-*.safetensors")}
    if index.is_file():
        try:
            tensors = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = set(tensors.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{what}: cannot read {index}: {error!r}") from error
    else:
        matches = [match for match in map(SHARD.fullmatch, names) if match]
        names = {
            f"{match['start']}{number:0{len(match['number'])}d}-of-{match['total']}.safetensors"
            for match in matches
            for number in range(1, int(match["total"]) + 1)
        }
    if single.is_file():
        names = {single.name}
    missing = sorted(each for each in names if not (folder / each).is_file())
    if missing:
        raise InputError(
            f"{what}: {len(missing)} of {len(names)} files of weights are missing, e.g. "
            f"{missing[0]}; download it again"
        )
    files = [folder / each for each in sorted(names)]
    held = {each for file in files if tensors for each in list_tensor_names(file)}
    lacking = sorted(tensors.keys() - held)
    if lacking:
        raise InputError(
            f"{what}: {index.name} names {lacking[0]}, which no file of weights there holds "
            f"({len(lacking)} of {len(tensors)} tensors are missing); download it again"
        )
    return files


def list_tensor_names(file: Path) -> list[str]:
    """List the names of the tensors of a safetensors file, without torch.

    Raises:
        InputError: the file is corrupt or truncated.
    """
    try:
        with safe_open(file, "np") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise _make_damage_error(file, error) from error


def find_head_weights(folder: Path, path: str) -> list[Path]:
    """Find the safetensors files of a head: those of its index, or else all; empty without any.

    Args:
        folder: local folder.
        path: name of the folder in messages.

    Raises:
        InputError: as in `find_weight_files`.
    """
    files = find_weight_files(f"head.path={path}", folder)
    if (folder / INDEX).is_file():
        return files
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob(WEIGHTS[0]))


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
    """Download the named files of a Hub repository, or else those of a head."""
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


def find_head_gguf(place: Path) -> Path | None:
    """Find the GGUF file of a head: the path itself, or the file in a folder without a config.

    Raises:
        InputError: the folder has several GGUF files.
    """
    if place.suffix == GGUF and place.is_file():
        return place
    if (place / "config.json").is_file():
        return None
    files = sorted(place.glob(f"*{GGUF}"))
    if len(files) > 1:
        raise InputError(
            f"head.path={place}: has several GGUF files; name one of "
            f"{[file.name for file in files]}"
        )
    return files[0] if files else None


def check_folder_files(key: str, path: str, folder: Path, *names: str) -> Path:
    """Return a folder if it holds files of these names.

    Raises:
        InputError: it is a file, or a file is missing.
    """
    if not folder.is_dir():
        raise InputError(f"{key}={path}: is a file; name its folder")
    for name in names:
        if not (folder / name).is_file():
            inner = [file.parent for deep in ("*", "*/*") for file in folder.glob(f"{deep}/{name}")]
            if inner:
                is_head = key == "target.path" and (min(inner) / PROVENANCE).is_file()
                place = Path(path) / min(inner).relative_to(folder)
                remedy = f"type {'head.path' if is_head else key}={place}"
            else:
                there = sorted(file.name for file in folder.iterdir())
                remedy = f"found {there}; name the folder that has it"
            raise InputError(f"{key}={path}: no {name} there; {remedy}")
    return folder


def load_model_config(folder: Path) -> dict[str, Any]:
    """Load the `config.json` of a folder; empty if the file is no JSON object."""
    with suppress(InputError):  # a later reader reports the damage
        return load_json(folder / "config.json") or {}
    return {}


def has_architecture(folder: Path, architectures: Sequence[str], model_type: str) -> bool:
    """Tell whether the `config.json` of a folder names a kind of head.

    Args:
        folder: folder of a head.
        architectures: an engine's names of the kind.
        model_type: speculators' name of the kind.
    """
    settings = load_model_config(folder)
    named = set(settings.get("architectures", ())) & set(architectures)
    return settings.get("speculators_model_type") == model_type or bool(named)


def load_tensors(file: Path) -> "dict[str, Tensor]":
    """Load all tensors of a safetensors file to the CPU.

    Raises:
        InputError: the file is corrupt or truncated.
    """
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise _make_damage_error(file, error) from error


def load_export_record(folder: Path) -> dict[str, Any]:
    """Load the notes of `heads.export.writer` about a folder; empty for other writers."""
    return (load_json(folder / PROVENANCE) or {}).get("export") or {}


def load_head_tensors(files: Sequence[Path], path: str) -> "dict[str, Tensor]":
    """Load all tensors of a head's safetensors files to the CPU.

    Args:
        files: the files.
        path: name of the head in messages.

    Raises:
        InputError: a file is damaged, or a tensor holds codes of a quantisation.
    """
    tensors = {name: each for file in files for name, each in load_tensors(file).items()}
    for name, tensor in tensors.items():
        if tensor.element_size() == 1 and not name.endswith("t2d"):
            raise InputError(
                f"head.path={path}: {name} is {tensor.dtype}, but a quantised head cannot be read; "
                "name the head before quantisation"
            )
    return tensors


def _make_damage_error(file: Path, error: Exception) -> InputError:
    return InputError(
        f"{file}: corrupt or truncated safetensors file: {error}; download or save it again"
    )


def write_head_folder(
    folder: Path, weights: str, tensors: "dict[str, Tensor]", documents: dict[str, object]
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
    from safetensors.torch import save_file

    def fill(staging: Path) -> None:
        for name, content in documents.items():
            (staging / name).write_text(json.dumps(content, indent=2) + "\n")
        stored = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        stored = {n: t.float() if t.is_floating_point() else t for n, t in stored.items()}
        save_file(stored, staging / weights, metadata={"format": "pt"})

    write_folder(folder, fill)


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
        mode = temporary.stat().st_mode & 0o666
        for path in (*(p for p in temporary.rglob("*") if p.is_file()), temporary):
            # safetensors writes files that nobody else may read. A link's mode is its source's.
            is_own = not path.is_symlink() and path.stat().st_nlink == 1
            if path.suffix == SAFETENSORS_SUFFIX and is_own:
                path.chmod(mode)
            _sync_to_disk(path)
        _swap_folder(temporary, final)
    except SafetensorError as error:
        # safetensors gives the system's error only in its text.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(*([int(number[1])] if number else []), str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def _sync_to_disk(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
