"""Files of hidden states over HTTP, from `scripts/relay.py` beside their server."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

from torch import Tensor

from conf.errors import InputError
from data.servers.files import HiddenStatesError, extract_states, load_safetensors
from data.servers.token import RELAY_TOKEN_VARIABLE, find_relay_token

NUM_ATTEMPTS = 4
FIRST_DELAY_S = 0.5
"""Seconds before the third attempt. The second follows at once, as a relay closes idle
connections."""
CONNECT_S = 30.0
FREE_FOR_S = 1.0
"""Seconds for which the free space told by a relay is trusted."""
MOST_WORDS = 500
"""Largest number of bytes read of a reason."""

Result = TypeVar("Result")


class RelayFiles:
    """Files of one relay. See `data.servers.files.Files`.

    Each reading thread has its own connection, and leaves it to the next thread.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Keep the settings; connect later.

        Args:
            url: URL of the relay.
            timeout_s: seconds to wait for a file.
        """
        parsed = urlsplit(url)
        try:
            host, port = parsed.hostname, parsed.port
        except ValueError:
            host = port = None
        if parsed.scheme not in ("http", "https") or not host or parsed.username is not None:
            raise InputError(f"target.relay={url}: must be like http://10.0.0.5:8100")
        self.url, self.timeout_s = url, timeout_s
        self._host, self._port, self._root = host, port, parsed.path.rstrip("/")
        self._kind = HTTPSConnection if parsed.scheme == "https" else HTTPConnection
        key = find_relay_token()
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._idle: list[HTTPConnection] = []
        self._free: int | None = None
        self._free_at = -FREE_FOR_S

    def load_and_delete(self, path: Path, token_ids: list[int], locks: bool) -> Tensor:  # noqa: ARG002  the relay sees
        """See `Files`."""
        tensors = self._send_request(
            "GET", path.name, lambda body: load_safetensors(body, body.length or 0), self.timeout_s
        )
        states = extract_states(tensors, token_ids, path)
        self._send_request("DELETE", path.name, HTTPResponse.read, self.timeout_s)
        return states

    def free_bytes(self) -> int | None:
        """See `Files`."""
        if time.monotonic() - self._free_at >= FREE_FOR_S:
            try:
                told = self._send_request(
                    "GET", "health", HTTPResponse.read, CONNECT_S, num_attempts=1
                )
                self._free = int(json.loads(told)["free_bytes"])
            except (InputError, ValueError, KeyError, TypeError):
                self._free = None  # reading a file will report the problem
            self._free_at = time.monotonic()
        return self._free

    def close(self) -> None:
        """Close unused connections."""
        while self._idle:
            self._idle.pop().close()

    def _send_request(
        self,
        method: str,
        name: str,
        read: Callable[[HTTPResponse], Result],
        timeout_s: float,
        num_attempts: int = NUM_ATTEMPTS,
    ) -> Result:
        """Send a request, again if its connection breaks, and `read` the answer."""
        target, problem, attempt = f"{self._root}/{quote(name, safe='')}", "", 0
        for attempt in range(num_attempts):
            time.sleep(FIRST_DELAY_S * 2 ** (attempt - 2) if attempt > 1 else 0)
            connection = self._open_connection()
            try:
                connection.request(method, target, headers=self._headers)
                connection.sock.settimeout(timeout_s)
                response = connection.getresponse()
                if response.status == 200:
                    found = read(response)
                    self._idle.append(connection)
                    return found
                problem = self._format_refusal(response, name)
                connection.close()
            except InputError:
                connection.close()
                raise
            except (HTTPException, OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
                connection.close()
                self.close()  # the relay may have closed all of them
                if isinstance(error, TimeoutError):
                    break
        raise HiddenStatesError(f"target.relay={self.url}: {problem} ({attempt + 1} attempts)")

    def _open_connection(self) -> HTTPConnection:
        with suppress(IndexError):
            return self._idle.pop()
        return self._kind(self._host, self._port, timeout=CONNECT_S)

    def _format_refusal(self, response: HTTPResponse, name: str) -> str:
        """Describe a failed answer that another attempt may mend.

        Raises:
            NotReadError: the file is missing or incomplete.
            InputError: the relay refuses this token.
        """
        words = response.read(MOST_WORDS).decode(errors="replace").strip()
        who = f"target.relay={self.url}"
        if response.status in (401, 403):
            raise InputError(
                f"{who}: HTTP {response.status}: wrong token; set {RELAY_TOKEN_VARIABLE} here as "
                "on the relay"
            )
        if response.status == 404:
            raise HiddenStatesError(
                f"{who}: has no {name}; start scripts/relay.py beside the server, on the folder it "
                "writes to, and list relays in the order of target.engine"
            )
        if response.status == 409:
            raise HiddenStatesError(f"{who}: {words}")
        return f"HTTP {response.status}: {words}"
