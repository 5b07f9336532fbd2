"""The commands, as their scripts declare them before anything heavy is imported."""

from pathlib import Path
from typing import Any

from conf.command.entry import Command

ROOT = Path(__file__).resolve().parents[1]
WORKERS = (
    "scripts/bench/peer_steps.py",
    "scripts/bench/servers.py",
    "scripts/bench/training.py",
    "scripts/bench/llamacpp_speed.py",
)
"""Scripts that other scripts start, and no user."""
DOOR = 'if __name__ == "__main__":\n    COMMAND.parse_command_line()\n'


def _declared(script: Path) -> "Command[Any]":
    found: dict[str, Any] = {"__file__": str(script), "__name__": script.stem}
    exec(script.read_text().partition(DOOR)[0], found)
    return found["COMMAND"]


COMMANDS = {
    str(script.relative_to(ROOT)): _declared(script)
    for folder in ("train", "eval", "scripts")
    for script in sorted((ROOT / folder).rglob("*.py"))
    if DOOR in script.read_text()
}
