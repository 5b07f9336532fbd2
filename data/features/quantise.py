"""Hidden states in two bytes, or in one with a scale per token. T tokens, D hidden."""

import torch
from torch import Tensor

from conf.settings.data import StateFormat

DTYPES = {
    StateFormat.bf16: torch.bfloat16,
    StateFormat.fp8: torch.float8_e4m3fn,
    StateFormat.int8: torch.int8,
}
LARGEST = {StateFormat.fp8: 448.0, StateFormat.int8: 127.0}
"""The value that a token's largest magnitude becomes."""


def encode(states: Tensor, state_format: StateFormat) -> tuple[Tensor, Tensor | None]:
    """States rounded to the nearest value of a format.

    With amax the largest magnitude of a token, int8 is off by at most amax / 254; fp8 (e4m3) by
    2^-4 of the value, or, near zero, by amax / 448 * 2^-10. A token that holds NaN or infinity
    is NaN when it is read.

    Args:
        states: [T, D], floating point.
        state_format: what to write.

    Returns:
        [T, D] in the format, and the scale [T] float32 of each token; None for bf16.
    """
    dtype = DTYPES[state_format]
    if state_format is StateFormat.bf16:
        return states.to(dtype), None
    states = states.float()
    # A token of zeros has no largest magnitude to divide by.
    scale = states.abs().amax(-1) / LARGEST[state_format]
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    scaled = states / scale.unsqueeze(-1)
    return (scaled.round() if state_format is StateFormat.int8 else scaled).to(dtype), scale


def decode(values: Tensor, scale: Tensor) -> Tensor:
    """[..., D] float32 of one-byte values [..., D] and their scales [...]."""
    return values.float() * scale.unsqueeze(-1)
