"""Texts that come to a length from which their target reads them in another way, or not at all.

Up to there a text has the short frequencies of LongRoPE, beyond it the long ones for all of its
tokens, so its keys are then computed anew; transformers' `generate` does the same. A draft is
not accepted across the switch: what stands behind it was read with the wrong ones.

Letters: B texts, N tree nodes.
"""

from collections.abc import Sequence

from torch import Tensor

from heads.decoding.cache import TreeCache
from heads.decoding.drafting import PAD
from heads.target_model.model import Target, last_states


class ContextLimits:
    """Of a batch.

    Args:
        target: the target.
        prompts: token ids of each text.
    """

    def __init__(self, target: Target, prompts: Sequence[list[int]]) -> None:
        self.target, self.switch, self.window = target, target.rope.switch, target.window
        if self.switch is not None:
            self.long = {n for n, ids in enumerate(prompts) if len(ids) > self.switch}

    def cross(self, cache: TreeCache, alive: list[int], texts: list[list[int]]) -> None:
        """Computes the keys of texts that are long from now on.

        Args:
            cache: of the texts that go on.
            alive: their numbers.
            texts: all that each has, prompt and root included.
        """
        if self.switch is None:
            return
        for row, (text, length) in enumerate(zip(alive, cache.slots.lengths, strict=True)):
            if length >= self.switch and text not in self.long:
                self.long.add(text)
                anew = self.target.new_cache(1)
                last_states(self.target, anew, [texts[row][: length + 1]])
                cache.replace(row, anew)

    def cut(self, tokens: Tensor, depths: Tensor, cache: TreeCache) -> Tensor:
        """Tokens [B, N] of trees without those behind the switch of a short text, or the window.

        Args:
            tokens: [B, N] int64.
            depths: [B or 1, N] int64.
            cache: of the texts.
        """
        committed = cache.slots.committed
        positions = committed + depths
        if self.window is not None:
            tokens = tokens.masked_fill(positions >= self.window, PAD)
        if self.switch is None:
            return tokens
        beyond = (committed < self.switch) & (positions >= self.switch)
        return tokens.masked_fill(beyond, PAD)
