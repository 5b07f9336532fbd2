"""The tests of `emulated/`, in a process of their own that believes in CUDA devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated import guard

HERE = Path(__file__).parent


def library(folder: Path) -> Path:
    """The guard; no compiler for it is a failure where nobody would see a skip."""
    if guard.compiler() is None:
        missing = "no C++ compiler (c++, or what CXX names): nothing ran on the emulated device"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return guard.compiled(folder)


@pytest.mark.parametrize(
    "which",
    [
        pytest.param("not slow", marks=pytest.mark.emulated),
        pytest.param("slow", marks=pytest.mark.slow),
    ],
)
def test_on_an_emulated_device(request: pytest.FixtureRequest, which: str) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has a CUDA device of its own")
    assert request.config.cache is not None
    built = library(request.config.cache.mkdir("emulated"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    found = subprocess.run(
        [*command, "-m", which, *sorted(map(str, HERE.glob("emulated/test_*.py")))],
        env={**os.environ, guard.VARIABLE: str(built)},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        pytest.fail(found.stdout + found.stderr, pytrace=False)
