"""Families of models with a layer for multi-token prediction (MTP): names and computation.

All compute `x = fc(concat(enorm(E), hnorm(h)))`, one decoder layer of the model's own kind with its
own keys and values, a final norm, and the target's output head. E embeds the token after the one
whose hidden state is h. The table holds the differences.

Sources: the checkpoints, and vLLM's readers of them (`vllm/model_executor/models/*_mtp.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class MtpFamily:
    """MTP layer of models of one architecture.

    In names, `{n}` is the number of the target's layers; MTP layers continue their numbering.

    Attributes:
        names: weights in checkpoints of `enorm`, `hnorm`, `fc` and, if present, `norm`.
        block: prefix of the decoder layer's tensors.
        counts: keys of `config.json` that may give the number of MTP layers.
        copies: names of copies of the target's embedding and output head. They are written for
            engines and never read.
        state_first: whether `fc` reads the hidden state before the embedding.
        zeroes_first: whether the embedding at position 0 is zeroed.
        state_before_norm: whether the layer reads the target's last state before the final norm.
        feeds_back_normed: whether a draft continues from the output after the final norm.
        is_dense: whether the layer is dense even if the target's are not.
        is_sliding: whether the layer attends in a window; None reads `mtp_layer_types` of
            `config.json`, or else the first of `layer_types`.
        has_indexer: whether a module chooses the `index_topk` best keys. Shorter texts use all
            keys, so the head knows no more positions than that and keeps the module unchanged.
        renamed: parts of names in checkpoints, each with its name in transformers' modules.
        model_type: model type of the decoder layer, if not the target's own.
    """

    names: Mapping[str, str]
    block: str
    counts: tuple[str, ...] = ("num_nextn_predict_layers",)
    copies: tuple[str, ...] = ()
    state_first: bool = False
    zeroes_first: bool = False
    state_before_norm: bool = False
    feeds_back_normed: bool = True
    is_dense: bool = False
    is_sliding: bool | None = False
    has_indexer: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    model_type: str | None = None

    def to_own_name(self, stored: str, num_layers: int) -> str | None:
        """Return the name here of a checkpoint's tensor; None for tensors outside the layer."""
        for name, pattern in self.names.items():
            if stored == pattern.format(n=num_layers):
                return f"{name}.weight"
        block = self.block.format(n=num_layers)
        if not stored.startswith(block) or stored in self.list_copies(num_layers):
            return None
        name = stored.removeprefix(block)
        for stored_part, own_part in self.renamed.items():
            name = name.replace(stored_part, own_part)
        return f"layer.{name}"

    def to_stored_name(self, name: str, num_layers: int) -> str:
        """Return the name in a checkpoint of a tensor of an MTP head."""
        module = name.removesuffix(".weight")
        if module in self.names:
            return self.names[module].format(n=num_layers)
        name = name.removeprefix("layer.")
        for stored_part, own_part in self.renamed.items():
            name = name.replace(own_part, stored_part)
        return self.block.format(n=num_layers) + name

    def list_copies(self, num_layers: int) -> list[str]:
        """List the names of `copies` in a checkpoint."""
        return [name.format(n=num_layers) for name in self.copies]


def _name_weights(
    prefix: str, enorm: str, hnorm: str, fc: str, norm: str | None = None
) -> dict[str, str]:
    """Name the weights of modules after a prefix, for `MtpFamily.names`."""
    modules = {"enorm": enorm, "hnorm": hnorm, "fc": fc, "norm": norm}
    return {name: f"{prefix}{module}.weight" for name, module in modules.items() if module}


_DEEPSEEK = MtpFamily(
    names=_name_weights("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    block="model.layers.{n}.",
    copies=("model.layers.{n}.embed_tokens.weight", "model.layers.{n}.shared_head.head.weight"),
    zeroes_first=True,
)
_INDEXED = replace(_DEEPSEEK, has_indexer=True, model_type="deepseek_v3")
# vLLM continues from the sum before the norm, SGLang from after it.
_GLM = replace(_DEEPSEEK, feeds_back_normed=False)
_QWEN = MtpFamily(
    names=_name_weights("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    block="mtp.layers.0.",
)
_QWEN3_5 = replace(_QWEN, counts=("mtp_num_hidden_layers", "num_nextn_predict_layers"))
# vLLM rotates in a full-attention layer, as in training; SGLang does not.
_EXAONE = replace(_QWEN, is_dense=True, is_sliding=None)
OTHER = "other"
"""Name of the entry for new layers of targets without a known MTP layer."""
FAMILIES: dict[str, MtpFamily] = {
    OTHER: _QWEN,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _INDEXED,
    "GlmMoeDsaForCausalLM": _INDEXED,
    "Glm4MoeForCausalLM": _GLM,
    "Glm4MoeLiteForCausalLM": _GLM,
    "HYV3ForCausalLM": replace(
        _DEEPSEEK,
        names={**_DEEPSEEK.names, "norm": "model.layers.{n}.final_layernorm.weight"},
        copies=(),
        renamed={
            "mlp.router.gate.": "mlp.gate.",
            "mlp.expert_bias": "mlp.e_score_correction_bias",
            "mlp.shared_mlp.": "mlp.shared_experts.",
        },
    ),
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "ExaoneMoeForCausalLM": _EXAONE,
    "Exaone4_5_ForConditionalGeneration": _EXAONE,
    "MiMoForCausalLM": MtpFamily(
        names=_name_weights(
            *("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj"),
            "final_layernorm",
        ),
        block="model.mtp_layers.0.",
        state_first=True,
        zeroes_first=True,
        state_before_norm=True,
        model_type="qwen2",
    ),
    "MiMoV2FlashForCausalLM": MtpFamily(
        names=_name_weights("model.mtp.layers.0.", "enorm", "hnorm", "eh_proj", "final_layernorm"),
        block="model.mtp.layers.0.",
        is_dense=True,
        is_sliding=True,
        renamed={
            "pre_mlp_layernorm": "post_attention_layernorm",
            "attention_sink_bias": "sinks",
        },
    ),
    "NemotronHForCausalLM": MtpFamily(
        names=_name_weights("mtp.layers.", "0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm"),
        block="mtp.layers.",
    ),
    # vLLM 0.32 rotates halves of a head here; the model, and SGLang, rotate pairs.
    "Ernie4_5_MoeForCausalLM": MtpFamily(
        names=_name_weights("model.", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0"),
        block="model.mtp_block.0.",
        zeroes_first=True,
        feeds_back_normed=False,
        is_dense=True,
    ),
}
"""Families by the architecture in `config.json`."""

KNOWN = ", ".join(name for name in FAMILIES if name != OTHER)
UNSUPPORTED_REASONS: dict[str, str] = {
    "deepseek_v4": "it reads several residual streams before they are mixed",
    "qwen4_exp": "it reads several residual streams before they are mixed",
    "kimi_k3": "its experts are packed in four bits",
    "longcat_flash": "its attention is scaled by the rank of its latents",
    "mimo_v2": "its projections of queries, keys and values are one tensor, divided for eight GPUs",
    "minimax_m3": "it attends to blocks chosen by an index",
    "step3p5": "it has several layers, each used once",
}
"""Reasons why the layers of other models cannot be read yet, by model type."""
