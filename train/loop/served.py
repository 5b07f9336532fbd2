"""Training from the states that serving engines compute: the target's layers are nowhere here.

Letters: S tokens of a document, T tokens of a packed sequence, D hidden.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count

import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from data.prepared.pack import PackedDataset
from data.servers.endpoint import Endpoint
from data.servers.hidden_states import HiddenStatesServer, NotReadError, ServerTaps
from data.servers.pool import StatesPool, documents_of, placed
from heads.target_model.attention_pattern import AttentionPattern
from heads.target_model.model import Taps, TargetOutput
from heads.target_model.remote import RemoteTarget
from train.batch.states import LAYER
from train.loop import replay
from train.loop.engine_probe import EngineProbe, told

NUM_REQUESTS = 16
"""Documents that a server is asked for at a time."""
STEPS_AHEAD = 4
"""Optimizer steps whose sequences are asked for together."""
NUM_RETRIES = 8
"""Of a request; with waits of half a second to a minute they take two minutes."""
PADDING = -1
"""Document of tokens that nobody learns from."""
TIMEOUT_S = 600.0
"""Of a request. Long: some versions of vLLM end themselves over a request that is given up."""


@contextmanager
def opened(
    urls: Sequence[str],
    target: RemoteTarget,
    layers: Iterable[int],
    text: list[int],
    final_norm: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[StatesPool]:
    """Servers of a target's hidden states, each probed.

    Args:
        urls: base URLs.
        target: the parts of it that are here.
        layers: indices of `output_hidden_states`.
        text: token ids of the data, to probe with.
        final_norm: for `hidden_states`, on the CPU; None leaves those out.

    Raises:
        InputError: a server does not give them.
    """
    recurrent = AttentionPattern.of(target.config, target.name).recurrent
    size = target.num_layers, target.hidden_size
    taps = ServerTaps(tuple(layers), *size, final_norm, recurrent)
    endpoints = [
        Endpoint(url, max_retries=NUM_RETRIES, timeout_s=TIMEOUT_S, setting="target.engine")
        for url in urls
    ]
    servers = [HiddenStatesServer(each, taps, NUM_REQUESTS) for each in endpoints]
    probe = EngineProbe(target, text)
    with StatesPool(servers, probe) as pool:
        for server in servers:
            pool.told.append(f"{server.endpoint}: {told(probe(server))}")
        if PartialState().is_main_process:
            print(*pool.told, sep="\n")  # noqa: T201
        yield pool


def longest_document(rows: PackedDataset) -> list[int]:
    """Token ids of the longest document of the first sequence."""
    return max(documents_of(rows[0]), key=len)


@dataclass
class ServedRows:
    """Packed sequences with the states of their documents, under the names of `with_states`.

    A document whose states cannot be had is not learnt from, so that all processes keep step.

    Attributes:
        rows: without states.
        pool: has them.
        lost: counts the documents that are left out, in whichever thread.
    """

    rows: PackedDataset
    pool: StatesPool
    lost: Iterator[int] = field(default_factory=partial(count, 1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        documents, ids = documents_of(row), row["document_ids"].clone()
        found: list[dict[str, Tensor]] = []
        for number, coming in enumerate([self.pool.submit(each) for each in documents]):
            try:
                found.append(coming.result())
            except NotReadError as error:
                found.append({})
                ids[row["document_ids"] == number] = PADDING
                tqdm.write(
                    f"document {number} of sequence {index} is left out, the {next(self.lost)}. "
                    f"of this run: {error}"
                )
        dtype = next((t.dtype for states in found for t in states.values()), torch.bfloat16)
        states = {}
        for layer in self.pool.layers:
            name, width = f"{LAYER}{layer}", self.pool.hidden_size
            parts = [
                each[name] if each else torch.zeros(len(lost), width, dtype=dtype)
                for each, lost in zip(found, documents, strict=True)
            ]
            states[name] = placed(row, parts)
        return {**row, "document_ids": ids, **states}


class ServedReplay(replay.Replay):
    """Replay over answers of the servers, from which their states come too."""

    def __init__(
        self,
        target: RemoteTarget,
        pool: StatesPool,
        prompts: list[list[int]],
        depth: int,
        taps: Taps,
    ) -> None:
        super().__init__(prompts, depth, taps)
        self.target, self.pool = target, pool

    @cached_property
    def answers(self) -> list[tuple[list[int], TargetOutput]]:
        """Answers and states."""
        found = self.pool.answers(self.prompts, replay.MAX_NEW_TOKENS)
        return [(ids, self._output(states)) for ids, states in found]

    def _output(self, states: dict[str, Tensor]) -> TargetOutput:
        target = self.target
        moved = {name: each[None].to(target.device, target.dtype) for name, each in states.items()}
        last = target.final_norm(moved[f"{LAYER}{target.num_layers}"])
        return TargetOutput(last, {index: moved[f"{LAYER}{index}"] for index in self.taps.layers})
