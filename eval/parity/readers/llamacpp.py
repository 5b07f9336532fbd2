"""Reader of heads in GGUF files that computes their logits as llama.cpp does.

Source, read November 2026: llama.cpp b11434 `src/models/{eagle3,dflash}.cpp`,
`src/llama-{arch,hparams,model}.cpp`, `common/speculative.cpp`. Letters: W drafted ids.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conf.errors import InputError
from eval.parity.decoder import EMBEDDING, OUTPUT, SizeKeys, check_trained_layers
from eval.parity.engine_config import EngineConfig, Rope, parse_rope
from eval.parity.export_files import Export, ReferenceLogits
from eval.parity.gguf import GgufMetadata
from eval.parity.readers.blocks import (
    DFLASH2_FACTORS,
    DFLASH2_NUMBERS,
    BlockShape,
    DFlash2Shape,
    DSparkShape,
    ServedBlocks,
    ServedDFlash2,
    ServedDSpark,
)
from eval.parity.readers.eagle import EagleShape, EngineConventions, ServedEagle

FORMATS = {kind: ("llamacpp",) for kind in ("eagle3", "dflash", "dflash2", "dspark")}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_norm_2.weight": "hidden_norm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}
SHARED = {
    "output_norm.weight": "norm.weight",
    "output.weight": OUTPUT,
    "token_embd.weight": EMBEDDING,
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
SIZE_KEYS: SizeKeys = {
    "hidden_size": ("embedding_length", int, "loads nothing"),
    "intermediate_size": ("feed_forward_length", int, "loads nothing"),
    "num_heads": ("attention.head_count", int, "loads nothing"),
    "num_kv_heads": ("attention.head_count_kv", int, "takes head_count"),
    "head_dim": ("attention.key_length", int, "divides the hidden size by the heads"),
    "eps": ("attention.layer_norm_rms_epsilon", float, "loads nothing"),
}
FACTOR_KEYS = ("embedding_scale", "logit_scale", "final_logit_softcapping")
"""Keys of `DFLASH2_FACTORS`."""
FREQS = "rope_freqs.weight"
FLAGS = ("norm_before_residual", "norm_before_fc")


class GgufHead:
    """Values shared by all heads.

    Args:
        export: export whose config is the file's metadata.
        golden: sizes of the target.
        arch: architecture that the metadata must name.
    """

    def __init__(self, export: Export, golden: ReferenceLogits, arch: str) -> None:
        self.export, self.golden = export, golden
        self.keys = GgufMetadata(export.config, export.weights, arch)
        self.keys.check_equal("general.architecture", arch, "that of the kind", "loads nothing")
        self.num_layers = self.keys.require_key("block_count", int, "loads nothing")
        self.tensors = dict(export.tensors)
        self.freqs = self.tensors.pop(FREQS, None)

    def parse_sizes(self) -> dict[str, Any]:
        """Read the values of `HeadShape`, except the width of hidden states and `qk_norm`.

        Raises:
            InputError: llama.cpp would guess a value, or compute with another.
        """
        keys, golden = self.keys, self.golden
        sizes = {name: keys.require_key(*row) for name, row in SIZE_KEYS.items()}
        head_dim = sizes["head_dim"]
        for key in ("attention.value_length", "rope.dimension_count"):
            keys.check_equal(key, head_dim, "that of the keys", SIZE_KEYS["head_dim"][2])
        positions = keys.require_key("context_length", int, "loads nothing")
        if positions < golden.max_position_embeddings:
            raise keys.make_error("context_length", f"{golden.max_position_embeddings} or more")
        tokens = "tokenizer.ggml.tokens"
        keys.require_key("tokenizer.ggml.model", str, "loads nothing")
        if len(keys.require_list(tokens, 8, "has no vocabulary")) != golden.vocab_size:
            raise InputError(
                f"{keys.file}: {tokens}: llama.cpp needs the target's {golden.vocab_size}; export "
                "again"
            )
        d2t = self.tensors.get("d2t")
        return sizes | {
            "vocab_size": golden.vocab_size,
            "draft_vocab_size": golden.vocab_size if d2t is None else len(d2t),
            "layers": self._parse_layers(),
            "rope": self._parse_rope(head_dim),
        }

    def _parse_layers(self) -> tuple[int, ...]:
        key, known = "target_layers", range(self.golden.num_layers)
        ids = self.keys.require_list(key, 5, "loads nothing")
        if len(set(ids)) != len(ids) or not set(ids) <= set(known):
            raise self.keys.make_error(
                key, f"each of {known[0]}..{known[-1]} once: others it cannot read, or reads wrong"
            )
        return check_trained_layers(self.keys, self.export, ids)

    def _parse_rope(self, head_dim: int) -> Rope:
        """Build RoPE from the metadata, with the file's own divisors."""
        keys = self.keys
        settings: dict[str, Any] = {
            "rope_theta": keys.require_key("rope.freq_base", float, "turns with a theta of 10000")
        }
        kind = keys.get_value("rope.scaling.type", str, "none")
        if kind != "none":
            factor = keys.require_key("rope.scaling.factor", float, "scales nothing")
            settings["rope_scaling"] = {"type": kind, "factor": factor}
        if kind == "yarn":
            key = "rope.scaling.original_context_length"
            original = keys.require_key(key, int, "takes context_length")
            settings["rope_scaling"]["original_max_position_embeddings"] = original
        elif kind not in ("none", "linear"):
            raise keys.make_error("rope.scaling.type", "none, linear or yarn")
        rope = parse_rope(EngineConfig(settings, keys.file, "llama.cpp"), head_dim, "old")
        if self.freqs is None:
            return rope
        if self.freqs.shape != rope.frequencies.shape or self.freqs.dtype is not torch.float32:
            raise InputError(
                f"{keys.file}: {FREQS} is {self.freqs.dtype} {list(self.freqs.shape)}: llama.cpp "
                f"needs float32 {list(rope.frequencies.shape)}"
            )
        return replace(rope, frequencies=rope.frequencies / self.freqs)

    def build_export(self, names: dict[str, str]) -> Export:
        """Build the export with tensors under the names of their original authors.

        Args:
            names: names of tensors outside the layers.

        Raises:
            InputError: `d2t` holds no ids, or a tensor has a dtype that llama.cpp refuses.
        """
        tensors = {}
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and (tensor.ndim == 1 or not name.endswith(".weight")):
                self._check_dtype(name, tensor, torch.float32)
            tensors[self._translate_name(name, names | SHARED)] = tensor
        if (ids := tensors.get("d2t")) is not None:
            self._check_dtype("d2t", ids, torch.int64)
            size = self.golden.vocab_size
            if ids.min() < 0 or ids.max() >= size or len(ids.unique()) != len(ids):
                raise InputError(
                    f"{self.keys.file}: d2t: llama.cpp needs {len(ids)} target ids of "
                    f"0..{size - 1}, each once; the offsets of other engines would draft other "
                    "tokens"
                )
            tensors["d2t"] = ids - torch.arange(len(ids))  # as other engines have it
        return replace(self.export, tensors=tensors)

    def _translate_name(self, name: str, names: dict[str, str]) -> str:
        start, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        if start == "blk" and part in LAYER:
            return f"layers.{number}.{LAYER[part]}"
        # An unknown name must not pass for a known one.
        return names.get(name, f"? {name}" if name != "d2t" else name)

    def _check_dtype(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.dtype is not dtype:
            raise InputError(
                f"{self.keys.file}: {name} is of {tensor.dtype}: llama.cpp needs {dtype}"
            )


def _read_eagle3(export: Export, golden: ReferenceLogits) -> ServedEagle:
    """Read an EAGLE-3 head, with rotated neighbours and perhaps the target's output head."""
    head = GgufHead(export, golden, "eagle3")
    head.keys.check_equal("block_count", 1, "as its graph has one layer", "loads nothing")
    sizes = head.parse_sizes()
    if len(sizes["layers"]) != 3:
        raise head.keys.make_error("target_layers", "three")
    for name, count in (("attn_q", sizes["num_heads"]), ("attn_k", sizes["num_kv_heads"])):
        weight = head.tensors.get(name := f"blk.0.{name}.weight")
        if weight is not None and len(weight) == count * sizes["head_dim"]:
            pairs = weight.reshape(count, sizes["head_dim"] // 2, 2, -1)
            head.tensors[name] = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).flatten(0, 1)
    shape = EagleShape(
        **sizes,
        kind="eagle3",
        target_hidden_size=head.keys.require_key("target_hidden_size", int, "loads nothing"),
        flags=frozenset(flag for flag in FLAGS if head.keys.get_value(flag, bool, False)),
        qk_norm=False,
    )
    names = {"fc.weight": "fc.weight", "enc.output_norm.weight": "input_norm.weight"}
    conventions = EngineConventions("llama.cpp", (), prefixes=("layers.0.",), t2d="no")
    return ServedEagle(head.build_export(names), golden, conventions, shape)


def _read_blocks(export: Export, golden: ReferenceLogits) -> ServedBlocks:
    """Read a block drafter, of the kind that its tensors show."""
    head = GgufHead(export, golden, "dflash")
    keys, sizes = head.keys, head.parse_sizes()
    hidden = sizes["hidden_size"]
    mask = int(golden.require_tensor("mask_token_id", (1,)))
    keys.check_equal("tokenizer.ggml.mask_token_id", mask, "as it was trained", "has no mask")
    if "token_embd.weight" in head.tensors and "output.weight" not in head.tensors:
        raise InputError(
            f"{keys.file}: token_embd.weight without output.weight: llama.cpp would use the head's "
            "own embedding as output head; export again"
        )
    windowed = [False] * head.num_layers
    window = keys.get_value("attention.sliding_window", int, None)
    if window is not None:
        windowed = keys.require_list("attention.sliding_window_pattern", 7, "loads nothing")
        if len(windowed) != head.num_layers:
            raise keys.make_error("attention.sliding_window_pattern", f"{head.num_layers} of them")
    causal = keys.get_value("attention.causal", bool, False)
    markov, selects = "markov_w1.weight" in head.tensors, "selector_hidden.weight" in head.tensors
    if markov != (export.kind == "dspark") or selects != (export.kind == "dflash2"):
        raise InputError(
            f"{keys.file}: these are not the tensors of {export.kind} heads; export again"
        )
    full = tuple(number for number, each in enumerate(windowed) if not each)
    if causal and any(windowed) and full:
        raise keys.make_error(
            "attention.causal", f"false, as layers {list(full)} see all of the text"
        )
    sizes |= {
        "target_hidden_size": hidden,
        "num_layers": head.num_layers,
        "block_size": keys.require_key("block_size", int, "takes 16"),
        "drafts_next_token": markov and keys.get_value("sample_from_anchor", bool, True),
        "causal": causal,
        "window": window if any(windowed) else None,
        "full": full if any(windowed) else (),
        "qk_norm": True,
    }
    read = head.build_export(
        {"fc.weight": "fc.weight", "enc.output_norm.weight": "hidden_norm.weight"}
    )
    if markov:
        rank = head.tensors["markov_w1.weight"].shape[-1]
        confidence_size = hidden + rank if "conf_proj.weight" in head.tensors else 0
        shape = DSparkShape(**sizes, markov="vanilla", rank=rank, confidence_size=confidence_size)
        return ServedDSpark(read, golden, shape)
    if not selects:
        return ServedBlocks(read, golden, BlockShape(**sizes))
    for name in DFLASH2_NUMBERS:
        sizes[name] = keys.require_key(name, int, "loads nothing")
    top_k = sizes["selector_top_k"]
    if hidden < top_k * (top_k + 1):
        raise keys.make_error("selector_top_k", f"k with k * (k + 1) of at most {hidden}")
    for name, key in zip(DFLASH2_FACTORS, FACTOR_KEYS, strict=True):
        if key in keys.values:
            sizes[name] = keys.require_key(key, float, "scales nothing")
    return ServedDFlash2(read, golden, DFlash2Shape(**sizes))


def build_head(export: Export, golden: ReferenceLogits) -> ServedEagle | ServedBlocks:
    """Build the head of an export. See `eval.parity.parity_check.Reader`."""
    return (_read_eagle3 if export.kind == "eagle3" else _read_blocks)(export, golden)
