"""Rows of a target's ends as an export has them: for golden values, on the CPU.

Letters: N tokens, H hidden, F target hidden, V vocabulary, W ids the head can draft.
"""

import torch
from torch import Tensor

from conf.errors import InputError
from heads.target_model.model import Target

ROWS_PER_CHUNK = 8192


def embedding_rows(weight: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, H] rows of an embedding as an engine that runs in `dtype` holds them."""
    return weight.detach()[token_ids.to(weight.device)].to("cpu", dtype)


def output_rows(target: Target, dtype: torch.dtype) -> Tensor:
    """[V, F] of the target's output head.

    Its scalings stay out: they change no greedy draft, and engines leave them out of drafts.

    Raises:
        InputError: it is quantised or has a bias.
    """
    if not target.has_plain_head:
        raise InputError(
            f"target.path={target.name}: its output head is quantised or has a bias, and this "
            "head drafts with it; allowed: target.quantization=none and a plain output head"
        )
    return target.output_head.weight.detach().to("cpu", dtype)


def projected(outputs: Tensor, weight: Tensor) -> Tensor:
    """[..., W] float32 of outputs [..., H] by a weight [W, H] of any dtype."""
    parts = [outputs @ rows.float().T for rows in weight.split(ROWS_PER_CHUNK)]
    return torch.cat(parts, dim=-1)
