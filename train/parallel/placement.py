"""Layouts of a head's parameters, gradients and optimizer state on the processes.

One class per strategy behind one interface: the same optimizer step under each, and whole
tensors in and out, so that a checkpoint does not depend on which of them wrote it.

The objective is one unit under all of them. Losses use the head's weights directly, outside
the forward of its submodules, and once more in the backward pass (recomputed chunks), so all
weights are whole from the start of the objective's forward to the end of its backward.
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
from train.parallel.checkpoint import Tensors
from train.parallel.optimizers import AVERAGE, fresh_state, make_optimizers, state_keys
from train.parallel.processes import uses_fsdp
from train.schedule import late_warmup


def place(accelerator: Accelerator, objective: Any, config: TrainConfig) -> "Placement":
    """Lay the head of an objective out on the processes of a launch, and make its optimizers.

    Args:
        accelerator: of `processes.start`.
        objective: an `Objective` whose parameters are all those of its `head`, float32, the
            same on every process. Its forward pass gets the autocast of `train.dtype`.
        config: the optimizer's settings.
    """
    # Here and not by accelerate, which has DeepSpeed cast the parameters instead.
    dtype = resolve_dtype(config.dtype, accelerator.device)
    if dtype is not torch.float32:
        objective.forward = torch.autocast(accelerator.device.type, dtype)(objective.forward)
    return _class_of(accelerator)(accelerator, objective, config)


def strategy_name(accelerator: Accelerator) -> str:
    """Name of the strategy of `place`: `DDP` (also one process), `FSDP2`, `ZeRO-1`, ..."""
    strategy = _class_of(accelerator)
    if strategy is Zero:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return "FSDP2" if strategy is Sharded else "DDP"


def _class_of(accelerator: Accelerator) -> "type[Placement]":
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return Zero
    return Sharded if uses_fsdp() and torch.distributed.is_initialized() else Placement


class Placement:
    """Everything on every process: one process alone, or DDP.

    Attributes:
        name: of the strategy.
        objective: to be called for training, on micro batches.
        head: the plain module; its parameters are whole inside `gathered` only.
        trained: the head's trainable parameters by name, as they lie here.
    """

    can_discard = True
    """Gradients can be forgotten between `clip` and `step`."""

    def __init__(self, accelerator: Accelerator, objective: Any, config: TrainConfig) -> None:
        self.accelerator, self.config = accelerator, config
        self.name = strategy_name(accelerator)
        self.head: nn.Module = objective.head
        self._size = sum(p.numel() for p in self.head.parameters() if p.requires_grad)
        self.objective, self.optimizers = self._lay_out(objective)
        self.trained = {n: p for n, p in self.head.named_parameters() if p.requires_grad}
        # From the start, so that a run can be saved before its first step.
        for optimizer, tensor, _ in self._stepped():
            optimizer.state[tensor] = fresh_state(optimizer, tensor, config)

    def __str__(self) -> str:
        # Measured: a launcher may fall back to another strategy without a word.
        stepped = [tensor for _, tensor, _ in self._stepped()]  # its state is as large
        held = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in stepped)
        return f"{self.name}, {held / self._size:.0%} of the optimizer state on each process"

    def _lay_out(self, objective: Any) -> tuple[Any, list[torch.optim.Optimizer]]:
        if self.accelerator.num_processes > 1:
            # DDP turns gradients that it finds into views of its buckets; made later, the first
            # would lie beside them.
            for group in objective.groups():
                for parameter in group.parameters:
                    parameter.grad = torch.zeros_like(parameter)
        return self.accelerator.prepare(objective), make_optimizers(objective, self.config)

    def _groups(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Every group of parameters, and its optimizer."""
        return ((optim, group) for optim in self.optimizers for group in optim.param_groups)

    def _stepped(self) -> Iterable[tuple[torch.optim.Optimizer, Tensor, int]]:
        """Tensors that an optimizer holds state of, and the first step that trains each."""
        return [(o, tensor, g["first_step"]) for o, g in self._groups() for tensor in g["params"]]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward: gradients meet only in the `last` of the step."""
        if last:
            yield
        else:
            with self.accelerator.no_sync(self.objective):
                yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss []; over the processes they become a mean."""
        loss.backward()

    def clip(self, number: int) -> Tensor:
        """Clip the gradients of optimizer step `number`, from 0.

        Returns:
            [] their norm before that, on the device, the same on every process; 0 where it is
            known only to `step`.
        """
        for _, group in self._groups():
            if number < group["first_step"]:
                for parameter in group["params"]:
                    parameter.grad = None  # passed over, and the step is not counted
        max_norm, max_value = self.config.max_grad_norm or math.inf, self.config.max_grad_value
        norm = _whole(nn.utils.clip_grad_norm_(self.trained.values(), max_norm))
        if max_value is not None:
            nn.utils.clip_grad_value_(self.trained.values(), max_value)
        return norm

    def step(self, learning_rate: float, number: int) -> float:
        """Apply clipped gradients, and clear them.

        Args:
            learning_rate: of a group whose rate is 1.
            number: of the optimizer step, from 0.

        Returns:
            0, or their norm where `clip` could not tell.
        """
        for _, group in self._groups():
            warmth = late_warmup(self.config, number, group["first_step"])
            group["lr"] = learning_rate * group["rate"] * warmth
        norm = self._apply()
        if self.config.average_decay is not None:
            # At first the mean of what there was, or untrained weights would stay for long.
            decay = min(self.config.average_decay, (1 + number) / (10 + number))
            with torch.no_grad():
                for optimizer, tensor, _ in self._stepped():
                    optimizer.state[tensor][AVERAGE].lerp_(tensor, 1 - decay)
        return norm

    def _apply(self) -> float:
        for optimizer in self.optimizers:
            optimizer.step()
        self.discard()
        return 0.0

    def discard(self) -> None:
        """Forget all gradients."""
        in_buckets = isinstance(self.objective, nn.parallel.DistributedDataParallel)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not in_buckets)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, on all processes at once, the head has whole, plain parameters to read."""
        yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Gather the head as `gathered` does, with the averages of the weights if they are kept."""
        if self.config.average_decay is None:
            with self.gathered():
                yield
            return
        averages = {n: self._state(p, AVERAGE) for n, p in self.trained.items()}
        with self.gathered(), torch.no_grad():
            whole = [(self.head.get_parameter(n), average) for n, average in averages.items()]
            weights = [parameter.clone() for parameter, _ in whole]
            for parameter, average in whole:
                parameter.copy_(average)
            try:
                yield
            finally:
                for (parameter, _), own in zip(whole, weights, strict=True):
                    parameter.copy_(own)

    def tensors(self) -> Tensors:
        """Tensors of a checkpoint, whole.

        Every process takes part; all but the first get nothing. The optimizers' state is gathered
        one tensor at a time, so that no device ever holds all of it.
        """
        first = self.accelerator.is_main_process
        with self.gathered():
            head = {n: _copied(p) for n, p in self.head.named_parameters()} if first else {}
        state = {}
        for name, parameter, key in self._states():
            value = self._state(parameter, key)
            if first:
                state[f"{name}.{key}"] = _copied(value)
        return Tensors(head, state)

    def restore(self, step: int, state: dict[str, Tensor]) -> None:
        """Put the optimizers where they were after `step` steps.

        Args:
            step: optimizer steps done.
            state: of a checkpoint's `Tensors`, on every process.
        """
        for optimizer, tensor, first_step in self._stepped():
            if "step" in optimizer.state[tensor]:
                optimizer.state[tensor]["step"].fill_(max(0, step - first_step))
        for name, parameter, key in self._states():
            self._set_state(parameter, key, state[f"{name}.{key}"])

    def _states(self) -> Iterator[tuple[str, Any, str]]:
        """Name of each trained parameter, the parameter, and the name of each of its states."""
        for name, keys in state_keys(self.head, self.config).items():
            for key in keys:
                yield name, self.trained[name], key

    def _held(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state that an optimizer holds of a parameter."""
        (state,) = (o.state[parameter] for o in self.optimizers if parameter in o.state)
        return state

    def _state(self, parameter: Tensor, key: str) -> Tensor:
        return _whole(self._held(parameter)[key])

    def _set_state(self, parameter: Tensor, key: str, value: Tensor) -> None:
        self._held(parameter)[key].copy_(value)


class Sharded(Placement):
    """FSDP2: parameters, gradients and optimizer state in shards; weights whole while used.

    By torch itself: accelerate applies FSDP2 on CUDA only and falls back to DDP without a word.
    """

    def _lay_out(self, objective: Any) -> tuple[Any, list[torch.optim.Optimizer]]:
        mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
        # The backward pass follows at once: shards in between would only be gathered again.
        fully_shard(objective, mesh=mesh, reshard_after_forward=False)
        return objective, make_optimizers(objective, self.config)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward: gradients meet only in the `last` of the step."""
        self.objective.set_requires_gradient_sync(last)
        self.objective.set_reshard_after_backward(last)
        # In its forward FSDP2 would keep the buffer that weights are gathered in beside them.
        self.objective.unshard()
        yield

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, on all processes at once, the head has whole, plain parameters to read."""
        self.objective.unshard()
        try:
            yield
        finally:
            self.objective.reshard()

    def _set_state(self, parameter: Tensor, key: str, value: Tensor) -> None:
        shards: Any = self._held(parameter)[key]
        # Each process cuts its shard from what it has read itself.
        own = distribute_tensor(value, shards.device_mesh, shards.placements, src_data_rank=None)
        shards.copy_(own)


class Zero(Placement):
    """DeepSpeed: optimizer state in shards (ZeRO-1), gradients too (2), weights too (3).

    AdamW is torch's own, over flat pieces that hold many parameters; DeepSpeed clips.
    """

    can_discard = False

    def _lay_out(self, objective: Any) -> tuple[Any, list[torch.optim.Optimizer]]:
        (optimizer,) = make_optimizers(objective, self.config)  # Muon is refused at the start
        engine, _ = self.accelerator.prepare(objective, optimizer)
        if engine.zero_optimization_stage() == 3:
            # They gather weights around each submodule; a leaf module, the remedy for others,
            # reduces gradients too early unless an input of it has a gradient.
            hooks = engine.optimizer.parameter_offload
            for hook in (*hooks.forward_hooks, *hooks.backward_hooks):
                hook.remove()
        return engine, [engine.optimizer.optimizer]

    @property
    def _weights_in_shards(self) -> bool:
        return self.objective.zero_optimization_stage() == 3

    def _stepped(self) -> Iterable[tuple[torch.optim.Optimizer, Tensor, int]]:
        if not self._weights_in_shards:
            return super()._stepped()
        (adamw,) = self.optimizers
        return [(adamw, flat, 0) for flat in self.objective.optimizer.fp32_partitioned_groups_flat]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward: gradients meet only in the `last` of the step."""
        if self._weights_in_shards:
            # Whole until the step, which leaves shards.
            weights: list[Any] = list(self.head.parameters())
            weights[0].all_gather(weights)
        self.objective.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss []; over the processes they become a mean."""
        self.objective.backward(loss)

    def clip(self, number: int) -> Tensor:
        """Leave gradients alone: DeepSpeed clips in its step."""
        del number
        return torch.zeros((), device=self.accelerator.device)

    def _apply(self) -> float:
        # Not in `accelerator.backward`: the loss is checked between the two.
        self.objective.step()
        return float(self.objective.get_global_grad_norm())

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, on all processes at once, the head has whole, plain parameters to read."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(self.head.parameters()), enabled=self._weights_in_shards):
            yield

    def _state(self, parameter: Tensor, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        return safe_get_full_optimizer_state(parameter, key)

    def _set_state(self, parameter: Any, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        self._link()
        if not self._weights_in_shards:
            safe_set_full_optimizer_state(parameter, value, key)
            return
        # The setter of whole tensors fails where the last piece is padded.
        size, rank = parameter.ds_tensor.numel(), self.accelerator.process_index
        padded = torch.zeros(size * self.accelerator.num_processes, dtype=value.dtype)
        padded[: value.numel()] = value.flatten()
        safe_set_local_optimizer_state(parameter, padded[rank * size :][:size], key)

    def _link(self) -> None:
        """Let ZeRO-1 and 2 look up which slice of the state is whose, usually after a step."""
        if not self._weights_in_shards:
            self.objective.optimizer._lazy_init_hp_params_optimizer_state()


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _copied(value: Tensor) -> Tensor:
    # A copy, because safetensors refuses tensors that share memory.
    return value.detach().to("cpu", copy=True).contiguous()
