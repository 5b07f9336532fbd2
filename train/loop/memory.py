"""How much memory a run needs on each device, by part, from shapes alone.

A run is fullest at one of two moments: in the last chunk of the loss, when everything that the
backward pass reads is kept, or in the backward pass, where gradients of activations, and what a
strategy gathers of weights' gradients, take the place of the loss. Everything supervised is the
worst case, and the one counted. Optimizer steps need nothing beyond what is held anyway.

Letters: N tokens of a micro batch, H hidden, I intermediate, V vocabulary, W draft vocabulary, J
steps, K heads, S bytes of the trained parameters, n processes, e bytes of a number in
`train.dtype`, t bytes of one of the target's.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conf.schema import Dtype, InputError, TrainConfig
from heads.eagle.head import EagleHead
from heads.medusa.head import MedusaHead
from heads.target.ends import TargetEnds
from heads.target.load import resolve_dtype
from heads.target.model import Target
from train.dist.processes import ZERO_BUCKET
from train.loss.fused import (
    CHUNK_BYTES,
    CPU_CHUNK_BYTES,
    CPU_PIECE_BYTES,
    PIECE_BYTES,
    TILE_BYTES,
)
from train.objective import Objective

Parts = dict[str, int]
PIECES_OF_TEXT, PIECES_OF_TEACHER = 1, 4
"""Float32 tensors of a piece of the loss that live at a time (see `train.loss.fused.PIECE_BYTES`):
against the text and against a distribution; one more where logits are not float32."""
FLOAT32 = 4
REMEDIES = (
    "lower train.micro_batch_size, data.max_length or head.draft_vocab_size, load the target with "
    "target.quantization, train from a feature store with data.features, or launch with "
    "conf/accelerate/fsdp2.yaml or zero2.yaml"
)


@dataclass(frozen=True)
class Setting:
    """What memory depends on besides the objective.

    Attributes:
        tokens: N.
        dtype: autocast's, of the head.
        strategy: `DDP` (also one process), `FSDP2` or `ZeRO-1`, `ZeRO-2`, `ZeRO-3`.
        num_processes: n.
        cuda: whether micro batches are prepared ahead, and pieces are large.
    """

    tokens: int
    dtype: torch.dtype
    strategy: str
    num_processes: int
    cuda: bool

    @classmethod
    def of(cls, config: TrainConfig, length: int, strategy: str, accelerator: Any) -> "Setting":
        """Of a launch, and sequences of some tokens."""
        device = accelerator.device
        dtype = resolve_dtype(Dtype(config.dtype), device)
        tokens = config.micro_batch_size * length
        return cls(tokens, dtype, strategy, accelerator.num_processes, device.type == "cuda")


def estimate(objective: Objective, setting: Setting) -> Parts | None:
    """Bytes by part at the fullest moment; None where no formula is known.

    Args:
        objective: of Medusa or EAGLE heads; tensors on the `meta` device will do.
        setting: the launch.
    """
    head: Any = objective.head
    target = objective.target
    parts: Any
    if isinstance(head, EagleHead):
        parts = partial(_eagle, head, target, len(objective.weights))
    elif isinstance(head, MedusaHead):
        soft = bool(getattr(objective, "soft", False))
        parts = partial(_medusa, head, target, soft)
    else:
        return None
    copies, kept, of_loss, of_backward = parts(setting)
    held = {"target": target_bytes(target), **_of_strategy(head, setting)}
    reduced = _reduction(head, setting)
    held |= {"hidden states": _states(objective, setting), "activations of the head": kept}
    # The target reads the next micro batch on a stream of its own beside all that.
    held["a pass of the target"] = _pass(target, setting) if setting.cuda else 0
    moments: list[Parts] = [
        {**held, "copies in train.dtype": copies, "loss": of_loss},
        {**held, "backward pass": of_backward, "reduction of gradients": reduced},
    ]
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    return {name: size for name, size in fullest.items() if size}


def target_bytes(target: TargetEnds) -> int:
    """Of its weights, or of its ends beside a feature store; of what lies where the head does."""
    whole: Any = target.model if isinstance(target, Target) else None
    if whole is not None:
        here = [each for each in whole.parameters() if each.device == target.device]
        return sum(each.numel() * each.element_size() for each in here)
    ends = {each.weight.data_ptr(): each.weight for each in (target.embedding, target.output_head)}
    return sum(each.numel() * each.element_size() for each in ends.values())


def trained_bytes(head: Any) -> int:
    """S, float32."""
    return FLOAT32 * sum(each.numel() for each in head.parameters() if each.requires_grad)


def _of_strategy(head: Any, setting: Setting) -> Parts:
    """Parameters, gradients and optimizer state.

    DDP holds S of weights, S of gradients (views of its buckets) and 2 S of moments. FSDP2 holds
    all as S / n, and whole weights and gradients while in use. ZeRO's optimizer has a copy of
    its share of the weights; from stage 2 on also of the gradients, which are whole until they
    are reduced; at stage 3 the weights lie in shares until they are used.
    """
    whole = trained_bytes(head)
    frozen = FLOAT32 * sum(e.numel() for e in head.parameters() if not e.requires_grad)
    share = whole // setting.num_processes
    weights, optimizer, gradients = {
        "DDP": (whole, 2 * whole, whole),
        "FSDP2": (whole + share, 2 * share, whole),
        "ZeRO-1": (whole + share, 2 * share, whole),
        "ZeRO-2": (whole + share, 2 * share, whole),
        "ZeRO-3": (whole + 2 * share, 2 * share, whole),
    }[setting.strategy]
    return {"head": weights + frozen, "gradients": gradients, "optimizer": optimizer}


def _reduction(head: Any, setting: Setting) -> int:
    """FSDP2 gets S / n, and copies whole gradients after it has given whole weights back.

    ZeRO moves gradients into its bucket, and shares out what it has moved.
    """
    if setting.strategy == "FSDP2":
        return trained_bytes(head) // setting.num_processes
    return ZERO_BUCKET * FLOAT32 if setting.strategy.startswith("ZeRO") else 0


def _states(objective: Objective, setting: Setting) -> int:
    """N (1 + layers read) H t of this micro batch, and of the next one on CUDA."""
    target: Any = objective.target
    read = 1 + len(objective.head.reads.layers)
    here = setting.tokens * read * target.hidden_size * target.dtype.itemsize
    return (2 if setting.cuda else 1) * here


def _pass(target: TargetEnds, setting: Setting) -> int:
    """Of a layer without gradients: 3 N I t in its MLP and 4 N H t beside it."""
    if not isinstance(target, Target):
        return 0
    inner = getattr(target.config, "intermediate_size", 4 * target.hidden_size)
    return setting.tokens * target.dtype.itemsize * (3 * inner + 4 * target.hidden_size)


Counted = tuple[int, int, int, int]
"""Bytes of copies in train.dtype, of what is kept for the backward pass, of the loss, and of the
backward pass."""


def _medusa(head: MedusaHead, target: TargetEnds, soft: bool, setting: Setting) -> Counted:
    """N H float32 of states; per head and token 2 H e in its blocks and H float32 for the loss."""
    tokens, e, hidden = setting.tokens, setting.dtype.itemsize, target.hidden_size
    rows = tokens * hidden
    kept = FLOAT32 * rows + head.num_heads * rows * (2 * head.config.num_layers * e + FLOAT32)
    grads = head.num_heads * rows * FLOAT32
    one = len(head.vocab.ids), hidden
    loss = _loss(setting, tokens, one, PIECES_OF_TEACHER if soft else PIECES_OF_TEXT)
    # With hard labels heads take their turns, and only one has its projection cast.
    spared = 0 if soft else (head.num_heads - 1) * one[0] * hidden
    copies = max(0, _copied(head, setting) - e * spared)
    return copies, kept, loss + grads, grads + 3 * rows * FLOAT32


def _eagle(head: EagleHead, target: TargetEnds, num_steps: int, setting: Setting) -> Counted:
    """What autograd keeps of a step, counted with `torch.autograd.graph.saved_tensors_hooks`.

    Per token: 4 I e in the MLP, 2 Q e and 6 K e in the attention (queries of width Q, keys and
    values of K each), and of width H, 38 bytes in bfloat16 and 40 in float32: inputs of three
    projections, norms (in float32), residual stream. The text adds what `fc` reads, before and
    after its cast, and the layer's inputs, 2 H in float32, which live while steps are made.
    """
    llama, tokens, e = head.config.llama, setting.tokens, setting.dtype.itemsize
    hidden, inner = llama.hidden_size, llama.intermediate_size
    attention = head.layer.self_attn
    query, keys = attention.q_proj.out_features, attention.k_proj.out_features
    of_width = 38 if e == 2 else 40
    a_step = e * (4 * inner + 2 * query + 6 * keys) + of_width * hidden
    text = (FLOAT32 + e) * head.fc.in_features + FLOAT32 * 2 * hidden
    kept = tokens * (num_steps * a_step + text)
    grads = FLOAT32 * num_steps * tokens * hidden
    students = num_steps * tokens
    one = head.projection().weight.shape[0], hidden
    teacher = tokens * one[0] * target.dtype.itemsize
    whole = CHUNK_BYTES if setting.cuda else CPU_CHUNK_BYTES
    loss = grads + _loss(setting, students, one, PIECES_OF_TEACHER) + min(teacher, whole)
    return _copied(head, setting), kept, loss, 2 * grads + 3 * tokens * inner * e


def _copied(head: Any, setting: Setting) -> int:
    """Of all matrices, where autocast's dtype is another than float32."""
    if setting.dtype is torch.float32:
        return 0
    matrices = (each for each in head.parameters() if each.requires_grad and each.dim() > 1)
    return setting.dtype.itemsize * sum(each.numel() for each in matrices)


def _loss(setting: Setting, rows: int, shape: tuple[int, int], num_pieces: int) -> int:
    """Of a chunk: its logits, and either pieces or what carries the gradient back.

    Args:
        setting: the launch.
        rows: of a student.
        shape: of the projection, [W, H].
        num_pieces: that live at a time, beside one for the logits where they are not float32.
    """
    e, (width, hidden) = setting.dtype.itemsize, shape
    whole = CHUNK_BYTES if setting.cuda else CPU_CHUNK_BYTES
    chunk = min(rows, max(1, whole // (width * e)))
    piece = min(PIECE_BYTES if setting.cuda else CPU_PIECE_BYTES, chunk * width * FLOAT32)
    tile = min(TILE_BYTES, width * max(hidden, chunk) * FLOAT32)
    back = chunk * hidden * (e + FLOAT32) + (0 if e == FLOAT32 else tile)
    return chunk * width * e + chunk * hidden * e + max((num_pieces + (e < FLOAT32)) * piece, back)


def line(parts: Parts, total: int | None) -> str:
    """`memory on each device, estimated: target 16.1 GB, ... = 31.0 of 139.8 GB`."""
    named = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    limit = "" if total is None else f" of {total / 1e9:.1f}"
    return (
        f"memory on each device, estimated, in GB: {named} = {sum(parts.values()) / 1e9:.1f}{limit}"
    )


def check(parts: Parts, total: int) -> None:
    """Refuses what cannot fit.

    Args:
        parts: of `estimate`.
        total: bytes that this process can have on its device.

    Raises:
        InputError: with the parts, and keys that help.
    """
    if sum(parts.values()) > total:
        raise InputError(f"{line(parts, total)}: that cannot fit; {REMEDIES}")


def available(device: torch.device) -> int | None:
    """Bytes that this process has or can get on a CUDA device."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def afterwards(parts: Parts, device: torch.device) -> str:
    """The estimate beside what was measured on a CUDA device."""
    measured = torch.cuda.max_memory_allocated(device)
    return (
        f"memory: {sum(parts.values()) / 1e9:.1f} GB estimated, {measured / 1e9:.1f} GB measured "
        "at most"
    )
