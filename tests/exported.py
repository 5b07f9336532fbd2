"""Exports that tests break: a key of the config or a tensor otherwise, or gone."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.export.gguf import GgufFile, Value, write_gguf

GOLDEN = "parity/parity.safetensors"
GONE = object()
Fault = Callable[[dict[str, Any], dict[str, Tensor]], object]
"""Changes the config, or the metadata of a GGUF file, and the tensors."""


@contextmanager
def edited_json(file: Path) -> Iterator[dict[str, Any]]:
    """The content of a JSON file, written back."""
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


@contextmanager
def edited(file: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a safetensors file, written back with its metadata."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    yield tensors
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, file, metadata=metadata)


def damage(folder: Path, fault: Fault) -> None:
    """Applies a fault to an export."""
    (file,) = [*folder.glob("*.gguf"), *folder.glob("*.safetensors")]
    if file.suffix == ".safetensors":
        with edited_json(folder / "config.json") as config, edited(file) as tensors:
            fault(config, tensors)
        return
    found = GgufFile(file, "file")
    told = {key: value.content for key, value in found.metadata.items()}
    content, tensors = dict(told), found.load_tensors()
    fault(content, tensors)
    values = {
        key: found.metadata[key] if each is told.get(key) else Value.from_content(each)
        for key, each in content.items()
    }
    write_gguf(file, values, tensors)


def key(*path: str, to: Any = GONE) -> Fault:
    """A key of the config with another value, or gone."""

    def change(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        for name in path[:-1]:
            config = config[name]
        if to is GONE:
            del config[path[-1]]
        else:
            config[path[-1]] = to

    return change


def flag(name: str, to: Any = GONE) -> Fault:
    """A key that stands in two places."""
    return both(key(name, to=to), key("eagle_config", name, to=to))


def tensor(name: str, change: Callable[[Tensor], Tensor] | None = None) -> Fault:
    """A tensor changed, or gone."""

    def edit(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        found = tensors.pop(name)
        if change is not None:
            tensors[name] = change(found).contiguous()

    return edit


def extra(name: str, value: Tensor) -> Fault:
    return lambda _, tensors: tensors.update({name: value})


def renamed(old: str, new: str, stays: bool = False) -> Fault:
    """A tensor under another name, or under both."""
    return lambda _, t: t.update({new: t[old].clone() if stays else t.pop(old)})


def both(*faults: Fault) -> Fault:
    return lambda config, tensors: [fault(config, tensors) for fault in faults]


def absolute(offsets: Tensor) -> Tensor:
    return offsets + torch.arange(len(offsets))


def ropes(theta: float | None = None, **scaling: Any) -> Fault:
    """Another RoPE in either spelling."""

    def write(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        theta_now = theta or config["rope_theta"]
        config["rope_theta"], config["rope_scaling"] = theta_now, scaling or None
        config["rope_parameters"] = {"rope_theta": theta_now, "rope_type": "default", **scaling}

    return write
