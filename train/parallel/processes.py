"""Join, synchronise and end the processes of a launch: one, DDP, FSDP2 or DeepSpeed."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState, utils
from transformers.integrations import unset_hf_deepspeed_config

from conf.command.environment import check_launch
from conf.errors import InputError
from conf.files import LOCK_NAME, lock_file, make_folder
from conf.settings.target import Dtype
from conf.settings.training import Optimizer, TrainConfig
from heads.devices import keep_freed_memory, warn_if_slow
from heads.target_model.load import resolve_dtype

PATIENCE = timedelta(days=30)
ZERO_BUCKET = 2**26
"""Numbers in ZeRO's gradient buffer. DeepSpeed's default takes 2 GB, more than many heads."""


def start_accelerator(config: TrainConfig) -> Accelerator:
    """Join the processes of this launch; warn if `train.dtype` is slow here.

    Raises:
        InputError: the processes do not see each other, the batch does not divide among them, the
            dtype cannot be trained in, or the launch file asks for something unsupported.
    """
    if config.dtype is Dtype.float16:
        raise InputError("train.dtype=float16: not trained in; allowed: auto, float32, bfloat16")
    deepspeed = _is_set("ACCELERATE_USE_DEEPSPEED")
    if uses_fsdp():
        _set_up_fsdp()
    cuda = torch.cuda.is_available() and not _is_set("ACCELERATE_USE_CPU")
    # Gradients are views of DDP's buckets and take no further memory.
    in_buckets = utils.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    handlers: list[utils.KwargsHandler] = [in_buckets]
    if deepspeed and not cuda:
        handlers.append(utils.InitProcessGroupKwargs(backend="gloo"))
    try:
        accelerator = Accelerator(
            cpu=not cuda and not deepspeed,
            mixed_precision="no",  # `make_strategy` autocasts under every strategy
            kwargs_handlers=handlers,
        )
    except ValueError as error:
        raise InputError(
            f"accelerate refuses this launch: {error}; dtypes are set with train.dtype"
        ) from error
    check_launch(os.environ, accelerator.num_processes)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    if config.batch_tokens is None:
        check_batch(config, accelerator.num_processes)
    if deepspeed:
        _set_up_deepspeed(accelerator, config)
    warn_if_slow("train.dtype", resolve_dtype(config.dtype, accelerator.device), accelerator.device)
    wait_for_processes()
    return accelerator


def check_batch(config: TrainConfig, num_processes: int) -> None:
    """Refuse a batch that does not divide into equal micro batches.

    Raises:
        InputError: naming the three numbers.
    """
    share = num_processes * config.micro_batch_size
    if config.batch_size % share:
        raise InputError(
            f"train.batch_size={config.batch_size}: not divisible by {num_processes} processes x "
            f"train.micro_batch_size={config.micro_batch_size}; set a multiple of {share}"
        )


def wait_for_processes() -> None:
    """Wait for all processes, however long they take.

    Other collectives time out after minutes, so that a broken network is noticed. Processes that
    may have unequal work wait here first.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier(_make_patient_group(torch.distributed.group.WORLD))


@lru_cache(maxsize=1)
def _make_patient_group(_world: Any) -> Any:
    """Make a process group once per world, on all processes at the same time."""
    return torch.distributed.new_group(backend="gloo", timeout=PATIENCE)


@contextmanager
def hold_folder(state: Accelerator | PartialState, folder: Path) -> Iterator[None]:
    """Hold the lock of a folder on the main process; the folder is made if it is missing.

    All processes of the launch call this.

    Raises:
        InputError: on every process, if another launch writes there.
    """
    is_new, lock, refusal = not folder.exists(), None, [""]
    if state.is_main_process:
        try:
            make_folder(folder)
            lock = lock_file(folder / LOCK_NAME)
        except InputError as error:
            refusal = [str(error)]
    wait_for_processes()  # the main process may wait for a sign of another machine
    if utils.broadcast_object_list(refusal)[0]:
        raise InputError(refusal[0])
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
            if is_new:
                with suppress(OSError):  # keeps what is in it
                    folder.rmdir()


def broadcast_from_main(value: bool) -> bool:
    """Broadcast a decision of the main process to all."""
    return bool(utils.broadcast_object_list([value])[0])


def end_processes(accelerator: Accelerator) -> None:
    """End the launch once all processes have come this far."""
    wait_for_processes()
    # A group left open would end the interpreter while its threads run.
    _make_patient_group.cache_clear()
    accelerator.end_training()


def uses_fsdp() -> bool:
    """Tell whether the launch asked for FSDP. On a CPU the accelerator does not know."""
    return _is_set("ACCELERATE_USE_FSDP")


def check_not_sharded(script: str) -> None:
    """Refuse strategies that shard parameters or optimizer state, for a script that is named.

    Raises:
        InputError: the launch asks for such a strategy.
    """
    for name, asked in (("FSDP", uses_fsdp()), ("DeepSpeed", _is_set("ACCELERATE_USE_DEEPSPEED"))):
        if asked:
            raise InputError(
                f"{script}: cannot run under {name}, because an adapter's parameters lie inside "
                "the whole target; launch with conf/accelerate/ddp.yaml"
            )


def _set_up_fsdp() -> None:
    """Keep transformers from loading the unsharded target on one process only.

    Raises:
        InputError: FSDP1, or parameters on the CPU.
    """
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise InputError(
            f"fsdp_version={version}: not supported; set fsdp_version: 2, as in "
            "conf/accelerate/fsdp2.yaml"
        )
    if _is_set("FSDP_OFFLOAD_PARAMS"):
        raise InputError(
            "fsdp_offload_params=true: not supported, as a head is small; set "
            "fsdp_offload_params: false"
        )
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def _set_up_deepspeed(accelerator: Accelerator, config: TrainConfig) -> None:
    """Hand `train.*` to DeepSpeed, and let transformers load the target whole.

    Raises:
        InputError: a DeepSpeed setting would change the training or its checkpoints.
    """
    if accelerator.distributed_type != utils.DistributedType.DEEPSPEED:
        raise InputError(
            "ACCELERATE_USE_CPU: switches DeepSpeed off; unset it, and hide GPUs with "
            "CUDA_VISIBLE_DEVICES="
        )
    if config.max_grad_value is not None:
        norm = config.max_grad_norm or config.max_grad_value
        raise InputError(
            f"train.max_grad_value={config.max_grad_value}: DeepSpeed clips by norm only; set "
            f"train.max_grad_value=null train.max_grad_norm={norm}, or launch with "
            "conf/accelerate/ddp.yaml or fsdp2.yaml"
        )
    if config.optimizer is Optimizer.muon:
        raise InputError(
            "train.optimizer=muon: needs matrices, but DeepSpeed flattens parameters; set "
            "train.optimizer=adamw, or launch with conf/accelerate/ddp.yaml or fsdp2.yaml"
        )
    plugin = accelerator.state.deepspeed_plugin
    settings = plugin.deepspeed_config
    if plugin.zero_stage not in (1, 2, 3):
        raise InputError(
            f"deepspeed zero_stage={plugin.zero_stage}: allowed: 1, 2, 3; without ZeRO launch with "
            "conf/accelerate/ddp.yaml"
        )
    for name in ("offload_optimizer_device", "offload_param_device"):
        if getattr(plugin, name) not in (None, "none"):
            raise InputError(
                f"deepspeed {name}={getattr(plugin, name)}: allowed: none, as a head is small; "
                "remove it"
            )
    dtypes = [name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled") is True]
    for name in (*dtypes, *(name for name in ("optimizer", "scheduler") if name in settings)):
        raise InputError(f"deepspeed {name}: set by train.*; remove it from the DeepSpeed config")
    zero = settings["zero_optimization"]
    # DeepSpeed chooses; accelerate would look for a hidden size.
    for name in [name for name, value in zero.items() if value == "auto"]:
        del zero[name]
    zero.setdefault("reduce_bucket_size", ZERO_BUCKET)
    settings["gradient_accumulation_steps"] = 1  # the loop counts micro batches
    settings["train_micro_batch_size_per_gpu"] = config.micro_batch_size
    settings["train_batch_size"] = config.micro_batch_size * accelerator.num_processes
    settings["gradient_clipping"] = config.max_grad_norm or 0.0
    # Otherwise ZeRO-3 replaces `torch.nn.functional.linear` by its own, with other rounding.
    zero["memory_efficient_linear"] = False
    # DeepSpeed calls functions at every step that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    # Under ZeRO-3 transformers would shard the target.
    unset_hf_deepspeed_config()


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
