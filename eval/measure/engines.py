"""Serving engines that run a target's layers: opens, checks and asks them.

Letters: S tokens, D hidden.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from accelerate import PartialState
from torch import Tensor

from conf.errors import InputError
from conf.settings.target import TargetConfig
from data.features.store_format import LAYER_PREFIX
from data.servers.hidden_states import HiddenStatesClient, ServerFeatureLayers
from data.servers.http_client import Endpoint
from data.servers.server_pool import HiddenStatesPool
from data.servers.state_files import RelayFiles, StateFiles
from eval.decode.generation_config import StopRules
from eval.measure.answers import AnswerWithStates
from eval.measure.engine_probe import EarlyState, EngineProbe, format_probe
from heads.target_model.architecture import AttentionPattern
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import FeatureLayers, TargetOutput
from heads.target_model.remote import RemoteTarget, load_early_layers

NUM_REQUESTS = 16
"""Documents to request from a server at a time."""
NUM_RETRIES = 1
"""Retries of a request after a dropped connection; then other servers are asked."""
TIMEOUT_S = 600.0
"""Timeout of a request. It is long, as some versions of vLLM crash when a request is cancelled."""
PENALTY = "repetition_penalty"
"""The only setting of a generation config that a server takes."""


@contextmanager
def open_states_pool(
    config: TargetConfig,
    target: RemoteTarget,
    layers: Iterable[int],
    text: list[int],
    final_norm: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[HiddenStatesPool]:
    """Open servers of a target's hidden states, and check each.

    Args:
        config: settings with the servers, and with relays for folders that are not visible here.
        target: the parts of it in this process.
        layers: indices of `output_hidden_states`.
        text: token ids of the data, to check with.
        final_norm: norm for `hidden_states`, on the CPU; None leaves `hidden_states` out.

    Raises:
        InputError: a server does not give these states.
    """
    recurrent = AttentionPattern.from_config(target.config, target.name).is_recurrent
    size = target.num_layers, target.hidden_size
    taps = ServerFeatureLayers(tuple(layers), *size, final_norm, recurrent, target.name)
    endpoints = [
        Endpoint(
            url,
            config.adapter_name,
            max_retries=NUM_RETRIES,
            timeout_s=TIMEOUT_S,
            setting="target.engine",
        )
        for url in config.engine
    ]
    files: list[StateFiles | None] = [RelayFiles(url, TIMEOUT_S) for url in config.relay]
    servers = [
        HiddenStatesClient(endpoint, taps, NUM_REQUESTS, way)
        for endpoint, way in zip(endpoints, files or [None] * len(endpoints), strict=True)
    ]
    probe = EngineProbe(target, text)
    with HiddenStatesPool(servers, probe) as pool:
        main = PartialState().is_main_process
        first = replace(probe, early=_load_early_state(config, taps)) if main else probe
        for server in servers:
            pool.server_lines.append(f"{server.endpoint}: {format_probe(first(server))}")
        if main:
            print(*pool.server_lines, sep="\n")  # noqa: T201
        yield pool


def _load_early_state(
    config: TargetConfig, taps: ServerFeatureLayers
) -> tuple[int, EarlyState] | None:
    """A server's first state between layers, and the same state computed here."""
    between = [index for index in taps.layers if 0 < index < taps.num_layers]
    own = load_early_layers(config, min(between)) if between else None
    return None if own is None else (min(between), own)


def build_request_settings(
    target: EmbeddingsAndOutputHead, who: str = "target.engine", temperature: float = 0.0
) -> dict[str, Any]:
    """Request settings that apply the target's generation config.

    Raises:
        InputError: the config has settings that a server does not take.
    """
    asked = target.logits_processing
    if untold := [f"{name}={value}" for name, value in asked.items() if name != PENALTY]:
        raise InputError(
            f"{who}: does not take {', '.join(untold)}, which the generation config of "
            f"{target.name} sets; allowed: {PENALTY}; remove the others from generation_config.json"
        )
    told: dict[str, Any] = {"temperature": temperature, PENALTY: asked.get(PENALTY, 1.0)}
    return told | ({"ignore_eos": True} if target.ignores_stops else {})


@dataclass(frozen=True)
class EngineAnswerSource:
    """Texts of a target whose layers run in engines.

    Attributes:
        pool: source of the last layer's state and of those that a head reads.
        target: the parts in this process.
    """

    pool: HiddenStatesPool
    target: RemoteTarget

    @property
    def preferred_batch_size(self) -> int:
        """See `Texts`."""
        return self.pool.concurrency

    def stream_answers(
        self, prompts: Sequence[list[int]], max_new_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """See `Texts`."""
        told = [build_request_settings(self.target)] * len(prompts)
        for number, ids in self.pool.stream_answers(prompts, max_new_tokens, told):
            yield number, StopRules.from_target(self.target).cut_after_end([], ids)

    def answer_with_states(
        self, prompts: Sequence[list[int]], max_new_tokens: int, taps: FeatureLayers
    ) -> list[AnswerWithStates]:
        """See `Texts`."""
        found = []
        answers = self.pool.request_answers_with_states(
            prompts, max_new_tokens, build_request_settings(self.target)
        )
        for prompt, (whole, states) in zip(prompts, answers, strict=True):
            ids = StopRules.from_target(self.target).cut_after_end([], whole)
            found.append((ids, self._build_target_output(states, len(prompt) + len(ids) - 1, taps)))
        return found

    def encode_response(
        self, prompt: list[int], response: list[int], taps: FeatureLayers
    ) -> TargetOutput:
        """See `Texts`."""
        ids = [*prompt, *response[:-1]]
        return self._build_target_output(self.pool.request_states(ids), len(ids), taps)

    def _build_target_output(
        self, states: dict[str, Tensor], num_tokens: int, taps: FeatureLayers
    ) -> TargetOutput:
        target = self.target
        here = {
            name: each[None, :num_tokens].to(target.device, target.dtype)
            for name, each in states.items()
        }
        last = target.final_norm(here[f"{LAYER_PREFIX}{target.num_layers}"])
        return TargetOutput(last, {index: here[f"{LAYER_PREFIX}{index}"] for index in taps.layers})
