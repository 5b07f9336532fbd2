"""vLLM's server on a CPU, able to write hidden states there; its arguments are the server's own.

Run by the Python of vLLM's own environment:

    python vllm_server.py --model FOLDER --speculative-config ...
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import vllm_dflash  # noqa: F401  mends it

# isort: split
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector


class Ended:
    """A CUDA stream or event where all work is done when it is asked for."""

    def record(self, *_: object) -> None: ...
    def wait_event(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class HostTorch:
    """torch, for a module that copies from a GPU through pinned memory, where there is none."""

    cuda = SimpleNamespace(Event=Ended, Stream=Ended, stream=lambda _: nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, tensor: torch.Tensor, device: str, pin_memory: bool) -> torch.Tensor:
        return torch.empty_like(tensor, device=device)


# Outside `main`: the worker is a process of its own, which imports this file again.
example_hidden_states_connector.torch = HostTorch()

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
