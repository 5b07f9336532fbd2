"""Token ids that a target does not have, refused before they meet it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from conf.errors import InputError


class Vocabulary(Protocol):
    """What of a target decides which ids it takes."""

    name: str

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""


def check_ids(
    read: Sequence[int], target: Vocabulary, where: Callable[[], str], learnt: Sequence[int] = ()
) -> None:
    """Refuses ids beyond a target's embedding, and learnt ones beyond its output head.

    Args:
        read: all of a text.
        target: that reads it.
        where: says where the text is from.
        learnt: those among them that it should write.

    Raises:
        InputError: with the largest.
    """
    for ids, size, what in (
        (read, target.num_embeddings, "embedding"),
        (learnt, target.vocab_size, "output head"),
    ):
        largest = max(ids, default=0)
        if largest >= size:
            raise InputError(
                f"{where()}: token id {largest}, but the {what} of {target.name} has {size} rows: "
                "the tokenizer is larger than the model, or the ids are of another one; give "
                "target.path the tokenizer that it was trained with, or take the row out"
            )
