"""Operators that PyTorch promises to nobody and our code calls, as the oldest version has them.

Of `native_functions.yaml` of PyTorch 2.11, with which the machines with a GPU run.
"""

from typing import Any

import torch

SCHEMAS = [
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, "
    "Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
    "bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None) -> "
    "(Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
    "Tensor debug_attn_mask)",
    "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)",
    "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
    "float dropout_p=0.0, bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor output, Tensor logsumexp)",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, "
    "Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, "
    "Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    "aten::_scaled_dot_product_efficient_attention(Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0.0, bool is_causal=False, *, "
    "float? scale=None) -> "
    "(Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)",
    "aten::_scaled_dot_product_efficient_attention_backward(Tensor grad_out_, Tensor query, "
    "Tensor key, Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, "
    "Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, "
    "bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "aten::_assert_async.msg(Tensor self, str assert_msg) -> ()",
    "aten::mm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor",
    "aten::mm.dtype_out(Tensor self, Tensor mat2, ScalarType out_dtype, *, Tensor(a!) out) -> "
    "Tensor(a!)",
]


def _of(schema: Any) -> Any:
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
    return getattr(packet, schema.overload_name or "default")


OPERATORS = {_of(schema): schema for schema in map(torch._C.parse_schema, SCHEMAS)}
FUNCTIONS = ("_cuda_endAllocateToPool", "_cuda_releasePool")
"""Functions of `torch._C` that builds for CUDA have."""


def check_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses arguments that the oldest version does not have."""
    old = OPERATORS.get(func)
    if old is None:
        return
    names = [each.name for each in old.arguments if not each.kwarg_only]
    known = {each.name for each in old.arguments}
    assert len(args) <= len(names), f"{old.name} of PyTorch 2.11 takes {names}"
    assert kwargs.keys() <= known, f"{old.name} of PyTorch 2.11 knows no {kwargs.keys() - known}"
