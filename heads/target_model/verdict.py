"""What the check of a target found, kept for every later start where it took time."""

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from conf.command.provenance import code_key
from conf.files import cache_dir
from conf.settings.target import TargetConfig
from heads.target_model.check import check_served
from heads.target_model.identity import identify
from heads.target_model.model import Target

WORTH_S = 2.0
"""Seconds from which a check is remembered."""
KEPT = ("needs_masks", "numerical_difference", "attended", "state_bytes")


def check_once(target: Target, config: TargetConfig) -> None:
    """`check_served`, unless this very target passed it here before.

    Args:
        target: just loaded.
        config: how.

    Raises:
        InputError: it cannot be served.
    """
    file = _file(target, config)
    if file is not None and file.is_file():
        for name, value in json.loads(file.read_text()).items():
            setattr(target, name, value)
        return
    start = time.monotonic()
    check_served(target)
    if file is not None and time.monotonic() - start > WORTH_S:
        # Who cannot write checks again.
        with suppress(OSError):
            _write(file, json.dumps({name: getattr(target, name) for name in KEPT}))


def _file(target: Target, config: TargetConfig) -> Path | None:
    """Of a verdict, named for all that it depends on; None where weights cannot be told apart."""
    identity = identify(config, target.tokenizer, target.dtype)
    if identity.weights is None:
        return None
    heads = Path(__file__).parents[1]
    folders = ("target_model", "decoding", "layers")
    code = sorted(file for folder in folders for file in (heads / folder).glob("*.py"))
    facts: dict[str, Any] = asdict(identity) | {
        "name": None,  # the same files may lie in several places
        "code": code_key(code),
        "versions": [torch.__version__, transformers.__version__],
        "attention": target.config._attn_implementation,
        "device": _device(target.device),
        "device_map": config.device_map,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "checks" / f"{key}.json"


def _device(device: torch.device) -> str:
    """Whose kernels run."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.backends.cpu.get_cpu_capability()}"


def _write(file: Path, content: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "w") as stream:
        stream.write(content)
    Path(temporary).replace(file)
