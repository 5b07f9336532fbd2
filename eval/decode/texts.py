"""What is asked of token ids by whoever decodes or compares texts."""

from collections.abc import Sequence
from typing import Any

from heads.target_model.model import Target


class Stops:
    """What ends a response: a stop token, or a token that completes a string.

    Args:
        ids: the stop tokens.
        strings: perhaps none.
        tokenizer: of both, needed for strings.
    """

    def __init__(
        self, ids: Sequence[int], strings: Sequence[str] = (), tokenizer: Any = None
    ) -> None:
        self.ids, self.strings, self.tokenizer = frozenset(ids), tuple(strings), tokenizer
        # A token writes at least a byte, and what begins a text may lack its space.
        self.reach = max((len(text.encode()) + 1 for text in strings), default=1)

    @classmethod
    def of(cls, target: Target) -> "Stops":
        """Those of a target."""
        ids = [] if target.ignores_stops else target.stop_ids
        return cls(ids, target.stop_strings, target.tokenizer)

    def ended(self, tokens: list[int]) -> bool:
        """Whether a response, which had not ended before, ends with the last of its tokens."""
        if not self.strings or tokens[-1] in self.ids:
            return tokens[-1] in self.ids
        tail = self.tokenizer.decode(
            tokens[-self.reach :], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(text in tail for text in self.strings)

    def cut(self, before: list[int], tokens: list[int]) -> list[int]:
        """New tokens of a response up to and with the one that ends it."""
        text = [*before[-self.reach :], *tokens]
        first = len(text) - len(tokens)
        for end in range(first + 1, len(text) + 1):
            if self.ended(text[:end]):
                return text[first:end]
        return tokens


def common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))
