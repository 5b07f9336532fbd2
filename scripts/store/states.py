"""What a capture takes of each packed sequence, from the target to host memory.

Letters: B sequences, T tokens, n tokens without padding, D hidden, V vocabulary, k teacher tokens.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from data.features import layout
from data.features.quantise import encode
from data.servers.endpoint import Endpoint
from data.servers.hidden_states import EngineStates, EngineTaps
from heads.layers.documents import Documents
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Taps, Target
from heads.target_model.remote import RemoteTarget
from scripts.store.pinned import PinnedBlocks
from train.loss.ranking import fast_topk

ROWS_PER_CHUNK = 1024
GROUP = 8
NUM_BATCHES_COPIED = 2
NUM_REQUESTS = 16

StatesOf = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""From a batch of packed sequences, [B, T] tensors on the CPU, to [B, T, D] `hidden_states` and
`layers.{i}`, in the target's dtype or any."""


def states_from_target(target: Target, layers: tuple[int, ...]) -> StatesOf:
    """The target's own forward pass."""

    def states_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        documents = Documents.of(batch["document_ids"]).on(target.device)
        ids, positions = (
            batch[name].to(target.device, non_blocking=True)
            for name in ("input_ids", "position_ids")
        )
        output = target.read(ids, positions, documents, Taps(layers))
        return {layout.HIDDEN: output.hidden_states} | {
            f"layers.{index}": states for index, states in output.layers.items()
        }

    return states_of


@contextmanager
def states_from_engine(
    url: str, target: RemoteTarget, layers: tuple[int, ...]
) -> Iterator[StatesOf]:
    """The passes of a server that has the same target.

    Args:
        url: base URL of the server.
        target: gives its final norm, which the server leaves out.
        layers: to read.

    Raises:
        InputError: the server does not write these states.
    """
    taps = EngineTaps(layers, target.num_layers, target.hidden_size, target.final_norm)
    with EngineStates(Endpoint(url, setting="engine"), taps, NUM_REQUESTS) as engine:

        def states_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
            names, columns = batch.keys(), batch.values()
            rows = [dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)]
            found = list(engine.read_rows(rows))
            return {name: torch.stack([states[name] for states in found]) for name in found[0]}

        yield states_of


@torch.no_grad()
def top_k(
    target: EmbeddingsAndHead, hidden_states: Tensor, k: int, asked: Tensor
) -> dict[str, Tensor]:
    """The target's likeliest tokens, where somebody will ask for them.

    Args:
        target: its output head.
        hidden_states: [n, D], after the final norm.
        k: at most V.
        asked: [n] bool, on the CPU; elsewhere the teacher gives no token any probability.

    Returns:
        [n, k] int32 ids, likeliest first, and [n, k] float16 log-probabilities over all V tokens.
    """
    shape, device = (len(hidden_states), k), hidden_states.device
    ids = torch.zeros(shape, dtype=torch.int32, device=device)
    log_probs = torch.full(shape, layout.NO_PROBABILITY, dtype=torch.float16, device=device)
    for places in asked.nonzero().squeeze(1).to(device, non_blocking=True).split(ROWS_PER_CHUNK):
        logits = target.logits(hidden_states[places]).float()
        best, which = fast_topk(logits, k, GROUP)
        ids[places] = which.int()
        log_probs[places] = (best - logits.logsumexp(-1, keepdim=True)).half()
    return {layout.TEACHER_IDS: ids, layout.TEACHER_LOG_PROBS: log_probs}


def stored(
    target: EmbeddingsAndHead,
    contents: layout.Contents,
    states: Mapping[str, Tensor],
    tokens: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """What a store holds of the states [n, D] of a sequence, on the target's device.

    Args:
        target: its output head.
        contents: what is stored.
        states: by name.
        tokens: [n], what `token_fields` gives.
    """
    found = {}
    for name in contents.states:
        values, scale = encode(states[name].to(target.device), contents.format)
        found[name] = values
        if scale is not None:
            found[name + layout.SCALE] = scale
    if contents.top_k:
        # Losses hold heads against the target wherever a token of the document follows.
        asked = tokens["document_ids"].roll(-1) == tokens["document_ids"]
        asked[-1] = False
        found |= top_k(target, states[layout.HIDDEN].to(target.device), contents.top_k, asked)
    return found


def token_fields(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ids, documents and masks [n] of a packed sequence, as they are stored."""
    num_tokens = int((row["document_ids"] >= 0).sum())
    return {field.name: row[field.name][:num_tokens].to(field.dtype) for field in layout.TOKENS}


@dataclass(frozen=True)
class Copied:
    """Tensors in host memory, once `ready`; at once if that is unset."""

    tensors: dict[str, Tensor]
    ready: torch.cuda.Event | None

    def wait(self) -> dict[str, Tensor]:
        """The tensors, there."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.tensors


class Copies:
    """Brings tensors to host memory beside the computation, on a stream of its own.

    A program that runs ahead of its GPU would fill it, so copies under way are bounded: by those
    of `NUM_BATCHES_COPIED` batches, or the last ones of a batch would wait for its first.

    Args:
        device: where tensors come from.
        batch_size: copies of a batch.
        num_bytes: of all tensors that there will be, about.
    """

    def __init__(self, device: torch.device, batch_size: int, num_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._most = NUM_BATCHES_COPIED * batch_size
        self._blocks = PinnedBlocks(num_bytes)
        self._under_way: deque[torch.cuda.Event] = deque()

    def take(self, tensors: Mapping[str, Tensor]) -> Copied:
        """Starts a copy of tensors that lie on the device; those of the CPU stay."""
        if self._stream is None:
            return Copied(dict(tensors), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            host = {name: self._copy(tensor) for name, tensor in tensors.items()}
            ready = torch.cuda.Event()
            ready.record()
        self._under_way.append(ready)
        if len(self._under_way) > self._most:
            self._under_way.popleft().synchronize()
        return Copied(host, ready)

    def _copy(self, tensor: Tensor) -> Tensor:
        # The allocator may not give this memory away before the copy is through.
        tensor.record_stream(self._stream)  # type: ignore[arg-type]
        return self._blocks.like(tensor).copy_(tensor, non_blocking=True)
