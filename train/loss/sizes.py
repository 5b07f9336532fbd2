"""Bytes of a loss and of training a head, from shapes alone.

Letters: N tokens of a micro batch, H hidden, W draft vocabulary, e bytes of a number in
`train.dtype`.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from conf.settings.target import Dtype
from conf.settings.training import TrainConfig
from heads.target_model.load import resolve_dtype
from train.loss import fused

PIECES_OF_TEXT, PIECES_OF_TEACHER = 1, 4
"""Float32 tensors of a piece that live at a time (see `train.loss.fused.piece_bytes`), against the
text and against a distribution. One more if logits are not float32."""
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class LaunchSpec:
    """Facts of a launch on which memory depends, beside the objective.

    Attributes:
        tokens: N.
        dtype: autocast's, of the head.
        strategy: `DDP` (also one process), `FSDP2` or `ZeRO-1`, `ZeRO-2`, `ZeRO-3`.
        num_processes: n.
        cuda: whether micro batches are prepared in advance and pieces are large.
        train: settings of the optimizers.
    """

    tokens: int
    dtype: torch.dtype
    strategy: str
    num_processes: int
    cuda: bool
    train: TrainConfig = field(default_factory=TrainConfig)

    @classmethod
    def from_config(
        cls, config: TrainConfig, length: int, strategy: str, accelerator: Any
    ) -> "LaunchSpec":
        """Sizes of a launch on sequences of `length` tokens."""
        return cls(
            tokens=config.micro_batch_size * length,
            dtype=resolve_dtype(Dtype(config.dtype), accelerator.device),
            strategy=strategy,
            num_processes=accelerator.num_processes,
            cuda=accelerator.device.type == "cuda",
            train=config,
        )


class MemoryEstimate(NamedTuple):
    """Bytes of training a head on a micro batch.

    Attributes:
        copies: copies of weights in `train.dtype`.
        kept: tensors kept for the backward pass.
        loss: the fullest chunk of the loss.
        backward: gradients of activations.
    """

    copies: int
    kept: int
    loss: int
    backward: int


def estimate_loss_bytes(
    setting: LaunchSpec, rows: int, shape: tuple[int, int], num_pieces: int
) -> int:
    """Bytes of a chunk: its logits, and either pieces or the factors of the backward product.

    Args:
        setting: sizes of the launch.
        rows: rows of a student.
        shape: shape [W, H] of the projection.
        num_pieces: pieces that live at a time; one more is added if logits are not float32.
    """
    e, (width, hidden) = setting.dtype.itemsize, shape
    whole = get_chunk_limit(setting)
    chunk = min(rows, max(1, whole // (width * e)))
    piece = min(fused.piece_bytes(width, not setting.cuda), chunk * width * FLOAT32_BYTES)
    tile = min(fused.TILE_BYTES, width * max(hidden, chunk) * FLOAT32_BYTES)
    back = chunk * hidden * (e + FLOAT32_BYTES) + (0 if e == FLOAT32_BYTES else tile)
    return (
        chunk * width * e
        + chunk * hidden * e
        + max((num_pieces + (e < FLOAT32_BYTES)) * piece, back)
    )


def teacher_bytes(setting: LaunchSpec, rows: int, target: Any, width: int) -> int:
    """Bytes of the target's logits [rows, width] beside a student's, in the target's dtype."""
    return min(rows * width * target.dtype.itemsize, get_chunk_limit(setting))


def making_bytes(setting: LaunchSpec, rows: int, target: Any, width: int) -> int:
    """Bytes while a teacher's logits are made: all logits, the drafted ones, and pieces."""
    whole = teacher_bytes(setting, rows, target, target.vocab_size)
    drafted = 0 if width == target.vocab_size else whole * width // target.vocab_size
    most = fused.piece_bytes(target.vocab_size, not setting.cuda)
    return whole + drafted + 2 * min(most, rows * target.vocab_size * FLOAT32_BYTES)


def get_chunk_limit(setting: LaunchSpec) -> int:
    """Largest bytes of a chunk's logits."""
    return fused.CHUNK_BYTES if setting.cuda else fused.CPU_CHUNK_BYTES


def copied_bytes(head: Any, setting: LaunchSpec) -> int:
    """Bytes of copies of all matrices, if autocast's dtype is not float32."""
    if setting.dtype is torch.float32:
        return 0
    sizes = (p.numel() for p in head.parameters() if p.requires_grad and p.dim() > 1)
    return setting.dtype.itemsize * sum(sizes)
