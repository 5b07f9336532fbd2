"""Make tiny random targets of every architecture of transformers.

`make_tiny_target("qwen3_next", Path("outputs/zoo"))` makes a folder for `target.path` on first use:
random weights with a fixed seed, a tokenizer with a chat template, `made.json`. Some families need
settings by hand, and some model types are no targets: the tables come first.
"""

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from heads.folders import write_folder
from scripts.embedded.make import train_tokenizer

MADE_FILE = "made.json"
LAYERS, HIDDEN, HEADS, HEAD_DIM, VOCAB = 4, 64, 4, 16, 320
WINDOW, CHUNK, SWITCH, CONTEXT = 12, 8, 64, 512
EOS, BOS, PAD = 5, 0, 1
"""Special tokens, as in the tokenizer of the embedded default."""
TOKENS = ("token_id", "token_index", "token_ids")
"""Endings of the names of settings that hold token ids."""
NUM_TOKENS = 290
"""Number of ids in the tokenizer; images, audio and so on have larger ids."""
FIRST_OTHER = 300
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers")
PROMPT = torch.arange(20, 44).unsqueeze(0)
TEXT = ("def read(path):\n    return open(path).read()\n", "class Reader:\n    lines = 0\n")
WEIGHTS = ((1.5, 0.1), (1.5, 0.03), (2.5, 0.03), (4.0, 0.1), (1.0, 0.1), (0.7, 0.1))
"""Pairs to try in order: gain of the matrices (standard deviation of the output over that of the
input) and standard deviation of the embeddings. The first pair whose model writes suitable texts
(DISTINCT, REACH) is used. Embeddings must stay small: where the output head is tied to large
embeddings, each token predicts itself."""
DISTINCT, REACH = 8, 0.05
"""Distinct tokens and reach of suitable texts: see `measure_text_quality`."""
AS_THEY_ARE = {"A_log", "dt_proj", "time_decay", "time_first"}
"""Parameters that keep their size: decay rates."""

TINY_SIZES = (
    (1, r"topk_group|first_k_dense_replace|num_(dense|global|kv_shared|nextn_predict)_layers"
        r"|moe_layer_start_index"),
    (2, r"num_experts_per_tok(en)?|moe_(topk|k|top_k)|n_group|num_expert_group|num_query_groups"
        r"|.*(key_value|kv|num_key|kv_n)_heads|n_groups|mamba_n_groups|.*n(um)?_shared_experts"
        r"|(resampler_)?depth|encoder_layers|insert_layer_id"),
    (8, r"mamba_n(um)?_heads|qk_rope_head_dim|rotary_dim|.*(state_size|d_state)|d_rel|block_size"
        r"|(mamba_|attention_)?chunk_size|.*(time_step|mamba_dt|gated_norm)_rank"
        r"|latent_query_num|resampler_n(um)?_latents|ext_pw_out_channel"),
    (LAYERS, r"(num_hidden_|num_|n_|max_window_)?layers?|num_blocks|.*(n_head|_heads)"
             r"|(num_local_|n_routed_|(moe_)?num_)experts|zero_expert_num"),
    (HEAD_DIM, r"(?!qk_head|attention_head).*(head_?dim|d_head|dim_head)|kv_(channels|lora_rank)"
               r"|index_topk|hidden_size_per_layer_input|query_pre_attn_scalar|rel_extent"
               r"|(adapter|laurel)_rank|keep_window_size|block_multiple_of"),
    (32, r"(moe|shared|expert|router)_.*_size|share_expert_dim|[qo]_lora_rank"),
    (96, r".*intermediate_size(_mlp)?|(encoder_)?ffn_dim|(dim_|d)ff|ffn_hidden_size|mlp_dim"),
    (HIDDEN, r"(?!merged).*hidden_(size|dim)|d_model|n_embd|dim_model_base|lru_width|mamba_d_ssm"
             r"|.*(embed|projection|proj|input|output)_dim"),
    (VOCAB, r"(unpadded_)?vocab_size(_per_layer_input)?"),
    (WINDOW, r"((sliding|attention)_)?window(_size)?|local_attention"),
    (SWITCH, r"original_max_position_embeddings|log_scaling_n_floor|floor_scale"),
    (CONTEXT, r".*(position_embeddings|n_positions|source_positions|seq_len)|n_ctx|context_length"
              r"|model_max_length"),
)  # fmt: skip
"""Sizes, and patterns of the settings that get them at most. The first pattern that fits counts."""
# Indices of layers, which must be among the remaining layers.
INDEXES: dict[str, Any] = {
    "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [0, 1],
    "global_attn_indexes": [0, 1], "intermediate_layers_indices": [0, 1],
    "moe_layer_end_index": -1, "mlp_only_layers": [], "downsample_channels": [32, 64],
}  # fmt: skip

MAMBA_2 = {"mamba_d_head": 16, "mamba_n_heads": 8}
QWEN_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8, "long_factor": [2.0 + place for place in range(8)],
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64, "max_position_embeddings": 512, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 1 / 3,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
_SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    # Layers of one kind by default, or a period instead of a list.
    ("bamba", {"attn_layer_indices": [1, 3], **MAMBA_2}),
    ("granitemoehybrid", {"layer_types": ["linear_attention", FULL] * 2, **MAMBA_2}),
    ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    ("lfm2 lfm2_moe", {
        "layer_types": ["conv", "conv", FULL, "conv"], "full_attn_idxs": [2],
        "num_hidden_layers": 4,
    }),
    ("laguna", {
        "layer_types": [FULL, SLIDING] * 2, "num_attention_heads_per_layer": [4, 8, 4, 8],
    }),
    ("mellum", {"layer_types": [SLIDING] * 3 + [FULL]}),
    ("step3p5", {"layer_types": [SLIDING] * 3 + [FULL], "sliding_window": 12}),
    ("mistral mixtral starcoder2", {"sliding_window": 12}),
    ("phi3 phi4_multimodal", {"rope_parameters": LONG_ROPE}),
    ("phimoe", {"rope_parameters": {**LONG_ROPE, "short_mscale": 1.1, "long_mscale": 1.3}}),
    # The last layers share the cache of one earlier layer of each kind.
    ("gemma3n_text gemma4_text", {
        "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
    }),
    # Shared blocks, whose kinds and sizes depend on each other.
    ("zamba2", {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4,
        "n_mamba_heads": 8, "num_key_value_heads": 4, "num_query_groups": 4,
        "attention_hidden_size": 128, "attention_head_dim": 32,
    }),
    # transformers raises time steps to the minimum in a pass, but not in decoding.
    ("nemotron_h zamba2", {"time_step_min": 1e-6}),
    # One layer of each kind by default, through which little is remembered.
    ("nemotron_h", {
        "layers_block_type": ["linear_attention", "moe", "linear_attention", FULL, "mlp", FULL],
        "num_hidden_layers": 6,
    }),
    # Sizes that follow from others, or have no default.
    ("mamba2", {"num_heads": 8}),
    ("hunyuan_v1_dense hunyuan_v1_moe ministral", {"head_dim": 16}),
    ("nemotron", {"head_dim": 16, "num_key_value_heads": 2}),
    ("deepseek_v2", {"num_experts_per_tok": 2}),
    ("dots1", {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_routed_experts": 4}),
    ("deepseek_ocr2_text", {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2,
    }),
    ("dbrx", {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}}),
    ("granite4_vision", {"deepstack_layer_map": [[1, 1]], "downsample_rate": "2/4"}),
    ("qwen2_5_omni_thinker qwen3_omni_moe_thinker", {"vision_start_token_id": 310}),
    ("molmo2_adapter", {"vision_feature_layer": [1, 0]}),
    ("nemotron_h_omni", {"vision_config": {"video_temporal_patch_size": 2}}),
    ("phi4_multimodal_audio", {
        "ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64, "nemo_conv_channels": 16,
    }),
    # A share of the head that is turned, and sections of M-RoPE: classes have them for other sizes.
    ("mistral4", {"rope_parameters": YARN}),
    ("qwen2_vl_text qwen2_5_vl_text glm4v_text glm_ocr_text paddleocr_vl_text qwen2_5_omni_text", {
        "rope_parameters": QWEN_MROPE,
    }),
    ("glm4v_moe_text", {
        "rope_parameters": {**QWEN_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
    }),
    ("hunyuan_vl_text", {
        "head_dim": 16, "rope_parameters": {**QWEN_MROPE, "mrope_section": [2, 2, 2, 2]},
    }),
    ("ernie4_5_vl_moe_text", {
        "rope_parameters": {**QWEN_MROPE, "mrope_section": [3, 3, 2]},
        "moe_intermediate_size": [32, 16],
    }),
)  # fmt: skip
MANUAL_SETTINGS: dict[str, dict[str, Any]] = {}
for _names, _settings in _SETTINGS:
    for _name in _names.split():
        MANUAL_SETTINGS[_name] = MANUAL_SETTINGS.get(_name, {}) | _settings

_NO_TARGET = {
    "an encoder: its checkpoints read the tokens to come as well":
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod xlm",
    "the decoder of an encoder-decoder: its text depends on the encoder's input":
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart "
        "prophetnet whisper t5gemma2 udop vision-encoder-decoder pix2struct florence2 "
        "pp_formulanet trocr",
    "gives sound, several codes at a time": "moshi musicgen musicgen_melody",
    "gives the motion of a robot": "pi0",
    "predicts in permuted order, in two streams": "xlnet",
    "hashes its own queries: the tokens that it sees depend on the length": "reformer",
    "fills blocks by diffusion: no token comes after another": "diffusion_gemma",
    "drafts for another model, whose hidden states it reads":
        "gemma4_assistant gemma4_unified_assistant",
    "answers pictures only: its forward pass asks for one":
        "blip blip-2 instructblip instructblipvideo idefics kosmos-2",
    "reads bytes in patches that an entropy model cuts": "blt",
    "not tried: its small model would need settings by hand":
        "chameleon cohere_compass cohere_compass_text dots3_note dots3_note_text emu3 glm5_next "
        "inkling_mm_model janus minimax_m3_vl minimax_m3_vl_text mistral_large4 muse_spark "
        "perception_lm qwen4_exp qwen4_exp_text xlstm zamba",
    "not tried: its tower needs timm": "fast_vlm gemma3n",
}  # fmt: skip
NO_TARGET = {name: why for why, names in _NO_TARGET.items() for name in names.split()}


def list_model_types() -> list[str]:
    """List every model type of transformers whose model answers text with text."""
    return sorted(
        {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    )


def make_tiny_target(model_type: str, root: Path) -> Path:
    """Return the folder of a tiny random target, which is made on first use.

    Args:
        model_type: one of `list_model_types`.
        root: folder with a folder for each model type.
    """
    folder = root / model_type
    if not (folder / MADE_FILE).is_file():
        write_folder(folder, partial(_make_model, model_type))
    return folder


def _make_model(model_type: str, folder: Path) -> None:
    # The class that checkpoints are saved with: the wrapper's class if there is one.
    wrapper = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    name = wrapper or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    config = make_tiny_config(model_type)
    model, weights = make_random_model(getattr(transformers, name), config)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    train_tokenizer(list(TEXT), NUM_TOKENS, CONTEXT).save_pretrained(folder)
    types = _list_config_types(config)
    made = {
        "class": name,
        "layers": _format_layers(config.get_text_config(decoder=True)),
        "by_hand": {each: MANUAL_SETTINGS[each] for each in types if each in MANUAL_SETTINGS},
        **weights,
        "num_parameters": sum(each.numel() for each in model.parameters()),
    }
    (folder / MADE_FILE).write_text(json.dumps(made, indent=1, default=str) + "\n")


def make_tiny_config(model_type: str) -> Any:
    """Make the default config of a model type in tiny."""
    make = CONFIG_MAPPING[model_type]
    try:
        default = make()
    except ValueError:  # some defaults contradict themselves; values set by hand correct them
        default = make(**MANUAL_SETTINGS[model_type])
    return make(**_build_settings(default))


def _build_settings(config: Any) -> dict[str, Any]:
    parts = {
        name: {"model_type": part.model_type, **_build_settings(part)}
        for name, part in vars(config).items()
        if isinstance(part, PreTrainedConfig)
    }
    settings = choose_tiny_sizes(config) | parts
    for name, value in MANUAL_SETTINGS.get(config.model_type, {}).items():
        both = isinstance(value, dict) and isinstance(settings.get(name), dict)
        settings[name] = settings[name] | value if both else value
    return settings


def _list_config_types(config: Any) -> list[str]:
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    return [config.model_type, *(name for part in parts for name in _list_config_types(part))]


def choose_tiny_sizes(config: Any) -> dict[str, Any]:
    """Choose settings that make one config tiny, without its parts.

    No value grows: a default that is already smaller, 0 or below, or unset stays unchanged.

    Args:
        config: default config of a model type, or of a part.
    """
    sizes: dict[str, Any] = {}
    others = count(FIRST_OTHER)
    for name, value in vars(config).items():
        if name.endswith(TOKENS):
            sizes[name] = _choose_token_id(name, value, others)
        elif name in INDEXES and value:
            sizes[name] = INDEXES[name]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            size = find_tiny_size(name)
            sizes |= {} if size is None else {name: min(value, size)}
    sizes |= (
        _choose_latent_head_sizes(config, sizes)
        | _shrink_pictures(config)
        | _shorten_layer_lists(config)
    )
    rope = vars(config).get("rope_parameters")
    if isinstance(rope, dict):
        head_dim = sizes.get("qk_rope_head_dim") or sizes.get("head_dim") or HIDDEN // HEADS
        sizes["rope_parameters"] = _shrink_rope(rope, head_dim)
    return {name: value for name, value in sizes.items() if value is not None}


def find_tiny_size(name: str) -> int | None:
    """Find the size that a setting gets at most; None for a setting that is no size."""
    return next((size for size, pattern in TINY_SIZES if re.fullmatch(pattern, name)), None)


def _choose_token_id(name: str, value: Any, others: Iterator[int]) -> Any:
    for start, token in (("eos", EOS), ("bos", BOS), ("pad", PAD), ("decoder_start", BOS)):
        if name.startswith(start):
            return token if value is not None else None
    if isinstance(value, list | tuple):
        return [next(others) for _ in value]
    return next(others) if isinstance(value, int) and value >= 0 else None


def _choose_latent_head_sizes(config: Any, sizes: dict[str, Any]) -> dict[str, int]:
    """Choose head sizes that are sums or copies of others, as in multi-head latent attention."""
    if "qk_rope_head_dim" not in sizes:
        return {}
    usual, parts = vars(config), {}
    if isinstance(usual.get("qk_head_dim"), int):
        parts["qk_head_dim"] = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    for name in ("qk_rope_head_dim", "qk_head_dim"):
        if name in sizes | parts and usual.get("head_dim") == usual.get(name):
            parts["head_dim"] = (sizes | parts)[name]
    if usual.get("num_key_value_heads", 0) == usual.get("num_attention_heads", 1):
        parts["num_key_value_heads"] = sizes["num_attention_heads"]
    return parts


def _shrink_pictures(config: Any) -> dict[str, Any]:
    """Choose the size of pictures of four by four patches."""
    patch, image = (vars(config).get(name) for name in ("patch_size", "image_size"))
    if isinstance(patch, int) and isinstance(image, int):
        return {"image_size": 4 * patch}
    if isinstance(patch, list | tuple) and isinstance(image, list | tuple):
        return {"image_size": [4 * side for side in patch]}
    return {}


def _shorten_layer_lists(config: Any) -> dict[str, Any]:
    """Shorten every list with an entry per layer to one of each kind, and at least four."""
    name = next((each for each in LAYER_COUNTS if each in vars(config)), "num_hidden_layers")
    count = vars(config).get(name)
    lists = {
        key: list(value)
        for key, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count and key not in INDEXES
    }
    # Indices of layers, not kinds.
    numbered = [key for key in lists if lists[key] == list(range(len(lists[key])))]
    lists = {key: value for key, value in lists.items() if key not in numbered}
    if not lists or not isinstance(count, int):
        return {}
    chosen_layers = {value.index(kind) for value in lists.values() for kind in value}
    others = [place for place in range(count) if place not in chosen_layers]
    chosen_layers |= {*others[: max(0, LAYERS - len(chosen_layers))]}
    rows = {key: [value[place] for place in sorted(chosen_layers)] for key, value in lists.items()}
    rows |= {key: list(range(len(chosen_layers))) for key in numbered}
    for key, row in rows.items():
        size = find_tiny_size(key)
        if size is not None and all(isinstance(entry, int) for entry in row):
            rows[key] = [min(entry, size) for entry in row]
    return {name: len(chosen_layers), **rows}


def _shrink_rope(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Shrink RoPE settings.

    `original_max_position_embeddings` becomes 64, so that texts are longer than the length at which
    RoPE changes. The sections of M-RoPE keep their proportions and add up to half the rotated part
    of a head.
    """
    scaled = dict(rope)
    half = int(head_dim * (rope.get("partial_rotary_factor") or 1.0)) // 2
    for name, value in rope.items():
        if isinstance(value, dict):
            scaled[name] = _shrink_rope(value, head_dim)
        elif name == "original_max_position_embeddings":
            scaled[name] = SWITCH
        elif name == "mrope_section":
            shares = [max(1, part * half // sum(value)) for part in value]
            scaled[name] = [*shares[:-1], half - sum(shares[:-1])]
    return scaled


def _format_layers(text: Any) -> str:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    count = getattr(text, "num_hidden_layers", None)
    if not kinds:
        return str(count)
    return ", ".join(f"{len([*run])} {kind}" for kind, run in groupby(kinds))


def make_random_model(kind: Any, config: Any) -> tuple[Any, dict[str, Any]]:
    """Make a model whose greedy text varies and depends on earlier tokens.

    Args:
        kind: model class of transformers.
        config: config of a tiny model.

    Returns:
        The model, and facts of its weights: `gain`, `embedding`, results of `measure_text_quality`.

    Raises:
        RuntimeError: its logits are not finite.
    """
    best: tuple[float, Any, dict[str, Any]] = (-1.0, None, {})
    for gain, embedding in WEIGHTS:
        torch.manual_seed(0)
        model = kind._from_config(config, dtype=torch.float32).eval()
        scale_weights(model, gain, embedding)
        facts = {"gain": gain, "embedding": embedding, **measure_text_quality(model)}
        fit = min(facts["num_distinct_tokens"] / DISTINCT, 1) * min(facts["reach"] / REACH, 1)
        best = max(best, (fit, model, facts), key=lambda each: each[0])
        if fit == 1:
            break
    return best[1:]


@torch.no_grad()
def scale_weights(model: Any, gain: float, embedding: float) -> None:
    """Scale matrices so that they pass on their input, and add noise to constant weights.

    In every family, a matrix of n inputs gets a deviation of gain / sqrt(n). A bias that starts as
    zero, or a norm as one, would hide that an implementation leaves it out.
    """
    generator = torch.Generator().manual_seed(1)
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last == "dt_bias":
            # As initialised, a state is forgotten in two tokens; trained states last for many.
            parameter.sub_(4)
        elif parameter.numel() == 1 or bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        elif parameter.dim() > 1 and last not in AS_THEY_ARE:
            shape = parameter.shape
            inputs = math.prod(shape[1:]) if "conv" in name else min(shape[-2:])
            deviation = embedding if id(parameter) in embeddings else gain / math.sqrt(inputs)
            parameter.mul_(deviation / parameter.std())
    # Tokens that stand for pictures and sounds are never predicted; a complete model would read
    # them.
    head = model.get_output_embeddings()
    if head is not None:
        head.weight[find_placeholder_ids(model.config)] = 0
    # The final norm gets a gain, so that the logits of any family have a deviation of 2, in
    # addition to the 1 that norms start with, in the weight or in code.
    deviation, norm = _measure_deviation(model)
    if norm is not None and 0 < deviation < 2:
        norm.weight.add_(2 / deviation - 1)


def find_placeholder_ids(config: Any) -> list[int]:
    """Find the ids of tokens that stand for pictures and so on, in a config and its parts."""
    ids = set()
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            ids |= set(find_placeholder_ids(value))
        elif name.endswith(TOKENS) and isinstance(value, int) and value >= FIRST_OTHER:
            ids.add(value)
    return sorted(ids)


def _measure_deviation(model: Any) -> tuple[float, Any]:
    """Measure the deviation of logits, and find the last norm before them."""
    ran: list[nn.Module] = []
    hooks = [
        module.register_forward_hook(lambda module, *_: ran.append(module))
        for module in model.modules()
        if getattr(module, "weight", None) is not None and module.weight.dim() == 1
    ]
    logits = model(input_ids=PROMPT).logits[0, -1].float()
    for hook in hooks:
        hook.remove()
    return logits.std().item(), ran[-1] if ran else None


@torch.no_grad()
def measure_text_quality(model: Any) -> dict[str, Any]:
    """Measure whether texts of a model can be compared.

    Returns:
        logits_std: deviation of the logits; below 1, float32 rounding decides.
        num_distinct_tokens: distinct tokens among 32 that follow a prompt greedily.
        reach: how far a changed token 6 places earlier moves the logits, in their deviations.

    Raises:
        RuntimeError: its logits are not finite.
    """
    other = PROMPT.clone()
    other[0, -7] += 1
    logits, moved = (model(input_ids=ids).logits[0, -1].float() for ids in (PROMPT, other))
    deviation = logits.std().item()
    if not math.isfinite(deviation):
        raise RuntimeError(f"its logits are not finite: their deviation is {deviation}")
    text = model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=32, do_sample=False,
        pad_token_id=PAD, eos_token_id=None,
    )  # fmt: skip
    return {
        "logits_std": round(deviation, 3),
        "num_distinct_tokens": len(set(text[0, PROMPT.shape[1] :].tolist())),
        "reach": round((logits - moved).std().item() / max(deviation, 1e-6), 3),
    }
