"""vLLM on a CPU: its environment, and DFlash's keys of a text by the norm of each layer."""

import os

# vLLM, numba and torch read these when they are imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    # To compile the method `ngram` takes a minute, to interpret it no time at these sizes.
    "NUMBA_DISABLE_JIT": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

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
