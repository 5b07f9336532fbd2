"""`config.json` of an export, in the words of the engine."""

from typing import Any

from conf.schema_export import ExportFormat
from heads.eagle.config import config_json
from heads.eagle.head import EagleHead
from heads.export.layouts import EagleLayout, MedusaLayout
from heads.kinds import Head, kind_of
from heads.medusa.head import MedusaHead

NUM_DRAFT_TOKENS = 5
NORMS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")


def medusa_config(head: MedusaHead, layout: MedusaLayout, dtype: str) -> Any:
    """Keys of the authors and of TGI, and those of vLLM's `MedusaConfig`."""
    settings = head.config_json() | {"dtype": dtype, "torch_dtype": dtype}
    del settings["architectures"]
    if layout.architecture is not None:
        settings["architectures"] = [layout.architecture]
    return settings


def eagle_config(head: EagleHead, layout: EagleLayout, dtype: str) -> Any:
    """Keys of a Llama model with those of EAGLE beside them, each in every place it is read."""
    config, eagle3 = head.config, kind_of(head) == "eagle3"
    settings: dict[str, Any] = config_json(config, len(head.vocab.ids))
    if not config.qk_norm:
        settings["architectures"] = [layout.architecture]
    settings |= {
        "base_model_name_or_path": target_name(head),
        "max_position_embeddings": head.target.config.max_position_embeddings,
        "rope_scaling": _old_rope(settings["rope_parameters"], short=layout.old_rope),
        "dtype": dtype,
        "torch_dtype": dtype,
        # SGLang's key for a bias of the attention, while its `fc` always has one.
        "bias": config.fc_bias and not layout.zero_fc_bias,
    }
    if not eagle3:
        return settings
    # Null makes SGLang take the target's output head, and the authors' code fail.
    settings["draft_vocab_size"] = len(head.vocab.ids)
    del settings["eagle_aux_hidden_state_layer_ids"]
    norms = {name: getattr(config, name) for name in NORMS}
    settings["eagle_config"] = {
        "use_aux_hidden_state": True,
        # TensorRT-LLM's name of `norm_output`.
        "return_hidden_post_norm": config.norm_output,
        **norms,
    }
    if layout.layer_offset is not None:
        ids = [index + layout.layer_offset for index in config.layers]
        settings |= {"num_aux_hidden_states": len(ids), "eagle_aux_hidden_state_layer_ids": ids}
        settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    return settings


def _old_rope(rope: dict[str, Any], short: bool) -> dict[str, Any] | None:
    """RoPE scaling as before transformers 5, whose first readers took two keys and no more."""
    kind = rope["rope_type"]
    if kind == "default":
        return None
    if short:
        return {"type": kind, "factor": float(rope["factor"])}
    return {"type": kind} | {name: value for name, value in rope.items() if name != "rope_theta"}


def speculators_config(head: EagleHead, layout: EagleLayout, dtype: str) -> Any:
    """Keys of speculators' `Eagle3SpeculatorConfig`; the layer's lie in one of their own."""
    config = head.config
    flat = eagle_config(head, layout, dtype)
    outer = {"architectures", "draft_vocab_size", "eagle_config", "target_hidden_size", "bias"}
    outer |= {"eagle_aux_hidden_state_layer_ids", "base_model_name_or_path", *NORMS}
    layer = {name: value for name, value in flat.items() if name not in outer}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": NUM_DRAFT_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [layout.architecture],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": flat["draft_vocab_size"],
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": flat["eagle_aux_hidden_state_layer_ids"],
        **{name: getattr(config, name) for name in NORMS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target_name(head),
                "architectures": head.target.config.architectures or [],
            },
        },
    }


def config_of(
    head: Head, engine: ExportFormat, layout: MedusaLayout | EagleLayout
) -> dict[str, Any]:
    """The content of `config.json`.

    Args:
        head: in the dtype of the export, attached to its target.
        engine: the format.
        layout: of the head in that format.
    """
    dtype = dtype_of(head)
    if isinstance(head, MedusaHead):
        assert isinstance(layout, MedusaLayout)
        return medusa_config(head, layout, dtype)
    assert isinstance(layout, EagleLayout)
    make = speculators_config if engine is ExportFormat.speculators else eagle_config
    return make(head, layout, dtype)


def dtype_of(head: Head) -> str:
    """`float32` or `bfloat16`."""
    return str(next(head.parameters()).dtype).removeprefix("torch.")


def target_name(head: Head) -> str:
    """Hub id or folder of the target that the head is attached to."""
    return head.config.target if isinstance(head, MedusaHead) else head.target.name
