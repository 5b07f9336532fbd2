"""Counts of draft tokens, as serving engines count them.

All engines start to draft after the first token of a text. vLLM and SGLang also count tokens that
the last pass accepts beyond the text's end; llama.cpp's drafts end with the text.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DraftCounts:
    """A text and the counts of its drafts.

    Attributes:
        text: token ids, including a stop token.
        drafts: passes that verified draft tokens.
        proposed: draft tokens that they verified.
        accepted: number of passes that accepted a token, per depth.
    """

    text: list[int]
    drafts: int
    proposed: int
    accepted: list[int]

    @classmethod
    def from_passes(cls, text: list[int], lengths: list[int], depth: int) -> "DraftCounts":
        """Make counts from the tokens that each pass accepted, also beyond the text's end."""
        accepted = [sum(length > place for length in lengths) for place in range(depth)]
        return cls(text, len(lengths), depth * len(lengths), accepted)

    @classmethod
    def from_texts(cls, texts: "Iterable[DraftCounts]", depth: int) -> "DraftCounts":
        """Sum over texts."""
        counted = list(texts)
        return cls(
            [],
            sum(text.drafts for text in counted),
            sum(text.proposed for text in counted),
            [sum(text.accepted[place] for text in counted) for place in range(depth)],
        )

    @classmethod
    def from_passes_within_text(
        cls, text: list[int], lengths: list[int], depth: int, room: int, stop_ids: list[int]
    ) -> "DraftCounts":
        """Make the counts of an engine whose drafts end with the text at the latest.

        A pass also emits a bonus token, so a pass with room for one token makes no draft. An
        accepted stop token counts as the bonus token, unless it was the draft's last.

        Args:
            text: token ids.
            lengths: tokens that each pass accepted, also beyond the text's end.
            depth: most draft tokens of a pass.
            room: most tokens of the text.
            stop_ids: token ids that end a text.
        """
        proposed, kept, emitted = 0, list[int](), 1
        for length in lengths:
            size, left = min(depth, room - emitted - 1), len(text) - emitted
            if size > 0:
                proposed += size
                stopped = text[-1] in stop_ids and left <= length
                kept.append(left - (left != size) if stopped else min(length, size))
            emitted += length + 1
        return replace(cls.from_passes(text, kept, depth), proposed=proposed)
