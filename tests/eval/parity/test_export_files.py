"""The parity gate on the files of an export and on its golden logits; its command."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT
from exported import GOLDEN, change, copied, drop, eagle, edited, edited_json, write_eagle
from safetensors.torch import save_file
from torch import Tensor
from toys import random_target

from conf.errors import InputError
from eval.parity.parity_check import check_parity
from scripts import verify_export

WEIGHTS, CONFIG, NOTE = "model.safetensors", "config.json", "headsmith.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `eagle3` that nothing is wrong with."""
    target = random_target(num_hidden_layers=6)
    root = tmp_path_factory.mktemp("good")
    write_eagle(root / "eagle3", eagle(target, num_ids=40), target)
    return root


def undraftable(tensors: dict[str, Tensor]) -> None:
    """Leaves the ids that the head cannot draft."""
    chosen = tensors["logits"][0, 0].isinf()
    tensors["ids"], tensors["logits"] = tensors["ids"][chosen], tensors["logits"][..., chosen]


BROKEN_GOLDEN = {
    "a hidden state is missing": (drop("hidden_states.3"), "no tensor hidden_states.3"),
    "logits are missing": (drop("logits"), "no tensor logits"),
    "a depth is missing": (change("logits", lambda t: t[:-1]), "logits has shape"),
    "a sum is wrong": (change("logsumexp", lambda t: t + 0.1), "logsumexp of the served head"),
    "no logit is compared": (undraftable, "a whole row is -inf"),
    "positions close together": (
        change("position_ids", lambda t: torch.arange(len(t))),
        "a wrong RoPE would go unnoticed",
    ),
    "a logit is NaN": (lambda t: t["logits"][0, 0, :1].fill_(float("nan")), "logits: 1 values"),
}


@pytest.mark.parametrize("fault", BROKEN_GOLDEN)
def test_a_fault_in_the_golden_file_is_named(good: Path, tmp_path: Path, fault: str) -> None:
    breaks, message = BROKEN_GOLDEN[fault]
    folder = copied(good, tmp_path, "eagle3")
    with edited(folder / GOLDEN) as tensors:
        breaks(tensors)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


BROKEN_FOLDERS = {
    "a pickled file": (lambda f: (f / "pytorch_model.bin").touch(), "pickled files"),
    "a pickled checkpoint": (lambda f: (f / "last.ckpt").touch(), "pickled files"),
    "a second file of weights": (lambda f: shutil.copy(f / WEIGHTS, f / "more.safetensors"),
     "exactly one"),
    "golden logits among the weights": (lambda f: shutil.copy(f / GOLDEN, f / "parity.safetensors"),
     "exactly one"),
    "no golden logits": (lambda f: shutil.rmtree(f / "parity"), "cannot be checked"),
    "golden logits without metadata": (lambda f: save_file({"logits": torch.zeros(1)}, f / GOLDEN),
     "metadata"),
    "truncated weights": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]),
     "truncated"),
    "a list for a config": (lambda f: (f / CONFIG).write_text("[]"), "list, not an object"),
    "a broken config": (lambda f: (f / CONFIG).write_text("{"), "not JSON"),
    "no config": (lambda f: (f / CONFIG).unlink(), "cannot be read"),
    "no format": (lambda f: (f / NOTE).unlink(), "give --format"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN_FOLDERS)
def test_a_fault_in_the_folder_is_named(good: Path, tmp_path: Path, fault: str) -> None:
    breaks, message = BROKEN_FOLDERS[fault]
    folder = copied(good, tmp_path, "eagle3")
    breaks(folder)
    with pytest.raises(InputError, match=message):
        check_parity(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        check_parity(tmp_path / "export")


def test_the_note_must_fit_the_golden_file_and_the_format(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path, "eagle3")
    with pytest.raises(InputError, match="--format sglang"):
        check_parity(folder, "sglang")
    with edited_json(folder / NOTE) as note:
        note["export"]["format"] = "tgi"
    with pytest.raises(InputError, match=r"no heads of kind eagle3; allowed: .*'vllm'"):
        check_parity(folder)
    with edited_json(folder / NOTE) as note:
        note["export"]["kind"] = "medusa"
    with pytest.raises(InputError, match=r"export\.kind=medusa"):
        check_parity(folder)


def test_the_command_prints_one_line_per_check(good: Path, tmp_path: Path) -> None:
    """On a machine that has neither transformers nor hydra."""
    folder = copied(good, tmp_path, "eagle3")
    (folder / NOTE).unlink()
    block = (
        "import sys, runpy; sys.modules.update(dict.fromkeys(['transformers', 'hydra', 'heads']));"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script = str(ROOT / "scripts" / "verify_export.py")
    command = [sys.executable, "-c", block, script, str(folder), "--format", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, *_, last = done.stdout.splitlines()
    assert first.endswith("format vllm, head eagle3")
    assert last.startswith("parity: max |difference| ") and " of logits up to " in last


def test_the_command_says_what_is_wrong(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(good, tmp_path, "eagle3")
    (folder / CONFIG).unlink()
    monkeypatch.setattr(sys, "argv", ["verify_export.py", str(folder)])
    assert verify_export.main() == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("error: ") and "config.json" in found.err
