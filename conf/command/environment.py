"""What this machine and its launcher offer a command: processes, threads, compilers.

Processes of a launch must see each other, and waiting threads must sleep. torch.compile needs
compilers with which torch does not come: on a CPU its kernels are C++; on CUDA they are Triton's,
whose launchers are compiled as C. Both need Python.h, which many images of a cluster lack.
"""

import os
import sys
import sysconfig
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from conf.command.forms import PACKAGE
from conf.errors import InputError
from conf.settings.checks import AUTO

_SIZES = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
"""Variables of launchers with the number of processes on this machine."""
_COMMAND = "-m MODULE" if PACKAGE else "SCRIPT"
_TWO_ON_CPU = (
    f"on CPU: accelerate launch --config_file conf/accelerate/cpu2.yaml {_COMMAND}, or "
    "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 "
    f"--mixed_precision no --dynamo_backend no {_COMMAND}"
)


def set_passive_wait_policy() -> None:
    """Make waiting threads sleep, unless the environment says otherwise. Call before torch loads.

    Otherwise waiting threads spin for some milliseconds. Other processes, and the threads that are
    waited for, then lack these cores: matrix products of two threads beside busy ones took four
    times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def hide_loading_bars() -> None:
    """Keep transformers' bars out of logs, unless the environment says otherwise.

    Call before transformers loads. Downloads from the Hub draw none there anyway.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def count_threads(asked: int | str, environ: Mapping[str, str]) -> int | None:
    """Count the processor threads of this process; None leaves those that torch takes.

    `accelerate launch` and torchrun set OMP_NUM_THREADS=1 unless it is set, so a 1 below them is
    taken for theirs.

    Args:
        asked: setting `num_threads`.
        environ: the environment variables.

    Raises:
        InputError: neither a number above 0 nor `auto`.
    """
    if asked != AUTO:
        if isinstance(asked, str) or asked < 1:
            raise InputError(f"num_threads={asked}: must be a number above 0, or {AUTO}")
        return asked
    sizes = [int(environ[name]) for name in _LOCAL_SIZES if environ.get(name, "").isdigit()]
    launched = bool(sizes) or "ACCELERATE_MIXED_PRECISION" in environ
    if not launched or environ.get("OMP_NUM_THREADS", "1") != "1":
        return None
    return max(1, count_cores() // max([1, *sizes]))


def count_cores() -> int:
    """Count the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def set_num_threads(number: int | None) -> None:
    """Set the threads of torch in this process, and of the processes that it starts.

    None leaves both as they are.
    """
    if number is not None:
        import torch  # loaded already by the commands that compute

        torch.set_num_threads(number)
        os.environ["OMP_NUM_THREADS"] = str(number)


def check_launch(environ: Mapping[str, str], num_processes: int) -> None:
    """Refuse a launch whose processes do not see each other.

    Args:
        environ: the environment variables.
        num_processes: number of processes that work together, as accelerate sees them.

    Raises:
        InputError: the launcher started, or was asked for, more processes than `num_processes`.
            Each would work alone and overwrite the files of the others.
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
    """Refuse to spread a target over devices that other processes of the launch use.

    Args:
        device_map: `target.device_map`; None spreads nothing.
        environ: the environment variables.

    Raises:
        InputError: each process would spread a target of its own over the same devices.
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
    """Parse the number of processes of a launch, by the variable that gives it."""
    return {name: int(size) for name in _SIZES if (size := environ.get(name, "")).isdigit()}


def check_compile(setting: str, asked: bool | None, device_type: str) -> None:
    """Refuse a setting that asks for torch.compile where torch.compile cannot work.

    Args:
        setting: name of the setting that asks for compiling.
        asked: value of the setting.
        device_type: `cuda` or `cpu`.

    Raises:
        InputError: the message names what is missing.
    """
    if asked and (missing := find_missing_toolchain(device_type)):
        raise InputError(
            f"{setting}=true: torch.compile lacks {missing}; get it, or type {setting}=false"
        )


def find_missing_toolchain(device_type: str) -> str:
    """Find what torch.compile lacks on this machine, and how to get it; empty if nothing.

    Source: `triton/runtime/build.py` and `torch/_inductor/cpp_builder.py`, which look in the same
    places.

    Args:
        device_type: `cuda` or `cpu`.
    """
    lacking = [_describe_missing_toolchain(device_type), _describe_missing_header()]
    if device_type == "cuda" and find_spec("triton") is None:
        lacking.append("Triton (pip install triton)")
    return ", ".join(filter(None, lacking))


def _describe_missing_toolchain(device_type: str) -> str:
    """Find the compiler that torch.compile lacks; return an empty text if there is one.

    If CXX (on CUDA: CC) is set, only the compiler that it names is looked for.
    """
    on_cpu = device_type == "cpu"
    variable, language = ("CXX", "C++") if on_cpu else ("CC", "C")
    names = ["g++"] if on_cpu else ["gcc", "clang"]
    named = os.environ.get(variable)
    if any(map(which, names if named is None else [named])):
        return ""
    reason = f"{' or '.join(names)} on PATH, or what {variable} names"
    if named is not None:
        reason = f"{variable}={named} is no program"
    return f"a {language} compiler ({reason}; e.g. apt-get install {names[0]})"


def _describe_missing_header() -> str:
    """Find whether Python.h is missing; return an empty text if it is there."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder that it leaves empty.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    include = sysconfig.get_paths(scheme)["include"]
    searched = (os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH"))
    folders = [include, *(path for paths in searched for path in paths.split(os.pathsep) if path)]
    if any((Path(folder) / "Python.h").is_file() for folder in folders):
        return ""
    return f"Python.h (in {include}; e.g. apt-get install python3-dev)"


def hide_hints() -> None:
    """Hide two warnings of torch.compile that users cannot act on and that break progress bars."""
    for hint in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):
        warnings.filterwarnings("ignore", hint, UserWarning)
