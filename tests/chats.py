"""Conversations that the tests of regeneration write and read."""

import json
from pathlib import Path


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(path: Path, num_rows: int = 12) -> Path:
    """Every third conversation has two turns and a system message."""
    rows = []
    for n in range(num_rows):
        messages = [user(f"question {n}"), assistant("old")]
        if n % 3 == 0:
            system = {"role": "system", "content": "be brief"}
            messages = [system, *messages, user("and then?"), assistant("old too")]
        rows.append({"messages": messages, "category": f"c{n % 2}"})
    return write_rows(path, rows)


def rows_in(out_dir: Path) -> list[dict]:
    lines = (out_dir / "conversations.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
