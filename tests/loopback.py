"""Servers on loopback, which tests enter and leave."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

HERE = ("127.0.0.1", 0)
"""This machine, any port that is free."""


class Loopback:
    """A context manager that serves at `root`.

    Args:
        handler: the class of its answers.
        address: host and port.
    """

    def __init__(self, handler: type["Answers"], address: tuple[str, int] = HERE) -> None:
        self._server = _Server(address, type("Handler", (handler,), {"owner": self}))
        self.root = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that was killed is no error of the server's.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Answers(BaseHTTPRequestHandler):
    """Sends JSON and bytes; `owner` is the `Loopback`."""

    owner: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send_json(
        self, value: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        more = {"Content-Type": "application/json", **(headers or {})}
        self.send_bytes(json.dumps(value).encode(), status, more)

    def send_bytes(
        self, data: bytes, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
