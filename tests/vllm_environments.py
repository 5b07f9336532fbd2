"""Environments whose vLLM is a server of a few lines, started as vLLM's own."""

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ARGUMENTS = sys.argv[1:]
SETTINGS = dict(zip(ARGUMENTS[::2], ARGUMENTS[1::2]))
if SETTINGS["--model"].startswith("bad"):
    print(*(f"line {number}" for number in range(19)), "no such model: " + SETTINGS["--model"],
          "then ValueError: another" if ":" in SETTINGS["--model"] else "", sep="\\n", end="")
    sys.exit(3)
ANSWERS = json.loads(Path(__file__).with_name("answers.json").read_text())
MODEL = {"id": " ".join(ARGUMENTS), "owned_by": "vllm", "pid": os.getpid()}
MODEL["cache_gib"] = os.environ["VLLM_CPU_KVCACHE_SPACE"]


class Handler(BaseHTTPRequestHandler):
    def reply(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self):
        self.reply({"data": [MODEL]} if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = ANSWERS[json.dumps(body["prompt"])][: body["max_tokens"]]
        reason = "stop" if ids[-1] == 2 else "length"
        assert (body["return_token_ids"], body["top_p"], body["top_k"]) == (True, 1.0, 0)
        self.reply({"choices": [{"token_ids": ids, "finish_reason": reason}]})

    def log_message(self, *_):
        pass


print("serving", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(SETTINGS["--port"])), Handler).serve_forever()
"""


def make_environment(
    folder: Path, answers: Mapping[tuple[int, ...], list[int]] | None = None
) -> Path:
    """An environment with such a vLLM.

    Args:
        folder: made.
        answers: token ids behind each prompt.
    """
    place = folder / "packages/vllm/entrypoints/openai"
    place.mkdir(parents=True)
    (place / "api_server.py").write_text(SERVER)
    known = {json.dumps([*prompt]): ids for prompt, ids in (answers or {}).items()}
    (place / "answers.json").write_text(json.dumps(known))
    for package in (place, place.parent, place.parent.parent):
        (package / "__init__.py").touch()
    (folder / "bin").mkdir()
    python = folder / "bin/python"
    command = f"PYTHONPATH={shlex.quote(str(folder / 'packages'))} exec {sys.executable}"
    python.write_text(f'#!/bin/sh\n{command} "$@"\n')
    python.chmod(0o755)
    return folder
