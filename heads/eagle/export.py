"""EAGLE heads per engine: tensors, `config.json` and serve command."""

from typing import Any

import torch
from torch import Tensor

from conf.settings.eagle import EagleForm
from conf.settings.export import ExportFormat
from heads.eagle import gguf
from heads.eagle.layouts import (
    NORMS,
    EagleLayout,
    can_use_own_embedding,
    check_layers_and_embedding,
)
from heads.eagle.network import EagleNetwork
from heads.export.engines import format_dtype, format_vllm_command
from heads.export.llamacpp import serve_command as serve_llamacpp
from heads.export.llamacpp import weights_name
from heads.head import WEIGHTS, HeadFiles
from heads.layers.llama import format_legacy_rope
from heads.target_model import sizes

NUM_DRAFT_TOKENS = 5
EMBEDDING, OUTPUT_HEAD, FC_BIAS = "embed_tokens.weight", "lm_head.weight", "fc.bias"


def build_engine_files(
    head: EagleNetwork,
    engine: ExportFormat,
    layout: EagleLayout,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
) -> HeadFiles:
    """Files, in its layout, for an engine that can serve the head.

    Raises:
        InputError: see `layouts.check_target`.
    """
    check_layers_and_embedding(head, engine, layout)
    if layout.gguf:
        return gguf.build_gguf_files(head)
    own, added = _collect_engine_tensors(head, layout), _make_added_tensors(head, layout)
    settings = _build_config(head, layout, format_dtype(head))
    if engine is ExportFormat.speculators:
        settings = _speculators_config(head, settings, layout, num_draft_tokens)
    return HeadFiles(settings, WEIGHTS, own | added, sorted(added), list(head.config.layers))


def _collect_engine_tensors(head: EagleNetwork, layout: EagleLayout) -> dict[str, Tensor]:
    prefix = head.layer_prefix
    named = {
        layout.layer_prefix + name.removeprefix(prefix) if name.startswith(prefix) else name: each
        for name, each in head.collect_tensors().items()
    }
    if "d2t" in named:
        named["d2t"] = named["d2t"].to(layout.d2t_dtype)
    if not layout.t2d:
        named.pop("t2d", None)
    if not can_use_own_embedding(head, layout):
        named.pop(EMBEDDING, None)
    return named


def _make_added_tensors(head: EagleNetwork, layout: EagleLayout) -> dict[str, Tensor]:
    """Tensors that the engine would otherwise initialise randomly."""
    added = {}
    if layout.needs_embedding and head.embed_tokens is None:
        added[EMBEDDING] = head.target.embedding.weight.to(head.dtype)
    if layout.needs_output_head and head.lm_head is None and head.config.form is EagleForm.eagle3:
        # A copy, as a file cannot hold two tensors that share memory.
        added[OUTPUT_HEAD] = head.target.output_head.weight.to(head.dtype, copy=True)
    if layout.zero_fc_bias and head.fc.bias is None:
        added[FC_BIAS] = torch.zeros(len(head.fc.weight), dtype=head.dtype)
    return added


def _build_config(head: EagleNetwork, layout: EagleLayout, dtype: str) -> dict[str, Any]:
    """Config of a Llama model with EAGLE's keys, each in every place where it is read."""
    config, eagle3 = head.config, head.config.form is EagleForm.eagle3
    settings = head.build_files().config
    if not config.qk_norm:
        settings["architectures"] = [layout.architecture]
    settings |= {
        "base_model_name_or_path": head.target_name,
        "max_position_embeddings": sizes.find_max_positions(head.target.config),
        "rope_scaling": format_legacy_rope(settings["rope_parameters"], short=layout.old_rope),
        "dtype": dtype,
        "torch_dtype": dtype,
        # SGLang's key for a bias of the attention; its `fc` always has one.
        "bias": config.fc_bias and not layout.zero_fc_bias,
    }
    if not eagle3:
        return settings
    # Null makes SGLang take the target's output head, and breaks the authors' code.
    settings["draft_vocab_size"] = len(head.vocab.ids)
    del settings["eagle_aux_hidden_state_layer_ids"]
    norms = {name: getattr(config, name) for name in NORMS}
    settings["eagle_config"] = {
        "use_aux_hidden_state": True,
        # TensorRT-LLM's name for `norm_output`.
        "return_hidden_post_norm": config.norm_output,
        **norms,
    }
    if layout.layer_offset is not None:
        ids = [index + layout.layer_offset for index in config.layers]
        settings |= {"num_aux_hidden_states": len(ids), "eagle_aux_hidden_state_layer_ids": ids}
        settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    return settings


def _speculators_config(
    head: EagleNetwork, flat: dict[str, Any], layout: EagleLayout, num_draft_tokens: int
) -> dict[str, Any]:
    """Config of speculators' `Eagle3SpeculatorConfig`, with the layer's keys in a section."""
    config = head.config
    outer = {"architectures", "draft_vocab_size", "eagle_config", "target_hidden_size", "bias"}
    outer |= {"eagle_aux_hidden_state_layer_ids", "base_model_name_or_path", *NORMS}
    layer = {name: value for name, value in flat.items() if name not in outer}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [layout.architecture],
        "speculators_model_type": layout.speculators_method,
        "speculators_version": "0.9.0",
        "draft_vocab_size": flat["draft_vocab_size"],
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": flat["eagle_aux_hidden_state_layer_ids"],
        **{name: getattr(config, name) for name in NORMS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": flat["dtype"],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": layout.speculators_method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": head.target_name,
                "architectures": head.target.architectures,
            },
        },
    }


def format_serve_command(head: EagleNetwork, engine: ExportFormat, folder: str) -> str:
    """Command that starts an engine, as lines for a shell (the authors': for Python)."""
    target = head.target_name
    eagle3 = head.config.form is EagleForm.eagle3
    tokens = NUM_DRAFT_TOKENS
    if engine is ExportFormat.vllm:
        return format_vllm_command("eagle3" if eagle3 else "eagle", tokens, target, folder)
    if engine is ExportFormat.speculators:
        return f"vllm serve {folder}"
    if engine is ExportFormat.sglang:
        return (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {'EAGLE3' if eagle3 else 'EAGLE'} "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {tokens} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
        )
    if engine is ExportFormat.trtllm:
        layers = [index - 1 for index in head.config.layers]
        return (
            "cat > speculative.yaml <<END\nspeculative_config:\n  decoding_type: Eagle3\n"
            f"  max_draft_len: {tokens}\n  speculative_model: {folder}\n"
            f"  eagle3_layers_to_capture: {layers}\nEND\n"
            f"trtllm-serve {target} --config speculative.yaml"
        )
    if engine is ExportFormat.llamacpp:
        file = f"{folder}/{weights_name('eagle3', target, head.dtype)}"
        return serve_llamacpp(target, file, "draft-eagle3", tokens)
    return (
        "import torch\nfrom eagle.model.ea_model import EaModel\n"
        f'model = EaModel.from_pretrained(base_model_path="{target}", ea_model_path="{folder}", '
        f"use_eagle3={eagle3}, torch_dtype=torch.{format_dtype(head)})"
    )


def format_engine_hint(head: EagleNetwork, engine: ExportFormat) -> str:
    """Further advice for users of an engine; empty, or a sentence."""
    if engine is ExportFormat.original and head.config.form is EagleForm.eagle1:
        return (
            "The authors' loader searches the target's embedding in its "
            "`model.safetensors.index.json`, which a target in one file lacks."
        )
    if engine is ExportFormat.trtllm and format_dtype(head) == "float32":
        return (
            "TensorRT-LLM runs the head in the dtype of `config.json`, and its attention does not "
            "support float32: export with dtype=bfloat16."
        )
    return ""
