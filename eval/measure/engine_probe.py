"""Checks that serving engines run the right target, before the first step and after a failure.

Letters: S tokens, D hidden.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import InputError
from data.features.store_format import HIDDEN_STATES, LAYER_PREFIX
from data.servers.hidden_states import HiddenStatesClient
from heads.target_model.remote import RemoteTarget

EarlyState = Callable[[list[int]], Tensor]
"""Function from token ids to a hidden state [S, D]."""
NUM_TOKENS = 64
"""Tokens of the text whose log-probabilities are compared."""
MOST_NATS = 0.05
"""Largest mean difference of log-probabilities that bfloat16 may cause; a wrong layer caused 0.11
(vLLM #50815)."""
MOST_SHARE = 0.05
"""Largest distance between states read under different conditions, as a share of their norm."""
AT_ONCE = 8


@dataclass(frozen=True)
class EngineProbe:
    """Questions with known answers for servers of a target's hidden states.

    Attributes:
        target: the parts of it in this process.
        token_ids: token ids of a text of the data, as long as documents may be.
        early: index of a hidden state, and the same state by the target's first layers, if these
            are here.
    """

    target: RemoteTarget
    token_ids: list[int]
    early: tuple[int, EarlyState] | None = None

    def __call__(self, server: HiddenStatesClient) -> dict[str, float]:
        """Ask a server.

        Returns:
            `log_prob_difference` is the mean difference in nats between the server's
            log-probabilities and those of its states after our final norm and output head.
            `longest`, `again` and `at_once` are the largest distances between states of a text that
            was read in a longer text, a second time, and beside others, as a share of their norm.
            If the target's first layers are here, `early` is the same for one state and theirs.

        Raises:
            InputError: it runs another target, or sends other states.
        """
        short = self.token_ids[:NUM_TOKENS]
        states = server.request_states(short)
        nats = self._compare_log_probs(server, short, states)
        if not nats <= MOST_NATS:
            raise InputError(
                f"{server.endpoint}: its states, after the final norm and the output head of "
                f"target.path={self.target.name}, give other log-probabilities than the server: "
                f"{nats:.3f} nats on average (allowed: {MOST_NATS}). It serves other weights, an "
                "adapter or a quantised copy; name those in target.path"
            )
        found = self._compare_early_layers(server, short, states)
        texts = [short[first:] for first in range(min(AT_ONCE, len(short)))]
        alone = [server.request_states(text) for text in texts]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            together = list(threads.map(server.request_states, texts))
        alike = {
            "longest": compute_relative_distance(server.request_states(self.token_ids), states),
            "again": compute_relative_distance(alone[0], states),
            "at_once": max(map(compute_relative_distance, together, alone)),
        }
        for name, share in alike.items():
            if not share <= MOST_SHARE:
                raise InputError(
                    f"{server.endpoint}: the states of a text change when {WORDS[name]}: "
                    f"{share:.1%} apart (allowed: {MOST_SHARE:.0%}); use vLLM 0.26 or newer"
                )
        return {"log_prob_difference": nats, **found, **alike}

    def _compare_early_layers(
        self, server: HiddenStatesClient, token_ids: list[int], states: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """`early`: distance of a state from that of the target's first layers, as a share."""
        if self.early is None:
            return {}
        index, own = self.early
        name = f"{LAYER_PREFIX}{index}"
        share = compute_relative_distance(states, {name: own(token_ids)})
        if not share <= MOST_SHARE:
            raise InputError(
                f"{server.endpoint}: hidden state {index} is {share:.1%} from that of the first "
                f"layers of target.path={self.target.name} (allowed: {MOST_SHARE:.0%}), so the "
                "server was started with ids of other layers (the output of decoder layer k - 1 "
                "is k), or serves other weights; start it again"
            )
        return {"early": share}

    @torch.no_grad()
    def _compare_log_probs(
        self, server: HiddenStatesClient, token_ids: list[int], states: Mapping[str, Tensor]
    ) -> float:
        target = self.target
        last = states.get(HIDDEN_STATES)
        if last is None:
            last = target.final_norm(self._to_target(states[f"{LAYER_PREFIX}{target.num_layers}"]))
        log_probs = target.compute_logits(self._to_target(last)[:-1]).float().log_softmax(-1)
        following = torch.tensor(token_ids[1:], device=target.device).unsqueeze(1)
        told = torch.tensor(server.log_probs(token_ids), device=target.device)
        return (log_probs.gather(1, following).squeeze(1) - told).abs().mean().item()

    def _to_target(self, states: Tensor) -> Tensor:
        return states.to(self.target.device, self.target.dtype)


WORDS = {
    "longest": "more text follows",
    "again": "it is read a second time",
    "at_once": f"{AT_ONCE} texts are read at once",
}
"""Figures of a probe in words."""


def compute_relative_distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest distance of a token's states [S, D], as a share of their mean norm.

    Only compares the tokens of the shorter text.
    """
    apart = []
    for name, states in expected.items():
        difference = (found[name][: len(states)].float() - states.float()).norm(dim=-1)
        apart.append(difference.max() / states.float().norm(dim=-1).mean())
    return torch.stack(apart).max().item()


def format_probe(figures: Mapping[str, float]) -> str:
    """Show the figures of a probe on one line."""
    early = figures.get("early")
    compared = "" if early is None else f"; an early state {early:.2%} from the target's own"
    return (
        f"log-probabilities {figures['log_prob_difference']:.4f} nats from those of its states; "
        f"states at most {max(figures[name] for name in WORDS):.2%} apart{compared}"
    )
