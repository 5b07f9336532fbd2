"""The tests of `emulated/`, in a process of their own that believes in CUDA devices."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SOURCE = HERE / "emulated/guard.cpp"


def compiler() -> str:
    """Of C++; its absence is a failure where nobody would see a skip."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        missing = "no C++ compiler (c++, or what CXX names): nothing ran on the emulated device"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def compiled(folder: Path) -> Path:
    """The guard as a library that finds torch's by itself; made once for a version of torch."""
    found = compiler()
    key = SOURCE.read_bytes() + torch.__version__.encode() + torch.__file__.encode()
    library = folder / f"guard-{hashlib.sha256(key).hexdigest()[:16]}.so"
    if not library.exists():
        root = Path(torch.__file__).parent
        new = library.with_suffix(f".{os.getpid()}")
        paths = ["-I", root / "include", "-L", root / "lib", f"-Wl,-rpath,{root / 'lib'}"]
        command = [found, "-std=c++20", "-O0", "-fPIC", "-shared", SOURCE, "-o", new, *paths]
        subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True)
        new.replace(library)
    return library


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
    library = compiled(request.config.cache.mkdir("emulated"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, "-m", which, *sorted(map(str, HERE.glob("emulated/test_*.py")))],
        env={**os.environ, "HEADSMITH_EMULATED_GUARD": str(library)},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        pytest.fail(found.stdout + found.stderr, pytrace=False)
