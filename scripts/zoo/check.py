"""Which architectures of transformers are served: makes each tiny, and asks everything of it.

`python scripts/zoo/check.py [model_types=[llama,qwen3_next]]` makes a random target of every
model type, holds decoding to `generate`, trains heads and replays them, and writes the table
`targets.md` and `targets.json`. A second start goes on; who is to be checked again loses its
file in `out_dir/found`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.entry import Command
from conf.settings.scripts import TargetsRun

COMMAND = Command(__doc__, TargetsRun, "check")
if __name__ == "__main__":
    COMMAND.begin()

import json
import multiprocessing
import os
import traceback
import warnings
from typing import Any

import torch
import transformers
from tqdm import tqdm

from conf.errors import InputError
from conf.files import write_whole
from scripts.zoo.checks import check_target
from scripts.zoo.families import NO_TARGET
from scripts.zoo.report import counts, result, table
from scripts.zoo.tiny import MADE, model_types, tiny_target

PROCESSES = multiprocessing.get_context("forkserver")


def main(config: TargetsRun) -> None:
    """Prints how many work; writes `targets.md` and `targets.json`."""
    names = chosen(config.model_types)
    out_dir = Path(config.out_dir)
    try:
        (out_dir / "found").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out_dir={out_dir}: cannot write there: {error}") from error
    left = [n for n in names if n not in NO_TARGET and not found_at(out_dir, n).is_file()]
    if left:
        PROCESSES.set_forkserver_preload(["scripts.zoo.checks"])
    with tqdm(left, unit="model type") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            check_apart(out_dir, name, config.timeout)
    rows = {n: json.loads(found_at(out_dir, n).read_text()) for n in names if n not in NO_TARGET}
    left_out = {name: NO_TARGET[name] for name in names if name in NO_TARGET}
    write_whole(out_dir / "targets.json", json.dumps(result(rows, left_out), indent=1) + "\n")
    write_whole(out_dir / "targets.md", table(rows, left_out))
    print(counts(rows))
    print(f"wrote {out_dir / 'targets.md'} and {out_dir / 'targets.json'}")


def chosen(names: list[str]) -> list[str]:
    """The model types to check.

    Raises:
        InputError: transformers has no such causal or image-text-to-text model.
    """
    known = model_types()
    for name in names:
        if name not in known:
            raise InputError(f"model_types: {name} is none of transformers; allowed: {known}")
    return names or known


def found_at(out_dir: Path, name: str) -> Path:
    """Where the result of one model type lies."""
    return out_dir / "found" / f"{name}.json"


def check_apart(out_dir: Path, name: str, timeout: float) -> None:
    """Checks one in a process of its own, which may crash or hang."""
    log = out_dir / "found" / f"{name}.log"
    process = PROCESSES.Process(target=check_one, args=(name, out_dir, log))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        _write_failure(out_dir, name, f"took more than {timeout:g} s")
    elif not found_at(out_dir, name).is_file():
        _write_failure(out_dir, name, f"its process ended with code {process.exitcode}")
    else:
        log.unlink(missing_ok=True)


def _write_failure(out_dir: Path, name: str, why: str) -> None:
    found = {"state": "fails", "columns": {"loads": f"FAILED: {why}"}}
    write_whole(found_at(out_dir, name), json.dumps(found, indent=1) + "\n")


def check_one(name: str, out_dir: Path, log: Path) -> None:
    """In a process of its own: makes a target, checks it, writes what was found."""
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # matrices this small take longer with more
    try:
        folder = tiny_target(name, out_dir / "made")
    except Exception as error:  # noqa: BLE001 whatever transformers says of it
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        found: dict[str, Any] = {
            "state": "not made",
            "why": why,
            "traceback": traceback.format_exc(),
        }
    else:
        found = {**check_target(folder), "made": json.loads((folder / MADE).read_text())}
    write_whole(found_at(out_dir, name), json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    COMMAND.run(main)
