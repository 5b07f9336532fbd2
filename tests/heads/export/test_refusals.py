"""Heads that an engine would compute otherwise, or does not load, are refused with the reason."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from exports import EAGLE31, ROPES, build, toy_target

from conf.errors import InputError
from conf.settings.blocks import Markov
from conf.settings.export import ExportFormat
from heads.export.writer import check_export_target, check_format
from heads.medusa import MedusaHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab

OTHERS = ("qk_norm", "target_hidden_size", "own_embedding", "full_layers")
"""What only heads of others have."""
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "beta_fast": 32, "rope_theta": 1e4}
EAGLE3 = "it serves heads of .*head=eagle3"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("vllm", "eagle3", {"fc_bias": True},
     r"vLLM has no place for a bias of the fusion layer \(fc.bias\)"),
    ("sglang", "eagle3", {"fc_bias": True}, "allowed for this head: trtllm$"),
    ("sglang", "eagle3", {"norm_before_residual": True}, "residual.*this head: vllm, spec"),
    ("trtllm", "eagle3", {"norm_before_residual": True}, "TensorRT-LLM has no place for the norm"),
    ("original", "eagle3", EAGLE31, "authors' code has no place for a norm per feature"),
    ("vllm", "eagle3", {"layers": [5, 2, 4]}, r"rising order, and this head reads \[5, 2, 4\]; al"),
    ("sglang", "eagle3", {"layers": [4]}, r"at least 2 hidden states.* \[4\]; allowed.*: vllm, s"),
    ("original", "eagle3", {"layers": [1, 2, 3]},
     r"reads hidden states \[1, 2, 3\] of 8, .* \[2, 4, 5\]"),
    ("trtllm", "eagle3", {"layers": [0, 2, 4]}, r"TensorRT-LLM they must lie in 1\.\.7, "),
    ("vllm", "eagle3", {"layers": [2, 4, 8]}, r"vLLM they must lie in 0\.\.7, "),
    ("sglang", "medusa", {}, "^format=sglang: SGLang loads no Medusa heads; .*: vllm, trtllm, ori"),
    ("speculators", "medusa", {}, "speculators loads no Medusa heads"),
    ("trtllm", "eagle1", {}, "TensorRT-LLM loads no EAGLE-1/2 heads; .*: vllm, sglang, original$"),
    ("original", "eagle3", {"rope": ROPES["yarn"]}, "plain RoPE.* this head has yarn with 5"),
    ("original", "eagle3", {"rope": ROPES["llama3"]}, "plain RoPE.* this head has llama3 with 5"),
    ("sglang", "peagle", {}, "loads no P-EAGLE heads"),
    ("speculators", "peagle", {"fc_norm": True}, r"no place for a norm per feature \(fc_norm\)"),
    ("vllm", "dspark", {"markov_head_type": Markov.rnn}, "_type=vanilla only, and this head has r"),
    ("trtllm", "dflash", {}, "no layout for DFlash heads in this version; allowed.*: vllm"),
    ("llamacpp", "medusa", {}, "loads no Medusa heads; allowed for this head: vllm, trtllm, "
     "original; it serves heads of train/eagle.py with head=eagle3, and of train/dflash.py, "
     "dflash2.py "),
    ("llamacpp", "eagle1", {}, f"loads no EAGLE-1/2 heads; .*; {EAGLE3}"),
    ("llamacpp", "peagle", {}, f"loads no P-EAGLE heads; .*; {EAGLE3}"),
    ("llamacpp", "eagle3", EAGLE31, r"a norm per feature \(fc_norm\); .* with head=eagle3"),
    ("llamacpp", "eagle3", {"norm_output": True}, "has no place for its normed output fed back"),
    ("llamacpp", "eagle3", {"fc_bias": True}, "has no place for a bias of the fusion layer"),
    ("llamacpp", "eagle3", {"layers": [2, 4]}, r"fuses 3 hidden states, .* head reads \[2, 4\]"),
    ("llamacpp", "eagle3", {"layers": [1, 2, 4, 5]}, "fuses 3 hidden states"),
    ("llamacpp", "eagle3", {"layers": [8, 2, 4]}, r"for llama.cpp they must lie in 0\.\.7, "),
    ("llamacpp", "eagle3", {"mlp_bias": True}, "has no place for biases"),
    ("llamacpp", "eagle3", {"attention_bias": True}, "has no place for biases"),
    ("llamacpp", "eagle3", {"qk_norm": True}, "has no place for norms on queries and keys"),
    ("llamacpp", "dspark", {"markov_head_type": Markov.gated}, "_type=vanilla only.* has gated"),
    ("llamacpp", "dspark", {"markov_head_type": Markov.rnn}, "_type=vanilla only, .* has rnn"),
    ("llamacpp", "dflash2", {"selector_top_k": 8},
     r"needs a hidden size of k \* \(k \+ 1\) .* has 64 for 8"),
    ("llamacpp", "dflash2", {"causal": True}, "lets rows of DFlash-2 see later rows"),
    ("llamacpp", "dflash", {"target_hidden_size": 32, "own_embedding": True},
     "64 for hidden states of 32"),
    ("llamacpp", "dflash", {"causal": True, "window": 4, "full_layers": (1,)},
     r"causal rows in all layers or in none, and layers \[1\] of this head see"),
    *(("llamacpp", kind, {"rope": DYNAMIC}, "supports default, linear, yarn and llama3 RoPE")
      for kind in ("eagle3", "dflash")),
    ("llamacpp", "eagle3", {"rope": YARN | {"attention_factor": 1.5}},
     "assumes attention_factor=None of YaRN's"),
    ("llamacpp", "dflash", {"rope": YARN | {"beta_fast": 16}}, "beta_fast=32 of YaRN's .* has 16"),
    ("llamacpp", "eagle3", {"rope": YARN | {"truncate": False}}, "assumes truncate=True of YaRN's"),
]  # fmt: skip


PROBLEMS = {
    "SGLang fuses at least 2 hidden states, and this head reads [4]",
    "SGLang has no place for a bias of the fusion layer (fc.bias)",
    "SGLang has no place for the normed feature as residual (norm_before_residual; heads "
    "of head=eagle3_1 have none)",
    "SGLang loads no Medusa heads",
    "SGLang loads no P-EAGLE heads",
    "TensorRT-LLM has no layout for DFlash heads in this version",
    "TensorRT-LLM has no place for the normed feature as residual (norm_before_residual; "
    "heads of head=eagle3_1 have none)",
    "TensorRT-LLM loads no EAGLE-1/2 heads",
    "llama.cpp assumes attention_factor=None of YaRN's settings, and this head has 1.5",
    "llama.cpp assumes beta_fast=32 of YaRN's settings, and this head has 16",
    "llama.cpp assumes truncate=True of YaRN's settings, and this head has False",
    "llama.cpp fuses 3 hidden states, and this head reads [1, 2, 4, 5]",
    "llama.cpp fuses 3 hidden states, and this head reads [2, 4]",
    "llama.cpp fuses hidden states as wide as the head, and this head has 64 for hidden "
    "states of 32",
    "llama.cpp has no place for a bias of the fusion layer (fc.bias)",
    "llama.cpp has no place for a norm per feature (fc_norm)",
    "llama.cpp has no place for biases of queries, keys and values alone (q_proj.bias)",
    "llama.cpp has no place for biases of the MLP (up_proj.bias)",
    "llama.cpp has no place for its normed output fed back (norm_output)",
    "llama.cpp has no place for norms on queries and keys (q_norm, k_norm)",
    "llama.cpp lets rows of DFlash-2 see later rows, and this head has head.causal=true",
    "llama.cpp loads no EAGLE-1/2 heads",
    "llama.cpp loads no Medusa heads",
    "llama.cpp loads no P-EAGLE heads",
    "llama.cpp needs a hidden size of k * (k + 1) or more for head.selector_top_k=k, and "
    "this head has 64 for 8",
    "llama.cpp needs causal rows in all layers or in none, and layers [1] of this head see "
    "all of the text",
    "llama.cpp supports default, linear, yarn and llama3 RoPE, and this head has dynamic",
    "llama.cpp supports head.markov_head_type=vanilla only, and this head has gated",
    "llama.cpp supports head.markov_head_type=vanilla only, and this head has rnn",
    "speculators has no place for a norm per feature (fc_norm)",
    "speculators loads no Medusa heads",
    "the authors' code has no place for a norm per feature (fc_norm)",
    "the authors' code supports plain RoPE, and linearly scaled RoPE with a theta of "
    "10000; this head has llama3 with 500000",
    "the authors' code supports plain RoPE, and linearly scaled RoPE with a theta of "
    "10000; this head has yarn with 50000",
    "the head reads hidden states [0, 2, 4] of 8, but for TensorRT-LLM they must lie in "
    "1..7, as the last one has passed the final norm; train with other head.layers",
    "the head reads hidden states [1, 2, 3] of 8, but the authors' code always [2, 4, 5]; "
    "train with head.layers=[2, 4, 5], or choose another format",
    "the head reads hidden states [2, 4, 8] of 8, but for vLLM they must lie in 0..7, as "
    "the last one has passed the final norm; train with other head.layers",
    "the head reads hidden states [8, 2, 4] of 8, but for llama.cpp they must lie in 0..7, "
    "as the last one has passed the final norm; train with other head.layers",
    "vLLM fuses hidden states in rising order, and this head reads [5, 2, 4]",
    "vLLM has no place for a bias of the fusion layer (fc.bias)",
    "vLLM supports head.markov_head_type=vanilla only, and this head has rnn",
}  # fmt: skip
"""What these refusals say, up to the engines that are allowed."""


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def changed(target: Target, kind: str, **changes: Any) -> Any:
    """A head of settings, of a RoPE, or with what only heads of others have."""
    layer = {"rope": "rope_parameters", "mlp_bias": "mlp_bias", "attention_bias": "attention_bias"}
    own = {key: each for key, each in changes.items() if key not in (*OTHERS, *layer)}
    head = build(target, kind, **own)
    others = {key: each for key, each in changes.items() if key in OTHERS}
    if others:
        head = type(head)(replace(head.config, **others), head.vocab)
    for key in layer.keys() & changes.keys():
        setattr(head.config.llama, layer[key], changes[key])
    return head


@pytest.mark.parametrize(("engine", "kind", "changes", "message"), REFUSED)
def test_a_head_that_an_engine_would_compute_otherwise_is_refused(
    target: Target, engine: str, kind: str, changes: dict[str, Any], message: str
) -> None:
    head = changed(target, kind, **changes)
    check = check_format if set(changes) & {*OTHERS, "rope"} else check_export_target
    with pytest.raises(InputError, match=rf"^format={engine}: ") as refused:
        check(head, ExportFormat(engine))
    assert refused.match(message)
    assert str(refused.value).removeprefix(f"format={engine}: ").split("; allowed")[0] in PROBLEMS


def test_settings_that_are_the_engine_s_own_are_none_to_refuse(target: Target) -> None:
    for kind in ("eagle3", "dflash"):
        check_format(changed(target, kind, rope=YARN), ExportFormat.llamacpp)
    check_export_target(build(target, "eagle3", layers=[7, 0, 2]), ExportFormat.llamacpp)


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "original"])
def test_no_engine_loads_medusa_heads_with_fewer_ids(target: Target, engine: str) -> None:
    few = DraftVocab(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    pruned = build(target, "medusa").prune_vocab(few).attach(target)
    with pytest.raises(InputError, match=r"reduced draft vocabulary.*allowed for this head: none"):
        check_format(pruned, ExportFormat(engine))


def test_the_authors_code_shares_the_blocks_of_a_medusa_head(target: Target) -> None:
    head = MedusaHead.from_target(target, num_heads=2, num_layers=2)
    with pytest.raises(InputError, match=r"merges the 2 residual blocks.*: vllm, trtllm$"):
        check_format(head, ExportFormat.original)


def test_another_embedding_than_the_target_s_is_refused_where_that_drafts(target: Target) -> None:
    head = build(target, "eagle3", {"own_embedding": True})
    with pytest.raises(InputError, match=r"SGLang drafts with the target's embedding, but .*embed"):
        check_export_target(head, ExportFormat.sglang)
