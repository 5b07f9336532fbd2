"""Training beside a serving engine: the rate of hidden states, and the time spent waiting for them.

`python scripts/bench/engines.py` starts a stand-in for an engine and processes that read from it
with `HiddenStatesPool`, through the folder or a relay. The stand-in answers with random states from
files written in advance; it hard-links them, which costs next to nothing. A table has bytes per
second, and processor seconds per GB of copies, checks, files, requests, the stand-in and the relay.

`--train` trains a small head in each process from a stand-in with a given tokens/s, and prints the
share of the time spent waiting. `--memory STEPS` prints the memory of such a process at a tenth of
its steps and at the last step.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repo root

from conf.command.environment import set_passive_wait_policy

set_passive_wait_policy()

import argparse
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, product
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from conf.command.clock import Stopwatch
from conf.settings.scripts import RelayRun
from data.servers import state_files
from data.servers.hidden_states import HiddenStatesClient, ServerFeatureLayers
from data.servers.http_client import Endpoint
from data.servers.server_pool import HiddenStatesPool
from data.servers.state_files import RelayFiles, SharedFolder, make_lock_path
from scripts.bench.harness import ROOT, build_markdown_table
from scripts.relay import RelayServer

PARTS = ("copies", "checks", "files", "requests")
SHARE_OF_MEMORY = 0.3
"""Share of the host's memory for states on their way to all processes."""
SHARED = Path("/dev/shm")
NUM_TARGET_LAYERS = 8
"""Number of layers of the target that small heads have."""
LAYERS_BY_HEAD = {"medusa": [NUM_TARGET_LAYERS], "eagle3": [2, 4, 5, NUM_TARGET_LAYERS]}
"""Layers of the target that a head reads, by head."""
HIDDEN, VOCAB = 256, 1024
WARM_UP = 8
"""Training steps before the timed ones. At the start no states have been requested in advance, so
the first steps wait longer than later ones."""
NUM_DRAWN = 64
"""Tokens with random states of their own; later tokens repeat these."""
TIMEOUT_S = 600.0


class StandIn(ThreadingHTTPServer):
    """Serve random states in place of vLLM, at once or at a rate; a context manager.

    Attributes:
        url: base URL.
        folder: folder that the server writes states to.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, taps: ServerFeatureLayers, tokens_per_s: float) -> None:
        """Draw the states, in bfloat16.

        Args:
            taps: layers and channels.
            tokens_per_s: rate at which the server reads; 0 for no limit.
        """
        super().__init__(("127.0.0.1", 0), StandInHandler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self._root = Path(
            tempfile.mkdtemp(prefix="headsmith-", dir=SHARED if SHARED.is_dir() else None)
        )
        self.folder = self._root / taps.folder_name
        self.folder.mkdir()
        self._states = torch.randn(NUM_DRAWN, len(taps.written_layers), taps.hidden_size).bfloat16()
        self._tokens_per_s, self._free_at = tokens_per_s, 0.0
        self._ready: dict[int, Path] = {}
        self._numbers, self._lock = count(), threading.Lock()

    def __exit__(self, *_: object) -> None:
        self.server_close()
        shutil.rmtree(self._root)

    def write_states(self, token_ids: list[int]) -> Path:
        """Write the states of a document to a file, and return its path.

        Documents that count from 0 share a file that was written in advance.
        """
        size = len(token_ids)
        with self._lock:
            name = f"{next(self._numbers)}.safetensors"
            now = time.monotonic()
            self._free_at = max(self._free_at, now)
            self._free_at += size / self._tokens_per_s if self._tokens_per_s else 0.0
            until = self._free_at
            counts = token_ids == list(range(size))
            if counts and size not in self._ready:
                self._ready[size] = self._save_states(token_ids, self._root / name)
        time.sleep(max(0.0, until - time.monotonic()))
        path = self.folder / name
        make_lock_path(path).touch()
        if counts:
            path.hardlink_to(self._ready[size])
        else:
            self._save_states(token_ids, path)
        return path

    def _save_states(self, token_ids: list[int], path: Path) -> Path:
        times = -(-len(token_ids) // NUM_DRAWN)
        states = self._states.repeat(times, 1, 1)[: len(token_ids)]
        save_file({"hidden_states": states, "token_ids": torch.tensor(token_ids)}, path)
        return path


class StandInHandler(BaseHTTPRequestHandler):
    """Answer as vLLM does, to the extent that `HiddenStatesClient` asks."""

    server: StandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Send the model's name, or the version."""
        models = {"data": [{"id": "stand-in"}]}
        self._send_json({"version": "0.32.0"} if self.path == "/version" else models)

    def do_POST(self) -> None:
        """Write a document's states, and answer with the path of the file."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.server.write_states(body["prompt"])
        self._send_json({"choices": [{}], "kv_transfer_params": {"hidden_states_path": str(path)}})

    def _send_json(self, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def make_feature_layers(job: dict[str, Any]) -> ServerFeatureLayers:
    """Make the layers and channels that a job reads."""
    return ServerFeatureLayers(tuple(job["layers"]), max(job["layers"]), job["hidden"], None)


def open_pool(job: dict[str, Any]) -> HiddenStatesPool:
    """Connect to the server of a job, in a process that reads from it."""
    way = RelayFiles(job["relay"], TIMEOUT_S) if job["relay"] else None
    endpoint = Endpoint(job["url"], timeout_s=TIMEOUT_S)
    return HiddenStatesPool(
        [HiddenStatesClient(endpoint, make_feature_layers(job), job["concurrency"], way)]
    )


# The other processes. Each reads a job as a line of JSON, and writes its result as another.


def send_to_parent(value: dict[str, Any]) -> None:
    """Send a value to the parent process, as a line of JSON."""
    print(json.dumps(value), flush=True)


def serve_states(job: dict[str, Any]) -> None:
    """Run a stand-in, or a relay, until the next line of input."""
    server: StandIn | RelayServer
    if job["folder"]:
        config = RelayRun(folder=job["folder"])
        config.port = 0
        server = RelayServer(config, None)
    else:
        server = StandIn(make_feature_layers(job), job["tokens_per_s"])
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        send_to_parent({"url": server.url, "folder": str(server.folder)})
        sys.stdin.readline()
        server.shutdown()


class FunctionTimers:
    """Count the processor seconds of some functions, over all threads."""

    def __init__(self) -> None:
        self._spent: list[tuple[str, float]] = []  # an append of a thread is one step

    def total_seconds(self, name: str) -> float:
        """Return the seconds of a function since `clear_times`."""
        return sum(spent for each, spent in self._spent if each == name)

    def clear_times(self) -> None:
        """Forget all earlier times."""
        self._spent.clear()

    def time_function(self, place: Any, function: str, name: str) -> None:
        """Count the time of a function of a module or class under a name from now on."""
        plain: Callable[..., Any] = getattr(place, function)

        @wraps(plain)
        def measured(*given: Any, **named: Any) -> Any:
            begin = time.thread_time()
            try:
                return plain(*given, **named)
            finally:
                self._spent.append((name, time.thread_time() - begin))

        setattr(place, function, measured)


@cache
def start_function_timers() -> FunctionTimers:
    """Start to count the time of each part of a reader."""
    timers = FunctionTimers()
    timers.time_function(state_files, "load_safetensors", "copies")
    for way in (SharedFolder, RelayFiles):
        timers.time_function(way, "load_and_delete", "taking")
    timers.time_function(HiddenStatesClient, "_load_states", "collecting")
    return timers


def measure_reading(job: dict[str, Any]) -> None:
    """Read documents for some seconds; start when the next line says that all are ready."""
    seconds = start_function_timers()
    document = list(range(job["length"]))
    with open_pool(job) as pool:
        for _ in pool.stream_states([document] * (3 * job["concurrency"])):
            pass  # memory is allocated and the file written by then
        send_to_parent({})
        sys.stdin.readline()
        seconds.clear_times()
        watch, num_bytes = Stopwatch(), 0

        def documents() -> Iterator[list[int]]:
            while watch.host_seconds() < job["seconds"]:
                yield document

        for states in pool.stream_states(documents()):
            num_bytes += sum(each.nbytes for each in states.values())
        wall_s, measure_busy_seconds = watch.host_seconds(), watch.processor_seconds()
    copies, taking, collecting = map(seconds.total_seconds, ("copies", "taking", "collecting"))
    parts = (copies, collecting - taking, taking - copies, measure_busy_seconds - collecting)
    send_to_parent({"bytes": num_bytes, "wall_s": wall_s} | dict(zip(PARTS, parts, strict=True)))


def train_from_server(job: dict[str, Any]) -> None:
    """Train a small head for some steps; start when the next line says that all are ready."""
    # Heavy, and not needed by the other processes.
    from conf.settings.target import Dtype
    from conf.settings.training import LogConfig, Schedule, TrainConfig
    from data.prepared.packing import PackedDataset
    from heads.target_model.remote import RemoteTarget
    from heads.vocab import DraftVocab
    from scripts.bench import training
    from train.loop.loop import TrainingJob, TrainingLoop
    from train.loop.sources import ServedSequences, count_prefetch_steps
    from train.parallel import processes

    shape = ("--hidden", str(HIDDEN), "--layers", str(NUM_TARGET_LAYERS), "--vocab", str(VOCAB))
    options = training.parse_arguments([job["head"], *shape, "--max-length", str(job["length"])])
    config = TrainConfig(
        max_steps=job["steps"] + WARM_UP, warmup_steps=1, batch_size=1, micro_batch_size=1,
        dtype=Dtype.float32, schedule=Schedule.constant, learning_rate=1e-3,
    )  # fmt: skip
    accelerator = processes.start_accelerator(config)
    model = training.make_random_target(options, accelerator.device).model
    target = RemoteTarget(model, None, "random")
    rows = PackedDataset(training.iter_documents(options, 64), options.max_length, seed=job["seed"])
    vocab = DraftVocab.from_counts(rows.count_token_ids(VOCAB), VOCAB, [])
    objective = training.make_objective(options.head, target, vocab)
    process, memory = psutil.Process(), {}
    with open_pool(job) as pool, tempfile.TemporaryDirectory() as folder:
        data = ServedSequences(rows, pool)
        ahead = count_prefetch_steps(pool, options.max_length)
        out = Path(folder) / "out"
        run = TrainingLoop(
            accelerator,
            TrainingJob(
                config, LogConfig(), 0, out, objective, data, data, num_prefetch_steps=ahead
            ),
        )
        for _ in range(WARM_UP):
            run.optimizer_step()
        send_to_parent({})
        sys.stdin.readline()
        run.waiting.restart()
        watch, tokens = Stopwatch(), run.tokens
        for step in range(1, job["steps"] + 1):
            run.optimizer_step()
            if step in (job["steps"] // 10, job["steps"]):
                memory[step] = process.memory_info().rss
        rate = (run.tokens - tokens) / watch.host_seconds()
        send_to_parent(
            {"waiting": run.waiting.pop_wait_fraction(), "rate": rate, "memory": [*memory.values()]}
        )
        run.close()


WORK = {"serve": serve_states, "read": measure_reading, "train": train_from_server}


class Worker:
    """Start a process of this script, which runs jobs of one kind."""

    def __init__(self, kind: str) -> None:
        command = [sys.executable, __file__, "--worker", kind]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]

    def send_line(self, line: str = "") -> None:
        """Send a line to the process."""
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def receive_result(self) -> dict[str, Any]:
        """Return the next result of the process."""
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"a process ended with code {self._process.wait()}; its message is above"
            )
        return json.loads(line)

    def measure_busy_seconds(self) -> float:
        """Return the processor seconds that the process has used so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def wait_for_exit(self) -> None:
        """Wait until the process ends."""
        self._process.communicate()


class Workers:
    """Hold processes of one kind, with a stand-in and a relay; a context manager."""

    def __init__(self, kind: str, most: int) -> None:
        self._servers = [Worker("serve"), Worker("serve")]
        self._others = [Worker(kind) for _ in range(most)]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._servers, *self._others):
            each.wait_for_exit()

    def run_together(
        self, ranks: int, way: str, job: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], list[float]]:
        """Run a job in some processes at the same time.

        Returns:
            The result of each process, and the processor seconds that the stand-in and the relay
            have used meanwhile.
        """
        servers = self._servers[: 1 + (way == "relay")]
        job = job | {"folder": None, "relay": None}
        for number, server in enumerate(servers):
            server.send_line(json.dumps(job))
            facts = server.receive_result()
            job |= {"relay": facts["url"]} if number else facts
        others = self._others[:ranks]
        for rank, other in enumerate(others):
            other.send_line(json.dumps(job | {"seed": rank}))
        for other in others:
            other.receive_result()
        before = [each.measure_busy_seconds() for each in servers]
        for other in others:
            other.send_line()
        results = [other.receive_result() for other in others]
        costs = [each.measure_busy_seconds() - s for each, s in zip(servers, before, strict=True)]
        for server in servers:
            server.send_line()
        return results, costs


def build_reading_table(options: argparse.Namespace, workers: Workers) -> str:
    """Measure reading; build the table of bytes per second, and of seconds per gigabyte."""
    header = ("states", "by", "processes", "tokens", "at once", "GB/s", *PARTS, "stand-in", "relay")
    rows = []
    room = SHARE_OF_MEMORY * psutil.virtual_memory().available
    for (layers, hidden), way, length, concurrency, ranks in product(
        options.shapes, options.ways, options.lengths, options.concurrency, options.ranks
    ):
        num_bytes = layers * hidden * 2 * length
        names = (f"{layers} x {hidden:,}", way, str(ranks), f"{length:,}", str(concurrency))
        if ranks * (concurrency + 1) * num_bytes > room:
            rows.append((*names, "too large", *[""] * (len(PARTS) + 2)))
            continue
        job = {
            "layers": list(range(layers)), "hidden": hidden, "length": length,
            "concurrency": concurrency, "seconds": options.seconds, "tokens_per_s": 0,
        }  # fmt: skip
        results, busy = workers.run_together(ranks, way, job)
        gigabytes = sum(each["bytes"] for each in results) / 1e9
        costs = [sum(each[part] for each in results) for part in PARTS] + busy
        cells = [f"{seconds / gigabytes:.2f}" for seconds in costs] + [""] * (2 - len(busy))
        rate = gigabytes / max(each["wall_s"] for each in results)
        rows.append((*names, f"{rate:.2f}", *cells))
        print_row(rows[-1])
    return build_markdown_table(header, rows)


def print_row(row: Sequence[str]) -> None:
    """Print a row before the table is complete."""
    print(*row, sep=" | ", file=sys.stderr, flush=True)


def build_training_table(options: argparse.Namespace, workers: Workers) -> str:
    """Measure training; build the table of the share of time that it waits for states."""
    header = ("head", "by", "processes", "tokens", "at once", "tokens/s of the server", "learnt")
    rows = []
    for rate, head, way, length, concurrency, ranks in product(
        options.rates, options.heads, options.ways, options.lengths, options.concurrency,
        options.ranks,
    ):  # fmt: skip
        job = build_training_job(head, length, options.steps) | {
            "concurrency": concurrency, "tokens_per_s": rate,
        }  # fmt: skip
        results, _ = workers.run_together(ranks, way, job)
        waiting = sum(each["waiting"] for each in results) / ranks
        names = (head, way, str(ranks), f"{length:,}", str(concurrency))
        served = f"{rate:,}" if rate else "at once"
        rows.append((*names, served, f"{sum(e['rate'] for e in results):,.0f}", f"{waiting:.0%}"))
        print_row(rows[-1])
    return build_markdown_table((*header, "waiting"), rows)


def print_memory(options: argparse.Namespace, workers: Workers) -> None:
    """Print the memory of processes that train for long, early and at the end."""
    steps = options.memory
    for head, way in product(options.heads, options.ways):
        job = build_training_job(head, options.lengths[0], steps)
        (result,), _ = workers.run_together(1, way, job)
        early, late = (f"{size / 1e6:.0f} MB" for size in result["memory"])
        print(f"{head} by {way}: {early} at step {steps // 10}, {late} at {steps}", flush=True)


def build_training_job(head: str, length: int, steps: int) -> dict[str, Any]:
    """Build the job that trains a small head."""
    return {
        "head": head, "layers": LAYERS_BY_HEAD[head], "hidden": HIDDEN, "length": length,
        "steps": steps, "concurrency": 16, "tokens_per_s": 0,
    }  # fmt: skip


def parse_numbers(text: str) -> list[int]:
    """Parse whole numbers with commas between them."""
    return [int(each) for each in text.split(",")]


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Parse shapes such as `6x7168`, with commas between them."""
    return [(int(a), int(b)) for a, b in (each.split("x") for each in text.split(","))]


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--shapes", type=parse_shapes, default="6x7168,4x4096,1x4096", help="of states"
    )
    parser.add_argument(
        "--lengths", type=parse_numbers, default="512,2048,8192", help="of documents"
    )
    parser.add_argument("--ranks", type=parse_numbers, default="1,2,4", help="processes that read")
    parser.add_argument(
        "--concurrency", type=parse_numbers, default="1,4,16", help="requests of each"
    )
    parser.add_argument("--ways", type=lambda s: s.split(","), default="folder,relay")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help=("seconds for each row of the table")
    )
    parser.add_argument(
        "--train", action="store_true", help=("train small heads, and measure their waiting")
    )
    parser.add_argument("--heads", type=lambda s: s.split(","), default="medusa,eagle3")
    parser.add_argument(
        "--rates", type=parse_numbers, default="2000,8000,0", help=("tokens/s; 0 for no limit")
    )
    parser.add_argument("--steps", type=int, default=40, help="steps for each row of that table")
    parser.add_argument("--memory", type=int, default=0, metavar="STEPS")
    parser.add_argument("--worker", choices=WORK, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> None:
    """Print the table of reading or of training, or the memory; or work for another process."""
    options = parse_arguments()
    if options.worker:
        torch.set_num_threads(1)
        while line := sys.stdin.readline():
            WORK[options.worker](json.loads(line))
        return
    most = 1 if options.memory else max(options.ranks)
    with Workers("train" if options.train or options.memory else "read", most) as workers:
        if options.memory:
            print_memory(options, workers)
        else:
            print(
                (build_training_table if options.train else build_reading_table)(options, workers)
            )


if __name__ == "__main__":
    main()
