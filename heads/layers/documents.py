"""Packed documents for attention without a mask of tokens by tokens.

A flattened batch of packed sequences is one row of consecutive documents; padding at the end of a
sequence counts as a document. Variable-length kernels then only need the documents' bounds, which
are known on the CPU before the batch moves, so no device has to be waited for.

Letters: B sequences, T tokens of one, S = B * T tokens, Q heads, K key-value heads, d head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from heads.devices import to_device

FLASH_DTYPES = (torch.bfloat16, torch.float16)
LARGEST_FLASH_HEAD = 256


@dataclass(frozen=True)
class Documents:
    """Consecutive documents of S tokens.

    Attributes:
        lengths: tokens of each document.
        cu_seqlens: [documents + 1] int32 on the device, the start of each document, and S.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor

    @classmethod
    def from_ids(cls, document_ids: Tensor) -> "Documents":
        """Make documents of ids [B, T] on the CPU, -1 on padding; `cu_seqlens` stays there."""
        new = torch.ones_like(document_ids, dtype=torch.bool)
        new[:, 1:] = document_ids.diff() != 0
        starts = new.flatten().nonzero().squeeze(1)
        bounds = torch.cat([starts, starts.new_tensor([document_ids.numel()])])
        return cls(tuple(bounds.diff().tolist()), bounds.int())

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> "Documents":
        """Make documents of some numbers of tokens."""
        bounds = [*accumulate(lengths, initial=0)]
        return cls(tuple(lengths), to_device(bounds, device).int())

    def to_device(self, device: torch.device) -> "Documents":
        """Move `cu_seqlens` to a device, without waiting for copies from pinned memory."""
        return Documents(self.lengths, self.cu_seqlens.to(device, non_blocking=True))

    def longer_than(self, num_tokens: int) -> Tensor:
        """Mark tokens of documents longer than `num_tokens`, [S] bool."""
        long = torch.tensor([length > num_tokens for length in self.lengths])
        lengths = self.cu_seqlens.diff()
        total = sum(self.lengths)
        return to_device(long, lengths.device).repeat_interleave(lengths, output_size=total)

    def split_documents(self, size: int) -> "Documents":
        """Cut documents into pieces of `size` tokens; the last piece may be shorter."""
        pieces = [min(size, n - start) for n in self.lengths for start in range(0, n, size)]
        return Documents.from_lengths(pieces, self.cu_seqlens.device)

    @property
    def max_length(self) -> int:
        """Return the tokens of the longest document."""
        return max(self.lengths)


def can_use_flash(query: Tensor) -> bool:
    """Tell whether PyTorch's variable-length flash kernel supports queries [..., d]."""
    size = query.shape[-1]
    fits = query.dtype in FLASH_DTYPES and size % 8 == 0 and size <= LARGEST_FLASH_HEAD
    return query.is_cuda and fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def flash_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    documents: Documents,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend causally inside documents, in one kernel call.

    Args:
        query: [S, Q, d], for which `can_use_flash` is true.
        keys: [S, K, d].
        values: [S, K, d].
        documents: documents of the S tokens.
        window: tokens that a query sees, its own included; None for all before it.
        scale: factor of the scores; None for 1 / sqrt(d).

    Returns:
        Output [S, Q, d] and the logsumexp of the scores, [Q, S] float32.
    """
    bounds, longest = documents.cu_seqlens, documents.max_length
    output, log_norm, *_ = torch.ops.aten._flash_attention_forward(
        query, keys, values, bounds, bounds, longest, longest, 0.0, True, False,
        scale=scale, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip
    return output, log_norm


def flash_attention_backward(
    grad: Tensor, text: tuple[Tensor, Tensor, Tensor], forward: tuple[Tensor, Tensor],
    documents: Documents, window: int | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of query, keys and values, for any attention that includes them.

    From recomputed scores S the kernel takes P = exp(S - L) and dS = P (dO v - sum(dO O)).

    Args:
        grad: [S, Q, d], gradient of the output.
        text: query, keys and values as given to `flash_attention`.
        forward: any output O [S, Q, d] and logsumexp L [Q, S] float32.
        documents: documents of the S tokens.
        window: window as given to `flash_attention`.
        scale: scale as given to `flash_attention`.
    """
    bounds, longest = documents.cu_seqlens, documents.max_length
    # Random state for dropout, which is not used.
    unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(), *text, *(tensor.contiguous() for tensor in forward), bounds, bounds,
        longest, longest, 0.0, True, unused, unused,
        scale=scale, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip
