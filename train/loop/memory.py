"""Memory that a run needs on each device, by part, from shapes alone.

A run is fullest at one of two moments: in the last chunk of the loss, when everything that the
backward pass reads is kept, or in the backward pass, where gradients of activations, and what a
strategy gathers of weights' gradients, take the place of the loss. Everything supervised is the
worst case, and the one counted. Optimizer steps need nothing beyond what is held anyway.

Letters: N tokens of a micro batch, H hidden, I intermediate, V vocabulary, W draft vocabulary, J
steps, K heads, S bytes of the trained parameters, n processes, e bytes of a number in
`train.dtype`, t bytes of one of the target's.
"""

from typing import Any

import torch

from conf.errors import InputError
from heads.target_model.embeddings_and_head import EmbeddingsAndHead
from heads.target_model.model import Target
from heads.target_model.sizes import mlp_size
from train.loss.sizes import FLOAT32, LaunchSizes
from train.objective import Objective
from train.parallel.optimizers import state_keys
from train.parallel.processes import ZERO_BUCKET

Parts = dict[str, int]
REMEDIES = (
    "lower train.micro_batch_size, data.max_length or head.draft_vocab_size, load the target with "
    "target.quantization, train from a feature store with data.features, or launch with "
    "conf/accelerate/fsdp2.yaml or zero2.yaml"
)


def estimate(objective: Objective, setting: LaunchSizes) -> Parts | None:
    """Bytes by part at the fullest moment; None where no formula is known.

    Args:
        objective: says what its head keeps; tensors on the `meta` device will do.
        setting: the launch.
    """
    head, target = objective.head, objective.target
    counted = objective.memory(setting)
    if counted is None:
        return None
    held = {"target": target_bytes(target), **_of_strategy(head, setting)}
    # N (1 + layers read) H t of this micro batch and, on CUDA, the next (`Prefetcher`).
    states = setting.tokens * (1 + len(head.taps.layers)) * target.hidden_size
    held["hidden states"] = (2 if setting.cuda else 1) * states * target.dtype.itemsize
    held["activations of the head"] = counted.kept
    if setting.cuda and isinstance(target, Target):
        # The target reads the next micro batch on a stream of its own beside all that: of a layer
        # without gradients 3 N I t in its MLP and 4 N H t beside it.
        widths = 3 * mlp_size(target.config) + 4 * target.hidden_size
        held["a pass of the target"] = setting.tokens * target.dtype.itemsize * widths
    reduced = 0
    if setting.strategy == "FSDP2":
        # It gets S / n, and copies whole gradients after it has given whole weights back.
        reduced = trained_bytes(head) // setting.num_processes
    elif setting.strategy.startswith("ZeRO"):
        # It moves gradients into its bucket, and shares out what it has moved.
        reduced = ZERO_BUCKET * FLOAT32
    moments: list[Parts] = [
        {**held, "copies in train.dtype": counted.copies, "loss": counted.loss},
        {**held, "backward pass": counted.backward, "reduction of gradients": reduced},
    ]
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    return {name: size for name, size in fullest.items() if size}


def target_bytes(target: EmbeddingsAndHead) -> int:
    """Bytes of a target's weights, or of those beside a feature store, on the head's device."""
    modules = (target.embedding, target.output_head)  # which may share their weight
    weights: Any = {module.weight.data_ptr(): module.weight for module in modules}.values()
    if isinstance(target, Target):
        model: Any = target.model
        weights = [weight for weight in model.parameters() if weight.device == target.device]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def trained_bytes(head: Any) -> int:
    """S, float32."""
    return FLOAT32 * sum(p.numel() for p in head.parameters() if p.requires_grad)


def _of_strategy(head: Any, setting: LaunchSizes) -> Parts:
    """Parameters, gradients and optimizer state.

    DDP holds S of weights, S of gradients (views of its buckets) and all of the state. FSDP2
    holds an n-th of all, and whole weights and gradients while in use. ZeRO's optimizer has a copy
    of its share of the weights; from stage 2 on also of the gradients, which are whole until they
    are reduced; at stage 3 the weights lie in shares until they are used. AdamW's state is twice a
    parameter, Muon's once, an average of it once more.
    """
    whole, keys = trained_bytes(head), state_keys(head, setting.train)
    state = FLOAT32 * sum(len(keys.get(n, ())) * p.numel() for n, p in head.named_parameters())
    frozen = FLOAT32 * sum(p.numel() for p in head.parameters() if not p.requires_grad)
    share = whole // setting.num_processes
    shares = {"DDP": 0, "FSDP2": 1, "ZeRO-1": 1, "ZeRO-2": 1, "ZeRO-3": 2}[setting.strategy]
    return {
        "head": whole + shares * share + frozen,
        "gradients": whole,
        "optimizer": state // setting.num_processes if shares else state,
    }


def line(parts: Parts, total: int | None) -> str:
    """`memory on each device, estimated: target 16.1 GB, ... = 31.0 of 139.8 GB`."""
    named = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    limit = "" if total is None else f" of {total / 1e9:.1f}"
    return (
        f"memory on each device, estimated, in GB: {named} = {sum(parts.values()) / 1e9:.1f}{limit}"
    )


def check(parts: Parts, total: int) -> None:
    """Refuse a run that cannot fit.

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
    """The estimate beside the measured peak of a CUDA device, for people."""
    measured = torch.cuda.max_memory_allocated(device)
    return (
        f"memory: {sum(parts.values()) / 1e9:.1f} GB estimated, {measured / 1e9:.1f} GB measured "
        "at most"
    )
