"""Chains of draft tokens: chosen one by one, and cut where the head is unsure.

The chance of a token is known before the token is drawn. It depends only on the previous tokens: on
the largest probability there, or on the head's confidence. Whether a token is proposed therefore
says nothing about which token it is, and proposed tokens keep the distribution q that p/q
acceptance divides by. A chance that depended on the drawn token would favour likely tokens, and
sampled texts would lose the target's distribution.

Source: DSpark, arXiv 2607.05147. Letters: B texts, D depth, V vocabulary, W draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.decoding.drafting import PAD, Draft
from heads.decoding.sampling import GREEDY, NO_DRAWS, Generators, Sampling
from heads.decoding.tree import Tree
from heads.vocab import DraftVocab

EPS = 1e-6
"""Distance of the largest chance from 1."""


@dataclass(frozen=True)
class Calibration:
    """Turns a head's confidence into chances, and cuts chains whose chance falls below a threshold.

    Attributes:
        temperatures: positive divisors of the confidence logits, by depth.
        offsets: numbers added afterwards, by depth.
        threshold: a chain ends where the joint chance of its tokens falls below this; 0 cuts
            nothing.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    threshold: float = 0.0

    @classmethod
    def make_neutral(cls, depth: int) -> "Calibration":
        """Use the head's confidence unchanged and cut no chain."""
        return cls((1.0,) * depth, (0.0,) * depth)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Calibration":
        """Make a calibration from JSON with its attributes.

        Raises:
            ValueError: naming the allowed values.
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
            f"threshold={stored.get('threshold')}: must be numbers above 0, equally many numbers, "
            "and a number from 0 to below 1"
        )

    def compute_chance(self, logits: Tensor, depth: int) -> Tensor:
        """[B] chance that the token at a depth (from 1) is accepted if the previous ones are.

        Args:
            logits: [B] float32, the head's confidence.
            depth: at most the number of temperatures.
        """
        return (logits / self.temperatures[depth - 1] + self.offsets[depth - 1]).sigmoid()


def compute_top_logits(logits: Tensor) -> Tensor:
    """[B] float32 logits of the largest probability of distributions [B, W]."""
    return logits.float().softmax(-1).amax(-1).logit(EPS)


@dataclass
class ChainSampler:
    """Chooses the tokens of chains: the best ones, or drawn ones when sampling.

    Attributes:
        vocab: draft vocabulary of the logits.
        sampling: the target's sampling, also used for draft tokens.
        generators: one generator per text.
        calibration: cuts the chains; None leaves them whole.
        probs: [B, V] float32 distribution of each drawn token.
        confidence: [B] float32 per token, see `Draft`.
        chance: [B] joint chance of all tokens.
        cut: [B] bool per token, True after the end of its chain.
    """

    vocab: DraftVocab
    sampling: Sampling = GREEDY
    generators: Generators = NO_DRAWS
    calibration: Calibration | None = None
    probs: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    chance: Tensor | float = 1.0
    cut: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.calibration is not None and not self.sampling.is_greedy:
            # The longest chain of a batch decides how often each text draws.
            self.generators = self.generators.next_step()

    def choose_token(self, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Choose [B] target ids from logits [B, W].

        Args:
            logits: logits of the next token, given the previous ones.
            confidence: [B] confidence logits of the head. Unset: the largest probability.
        """
        if self.calibration is not None:
            # Before drawing, see the module docstring.
            self._update_cut(
                self.calibration, compute_top_logits(logits) if confidence is None else confidence
            )
        if self.sampling.is_greedy:
            return self.vocab.to_target_ids(logits.argmax(-1))
        q = self.sampling.compute_probabilities(logits)
        self.probs.append(q.new_zeros(len(q), self.vocab.size).index_copy(1, self.vocab.ids, q))
        return self.vocab.to_target_ids(self.generators.sample_indices(q))

    def _update_cut(self, calibration: Calibration, confidence: Tensor) -> None:
        self.confidence.append(confidence)
        self.chance = self.chance * calibration.compute_chance(confidence, len(self.confidence))
        self.cut.append(self.chance < calibration.threshold)

    @property
    def has_ended(self) -> bool:
        """Tell whether all chains have ended. With a calibration this waits for the device."""
        return bool(self.cut) and bool(self.cut[-1].all())

    def make_draft(self, tree: Tree, tokens: Tensor) -> Draft:
        """Make drafts of tokens [B, D], with PAD for ids that the target cannot read.

        Cut chains are as deep as the longest of them.
        """
        probs = torch.stack(self.probs, 1) if self.probs else None
        if self.calibration is None:
            return Draft.from_tree(tree, tokens, probs)
        tokens = tokens.masked_fill(torch.stack(self.cut, 1), PAD)
        depth = int((tokens != PAD).sum(1).max())
        confidence = torch.stack(self.confidence, 1)[:, :depth]
        probs = None if probs is None else probs[:, :depth]
        return Draft(tree.down_to(depth), tokens[:, :depth], depth, probs, confidence)
