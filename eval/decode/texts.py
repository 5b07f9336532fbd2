"""What is asked of token ids by whoever decodes or compares texts."""

from collections.abc import Collection


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
