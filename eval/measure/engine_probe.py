"""Finds out whether serving engines run the target, before the first step and after a failure.

Letters: S tokens, D hidden.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import InputError
from data.features.format import HIDDEN, LAYER
from data.servers.hidden_states import HiddenStatesServer
from heads.target_model.remote import RemoteTarget

EarlyState = Callable[[list[int]], Tensor]
"""Function from token ids to a hidden state [S, D]."""
NUM_TOKENS = 64
"""Of the text whose log-probabilities are compared."""
MOST_NATS = 0.05
"""Mean difference of log-probabilities that bfloat16 may make; a layer too early made 0.11
(vLLM #50815)."""
MOST_SHARE = 0.05
"""Distance of states that are read in another company, as a share of their norm."""
AT_ONCE = 8


@dataclass(frozen=True)
class EngineProbe:
    """Questions to servers of a target's hidden states whose answers are known.

    Attributes:
        target: the parts of it that are here.
        token_ids: of a text of the data, as long as documents may be.
        early: index of a hidden state, and the target's own by its first layers, if these are here.
    """

    target: RemoteTarget
    token_ids: list[int]
    early: tuple[int, EarlyState] | None = None

    def __call__(self, server: HiddenStatesServer) -> dict[str, float]:
        """Asks a server.

        Returns:
            `log_prob_difference`, the mean in nats between the log-probabilities that it tells and
            those of its own states behind our final norm and output head; `longest`,
            `again` and `at_once`, the largest distance between states of a text that were read in
            a longer text, a second time, and beside others, as a share of their norm; where the
            target's first layers are here, `early`, the same of a state and theirs.

        Raises:
            InputError: it runs another target, or hands out other states.
        """
        short = self.token_ids[:NUM_TOKENS]
        states = server.read(short)
        nats = self._nats(server, short, states)
        if not nats <= MOST_NATS:
            raise InputError(
                f"{server.endpoint}: its states, behind the final norm and the output head of "
                f"target.path={self.target.name}, give other log-probabilities than it tells: "
                f"{nats:.3f} nats on average (allowed: {MOST_NATS}). It serves other weights, an "
                "adapter or a quantised copy; name those in target.path"
            )
        found = self._early(server, short, states)
        texts = [short[first:] for first in range(min(AT_ONCE, len(short)))]
        alone = [server.read(text) for text in texts]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            together = list(threads.map(server.read, texts))
        alike = {
            "longest": distance(server.read(self.token_ids), states),
            "again": distance(alone[0], states),
            "at_once": max(map(distance, together, alone)),
        }
        for name, share in alike.items():
            if not share <= MOST_SHARE:
                raise InputError(
                    f"{server.endpoint}: the states of a text are others when {WORDS[name]}: "
                    f"{share:.1%} apart (allowed: {MOST_SHARE:.0%}); use vLLM 0.26 or newer"
                )
        return {"log_prob_difference": nats, **found, **alike}

    def _early(
        self, server: HiddenStatesServer, token_ids: list[int], states: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """`early`, how far a state lies from that of the target's first layers, as a share."""
        if self.early is None:
            return {}
        index, own = self.early
        name = f"{LAYER}{index}"
        share = distance(states, {name: own(token_ids)})
        if not share <= MOST_SHARE:
            raise InputError(
                f"{server.endpoint}: hidden state {index} is {share:.1%} from that of the first "
                f"layers of target.path={self.target.name} (allowed: {MOST_SHARE:.0%}): it was "
                "started with the ids of other layers (the output of decoder layer k - 1 is k), or "
                "serves other weights"
            )
        return {"early": share}

    @torch.no_grad()
    def _nats(
        self, server: HiddenStatesServer, token_ids: list[int], states: Mapping[str, Tensor]
    ) -> float:
        target = self.target
        last = states.get(HIDDEN)
        if last is None:
            last = target.final_norm(self._here(states[f"{LAYER}{target.num_layers}"]))
        log_probs = target.logits(self._here(last)[:-1]).float().log_softmax(-1)
        following = torch.tensor(token_ids[1:], device=target.device).unsqueeze(1)
        told = torch.tensor(server.log_probs(token_ids), device=target.device)
        return (log_probs.gather(1, following).squeeze(1) - told).abs().mean().item()

    def _here(self, states: Tensor) -> Tensor:
        return states.to(self.target.device, self.target.dtype)


WORDS = {
    "longest": "more text follows",
    "again": "it is read a second time",
    "at_once": f"{AT_ONCE} texts are read at once",
}
"""Figures of a probe, in words."""


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest distance of a token's states [S, D], as a share of their mean norm.

    Of the longer text as many tokens count as the shorter has.
    """
    apart = []
    for name, states in expected.items():
        difference = (found[name][: len(states)].float() - states.float()).norm(dim=-1)
        apart.append(difference.max() / states.float().norm(dim=-1).mean())
    return torch.stack(apart).max().item()


def told(figures: Mapping[str, float]) -> str:
    """The figures of a probe as a line."""
    early = figures.get("early")
    compared = "" if early is None else f"; an early state {early:.2%} from the target's own"
    return (
        f"log-probabilities {figures['log_prob_difference']:.4f} nats from those of its states; "
        f"states {max(figures[name] for name in WORDS):.2%} apart at most{compared}"
    )
