"""The package `headsmith` as a wheel holds it, in a folder full of other people's modules."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import ROOT
from doors import COMMANDS, WORKERS

from conf.command.forms import list_arguments, name_commands, shorten_script
from conf.command.run_record import compute_code_checksum
from conf.errors import InputError, format_error
from scripts.package.build_hook import FOLDERS, list_files, rename_imports, write_package
from scripts.package.console import JOURNEY, main
from tests.hub_server import TOKEN, HubServer

RECORDER = """\
import atexit, json, os, sys
def write():
    found = {"modules": sorted({name.split(".")[0] for name in sys.modules} & set(%r)),
             "path": sys.path, "argv": sys.argv}
    with open(os.path.join(%r, f"{os.getpid()}.json"), "w") as file:
        json.dump(found, file)
atexit.register(write)
"""
FOREIGN = "raise ImportError('a module of somebody else was imported')\n"


def test_import_statements_get_the_package_and_nothing_else_does() -> None:
    text = (
        "import sys\n"
        "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root\n"
        "from conf.errors import InputError\n"
        "from train import api\n"
        "from database import train\n"
        "from . import conf\n"
        "def f():\n"
        "    'from conf import errors'\n"
        "    from heads.medusa import (\n"
        "        MedusaHead,\n"
        "    )\n"
    )
    assert rename_imports(text) == (
        "import sys\n"
        "from headsmith.conf.errors import InputError\n"
        "from headsmith.train import api\n"
        "from database import train\n"
        "from . import conf\n"
        "def f():\n"
        "    'from conf import errors'\n"
        "    from headsmith.heads.medusa import (\n"
        "        MedusaHead,\n"
        "    )\n"
    )


def test_an_import_of_a_whole_path_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 2: import heads\.medusa"):
        rename_imports("import os\nimport os.path, heads.medusa\n")


@pytest.mark.parametrize(
    ("text", "module", "console"),
    [
        ("type scripts/export.py", "type headsmith.scripts.export", "type headsmith export"),
        ("python eval/serve.py a=b", "python -m headsmith.eval.serve a=b", "headsmith serve a=b"),
        (
            "accelerate launch train/eagle.py a=b",
            "accelerate launch -m headsmith.train.eagle a=b", "headsmith train eagle a=b",
        ),
        (
            "accelerate launch --config_file=c train/eagle.py",
            "accelerate launch --config_file=c -m headsmith.train.eagle",
            "accelerate launch --config_file=c -m headsmith.train.eagle",
        ),
        (
            "python scripts/contest/run.py", "python -m headsmith.scripts.contest.run",
            "headsmith contest",
        ),
        ("/home/me/train/eagle.py", "/home/me/train/eagle.py", "/home/me/train/eagle.py"),
    ],
)  # fmt: skip
def test_texts_name_commands_in_the_form_that_was_typed(
    text: str, module: str, console: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name_commands(text) == text
    monkeypatch.chdir(ROOT / "docs")
    assert list_arguments("train/eagle.py") == ["../train/eagle.py"]
    monkeypatch.chdir("/")
    assert list_arguments("train/eagle.py") == [str(ROOT / "train/eagle.py")]
    monkeypatch.setattr("conf.command.forms.PACKAGE", "headsmith.")
    assert name_commands(text) == module
    assert format_error(InputError(text), io.StringIO()) == f"error: {module}"
    assert list_arguments("train/eagle.py") == ["-m", "headsmith.train.eagle"]
    monkeypatch.setenv("HEADSMITH_CONSOLE", "1")
    assert name_commands(text) == console


def test_the_console_script_names_every_command() -> None:
    listed = [script for scripts in JOURNEY.values() for script in scripts]
    entries = {entry.removesuffix(".py") for entry in COMMANDS if not entry.startswith(WORKERS)}
    assert set(listed) == entries | {"scripts/quickstart", "scripts/verify_export"}
    assert len({shorten_script(script) for script in listed}) == len(listed)


def test_the_console_script_starts_a_command_or_lists_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))

    def launch() -> None:
        started.append(sys.argv[1:])
        if "head=gone" in sys.argv:
            raise subprocess.CalledProcessError(2, "python")
        if "head=long" in sys.argv:
            raise subprocess.CalledProcessError(-15, "python")

    handled: list[int] = []
    monkeypatch.setattr("accelerate.commands.launch.main", launch)
    monkeypatch.setattr("signal.signal", lambda number, _: handled.append(number))
    monkeypatch.setattr("conf.command.forms.PACKAGE", "headsmith.")
    monkeypatch.setattr(os, "environ", {**os.environ, "COLUMNS": "100"})

    def type_words(words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["headsmith", *words.split()])
        main()
        return capsys.readouterr().out

    assert type_words("--version") == f"headsmith {version('headsmith')}\n"
    listed = type_words("")
    assert "\n  train medusa    Trains Medusa heads\n" in listed
    assert listed == type_words("--help") == type_words("train") == type_words("train --help")
    assert "HEADSMITH_CONSOLE" not in os.environ
    type_words("train eagle head=hass")
    type_words("contest --help")
    assert os.environ["HEADSMITH_CONSOLE"] == "1"
    with pytest.raises(SystemExit, match=r"^2$"):
        type_words("train eagle head=gone")
    with pytest.raises(SystemExit, match=r"^143$"):
        type_words("train eagle head=long")
    assert handled == [signal.SIGINT] * 3  # before each training
    assert started == [
        ["-m", "headsmith.train.eagle", "head=hass"],
        [sys.executable, "-m", "headsmith.scripts.contest.run", "--help"],
        ["-m", "headsmith.train.eagle", "head=gone"],
        ["-m", "headsmith.train.eagle", "head=long"],
    ]
    for wrong, hint in (
        ("train eagel", "train eagle"), ("quickstrat", "quickstart"), ("train export", ""),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=r"^2$"):
            type_words(wrong)
        said = capsys.readouterr().err
        assert said.startswith(f"error: headsmith {wrong}: no such command; ")
        assert f"; try headsmith {hint}; allowed: quickstart, " in said or not hint
    assert len(started) == 4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package, as an environment's site-packages does."""
    site = tmp_path_factory.mktemp("site")
    write_package(ROOT, site / "headsmith")
    (site / "headsmith-9.8.7.dist-info").mkdir()
    (site / "headsmith-9.8.7.dist-info/METADATA").write_text(
        "Metadata-Version: 2.4\nName: headsmith\nVersion: 9.8.7\n"
    )
    (site / "seen").mkdir()
    names = (*FOLDERS, "tests")
    (site / "sitecustomize.py").write_text(RECORDER % (names, str(site / "seen")))
    return site


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A user's folder, whose modules have the names of a clone's."""
    place = tmp_path / "project"
    for file in ("data.py", "eval.py", "train/__init__.py", "conf/__init__.py"):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(FOREIGN)
    return place


def run(site: Path, place: Path, *words: str, **more: str) -> str:
    """What a command prints; none of its processes has seen a name of a clone."""
    # Without the clone, which the environment of its developers names to Python.
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HEADSMITH_CONSOLE")}
    environ |= {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | more
    done = subprocess.run(
        [sys.executable, *words], cwd=place, env=environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    seen = list((site / "seen").glob("*.json"))
    assert seen
    for file in seen:
        found = json.loads(file.read_text())
        assert not found["modules"], found
        assert not [each for each in found["path"] if Path(each).is_relative_to(site / "headsmith")]
        file.unlink()
    return done.stdout + done.stderr


def test_everything_that_git_knows_is_in_the_package(site: Path) -> None:
    found = {
        path.relative_to(site / "headsmith").as_posix()
        for path in site.rglob("headsmith/**/*")
        if path.is_file()
    }
    assert found == {*list_files(ROOT), "__init__.py", "py.typed"} - {
        "scripts/package/headsmith.py"
    }
    names = "|".join(FOLDERS)
    for path in (site / "headsmith").rglob("*.py"):
        assert not re.search(rf"^\s*(?:from|import) (?:{names})[ .]", path.read_text(), re.M), path


def test_code_has_one_checksum_in_a_clone_and_in_the_package(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [path.relative_to(ROOT) for path in (ROOT / "heads/target_model").glob("*.py")]
    ours = compute_code_checksum(ROOT / file for file in files)
    monkeypatch.setattr("conf.command.run_record.PACKAGE", "headsmith.")
    assert compute_code_checksum(site / "headsmith" / file for file in files) == ours


def test_the_module_of_public_names_imports_torch_when_one_is_used(site: Path, place: Path) -> None:
    code = (
        "import sys, headsmith; assert 'torch' not in sys.modules; print(headsmith.__version__); "
        "from headsmith import training_step; print(training_step.__module__); "
        "assert all(hasattr(headsmith, name) for name in headsmith.__all__)"
    )
    assert run(site, place, "-c", code).split()[-2:] == ["9.8.7", "headsmith.train.api"]


def test_help_of_every_command_is_that_of_the_clone(
    site: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import contextlib, runpy, sys\n"
        "for name in sys.argv.pop().split():\n"
        "    sys.argv[1:] = ['--help']\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        runpy.run_module(name, run_name='__main__', alter_sys=True)\n"
    )
    scripts = [*COMMANDS, "scripts/quickstart.py", "scripts/verify_export.py"]
    names = [script.removesuffix(".py").replace("/", ".") for script in scripts]
    clone = subprocess.run(
        [sys.executable, "-c", code, " ".join(names)], cwd=ROOT, capture_output=True, text=True,
        check=True, env={**os.environ},  # without readline's COLUMNS
    ).stdout  # fmt: skip
    found = run(site, place, "-c", code, " ".join(f"headsmith.{name}" for name in names))
    monkeypatch.setattr("conf.command.forms.PACKAGE", "headsmith.")
    monkeypatch.setattr("conf.command.forms.ROOT", site / "headsmith")
    named = name_commands(clone.replace("make quickstart", "headsmith quickstart"))
    assert found.split() == named.split()
    assert "[out_dir]" in found and "python -m headsmith.scripts.verify_export" in found
    assert found.count("--hydra-help") == len(COMMANDS)


@pytest.mark.slow
def test_a_head_is_trained_measured_exported_and_pushed_beside_foreign_modules(
    site: Path, place: Path
) -> None:
    quick = ["data.max_length=64", "train.batch_size=2", "train.max_steps=2",
             "train.warmup_steps=1",
             "train.num_eval_sequences=2", "train.num_replay_prompts=0"]  # fmt: skip
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_machines=1",
              "--mixed_precision=no", "--dynamo_backend=no"]  # fmt: skip
    two = f"--config_file={site}/headsmith/conf/accelerate/cpu2.yaml"
    medusa = [*launch[:2], two, "-m", "headsmith.train.medusa", "out_dir=medusa", *quick]
    said = run(site, place, *medusa)
    assert "python -m headsmith.eval.acceptance head.path=medusa/head" in said
    eagle = [*launch, "--num_processes=1", "-m", "headsmith.train.eagle", "head=eagle3_1", *quick]
    run(site, place, *eagle, "out_dir=eagle")
    measured = ["head.path=eagle/head", "out_dir=eagle", "data.num_prompts=2", "max_new_tokens=8"]
    said = run(site, place, "-m", "headsmith.eval.acceptance", *measured, HEADSMITH_CONSOLE="1")
    assert "\n  headsmith " in said
    speedup = [*measured, "methods=[eagle_chain]", "num_repeats=1"]
    run(site, place, "-m", "headsmith.eval.speedup", *speedup)
    export = ["head.path=eagle/head", "format=vllm", "out_dir=vllm"]
    run(site, place, "-m", "headsmith.scripts.export", *export)
    assert "python -m headsmith.scripts.verify_export" in (place / "vllm/README.md").read_text()
    run(site, place, "-m", "headsmith.scripts.verify_export", "vllm")
    provenance = json.loads((place / "eagle/head/headsmith.json").read_text())
    assert (provenance["versions"]["headsmith"], provenance["git"]) == ("9.8.7", None)
    with HubServer() as hub:
        push = ["head.path=eagle/head", "repo_id=me/eagle", "base_model=me/target"]
        online = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        online |= {"HF_HUB_DISABLE_XET": "1"}
        run(site, place, "-m", "headsmith.scripts.push", *push, **online)
        assert "config.json" in hub.repos["me/eagle"].commits[-1][1]


def read_dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments, as the format of Dockerfiles has them."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_has_the_oldest_torch_and_transformers_and_then_the_package() -> None:
    found = read_dockerfile()
    assert [word for word, _ in found] == [
        "FROM", "RUN", "RUN", "ENV", "RUN", "COPY", "RUN", "WORKDIR", "CMD",
    ]  # fmt: skip
    installs = [rest.split() for word, rest in found if word == "RUN" and "pip install" in rest]
    floors = dict(
        re.findall(r'"(torch|transformers)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    )
    assert {*installs[0][3:]} == {f"{name}=={floor}.0" for name, floor in floors.items()}
    assert installs[1][3:] == ["/src", "&&", "rm", "-rf", "/src"]
    assert dict(found)["COPY"] == ". /src"
    assert json.loads(dict(found)["CMD"]) == ["headsmith", "--help"]


def test_the_change_log_begins_with_the_version_of_the_package() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    headings = re.findall(r"^## ([\d.]+)(?:, .+)?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == version
    assert headings == sorted(headings, reverse=True)
