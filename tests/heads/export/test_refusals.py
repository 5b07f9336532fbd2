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

OTHERS = ("qk_norm", "target_hidden_size", "own_embedding", "full_layers", "window")
"""What only heads of others have."""
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "beta_fast": 32, "rope_theta": 1e4}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("vllm", "eagle3", {"fc_bias": True},
     "vLLM has no place for a bias of the fusion layer (fc.bias)"),
    ("sglang", "eagle3", {"fc_bias": True},
     "SGLang has no place for a bias of the fusion layer (fc.bias); allowed for this head: "
     "trtllm"),
    ("sglang", "eagle3", {"norm_before_residual": True},
     "SGLang has no place for the normed feature as residual (norm_before_residual; heads of "
     "head=eagle3_1 have none); allowed for this head: vllm, speculators, llamacpp"),
    ("trtllm", "eagle3", {"norm_before_residual": True},
     "TensorRT-LLM has no place for the normed feature as residual (norm_before_residual; heads "
     "of head=eagle3_1 have none)"),
    ("sglang", "eagle3", {"window": 6},
     "SGLang has no place for a sliding window (sliding_window); allowed for this head: vllm, "
     "speculators"),
    ("original", "eagle3", EAGLE31,
     "the authors' code has no place for a norm per feature (fc_norm)"),
    ("vllm", "eagle3", {"layers": [5, 2, 4]},
     "vLLM fuses hidden states in rising order, and this head reads [5, 2, 4]; allowed for this "
     "head: llamacpp"),
    ("sglang", "eagle3", {"layers": [4]},
     "SGLang fuses at least 2 hidden states, and this head reads [4]; allowed for this head: "
     "vllm, speculators, original"),
    ("original", "eagle3", {"layers": [1, 2, 3]},
     "the head reads hidden states [1, 2, 3] of 8, but the authors' code always [2, 4, 5]; train"
     " with head.layers=[2, 4, 5], or choose another format"),
    ("trtllm", "eagle3", {"layers": [0, 2, 4]},
     "the head reads hidden states [0, 2, 4] of 8, but for TensorRT-LLM they must lie in 1..7, "
     "as the last one has passed the final norm; train with other head.layers"),
    ("vllm", "eagle3", {"layers": [2, 4, 8]},
     "the head reads hidden states [2, 4, 8] of 8, but for vLLM they must lie in 0..7, as the "
     "last one has passed the final norm; train with other head.layers"),
    ("sglang", "medusa", {},
     "SGLang loads no Medusa heads; allowed for this head: vllm, trtllm, original"),
    ("speculators", "medusa", {}, "speculators loads no Medusa heads"),
    ("trtllm", "eagle1", {},
     "TensorRT-LLM loads no EAGLE-1/2 heads; allowed for this head: vllm, sglang, original"),
    ("original", "eagle3", {"rope": ROPES["yarn"]},
     "the authors' code supports plain RoPE, and linearly scaled RoPE with a theta of 10000; "
     "this head has yarn with 50000"),
    ("original", "eagle3", {"rope": ROPES["llama3"]},
     "the authors' code supports plain RoPE, and linearly scaled RoPE with a theta of 10000; "
     "this head has llama3 with 500000"),
    ("sglang", "peagle", {}, "SGLang loads no P-EAGLE heads"),
    ("speculators", "peagle", {"fc_norm": True},
     "speculators has no place for a norm per feature (fc_norm)"),
    ("vllm", "dspark", {"markov_head_type": Markov.rnn},
     "vLLM supports head.markov_head_type=vanilla only, and this head has rnn"),
    ("speculators", "dspark", {"window": 4},
     "speculators has no key by which vLLM lets rows of a DSpark head with a window see later "
     "rows, and this head has head.causal=false; allowed for this head: vllm, sglang, llamacpp"),
    ("trtllm", "dflash", {},
     "TensorRT-LLM loads DFlash heads in its main branch alone, for which there is no export; "
     "allowed for this head: vllm, sglang, speculators, original, llamacpp"),
    ("llamacpp", "medusa", {},
     "llama.cpp loads no Medusa heads; allowed for this head: vllm, trtllm, original; it serves "
     "heads of train/eagle.py with head=eagle3, and of train/dflash.py, dflash2.py and dspark.py"),
    ("llamacpp", "eagle1", {},
     "llama.cpp loads no EAGLE-1/2 heads; allowed for this head: vllm, sglang, original; it "
     "serves heads of train/eagle.py with head=eagle3, and of train/dflash.py, dflash2.py and "
     "dspark.py"),
    ("llamacpp", "peagle", {},
     "llama.cpp loads no P-EAGLE heads; allowed for this head: vllm, speculators; it serves "
     "heads of train/eagle.py with head=eagle3, and of train/dflash.py, dflash2.py and dspark.py"),
    ("llamacpp", "eagle3", EAGLE31,
     "llama.cpp has no place for a norm per feature (fc_norm); allowed for this head: vllm, "
     "sglang, trtllm, speculators; it serves heads of train/eagle.py with head=eagle3, and of "
     "train/dflash.py, dflash2.py and dspark.py"),
    ("llamacpp", "eagle3", {"norm_output": True},
     "llama.cpp has no place for its normed output fed back (norm_output)"),
    ("llamacpp", "eagle3", {"fc_bias": True},
     "llama.cpp has no place for a bias of the fusion layer (fc.bias)"),
    ("llamacpp", "eagle3", {"layers": [2, 4]},
     "llama.cpp fuses 3 hidden states, and this head reads [2, 4]"),
    ("llamacpp", "eagle3", {"layers": [1, 2, 4, 5]},
     "llama.cpp fuses 3 hidden states, and this head reads [1, 2, 4, 5]"),
    ("llamacpp", "eagle3", {"layers": [8, 2, 4]},
     "the head reads hidden states [8, 2, 4] of 8, but for llama.cpp they must lie in 0..7, as "
     "the last one has passed the final norm; train with other head.layers"),
    ("llamacpp", "eagle3", {"mlp_bias": True},
     "llama.cpp has no place for biases of the MLP (up_proj.bias)"),
    ("llamacpp", "eagle3", {"attention_bias": True},
     "llama.cpp has no place for biases of queries, keys and values alone (q_proj.bias)"),
    ("llamacpp", "eagle3", {"qk_norm": True},
     "llama.cpp has no place for norms on queries and keys (q_norm, k_norm)"),
    ("llamacpp", "dspark", {"markov_head_type": Markov.gated},
     "llama.cpp supports head.markov_head_type=vanilla only, and this head has gated"),
    ("llamacpp", "dspark", {"markov_head_type": Markov.rnn},
     "llama.cpp supports head.markov_head_type=vanilla only, and this head has rnn"),
    ("llamacpp", "dflash2", {"selector_top_k": 8},
     "llama.cpp needs a hidden size of k * (k + 1) or more for head.selector_top_k=k, and this "
     "head has 64 for 8"),
    ("llamacpp", "dflash2", {"causal": True},
     "llama.cpp lets rows of DFlash-2 see later rows, and this head has head.causal=true"),
    ("llamacpp", "dflash", {"target_hidden_size": 32, "own_embedding": True},
     "llama.cpp fuses hidden states as wide as the head, and this head has 64 for hidden states "
     "of 32"),
    ("llamacpp", "dflash", {"causal": True, "window": 4, "full_layers": (1,)},
     "llama.cpp needs causal rows in all layers or in none, and layers [1] of this head see all "
     "of the text"),
    *(("llamacpp", kind, {"rope": DYNAMIC},
       "llama.cpp supports default, linear, yarn and llama3 RoPE, and this head has dynamic")
      for kind in ("eagle3", "dflash")),
    ("llamacpp", "eagle3", {"rope": YARN | {"attention_factor": 1.5}},
     "llama.cpp assumes attention_factor=None of YaRN's settings, and this head has 1.5"),
    ("llamacpp", "dflash", {"rope": YARN | {"beta_fast": 16}},
     "llama.cpp assumes beta_fast=32 of YaRN's settings, and this head has 16"),
    ("llamacpp", "eagle3", {"rope": YARN | {"truncate": False}},
     "llama.cpp assumes truncate=True of YaRN's settings, and this head has False"),
]  # fmt: skip


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


@pytest.mark.parametrize(("engine", "kind", "changes", "told"), REFUSED)
def test_a_head_that_an_engine_would_compute_otherwise_is_refused(
    target: Target, engine: str, kind: str, changes: dict[str, Any], told: str
) -> None:
    """Told the problem, where rows go on also the engines that are allowed."""
    head = changed(target, kind, **changes)
    check = check_format if set(changes) & {*OTHERS, "rope"} else check_export_target
    with pytest.raises(InputError, match=rf"^format={engine}: ") as refused:
        check(head, ExportFormat(engine))
    said = str(refused.value).removeprefix(f"format={engine}: ")
    assert told in (said, said.split("; allowed")[0])


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
