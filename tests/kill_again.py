"""Kills a run again and again at random moments, then lets it finish: `kill_again.py JOB.json`.

The job names an entry script, its overrides and how often to kill. Every attempt is a fork of
this process, which has imported everything, so an attempt costs its own work only. A run that
ends before it is killed is put aside, as `OUT_DIR-1` and so on, and another one begun. Half of
the kills come at a random moment, the others right after a temporary file or folder
appears, which is in the middle of a write.
"""

import importlib
import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

ENTRIES = {"medusa": "train.medusa", "eagle": "train.eagle", "capture": "scripts.capture"}


def attempt(name: str, overrides: list[str], log: Path) -> int:
    """Starts the command in a fork; returns its process id."""
    process = os.fork()
    if process:
        return process
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        module = importlib.import_module(ENTRIES[name])
        sys.argv = [module.__file__, *overrides]
        # Shards of a sequence or two, so that there are many.
        main = partial(module.capture, shard_bytes=4000) if name == "capture" else module.main
        module.COMMAND.run(main)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def writing(out_dir: Path) -> bool:
    """Tells that something is being written."""
    # Folders that vanish meanwhile end no walk.
    names = (name for _, folders, files in os.walk(out_dir) for name in (*folders, *files))
    # A dead owner's lock goes aside at every start, long before anything is written.
    names = (name for name in names if not name.startswith(".lock"))
    return any(name.startswith(".writing-") or name.endswith(".tmp") for name in names)


def wait_for_moment(process: int, out_dir: Path, within_s: float, generator: random.Random) -> bool:
    """Waits for the moment to kill; False if the run ended before."""
    in_a_write = generator.random() < 0.5
    until = time.monotonic() + within_s * (4 if in_a_write else generator.random())
    while time.monotonic() < until:
        if os.waitpid(process, os.WNOHANG)[0]:
            return False
        if in_a_write and writing(out_dir):
            time.sleep(generator.random() * 0.004)
            break
        time.sleep(0.0005)
    return True


def main() -> None:
    """Prints how often the run was killed, how often in a write, and the last exit status."""
    job = json.loads(Path(sys.argv[1]).read_text())
    out_dir, log = Path(job["out_dir"]), Path(job["log"])
    generator = random.Random(job["seed"])
    importlib.import_module(ENTRIES[job["entry"]])
    kills = in_writes = finished = 0
    while kills < job["num_kills"]:
        process = attempt(job["entry"], job["overrides"], log)
        if not wait_for_moment(process, out_dir, job["within_s"], generator):
            finished += 1
            out_dir.rename(out_dir.with_name(f"{out_dir.name}-{finished}"))
            continue
        os.kill(process, signal.SIGSTOP)
        in_writes += writing(out_dir)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        kills += 1
    process = attempt(job["entry"], job["overrides"], log)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(json.dumps({"kills": kills, "in_writes": in_writes, "status": status}))


if __name__ == "__main__":
    main()
