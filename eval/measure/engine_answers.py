"""Answers and hidden states of serving engines that run a target's layers.

Engines are opened, and probed before the first step and after a failure: do they run the right
target?

Letters: S tokens, D hidden.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from conf.errors import InputError
from conf.settings.target import TargetConfig
from data.features.store_format import HIDDEN_STATES, LAYER_PREFIX
from data.servers.hidden_states import HiddenStatesClient, ServerFeatureLayers
from data.servers.http_client import Endpoint
from data.servers.server_pool import HiddenStatesPool
from data.servers.state_files import RelayFiles
from eval.decode.generation_config import StopRules
from eval.measure.target_answers import AnswerWithStates, LocalAnswerSource
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.load import RemoteTarget, load_early_layers
from heads.target_model.model import FeatureLayers, TargetOutput

EarlyState = Callable[[list[int]], Tensor]
"""Function from token ids to a hidden state [S, D]."""
NUM_REQUESTS = 16
"""Documents to request from a server at a time."""
NUM_RETRIES = 1
"""Retries of a request after a dropped connection; then other servers are asked."""
TIMEOUT_S = 600.0
"""Timeout of a request. It is long, as some versions of vLLM crash when a request is cancelled."""
PENALTY = "repetition_penalty"
"""The only setting of a generation config that a server takes."""
NUM_TOKENS = 64
"""Tokens of the text whose log-probabilities are compared."""
MOST_NATS = 0.05
"""Largest mean difference of log-probabilities that bfloat16 may cause; a wrong layer caused 0.11
(vLLM #50815)."""
MOST_SHARE = 0.05
"""Largest distance between states read under different conditions, as a share of their norm."""
AT_ONCE = 8
"""Texts that the probe sends at once."""
WORDS = {
    "longest": "more text follows",
    "again": "it is read a second time",
    "at_once": f"{AT_ONCE} texts are read at once",
}
"""Figures of a probe in words."""


@dataclass(frozen=True)
class EngineAnswerSource:
    """Writes the own greedy texts of a target whose layers run in engines, and reads texts.

    Attributes:
        pool: servers of the last layer's state and of the states that a head reads.
        target: the target's parts in this process.
    """

    pool: HiddenStatesPool
    target: RemoteTarget

    @property
    def preferred_batch_size(self) -> int:
        """Return how many requests the servers take at a time."""
        return self.pool.concurrency

    def stream_answers(
        self, prompts: Sequence[list[int]], max_new_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield number and answer of each prompt, as the answers end."""
        settings = [build_request_settings(self.target)] * len(prompts)
        for number, ids in self.pool.stream_answers(prompts, max_new_tokens, settings):
            yield number, StopRules.from_target(self.target).cut_after_end([], ids)

    def answer_with_states(
        self, prompts: Sequence[list[int]], max_new_tokens: int, taps: FeatureLayers
    ) -> list[AnswerWithStates]:
        """Answer prompts of token ids, each with the states that `taps` name."""
        texts = []
        answers = self.pool.request_answers_with_states(
            prompts, max_new_tokens, build_request_settings(self.target)
        )
        for prompt, (whole, states) in zip(prompts, answers, strict=True):
            ids = StopRules.from_target(self.target).cut_after_end([], whole)
            texts.append((ids, self._build_target_output(states, len(prompt) + len(ids) - 1, taps)))
        return texts

    def encode_response(
        self, prompt: list[int], response: list[int], taps: FeatureLayers
    ) -> TargetOutput:
        """Request states [1, S, D] of a prompt and a given response without its last token."""
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


AnswerSource = LocalAnswerSource | EngineAnswerSource


def build_request_settings(
    target: EmbeddingsAndOutputHead, who: str = "target.engine", temperature: float = 0.0
) -> dict[str, Any]:
    """Build the settings of a request that applies the target's generation config.

    Raises:
        InputError: the config has settings that a server does not take.
    """
    asked = target.logits_processing
    if refused := [f"{name}={value}" for name, value in asked.items() if name != PENALTY]:
        raise InputError(
            f"{who}: does not take {', '.join(refused)}, which the generation config of "
            f"{target.name} sets; allowed: {PENALTY}; remove the others from generation_config.json"
        )
    settings: dict[str, Any] = {"temperature": temperature, PENALTY: asked.get(PENALTY, 1.0)}
    return settings | ({"ignore_eos": True} if target.ignores_stops else {})


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
        target: the target's parts in this process.
        layers: indices of `output_hidden_states`.
        text: token ids of the data, to check with.
        final_norm: norm for `hidden_states`, on the CPU; None leaves `hidden_states` out.

    Raises:
        InputError: a server does not give the states of these layers.
    """
    size = target.num_layers, target.hidden_size
    taps = ServerFeatureLayers(tuple(layers), *size, final_norm, target.name)
    servers = []
    for url, relay in zip_longest(config.engine, config.relay):  # a relay for each, or none
        endpoint = Endpoint(
            url,
            config.adapter_name,
            max_retries=NUM_RETRIES,
            timeout_s=TIMEOUT_S,
            setting="target.engine",
        )
        files = None if relay is None else RelayFiles(relay, TIMEOUT_S)
        servers.append(HiddenStatesClient(endpoint, taps, NUM_REQUESTS, files))
    probe = partial(probe_engine, target, text)
    with HiddenStatesPool(servers, probe) as pool:
        first, main = probe, PartialState().is_main_process
        between = [index for index in taps.layers if 0 < index < taps.num_layers]
        if main and between and (own := load_early_layers(config, min(between))) is not None:
            # The first layers compute a server's first state between layers here.
            first = partial(probe, early=(min(between), own))
        for server in servers:
            pool.server_lines.append(f"{server.endpoint}: {format_probe(first(server))}")
        if main:
            print(*pool.server_lines, sep="\n")  # noqa: T201
        yield pool


@torch.no_grad()
def probe_engine(
    target: RemoteTarget,
    token_ids: list[int],
    server: HiddenStatesClient,
    early: tuple[int, EarlyState] | None = None,
) -> dict[str, float]:
    """Ask a server of a target's hidden states questions with known answers.

    Args:
        target: the target's parts in this process.
        token_ids: token ids of a text of the data, as long as documents may be.
        server: server to ask.
        early: index of a hidden state, and the function that computes this state by the target's
            first layers, if these are loaded here.

    Returns:
        `log_prob_difference`: mean difference in nats between the server's log-probabilities and
        the log-probabilities that our final norm and output head compute from the server's states.
        The others are largest distances between two readings of the same tokens, as a fraction of
        the states' norm: `longest` with more text after the tokens, `again` a second time,
        `at_once` beside other requests, `early` by the target's first layers here, if these are
        loaded.

    Raises:
        InputError: the server runs another target, or sends other states.
    """
    short = token_ids[:NUM_TOKENS]
    states = server.request_states(short)
    last = states.get(HIDDEN_STATES)
    if last is None:
        own_last = states[f"{LAYER_PREFIX}{target.num_layers}"]
        last = target.final_norm(own_last.to(target.device, target.dtype))
    logits = target.compute_logits(last.to(target.device, target.dtype)[:-1])
    following = torch.tensor(short[1:], device=target.device).unsqueeze(1)
    log_probs = logits.float().log_softmax(-1).gather(1, following).squeeze(1)
    reported = torch.tensor(server.log_probs(short), device=target.device)
    nats = (log_probs - reported).abs().mean().item()
    if not nats <= MOST_NATS:
        raise InputError(
            f"{server.endpoint}: its states, after the final norm and the output head of "
            f"target.path={target.name}, give other log-probabilities than the server: {nats:.3f} "
            f"nats on average (allowed: {MOST_NATS}). It serves other weights, an adapter or a "
            "quantised copy; name those in target.path"
        )
    figures = {"log_prob_difference": nats}
    if early is not None:
        index, compute_state = early
        own = {f"{LAYER_PREFIX}{index}": compute_state(short)}
        figures["early"] = share = compute_relative_distance(states, own)
        if not share <= MOST_SHARE:
            raise InputError(
                f"{server.endpoint}: hidden state {index} is {share:.1%} from that of the first "
                f"layers of target.path={target.name} (allowed: {MOST_SHARE:.0%}), so the server "
                "was started with ids of other layers (the output of decoder layer k - 1 is k), or "
                "serves other weights; start it again"
            )
    texts = [short[first:] for first in range(min(AT_ONCE, len(short)))]
    alone = [server.request_states(text) for text in texts]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        together = list(threads.map(server.request_states, texts))
    alike = {
        "longest": compute_relative_distance(server.request_states(token_ids), states),
        "again": compute_relative_distance(alone[0], states),
        "at_once": max(map(compute_relative_distance, together, alone)),
    }
    for name, share in alike.items():
        if not share <= MOST_SHARE:
            raise InputError(
                f"{server.endpoint}: the states of a text change when {WORDS[name]}: {share:.1%} "
                f"apart (allowed: {MOST_SHARE:.0%}); use vLLM 0.32 or newer"
            )
    return figures | alike


def compute_relative_distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Compute the largest distance of a token's states [S, D], as a share of their mean norm.

    Only the tokens of the shorter text are compared.
    """
    distances = []
    for name, states in expected.items():
        difference = (found[name][: len(states)].float() - states.float()).norm(dim=-1)
        distances.append(difference.max() / states.float().norm(dim=-1).mean())
    return torch.stack(distances).max().item()


def format_probe(figures: Mapping[str, float]) -> str:
    """Show the figures of a probe on one line."""
    early = figures.get("early")
    compared = "" if early is None else f"; an early state {early:.2%} from the target's own"
    return (
        f"log-probabilities {figures['log_prob_difference']:.4f} nats from those of its states; "
        f"states at most {max(figures[name] for name in WORDS):.2%} apart{compared}"
    )
