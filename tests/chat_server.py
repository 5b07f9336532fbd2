"""An OpenAI-compatible server on loopback whose answers depend on the request alone."""

import hashlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Fault = tuple[int, dict[str, str]] | str


def reply_to(body: dict) -> str:
    """What the server says: a digest of everything it was asked."""
    asked = json.dumps([body["messages"], body.get("seed"), body["max_tokens"]], sort_keys=True)
    return f"answer {hashlib.sha256(asked.encode()).hexdigest()[:8]}"


class ChatServer:
    """Context manager; `url` is the base URL.

    Attributes:
        faults: taken from the front, one per request: a status with headers, or `drop`.
        fault_for: called with the request body; may return a fault for it.
        bodies: of all requests that were answered.
        most_at_once: the largest number of requests in flight.
    """

    path = "/v1/chat/completions"
    models: tuple[dict, ...] = ({"id": "toy"}, {"id": "other"})

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.faults: list[Fault] = []
        self.fault_for: Callable[[dict], Fault | None] = lambda _: None
        self.finish_reason: Callable[[dict], str] = lambda _: "stop"
        self.reply: Callable[[dict], object] = reply_to
        self.bodies: list[dict] = []
        self.keys: set[str | None] = set()
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"chat": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> "ChatServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def page(self, path: str) -> dict | str | None:
        """What a GET finds there: JSON, text or nothing."""
        return {"data": self.models} if path == "/v1/models" else None

    def answer(self, body: dict) -> dict:
        message = {"role": "assistant", "content": self.reply(body)}
        return {"choices": [{"message": message, "finish_reason": self.finish_reason(body)}]}

    def enter(self, body: dict) -> Fault | None:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            return self.faults.pop(0) if self.faults else self.fault_for(body)

    def leave(self) -> None:
        with self._lock:
            self._at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    chat: ChatServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        page = self.chat.page(self.path)
        if page is None:
            self._json({"error": "no such page"}, 404)
        elif isinstance(page, str):
            self._send(page.encode(), 200, {})
        else:
            self._json(page)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != self.chat.path:
            self._json({"error": "no such page"}, 404)
            return
        self.chat.keys.add(self.headers.get("Authorization"))
        fault = self.chat.enter(body)
        try:
            time.sleep(self.chat.delay_s)
            self._answer(body, fault)
        finally:
            self.chat.leave()

    def _answer(self, body: dict, fault: Fault | None) -> None:
        if fault == "drop":
            self.close_connection = True
        elif isinstance(fault, tuple):
            echo = self.headers.get("Authorization", "")
            self._json({"error": f"injected, you sent {echo}"}, fault[0], fault[1])
        else:
            self.chat.bodies.append(body)
            self._json(self.chat.answer(body))

    def _json(
        self, value: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self._send(json.dumps(value).encode(), status, headers or {})

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, text in headers.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
