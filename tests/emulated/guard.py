"""Builds `guard.cpp`, which has PyTorch believe in a CUDA device that it does not have.

A process to which `VARIABLE` names it loads it here, before torch.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
VARIABLE = "HEADSMITH_EMULATED_GUARD"
if VARIABLE in os.environ:
    ctypes.CDLL(os.environ[VARIABLE])


def is_loaded() -> bool:
    return VARIABLE in os.environ


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def compiled(folder: Path) -> Path:
    """The guard as a library that finds torch's by itself; made once for a version of torch.

    Args:
        folder: keeps it.
    """
    found, spec = compiler(), find_spec("torch")
    assert found is not None
    assert spec is not None
    assert spec.origin is not None
    key = SOURCE.read_bytes() + version("torch").encode() + spec.origin.encode()
    library = folder / f"guard-{hashlib.sha256(key).hexdigest()[:16]}.so"
    if not library.exists():
        root = Path(spec.origin).parent
        new = library.with_suffix(f".{os.getpid()}")
        paths = ["-I", root / "include", "-L", root / "lib", f"-Wl,-rpath,{root / 'lib'}"]
        command = [found, "-std=c++20", "-O0", "-fPIC", "-shared", SOURCE, "-o", new, *paths]
        subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True)
        new.replace(library)
    return library
