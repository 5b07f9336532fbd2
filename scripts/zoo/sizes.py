"""What a config's numbers become in a tiny model, by their names.

Nothing grows: a default that is smaller already, 0 or below, or unset stays as it is.
"""

from typing import Any

LAYERS, HIDDEN, HEADS, HEAD_DIM, VOCAB = 4, 64, 4, 16, 320
WINDOW, CHUNK, SWITCH, CONTEXT = 12, 8, 64, 512
EOS, BOS, PAD = 5, 0, 1
"""As the tokenizer of the embedded default has them."""
TOKENS = ("token_id", "token_index", "token_ids")
"""How settings end that are ids of tokens."""
NUM_TOKENS = 290
"""Of the tokenizer."""
FIRST_OTHER = 300
"""Images, audio and the like: behind them."""

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers")

_NAMES = (
    (LAYERS, """
        num_hidden_layers n_layer num_layers n_layers layers max_window_layers num_blocks
        conf_num_hidden_layers num_local_experts n_routed_experts num_experts
        moe_num_experts num_attention_heads num_heads n_head n_heads attention_heads
        encoder_attention_heads swa_num_attention_heads num_sliding_attention_heads
        linear_num_value_heads linear_num_heads index_n_heads zero_expert_num
        conf_num_attention_heads resampler_heads resampler_n_heads n_mamba_heads
    """),
    (HIDDEN, """
        hidden_size d_model n_embd out_hidden_size embed_dim embedding_dim projection_dim
        attention_hidden_size lru_width word_embed_proj_dim encoder_hidden_size
        text_hidden_size projector_hidden_size vision_output_dim projector_input_dim
        projector_output_dim projection_hidden_size projection_hidden_dim output_dim
        patch_embed_hidden_size dim_model_base vision_hidden_size downsample_hidden_size
        adapter_in_dim adapter_out_dim adapter_input_size image_token_embed_dim
        mamba_d_ssm
    """),
    (96, """
        intermediate_size ffn_dim dff dim_ff ffn_hidden_size mlp_dim encoder_ffn_dim
        intermediate_size_mlp dense_intermediate_size projection_intermediate_size
        alignment_intermediate_size conv_output_size
    """),
    (32, """
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size
        shared_experts_intermediate_size expert_ffn_hidden_size moe_hidden_size
        share_expert_dim moe_shared_expert_intermediate_size q_lora_rank
        router_hidden_size o_lora_rank
    """),
    (HEAD_DIM, """
        head_dim kv_channels v_head_dim qk_nope_head_dim kv_lora_rank linear_key_head_dim
        linear_value_head_dim linear_head_dim index_head_dim swa_head_dim mamba_d_head
        dim_head mamba_head_dim mamba_headdim index_topk hidden_size_per_layer_input
        query_pre_attn_scalar adapter_rank laurel_rank resampler_dim_head
        resampler_head_dim keep_window_size rel_extent block_multiple_of hc_lowrank
    """),
    (8, """
        qk_rope_head_dim rotary_dim state_size mamba_d_state ssm_state_size d_rel
        chunk_size mamba_chunk_size block_size mamba_num_heads mamba_n_heads
        time_step_rank mamba_dt_rank attention_chunk_size gated_norm_rank latent_query_num
        resampler_n_latents resampler_num_latents index_block_size ext_pw_out_channel
    """),
    (2, """
        num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k n_group
        num_expert_group num_key_value_heads num_kv_heads swa_num_key_value_heads
        linear_num_key_heads kv_n_heads n_groups mamba_n_groups n_shared_experts
        num_shared_experts moe_num_shared_experts depth encoder_layers num_query_groups
        index_topk_blocks resampler_depth insert_layer_id
    """),
    (1, """
        topk_group first_k_dense_replace num_dense_layers moe_layer_start_index
        num_global_layers num_kv_shared_layers num_nextn_predict_layers
    """),
    (VOCAB, """
        vocab_size vocab_size_per_layer_input unpadded_vocab_size codebook_size
    """),
    (WINDOW, """
        sliding_window sliding_window_size window_size local_attention
        attention_window_size
    """),
    (SWITCH, "original_max_position_embeddings log_scaling_n_floor floor_scale"),
    (CONTEXT, """
        max_position_embeddings n_positions max_seq_len n_ctx context_length
        model_max_length num_position_embeddings max_source_positions max_vit_seq_len
    """),
)  # fmt: skip
TINY = {name: size for size, names in _NAMES for name in names.split()}

# Indices of layers, which have to lie among those that are left.
INDEXES: dict[str, Any] = {
    "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [0, 1],
    "global_attn_indexes": [0, 1], "intermediate_layers_indices": [0, 1],
    "moe_layer_end_index": -1, "mlp_only_layers": [], "downsample_channels": [32, 64],
}  # fmt: skip


def tiny_sizes(config: Any) -> dict[str, Any]:
    """The settings of one config, its parts left out, that make it tiny.

    Args:
        config: of defaults.
    """
    found: dict[str, Any] = {}
    others = 0
    for name, value in vars(config).items():
        if name.endswith(TOKENS):
            found[name], others = _token(name, value, others)
        elif name in INDEXES and value:
            found[name] = INDEXES[name]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0 and name in TINY:
            found[name] = min(value, TINY[name])
    found |= _latent_heads(config, found) | _picture(config)
    found |= _kinds_of_layers(config)
    rope = vars(config).get("rope_parameters")
    if isinstance(rope, dict):
        found["rope_parameters"] = _rope(rope, _head_dim(found))
    return {name: value for name, value in found.items() if value is not None}


def _token(name: str, value: Any, others: int) -> tuple[Any, int]:
    for start, token in (("eos", EOS), ("bos", BOS), ("pad", PAD), ("decoder_start", BOS)):
        if name.startswith(start):
            return (token if value is not None else None), others
    if isinstance(value, list | tuple):
        return [FIRST_OTHER + others + place for place in range(len(value))], others + len(value)
    if isinstance(value, int) and value >= 0:
        return FIRST_OTHER + others, others + 1
    return None, others


def _latent_heads(config: Any, found: dict[str, Any]) -> dict[str, int]:
    """Head sizes that are sums or copies of others, as multi-head latent attention has them."""
    if "qk_rope_head_dim" not in found:
        return {}
    usual, parts = vars(config), {}
    if isinstance(usual.get("qk_head_dim"), int):
        parts["qk_head_dim"] = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
    for name in ("qk_rope_head_dim", "qk_head_dim"):
        if name in found | parts and usual.get("head_dim") == usual.get(name):
            parts["head_dim"] = (found | parts)[name]
    if usual.get("num_key_value_heads", 0) == usual.get("num_attention_heads", 1):
        parts["num_key_value_heads"] = found["num_attention_heads"]
    return parts


def _picture(config: Any) -> dict[str, Any]:
    """Pictures of four by four patches."""
    patch, image = (vars(config).get(name) for name in ("patch_size", "image_size"))
    if isinstance(patch, int) and isinstance(image, int):
        return {"image_size": 4 * patch}
    if isinstance(patch, list | tuple) and isinstance(image, list | tuple):
        return {"image_size": [4 * side for side in patch]}
    return {}


def _kinds_of_layers(config: Any) -> dict[str, Any]:
    """Of every list with an entry a layer, four entries at least and each kind once."""
    name = next((each for each in LAYER_COUNTS if each in vars(config)), "num_hidden_layers")
    count = vars(config).get(name)
    lists = {
        key: list(value)
        for key, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count and key not in INDEXES
    }
    numbered = [key for key, value in lists.items() if value == list(range(len(value)))]
    for key in numbered:  # indices of layers, not kinds
        del lists[key]
    if not lists or not isinstance(count, int):
        return {}
    kept = {value.index(kind) for value in lists.values() for kind in _kinds(value)}
    kept |= set(
        [place for place in range(count) if place not in kept][: max(0, LAYERS - len(kept))]
    )
    rows = {key: [value[place] for place in sorted(kept)] for key, value in lists.items()}
    rows |= {key: list(range(len(kept))) for key in numbered}
    for key, row in rows.items():
        if all(isinstance(entry, int) for entry in row) and key in TINY:
            rows[key] = [min(entry, TINY[key]) for entry in row]
    return {name: len(kept), **rows}


def _kinds(values: list[Any]) -> list[Any]:
    return [kind for place, kind in enumerate(values) if kind not in values[:place]]


def _head_dim(found: dict[str, Any]) -> int:
    return found.get("qk_rope_head_dim") or found.get("head_dim") or HIDDEN // HEADS


def _rope(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """RoPE whose switch lies inside a text, and whose sections fill a head."""
    found = dict(rope)
    half = int(head_dim * (rope.get("partial_rotary_factor") or 1.0)) // 2
    for name, value in rope.items():
        if isinstance(value, dict):
            found[name] = _rope(value, head_dim)
        elif name == "original_max_position_embeddings":
            found[name] = SWITCH
        elif name == "mrope_section":
            found[name] = _shares(value, half)
    return found


def _shares(values: list[int], total: int) -> list[int]:
    """Numbers in about the same proportion with another sum."""
    shares = [max(1, value * total // sum(values)) for value in values]
    shares[-1] += total - sum(shares)
    return shares
