"""Checkpoints: whole or absent, equal after a round trip, the one before if damaged."""

import json
import os
import resource
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from conf.errors import InputError
from heads.folders import write_folder
from train.parallel import checkpoint
from train.parallel.checkpoint import CheckpointTensors, Progress

RUN = {"seed": 0, "train.batch_size": 2}


def head_of(width: int = 4) -> nn.Linear:
    head = nn.Linear(width, 3)
    head.bias.requires_grad_(False)
    return head


def adamw(head: nn.Module) -> dict[str, list[str]]:
    trained = [name for name, each in head.named_parameters() if each.requires_grad]
    return {name: ["exp_avg", "exp_avg_sq"] for name in trained}


def tensors(width: int = 4, value: float = 0.5) -> CheckpointTensors:
    weights = {"weight": torch.full((3, width), value), "bias": torch.arange(3.0)}
    keys = ("weight.exp_avg", "weight.exp_avg_sq")
    return CheckpointTensors(weights, {key: torch.full((3, width), value + 1) for key in keys})


def save(folder: Path, made: CheckpointTensors, number: int, keep: int = 2) -> Path:
    return checkpoint.save_checkpoint(folder, made, Progress(number, 10 * number, RUN), keep)


def test_what_is_read_is_what_was_saved(tmp_path: Path) -> None:
    saved = save(tmp_path, tensors(), 3)
    progress, found = checkpoint.load_checkpoint(saved)
    assert progress == Progress(3, 30, RUN)
    state = json.loads((saved / "state.json").read_text())
    assert (state["step"], state["tokens"], state["position"]) == (3, 30, 6)
    assert sorted(found.head) == ["bias", "weight"]
    assert sorted(found.state) == ["weight.exp_avg", "weight.exp_avg_sq"]
    assert found.head["bias"].tolist() == [0.0, 1.0, 2.0]
    assert found.state["weight.exp_avg"].equal(torch.full((3, 4), 1.5))
    checkpoint.check_checkpoint_fits(tmp_path, found, head_of(), adamw(head_of()))


def test_only_safetensors_and_json_and_the_newest_are_kept(tmp_path: Path) -> None:
    made = tensors()
    for number in (1, 2, 3):
        save(tmp_path, made, number)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    endings = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert endings == {".safetensors", ".json"}


def test_later_checkpoints_of_a_run_given_up_go(tmp_path: Path) -> None:
    made = tensors()
    for number in (2, 4, 1):
        save(tmp_path, made, number, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_what_a_stopped_write_has_left_goes(tmp_path: Path) -> None:
    for name in (".writing-step-000001", ".old-step-000001", "step-mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000").touch()
    save(tmp_path, tensors(), 2)
    names = ["step-000000", "step-000002", "step-mine"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    (tmp_path / ".writing-step-000003").mkdir()
    (tmp_path / "step-000003").mkdir()
    assert checkpoint.find_latest_checkpoint(tmp_path, print) == tmp_path / "step-000002"


def test_a_run_of_more_steps_than_six_digits_has(tmp_path: Path) -> None:
    made = tensors()
    for number in (999_998, 1_000_001, 999_999):
        last = save(tmp_path, made, number)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-999998", "step-999999"]
    after = save(tmp_path, made, 1_000_000)
    assert sorted(tmp_path.iterdir()) == sorted([last, after])
    assert checkpoint.find_latest_checkpoint(tmp_path, print) == after


def test_the_fingerprint_is_that_of_all_bytes(tmp_path: Path) -> None:
    saved = save(tmp_path, tensors(width=500_000), 1)  # 6 MB: more than is read at once
    content = (saved / "head.safetensors").read_bytes()
    stored = json.loads((saved / "state.json").read_text())["files"]["head.safetensors"]
    assert stored == {"bytes": len(content), "crc32": zlib.crc32(content)}


@pytest.mark.parametrize("name", ["head.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damaged_newest_falls_back_and_says_so(tmp_path: Path, name: str, damage: str) -> None:
    made = tensors()
    older = save(tmp_path, made, 1)
    file = save(tmp_path, made, 2) / name
    content = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(content[:-20])
    elif damage == "flip":
        content[0 if name == "state.json" else -3] ^= 0xFF
        file.write_bytes(content)
    else:
        file.unlink()
    said: list[str] = []
    assert checkpoint.find_latest_checkpoint(tmp_path, said.append) == older
    assert "step-000002 is damaged" in said[0]
    with pytest.raises(InputError, match="is damaged"):
        checkpoint.load_checkpoint(tmp_path / "step-000002")


def test_nothing_there_is_no_error_but_all_damaged_is(tmp_path: Path) -> None:
    assert checkpoint.find_latest_checkpoint(tmp_path, print) is None
    (save(tmp_path, tensors(), 1) / "head.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"every checkpoint .* restore one of them"):
        checkpoint.find_latest_checkpoint(tmp_path, print)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (head_of(5), r"weight has shape \[3, 4\] there and \[3, 5\] here.* 3 tensors differ"),
        (nn.Linear(4, 3), r"bias.exp_avg has shape none there and \[3\] here"),
        (nn.Linear(4, 3, bias=False), r"bias has shape \[3\] there and none here"),
    ],
)
def test_checkpoint_of_another_head(tmp_path: Path, head: nn.Module, message: str) -> None:
    saved = save(tmp_path, tensors(), 1)
    with pytest.raises(InputError, match=f"train.resume={saved}: of another head: {message}"):
        checkpoint.check_checkpoint_fits(
            saved, checkpoint.load_checkpoint(saved)[1], head, adamw(head)
        )


def test_checkpoint_of_an_earlier_format(tmp_path: Path) -> None:
    path = save(tmp_path, tensors(), 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 1}))
    with pytest.raises(InputError, match="format 1, this version reads 2"):
        checkpoint.load_checkpoint(path)


def test_a_write_that_the_system_refuses(tmp_path: Path) -> None:
    """Stopped by a limit on the size of files, as a full disk stops it."""
    made = tensors(width=4000)
    older = save(tmp_path, made, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(InputError, match=r"step-000002.*File too large"):
            save(tmp_path, made, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == [older.name]
    assert checkpoint.find_latest_checkpoint(tmp_path, print) == older


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_have_the_mode_of_other_files(tmp_path: Path, mask: int, mode: int) -> None:
    """safetensors itself writes 0600; a link keeps the mode of its source."""
    source = tmp_path / "source.safetensors"
    source.touch(0o600)

    def fill(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
        (folder / "soft.safetensors").symlink_to(source)
        (folder / "hard.safetensors").hardlink_to(source)

    before = os.umask(mask)
    try:
        write_folder(tmp_path / "out", fill)
    finally:
        os.umask(before)
    files = [tmp_path / "out" / name for name in ("config.json", "model.safetensors")]
    assert [file.stat().st_mode & 0o777 for file in files] == [mode, mode]
    assert source.stat().st_mode & 0o777 == 0o600


def test_folder_is_replaced_whole(tmp_path: Path) -> None:
    final = tmp_path / "head"
    for content in ("one", "two"):
        write_folder(final, lambda folder, text=content: (folder / "file").write_text(text))

    def broken(folder: Path) -> None:
        (folder / "file").write_text("three")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_folder(final, broken)
    assert (final / "file").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
