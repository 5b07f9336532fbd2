"""Estimate a run's memory per device, by part, from shapes alone.

A run is fullest at one of two moments: in the last chunk of the loss, with everything kept for the
backward pass; or in the backward pass, with gradients of activations and gathered weight gradients.
The estimate assumes that all tokens are supervised. Optimizer steps need no further memory.
Objectives add the tensors of their heads (`estimate_memory`) with the formulas of a loss below.

Letters: N tokens of a micro batch, H hidden, I intermediate, V vocabulary, W draft vocabulary, J
steps, K heads, r rows of a piece, S bytes of trained parameters, n processes, e bytes of a number
in `train.dtype`, t bytes of a number of the target.
"""

from typing import Any

import torch

from conf.errors import InputError
from heads.target_model.architecture import compute_mlp_size
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from train.loss import fused_linear
from train.objective import LaunchSpec, Objective
from train.parallel.optimizers import state_keys
from train.parallel.processes import ZERO_BUCKET

PIECES_OF_TEXT, PIECES_OF_TEACHER = 1, 4
"""Float32 tensors [r, W] that exist at once while a piece of `train.loss.fused_linear` is compared:
one against the text, four against a distribution. Logits in another dtype add one, their float32
copy."""
FLOAT32_BYTES = 4
REMEDIES = (
    "lower train.micro_batch_size, data.max_length or head.draft_vocab_size, load the target with "
    "target.quantization, train from a feature store with data.features, or launch with "
    "conf/accelerate/fsdp2.yaml or zero2.yaml"
)
BytesByPart = dict[str, int]


def estimate_memory(objective: Objective, setting: LaunchSpec) -> BytesByPart | None:
    """Estimate bytes by part at the fullest moment; None without a formula for the head.

    Args:
        objective: objective with its head; tensors on the `meta` device suffice.
        setting: facts of the launch.
    """
    head, target = objective.head, objective.target
    estimate = objective.estimate_memory(setting)
    if estimate is None:
        return None
    parts = {"target": count_target_bytes(target), **_estimate_strategy_bytes(head, setting)}
    # N (1 + layers read) H t of this micro batch and, on CUDA, of the next (`Prefetcher`).
    states = setting.tokens * (1 + len(head.taps.layers)) * target.hidden_size
    parts["hidden states"] = (2 if setting.cuda else 1) * states * target.dtype.itemsize
    parts["activations of the head"] = estimate.kept
    if setting.cuda and isinstance(target, Target):
        # Meanwhile the target reads the next micro batch on its own stream. Per layer without
        # gradients: 3 N I t in its MLP and 4 N H t beside it.
        widths = 3 * compute_mlp_size(target.config) + 4 * target.hidden_size
        parts["a pass of the target"] = setting.tokens * target.dtype.itemsize * widths
    reduced = 0
    if setting.strategy == "FSDP2":
        # FSDP2 gets S / n, and copies whole gradients after it has freed whole weights.
        reduced = count_trained_bytes(head) // setting.num_processes
    elif setting.strategy.startswith("ZeRO"):
        # ZeRO moves gradients into its bucket and then distributes them.
        reduced = ZERO_BUCKET * FLOAT32_BYTES
    moments: list[BytesByPart] = [
        {**parts, "copies in train.dtype": estimate.copies, "loss": estimate.loss},
        {**parts, "backward pass": estimate.backward, "reduction of gradients": reduced},
    ]
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    return {name: size for name, size in fullest.items() if size}


def _estimate_strategy_bytes(head: Any, setting: LaunchSpec) -> BytesByPart:
    """Estimate bytes of weights, gradients and optimizer state on one process.

    With S bytes of trained weights and n processes: DDP holds S of weights, S of gradients (views
    of its buckets) and the whole state. FSDP2, ZeRO-1 and ZeRO-2 hold whole weights and gradients
    during a step, S / n of own weights, and 1/n of the state; ZeRO-3 holds 2 S / n of own weights.
    The state is 2 S for AdamW, S for Muon, and S more for an average. Frozen parameters of the head
    are whole everywhere.
    """
    whole, keys = count_trained_bytes(head), state_keys(head, setting.train)
    state = FLOAT32_BYTES * sum(
        len(keys.get(n, ())) * p.numel() for n, p in head.named_parameters()
    )
    frozen = FLOAT32_BYTES * sum(p.numel() for p in head.parameters() if not p.requires_grad)
    per_process = whole // setting.num_processes
    num_shards = {"DDP": 0, "FSDP2": 1, "ZeRO-1": 1, "ZeRO-2": 1, "ZeRO-3": 2}[setting.strategy]
    return {
        "head": whole + num_shards * per_process + frozen,
        "gradients": whole,
        "optimizer": state // setting.num_processes if num_shards else state,
    }


def count_target_bytes(target: EmbeddingsAndOutputHead) -> int:
    """Count the bytes of the target's weights on the head's device.

    Beside a feature store, these are its embedding and output head.
    """
    modules = (target.embedding, target.output_head)  # may share one weight
    weights: Any = {module.weight.data_ptr(): module.weight for module in modules}.values()
    if isinstance(target, Target):
        model: Any = target.model
        weights = [weight for weight in model.parameters() if weight.device == target.device]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def count_trained_bytes(head: Any) -> int:
    """Count the bytes S of the trained parameters, in float32."""
    return FLOAT32_BYTES * sum(p.numel() for p in head.parameters() if p.requires_grad)


def check_memory_fits(parts: BytesByPart, total: int) -> None:
    """Refuse a run that cannot fit.

    Args:
        parts: result of `estimate_memory`.
        total: bytes available to this process on its device.

    Raises:
        InputError: with the parts and the settings that help.
    """
    if sum(parts.values()) > total:
        raise InputError(f"{format_memory(parts, total)}: does not fit; {REMEDIES}")


def get_available_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process has or can get on a CUDA device; None on others."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def format_memory(parts: BytesByPart, total: int | None) -> str:
    """Format an estimate in GB, by part, with its sum and the device's memory if known."""
    named = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    limit = "" if total is None else f" of {total / 1e9:.1f}"
    return (
        f"memory on each device, estimated, in GB: {named} = {sum(parts.values()) / 1e9:.1f}{limit}"
    )


def format_measured_memory(parts: BytesByPart, device: torch.device) -> str:
    """Format the estimate and the measured peak of a CUDA device as a line."""
    measured = torch.cuda.max_memory_allocated(device)
    return (
        f"memory: {sum(parts.values()) / 1e9:.1f} GB estimated, {measured / 1e9:.1f} GB measured "
        "at most"
    )


def estimate_loss_bytes(
    setting: LaunchSpec, rows: int, shape: tuple[int, int], num_pieces: int
) -> int:
    """Estimate the bytes of a chunk: its logits, and pieces or factors of the backward product.

    Args:
        setting: facts of the launch.
        rows: rows of a student.
        shape: shape [W, H] of the projection.
        num_pieces: `PIECES_OF_TEXT` or `PIECES_OF_TEACHER`; logits that are not float32 add one.
    """
    e, (width, hidden) = setting.dtype.itemsize, shape
    whole = get_chunk_limit(setting)
    chunk = min(rows, max(1, whole // (width * e)))
    piece = min(
        fused_linear.compute_piece_bytes(width, not setting.cuda), chunk * width * FLOAT32_BYTES
    )
    tile = min(fused_linear.TILE_BYTES, width * max(hidden, chunk) * FLOAT32_BYTES)
    back = chunk * hidden * (e + FLOAT32_BYTES) + (0 if e == FLOAT32_BYTES else tile)
    return (
        chunk * width * e
        + chunk * hidden * e
        + max((num_pieces + (e < FLOAT32_BYTES)) * piece, back)
    )


def estimate_teacher_bytes(setting: LaunchSpec, rows: int, target: Any, width: int) -> int:
    """Estimate the bytes of the target's logits [rows, width] beside a student's logits."""
    return min(rows * width * target.dtype.itemsize, get_chunk_limit(setting))


def estimate_teacher_peak_bytes(setting: LaunchSpec, rows: int, target: Any, width: int) -> int:
    """Estimate the bytes while a teacher's logits are computed: all, the drafted, and pieces."""
    whole = estimate_teacher_bytes(setting, rows, target, target.vocab_size)
    drafted = 0 if width == target.vocab_size else whole * width // target.vocab_size
    most = fused_linear.compute_piece_bytes(target.vocab_size, not setting.cuda)
    return whole + drafted + 2 * min(most, rows * target.vocab_size * FLOAT32_BYTES)


def estimate_copied_bytes(head: Any, setting: LaunchSpec) -> int:
    """Estimate the bytes of copies of all matrices, if autocast's dtype is not float32."""
    if setting.dtype is torch.float32:
        return 0
    sizes = (p.numel() for p in head.parameters() if p.requires_grad and p.dim() > 1)
    return setting.dtype.itemsize * sum(sizes)


def get_chunk_limit(setting: LaunchSpec) -> int:
    """Return the largest bytes of a chunk's logits in a launch."""
    return fused_linear.CHUNK_BYTES if setting.cuda else fused_linear.CPU_CHUNK_BYTES
