"""Rows in pieces: which of them, and how many at a time."""

from itertools import pairwise

from torch import Tensor

Where = slice | Tensor
"""Rows, [m] int64 if they do not lie side by side."""


def number_of(rows: Where) -> int:
    """How many."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def part_of(rows: Where, part: slice) -> Where:
    """Some of some rows."""
    if isinstance(rows, slice):
        return slice(rows.start + part.start, rows.start + part.stop)
    return rows[part]


def balanced(first: int, last: int, size: int) -> list[slice]:
    """first..last in as few slices of at most `size` as can be, which differ by one at most.

    So one row is alone only where there is no other.
    """
    number = -(-(last - first) // size)
    edges = [first + (last - first) * i // number for i in range(number + 1)] if number else []
    return [slice(*each) for each in pairwise(edges)]


def rows_of(num_bytes: int, row_bytes: int) -> int:
    """How many rows fit, and at least one."""
    return max(1, num_bytes // row_bytes)
