"""Bytes of hidden states that processes read from a server, through the folder or a relay.

A stand-in takes the place of a serving engine. It answers with random states from a file written in
advance; it hard-links the file, which costs next to nothing.
"""

import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, product, repeat, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors.torch import save_file

from conf.command.clock import Stopwatch
from conf.settings.scripts import RelayRun
from data.servers.hidden_states import HiddenStatesClient, ServerFeatureLayers
from data.servers.http_client import Endpoint
from data.servers.server_pool import HiddenStatesPool
from data.servers.state_files import RelayFiles, make_lock_path
from scripts.bench.harness import Figures, WorkerProcess, take_answers
from scripts.relay import RelayServer, TextHandler

SHARED = Path("/dev/shm")
TIMEOUT_S = 600.0


class Reading(NamedTuple):
    """Describe what processes read: documents of states, in bfloat16, for some seconds."""

    layers: int
    hidden: int
    processes: int
    length: int
    concurrency: int
    seconds: float = 3.0


READINGS = (
    Reading(6, 7168, 1, 2048, 4), Reading(6, 7168, 4, 2048, 4), Reading(4, 4096, 4, 2048, 4),
    Reading(1, 4096, 1, 512, 1),
)  # fmt: skip
SMALL_READINGS = (Reading(2, 64, 2, 32, 2, 0.2),)


class StandIn(ThreadingHTTPServer):
    """Serve random states in place of vLLM; a context manager.

    Args:
        taps: layers and channels.
        length: tokens of each document.

    Attributes:
        url: base URL.
        folder: folder that the server writes states to.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, taps: ServerFeatureLayers, length: int) -> None:
        super().__init__(("127.0.0.1", 0), StandInHandler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self._root = Path(
            tempfile.mkdtemp(prefix="headsmith-", dir=SHARED if SHARED.is_dir() else None)
        )
        self.folder = self._root / taps.folder_name
        self.folder.mkdir()
        self._row = torch.randn(1, len(taps.written_layers), taps.hidden_size).bfloat16()
        self._numbers, self._document = count(), list(range(length))
        self._ready = self._save_states(self._document, self._root / "states.safetensors")

    def __exit__(self, *_: object) -> None:
        self.server_close()
        shutil.rmtree(self._root)

    def write_states(self, token_ids: list[int]) -> Path:
        """Write the states of a document to a new file, and return its path.

        The document that counts from 0 links a file that was written in advance.
        """
        path = self.folder / f"{next(self._numbers)}.safetensors"
        make_lock_path(path).touch()
        if token_ids != self._document:
            return self._save_states(token_ids, path)
        path.hardlink_to(self._ready)
        return path

    def _save_states(self, token_ids: list[int], path: Path) -> Path:
        states = self._row.repeat(len(token_ids), 1, 1)
        save_file({"hidden_states": states, "token_ids": torch.tensor(token_ids)}, path)
        return path


class StandInHandler(TextHandler, BaseHTTPRequestHandler):
    """Answer as vLLM does, to the extent that `HiddenStatesClient` asks."""

    server: StandIn

    def do_GET(self) -> None:
        """Send the model's name, or the version."""
        models = {"data": [{"id": "stand-in"}]}
        reply = {"version": "0.32.0"} if self.path == "/version" else models
        self.send_text(200, json.dumps(reply))

    def do_POST(self) -> None:
        """Write a document's states, and answer with the path of the file."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = str(self.server.write_states(body["prompt"]))
        reply = {"choices": [{}], "kv_transfer_params": {"hidden_states_path": path}}
        self.send_text(200, json.dumps(reply))


def make_feature_layers(reading: Reading) -> ServerFeatureLayers:
    """Make the layers and channels that are read."""
    layers = tuple(range(reading.layers))
    return ServerFeatureLayers(layers, max(layers), reading.hidden, None)


# The other processes: each takes jobs as lines of JSON, until its input ends.


def serve_states(job: dict[str, Any], answer: Callable[[Any], None]) -> None:
    """Run a stand-in, or a relay of its folder, until the next line of input."""
    server: StandIn | RelayServer
    if "folder" in job:
        config = RelayRun(folder=job["folder"])
        config.port = 0
        server = RelayServer(config, None)
    else:
        reading = Reading(*job["reading"])
        server = StandIn(make_feature_layers(reading), reading.length)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answer({"url": server.url, "folder": str(server.folder)})
        sys.stdin.readline()
        server.shutdown()


def read_states(job: dict[str, Any], answer: Callable[[Any], None]) -> None:
    """Read documents for some seconds; start when the next line says that all are ready."""
    reading = Reading(*job["reading"])
    way = RelayFiles(job["relay"], TIMEOUT_S) if job["relay"] else None
    endpoint, taps = Endpoint(job["url"], timeout_s=TIMEOUT_S), make_feature_layers(reading)
    client = HiddenStatesClient(endpoint, taps, reading.concurrency, way)
    document = list(range(reading.length))
    with HiddenStatesPool([client]) as pool:
        for _ in pool.stream_states([document] * (3 * reading.concurrency)):
            pass  # memory is allocated by then
        answer(None)
        sys.stdin.readline()
        watch = Stopwatch()
        documents = takewhile(lambda _: watch.host_seconds() < reading.seconds, repeat(document))
        answers = pool.stream_states(documents)
        num_bytes = sum(each.nbytes for states in answers for each in states.values())
        answer([num_bytes, watch.host_seconds(), watch.processor_seconds()])


def measure_servers(size: str) -> Figures:
    """Measure GB/s of states from a server, and processor seconds per GB of all that take part."""
    readings = SMALL_READINGS if size == "small" else READINGS
    with ExitStack() as stack:

        def start(kind: str) -> WorkerProcess:
            worker = WorkerProcess("servers", kind)
            stack.callback(worker.end_process)
            return worker

        servers = {"the stand-in": start("serve"), "the relay": start("serve")}
        readers = [start("read") for _ in range(max(each.processes for each in readings))]
        for reading, way in product(readings, ("folder", "relay")):
            used = dict([*servers.items()][: 1 + (way == "relay")])
            stand_in, *relay = used.values()
            stand_in.send({"reading": reading})
            job = {"reading": reading, **stand_in.receive(), "relay": None}
            for each in relay:
                each.send({"folder": job["folder"]})
                job["relay"] = each.receive()["url"]
            chosen = readers[: reading.processes]
            for reader in chosen:
                reader.send(job)
            for reader in chosen:
                reader.receive()
            before = {server: measure_busy_seconds(each) for server, each in used.items()}
            for reader in chosen:  # all at the same time
                reader.send(None)
            results = [reader.receive() for reader in chosen]
            num_bytes, walls, busy = zip(*results, strict=True)
            costs = {name: measure_busy_seconds(used[name]) - before[name] for name in used}
            for each in used.values():
                each.send(None)
            name = (
                f"{reading.processes} x {reading.layers} layers of {reading.hidden:,}, "
                f"{reading.length:,} tokens, {reading.concurrency} at once, {way}"
            )
            gigabytes = sum(num_bytes) / 1e9
            yield f"GB/s, {name}", gigabytes / max(walls)
            yield f"processor s/GB of the readers, {name}", sum(busy) / gigabytes
            for server, seconds in costs.items():
                yield f"processor s/GB of {server}, {name}", seconds / gigabytes


def measure_busy_seconds(worker: WorkerProcess) -> float:
    """Measure the processor seconds that a process has used so far."""
    times = psutil.Process(worker.pid).cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    torch.set_num_threads(1)
    work = {"serve": serve_states, "read": read_states}[sys.argv[1]]
    send = take_answers()
    while line := sys.stdin.readline():
        work(json.loads(line), send)
