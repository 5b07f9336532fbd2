"""The line at the end of a command: it is pasted as it stands, and means this run's own files."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT
from doors import COMMANDS
from exports import EAGLE31, eagle, toy_target
from omegaconf import OmegaConf

from conf.command import run_record as following
from conf.settings.blocks import DFlashRun
from conf.settings.data import RowsConfig
from conf.settings.drafting import HeadRef
from conf.settings.export import ExportFormat
from conf.settings.measure import AcceptanceRun, Mode, SpeedupRun
from conf.settings.target import Dtype, TargetConfig
from data.embedded import PROMPTS, TARGET_PATH
from eval import speedup
from heads.export.writer import choose_engine
from train.loop.command import build_measure_settings


def pasted(said: str) -> tuple[str, Any]:
    """The script and the settings of the line that a command ends with."""
    words, typed = said.rstrip("\n").splitlines()[-2:]
    assert words.startswith("next, ") and words.endswith(":")
    start, typed = typed.strip().split(" ", 1)
    if start == "accelerate":
        start, typed = typed.split(" ", 1)
        assert start == "launch" and typed.startswith(("train/", f"{ROOT}/train/"))
    else:
        assert start == "python"
    script, *settings = shlex.split(typed)
    name = str(Path(script).absolute().relative_to(ROOT))
    return name, OmegaConf.to_object(COMMANDS[name].compose_settings(settings))


@pytest.mark.parametrize("ended", following.NEXT_COMMANDS)
def test_the_next_command_is_one(ended: str) -> None:
    assert following.NEXT_COMMANDS[ended][0] in COMMANDS


VALUES = [
    "a b", "it's", 'say "so"', "x=1,2", "[a]", "${HOME}", "back\\slash", "~/models/8B", "1e-3x",
    Path("out/head"), 3, 0.5, True, None,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_is_typed_as_shell_and_hydra_take_it(value: Any) -> None:
    (word,) = shlex.split(following.format_setting("model", value))
    composed = COMMANDS["scripts/regenerate.py"].compose_settings([word])
    found = OmegaConf.to_container(composed, resolve=False)["model"]
    assert found == (value if value is None else str(value))


def test_lists_and_mappings_are_typed_too() -> None:
    data = RowsConfig(columns={"prompt": "ask me", "response": "reply"})
    run = AcceptanceRun(
        data=data, stop=["END", "the end."], tree=[[0], [0, 1]],
        head=HeadRef("h", layers=[1, 2]), mode=Mode.decode, conditions=["", "seed=1"],
    )  # fmt: skip
    changed = following.collect_changed_settings(run)
    words = [shlex.split(following.format_setting(*each))[0] for each in changed.items()]
    assert OmegaConf.to_object(COMMANDS["eval/acceptance.py"].compose_settings(words)) == run


def test_only_what_was_set_is_named_and_the_embedded_default_is_not() -> None:
    target = TargetConfig(TARGET_PATH, dtype=Dtype.bfloat16)
    run = AcceptanceRun(target=target, data=RowsConfig(path=PROMPTS), max_new_tokens=64)
    settings = following.collect_changed_settings(run, "target", "data", "max_new_tokens", "seed")
    assert settings == {
        "target.path": TARGET_PATH, "target.dtype": Dtype.bfloat16, "data.path": PROMPTS,
        "max_new_tokens": 64,
    }  # fmt: skip
    typed = following.format_command("eval/acceptance.py", settings)
    assert typed.endswith("eval/acceptance.py target.dtype=bfloat16 max_new_tokens=64")


def test_servers_are_named_where_they_may_run_the_target() -> None:
    settings = {"target.path": "me/model", "target.engine": ["http://localhost:8000/v1"]}
    here, there = (
        following.format_command(name, settings)
        for name in ("eval/acceptance.py", "eval/speedup.py")
    )
    assert here.endswith("target.path=me/model 'target.engine=[http://localhost:8000/v1]'")
    assert there.endswith("target.path=me/model")


def test_the_script_is_found_from_where_one_stands(tmp_path, monkeypatch) -> None:
    places = {ROOT: "eval/a.py", ROOT / "eval": "a.py", tmp_path: f"{ROOT}/eval/a.py"}
    for folder, place in places.items():
        monkeypatch.chdir(folder)
        assert following.format_command("eval/a.py", {}) == f"python {place}"


def test_a_command_that_another_one_started_keeps_it_to_itself(monkeypatch, capsys) -> None:
    following.print_next_command("train", {})
    assert pasted(capsys.readouterr().out)[0] == "eval/acceptance.py"
    monkeypatch.setenv(following.PARENT_COMMAND_VARIABLE, "quickstart")
    following.print_next_command("train", {})
    assert capsys.readouterr().out == ""


def training(path: str | None, out_dir: Path) -> DFlashRun:
    return DFlashRun(target=TargetConfig(path, revision="v1"), out_dir=str(out_dir))


def test_a_training_is_measured_with_its_target_and_prompts_of_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = build_measure_settings(training("me/model", tmp_path), "me/model")
    following.print_next_command("train", settings)
    script, run = pasted(capsys.readouterr().out)
    assert script == "eval/acceptance.py"
    assert run.head.path == str(tmp_path / "head")
    assert (run.target.path, run.target.revision) == ("me/model", "v1")
    assert (run.data.path, run.out_dir) == (following.PROMPTS_PLACEHOLDER, str(tmp_path))


def test_a_training_from_a_store_or_on_the_embedded_default_names_what_is_needed(tmp_path) -> None:
    assert build_measure_settings(DFlashRun(out_dir="o"), "me/model")["target.path"] == "me/model"
    embedded = build_measure_settings(DFlashRun(out_dir="o"), TARGET_PATH)
    assert following.format_command("", embedded).split()[2:] == ["head.path=o/head", "out_dir=o"]


def test_the_recipe_is_one_that_the_targets_engine_serves() -> None:
    assert following.recipe_for("me/model") == "eagle3_1"
    assert following.recipe_for("me/model-GGUF/model-Q4_1.gguf") == "eagle3"


@pytest.mark.parametrize(
    ("name", "more", "engine"),
    [
        ("me/toy", {}, "vllm"),
        ("me/toy", EAGLE31, "vllm"),
        ("me/toys/toy.gguf", {}, "llamacpp"),
        ("me/toys/toy.gguf", EAGLE31, None),
    ],
)
def test_a_measured_head_is_exported_for_the_engine_of_its_target(
    name: str, more: dict[str, Any], engine: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    target = toy_target()
    target.name = name
    head = eagle(target, **more).bfloat16()
    run = SpeedupRun(target=TargetConfig(name), head=HeadRef(path="outputs/mine/head"))
    settings = speedup.build_export_settings(head, run)
    if engine is None:
        assert settings is None
        return
    following.print_next_command("speedup", settings or {})
    script, export = pasted(capsys.readouterr().out)
    assert (script, export.format.value) == ("scripts/export.py", engine)
    assert export.dtype.value == "bfloat16"
    assert (export.head.path, export.target.path) == ("outputs/mine/head", name)


def test_no_export_is_proposed_that_ends_the_server() -> None:
    qwen2 = toy_target("qwen2")
    assert choose_engine(eagle(qwen2)) is ExportFormat.vllm
    qwen2.name = "me/toys/toy.gguf"
    assert choose_engine(eagle(qwen2)) is None


def test_an_adapter_that_was_trained_is_the_targets(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    found = build_measure_settings(training("me/model", tmp_path), "me/model")
    assert found["target.adapter"] == tmp_path / "adapter"
