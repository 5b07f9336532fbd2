"""Processes and threads of a launch: how they wait, and what they would do to each other."""

import os
import sysconfig
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from conf.errors import InputError

_SIZES = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
_TWO_ON_CPU = (
    "on CPU: accelerate launch --config_file conf/accelerate/cpu2.yaml SCRIPT, or "
    "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no SCRIPT"
)


def check_launch(environ: Mapping[str, str], num_processes: int) -> None:
    """Refuses a launch whose processes do not see each other.

    Args:
        environ: the environment variables.
        num_processes: processes that work together, as accelerate sees them.

    Raises:
        InputError: the launcher started, or was asked for, more processes than that; each
            would work alone and overwrite the others.
    """
    for name, size in _parse_process_counts(environ).items():
        if size > num_processes:
            raise InputError(
                f"{name}={size}: the launcher started so many processes, but only "
                f"{num_processes} of them sees the others: all would write over each other's "
                f"files; type, {_TWO_ON_CPU}"
            )
    # `accelerate launch` sets the master's address for several processes only, and the world
    # size only if it really starts them; with `--cpu --num_processes 2` it starts one.
    launched = "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_PORT" in environ
    if launched and "WORLD_SIZE" not in environ:
        raise InputError(
            "accelerate was asked for several processes and started one, as it does with --cpu "
            f"--num_processes N; for several type, {_TWO_ON_CPU}; for one type --num_processes 1 "
            "and unset MASTER_ADDR and MASTER_PORT"
        )


def check_device_map(device_map: str | None, environ: Mapping[str, str]) -> None:
    """Refuses to spread a target over devices that other processes of the launch use.

    Args:
        device_map: of the target.
        environ: the environment variables.

    Raises:
        InputError: each process would lay a target of its own over the same devices.
    """
    if device_map is None:
        return
    for name, size in _parse_process_counts(environ).items():
        if size > 1:
            raise InputError(
                f"target.device_map={device_map}: each of {size} processes ({name}) would spread "
                "a target of its own over the same GPUs; set target.device_map=null, so that each "
                "has its target on one GPU, or start one process (accelerate launch "
                "--num_processes 1)"
            )


def _parse_process_counts(environ: Mapping[str, str]) -> dict[str, int]:
    """Processes of the launch, by the variable that says so."""
    return {name: int(size) for name in _SIZES if (size := environ.get(name, "")).isdigit()}


def set_passive_wait_policy() -> None:
    """Has waiting threads sleep, unless the environment says otherwise; before torch is imported.

    They would spin for some milliseconds, which other processes, and the very threads that they
    wait for, then lack: products of two threads beside busy ones took four times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


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
