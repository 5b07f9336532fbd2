"""vLLM's DFlash on a CPU: a text's keys by the norm of each layer."""

import torch
from vllm import _custom_ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model


def normed_keys(model: DFlashQwen3Model, keys: torch.Tensor) -> torch.Tensor:
    """[L, ...] keys of the text, each layer's by its own norm: a CPU takes the first's for all."""
    found = torch.empty_like(keys)
    for number, weight in enumerate(model._k_norm_weights):
        _custom_ops.rms_norm(found[number], keys[number], weight, model._rms_norm_eps)
    return found


DFlashQwen3Model._normalize_context_k = normed_keys
