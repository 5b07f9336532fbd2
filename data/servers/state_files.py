"""Files of hidden states that a server writes: two ways to read them.

The server writes to a folder that is shared with this machine (`SharedFolder`), or to one beside
which `scripts/relay.py` runs, which sends the files over HTTP (`RelayFiles`). Files are read into
memory that is reused once no tensor needs it (`BufferPool`).

Letters: S tokens, L layers in a file, D hidden.
"""

import errno
import fcntl
import json
import mmap
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import BufferedIOBase, RawIOBase
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from conf.errors import InputError
from data.servers.http_client import RELAY_TOKEN_VARIABLE, find_relay_token

VISIBLE_S = 10.0
"""Seconds in which a file named by the server may stay invisible on a network file system."""
LOOK_EVERY_S = 0.01
"""Seconds between looks for a file."""
SWEEP_EVERY_S = 600.0
"""Seconds between deletions of files that no reader waits for."""
LOST_AFTER = 3
"""Age, in request timeouts, of files that no reader waits for."""
CANNOT_LOCK = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)
"""Errors of file systems without locks."""
HEADER_BYTES = 100_000_000
"""Longest header that safetensors accepts."""
DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
NUM_ATTEMPTS = 4
"""Attempts per request to a relay."""
FIRST_DELAY_S = 0.5
"""Seconds before the third attempt. The second follows at once, as a relay closes idle
connections."""
CONNECT_S = 30.0
FREE_FOR_S = 1.0
"""Seconds for which the free space that a relay reported is trusted."""
MAX_REASON_BYTES = 500
"""Bytes that are read of a relay's reason for a refusal."""
MIN_KEPT_BYTES = 1 << 20
"""Size in bytes below which the pool keeps no block."""
SIZES_PER_DOUBLING = 4
"""Number of block sizes between two powers of two."""
Result = TypeVar("Result")


class HiddenStatesError(InputError):
    """The hidden states of a document are missing or wrong; another attempt or server may help."""


class SharedFolder:
    """Access to files in a folder that has the same name here and on the server.

    Files of requests that were given up are deleted every `SWEEP_EVERY_S`.
    """

    def __init__(self, timeout_s: float) -> None:
        """Keep the settings; open no file yet.

        Args:
            timeout_s: seconds to wait for a file, and for a request.
        """
        self.timeout_s = timeout_s
        self._folder: Path | None = None
        self._swept_at = -SWEEP_EVERY_S

    def load_and_delete(self, path: Path, token_ids: list[int]) -> Tensor:
        """Read a file and delete it.

        Args:
            path: path as the server names it.
            token_ids: [S] ids that the file must hold; other files are not deleted.

        Returns:
            `hidden_states` as written; [S, L, D] from a correctly started server.

        Raises:
            HiddenStatesError: the file is missing, incomplete or of other tokens.
            InputError: no file of this server can be read.
        """
        wait_until_whole(path, self.timeout_s)
        try:
            with path.open("rb", buffering=0) as file:
                tensors = load_safetensors(file, os.fstat(file.fileno()).st_size)
        except (OSError, ValueError) as error:
            raise HiddenStatesError(f"{path} cannot be read: {error}") from error
        states = extract_states(tensors, token_ids, path)
        try:
            delete_states_file(path)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be deleted, so the disk would fill up: {error}; let this user "
                "write there"
            ) from error
        self._folder = path.parent
        if time.monotonic() - self._swept_at >= SWEEP_EVERY_S:
            self._swept_at = time.monotonic()
            num_lost = delete_old_files(path.parent, LOST_AFTER * self.timeout_s)
            if num_lost:
                tqdm.write(
                    f"{path.parent}: deleted {num_lost} files that no process has read for "
                    f"{LOST_AFTER * self.timeout_s / 60:.0f} minutes",
                    file=sys.stderr,
                )
        return states

    def free_bytes(self) -> int | None:
        """Return the free bytes where the server writes; None if unknown."""
        return None if self._folder is None else shutil.disk_usage(self._folder).free

    def close(self) -> None:
        """Close nothing, as no file stays open."""


def wait_until_whole(path: Path, timeout_s: float) -> None:
    """Wait until the writer is done and the whole file is visible.

    The writer holds `path.lock` until it is done. On network file systems without visible locks,
    the file must be whole in two looks.

    Args:
        path: path of a safetensors file.
        timeout_s: seconds that the lock may be held.

    Raises:
        HiddenStatesError: the writer takes too long, or the file is incomplete afterwards, as after
            a failed write.
        InputError: no permission to read the file.
    """
    start = released = time.monotonic()
    was_whole = False
    while True:
        locked, now = _is_lock_held(path), time.monotonic()
        if locked:
            released = now
            if now - start > timeout_s:
                raise HiddenStatesError(
                    f"{path}: not written after {now - start:.0f} s; see the server's log"
                )
        elif _is_file_whole(path):
            if locked is False or was_whole:
                return
            was_whole = True
        elif now - released > VISIBLE_S:
            raise HiddenStatesError(_explain_incomplete_file(path))
        time.sleep(LOOK_EVERY_S)


def _is_lock_held(path: Path) -> bool | None:
    """Tell whether a writer holds the lock of a file; None without a lock."""
    try:
        with make_lock_path(path).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in CANNOT_LOCK:
            return None
        raise InputError(
            f"{make_lock_path(path)}: cannot be locked: {error}; let this user write there"
        ) from error
    return False


def _is_file_whole(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            _parse_header(file, os.fstat(file.fileno()).st_size)
    except PermissionError as error:
        raise InputError(f"{error}; run this command as the server's user") from error
    except (OSError, ValueError):
        return False
    return True


def _explain_incomplete_file(path: Path) -> str:
    if not path.exists() and not make_lock_path(path).exists():
        return (
            f"{path}: cannot be seen from this machine; mount the server's shared_storage_path "
            "here under the same name, or start scripts/relay.py beside the server and set "
            "target.relay"
        )
    state = f"{path.stat().st_size} bytes" if path.exists() else "no such file"
    return f"{path}: incomplete ({state}); the disk may be full, see the server's log"


def make_lock_path(path: Path) -> Path:
    """Make the path of a file's lock file."""
    return path.with_name(path.name + ".lock")


def delete_states_file(path: Path) -> None:
    """Delete a file of hidden states and its lock file, if present."""
    path.unlink(missing_ok=True)
    make_lock_path(path).unlink(missing_ok=True)


def delete_old_files(folder: Path, age_s: float) -> int:
    """Delete files of hidden states, and their lock files, that are older than `age_s` seconds.

    Returns:
        Number of deleted files, without lock files.
    """
    num_files, before = 0, time.time() - age_s
    for path in folder.iterdir():
        # safetensors first writes to `.tmp` with six more letters.
        if not (path.name.endswith((".safetensors", ".lock")) or path.name.startswith(".tmp")):
            continue
        with suppress(FileNotFoundError):  # other processes sweep too
            if path.lstat().st_mtime < before and not path.is_dir():
                path.unlink()
                num_files += not path.name.endswith(".lock")
    return num_files


class RelayFiles:
    """Access to the files of one relay.

    Each thread reads through a connection of its own and leaves the connection to the next thread.
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

    def load_and_delete(self, path: Path, token_ids: list[int]) -> Tensor:
        """See `SharedFolder`."""
        tensors = self._send_request(
            "GET", path.name, lambda body: load_safetensors(body, body.length or 0), self.timeout_s
        )
        states = extract_states(tensors, token_ids, path)
        self._send_request("DELETE", path.name, HTTPResponse.read, self.timeout_s)
        return states

    def free_bytes(self) -> int | None:
        """See `SharedFolder`."""
        if time.monotonic() - self._free_at >= FREE_FOR_S:
            try:
                reply = self._send_request(
                    "GET", "health", HTTPResponse.read, CONNECT_S, num_attempts=1
                )
                self._free = int(json.loads(reply)["free_bytes"])
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
        """Send a request, again if its connection breaks, and `read` the reply.

        Args:
            method: HTTP method.
            name: name of the file below the relay's URL.
            read: function that reads the body of a successful reply.
            timeout_s: seconds to wait for the reply.
            num_attempts: largest number of attempts.

        Raises:
            HiddenStatesError: all attempts failed, or the file is missing or incomplete.
            InputError: the relay refuses this token.
        """
        target, problem, attempt = f"{self._root}/{quote(name, safe='')}", "", 0
        for attempt in range(num_attempts):
            time.sleep(FIRST_DELAY_S * 2 ** (attempt - 2) if attempt > 1 else 0)
            connection = self._open_connection()
            try:
                connection.request(method, target, headers=self._headers)
                connection.sock.settimeout(timeout_s)
                response = connection.getresponse()
                if response.status == 200:
                    result = read(response)
                    self._idle.append(connection)
                    return result
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
        """Format a refusal that another attempt may mend; raise an error for any other refusal.

        Raises:
            HiddenStatesError: the file is missing or incomplete.
            InputError: the relay refuses this token.
        """
        reason = response.read(MAX_REASON_BYTES).decode(errors="replace").strip()
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
            raise HiddenStatesError(f"{who}: {reason}")
        return f"HTTP {response.status}: {reason}"


StateFiles = SharedFolder | RelayFiles
"""Access to a server's files."""


def extract_states(tensors: dict[str, Tensor], token_ids: list[int], path: Path) -> Tensor:
    """Return the hidden states among a file's tensors.

    Args:
        tensors: tensors of the file by name.
        token_ids: [S] ids that the file must hold.
        path: path of the file, for the message.

    Raises:
        HiddenStatesError: the file holds no hidden states, or those of other tokens.
    """
    if "hidden_states" not in tensors or tensors.get("token_ids", torch.empty(0)).tolist() != (
        token_ids
    ):
        raise HiddenStatesError(f"{path}: holds other tokens than were sent")
    return tensors["hidden_states"]


def load_safetensors(file: RawIOBase | BufferedIOBase, size: int) -> dict[str, Tensor]:
    """Read a safetensors file into one buffer, which its tensors share.

    Args:
        file: file or HTTP body at its start.
        size: bytes of the file.

    Raises:
        ValueError: no safetensors file, or incomplete.
        OSError: reading fails.
    """
    num_bytes, layouts = _parse_header(file, size)
    data = BUFFERS.allocate_bytes(num_bytes)
    filled, view = 0, data.data
    while filled < num_bytes:
        count = file.readinto(view[filled:num_bytes])
        if not count:
            raise ValueError(f"it ends {num_bytes - filled} bytes early")
        filled += count
    return {
        name: torch.frombuffer(data, dtype=dtype, offset=first, count=shape.numel()).view(shape)
        for name, (dtype, shape, first) in layouts.items()
        if shape.numel()
    }


def _parse_header(
    file: RawIOBase | BufferedIOBase, size: int
) -> tuple[int, dict[str, tuple[torch.dtype, torch.Size, int]]]:
    """Parse the header of a safetensors file.

    Returns:
        Bytes of all tensors, and dtype, shape and byte offset of each.

    Raises:
        ValueError: the header is missing or does not fit `size` bytes.
    """
    length = int.from_bytes(file.read(8) or b"", "little")
    if not 0 < length <= min(size - 8, HEADER_BYTES):
        raise ValueError(f"no header of a safetensors file in {size} bytes")
    try:
        entries = dict(json.loads(file.read(length) or b""))
        entries.pop("__metadata__", None)
        layouts, end = {}, 0
        for name, entry in entries.items():
            dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            first, last = entry["data_offsets"]
            if last - first != shape.numel() * dtype.itemsize or min(first, *shape) < 0:
                raise ValueError(f"{name} of {last - first} bytes")
            layouts[name], end = (dtype, shape, first), max(end, last)
    except (KeyError, TypeError, RuntimeError, UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"no header of a safetensors file: {error!r}") from error
    if end != size - 8 - length:
        raise ValueError(f"{size} bytes, not {end + 8 + length}")
    return end, layouts


class BufferPool:
    """Pool of memory blocks for files of hidden states.

    The kernel clears new pages, which takes several times as long as reading a file into old ones.
    The pool therefore keeps blocks whose tensors are gone, at most as many bytes as were ever in
    use at once.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # threads take and return memory; each operation is atomic

    def allocate_bytes(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Allocate an uninitialised array of bytes.

        Its block returns to the pool once the array and all views of it are gone.
        """
        if num_bytes < MIN_KEPT_BYTES:
            return np.empty(num_bytes, np.uint8)
        step = (1 << num_bytes.bit_length() - 1) // SIZES_PER_DOUBLING
        size = -(-num_bytes // step) * step
        block = self._take_block(size)
        array = np.frombuffer(block, np.uint8, num_bytes)
        weakref.finalize(array, self._free.append, block).atexit = False
        return array

    def _take_block(self, size: int) -> mmap.mmap:
        """Take a kept block, or make one and drop kept blocks of other sizes with as many bytes."""
        for block in [*self._free]:
            if size <= len(block) <= size + size // SIZES_PER_DOUBLING:
                with suppress(ValueError):  # another thread took it first
                    self._free.remove(block)
                    return block
        dropped = 0
        while self._free and dropped < size:
            with suppress(IndexError):
                dropped += len(self._free.pop(0))
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


BUFFERS = BufferPool()
