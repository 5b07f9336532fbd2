"""Serving engines that run a target's layers: opened, probed, and asked for texts.

Letters: S tokens, D hidden.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from accelerate import PartialState
from torch import Tensor

from data.features.format import LAYER
from data.servers.endpoint import Endpoint
from data.servers.hidden_states import HiddenStatesServer, ServerTaps
from data.servers.pool import StatesPool
from eval.measure.engine_probe import EngineProbe, told
from heads.target_model.attention_pattern import AttentionPattern
from heads.target_model.model import Taps, TargetOutput
from heads.target_model.remote import RemoteTarget

NUM_REQUESTS = 16
"""Documents that a server is asked for at a time."""
NUM_RETRIES = 8
"""Of a request; with waits of half a second to a minute they take two minutes."""
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


def answered(
    pool: StatesPool,
    target: RemoteTarget,
    prompts: list[list[int]],
    max_new_tokens: int,
    taps: Taps,
) -> list[tuple[list[int], TargetOutput]]:
    """The target's greedy answers, and its states [1, S, D] of each prompt and answer.

    Args:
        pool: servers that give the state of the last layer, and those of `taps`.
        target: its final norm.
        prompts: token ids.
        max_new_tokens: tokens of an answer at most.
        taps: the states that a head reads.

    Raises:
        InputError: see `StatesPool.read`.
    """

    def output(states: dict[str, Tensor]) -> TargetOutput:
        moved = {name: each[None].to(target.device, target.dtype) for name, each in states.items()}
        last = target.final_norm(moved[f"{LAYER}{target.num_layers}"])
        return TargetOutput(last, {index: moved[f"{LAYER}{index}"] for index in taps.layers})

    return [(ids, output(states)) for ids, states in pool.answers(prompts, max_new_tokens)]
