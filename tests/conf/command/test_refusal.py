"""Refusals: one pattern, wrapped and bold on a terminal, one line elsewhere."""

import io

import pytest
from doors import COMMANDS
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException

from conf import errors as terminal
from conf.command import entry as refusal
from conf.command import help_pages
from conf.errors import InputError

EAGLE = COMMANDS["train/eagle.py"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")


LONG = InputError(
    "train.batch_size=3: must be a multiple of train.micro_batch_size=2 times 1 process; allowed: "
    "2, 4, ...; type train.batch_size=4"
)
WRAPPED = """\
error: *train.batch_size=3*: must be a multiple of
       *train.micro_batch_size=2* times 1 process; allowed: 2,
       4, ...; type *train.batch_size=4*"""


def test_a_terminal_gets_lines_of_its_width_with_settings_in_bold() -> None:
    shown = terminal.format_error(LONG, Terminal())
    assert shown.replace(terminal.BOLD, "*").replace(terminal.PLAIN, "*") == WRAPPED


def test_a_log_gets_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal.format_error(LONG, io.StringIO()) == f"error: {LONG}"
    monkeypatch.setenv("TERM", "dumb")
    assert terminal.format_error(LONG, Terminal()) == f"error: {LONG}"


def test_lines_of_an_error_stay_lines_and_what_is_typed_stays_whole() -> None:
    url = "http://localhost:8000/v1/" + 60 * "x"
    shown = terminal.format_error(InputError(f"one\n  two --multi-run {url}"), Terminal())
    assert shown.splitlines() == ["error: one", "         two --multi-run", f"       {url}"]


@pytest.mark.parametrize(
    ("text", "bold"),
    [
        ("head.path: no head there", ["head.path"]),
        ("seed=3: no; or a.layers=[1, 2], out=a/b.", ["seed=3", "a.layers=[1, 2]", "out=a/b"]),
        ("a.b.py: cannot be read (x=1)", ["a.b.py", "x=1"]),
        ("/tmp/a=b: --num=3 of a-b=c", []),
    ],
)
def test_settings_are_found(text: str, bold: list[str]) -> None:
    assert [found[0] for found in terminal.SETTING.finditer(text)] == bold


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "train.max_steps=abc",
            "train.max_steps=abc: not allowed here; allowed: whole number, or "
            "null; try --help train.max_steps",
        ),
        (
            "target.dtype=foo",
            "target.dtype=foo: not allowed here; allowed: one of auto, float32, bfloat16, "
            "float16; try --help target.dtype",
        ),
        (
            "head=eagle9",
            "head=eagle9: no such recipe; allowed: eagle3, eagle1, eagle3_1, hass (conf/head); a "
            "trained head is head.path=FOLDER",
        ),
        ("train.seed", "train.seed: not a setting; type KEY=VALUE, --help lists all of them"),
        (
            "head.layers={a}",
            "head.layers={a}: the value cannot be read; allowed: words and numbers, [a,b] for a "
            "list; put a text with other signs in two kinds of quotes: 'head.layers=\"...\"'",
        ),
        (
            "data.columns={prompt:",
            "data.columns={prompt:: the value cannot be read; allowed: words and numbers, [a,b] "
            "for a list; put a mapping in quotes: 'data.columns={NAME: VALUE}'",
        ),
        (
            "head.layers=1,2",
            "head.layers=1,2: several values; allowed: one; type 'head.layers=[1,2]' for a list, "
            "or add --multirun to run the command for each",
        ),
        (
            "train.seed=1,2",
            "train.seed=1,2: several values; allowed: one; add --multirun to run the command for "
            "each",
        ),
        ("~nothing", "Could not delete from config. 'nothing' does not exist."),
    ],
)
def test_hydra_refuses_in_our_words(given: str, message: str) -> None:
    with pytest.raises(HydraException) as refused:
        EAGLE.compose_settings([given])
    assert str(refusal.convert_hydra_error(refused.value, EAGLE.schema, EAGLE.recipes)) == message


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("train/medusa.py lr=1e-4", "lr: this command has no such setting; type train.learning"),
        ("scripts/push.py target.path=me/x", "has no such setting; type base_model=me/x"),
        ("train/medusa.py train.lr=1e-4", "has no such setting; type train.learning_rate=1e-4"),
        ("train/medusa.py +optimizer.lr=3", "has no such setting; type train.learning_rate=3"),
        ("train/medusa.py max-seq-length=9", "has no such setting; type data.max_length=9"),
        ("eval/speedup.py max_tokens=9", "has no such setting; type max_new_tokens=9"),
        ("train/medusa.py path=x", "; type data.path=x or head.path=x or target.path=x"),
        (
            "scripts/push.py target.dtype=x",
            "target.dtype: this command has no such setting; train/dflash.py, train/dflash2.py, "
            "train/dspark.py, train/eagle.py and 17 more have it",
        ),
        ("train/medusa.py target=me/x", "target=me/x: target is a section of settings; type targe"),
        ("eval/acceptance.py head=a/b", "head=a/b: head is a section of settings; type head.path="),
        ("train/medusa.py log=wandb", "log=wandb: log is a section of settings; try --help log"),
        (
            "train/medusa.py head=eagle3",
            "head=eagle3: another command trains it; type train/eagle.py head=eagle3, or "
            "head.path=FOLDER for a trained head",
        ),
        ("train/eagle.py head=dspark", "; type train/dspark.py head=dspark, or head.path=FOLDER"),
        ("train/eagle.py head=medusa", "; type train/medusa.py, or head.path=FOLDER for a"),
        (
            "train/medusa.py seed=1 --target.path me/x",
            "--target.path: settings are typed as KEY=VALUE, without dashes; type target.path=me/x",
        ),
        ("train/medusa.py --learning-rate=3", ", without dashes; type train.learning_rate=3"),
        ("train/medusa.py --multirun --lr 1,2", ", without dashes; type train.learning_rate=1,2"),
        ("train/medusa.py --seeds", ", without dashes: near are seed"),
        ("train/medusa.py train.lr 3", "train.lr: settings are typed as KEY=VALUE, without dash"),
        ("train/medusa.py train.max_step=3", "near are train.max_steps, "),
        ("train/eagle.py train.max_steps=abc", "train.max_steps=abc: not allowed here; allowed:"),
        ("train/medusa.py train.max_steps=-3", "error: train.max_steps=-3: must be above 0\n"),
        ("train/medusa.py rows.jsonl", "rows.jsonl: not a setting; type KEY=VALUE, --help lists"),
    ],
)
def test_what_was_meant_is_named(typed, message, monkeypatch, capsys) -> None:
    command, store = COMMANDS[typed.split(maxsplit=1)[0]], ConfigStore.instance().repo
    refusal._register_settings(command)
    # Other commands that have run in this process have left their recipes.
    own = {f"{recipe}.yaml" for recipe in command.recipes}
    heads = {name: node for name, node in store.get("head", {}).items() if name in own}
    monkeypatch.setitem(store, "head", heads)
    monkeypatch.setattr("sys.argv", typed.split())
    with pytest.raises(SystemExit, match=r"^2$"):
        command.parse_command_line()
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert message in said


def test_options_of_hydra_and_values_that_look_like_options_pass(monkeypatch) -> None:
    for typed in ("--cfg job", "-m seed=1,2", "--package _global_ -c job", "log.project=--x"):
        monkeypatch.setattr("sys.argv", ["train/medusa.py", *typed.split()])
        EAGLE._check_typed_forms(typed.split())


@pytest.mark.parametrize("other", sorted({*help_pages.OTHER_NAMES}))
def test_names_of_other_toolkits_mean_settings_that_exist(other: str) -> None:
    meant = help_pages.OTHER_NAMES[other]
    schemas = [schema for _, schema in help_pages._iter_command_schemas()]
    names = {name for schema in schemas for name in help_pages._iter_setting_names(schema)}
    assert meant in names
    assert other not in names or other in ("base_model", "batch_size", "model")
