"""Refusals: one pattern, wrapped and bold on a terminal, one line elsewhere."""

import io
from pathlib import Path

import pytest
from doors import COMMANDS
from hydra.errors import HydraException

from conf import errors as terminal
from conf.command import entry as refusal
from conf.errors import InputError
from tests.conf.command.test_entry import command

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
        (
            "seed=3: no; or target.layers=[1, 2], out_dir=a/b.",
            ["seed=3", "target.layers=[1, 2]", "out_dir=a/b"],
        ),
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
            "train.max_steps=abc: not allowed here; allowed: whole number; "
            "try --help train.max_steps",
        ),
        (
            "target.dtype=foo",
            "target.dtype=foo: not allowed here; allowed: one of auto, float32, bfloat16, "
            "float16; try --help target.dtype",
        ),
        (
            "head=eagle9",
            "head=eagle9: no such recipe; allowed: eagle3, eagle1, eagle3_1, hass (conf/head)",
        ),
        ("train.seed", "train.seed: not a setting; type KEY=VALUE, --help lists all of them"),
        (
            "head.layers={a}",
            "head.layers={a}: the value cannot be read; allowed: words and numbers, [a,b] for a "
            "list; put a text with other signs in two kinds of quotes: 'head.layers=\"...\"'",
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


def test_a_value_of_another_kind_ends_a_command_with_one_line(tmp_path: Path) -> None:
    refused = command("train/eagle.py", "train.max_steps=abc", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: train.max_steps=abc: not allowed here; allowed: whole")
    assert refused.stderr.count("\n") == 1
