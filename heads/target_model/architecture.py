"""Architecture of a target by its config: sizes, RoPE, and what each layer sees of a text.

transformers maps most names of a family to the usual ones (`attribute_map`); the table `NAMES` has
the rest. A key that differs between layers counts with its most frequent value. Missing sizes get
the values that such models have or engines assume.

`AttentionPattern` tells of each layer whether it sees the whole text, a window, a chunk, or a
state.

Letters: B texts, Q queries, S keys.
"""

from collections import Counter
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

import torch
from torch import Tensor

from conf.errors import InputError

NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "word_embed_proj_dim": ("word_embed_proj_dim",),
    # LongCat's `num_hidden_layers` counts attentions, two per layer.
    "num_hidden_layers": ("num_layers", "num_hidden_layers", "n_layer", "n_layers"),
    "intermediate_size": (
        *("intermediate_size", "ffn_config.ffn_hidden_size", "ffn_hidden_size", "ffn_dim"),
        *("decoder_ffn_dim", "n_inner", "d_ff", "dff", "dim_ff"),
    ),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "num_experts_per_tok": (
        *("num_experts_per_tok", "num_experts_per_token", "ffn_config.moe_top_k"),
        *("moe_topk", "moe_k", "top_k_experts"),
    ),
    # `num_heads` is missing here: in Mamba-2 and xLSTM it counts heads of a state.
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": (
        *("num_key_value_heads", "multi_query_group_num", "num_kv_heads"),
        "attn_config.kv_n_heads",
    ),
    "head_dim": ("head_dim", "kv_channels", "d_kv"),
    "max_position_embeddings": (
        *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
        "seq_length",
    ),
    "rms_norm_eps": (
        *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        "layernorm_epsilon",
    ),
}
USUAL_EPSILON = 1e-5
USUAL_POSITIONS = 131072
"""Positions of a target without a limit (Mamba, ALiBi); engines take the lower of the target's and
the head's limit."""
STATE_HEAD = 64
"""Head size for a target without attention."""
WIDEST = 4
"""Largest width of queries in hidden sizes; wider queries come from a latent (DeepSeek-V4's heads
of 512)."""
# transformers' names for types of layers.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ATTENTION = {"attention": FULL, "hybrid": FULL, "hybrid_sliding": SLIDING}
RECURRENT = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
NEITHER = {"moe", "mlp", "dummy"}
REFUSED = {
    "indexed_attention": "chooses the keys of each query by an index",
    "compressed_sparse_attention": "attends to compressed keys of several tokens",
    "heavily_compressed_attention": "attends to compressed keys of several tokens",
    "minimax_m3_sparse": "chooses the blocks of keys that a query sees",
}
REFUSED_WITH = {
    "alibi": "ALiBi uses cache slots as positions, but drafts lie there in another order",
    "keep_window_size": "drops keys by scores, which drafts change",
    "lru_width": "keeps states in its layers, outside the cache",
}
"""Reasons to refuse a target, by keys of its config."""
Masks = Tensor | dict[str, Tensor | None]


def find_hidden_size(config: Any) -> int:
    """Find the width of hidden states between decoder layers.

    Raises:
        InputError: the config lacks it.
    """
    return _find_size(config, "hidden_size")


def find_embedding_size(config: Any) -> int:
    """Find the width of embedded tokens and of last hidden states; OPT-350m projects both."""
    return _find_size(config, "word_embed_proj_dim", find_hidden_size(config))


def count_layers(config: Any) -> int:
    """Count the decoder layers.

    Raises:
        InputError: the config lacks it.
    """
    return _find_size(config, "num_hidden_layers")


def compute_mlp_size(config: Any) -> int:
    """Compute the inner size of a gated MLP as costly per token as the target's.

    If a mixture's width is missing, or below twice the hidden size and thus an expert's, it counts
    with all experts per token. Without any width it is 4 hidden sizes, as in GPT-2.
    """
    hidden = find_hidden_size(config)
    dense = _find_size(config, "intermediate_size", 0)
    experts = _find_size(config, "num_experts_per_tok", 0)
    if experts and dense < 2 * hidden:
        return _find_size(config, "moe_intermediate_size", dense) * experts or 4 * hidden
    return dense or 4 * hidden


def compute_attention_heads(config: Any, width: int) -> tuple[int, int, int]:
    """Compute the target's attention heads as far as engines load them for a Llama layer.

    RoPE there needs an even size, and each head a whole number of a hidden state's values (GLM 4.5
    has 96 heads for 4096), though all heads together may be wider or narrower.

    Args:
        config: config of the target.
        width: width of the Llama layer's hidden states.

    Returns:
        Numbers of query heads and of key-value heads, and the size of a head.
    """
    hidden = find_hidden_size(config)
    num_heads = _find_size(config, "num_attention_heads", 0)
    if not num_heads:
        num_heads = max(1, hidden // STATE_HEAD)
        return gcd(num_heads, width), gcd(num_heads, width), STATE_HEAD
    num_heads = next(n for n in range(num_heads, 0, -1) if width % n == 0)
    head_dim = _find_size(config, "head_dim", 0)
    if not head_dim or num_heads * head_dim > WIDEST * hidden:
        head_dim = hidden // num_heads
    # Falcon's flag only applies to its old layers.
    single = getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    )
    num_key_value_heads = 1 if single else _find_size(config, "num_key_value_heads", num_heads)
    return num_heads, gcd(num_heads, num_key_value_heads), head_dim + head_dim % 2


def find_max_positions(config: Any) -> int:
    """Find the number of tokens of the longest text."""
    return _find_size(config, "max_position_embeddings", USUAL_POSITIONS)


def find_norm_epsilon(config: Any) -> float:
    """Find the epsilon of the norms."""
    return _find_first_value(config, "rms_norm_eps") or USUAL_EPSILON


def find_rope(config: Any) -> dict[str, Any]:
    """Find the target's RoPE over the whole head; types that depend on length become plain.

    If types of layers differ, take the RoPE of full attention, or else the slowest.
    """
    stated = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [rope for rope in stated.values() if isinstance(rope, dict)]
    if by_layer_type:
        slowest = max(by_layer_type, key=lambda rope: rope.get("rope_theta") or 0)
        stated = stated.get("full_attention") or slowest
    theta = stated.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    if stated.get("rope_type", "default") not in ("linear", "yarn", "llama3"):
        return {"rope_type": "default", "rope_theta": theta}
    # For text, M-RoPE's positions equal plain RoPE's.
    other = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
    settings = {name: value for name, value in stated.items() if name not in other}
    return settings | {"rope_theta": theta}


def _find_size(config: Any, key: str, default: int | None = None) -> int:
    """Find a size, an integer above 0, or return the default.

    Raises:
        InputError: another value, or none without a default.
    """
    size = _find_first_value(config, key)
    if size is None and default is not None:
        return default
    if not isinstance(size, int) or size < 1:
        raise InputError(
            f"target.path: the config.json of this {config.model_type} has {size!r} for {key} "
            f"(looked for {', '.join(NAMES[key])}): set {key} there to a whole number above 0"
        )
    return size


def _find_first_value(config: Any, key: str) -> Any:
    """Return the value of the first of a key's names that is present."""
    for name in NAMES[key]:
        *outer, last = name.split(".")
        place = reduce(lambda inner, part: getattr(inner, part, None), outer, config)
        value: Any
        # transformers raises if a per-layer key is read from the whole config.
        if last in (getattr(place, "per_layer_attributes", None) or ()):
            value = [getattr(layer, last, None) for layer in place.per_layer_config]
        else:
            value = getattr(place, last, None)
        if isinstance(value, (list, tuple)):
            ranked = Counter(size for size in value if size is not None).most_common(1)
            value = ranked[0][0] if ranked else None
        if value not in (None, 0, -1):  # XLNet's -1 means no limit
            return value
    return None


@dataclass(frozen=True)
class AttentionPattern:
    """Types of layers, and how far each sees.

    Attributes:
        layer_types: type of each layer, as in the config.
        window: tokens that a query sees in a sliding layer, its own included.
        chunk: tokens per chunk; a query sees no earlier chunks.
        is_recurrent: whether any layer may carry a state.
        shares_keys: whether layers use the keys of an earlier layer.
    """

    layer_types: tuple[str, ...]
    window: int | None
    chunk: int | None
    is_recurrent: bool
    shares_keys: bool

    @classmethod
    def from_config(cls, config: Any, name: str) -> "AttentionPattern":
        """Read the attention pattern of a text model's config.

        Raises:
            InputError: layers that are not supported, with the reason.
        """
        window = getattr(config, "sliding_window", None)
        named = getattr(config, "layer_types", None)
        types = tuple(named or [SLIDING if window else FULL] * config.num_hidden_layers)
        known = {FULL, SLIDING, CHUNKED, *ATTENTION, *RECURRENT, *NEITHER}
        for unknown in sorted(set(types) - known):
            reason = REFUSED.get(unknown, f"is none of {sorted(known)}")
            raise _make_refusal(config, name, f"its layer of type {unknown} {reason}")
        for key, reason in REFUSED_WITH.items():
            # BLOOM always has ALiBi, and no key for it.
            if getattr(config, key, False) or (key == "alibi" and config.model_type == "bloom"):
                raise _make_refusal(config, name, f"{key} in its config: {reason}")
        chunk = getattr(config, "attention_chunk_size", None)
        shares = bool(getattr(config, "num_kv_shared_layers", 0))
        return cls(types, window, chunk, bool(RECURRENT & set(types)), shares)

    @property
    def windows(self) -> list[int | None]:
        """Return the window of each attention layer; None for full or chunked layers."""
        windows = {FULL: None, SLIDING: self.window, CHUNKED: None}
        return [windows[name] for name in self._attention_types if name in windows]

    @property
    def chunks(self) -> dict[int, int]:
        """Return the tokens per chunk, by the index of each chunked layer."""
        indices = [index for index, name in enumerate(self.layer_types) if name == CHUNKED]
        return dict.fromkeys(indices, self.chunk or 0)

    @property
    def length_limits(self) -> list[int]:
        """Return the lengths above which some layer sees less than the whole text."""
        sizes = {SLIDING: self.window, CHUNKED: self.chunk}
        return [size for name, size in sizes.items() if name in self._attention_types and size]

    @property
    def _attention_types(self) -> list[str]:
        """Return the types of layers, hybrids by their attention."""
        return [ATTENTION.get(name, name) for name in self.layer_types]

    def build_masks(
        self, allowed: Tensor, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype
    ) -> Masks | None:
        """Build additive masks [B, 1, Q, S], by type of layer if there are several types.

        A mask is 0 for visible tokens and the least number elsewhere.

        Args:
            allowed: [B, Q, S] bool, True for visible tokens; windows and chunks are added.
            query_positions: [B, Q] int64.
            key_positions: [B, S] int64.
            dtype: dtype of the masks.
        """

        def build_mask(layer_type: str) -> Tensor:
            window = self.window if layer_type == SLIDING else None
            chunk = self.chunk if layer_type == CHUNKED else None
            seen = restrict_visibility(allowed, query_positions, key_positions, window, chunk)
            # Boolean masks would be silently wrong in eager attention.
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            return mask.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)

        types = {name for name in self._attention_types if name in (FULL, SLIDING, CHUNKED)}
        masks: dict[str, Tensor | None] = {name: build_mask(name) for name in types}
        if len(masks) < 2:
            return next(iter(masks.values()), None)
        recurrent: dict[str, Tensor | None] = dict.fromkeys(RECURRENT)
        by_layer = zip(self.layer_types, self._attention_types, strict=True)
        return recurrent | masks | {stated: masks.get(name) for stated, name in by_layer}


def restrict_visibility(
    allowed: Tensor, queries: Tensor, keys: Tensor, window: int | None, chunk: int | None
) -> Tensor:
    """Restrict visible tokens [B, Q, S] to a window or chunk.

    Args:
        allowed: [B, Q, S] bool, True for visible tokens.
        queries: [B, Q] int64 positions of the queries.
        keys: [B, S] int64 positions of the keys.
        window: tokens that a query sees, its own included; None for no window.
        chunk: tokens per chunk; None for no chunks.
    """
    queries, keys = queries.unsqueeze(2), keys.unsqueeze(1)
    if window is not None:
        allowed = allowed & (queries - keys < window)
    if chunk is not None:
        allowed = allowed & (queries // chunk == keys // chunk)
    return allowed


def _make_refusal(config: Any, name: str, reason: str) -> InputError:
    return InputError(
        f"target.path={name}: {config.model_type} is not supported: {reason}; name another target"
    )
