"""The target's own texts, many at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tqdm import tqdm

from eval.decode.engine import Batch, NoDraft, Request
from heads.decoding.sampling import GREEDY, Sampling
from heads.target_model.model import Taps, Target, TargetOutput

NUM_TOGETHER = 16
"""Texts at a time, as a pass over 16 tokens takes little longer than one over one."""


def answers(
    target: Target,
    requests: Sequence[Request],
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling = GREEDY,
) -> Iterator[tuple[int, list[int]]]:
    """Answers prompts; where one answer ends, the next begins.

    Args:
        target: the frozen target.
        requests: the prompts, in the order in which they are begun.
        max_new_tokens: tokens of an answer at most.
        batch_size: texts that go on together.
        sampling: how the target chooses.

    Yields:
        Numbers of requests with the token ids of their answers, as these end.
    """
    if not requests:
        return
    batch = Batch(target, lambda _: NoDraft(), requests, max_new_tokens, batch_size, sampling)
    for new in batch.run():
        for text in filter(batch.has_ended, new):
            yield text, batch.generations[text].token_ids


def greedy_answers(
    target: Target, prompts: Sequence[list[int]], max_new_tokens: int, shown: bool = True
) -> list[list[int]]:
    """Greedy answers to prompts of token ids, with a progress bar where it is `shown`."""
    texts: list[list[int]] = [[] for _ in prompts]
    ended = answers(target, list(map(Request, prompts)), max_new_tokens, NUM_TOGETHER)
    for number, ids in tqdm(
        ended, "target's own text", len(prompts), disable=not shown, unit="prompt"
    ):
        texts[number] = ids
    return texts


Answered = tuple[list[int], TargetOutput]
"""An answer, and the target's states [1, S, D] of prompt and answer but its last token."""


class Writer(Protocol):
    """Writes the target's own greedy texts."""

    def written(
        self, prompts: Sequence[list[int]], max_new_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Numbers of prompts of token ids with their answers, as these end."""


class Texts(Writer, Protocol):
    """Writes the target's own greedy texts and reads them: the target here, or engines.

    Attributes:
        num_together: texts that are best asked for at a time.
    """

    @property
    def num_together(self) -> int:
        """See above."""

    def answers(
        self, prompts: Sequence[list[int]], max_new_tokens: int, taps: Taps
    ) -> list[Answered]:
        """Answers to prompts of token ids, with the states that `taps` name."""

    def read(self, prompt: list[int], response: list[int], taps: Taps) -> TargetOutput:
        """The states [1, S, D] of a prompt and a given response but its last token."""


@dataclass(frozen=True)
class OwnTexts:
    """Texts of a target that is here."""

    target: Target
    num_together = NUM_TOGETHER

    def written(
        self, prompts: Sequence[list[int]], max_new_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """See `Writer`."""
        return answers(self.target, list(map(Request, prompts)), max_new_tokens, NUM_TOGETHER)

    def answers(
        self, prompts: Sequence[list[int]], max_new_tokens: int, taps: Taps
    ) -> list[Answered]:
        """See `Texts`."""
        texts = greedy_answers(self.target, prompts, max_new_tokens, shown=False)
        return [
            (ids, self.target.read_response(prompt, ids, taps))
            for prompt, ids in zip(prompts, texts, strict=True)
        ]

    def read(self, prompt: list[int], response: list[int], taps: Taps) -> TargetOutput:
        """See `Texts`."""
        return self.target.read_response(prompt, response, taps)
