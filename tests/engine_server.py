"""A server on loopback that writes hidden states as vLLM does, by a rule one can do by hand."""

import fcntl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.chat_server import ChatServer

HIDDEN = 2


def state(token: int, layer: int) -> list[float]:
    """What a layer makes of a token."""
    return [100.0 * layer + token, -1.0]


class EngineServer(ChatServer):
    """Context manager; `url` is the base URL.

    Attributes:
        layers: that it writes.
        folder: where it writes, in a folder named after its layers.
        write_s: how long after its reply a file is complete.
        change: applied to what is written.
    """

    path = "/v1/completions"

    def __init__(self, folder: Path, layers: list[int], delay_s: float = 0.0) -> None:
        super().__init__(delay_s)
        self.models = ({"id": "toy", "max_model_len": 17}, {"id": "other"})
        self.layers = layers
        self.folder = folder / "-".join(map(str, ["layers", *layers]))
        self.folder.mkdir()
        self.write_s = 0.0
        self.change: Callable[[dict[str, Tensor]], object] = lambda _: None
        self._counter = 0

    def answer(self, body: dict) -> dict:
        with self._lock:
            file = self.folder / f"{self._counter}.safetensors"
            self._counter += 1
        lock = file.with_name(f"{file.name}.lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(self.write_s)
            states = [[state(token, layer) for layer in self.layers] for token in body["prompt"]]
            tensors = {
                "hidden_states": torch.tensor(states),
                "token_ids": torch.tensor(body["prompt"]),
            }
            self.change(tensors)
            if tensors:
                save_file(tensors, file)
            lock.close()

        threading.Thread(target=write).start()
        return {"kv_transfer_params": {"hidden_states_path": str(file)}}
