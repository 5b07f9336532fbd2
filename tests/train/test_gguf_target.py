"""A head for a target in a GGUF file: trained, gone on with, measured and published."""

import json
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from ggufs import save_gguf
from stores import captured, save_chat

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.target import TargetConfig
from tests.train.runs import start
from train.loop.sources import load_store

RUN = [
    "data.max_length=64", "data.eval_fraction=0.2", "head.num_heads=2", "train.batch_size=4",
    "train.warmup_steps=1", "train.save_steps=2", "train.log_steps=1", "train.schedule=constant",
    "train.num_replay_prompts=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two quantisations of a target, and what is said to it."""
    made = tmp_path_factory.mktemp("gguf")
    for kind in ("Q4_1", "Q8_0"):
        save_gguf(made / f"{kind}.gguf", kind)
    save_chat(made / "chat.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADSMITH_CACHE", str(made / "cache"))
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield made


def train(folder: Path, file: str, *more: str) -> None:
    start(
        "train/medusa.py", f"target.path={folder}", f"target.gguf_file={file}",
        f"data.path={folder / 'chat.jsonl'}", f"out_dir={folder / 'run'}", *RUN, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(folder: Path) -> Path:
    with (folder / "said").open("w") as said, redirect_stdout(said):
        train(folder, "Q4_1.gguf", "train.max_steps=2")
    train(folder, "Q4_1.gguf", "train.max_steps=4", "train.resume=auto")
    return folder / "run"


def test_a_run_goes_on_with_the_same_file_alone(run_dir: Path, folder: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, lines) if "train/loss" in line] == [1, 2, 3, 4]
    with pytest.raises(InputError, match=r"target\.quantization was 'Q4_1', is 'Q8_0'"):
        train(folder, "Q8_0.gguf", "train.max_steps=6", "train.resume=auto")


def test_what_engines_do_not_serve_is_said_before_the_first_step(
    run_dir: Path, folder: Path
) -> None:
    before, _ = (folder / "said").read_text().split("\nmemory on each device")
    assert (
        "\nvLLM loads Medusa heads up to version 0.32; newer versions have none.\n"
        "TensorRT-LLM loads Medusa heads up to version 1.1; newer versions have none.\n"
        "llama.cpp, which serves GGUF files, loads no Medusa heads; it serves heads of "
        "train/eagle.py with head=eagle3, and of train/dflash.py, dflash2.py and dspark.py.\n"
    ) in before


def test_a_head_says_which_weights_it_was_trained_on(run_dir: Path, folder: Path) -> None:
    provenance = json.loads((run_dir / "head" / "headsmith.json").read_text())
    assert provenance["target"] == str(folder / "Q4_1.gguf")
    assert provenance["target_identity"]["quantization"] == "Q4_1"
    assert len(provenance["target_identity"]["weights"]) == 64
    start(
        "scripts/push.py", f"head.path={run_dir / 'head'}", "repo_id=me/head",
        "base_model=me/model", "dry_run=true", f"out_dir={run_dir / 'staged'}",
    )  # fmt: skip
    card = (run_dir / "staged" / "README.md").read_text()
    assert "speculative decoding of [me/model](https://huggingface.co/me/model): " in card
    assert "the weights in `Q4_1.gguf`, of type Q4_1, which llama.cpp serves" in card
    assert "base_model: me/model\n" in card
    assert str(folder) not in card


def test_a_card_links_the_repository_of_a_file(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir / "head", tmp_path / "head")
    file = tmp_path / "head" / "headsmith.json"
    of_hub = {"target_identity": {"name": "me/model-GGUF/model-Q4_1.gguf", "quantization": "Q4_1"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | of_hub))
    config = tmp_path / "head" / "config.json"
    settings = json.loads(config.read_text())
    settings["base_model_name_or_path"] = "me/model-GGUF/model-Q4_1.gguf"
    config.write_text(json.dumps(settings))
    start(
        "scripts/push.py", f"head.path={tmp_path / 'head'}", "repo_id=me/head",
        "dry_run=true", f"out_dir={tmp_path / 'staged'}",
    )  # fmt: skip
    card = (tmp_path / "staged" / "README.md").read_text()
    assert "base_model: me/model-GGUF\n" in card
    assert "[me/model-GGUF/model-Q4_1.gguf](https://huggingface.co/me/model-GGUF)" in card
    assert "target.path=me/model-GGUF/model-Q4_1.gguf" in card


@pytest.mark.usefixtures("no_picture")
def test_it_is_measured_and_told_apart_from_another_quantisation(
    run_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for kind in ("Q4_1", "Q8_0"):
        start(
            "eval/acceptance.py", f"target.path={folder / kind}.gguf",
            f"head.path={run_dir / 'head'}", f"data.path={folder / 'chat.jsonl'}",
            "data.num_prompts=2", "max_new_tokens=8", "num_turns=2", f"out_dir={run_dir / kind}",
        )  # fmt: skip
        said[kind] = " ".join(capsys.readouterr().err.split())
    assert " 0prompt " not in said["Q4_1"]  # a bar of later turns that no dialogue has
    result = json.loads((run_dir / "Q4_1" / "acceptance.json").read_text())
    assert result["target_identity"]["quantization"] == "Q4_1"
    assert result["tau"] >= 1
    assert "trained for another target" not in said["Q4_1"]
    assert "trained for another target" in said["Q8_0"]
    assert result["data"]["target_changes"] == []
    other = json.loads((run_dir / "Q8_0" / "acceptance.json").read_text())
    assert [" ".join(line.split()) in said["Q8_0"] for line in other["data"]["target_changes"]] == [
        True
    ]


def test_a_store_is_of_one_quantisation(folder: Path) -> None:
    store = captured(folder, folder / "store", target=folder / "Q4_1.gguf", layers=[])
    data = DataConfig(features=str(store))
    load_store(data, TargetConfig(path=str(folder / "Q4_1.gguf")))
    with pytest.raises(InputError, match=r"Q8_0\.gguf: not the target .*'Q4_1', is 'Q8_0'"):
        load_store(data, TargetConfig(path=str(folder / "Q8_0.gguf")))
