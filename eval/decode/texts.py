"""What is asked of token ids by whoever decodes or compares texts."""

from collections.abc import Collection, Sequence

from conf.schema import InputError
from heads.target.model import Target


def check_window(target: Target, prompts: Sequence[list[int]], max_new_tokens: int) -> None:
    """Refuses prompts that leave no room for the text; drafts need none.

    Raises:
        InputError: with the lengths.
    """
    longest = max(map(len, prompts))
    needed = longest + max_new_tokens
    if target.window is not None and needed > target.window:
        raise InputError(
            f"max_new_tokens={max_new_tokens}: with the longest prompt of {longest} tokens that "
            f"is {needed}, above the target's window of {target.window}; lower max_new_tokens or "
            "num_turns, or drop long prompts"
        )


def truncated(tokens: list[int], stops: Collection[int]) -> list[int]:
    """Tokens up to and with the first stop token."""
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1]
    return tokens


def common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))
