"""Serves hidden states that a vLLM server wrote to trainers that cannot see its folder.

    export HEADSMITH_RELAY_TOKEN=$(openssl rand -hex 32)      # the same where trainers run
    python scripts/relay.py folder=/dev/shm/layers-2-18-33-36 host=10.0.0.5

Runs beside the server, on the node of its first process; then set
`target.relay=[http://10.0.0.5:8100]` for trainers. It answers `GET` and `DELETE` of a file's base
name, and `GET /health`.
"""

import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.errors import InputError
from conf.settings.scripts import RelayRun


def check_relay(config: RelayRun) -> None:
    """Refuse to answer other machines without a token.

    Raises:
        InputError: the variable is unset, or its value cannot be sent.
    """
    from data.servers.http_client import RELAY_TOKEN_VARIABLE, find_relay_token

    is_local = config.host == "localhost"
    with suppress(ValueError):
        is_local = ip_address(config.host).is_loopback
    if find_relay_token() is None and not is_local:
        raise InputError(
            f"host={config.host}: other machines can reach it, so a token is needed; run export "
            f"{RELAY_TOKEN_VARIABLE}=$(openssl rand -hex 32) here, and set the same value where "
            "trainers run"
        )


COMMAND = Command(__doc__, RelayRun, "relay", check=check_relay)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import hmac
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from conf.files import make_folder
from data.servers.http_client import RELAY_TOKEN_VARIABLE, find_relay_token
from data.servers.state_files import (
    HiddenStatesError,
    delete_old_files,
    delete_states_file,
    make_lock_path,
    wait_until_whole,
)

NAME = re.compile(r"/(\w[\w.-]{0,200}\.safetensors)", re.ASCII)
"""Path of a request for a file: no folder, no hidden file."""
WAIT_S = 600.0
"""Longest time for writing a file."""
IDLE_S = 120.0
"""Idle time after which a connection is closed."""
SWEEPS = 10
"""Number of sweeps in the age at which files are deleted."""


class RelayServer(ThreadingHTTPServer):
    """Serve the files of a folder, and delete old ones; a context manager.

    Attributes:
        folder: folder that the vLLM server writes to.
        url: address for `target.relay`.
        key: `Authorization` header that requests must have; None for any.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, config: RelayRun, key: str | None) -> None:
        """Open the port, without answering yet.

        Args:
            config: settings; port 0 takes a free port.
            key: token that requests must have; None for none.

        Raises:
            InputError: the folder cannot be created, or the address is not available.
        """
        self.folder, self.max_age_s = Path(config.folder).expanduser(), config.max_age_s
        self.key = f"Bearer {key}".encode() if key else None
        make_folder(self.folder)
        if ":" in config.host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((config.host, config.port), RelayHandler)
        except OSError as error:
            raise InputError(f"host={config.host}, port={config.port}: {error}") from error
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self.server_port}"
        self._ended = threading.Event()

    def __enter__(self) -> "RelayServer":
        threading.Thread(target=self._run_sweeps, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that clients ended."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def measure_health(self) -> dict[str, float | None]:
        """Measure free bytes, number of files, and seconds since the oldest file was written."""
        written = []
        for path in self.folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):
                written.append(path.lstat().st_mtime)
        return {
            "free_bytes": shutil.disk_usage(self.folder).free,
            "files": len(written),
            "oldest_s": round(time.time() - min(written), 1) if written else None,
        }

    def _run_sweeps(self) -> None:
        while not self._ended.wait(self.max_age_s / SWEEPS):
            try:
                num_files = delete_old_files(self.folder, self.max_age_s)
            except OSError as error:
                print(f"{self.folder}: {error}", file=sys.stderr, flush=True)
                continue
            if num_files:
                print(
                    f"deleted {num_files} files that nobody read for {self.max_age_s:.0f} s",
                    flush=True,
                )


class TextHandler(BaseHTTPRequestHandler):
    """Handle the requests of one connection, with texts as replies."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Log nothing, as a line per file would be too much."""

    def send_text(self, status: int, text: str) -> None:
        """Send a reply."""
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class RelayHandler(TextHandler, BaseHTTPRequestHandler):
    """Handle the requests of one connection to a relay."""

    server: RelayServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Send a file, or the relay's state."""
        self._answer_request(self._send_file)

    def do_DELETE(self) -> None:
        """Delete a file and its lock, if they exist."""
        self._answer_request(self._delete_file)

    def _answer_request(self, of_file: Callable[[Path], None]) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body of the request is not read
        named, key = NAME.fullmatch(self.path), self.server.key
        given = self.headers.get("Authorization", "").encode()
        try:
            if key is not None and not hmac.compare_digest(given, key):
                self.send_text(401, f"{RELAY_TOKEN_VARIABLE} is not this relay's")
            elif named is not None:
                of_file(self.server.folder / named[1])
            elif self.path == "/health":
                self.send_text(200, json.dumps(self.server.measure_health()))
            else:
                self.send_text(404, "allowed: /health and /NAME.safetensors")
        except FileNotFoundError:
            self.send_text(404, "no such file")
        except HiddenStatesError as error:
            self.send_text(409, str(error))
        except (InputError, OSError) as error:
            self.send_text(500, str(error))

    def _send_file(self, path: Path) -> None:
        if path.is_symlink() or not (path.exists() or make_lock_path(path).exists()):
            raise FileNotFoundError
        wait_until_whole(path, WAIT_S)
        with open(path, "rb", buffering=0, opener=_no_link) as file:
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            try:
                self.end_headers()
                self.connection.sendfile(file)
            except OSError:  # the client is gone, or sees a short body
                self.close_connection = True

    def _delete_file(self, path: Path) -> None:
        delete_states_file(path)
        self.send_text(200, "deleted")


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def main(config: RelayRun) -> None:
    """Serve until Ctrl-C."""
    check_relay(config)
    key = find_relay_token()
    with RelayServer(config, key) as relay:
        hint = f", and {RELAY_TOKEN_VARIABLE} as here" if key else ""
        print(
            f"{relay.folder}: set target.relay=[{relay.url}] where heads are trained{hint}; stop "
            "with Ctrl-C",
            flush=True,
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
        with suppress(KeyboardInterrupt):
            relay.serve_forever()
    print("ended")


if __name__ == "__main__":
    COMMAND.run(main)
