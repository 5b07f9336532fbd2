"""Small heads of every kind that engines serve, and their exports."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from feature_heads import fresh, settings_of
from toys import noisy_head, random_target

from conf.errors import InputError
from conf.settings.blocks import Markov
from conf.settings.export import ExportFormat
from heads.draft_head import DraftHead
from heads.export.writer import check_export_target, compute_reference_tensors, export_head
from heads.target_model.model import Target

EAGLE31 = {"fc_norm": True, "norm_output": True}
REDUCED, BLIND = {"own_output_head": True, "draft_vocab_size": 64}, "confidence_head_with_markov"
WINDOW, CAUSAL = {"window": 4}, {"causal": True, "window": 4}
SCALED = {"input_embedding_scale": 1.5, "output_multiplier": 0.25, "final_logit_softcapping": 0.5}
K7 = {"selector_top_k": 7}  # 7 * 8 are 56, of a hidden size of 64
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 2.0,
        "original_max_position_embeddings": 128,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
# Name: engines, settings, and what no recipe sets. The name begins with the kind of
# `feature_heads` and may end with that of a RoPE.
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "medusa": ("vllm trtllm original", {}, {}),
    "eagle1": ("vllm sglang original", {}, {}),
    "eagle1, bias": ("sglang original", {"fc_bias": True}, {}),
    "eagle3": ("vllm sglang trtllm speculators original llamacpp", {}, {}),
    "eagle3, all ids": (
        "vllm sglang trtllm speculators original llamacpp", {"draft_vocab_size": None}, {},
    ),
    "eagle3, target's head": (
        "vllm sglang trtllm speculators original llamacpp", {"draft_vocab_size": None},
        {"own_output_head": False},
    ),
    "eagle3, own embedding": (
        "vllm speculators original llamacpp", {}, {"own_embedding": True},
    ),
    "eagle3, bias": ("trtllm", {"fc_bias": True}, {}),
    "eagle3.1": ("vllm sglang trtllm speculators", {"layers": [1, 3, 5, 7]}, {}),
    "eagle3, after the norm": ("vllm speculators llamacpp", {"norm_before_residual": True}, {}),
    "eagle3, norm before fc": (
        "vllm sglang trtllm speculators llamacpp", {}, {"norm_before_fc": True},
    ),
    "eagle3, qwen3": ("vllm speculators", {}, {"qk_norm": True}),
    "eagle3, first and last out of order": ("llamacpp", {"layers": [7, 0, 3]}, {}),
    "eagle3, linear": ("vllm sglang trtllm speculators original llamacpp", {}, {}),
    "eagle3, yarn": ("vllm sglang trtllm speculators llamacpp", {}, {}),
    "eagle3, llama3": ("vllm sglang trtllm speculators llamacpp", {}, {}),
    "peagle": ("vllm speculators", {}, {}),
    "peagle, normed": (
        "vllm", {"fc_norm": True, "norm_before_residual": True, "num_layers": 3}, {},
    ),
    "peagle, all ids": ("vllm speculators", {"draft_vocab_size": None, "num_layers": 1}, {}),
    "dflash": ("vllm sglang speculators original llamacpp", {}, {}),
    "dflash, causal in a window": (
        "vllm sglang speculators llamacpp", {"causal": True, "window": 9}, {},
    ),
    "dflash, reduced": ("vllm speculators llamacpp", REDUCED, {}),
    "dflash, ends": ("vllm sglang speculators original llamacpp", {"layers": [1, 4, 7]}, {}),
    # speculators' layout has one word for all layers in vLLM.
    "dflash, mixed": ("vllm sglang", CAUSAL, {"full_layers": (0,)}),
    "dflash, window in one layer": (
        "vllm sglang speculators llamacpp", WINDOW, {"full_layers": (1,)},
    ),
    "dflash, own embedding": ("vllm speculators llamacpp", {}, {"own_embedding": True}),
    "dflash, llama3": ("vllm sglang speculators original llamacpp", {}, {}),
    "dflash2": ("vllm sglang speculators original llamacpp", K7, {}),
    "dflash2, nine": ("vllm sglang speculators original", {}, {}),
    "dflash2, in a window": ("vllm sglang speculators", WINDOW, {}),
    "dflash2, scaled": ("vllm sglang original llamacpp", K7, SCALED),
    "dspark": ("vllm sglang speculators original llamacpp", {}, {}),
    "dspark, gated": (
        "sglang speculators original", {"markov_head_type": Markov.gated, BLIND: False}, {},
    ),
    "dspark, rnn": ("speculators", {"markov_head_type": Markov.rnn, **REDUCED}, {}),
    "dspark, in a window": ("vllm sglang speculators llamacpp", CAUSAL, {}),
    "dspark, mixed": ("vllm sglang", CAUSAL, {"full_layers": (0,)}),
    "dspark, reduced": ("vllm speculators llamacpp", REDUCED, {}),
    "dspark, blind confidence": (
        "vllm sglang speculators original llamacpp", {BLIND: False}, {},
    ),
    "dspark, no confidence": (
        "vllm sglang speculators original llamacpp", {"confidence_weight": 0.0, BLIND: False}, {},
    ),
    "dspark, filled in": (
        "vllm sglang speculators original llamacpp", {}, {"sample_from_anchor": False},
    ),
    "dspark, llama3": ("vllm sglang speculators original llamacpp", {}, {}),
}  # fmt: skip
CELLS = [(name, engine) for name, row in HEADS.items() for engine in row[0].split()]


def toy_target(family: str = "llama", **changes: Any) -> Target:
    """Eight layers, so that the default features are those that the authors' code reads."""
    made = random_target(family, num_hidden_layers=8, **changes)
    made.name = "me/toy"
    # As a saved model has it.
    made.config.architectures = [type(made.model).__name__]
    return made


@cache
def target_of(name: str) -> Target:
    """The target of a head of `HEADS`."""
    rope = ROPES.get(name.rpartition(", ")[2])
    if name != "llama" and rope is None:
        return target_of("llama")
    return toy_target(**({"rope_parameters": rope} if rope else {}))


def build(target: Target, name: str, config: dict[str, Any] | None = None, **settings: Any) -> Any:
    """An attached head of `HEADS`, or with other settings, none of whose weights is a one."""
    kind = name.partition(", ")[0]
    if kind == "medusa":
        head: Any = noisy_head(target, num_heads=2)
        head.config = replace(head.config, target=target.name)
    else:
        own = {"draft_vocab_size": 24} if kind in ("eagle3", "eagle3.1") else {}
        head = fresh(target, settings_of(kind, **{**own, **HEADS[name][1], **settings}))
        changed = replace(head.config, **HEADS[name][2], **(config or {}))
        head = type(head)(changed, head.vocab).attach(target)
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data.copy_(noise + (parameter.ndim == 1))
    return head.eval()


@cache
def made(name: str) -> Any:
    """A head of `HEADS`, which nobody changes."""
    return build(target_of(name), name)


@cache
def reference(name: str) -> Any:
    """Its reference values."""
    return compute_reference_tensors(made(name), target_of(name), 5, 3)


def write(name: str, engine: str, folder: Path) -> Path:
    """An export of a head of `HEADS`, written once."""
    if not folder.exists():
        export_head(made(name), ExportFormat(engine), reference(name), folder, {"git": "abc"})
    return folder


def find_engines(head: DraftHead) -> list[str]:
    """Engines that serve a head with its target."""
    found = []
    for engine in ExportFormat:
        try:
            check_export_target(head, engine)
        except InputError:
            continue
        found.append(engine.value)
    return found


def eagle(target: Target, kind: str = "eagle3", **settings: Any) -> Any:
    """An untrained head with noise in its norms, which start as ones."""
    return build(target, kind, **settings)


def make(target: Target, kind: str) -> DraftHead:
    """An untrained head of a kind, whose layers are the default ones."""
    return build(target, kind, **({"layers": None} if kind == "eagle3.1" else {}))


def exported(head: DraftHead, target: Target, engine: str, folder: Path) -> Path:
    values = compute_reference_tensors(head, target, num_rows=3, depth=2)
    export_head(head, ExportFormat(engine), values, folder, {"git": "abc"})
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
