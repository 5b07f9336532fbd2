"""Strategies to lay out a head's parameters, gradients and optimizer state over the processes.

One class per strategy, with one interface: the same optimizer step, and whole tensors in and out. A
checkpoint therefore does not depend on the strategy that wrote it.

The objective is one unit under every strategy. Losses use the head's weights directly, outside the
forward of its submodules and again in the backward pass. All weights are therefore whole from the
start of the objective's forward to the end of its backward.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from conf.settings.training import TrainConfig
from heads.target_model.load import resolve_dtype
from train.parallel.checkpoint import CheckpointTensors
from train.parallel.optimizers import (
    AVERAGE,
    compute_late_warmup,
    make_initial_state,
    make_optimizers,
    state_keys,
)
from train.parallel.processes import uses_fsdp


def make_strategy(
    accelerator: Accelerator, objective: Any, config: TrainConfig
) -> "ParallelStrategy":
    """Distribute the head of an objective over the processes and make its optimizers.

    Args:
        accelerator: result of `processes.start_accelerator`.
        objective: an `Objective` whose parameters all belong to its `head`, float32, the same on
            every process. Its forward pass gets the autocast of `train.dtype`.
        config: optimizer settings.
    """
    # Not by accelerate, which lets DeepSpeed cast the parameters instead.
    dtype = resolve_dtype(config.dtype, accelerator.device)
    if dtype is not torch.float32:
        objective.forward = torch.autocast(accelerator.device.type, dtype)(objective.forward)
    return _choose_strategy(accelerator)(accelerator, objective, config)


def get_strategy_name(accelerator: Accelerator) -> str:
    """Name the strategy of `make_strategy`: `DDP` (also one process), `FSDP2`, `ZeRO-1`, ..."""
    strategy = _choose_strategy(accelerator)
    if strategy is ZeroStrategy:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return "FSDP2" if strategy is Fsdp2Strategy else "DDP"


def _choose_strategy(accelerator: Accelerator) -> "type[ParallelStrategy]":
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return ZeroStrategy
    return Fsdp2Strategy if uses_fsdp() and torch.distributed.is_initialized() else ParallelStrategy


class ParallelStrategy:
    """Strategy with everything on every process: a single process, or DDP.

    Attributes:
        name: name of the strategy.
        objective: objective to call on micro batches in training.
        head: plain module; its parameters are whole only inside `open_whole_weights`.
        trained: trainable parameters of the head by name, as distributed here.
    """

    can_discard = True
    """Whether gradients can be dropped between `clip_gradients` and `step_optimizers`."""

    def __init__(self, accelerator: Accelerator, objective: Any, config: TrainConfig) -> None:
        self.accelerator, self.config = accelerator, config
        self.name = get_strategy_name(accelerator)
        self.head: nn.Module = objective.head
        self._size = sum(p.numel() for p in self.head.parameters() if p.requires_grad)
        self.objective, self.optimizers = self._lay_out(objective)
        self.trained = {n: p for n, p in self.head.named_parameters() if p.requires_grad}
        # Made at once, so that a run can be saved before its first step.
        for optimizer, tensor, _ in self._list_stepped_tensors():
            optimizer.state[tensor] = make_initial_state(optimizer, tensor, config)

    def __str__(self) -> str:
        # Measured, as a launcher may fall back to another strategy silently.
        stepped = [tensor for _, tensor, _ in self._list_stepped_tensors()]  # its state is as large
        num_held = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in stepped)
        return f"{self.name}, {num_held / self._size:.0%} of the optimizer state on each process"

    def _lay_out(self, objective: Any) -> tuple[Any, list[torch.optim.Optimizer]]:
        if self.accelerator.num_processes > 1:
            # DDP turns existing gradients into views of its buckets; later ones would take further
            # memory.
            for group in objective.list_parameter_groups():
                for parameter in group.parameters:
                    parameter.grad = torch.zeros_like(parameter)
        return self.accelerator.prepare(objective), make_optimizers(objective, self.config)

    def _iter_parameter_groups(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Yield every optimizer with each of its parameter groups."""
        return ((optim, group) for optim in self.optimizers for group in optim.param_groups)

    def _list_stepped_tensors(self) -> Iterable[tuple[torch.optim.Optimizer, Tensor, int]]:
        """List optimizer, tensor and first step of each tensor that has optimizer state."""
        return [
            (o, tensor, g["first_step"])
            for o, g in self._iter_parameter_groups()
            for tensor in g["params"]
        ]

    @contextmanager
    def open_micro_batch(self, last: bool) -> Iterator[None]:
        """Open a context of forward and backward; only the `last` one reduces gradients."""
        if last:
            yield
        else:
            with self.accelerator.no_sync(self.objective):
                yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss []; processes average them."""
        loss.backward()

    def clip_gradients(self, step: int) -> Tensor:
        """Clip the gradients of optimizer step `step`, from 0.

        Returns:
            [] norm before clipping, on the device, the same on every process; 0 if only
            `step_optimizers` knows it.
        """
        for _, group in self._iter_parameter_groups():
            if step < group["first_step"]:
                for parameter in group["params"]:
                    parameter.grad = None  # skipped, and its step is not counted
        max_norm, max_value = self.config.max_grad_norm or math.inf, self.config.max_grad_value
        norm = _gather_whole(nn.utils.clip_grad_norm_(self.trained.values(), max_norm))
        if max_value is not None:
            nn.utils.clip_grad_value_(self.trained.values(), max_value)
        return norm

    def step_optimizers(self, learning_rate: float, step: int) -> float:
        """Apply clipped gradients and clear them.

        Args:
            learning_rate: rate of a group with fraction 1.
            step: optimizer step, from 0.

        Returns:
            0, or the norm if `clip_gradients` could not tell it.
        """
        for _, group in self._iter_parameter_groups():
            warmth = compute_late_warmup(self.config, step, group["first_step"])
            group["lr"] = learning_rate * group["rate"] * warmth
        norm = self._apply_gradients()
        if self.config.average_decay is not None:
            # Starts as a plain mean, so that untrained weights fade quickly.
            decay = min(self.config.average_decay, (1 + step) / (10 + step))
            with torch.no_grad():
                for optimizer, tensor, _ in self._list_stepped_tensors():
                    optimizer.state[tensor][AVERAGE].lerp_(tensor, 1 - decay)
        return norm

    def _apply_gradients(self) -> float:
        for optimizer in self.optimizers:
            optimizer.step()
        self.discard_gradients()
        return 0.0

    def discard_gradients(self) -> None:
        """Drop all gradients."""
        in_buckets = isinstance(self.objective, nn.parallel.DistributedDataParallel)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not in_buckets)

    @contextmanager
    def open_whole_weights(self) -> Iterator[None]:
        """Open a context, on all processes at once, in which the head has whole parameters."""
        yield

    @contextmanager
    def open_averaged_weights(self) -> Iterator[None]:
        """Open a context like `open_whole_weights`, with averaged weights if they are kept."""
        averaged = {} if self.config.average_decay is None else self.trained
        averages = {n: self._gather_optimizer_state(p, AVERAGE) for n, p in averaged.items()}
        with self.open_whole_weights(), torch.no_grad():
            whole = [(self.head.get_parameter(n), average) for n, average in averages.items()]
            weights = [parameter.clone() for parameter, _ in whole]
            for parameter, average in whole:
                parameter.copy_(average)
            try:
                yield
            finally:
                for (parameter, _), weight in zip(whole, weights, strict=True):
                    parameter.copy_(weight)

    def gather_tensors(self) -> CheckpointTensors:
        """Gather the whole tensors of a checkpoint.

        Every process takes part; all but the first get nothing. Optimizer state is gathered one
        tensor at a time, so no device holds all of it.
        """
        first = self.accelerator.is_main_process
        with self.open_whole_weights():
            head = {n: copy_to_cpu(p) for n, p in self.head.named_parameters()} if first else {}
        state = {}
        for name, parameter, key in self._iter_optimizer_states():
            value = self._gather_optimizer_state(parameter, key)
            if first:
                state[f"{name}.{key}"] = copy_to_cpu(value)
        return CheckpointTensors(head, state)

    def restore_optimizers(self, step: int, state: dict[str, Tensor]) -> None:
        """Restore the optimizers after `step` steps.

        Args:
            step: optimizer steps done.
            state: `CheckpointTensors.state` of a checkpoint, on every process.
        """
        for optimizer, tensor, first_step in self._list_stepped_tensors():
            if "step" in optimizer.state[tensor]:
                optimizer.state[tensor]["step"].fill_(max(0, step - first_step))
        for name, parameter, key in self._iter_optimizer_states():
            self._set_state(parameter, key, state[f"{name}.{key}"])

    def _iter_optimizer_states(self) -> Iterator[tuple[str, Any, str]]:
        """Yield name and tensor of each trained parameter with the name of each of its states."""
        for name, keys in state_keys(self.head, self.config).items():
            for key in keys:
                yield name, self.trained[name], key

    def _get_optimizer_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state that an optimizer holds for a parameter."""
        (state,) = (o.state[parameter] for o in self.optimizers if parameter in o.state)
        return state

    def _gather_optimizer_state(self, parameter: Tensor, key: str) -> Tensor:
        return _gather_whole(self._get_optimizer_state(parameter)[key])

    def _set_state(self, parameter: Tensor, key: str, value: Tensor) -> None:
        self._get_optimizer_state(parameter)[key].copy_(value)


class Fsdp2Strategy(ParallelStrategy):
    """FSDP2: parameters, gradients and optimizer state in shards; weights whole while used.

    This class uses torch directly, as accelerate applies FSDP2 on CUDA only and silently falls back
    to DDP.
    """

    def _lay_out(self, objective: Any) -> tuple[Any, list[torch.optim.Optimizer]]:
        mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
        # The backward pass follows at once, so resharding in between would only cost a gather.
        fully_shard(objective, mesh=mesh, reshard_after_forward=False)
        return objective, make_optimizers(objective, self.config)

    @contextmanager
    def open_micro_batch(self, last: bool) -> Iterator[None]:
        """Open a context of forward and backward; only the `last` one reduces gradients."""
        self.objective.set_requires_gradient_sync(last)
        self.objective.set_reshard_after_backward(last)
        # FSDP2's own forward would keep its gather buffer beside the weights.
        self.objective.unshard()
        yield

    @contextmanager
    def open_whole_weights(self) -> Iterator[None]:
        """Open a context, on all processes at once, in which the head has whole parameters."""
        self.objective.unshard()
        try:
            yield
        finally:
            self.objective.reshard()

    def _set_state(self, parameter: Tensor, key: str, value: Tensor) -> None:
        shards: Any = self._get_optimizer_state(parameter)[key]
        # Each process cuts its shard from its own read.
        shard = distribute_tensor(value, shards.device_mesh, shards.placements, src_data_rank=None)
        shards.copy_(shard)


class ZeroStrategy(ParallelStrategy):
    """DeepSpeed: shards of optimizer state (ZeRO-1), gradients (ZeRO-2) and weights (ZeRO-3).

    AdamW is torch's, over flat pieces of many parameters. DeepSpeed clips.
    """

    can_discard = False

    def _lay_out(self, objective: Any) -> tuple[Any, list[torch.optim.Optimizer]]:
        (optimizer,) = make_optimizers(objective, self.config)  # settings refuse Muon
        engine, _ = self.accelerator.prepare(objective, optimizer)
        if engine.zero_optimization_stage() == 3:
            # The hooks gather weights around each submodule. A leaf module, the usual remedy,
            # reduces gradients too early unless one of its inputs has a gradient.
            hooks = engine.optimizer.parameter_offload
            for hook in (*hooks.forward_hooks, *hooks.backward_hooks):
                hook.remove()
        return engine, [engine.optimizer.optimizer]

    @property
    def _weights_in_shards(self) -> bool:
        return self.objective.zero_optimization_stage() == 3

    def _list_stepped_tensors(self) -> Iterable[tuple[torch.optim.Optimizer, Tensor, int]]:
        if not self._weights_in_shards:
            return super()._list_stepped_tensors()
        (adamw,) = self.optimizers
        return [(adamw, flat, 0) for flat in self.objective.optimizer.fp32_partitioned_groups_flat]

    @contextmanager
    def open_micro_batch(self, last: bool) -> Iterator[None]:
        """Open a context of forward and backward; only the `last` one reduces gradients."""
        if self._weights_in_shards:
            # Whole until the step, which shards them again.
            weights: list[Any] = list(self.head.parameters())
            weights[0].all_gather(weights)
        self.objective.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss []; processes average them."""
        self.objective.backward(loss)

    def clip_gradients(self, step: int) -> Tensor:
        """Do nothing: DeepSpeed clips in its step."""
        del step
        return torch.zeros((), device=self.accelerator.device)

    def _apply_gradients(self) -> float:
        # Not in `accelerator.backward`: the loss is checked in between.
        self.objective.step()
        return float(self.objective.get_global_grad_norm())

    @contextmanager
    def open_whole_weights(self) -> Iterator[None]:
        """Open a context, on all processes at once, in which the head has whole parameters."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(self.head.parameters()), enabled=self._weights_in_shards):
            yield

    def _gather_optimizer_state(self, parameter: Tensor, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_state_slices()
        return safe_get_full_optimizer_state(parameter, key)

    def _set_state(self, parameter: Any, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        self._link_state_slices()
        if not self._weights_in_shards:
            safe_set_full_optimizer_state(parameter, value, key)
            return
        # DeepSpeed's setter of whole tensors fails if the last piece is padded.
        size, rank = parameter.ds_tensor.numel(), self.accelerator.process_index
        padded = torch.zeros(size * self.accelerator.num_processes, dtype=value.dtype)
        padded[: value.numel()] = value.flatten()
        safe_set_local_optimizer_state(parameter, padded[rank * size :][:size], key)

    def _link_state_slices(self) -> None:
        """Tell ZeRO-1 and 2 which slice of the state belongs to which parameter, as a step does."""
        if not self._weights_in_shards:
            self.objective.optimizer._lazy_init_hp_params_optimizer_state()


def _gather_whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def copy_to_cpu(value: Tensor) -> Tensor:
    """Copy a tensor to the CPU, as safetensors refuses tensors that share memory."""
    return value.detach().to("cpu", copy=True).contiguous()
