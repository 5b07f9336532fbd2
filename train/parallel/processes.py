"""Processes of a launch, which join, wait for each other and part: one, DDP, FSDP2, DeepSpeed."""

import os
import warnings
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from accelerate import Accelerator, utils
from transformers.integrations import unset_hf_deepspeed_config

from conf.command.launch import check_launch
from conf.errors import InputError
from conf.settings.target import Dtype
from conf.settings.training import Optimizer, TrainConfig
from heads.processor import tell_if_slow
from heads.target_model.load import resolve_dtype

PATIENCE = timedelta(days=30)
ZERO_BUCKET = 2**26
"""Numbers in ZeRO's buffer of gradients; DeepSpeed's own, of 2 GB, is larger than many heads."""


def start(config: TrainConfig) -> Accelerator:
    """Join the processes of this launch; say so where `train.dtype` is slow here.

    Raises:
        InputError: they do not see each other, the batch does not divide among them, the dtype
            cannot be trained in, or the launch file asks for what is not supported.
    """
    if config.dtype is Dtype.float16:
        raise InputError("train.dtype=float16 is not trained in; allowed: auto, float32, bfloat16")
    deepspeed = _is_set("ACCELERATE_USE_DEEPSPEED")
    if uses_fsdp():
        _set_up_fsdp()
    cuda = torch.cuda.is_available() and not _is_set("ACCELERATE_USE_CPU")
    # Gradients lie in the buckets of DDP, not beside them.
    in_buckets = utils.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    handlers: list[utils.KwargsHandler] = [in_buckets]
    if deepspeed and not cuda:
        handlers.append(utils.InitProcessGroupKwargs(backend="gloo"))
    try:
        accelerator = Accelerator(
            cpu=not cuda and not deepspeed,
            mixed_precision="no",  # `placement` autocasts, alike under every strategy
            kwargs_handlers=handlers,
        )
    except ValueError as error:
        raise InputError(
            f"accelerate refuses this launch (train.dtype sets dtypes): {error}"
        ) from error
    check_launch(os.environ, accelerator.num_processes)
    if config.batch_tokens is None:
        check_batch(config, accelerator.num_processes)
    if deepspeed:
        _set_up_deepspeed(accelerator, config)
    tell_if_slow("train.dtype", resolve_dtype(config.dtype, accelerator.device), accelerator.device)
    wait()
    return accelerator


def check_batch(config: TrainConfig, num_processes: int) -> None:
    """Refuse a batch that does not divide into equal micro batches.

    Raises:
        InputError: naming the three numbers.
    """
    share = num_processes * config.micro_batch_size
    if config.batch_size % share:
        raise InputError(
            f"train.batch_size={config.batch_size} is not divisible by {num_processes} "
            f"processes x train.micro_batch_size={config.micro_batch_size}: "
            f"set a multiple of {share}"
        )


def wait() -> None:
    """Wait for all processes, however long one of them takes.

    Other collectives are given up after minutes, so that a broken network is noticed. Where one
    process may have more to do than the others, they wait here first.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier(_patient_group(torch.distributed.group.WORLD))


@lru_cache(maxsize=1)
def _patient_group(_world: Any) -> Any:
    """A group of its own, made once per world, by all processes at the same time."""
    return torch.distributed.new_group(backend="gloo", timeout=PATIENCE)


def end(accelerator: Accelerator) -> None:
    """Let the processes of a launch part, once all of them have come this far."""
    wait()
    # A group that outlives the others ends the interpreter with its threads running.
    _patient_group.cache_clear()
    accelerator.end_training()


def uses_fsdp() -> bool:
    """Tell whether the launch asked for FSDP; on CPU the accelerator does not know."""
    return _is_set("ACCELERATE_USE_FSDP")


def refuse_shards(script: str) -> None:
    """Refuse strategies that cut parameters or their optimizer's state into pieces.

    Args:
        script: that is run.

    Raises:
        InputError: the launch asks for one.
    """
    for name, asked in (("FSDP", uses_fsdp()), ("DeepSpeed", _is_set("ACCELERATE_USE_DEEPSPEED"))):
        if asked:
            raise InputError(
                f"{script} does not run under {name}: an adapter's parameters lie inside the "
                "target, whole. Use conf/accelerate/ddp.yaml"
            )


def _set_up_fsdp() -> None:
    """Keep transformers from loading the target, which is not sharded, on one process only.

    Raises:
        InputError: FSDP1, or parameters on the CPU.
    """
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise InputError(f"fsdp_version={version}: allowed: 2, as in conf/accelerate/fsdp2.yaml")
    if _is_set("FSDP_OFFLOAD_PARAMS"):
        raise InputError("fsdp_offload_params=true: allowed: false (a head is small)")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def _set_up_deepspeed(accelerator: Accelerator, config: TrainConfig) -> None:
    """Hand settings `train.*` to DeepSpeed, and tell transformers to leave the target whole.

    Raises:
        InputError: a setting of DeepSpeed would change the training, or its checkpoints.
    """
    if accelerator.distributed_type != utils.DistributedType.DEEPSPEED:
        raise InputError(
            "ACCELERATE_USE_CPU switches DeepSpeed off: for DeepSpeed on the CPU unset it, and "
            "hide GPUs with CUDA_VISIBLE_DEVICES= instead"
        )
    if config.max_grad_value is not None:
        norm = config.max_grad_norm or config.max_grad_value
        raise InputError(
            f"train.max_grad_value={config.max_grad_value}: DeepSpeed clips by norm only; set "
            f"train.max_grad_value=null train.max_grad_norm={norm}, or use "
            "conf/accelerate/ddp.yaml or fsdp2.yaml"
        )
    if config.optimizer is Optimizer.muon:
        raise InputError(
            "train.optimizer=muon: DeepSpeed lays parameters out in flat pieces, and Muon needs "
            "matrices; set train.optimizer=adamw, or use conf/accelerate/ddp.yaml or fsdp2.yaml"
        )
    plugin = accelerator.state.deepspeed_plugin
    settings = plugin.deepspeed_config
    if plugin.zero_stage not in (1, 2, 3):
        raise InputError(
            f"deepspeed zero_stage={plugin.zero_stage}: allowed: 1, 2, 3; without ZeRO use "
            "conf/accelerate/ddp.yaml"
        )
    for name in ("offload_optimizer_device", "offload_param_device"):
        if getattr(plugin, name) not in (None, "none"):
            raise InputError(
                f"deepspeed {name}={getattr(plugin, name)}: allowed: none (a head is small)"
            )
    dtypes = [name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled") is True]
    for name in (*dtypes, *(name for name in ("optimizer", "scheduler") if name in settings)):
        raise InputError(f"deepspeed config: remove {name}; train.* sets it")
    zero = settings["zero_optimization"]
    # Left to DeepSpeed; accelerate would look for a hidden size.
    for name in [name for name, value in zero.items() if value == "auto"]:
        del zero[name]
    zero.setdefault("reduce_bucket_size", ZERO_BUCKET)
    settings["gradient_accumulation_steps"] = 1  # micro batches are counted by the loop
    settings["train_micro_batch_size_per_gpu"] = config.micro_batch_size
    settings["train_batch_size"] = config.micro_batch_size * accelerator.num_processes
    settings["gradient_clipping"] = config.max_grad_norm or 0.0
    # Otherwise ZeRO-3 puts its own in place of `torch.nn.functional.linear`, with other rounding.
    zero["memory_efficient_linear"] = False
    # DeepSpeed calls what torch 2.13 deprecates, at every step.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    # Under ZeRO-3 transformers would load the target in shards.
    unset_hf_deepspeed_config()


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
