"""The compilers that torch.compile needs, with which torch does not come.

On a CPU its kernels are C++; on CUDA they are Triton's, which compiles in C what launches them.
Both go through Python.h, which many images of a cluster lack.
"""

import os
import sysconfig
import warnings
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from conf.errors import InputError


def find_missing_toolchain(device_type: str) -> str:
    """Name what torch.compile lacks on this machine for `cuda` or `cpu`, and how to get it.

    Source: `triton/runtime/build.py` and `torch/_inductor/cpp_builder.py`, which look where this
    does.
    """
    lacking = [_describe_missing_toolchain(device_type), _describe_missing_header()]
    if device_type == "cuda" and find_spec("triton") is None:
        lacking.append("Triton (pip install triton)")
    return ", ".join(filter(None, lacking))


def check_compile(setting: str, asked: bool | None, device_type: str) -> None:
    """Refuses to compile where that cannot be done.

    Args:
        setting: that asks for it.
        asked: its value.
        device_type: `cuda` or `cpu`.

    Raises:
        InputError: what is missing.
    """
    if asked and (what := find_missing_toolchain(device_type)):
        raise InputError(
            f"{setting}=true: torch.compile lacks {what}; get it, or type {setting}=false"
        )


def hide_hints() -> None:
    """Hide two warnings of torch.compile, which nobody can heed and which break progress bars."""
    for hint in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):
        warnings.filterwarnings("ignore", hint, UserWarning)


def _describe_missing_toolchain(device_type: str) -> str:
    """The compiler that is missing, or nothing; one that the environment names counts alone."""
    on_cpu = device_type == "cpu"
    variable, language = ("CXX", "C++") if on_cpu else ("CC", "C")
    names = ["g++"] if on_cpu else ["gcc", "clang"]
    named = os.environ.get(variable)
    if any(map(which, names if named is None else [named])):
        return ""
    where = f"{' or '.join(names)} on PATH, or what {variable} names"
    if named is not None:
        where = f"{variable}={named} is no program"
    return f"a {language} compiler ({where}; e.g. apt-get install {names[0]})"


def _describe_missing_header() -> str:
    """The header that is missing, or nothing."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder that it leaves empty.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    include = sysconfig.get_paths(scheme)["include"]
    searched = (os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH"))
    folders = [include, *(path for paths in searched for path in paths.split(os.pathsep) if path)]
    if any((Path(folder) / "Python.h").is_file() for folder in folders):
        return ""
    return f"Python.h (in {include}; e.g. apt-get install python3-dev)"
