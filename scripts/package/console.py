"""The console script `headsmith`: lists the commands in the order of a head's life, and runs one.

`headsmith export head.path=... format=vllm` is `python -m headsmith.scripts.export ...`, and
`headsmith train eagle ...` is `accelerate launch -m headsmith.train.eagle ...`.
"""

import ast
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.metadata import version

from conf.command.forms import CONSOLE_VARIABLE, ROOT, list_arguments, name_commands, shorten_script

JOURNEY = {
    "try it on the embedded default": ("scripts/quickstart",),
    "prepare data": ("scripts/regenerate", "scripts/capture", "scripts/relay", "scripts/show_mask"),
    "train a head": (
        "train/eagle", "train/medusa", "train/peagle", "train/dflash", "train/dflash2",
        "train/dspark", "train/mtp", "train/medusa2", "scripts/contest/run",
    ),
    "measure": ("eval/acceptance", "eval/speedup", "eval/tree_search", "scripts/compare"),
    "serve and publish": (
        "scripts/export", "scripts/verify_export", "eval/serve", "scripts/push",
    ),
    "change heads and targets": (
        "scripts/repair", "scripts/prune", "scripts/mtp", "scripts/merge_adapter",
        "scripts/zoo/check",
    ),
}  # fmt: skip
"""Scripts, without their ending, by what a user wants."""
HELP = {"--help", "-h"}


def main() -> None:
    """Run the command that the command line names; list all commands if it names none."""
    words = sys.argv[1:]
    if words in (["--version"], ["-V"]):
        print(f"headsmith {version('headsmith')}")
        return
    if not words or words[0] in HELP or (words[0] == "train" and {*words[1:]} <= HELP):
        print("\n".join(iter_lines()))
        return
    scripts = {shorten_script(script): script for names in JOURNEY.values() for script in names}
    length = 2 if words[0] == "train" else 1
    name = " ".join(words[:length])
    if name not in scripts:
        meant = get_close_matches(name, scripts, n=1)
        hint = f"try headsmith {meant[0]}; " if meant else ""
        print(
            f"error: headsmith {name}: no such command; {hint}allowed: {', '.join(scripts)}",
            file=sys.stderr,
        )
        sys.exit(2)
    arguments = [*list_arguments(f"{scripts[name]}.py"), *words[length:]]
    os.environ[CONSOLE_VARIABLE] = "1"
    if length == 2:
        launch_training(arguments)
    else:
        os.execv(sys.executable, [sys.executable, *arguments])


def launch_training(arguments: list[str]) -> None:
    """Run a training as `accelerate launch` does; exit with its code if it fails.

    accelerate's own command prints a traceback of itself below the error of a training. At Ctrl-C
    it ends before the training has saved, which this one waits for.
    """
    from accelerate.commands import launch

    sys.argv[1:] = arguments
    signal.signal(signal.SIGINT, lambda *_: None)  # the training has its own handler
    try:
        launch.main()
    except subprocess.CalledProcessError as error:
        code = error.returncode
        sys.exit(code if code >= 0 else 128 - code)


def iter_lines() -> Iterator[str]:
    """Yield the lines of the list of commands."""
    width = shutil.get_terminal_size((100, 24)).columns
    yield "headsmith COMMAND [SETTING=VALUE ...]; headsmith COMMAND --help lists the settings"
    for title, scripts in JOURNEY.items():
        yield f"\n{title}"
        for script in scripts:
            text = (ROOT / f"{script}.py").read_text(encoding="utf-8")
            summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            summary = name_commands(summary).partition(": `")[0].rstrip(".")
            yield f"  {shorten_script(script):15} {summary}"[:width]
