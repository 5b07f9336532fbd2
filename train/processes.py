"""The processes of a launch: joining them, and when their gradients meet."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs
from torch import nn

from conf.launch import check_launch
from conf.schema import Dtype, InputError, TrainConfig
from train.launch import check_batch


def start(config: TrainConfig) -> Accelerator:
    """Joins the processes of this launch.

    Raises:
        InputError: they do not see each other, the batch does not divide among them, or the
            dtype cannot be trained in.
    """
    if config.dtype is Dtype.float16:
        raise InputError("train.dtype=float16 is not trained in; allowed: auto, float32, bfloat16")
    cuda = torch.cuda.is_available() and not _is_set("ACCELERATE_USE_CPU")
    deepspeed = _is_set("ACCELERATE_USE_DEEPSPEED")
    bfloat16 = config.dtype is Dtype.bfloat16 or (config.dtype is Dtype.auto and cuda)
    gloo = [InitProcessGroupKwargs(backend="gloo")] if deepspeed and not cuda else []
    accelerator = Accelerator(
        cpu=not cuda and not deepspeed,
        mixed_precision="bf16" if bfloat16 else "no",
        kwargs_handlers=gloo,
    )
    check_launch(os.environ, accelerator.num_processes)
    check_batch(config, accelerator.num_processes)
    if deepspeed:
        _set_up_deepspeed(accelerator, config)
    return accelerator


def _set_up_deepspeed(accelerator: Accelerator, config: TrainConfig) -> None:
    """Gives DeepSpeed what it would otherwise take from a loader; it clips by itself.

    Raises:
        InputError: ZeRO-3, or a run to continue: its optimizer state lies in shards that our
            checkpoints do not hold.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin.zero_stage == 3:
        raise InputError("deepspeed zero_stage=3: allowed: 0, 1, 2 (a head is small)")
    if config.resume is not None:
        raise InputError(f"train.resume={config.resume}: not under DeepSpeed; use DDP to resume")
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = config.micro_batch_size
    plugin.deepspeed_config["gradient_clipping"] = config.max_grad_norm
    accelerator.print("DeepSpeed: no checkpoints are written; a stopped run starts again")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


@contextmanager
def sync_if(last: bool, accelerator: Accelerator, module: nn.Module) -> Iterator[None]:
    """Lets gradients of this micro batch meet only if it is the `last` of its step."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.sync_gradients = last
        yield
    elif last:
        yield
    else:
        with accelerator.no_sync(module):
            yield
