import copy
import re
import shlex
import sys
from dataclasses import is_dataclass
from enum import EnumMeta
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from doors import COMMANDS as OF_DOORS
from doors import WORKERS
from hydra.core.override_parser.overrides_parser import OverridesParser
from mutants import TESTS
from omegaconf import DictConfig, OmegaConf

from data.rows.messages import CUT_OFF, END_REASONS, LEARNT, LEARNT_RANGES, REASONING, ROLES
from data.rows.records import (
    ANSWERS,
    CATEGORIES,
    CONTEXTS,
    FORMS,
    GOOD,
    MASKS,
    MEANT,
    PROMPTS,
    REPLIES,
    SYSTEM_TEXTS,
    TEMPLATE_KWARGS,
    TOOLS,
)
from data.servers.hidden_states import ServerFeatureLayers
from eval.preflight_checks import list_methods
from eval.serving.load_curve import CHECKS, PAIR_CHECKS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("conf", "data", "eval", "heads", "scripts", "train")
DOCS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
ROOMS = ("data/servers", "eval/serving", "heads/blocks", "heads/mtp", "heads/target_model")
OF_FOLDERS = [f"{folder}/README.md" for folder in (*FOLDERS, *ROOMS)]
MEASURE = "eval/measure/README.md"
SERVED = "docs/results/serving.md"
RESULTS = [page for page in DOCS if re.fullmatch(r"docs/results/[a-z]+\.md", page)]
LIMITS = {
    "README.md": (175, 1500),
    **dict.fromkeys([*OF_FOLDERS, MEASURE], (120, 700)),
    **dict.fromkeys(DOCS, (200, 700)),
}
"""Lines and words of a page at most: a folder's is read in one or two screens."""
PAGES = {name: (ROOT / name).read_text() for name in (*LIMITS, "CONTRIBUTING.md")}
DOORS = {path: command for path, command in OF_DOORS.items() if not path.startswith(WORKERS)}
# Without Hydra: they have tests of their own.
PLAIN = {
    "scripts/verify_export.py", "scripts/embedded/make.py", "tests/emulated/predict_gpu.py",
    "scripts/bench/cpu.py", "scripts/bench/measure.py",
}  # fmt: skip
# What has no default.
REQUIRED = {
    "scripts/push.py": ["repo_id=me/head"],
    "eval/serve.py": ["endpoint=http://localhost:8000"],
    "scripts/export.py": ["format=vllm"],
    "scripts/contest/run.py": ["tokens=4096"],
    "scripts/relay.py": ["folder=/dev/shm/layers-2-18-33-36"],
}
PYTHON = "docs/python.md"
"""Its words are names of Python, which tests/test_python_page.py looks up."""
# A setting of ModelOpt.
FOREIGN = {"eagle_export_rope_scaling"}
# Words in code that are neither a setting, a value of one, nor a method: figures that commands
# write, fields of rows, tensors and keys of published heads.
NAMES = """
    kept tau alpha per_position by_category tokens_per_s speedup decode_speedup efficiency lossless
    captured captures truncated_turns
    target_attention target_state_bytes baseline baselines prompts by_mode by_input_length histogram
    conditions
    draft_seconds from value role content tool_calls save_to_disk null
    output_hidden_states size_n first_token smollm2
    num_speculative_tokens_per_batch_size headsmith
"""


def spans(text: str) -> list[str]:
    """The spans of code: lines of plain blocks, and text between backticks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    return [line for kind, block in blocks if not kind for line in block.splitlines()] + inline


def in_code(pattern: str) -> list[tuple[str, str]]:
    """Page and span of every span of a page that fits the pattern as a whole."""
    return [(page, span) for page in LIMITS for span in SPANS[page] if re.fullmatch(pattern, span)]


def keys(schema: Any, prefix: str = "") -> set[str]:
    """The settings and groups of settings of a command."""
    found = set()
    for name, kind in get_type_hints(schema).items():
        found |= {prefix + name}
        if is_dataclass(kind):
            found |= keys(kind, f"{prefix}{name}.")
    return found


@cache
def composed(name: str, *recipe: str) -> DictConfig:
    """The settings of a command as nobody has changed them, which takes Hydra a while."""
    return DOORS[name].compose_settings([*recipe])


def composes(name: str, overrides: list[str]) -> None:
    """Raises where the command refuses these settings."""
    changes = OverridesParser.create().parse_overrides(overrides)
    recipe = [each.input_line for each in changes if each.key_or_group == "head"]
    settings = copy.deepcopy(composed(name, *recipe))
    for each in changes:
        if each.key_or_group != "head":
            OmegaConf.update(settings, each.key_or_group, each.value())
    OmegaConf.to_object(settings)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


SPANS = {page: spans(text) for page, text in PAGES.items()}
KEYS = {name: keys(command.schema) for name, command in DOORS.items()}
SETTINGS = set().union(*KEYS.values())
SCHEMAS = [module for name, module in sys.modules.items() if name.startswith("conf.settings.")]
ENUMS = [kind for module in SCHEMAS for kind in vars(module).values() if isinstance(kind, EnumMeta)]
VALUES = {value.value for kind in ENUMS for value in kind}
RECIPES = {file.stem for file in (ROOT / "conf/head").glob("*.yaml")}
COMMAND = re.compile(r"(?:python|accelerate launch\b.*?|sbatch\b.*?) +(\S+/\w+\.py)(.*)")
COMMANDS = [found.groups() for _, span in in_code(".*") if (found := COMMAND.fullmatch(span))]
COMPOSED = [command for command in COMMANDS if command[0] not in PLAIN]
GIVEN = sorted({span for _, span in in_code(r"([\w.]+=\S*\s*)+")})


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page: str) -> None:
    lines, words = LIMITS.get(page, (120, 700))
    assert len(PAGES[page].splitlines()) <= lines
    assert len(re.findall(r"[^\s|]+", PAGES[page])) <= words


@pytest.mark.parametrize(("name", "rest"), COMPOSED, ids=map("".join, COMPOSED))
def test_every_command_composes(name: str, rest: str) -> None:
    words = shlex.split(rest, comments=True)
    overrides = [word for word in words if "=" in word]
    named = words[words.index("--help") + 1 :] if "--help" in words else []  # what help is of
    assert {*words} - {*overrides, *named} <= {"--help", "--multirun"}
    if "--multirun" in words:
        overrides = [word.split(",")[0] for word in overrides]
    composes(name, overrides)


def test_every_command_is_shown() -> None:
    assert {name for name, _ in COMMANDS} == {*DOORS, *PLAIN}


def test_every_script_is_named() -> None:
    named = {span.split("/")[-1] for _, span in in_code(r"[\w/]+/\w+\.py")}
    named |= {name.split("/")[-1] for name, _ in COMMANDS}
    named |= {"quickstart.py", "demo.py"}  # make quickstart, make demo
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            worker = str(file.relative_to(ROOT)).startswith(WORKERS)
            if '__name__ == "__main__"' in file.read_text() and not worker:
                assert file.name in named, f"{file} is on no page"


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
            assert anchor in map(slug, headings), link


def linked(page: str) -> set[str]:
    """The pages that a page links to."""
    links = re.findall(r"\]\(([^)\s#]+\.md)", PAGES[page])
    found = ((ROOT / page).parent.joinpath(link).resolve() for link in links if "//" not in link)
    return {str(file.relative_to(ROOT)) for file in found} & {*PAGES}


def test_every_page_is_reached_from_the_first() -> None:
    assert linked("README.md").issuperset(f"{folder}/README.md" for folder in FOLDERS)
    reached, new = {"README.md"}, ["README.md"]
    while new:
        further = linked(new.pop()) - reached
        reached |= further
        new += further
    assert reached == {*PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    top = "|".join((*FOLDERS, "docs", "tests"))
    for path in re.findall(rf"(?<![\w./-])(?:{top})/[\w./]*\b/?", PAGES[page]):
        assert (ROOT / path).exists(), path


def test_rooms_and_files_beside_a_page_exist() -> None:
    named = in_code(r"\w+/|\w+\.(py|yaml|slurm)")
    assert ("heads/blocks/README.md", "dspark.py") in named
    for page, path in named:
        if path.startswith("golden"):
            continue  # a command writes these
        assert (ROOT / page).parent.joinpath(path).exists(), f"{page}: {path}"


@pytest.mark.parametrize("page", DOCS)
def test_errors_that_a_page_shows_are_in_the_code(page: str) -> None:
    """Most of three plain words in a row; a value between may be a plain word as well."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    code = re.sub(r'"\s*f?"', "", " ".join(file.read_text() for file in files))  # joins the lines
    for message in re.findall(r"^```text\nerror: (.*?)^```", PAGES[page], re.M | re.S):
        words = message.split()
        runs = zip(words, words[1:], words[2:], strict=False)
        plain = [" ".join(run) for run in runs if re.fullmatch("[a-z]+", "".join(run))]
        assert sum(run in code for run in plain) >= 0.7 * len(plain), message


def test_files_of_the_mutants_exist() -> None:
    for file, tests in TESTS.items():
        for path in (file, *(f"tests/{name}.py" for name in tests.split())):
            assert (ROOT / path).exists(), path


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    code = "\n".join(span for page in PAGES for span in SPANS[page])
    targets = set(re.findall(r"^make ([a-z][a-z-]*)", code, re.M))
    assert "quickstart" in targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_settings_named_in_code_exist() -> None:
    groups = "|".join({key.split(".")[0] for key in SETTINGS if "." in key})
    named = in_code(rf"(?:{groups})\.[\w.]+")
    assert ("train/README.md", "train.dtype") in named
    for page, word in named:
        assert word in SETTINGS, f"{page}: {word}"


@pytest.mark.parametrize("span", GIVEN)
def test_values_named_in_code_are_allowed(span: str) -> None:
    """By some command that has all of the settings."""
    given = dict(word.split("=", maxsplit=1) for word in span.split())
    assert given.pop("head", "eagle3") in RECIPES
    given = {key: value for key, value in given.items() if not key.isupper() and key not in FOREIGN}
    commands = [name for name in DOORS if given.keys() <= KEYS[name]]
    assert commands
    words = [f"{key}={value}" for key, value in given.items() if value]
    refused = []
    for name in commands if words else []:
        try:
            composes(name, [*words, *REQUIRED.get(name, [])])
            break
        except ValueError as error:
            refused.append(f"{name}: {error}")
    else:
        assert not refused


def test_words_in_code_are_known() -> None:
    words = [
        each for each in in_code(r"[a-z][a-z0-9_]*") if each[0] not in (PYTHON, MEASURE, SERVED)
    ]
    known = VALUES | RECIPES | {*list_methods()} | {key.rsplit(".")[-1] for key in SETTINGS}
    known |= {name for keys, _ in FORMS.values() for name in keys}
    known |= {*PROMPTS, *REPLIES, *MASKS, *CATEGORIES, "labels"}
    known |= {*ROLES, *REASONING, *LEARNT, *TOOLS, *SYSTEM_TEXTS, *TEMPLATE_KWARGS}
    known |= {
        *CHECKS,
        *PAIR_CHECKS,
        *CONTEXTS,
        *GOOD,
        *LEARNT_RANGES,
        *ANSWERS,
        *END_REASONS,
        *CUT_OFF,
    }
    known |= {word for _, word in words if MEANT.fullmatch(word)}
    for page, word in words:
        assert word in known.union(NAMES.split()), f"{page}: {word}"
    assert {word for _, word in words}.issuperset(NAMES.split())


@pytest.mark.parametrize("page", RESULTS)
def test_every_figure_says_where_it_comes_from(page: str) -> None:
    for section in PAGES[page].split("\n## ")[1:]:
        about = " ".join(section.split())
        recorded = re.search(r"Recorded 20\d\d-\d\d-\d\d at [0-9a-f]{7}", about)
        assert recorded, f"{page}: {about[:60]}: no day and commit"
        machine = re.search("machine|processor|core|computed|counted on", about)
        assert machine, f"{page}: {about[:60]}: no machine"
        assert "Since:" in about, f"{page}: {about[:60]}: nothing said of later changes"
        assert "```" in section or "Command" in section, f"{page}: {about[:60]}: no command"


def test_the_settings_of_tables_exist() -> None:
    for page in LIMITS:
        for table in re.findall(r"^\|.*\|\n\|[-|]+\|\n(?:\|.*\n)+", PAGES[page], re.M):
            head, _, *rows = ([*row.split("|")] for row in table.splitlines())
            for column in (i for i, cell in enumerate(head) if cell.startswith(" setting")):
                for word in re.findall(r"`([^`]+)`", " ".join(row[column] for row in rows)):
                    assert word.partition("=")[0].removesuffix(".*") in SETTINGS, f"{page}: {word}"


def test_vllm_is_started_to_write_what_capture_reads() -> None:
    (command,) = (span for _, span in in_code("vllm serve .*") if "extract_hidden_states" in span)
    taps = ServerFeatureLayers(
        (2, 18, 33), num_layers=36, hidden_size=4096, final_norm=lambda states: states
    )
    words = shlex.split(command)
    assert words[words.index("--speculative-config") :] == taps.serve_options("/dev/shm")
