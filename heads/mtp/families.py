"""How models name and compute their layer for multi-token prediction (MTP): the table of families.

All of them do `x = fc(concat(enorm(E), hnorm(h)))`, one decoder layer of the model's own kind with
keys and values of its own, a final norm, and the target's output head. E embeds the token after
the one that h is the state of. What differs is a row here.

Sources: the checkpoints, and vLLM's readers of them (`vllm/model_executor/models/*_mtp.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Family:
    """The MTP layer of models of one architecture.

    In names `{n}` is the number of the target's layers, whose numbering the layer goes on.

    Attributes:
        names: of the weights of `enorm`, `hnorm`, `fc` and, where there is one, `norm`, as
            checkpoints have them.
        block: prefix of the decoder layer's tensors.
        counts: the keys of `config.json` that may say how many such layers there are.
        copies: of the target's embedding and output head, which are written, not read.
        state_first: `fc` reads the state before the embedding.
        zeroes_first: the embedding beside the state of position 0 is zeroed.
        state_before_norm: the layer reads the target's last state before the final norm.
        feeds_back_normed: a draft goes on from the output behind the final norm.
        is_dense: the layer is dense, whatever those of the target are.
        is_sliding: it attends in a window; None has `mtp_layer_types` of `config.json` say so, or
            else the first of `layer_types`.
        has_indexer: a module that chooses the `index_topk` best keys. While a text is no longer,
            all are chosen: the head knows no more positions, and keeps that module as it is.
        renamed: parts of names that transformers' own modules call otherwise.
        model_type: whose decoder layer it is, where that is not the target's own.
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

    def own_name(self, stored: str, num_layers: int) -> str | None:
        """Our name of a tensor of a checkpoint; None for one that is not the layer's."""
        for name, theirs in self.names.items():
            if stored == theirs.format(n=num_layers):
                return f"{name}.weight"
        block = self.block.format(n=num_layers)
        if not stored.startswith(block) or stored in self.copy_names(num_layers):
            return None
        name = stored.removeprefix(block)
        for theirs, ours in self.renamed.items():
            name = name.replace(theirs, ours)
        return f"layer.{name}"

    def stored_name(self, name: str, num_layers: int) -> str:
        """The name that a tensor of ours has in a checkpoint."""
        module = name.removesuffix(".weight")
        if module in self.names:
            return self.names[module].format(n=num_layers)
        name = name.removeprefix("layer.")
        for theirs, ours in self.renamed.items():
            name = name.replace(ours, theirs)
        return self.block.format(n=num_layers) + name

    def copy_names(self, num_layers: int) -> list[str]:
        """The names of `copies` in a checkpoint."""
        return [name.format(n=num_layers) for name in self.copies]


_DEEPSEEK = Family(
    names={
        "enorm": "model.layers.{n}.enorm.weight",
        "hnorm": "model.layers.{n}.hnorm.weight",
        "fc": "model.layers.{n}.eh_proj.weight",
        "norm": "model.layers.{n}.shared_head.norm.weight",
    },
    block="model.layers.{n}.",
    copies=("model.layers.{n}.embed_tokens.weight", "model.layers.{n}.shared_head.head.weight"),
    zeroes_first=True,
)
_INDEXED = replace(_DEEPSEEK, has_indexer=True, model_type="deepseek_v3")
# vLLM goes on from the sum before the norm, SGLang from behind it.
_GLM = replace(_DEEPSEEK, feeds_back_normed=False)
_QWEN = Family(
    names={
        "enorm": "mtp.pre_fc_norm_embedding.weight",
        "hnorm": "mtp.pre_fc_norm_hidden.weight",
        "fc": "mtp.fc.weight",
        "norm": "mtp.norm.weight",
    },
    block="mtp.layers.0.",
)
_QWEN3_5 = replace(_QWEN, counts=("mtp_num_hidden_layers", "num_nextn_predict_layers"))
# vLLM rotates in a layer that attends to all, as it was trained; SGLang does not.
_EXAONE = replace(_QWEN, is_dense=True, is_sliding=None)
OTHER = "other"
"""The row of fresh layers for targets of which no such layer is known."""
FAMILIES: dict[str, Family] = {
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
    "MiMoForCausalLM": Family(
        names={
            "enorm": "model.mtp_layers.0.token_layernorm.weight",
            "hnorm": "model.mtp_layers.0.hidden_layernorm.weight",
            "fc": "model.mtp_layers.0.input_proj.weight",
            "norm": "model.mtp_layers.0.final_layernorm.weight",
        },
        block="model.mtp_layers.0.",
        state_first=True,
        zeroes_first=True,
        state_before_norm=True,
        model_type="qwen2",
    ),
    "MiMoV2FlashForCausalLM": Family(
        names={
            "enorm": "model.mtp.layers.0.enorm.weight",
            "hnorm": "model.mtp.layers.0.hnorm.weight",
            "fc": "model.mtp.layers.0.eh_proj.weight",
            "norm": "model.mtp.layers.0.final_layernorm.weight",
        },
        block="model.mtp.layers.0.",
        is_dense=True,
        is_sliding=True,
        renamed={
            "pre_mlp_layernorm": "post_attention_layernorm",
            "attention_sink_bias": "sinks",
        },
    ),
    "NemotronHForCausalLM": Family(
        names={
            "enorm": "mtp.layers.0.enorm.weight",
            "hnorm": "mtp.layers.0.hnorm.weight",
            "fc": "mtp.layers.0.eh_proj.weight",
            "norm": "mtp.layers.1.final_layernorm.weight",
        },
        block="mtp.layers.",
    ),
    # vLLM 0.32 rotates halves of a head here; the model, and this layer in SGLang, rotate pairs.
    "Ernie4_5_MoeForCausalLM": Family(
        names={
            "enorm": "model.mtp_emb_norm.0.weight",
            "hnorm": "model.mtp_hidden_norm.0.weight",
            "fc": "model.mtp_linear_proj.0.weight",
        },
        block="model.mtp_block.0.",
        zeroes_first=True,
        feeds_back_normed=False,
        is_dense=True,
    ),
}
"""Families by the architecture that `config.json` names."""

KNOWN = ", ".join(name for name in FAMILIES if name != OTHER)
NOT_READ: dict[str, str] = {
    "deepseek_v4": "it reads several residual streams before they are mixed",
    "qwen4_exp": "it reads several residual streams before they are mixed",
    "kimi_k3": "its experts are codes of four bits",
    "longcat_flash": "its attention is scaled by the rank of its latents",
    "mimo_v2": "its projections of queries, keys and values are one tensor, cut for eight GPUs",
    "minimax_m3": "it attends to blocks that an index chooses",
    "step3p5": "it has several layers, each used once",
}
"""Reasons why the layers of other models have no row yet, by model type."""
