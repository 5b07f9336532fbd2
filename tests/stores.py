"""Captures of small targets, in process."""

import json
from pathlib import Path
from typing import Any

from toys import save_target

from conf.settings.data import DataConfig
from conf.settings.scripts import CaptureRun
from conf.settings.target import Dtype, TargetConfig
from scripts.capture import capture

NUM_LAYERS = 4
SHARD_BYTES = 40_000
"""Such that each split has more than one shard."""


def save_inputs(folder: Path, family: str = "llama") -> Path:
    """A target in `folder/target` and conversations in `folder/chat.jsonl`."""
    save_target(folder / "target", family, num_hidden_layers=NUM_LAYERS)
    save_chat(folder / "chat.jsonl")
    return folder


def save_chat(file: Path) -> None:
    """Conversations."""
    rows = []
    for n in range(40):
        messages = [
            {"role": "user", "content": f"hello number {n}"},
            {"role": "assistant", "content": "fine, thanks. " * (1 + n % 4)},
        ]
        rows.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(rows))


def settings(inputs: Path, out_dir: Path, **changes: Any) -> CaptureRun:
    """A capture of these inputs in float32; `target` is the path of another target."""
    path, dtype = changes.pop("target", inputs / "target"), changes.pop("dtype", Dtype.float32)
    target = TargetConfig(path=str(path), dtype=dtype)
    data = DataConfig(path=str(inputs / "chat.jsonl"), max_length=128, eval_fraction=0.2)
    given: dict[str, Any] = {"micro_batch_size": 2, "num_replay_prompts": 2, **changes}
    return CaptureRun(target=target, data=data, out_dir=str(out_dir), **given)


def captured(inputs: Path, out_dir: Path, **changes: Any) -> Path:
    """The folder of a whole store."""
    capture(settings(inputs, out_dir, **changes), SHARD_BYTES)
    return out_dir


def files(store: Path) -> dict[str, bytes]:
    """Everything in a store but the lock, and where and by whom it was written."""
    found = {
        str(path.relative_to(store)): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file() and path.name not in (".lock", "manifest.json")
    }
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest["provenance"]
    return found | {"manifest.json": json.dumps(manifest).encode()}
