"""The target's own texts, many at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from eval.decode.engine import DecodingBatch, NoDraft, Request
from heads.decoding.sampling import GREEDY, Sampling
from heads.target_model.model import FeatureLayers, Target, TargetOutput

ANSWER_BATCH_SIZE = 16
"""Texts at a time, as a pass over 16 tokens takes little longer than a pass over one."""


def stream_answers(
    target: Target,
    requests: Sequence[Request],
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling = GREEDY,
) -> Iterator[tuple[int, list[int]]]:
    """Answer prompts; when one answer ends, the next prompt starts.

    Args:
        target: the frozen target.
        requests: prompts, in the order in which they start.
        max_new_tokens: largest number of tokens of an answer.
        batch_size: number of texts that run together.
        sampling: how the target chooses tokens.

    Yields:
        Number of a request and token ids of the answer, as answers end.
    """
    if not requests:
        return
    batch = DecodingBatch(
        target, lambda _: NoDraft(), requests, max_new_tokens, batch_size, sampling
    )
    for new in batch.stream_tokens():
        for text in filter(batch.has_ended, new):
            yield text, batch.generations[text].token_ids


def generate_greedy_answers(
    target: Target, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """Generate greedy answers to prompts of token ids, with a progress bar."""
    texts: list[list[int]] = [[] for _ in prompts]
    ended = stream_answers(target, list(map(Request, prompts)), max_new_tokens, ANSWER_BATCH_SIZE)
    for number, ids in tqdm(ended, "target's own text", len(prompts), leave=None, unit="prompt"):
        texts[number] = ids
    return texts


AnswerWithStates = tuple[list[int], TargetOutput]
"""An answer, and the target's states [1, S, D] of prompt and answer without its last token."""


AnswerWriter = Callable[[Sequence[list[int]], int], Iterator[tuple[int, list[int]]]]
"""Function that answers prompts of token ids, each by a largest number of tokens, and yields number
and answer of each, as the answers end."""


@dataclass(frozen=True)
class LocalAnswerSource:
    """Writes the own greedy texts of a target in this process, and reads texts.

    Attributes:
        target: target with its layers.
        preferred_batch_size: best number of texts to ask for at a time.
    """

    target: Target
    preferred_batch_size = ANSWER_BATCH_SIZE

    def stream_answers(
        self, prompts: Sequence[list[int]], max_new_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield number and answer of each prompt, as the answers end."""
        return stream_answers(
            self.target, list(map(Request, prompts)), max_new_tokens, ANSWER_BATCH_SIZE
        )

    def answer_with_states(
        self, prompts: Sequence[list[int]], max_new_tokens: int, taps: FeatureLayers
    ) -> list[AnswerWithStates]:
        """Answer prompts of token ids, each with the states that `taps` name."""
        texts = generate_greedy_answers(self.target, prompts, max_new_tokens)
        return [
            (ids, self.target.encode_response(prompt, ids, taps))
            for prompt, ids in zip(prompts, texts, strict=True)
        ]

    def encode_response(
        self, prompt: list[int], response: list[int], taps: FeatureLayers
    ) -> TargetOutput:
        """Compute states [1, S, D] of a prompt and a given response without its last token."""
        return self.target.encode_response(prompt, response, taps)
