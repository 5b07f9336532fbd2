"""Hidden states of a frozen target from a vLLM server, for targets beyond one GPU.

The server runs with the speculative method `extract_hidden_states`: it writes the hidden states of
a prompt to a file on shared storage and names the file in its reply.

Source: `example_hidden_states_connector.py` of vLLM 0.32 and 0.33 (pull request #46301).

Letters: S tokens of a document, T tokens of a packed sequence, L layers in a file, D hidden.
"""

import json
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import torch
from torch import Tensor

from conf.errors import InputError
from data.servers.http_client import (
    WHOLE_DISTRIBUTION,
    Endpoint,
    RequestFailedError,
    RequestRefusedError,
    SyncEndpointClient,
)
from data.servers.state_files import HiddenStatesError, SharedFolder, StateFiles

FIRST_VERSION = (0, 26)
"""First vLLM that writes hidden states as they are read here, as (major, minor)."""
KEPT_FREE = 2
"""Free bytes of the storage, as a multiple of all requested bytes, above which another file is
requested."""
TRANSFER = "kv_transfer_params"
RequestSettings = Mapping[str, Any]
"""Request settings of OpenAI's protocol or of vLLM's additions."""


class ServerUnavailableError(HiddenStatesError):
    """A server does not answer, or cannot answer now."""


@dataclass(frozen=True)
class ServerFeatureLayers:
    """Hidden states that a server writes, and their names here.

    Layers are numbered as in vLLM: 0 is the embedding, i the output of decoder layer i - 1 before
    the final norm, so `num_layers` is the last one. The server does not give the state after the
    final norm, which is computed here, as in speculators' trainers.

    Attributes:
        layers: indices of `output_hidden_states` to return as `layers.{i}`.
        num_layers: decoder layers of the target.
        hidden_size: D.
        final_norm: the target's final norm on the CPU, which gives `hidden_states`; None omits
            `hidden_states`.
        target: Hub id or folder that the server is started with.
    """

    layers: tuple[int, ...]
    num_layers: int
    hidden_size: int
    final_norm: Callable[[Tensor], Tensor] | None
    target: str = "MODEL"

    def __post_init__(self) -> None:
        outside = [index for index in self.layers if not 0 <= index <= self.num_layers]
        if outside:
            raise InputError(
                f"layers={outside}: not in the target, which has hidden states "
                f"0..{self.num_layers}; name these"
            )
        if not self.written_layers:
            raise InputError("layers=[]: no hidden state to read; name a layer")

    @property
    def written_layers(self) -> list[int]:
        """[L] layers in a file, sorted and without repetitions, as vLLM writes them."""
        last = () if self.final_norm is None else (self.num_layers,)
        return sorted({*self.layers, *last})

    @property
    def folder_name(self) -> str:
        """Name of the folder of the files. The name tells readers the layers."""
        return "-".join(["layers", *map(str, self.written_layers)])

    def serve_options(self, storage: str | Path) -> list[str]:
        """Build the arguments of `vllm serve` that make it write these hidden states.

        Args:
            storage: folder that server and reader see under one name.
        """
        layers = {"eagle_aux_hidden_state_layer_ids": self.written_layers}
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": layers},
        }
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": f"{storage}/{self.folder_name}"},
        }
        return [
            *("--speculative-config", json.dumps(speculative)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]

    @torch.no_grad()
    def split_layers(self, written: Tensor) -> dict[str, Tensor]:
        """Split a file's states [S, L, D] into `layers.{i}` and `hidden_states`, [S, D] each."""
        by_layer = dict(zip(self.written_layers, written.unbind(1), strict=True))
        states = {f"layers.{index}": by_layer[index] for index in self.layers}
        if self.final_norm is not None:
            states["hidden_states"] = self.final_norm(by_layer[self.num_layers]).to(written.dtype)
        return states


class HiddenStatesClient(SyncEndpointClient):
    """Client of a server of hidden states, as a context manager that tries the server first.

    `eval.measure.engine_answers` checks that the server has this target's weights.

    Attributes:
        max_model_len: largest number of tokens, including the generated one; None if unknown.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        taps: ServerFeatureLayers,
        concurrency: int,
        files: StateFiles | None = None,
    ) -> None:
        """Keep the settings; connect later.

        Args:
            endpoint: server and model. Without a model, the first listed one is used.
            taps: hidden states that the server was started to write.
            concurrency: number of documents in flight.
            files: access to the server's files. Unset: a folder shared with this machine.
        """
        super().__init__(endpoint, concurrency)
        self.taps = taps
        self.files = files or SharedFolder(endpoint.timeout_s)
        self.concurrency = concurrency
        self.model = endpoint.model
        self.max_model_len: int | None = None
        self._room = threading.Condition()
        self._num_bytes = 0  # requested but not read yet

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.files.close()

    def connect(self) -> None:
        """Request the states of a first document.

        Raises:
            InputError: the server does not serve the model or its states; the message says what to
                change.
        """
        try:
            listed = self.portal.call(self.client.request_models)
        except InputError as error:
            raise InputError(f"{error}; {self._format_serve_hint()}") from error
        models = {str(model["id"]): model for model in listed}
        self.model = self.model or next(iter(models))
        if self.model not in models:
            raise InputError(
                f"{self.endpoint}: serves no model {self.model}; it lists {sorted(models)}: name "
                "one of these"
            )
        served = models[self.model]
        base = models.get(str(served.get("parent")), {})  # of an adapter
        self.max_model_len = served.get("max_model_len") or base.get("max_model_len")
        if version := self.portal.call(self.client.request_version):
            check_version(version, str(self.endpoint))
        self.request_states([0])

    def request_states(self, token_ids: list[int]) -> dict[str, Tensor]:
        """Request the hidden states of one document.

        Args:
            token_ids: S tokens.

        Returns:
            `layers.{i}` and `hidden_states`, each [S, D] in the server's dtype, on the CPU.

        Raises:
            InputError: the server does not answer, or with other hidden states; the message says
                what to change.
        """
        with self._reserve_storage(len(token_ids)):
            return self.portal.call(self._request_tokens, token_ids, 1)[1]

    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Request the log-probability of each token but the first, given the tokens before it.

        Raises:
            InputError: as `request_states`.
        """
        with self._reserve_storage(len(token_ids)):
            choice, _ = self.portal.call(self._request_tokens, token_ids, 1, {"prompt_logprobs": 1})
        entries = (choice.get("prompt_logprobs") or [])[1:]
        try:
            return [each[str(i)]["logprob"] for i, each in zip(token_ids[1:], entries, strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.endpoint}: returns no prompt_logprobs; serve with vLLM 0.32 or newer"
            ) from error

    def request_answer(
        self,
        prompt: list[int],
        max_new_tokens: int,
        request_settings: RequestSettings,
        include_outputs: bool = False,
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Request the target's answer to a prompt, with hidden states.

        Args:
            prompt: token ids.
            max_new_tokens: largest number of tokens of the answer.
            request_settings: further settings of the request, e.g. `temperature` and `seed`.
            include_outputs: whether the states are of all tokens but the answer's last, in place of
                the prompt's.

        Returns:
            Token ids of the answer, including the ending one, and states as from `request_states`.

        Raises:
            InputError: as `request_states`.
        """
        settings = {**WHOLE_DISTRIBUTION, **request_settings, "return_token_ids": True}
        settings |= {TRANSFER: {"include_output_tokens": True}} if include_outputs else {}
        with self._reserve_storage(len(prompt) + (max_new_tokens if include_outputs else 0)):
            choice, states = self.portal.call(
                self._request_tokens, prompt, max_new_tokens, settings
            )
        return choice["token_ids"], states

    @contextmanager
    def _reserve_storage(self, num_tokens: int) -> Iterator[None]:
        """Wait until the storage has room for another file beside the requested ones.

        On a full disk the server gives no error, only a short file.

        Args:
            num_tokens: largest number of tokens in the file.

        Raises:
            HiddenStatesError: other files fill the storage.
        """
        itemsize = 4  # float32, the widest dtype of a server
        num_bytes = num_tokens * len(self.taps.written_layers) * self.taps.hidden_size * itemsize
        until = time.monotonic() + self.endpoint.timeout_s
        with self._room:
            while self._num_bytes and (free := self.files.free_bytes()) is not None:
                if free > KEPT_FREE * (self._num_bytes + num_bytes):
                    break
                if not self._room.wait(until - time.monotonic()):
                    raise HiddenStatesError(
                        f"{self.endpoint}: only {free} bytes are free where it writes"
                    )
            self._num_bytes += num_bytes
        try:
            yield
        finally:
            with self._room:
                self._num_bytes -= num_bytes
                self._room.notify_all()

    async def _request_tokens(
        self, token_ids: list[int], num_new: int, settings: RequestSettings | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Request up to `num_new` tokens, with the hidden states of all tokens that were read.

        Returns:
            The reply's first choice, and states as from `request_states`.
        """
        settings = settings or {}
        num_tokens = len(token_ids)
        if self.max_model_len is not None and num_tokens + num_new > self.max_model_len:
            raise InputError(
                f"{self.endpoint}: a document of {num_tokens} tokens is too long, as the server "
                f"takes {self.max_model_len - num_new} and {num_new} more; serve with "
                f"--max-model-len {num_tokens + num_new}, or set data.max_length lower"
            )
        body = {"model": self.model, "prompt": token_ids, "max_tokens": num_new, "temperature": 0}
        body |= settings
        try:
            reply = await self.client.request_json("POST", "completions", body)
        except (RequestFailedError, RequestRefusedError) as error:
            failed = isinstance(error, RequestFailedError)
            raise (ServerUnavailableError if failed else HiddenStatesError)(
                f"{self.endpoint}: no hidden states of a document of {num_tokens} tokens: {error}"
            ) from error
        path = (reply.get(TRANSFER) or {}).get("hidden_states_path")
        if path is None:
            raise InputError(
                f"{self.endpoint}: returns no hidden states; {self._format_serve_hint()}"
            )
        if Path(path).parent.name != self.taps.folder_name:
            raise InputError(
                f"{self.endpoint}: writes {path}, outside of {self.taps.folder_name}, so perhaps "
                f"other layers; {self._format_serve_hint()}"
            )
        choice = (reply.get("choices") or [{}])[0]
        if "return_token_ids" in settings and not choice.get("token_ids"):
            raise InputError(
                f"{self.endpoint}: returns no token ids of its answers; serve with a newer vLLM"
            )
        ids = token_ids + (choice["token_ids"][:-1] if TRANSFER in settings else [])
        return choice, await anyio.to_thread.run_sync(self._load_states, Path(path), ids)

    def _load_states(self, path: Path, token_ids: list[int]) -> dict[str, Tensor]:
        """Load and check the hidden states in a file that the server named."""
        try:
            written = self.files.load_and_delete(path, token_ids)
        except InputError as error:
            raise type(error)(f"{self.endpoint}: {error}") from error
        shape = [len(token_ids), len(self.taps.written_layers), self.taps.hidden_size]
        if list(written.shape) != shape:
            raise InputError(
                f"{self.endpoint}: hidden states have shape {list(written.shape)}, not {shape} "
                "(tokens, layers, hidden size), so it serves another target or other layers; "
                f"{self._format_serve_hint()}"
            )
        norms = torch.linalg.vector_norm(written, dim=-1)  # one pass; narrow dtypes may overflow
        if not norms.isfinite().all() and not written.isfinite().all():
            raise HiddenStatesError(
                f"{self.endpoint}: hidden states have NaN or infinity; check the server's --dtype"
            )
        # Only a first token may be all zeros, if its embedding is zero.
        if not norms[1:, -1].all() and not written[1:, -1].any(dim=1).all():
            raise HiddenStatesError(
                f"{self.endpoint}: hidden states are zeros, so it left them out; see the server's "
                "log"
            )
        return self.taps.split_layers(written)

    def _format_serve_hint(self) -> str:
        options = self.taps.serve_options("/dev/shm")
        return f"serve with: {shlex.join(['vllm', 'serve', self.taps.target, *options])}"


def check_version(version: str, who: str) -> None:
    """Refuse a vLLM that writes hidden states in another format, or none.

    Args:
        version: version as the server gives it. A version without numbers, and 0.1.dev1, are builds
            of the newest source.
        who: name of the server, for the message.

    Raises:
        InputError: the version is too old.
    """
    match = re.match(r"v?(\d+)\.(\d+)", version)
    numbers = (int(match[1]), int(match[2])) if match else FIRST_VERSION
    is_untagged = numbers[0] == 0 and numbers[1] < 2 and "dev" in version
    if numbers < FIRST_VERSION and not is_untagged:
        raise InputError(
            f"{who}: vLLM {version} writes hidden states in an older format, or none; serve with "
            "0.32 or newer"
        )
