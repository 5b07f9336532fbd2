"""Counts of draft tokens, as serving engines count them.

All engines start to draft behind the first token of a text. vLLM and SGLang count what the last
pass accepts beyond the text's end; llama.cpp's drafts end with the text.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DraftCounts:
    """A text and the drafts that were made for it.

    Attributes:
        text: token ids, a stop token included.
        drafts: passes that checked draft tokens.
        proposed: draft tokens that they checked.
        accepted: per depth, how many of them accepted a token there.
    """

    text: list[int]
    drafts: int
    proposed: int
    accepted: list[int]

    @classmethod
    def of(cls, text: list[int], lengths: list[int], depth: int) -> "DraftCounts":
        """Counts by the number of tokens that each pass accepted, beyond the text's end as well."""
        accepted = [sum(length > place for length in lengths) for place in range(depth)]
        return cls(text, len(lengths), depth * len(lengths), accepted)

    @classmethod
    def total(cls, texts: "Iterable[DraftCounts]", depth: int) -> "DraftCounts":
        """The sums over texts, of no text itself."""
        counted = list(texts)
        return cls(
            [],
            sum(text.drafts for text in counted),
            sum(text.proposed for text in counted),
            [sum(text.accepted[place] for text in counted) for place in range(depth)],
        )

    @classmethod
    def within(
        cls, text: list[int], lengths: list[int], depth: int, room: int, stop_ids: list[int]
    ) -> "DraftCounts":
        """Counts of an engine whose drafts end with the text at the latest.

        A pass also emits a bonus token, so one that has room for no more makes no draft. A stop
        token that is accepted counts as the bonus token, unless it was the draft's last.

        Args:
            text: token ids.
            lengths: tokens that each pass accepted, beyond the text's end as well.
            depth: draft tokens of a pass at most.
            room: tokens that the text may have.
            stop_ids: which end a text.
        """
        proposed, kept, emitted = 0, list[int](), 1
        for length in lengths:
            size, left = min(depth, room - emitted - 1), len(text) - emitted
            if size > 0:
                proposed += size
                stopped = text[-1] in stop_ids and left <= length
                kept.append(left - (left != size) if stopped else min(length, size))
            emitted += length + 1
        return replace(cls.of(text, kept, depth), proposed=proposed)
