"""Hidden states of a frozen target from a vLLM server, for targets beyond one GPU.

The server runs with the speculative method `extract_hidden_states`: it writes the states of a
request's prompt to a file on storage that both machines see, and names the file in its reply.

Letters: S tokens of a document, T tokens of a packed sequence, L layers in a file, D hidden.
"""

import fcntl
import itertools
import json
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import anyio
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from conf.errors import InputError
from data.servers.endpoint import Connection, Endpoint, RowFailed, RowRefused

# How long a file that the server has named may take to show on a network file system.
VISIBLE_S = 10.0
LOOK_EVERY_S = 0.01


@dataclass(frozen=True)
class ServerTaps:
    """The states that a server writes, and their names here.

    Layers have one numbering here and in vLLM: 0 is the embedding, i the output of decoder
    layer i - 1, before the final norm, and so `num_layers` the last one. The state after the
    final norm is not on offer (speculators' trainers too norm it themselves).

    Attributes:
        layers: indices of `output_hidden_states` that are wanted under `layers.{i}`.
        num_layers: decoder layers of the target.
        hidden_size: D.
        final_norm: the target's, on the CPU, for `hidden_states`; None leaves those out.
    """

    layers: tuple[int, ...]
    num_layers: int
    hidden_size: int
    final_norm: Callable[[Tensor], Tensor] | None

    def __post_init__(self) -> None:
        outside = [index for index in self.layers if not 0 <= index <= self.num_layers]
        if outside:
            raise InputError(f"layers={outside}: the target has hidden states 0..{self.num_layers}")
        if not self.written:
            raise InputError("layers=[]: nothing is to be read; name a layer")

    @property
    def written(self) -> list[int]:
        """Layers in a file, `[L]`: vLLM sorts them, and writes none twice."""
        last = () if self.final_norm is None else (self.num_layers,)
        return sorted({*self.layers, *last})

    @property
    def folder(self) -> str:
        """Name of the folder that files lie in; a server says nowhere else what it writes."""
        return "-".join(["layers", *map(str, self.written)])

    def serve_options(self, storage: str | Path) -> list[str]:
        """Arguments of `vllm serve` that make it write these states.

        Args:
            storage: the folder that server and reader share, under one name.
        """
        layers = {"eagle_aux_hidden_state_layer_ids": self.written}
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": layers},
        }
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": f"{storage}/{self.folder}"},
        }
        return [
            *("--speculative-config", json.dumps(speculative)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]

    @torch.no_grad()
    def named(self, written: Tensor) -> dict[str, Tensor]:
        """`layers.{i}` and `hidden_states`, each [S, D], of a file's states [S, L, D]."""
        # Copies, so that the disk space of the deleted file is given back.
        at = {index: written[:, place].clone() for place, index in enumerate(self.written)}
        states = {f"layers.{index}": at[index] for index in self.layers}
        if self.final_norm is not None:
            states["hidden_states"] = self.final_norm(at[self.num_layers]).to(written.dtype)
        return states


class HiddenStatesServer(Connection):
    """A server of documents' hidden states; a context manager, whose start tries it out.

    The server must serve this target: its model's name is in `model`, its weights nobody checks.
    """

    def __init__(self, endpoint: Endpoint, taps: ServerTaps, concurrency: int) -> None:
        """Opens no connection yet.

        Args:
            endpoint: the server; without a model it is the first one that it lists.
            taps: what the server was started to write.
            concurrency: documents in flight.
        """
        super().__init__(endpoint, concurrency)
        self.taps = taps
        self.concurrency = concurrency
        self.model = endpoint.model
        self.max_model_len: int | None = None
        """Tokens that the server takes, the one that it generates included; None: not told."""

    def start(self) -> None:
        """Raises InputError unless a first document can be read."""
        models = {str(model["id"]): model for model in self.portal.call(self.client.models)}
        self.model = self.model or next(iter(models))
        if self.model not in models:
            raise self._error(f"has no model {self.model}; it lists {sorted(models)}")
        self.max_model_len = models[self.model].get("max_model_len")
        self.read([0])

    def read(self, token_ids: list[int]) -> dict[str, Tensor]:
        """States of one document.

        Args:
            token_ids: of S tokens.

        Returns:
            `layers.{i}` and `hidden_states`, each [S, D] in the server's dtype, on the CPU.

        Raises:
            InputError: the server does not answer, or not with these states; the message says
                what to change.
        """
        return next(self.read_many([token_ids]))

    def read_many(self, documents: Iterable[list[int]]) -> Iterator[dict[str, Tensor]]:
        """States of each document as `read` gives them, in order, with several in flight."""
        pending: deque[Future[dict[str, Tensor]]] = deque()
        queue = iter(documents)
        try:
            while True:
                for document in itertools.islice(queue, self.concurrency - len(pending)):
                    pending.append(self.portal.start_task_soon(self._read, document))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def read_rows(self, rows: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """States of the documents of packed sequences, with those of later ones in flight.

        One sequence often holds fewer documents than keep the server busy.

        Args:
            rows: items of `data.prepared.pack.PackedDataset`, of T tokens.

        Yields:
            As `read`, each [T, D], with zeros on padding; in order.
        """
        rows, ahead = itertools.tee(rows)
        states = self.read_many(document for row in ahead for document in documents_of(row))
        for row in rows:
            documents = list(itertools.islice(states, len(documents_of(row))))
            yield {name: _placed(row, [d[name] for d in documents]) for name in documents[0]}

    async def _read(self, token_ids: list[int]) -> dict[str, Tensor]:
        num_tokens = len(token_ids)
        if self.max_model_len is not None and num_tokens >= self.max_model_len:
            raise self._error(
                f"a document of {num_tokens} tokens, and the server takes "
                f"{self.max_model_len - 1} and one more: serve with "
                f"--max-model-len {num_tokens + 1}, or set data.max_length lower"
            )
        body = {"model": self.model, "prompt": token_ids, "max_tokens": 1, "temperature": 0}
        try:
            reply = await self.client.request("POST", "completions", body)
        except (RowFailed, RowRefused) as error:
            raise self._error(f"no states of a document of {num_tokens} tokens: {error}") from error
        path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if path is None:
            raise self._error(f"answers without hidden states; {self._how_to_serve()}")
        if Path(path).parent.name != self.taps.folder:
            raise self._error(
                f"writes {path}, and not to {self.taps.folder}: it may be other layers; "
                f"{self._how_to_serve()}"
            )
        return await anyio.to_thread.run_sync(self._collect, Path(path), token_ids)

    def _collect(self, path: Path, token_ids: list[int]) -> dict[str, Tensor]:
        """Loads, deletes and checks a file that the server named."""
        self._wait_for_writer(path)
        try:
            tensors = load_file(path)  # mapped from the file
        except (OSError, SafetensorError) as error:
            raise self._error(
                f"{path} was not written whole ({error}): the disk may be full, see the "
                "server's log"
            ) from error
        # Also keeps a reply from having any other file deleted.
        if tensors.get("token_ids", torch.empty(0)).tolist() != token_ids:
            raise self._error(f"{path} does not hold the tokens that were sent")
        try:
            path.unlink()
            _lock_of(path).unlink()
        except OSError as error:
            raise self._error(
                f"cannot delete {path}, and the disk would fill up: {error}"
            ) from error
        written = tensors["hidden_states"]
        wanted = [len(token_ids), len(self.taps.written), self.taps.hidden_size]
        if list(written.shape) != wanted:
            raise self._error(
                f"states of shape {list(written.shape)} and not {wanted} (tokens, layers, hidden "
                f"size): it serves another target, or other layers; {self._how_to_serve()}"
            )
        if not written.isfinite().all():
            raise self._error("states hold NaN or infinity: check the server's --dtype")
        # Only a first token can have such states, where its embedding is zero.
        if not written[1:, -1].any(dim=1).all():
            raise self._error("states of zeros: it left them out, see the server's log")
        return self.taps.named(written)

    def _wait_for_writer(self, path: Path) -> None:
        """Waits until the file is closed: until then the server holds the lock beside it."""
        start = time.monotonic()
        while True:
            passed_s = time.monotonic() - start
            try:
                with _lock_of(path).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if passed_s > self.endpoint.timeout_s:
                    raise self._error(
                        f"{path} is not written after {passed_s:.0f} s: see the server's log"
                    ) from error
            except FileNotFoundError as error:
                if passed_s > VISIBLE_S:
                    raise self._error(
                        f"{error.filename} cannot be seen from this machine: mount the server's "
                        "shared_storage_path here under the same name"
                    ) from error
            except OSError as error:
                raise self._error(f"cannot lock {_lock_of(path)}: {error}") from error
            time.sleep(LOOK_EVERY_S)

    def _how_to_serve(self) -> str:
        options = self.taps.serve_options("/dev/shm")
        return f"serve with: {shlex.join(['vllm', 'serve', str(self.model), *options])}"

    def _error(self, text: str) -> InputError:
        return InputError(f"{self.endpoint}: {text}")


def documents_of(row: dict[str, Tensor]) -> list[list[int]]:
    """Token ids of each document of a packed sequence, in order."""
    real = row["document_ids"] >= 0
    lengths = torch.unique_consecutive(row["document_ids"][real], return_counts=True)[1]
    return [part.tolist() for part in row["input_ids"][real].split(lengths.tolist())]


def _placed(row: dict[str, Tensor], documents: list[Tensor]) -> Tensor:
    """[T, D] where [S, D] of each document lie in place."""
    states = torch.cat(documents)
    placed = states.new_zeros(len(row["document_ids"]), states.shape[1])
    placed[row["document_ids"] >= 0] = states
    return placed


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
