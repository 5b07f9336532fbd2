"""How sure a head is of the tokens of a chain, as chances, by which chains are cut.

A chance stands before its token is drawn: it comes of the tokens before it alone, of the largest
probability of the distribution there or of what the head says of the slot. So whether a token is
proposed tells nothing of which one it is, and tokens that are proposed are still distributed as
the q that p/q acceptance divides by. A chance made of the token drawn would let likely tokens
through only, and sampled texts would lose the target's distribution.

Source: DSpark, arXiv 2607.05147. Letters: B texts, W draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

EPS = 1e-6
"""Nothing is surer than 1 less this."""


@dataclass(frozen=True)
class Calibration:
    """What makes chances of how sure a head is, and the one below which it drafts no more.

    Attributes:
        temperatures: above 0, by depth; each divides the logits of how sure the head is there.
        offsets: by depth, added then.
        threshold: a chain ends where the chance of all its tokens together falls below; 0 cuts
            none.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    threshold: float = 0.0

    @classmethod
    def none(cls, depth: int) -> "Calibration":
        """Of whole chains, with the head's own word for it."""
        return cls((1.0,) * depth, (0.0,) * depth)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Calibration":
        """From JSON with the attributes.

        Raises:
            ValueError: with what they must be.
        """
        try:
            temperatures, offsets = (
                tuple(map(float, stored[name])) for name in ("temperatures", "offsets")
            )
            found = cls(temperatures, offsets, float(stored["threshold"]))
        except (KeyError, TypeError, ValueError):
            found = cls((), ())
        whole = 0 < len(found.temperatures) == len(found.offsets) and min(found.temperatures) > 0
        if not (whole and 0 <= found.threshold < 1):
            raise ValueError(
                f"temperatures={stored.get('temperatures')}, offsets={stored.get('offsets')}, "
                f"threshold={stored.get('threshold')}: must be numbers above 0, as many numbers, "
                "and one from 0 to below 1"
            )
        return found

    def chance(self, logits: Tensor, depth: int) -> Tensor:
        """[B] that the token at a depth, from 1, is accepted if those before it are.

        Args:
            logits: [B] float32, of how sure the head is.
            depth: no more than there are temperatures.
        """
        return (logits / self.temperatures[depth - 1] + self.offsets[depth - 1]).sigmoid()


def largest(logits: Tensor) -> Tensor:
    """[B] float32, the logits of the largest probabilities of distributions [B, W]."""
    return logits.float().softmax(-1).amax(-1).logit(EPS)
