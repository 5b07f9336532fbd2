"""Chains: their tokens are chosen one by one, and a chain is cut where the head is unsure.

The chance of a token stands before the token is drawn: it comes of the tokens before it alone, of
the largest probability of the distribution there or of what the head says of the slot. So whether a
token is proposed tells nothing of which one it is, and tokens that are proposed are still
distributed as the q that p/q acceptance divides by. A chance made of the token drawn would let
likely tokens through only, and sampled texts would lose the target's distribution.

Source: DSpark, arXiv 2607.05147. Letters: B texts, D depth, V vocabulary, W draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.decoding.drafting import PAD, Draft
from heads.decoding.sampling import GREEDY, Generators, Sampling
from heads.decoding.tree import Tree
from heads.vocab import DraftVocab

EPS = 1e-6
"""No chance is higher than 1 less this."""


@dataclass(frozen=True)
class Calibration:
    """Makes chances of a head's confidence, and cuts chains whose chance falls below a threshold.

    Attributes:
        temperatures: above 0, by depth; each divides the head's confidence logits there.
        offsets: by depth, added then.
        threshold: a chain ends where the chance of all its tokens together falls below; 0 cuts
            none.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    threshold: float = 0.0

    @classmethod
    def none(cls, depth: int) -> "Calibration":
        """Takes the head's confidence as it is and cuts no chain."""
        return cls((1.0,) * depth, (0.0,) * depth)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Calibration":
        """Make a calibration from JSON with its attributes.

        Raises:
            ValueError: with what they must be.
        """
        try:
            temperatures, offsets = (
                tuple(map(float, stored[name])) for name in ("temperatures", "offsets")
            )
            calibration = cls(temperatures, offsets, float(stored["threshold"]))
            whole = 0 < len(temperatures) == len(offsets) and min(temperatures) > 0
            if whole and 0 <= calibration.threshold < 1:
                return calibration
        except (KeyError, TypeError, ValueError):
            pass
        raise ValueError(
            f"temperatures={stored.get('temperatures')}, offsets={stored.get('offsets')}, "
            f"threshold={stored.get('threshold')}: must be numbers above 0, as many numbers, "
            "and one from 0 to below 1"
        )

    def chance(self, logits: Tensor, depth: int) -> Tensor:
        """[B] that the token at a depth, from 1, is accepted if those before it are.

        Args:
            logits: [B] float32, the head's confidence.
            depth: no more than there are temperatures.
        """
        return (logits / self.temperatures[depth - 1] + self.offsets[depth - 1]).sigmoid()


def largest(logits: Tensor) -> Tensor:
    """[B] float32, the logits of the largest probabilities of distributions [B, W]."""
    return logits.float().softmax(-1).amax(-1).logit(EPS)


@dataclass
class ChainSampler:
    """Chooses the tokens of chains: the best ones or, when sampling, drawn ones.

    Attributes:
        vocab: of the logits.
        sampling: the target's, applied to the drafts too.
        generators: one per text.
        calibration: cuts the chains; None leaves them whole.
        probs: [B, V] float32 of each token that was drawn.
        confidence: [B] float32 of each, see `Draft`.
        chance: [B] that all of them are accepted.
        cut: [B] bool of each, True beyond the end of its chain.
    """

    vocab: DraftVocab
    sampling: Sampling = GREEDY
    generators: Generators = field(default_factory=lambda: Generators([], []))
    calibration: Calibration | None = None
    probs: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    chance: Tensor | float = 1.0
    cut: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.calibration is not None and not self.sampling.greedy:
            # The longest chain of a batch decides how much is drawn for each of its texts.
            self.generators = self.generators.next_step()

    def token(self, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
        """[B] target ids by [B, W] logits.

        Args:
            logits: of the next token, by those before it.
            confidence: [B] what the head says of it; unset takes the largest probability.
        """
        if self.calibration is not None:
            # Before anything is drawn, see above.
            self._weigh(self.calibration, largest(logits) if confidence is None else confidence)
        if self.sampling.greedy:
            return self.vocab.to_target(logits.argmax(-1))
        q = self.sampling.probabilities(logits)
        self.probs.append(q.new_zeros(len(q), self.vocab.size).index_copy(1, self.vocab.ids, q))
        return self.vocab.to_target(self.generators.sample(q))

    def _weigh(self, calibration: Calibration, confidence: Tensor) -> None:
        self.confidence.append(confidence)
        self.chance = self.chance * calibration.chance(confidence, len(self.confidence))
        self.cut.append(self.chance < calibration.threshold)

    @property
    def ended(self) -> bool:
        """True where no chain goes on; of chains that may be cut, this waits for the device."""
        return bool(self.cut) and bool(self.cut[-1].all())

    def chains(self, tree: Tree, tokens: Tensor) -> Draft:
        """Drafts of tokens [B, D], PAD in place of those that no model can read.

        Chains that are cut are as deep as the longest of them.
        """
        probs = torch.stack(self.probs, 1) if self.probs else None
        if self.calibration is None:
            return Draft.of(tree, tokens, probs)
        tokens = tokens.masked_fill(torch.stack(self.cut, 1), PAD)
        depth = int((tokens != PAD).sum(1).max())
        confidence = torch.stack(self.confidence, 1)[:, :depth]
        probs = None if probs is None else probs[:, :depth]
        return Draft(tree.down_to(depth), tokens[:, :depth], depth, probs, confidence)


def chain_nodes(depth: int, sampling: Sampling, calibration: Calibration | None) -> int | None:
    """`Drafter.static_nodes` of a chain, which is not drawn for by the host and never cut."""
    return 1 + depth if sampling.greedy and calibration is None else None
