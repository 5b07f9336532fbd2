"""Pages of `--help`."""

import subprocess
import sys

import pytest
from commands import ROOT
from doors import COMMANDS
from omegaconf import OmegaConf

from conf.command import help_pages as words
from conf.errors import InputError
from eval.preflight_checks import METHODS, OF_HEADS

HEAVY = ("torch", "transformers", "datasets", "accelerate", "peft", "rich", "matplotlib", "wandb")
KNOCK = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from conf.command.entry import Command
Command.parse_command_line = lambda self: sys.exit(self.name)
names = []
for script in sys.argv[1:]:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        names.append(stop.code)
print(names)
print([name for name in {HEAVY} if name in sys.modules])
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Literal pages are of lines of 100, whatever runs the tests."""
    monkeypatch.setenv("COLUMNS", "100")


def shown(entry: str, *overrides: str) -> list[words.Setting]:
    command = COMMANDS[entry]
    return words.list_settings(command.schema, command.compose_settings(list(overrides)))


def page(entry: str) -> str:
    return words.format_help_page("What it does.", shown(entry), COMMANDS[entry].recipes)


def test_every_command_has_its_door_before_heavy_libraries() -> None:
    scripts = [str(ROOT / entry) for entry in COMMANDS]
    command = [sys.executable, "-c", KNOCK, *scripts]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    names = [command.name for command in COMMANDS.values()]
    assert (said.stdout, said.stderr) == (f"{names}\n[]\n", "")


@pytest.mark.parametrize("entry", COMMANDS)
def test_every_setting_has_words(entry: str) -> None:
    schema = COMMANDS[entry].schema
    for each in words.list_settings(schema, OmegaConf.structured(schema)):
        assert len(each.description) > 5, each.name
        assert each.description[-1] in ".)", each.name


def test_help_is_printed_at_the_door(monkeypatch, capsys) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(sys, "argv", ["train/medusa.py", "--help", "seed=7", "seed", "log.project"])
    with pytest.raises(SystemExit, match=r"^0$"):
        COMMANDS["train/medusa.py"].parse_command_line()
    assert capsys.readouterr().out == (
        "seed=7\n  whole number.\n  Seed of new weights, data order, noise and sampling.\n\n"
        "log.project=headsmith\n  text.\n  Project name in the tracker.\n"
    )


def test_settings_come_in_the_order_in_which_people_need_them() -> None:
    found = [each.name for each in shown("train/medusa.py")]
    sections = list(dict.fromkeys(name.partition(".")[0] for name in found))
    few = ["out_dir", "seed", "num_threads"]
    assert sections == ["target", "data", "head", "train", "log", "rollout", *few]
    exported = [each.name for each in shown("scripts/export.py")]
    assert (exported[:2], exported[-1]) == (["format", "target.path"], "num_threads")


def test_the_page_of_a_command_has_defaults_words_and_choices() -> None:
    said = page("train/medusa.py")
    assert said.startswith(
        "What it does.\n\n"
        "target: The frozen language model to draft for.\n"
        "  target.path=null                Hub id, folder or GGUF file. Unset: the embedded "
        "default.\n"
    )
    assert (
        "\n  train.optimizer=auto            Optimizer of the head.\n"
        "                                  One of auto, adamw, muon.\n"
        "                                  auto: The better one for the kind of head; AdamW und"
    ) in said
    assert "\nout_dir=outputs/medusa            Folder for the head, its check" in said
    assert "accelerate" not in said
    assert "head=" not in said


def test_a_command_offers_its_own_recipes_and_shows_what_they_set() -> None:
    assert (
        "\nhead: An EAGLE head and its losses. Defaults are EAGLE-3's (arXiv 2503.01840) unless "
        "noted.\n"
        "  head=eagle3                     Recipe in conf/head; others: eagle1, eagle3_1, hass.\n"
    ) in page("train/eagle.py")
    assert "Recipe in conf/head; others: there is no other.\n" in page("train/dflash.py")
    values = {each.name: each.value for each in shown("train/eagle.py")}
    assert (values["train.max_grad_norm"], values["head.norm_before_residual"]) == ("0.5", "true")
    values = {each.name: each.value for each in shown("train/eagle.py", "head=hass", "seed=3")}
    assert (values["train.max_grad_norm"], values["head.num_steps"]) == ("null", "3")
    assert (values["head.form"], values["seed"]) == ("eagle1", "3")
    values = {each.name: each.value for each in shown("scripts/contest/run.py")}
    assert values["recipes"] == "[medusa,eagle3_1,dspark]"


def test_one_setting_is_told_in_full() -> None:
    assert words.format_setting_help(shown("train/medusa.py"), "train.schedule") == (
        "train.schedule=auto\n"
        "  one of auto, cosine, wsd, constant.\n"
        "  Learning-rate schedule after the warm-up.\n"
        "    auto: `wsd` for EAGLE heads, `cosine` for Medusa heads.\n"
        "    cosine\n"
        "    wsd\n"
        "    constant"
    )
    assert words.format_setting_help(shown("eval/speedup.py"), "draft.tree").splitlines()[1] == (
        "  list (list (whole number)), or null."
    )


def test_the_help_of_methods_names_every_method() -> None:
    said = words.format_setting_help(shown("eval/speedup.py"), "methods")
    assert [name for name in METHODS if f"`{name}`" not in said] == []
    assert [way for way in OF_HEADS if f"_{way}`" not in said] == []
    assert ".py" not in said


def test_a_section_is_told_in_full() -> None:
    said = words.format_setting_help(shown("train/medusa.py"), "log").splitlines()
    assert said[:3] == [
        "log: Experiment tracking. A failing tracker does not stop a run.",
        "log.tracker=none",
        "  one of none, tensorboard, wandb.",
    ]
    assert "log.run_name=null" in said
    assert not [line for line in said if "train." in line]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("train.batchsize", r"train\.batch_size"),
        ("max_step", r"train\.max_steps"),
        ("trian", "near are train"),
        ("epochs", r"train\.num_epochs"),
        ("qqq", "see --help"),
    ],
)
def test_of_an_unknown_name_near_ones_are_told(name: str, near: str) -> None:
    with pytest.raises(InputError, match=rf"^{name}: no setting and no section .*{near}"):
        words.format_setting_help(shown("train/medusa.py"), name)
