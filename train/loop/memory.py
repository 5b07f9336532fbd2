"""Estimate a run's memory per device, by part, from shapes alone.

A run is fullest at one of two moments: in the last chunk of the loss, with everything kept for the
backward pass; or in the backward pass, with gradients of activations and gathered weight gradients.
The estimate assumes that all tokens are supervised. Optimizer steps need no further memory.
Objectives count the rows that they hold (`Objective.count_saved_rows`); `compute_row_bytes` has
the table of their bytes, counted with `torch.autograd.graph.saved_tensors_hooks`.

Letters: N tokens of a micro batch, H hidden, I intermediate, Q queries, K keys, F fused hidden
states, V vocabulary, W draft vocabulary, r rows of a piece, S bytes of trained parameters, n
processes, e bytes of a number in `train.dtype`, t bytes of a number of the target.
"""

from typing import Any

import torch

from conf.errors import InputError
from heads.target_model.architecture import compute_mlp_size
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.model import Target
from train.loss import fused_linear
from train.objective import PIECES_OF_TEXT, LaunchSpec, Objective, SavedRows
from train.parallel.optimizers import state_keys
from train.parallel.processes import ZERO_BUCKET

FLOAT32_BYTES = 4
REMEDIES = (
    "lower train.micro_batch_size, data.max_length or head.draft_vocab_size, load the target with "
    "target.quantization, train from a feature store with data.features, or launch with "
    "conf/accelerate/fsdp2.yaml or zero2.yaml"
)
BytesByPart = dict[str, int]


def estimate_memory(objective: Objective, setting: LaunchSpec) -> BytesByPart | None:
    """Estimate bytes by part at the fullest moment; None if the head's rows are unknown.

    Args:
        objective: objective with its head; tensors on the `meta` device suffice.
        setting: facts of the launch.
    """
    head, target = objective.head, objective.target
    estimate = estimate_pass(objective, setting)
    if estimate is None:
        return None
    parts = {"target": count_target_bytes(target), **_estimate_strategy_bytes(head, setting)}
    # N (1 + layers read) H t of this micro batch and, on CUDA, of the next (`Prefetcher`).
    states = setting.tokens * (1 + len(head.taps.layers)) * target.hidden_size
    parts["hidden states"] = (2 if setting.cuda else 1) * states * target.dtype.itemsize
    parts["activations of the head"] = estimate["activations of the head"]
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
        {**parts, **{name: estimate[name] for name in ("copies in train.dtype", "loss")}},
        {**parts, "backward pass": estimate["backward pass"], "reduction of gradients": reduced},
    ]
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    return {name: size for name, size in fullest.items() if size}


def compute_row_bytes(objective: Objective, e: int) -> BytesByPart:
    """Compute the bytes of a row that a head keeps for the backward pass, by name.

    Rows of a layer count once for each layer.
    """
    head, llama = objective.head, getattr(objective.head.config, "llama", None)
    hidden = objective.target.hidden_size if llama is None else llama.hidden_size
    rows = {"number": e, "float32 number": FLOAT32_BYTES}
    rows |= {"state": e * hidden, "float32 state": FLOAT32_BYTES * hidden}
    if llama is None:
        return rows
    attention = next(each for each in head.modules() if hasattr(each, "q_proj"))
    query, keys = attention.q_proj.out_features, attention.k_proj.out_features
    inner, features = llama.intermediate_size, head.fc.in_features
    return rows | {
        "features": e * features,
        "float32 features": FLOAT32_BYTES * features,
        "inner": e * inner,
        "keys": 2 * e * keys,  # and values
        # The MLP; the attention; 33 bytes of width H in bfloat16 and float32: inputs of three
        # projections, float32 norms, residual stream.
        "layer": e * (4 * inner + 2 * query + 6 * keys) + 33 * hidden,
        # The MLP; queries and keys projected, normed, rotated; float32 norms, their output and the
        # residual stream.
        "normed layer": 4 * e * inner + (8 + 2 * e) * (query + keys) + (16 + 2 * e) * hidden,
        "normed keys": (8 + 2 * e) * keys,
    }


def estimate_pass(objective: Objective, setting: LaunchSpec) -> BytesByPart | None:
    """Estimate the bytes of a pass by part from the rows that it holds; None if unknown."""
    saved = objective.count_saved_rows(setting)
    if saved is None:
        return None
    head, target, e = objective.head, objective.target, setting.dtype.itemsize
    width, vocab_size, row_bytes = (
        len(head.vocab.ids), target.vocab_size, compute_row_bytes(objective, e)
    )  # fmt: skip
    grad = row_bytes["float32 state"]
    limit = fused_linear.compute_chunk_bytes(target.dtype.itemsize * vocab_size, not setting.cuda)
    loss = estimate_loss_bytes(setting, saved, width, grad // FLOAT32_BYTES)
    teacher_bytes = setting.tokens * target.dtype.itemsize
    if saved.pieces > PIECES_OF_TEXT:  # the target's logits of drafted ids, beside a student's
        loss += min(teacher_bytes * width, limit)
    if saved.is_teacher_widest:  # all its logits, the drafted, and pieces
        whole = min(teacher_bytes * vocab_size, limit)
        drafted = 0 if width == vocab_size else whole * width // vocab_size
        piece = fused_linear.compute_piece_bytes(vocab_size, not setting.cuda)
        pieces = 2 * min(piece, setting.tokens * vocab_size * FLOAT32_BYTES)
        loss = max(loss, whole + drafted + pieces)
    copies = 0
    if setting.dtype is not torch.float32:  # of all matrices
        matrices = (p.numel() for p in head.parameters() if p.requires_grad and p.dim() > 1)
        copies = e * (sum(matrices) - saved.uncast)
    backward = grad * saved.backward_grads + 3 * saved.mlp_grads * row_bytes.get("inner", 0)
    return {
        "activations of the head": int(sum(n * row_bytes[k] for k, n in saved.kept.items())),
        "copies in train.dtype": copies,
        "loss": loss + grad * saved.loss_grads,
        "backward pass": backward,
    }


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


def format_memory(parts: BytesByPart, total: int | None) -> str:
    """Format an estimate in GB, by part, with its sum and the device's memory if known."""
    named = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    limit = "" if total is None else f" of {total / 1e9:.1f}"
    return (
        f"memory on each device, estimated, in GB: {named} = {sum(parts.values()) / 1e9:.1f}{limit}"
    )


def estimate_loss_bytes(setting: LaunchSpec, saved: SavedRows, width: int, hidden: int) -> int:
    """Estimate the bytes of a chunk: its logits, and pieces or factors of the backward product.

    Args:
        setting: facts of the launch.
        saved: rows of a student and their pieces.
        width: rows W of the projection.
        hidden: columns H of the projection.
    """
    e, cpu = setting.dtype.itemsize, not setting.cuda
    chunk = min(saved.compared, fused_linear.count_chunk_rows(width * e, cpu))
    piece = min(fused_linear.compute_piece_bytes(width, cpu), chunk * width * FLOAT32_BYTES)
    tile = min(fused_linear.TILE_BYTES, width * max(hidden, chunk) * FLOAT32_BYTES)
    back = chunk * hidden * (e + FLOAT32_BYTES) + (0 if e == FLOAT32_BYTES else tile)
    return (
        chunk * width * e
        + chunk * hidden * e
        + max((saved.pieces + (e < FLOAT32_BYTES)) * piece, back)
    )
