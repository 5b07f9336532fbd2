"""GGUF files of llama.cpp: the file format, and the metadata of targets and heads inside.

The format is metadata and tensors in one file, version 3, little-endian. A string is its length as
u64 and UTF-8; shapes have the fastest dimension first, the reverse of torch's. The package `gguf`
writes files. Headers are read here, before commands refuse a target: with 152,000 tokens the
package's reader takes 16 s, this one 0.3 s.

The second part names what the files hold: names of tensors, sizes, vocabulary and RoPE.

Source: ggml `docs/gguf.md`; llama.cpp b11434 `src/llama-{arch,model,vocab}.cpp`,
`src/models/{eagle3,dflash}.cpp`. Letters: d head size, W draft vocabulary.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf import GGUFValueType as Kind
from torch import Tensor

from conf.errors import InputError
from conf.files import HUB_ID, split_gguf_path

MAGIC, ALIGNMENT = b"GGUF", 32
DTYPES = {0: torch.float32, 1: torch.float16, 27: torch.int64, 30: torch.bfloat16}
"""Types of tensors that are read and written; others are quantised or unused here."""
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
FILE_TYPES = {torch.float32: (0, "F32"), torch.float16: (1, "F16"), torch.bfloat16: (32, "BF16")}
"""`general.file_type` and its name, by the dtype of matrices."""
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "hidden_norm.weight": "attn_norm_2.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
"""Names of a layer's tensors: transformers', and llama.cpp's after `blk.N.`."""
SIZES = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
}
"""Names of sizes: transformers', and llama.cpp's after the architecture."""
ROPE_FREQS = "rope_freqs.weight"
USUAL_YARN = {
    **{"attention_factor": None, "mscale": None, "mscale_all_dim": None},
    **{"beta_fast": 32, "beta_slow": 1, "truncate": True},
}
"""YaRN settings that llama.cpp assumes."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Settings of every Llama 3, needed to recover the others from the divisors of frequencies."""
BASE = "general.base_model.0.name"
LAYER_INPUTS = (
    *("llama", "mistral", "mixtral", "internlm3", "iquestcoder", "qwen3", "qwen3_moe"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "gemma4", "gemma4_unified", "gpt_oss"),
    *("lfm2", "lfm2_moe", "minimax", "minimax_m2", "nemotron_h", "hunyuan_vl"),
    *("hunyuan_v1_dense", "deepseek_v4", "mimo_v2_flash", "nanbeige", "muse_glimmer"),
)
"""Model types whose llama.cpp architecture gives the inputs of its layers to draft heads."""
NO_LAYER_INPUTS = (
    *("afmoe", "apertus", "arcee", "bamba", "bitnet", "bloom", "chameleon", "cohere", "cohere2"),
    *("cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone4_5", "exaone_moe", "falcon", "falcon_h1"),
    *("falcon_mamba", "gemma", "gemma2", "gemma3", "gemma3n", "glm", "glm4", "glm4_moe"),
    *("glm4_moe_lite", "glm4v", "glm4v_moe", "glm5_next", "glm_moe_dsa", "glm_ocr", "gpt2"),
    *("gpt_bigcode", "gpt_neox", "granite", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "hrm_text", "hunyuan_v1_moe", "hy_v3", "hy_v4"),
    *("jais2", "jamba", "kimi_linear", "laguna", "llama4", "mamba", "mamba2", "mellum"),
    *("minicpm3", "minimax_m3_vl", "ministral3", "mistral3", "nemotron", "olmo", "olmo2", "olmo3"),
    *("olmoe", "paddleocr_vl", "phi", "phi3", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl"),
    *("qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2"),
    *("step3p7", "youtu"),
)
"""Model types that llama.cpp runs, but not with a head: its server ends at the first request."""


@dataclass(frozen=True)
class Value:
    """Metadata value.

    Attributes:
        kind: type of the content, or of a list's elements.
        content: number, bool or string, or a list of them.
    """

    kind: Kind
    content: Any

    @classmethod
    def from_content(cls, content: Any) -> Self:
        """Make the value that llama.cpp expects: integers are u32, and i32 in a list."""
        plain = content[0] if isinstance(content, list) and content else content
        if isinstance(plain, bool):
            return cls(Kind.BOOL, content)
        if isinstance(plain, int):
            return cls(Kind.INT32 if isinstance(content, list) else Kind.UINT32, content)
        return cls(Kind.FLOAT32 if isinstance(plain, float) else Kind.STRING, content)


def write_gguf(file: Path, metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> None:
    """Write metadata and tensors into a GGUF file, atomically.

    Args:
        file: path, replaced if it exists.
        metadata: values by key, including `general.architecture`.
        tensors: CPU tensors of a dtype in `DTYPES`.

    Raises:
        InputError: an empty list, which llama.cpp takes for damage.
    """
    partial = file.with_name(f"{file.name}.tmp")
    writer = GGUFWriter(partial, arch="")  # adds no key of its own
    for key, value in metadata.items():
        if value.content == []:
            raise InputError(f"{key}=[]: a GGUF file cannot hold an empty list; leave the key out")
        is_list = isinstance(value.content, list)
        writer.add_key_value(key, value.content, Kind.ARRAY if is_list else value.kind, value.kind)
    for name, tensor in tensors.items():
        # numpy has no bfloat16.
        bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
        number = GGMLQuantizationType(DTYPE_NUMBERS[tensor.dtype])
        writer.add_tensor(name, bits.contiguous().numpy(), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(file)


class GgufFile:
    """GGUF file of which only the metadata and the table of tensors are read at first.

    Args:
        file: path of the file.
        key: setting that names the file, for messages.

    Raises:
        InputError: no GGUF file, another version, or cut off.

    Attributes:
        metadata: values by key.
        table: type number, shape and offset of each tensor; offsets count from `start`.
        start: offset of the tensors in bytes.
    """

    def __init__(self, file: Path, key: str) -> None:
        self.file, self.label = file, f"{key}={file}"
        self.metadata: dict[str, Value] = {}
        self.table: dict[str, tuple[int, tuple[int, ...], int]] = {}
        try:
            with file.open("rb") as opened:
                self._read_header(opened)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.label}: not a complete GGUF file: {error}; download or convert it again"
            ) from error

    def _read_header(self, opened: BinaryIO) -> None:
        num_bytes = self.file.stat().st_size

        def read_bytes(size: int) -> bytes:
            if size > num_bytes:  # a damaged file may state more than memory holds
                raise ValueError(f"it states {size} more bytes, but has {num_bytes}")
            read = opened.read(size)
            if len(read) < size:
                raise ValueError(f"it ends {size - len(read)} bytes early")
            return read

        def read_integer(size: int = 8) -> int:
            return int.from_bytes(read_bytes(size), "little")

        def read_contents(kind: Kind, count: int) -> list[Any]:
            if kind is Kind.STRING:
                return [read_bytes(read_integer()).decode() for _ in range(count)]
            dtype = np.dtype(GGUFReader.gguf_scalar_to_np[kind])
            return np.frombuffer(read_bytes(count * dtype.itemsize), dtype).tolist()

        magic, version = read_bytes(4), read_integer(4)
        if magic != MAGIC or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r} and version {version}, not {MAGIC!r} and 3")
        num_tensors, num_keys = read_integer(), read_integer()
        for _ in range(num_keys):
            key, kind = read_bytes(read_integer()).decode(), Kind(read_integer(4))
            if kind is Kind.ARRAY:
                kind = Kind(read_integer(4))
                self.metadata[key] = Value(kind, read_contents(kind, read_integer()))
            else:
                self.metadata[key] = Value(kind, read_contents(kind, 1)[0])
        for _ in range(num_tensors):
            name = read_bytes(read_integer()).decode()
            dims = [read_integer() for _ in range(read_integer(4))]
            self.table[name] = read_integer(4), tuple(reversed(dims)), read_integer()
        alignment = self.metadata.get("general.alignment", Value.from_content(ALIGNMENT)).content
        self.start = opened.tell() + -opened.tell() % alignment

    def get_content(self, key: str, otherwise: Any = None) -> Any:
        """Get the content of a key of the architecture, or a default."""
        value = self.metadata.get(f"{self.metadata['general.architecture'].content}.{key}")
        if value is None:
            return otherwise
        # With the written digits, not those of the nearest float64.
        if value.kind is Kind.FLOAT32 and not isinstance(value.content, list):
            return float(str(np.float32(value.content)))
        return value.content

    def require_content(self, key: str) -> Any:
        """Get the content of a required key of the architecture.

        Raises:
            InputError: the key is missing.
        """
        content = self.get_content(key)
        if content is None:
            arch = self.metadata["general.architecture"].content
            raise InputError(
                f"{self.label}: {arch}.{key} is missing in its metadata; convert it again"
            )
        return content

    def load_tensors(self) -> dict[str, Tensor]:
        """Read all tensors to the CPU.

        Raises:
            InputError: a tensor is quantised, or lies beyond the end of the file.
        """
        return {name: self._load_tensor(name, *entry) for name, entry in self.table.items()}

    def _load_tensor(self, name: str, number: int, shape: tuple[int, ...], start: int) -> Tensor:
        dtype = DTYPES.get(number)
        if dtype is None:
            raise InputError(
                f"{self.label}: {name} has GGUF type {number}, which is quantised or unknown; "
                "allowed: F32, F16 and BF16, as `convert_hf_to_gguf.py --outtype f32` writes"
            )
        begin, count = self.start + start, math.prod(shape)
        if begin + count * dtype.itemsize > self.file.stat().st_size:
            raise InputError(
                f"{self.label}: cut off, as {name} lies beyond its end; download or convert it "
                "again"
            )
        with self.file.open("rb") as opened:
            opened.seek(begin)
            raw = bytearray(opened.read(count * dtype.itemsize))
        return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def build_head_file(
    head: Any, arch: str, prefix: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Value], str, dict[str, Tensor]]:
    """Build the metadata, the name and the tensors of a head's file.

    Vectors and kernels are float32; matrices keep their dtype. A reduced vocabulary is `d2t` [W]
    int64, its ids.

    Args:
        head: attached head.
        arch: architecture.
        prefix: prefix of the file's name.
        values: metadata beside names, sizes and RoPE, by their keys after the architecture.
        tensors: tensors by llama.cpp's names.
    """
    config, target = head.config.llama, head.target_name
    contents = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": f"{head.title} for {Path(target).name}",
        "general.file_type": FILE_TYPES[head.dtype][0],
    }
    if HUB_ID.fullmatch(target) and not Path(target).exists():
        contents |= {"general.base_model.count": 1, BASE: target}
    contents |= {f"{arch}.{key}": getattr(config, name) for name, key in SIZES.items()}
    contents |= {
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    metadata = {key: Value.from_content(content) for key, content in contents.items()}
    metadata |= rope_metadata(config.rope_parameters, arch)
    metadata |= {f"{arch}.{key}": Value.from_content(value) for key, value in values.items()}
    added = {} if head.vocab.is_full else {"d2t": head.vocab.ids}
    divisors = rope_divisors(config.rope_parameters, config.head_dim)
    if divisors is not None:
        added[ROPE_FREQS] = divisors
    file_tensors = {
        name: tensor
        if not tensor.is_floating_point() or (tensor.ndim > 1 and name.endswith(".weight"))
        else tensor.float()
        for name, tensor in sorted({**tensors, **added}.items())
    }
    return metadata, weights_name(prefix, target, head.dtype), file_tensors


def build_vocab_metadata(size: int, source: Path | None = None) -> dict[str, Value]:
    """Build the metadata of a vocabulary.

    Args:
        size: rows of the target's embedding.
        source: GGUF file of the target, whose vocabulary is copied. Without it, tokens are `<0>`,
            `<1>`, ..., which suffices to exchange token ids; texts end at id 11.

    Raises:
        InputError: `source` is no GGUF file, or has a vocabulary of another size.
    """
    if source is None:
        contents: dict[str, Any] = {
            "model": "gpt2",
            "pre": "default",
            "tokens": [f"<{index}>" for index in range(size)],
            "token_type": [1] * size,
            "merges": ["a b"],  # never applies, but the list must not be empty
        }
        return {f"tokenizer.ggml.{key}": Value.from_content(c) for key, c in contents.items()}
    metadata = GgufFile(source, "tokenizer_gguf").metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens.content) != size:
        raise InputError(
            f"tokenizer_gguf={source}: has {len(tokens.content) if tokens else 'no'} tokens, "
            f"but the target has {size}; name the target's own file"
        )
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}


def interleave_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder rows of queries or keys for architectures that rotate neighbours: `llama`, `eagle3`.

    Args:
        weight: [heads * d, ...], whose rows rotate in pairs d / 2 apart.
        num_heads: number of heads in the weight.
    """
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def deinterleave_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Undo `interleave_rows`."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def weights_name(prefix: str, target: str, dtype: torch.dtype) -> str:
    """Format the name of a head's file; llama.cpp finds the file by the prefix."""
    return f"{prefix}-{Path(target).name.removesuffix('.gguf').lower()}-{FILE_TYPES[dtype][1]}.gguf"


def serve_command(target: str, file: str, kind: str, num_tokens: int) -> str:
    """Format the commands that make the target's GGUF file, if needed, and serve it with a head.

    Args:
        target: Hub id, folder or file of the target.
        file: file of the head.
        kind: kind of the head: `draft-eagle3`, `draft-dflash` or `draft-dspark`.
        num_tokens: draft tokens per pass.
    """
    lines, made = [], f"-m {target}"
    if (parts := split_gguf_path(target)) is not None:
        if not Path(target).exists() and HUB_ID.fullmatch(parts[0]):
            made = f"-hf {parts[0]} -hff {parts[1]}"
    else:
        folder, whole = target, f"{Path(target).name}.gguf"
        if not Path(target).exists():
            folder = Path(target).name
            lines.append(f"hf download {target} --local-dir {folder}")
        convert = (
            f"python llama.cpp/convert_hf_to_gguf.py {folder} --outtype auto --outfile {whole}"
        )
        lines.append(convert)
        made = f"-m {whole}"
    serve = f"--spec-type {kind} --spec-draft-n-max {num_tokens} --metrics"
    return "\n".join([*lines, f"llama-server {made} -md {file} {serve}"])


def target_hint(model_type: str) -> str:
    """Format a warning for a target with which llama.cpp serves no head; else empty."""
    name = model_type.removesuffix("_text")
    if name in LAYER_INPUTS:
        return ""
    reason = "its converter knows no such type"
    if name in NO_LAYER_INPUTS:
        reason = (
            "`llama-server` starts, and ends with an assertion at the first request "
            "(GGML_ASSERT of t_layer_inp)"
        )
    return (
        f"llama.cpp b11434 serves no head of a target of type {model_type}: {reason}. "
        "docs/serving/llama_cpp.md of Headsmith lists the types that work."
    )


def rope_problem(rope: Any) -> str | None:
    """Find the reason why a file cannot hold RoPE settings, as the end of a sentence, or None."""
    kind = rope["rope_type"]
    if kind not in ("default", "linear", "yarn", "llama3"):
        return f"supports default, linear, yarn and llama3 RoPE, and this head has {kind}"
    for key, usual in USUAL_YARN.items():
        if kind == "yarn" and rope.get(key) not in (None, usual):
            return f"assumes {key}={usual} of YaRN's settings, and this head has {rope[key]}"
    return None


def rope_metadata(rope: Any, arch: str) -> dict[str, Value]:
    """Build the metadata of RoPE, except for llama3's, which is a tensor (`rope_divisors`).

    Args:
        rope: `rope_parameters` of a config, without a `rope_problem`.
        arch: architecture, with which the keys begin.
    """
    metadata = {"freq_base": Value(Kind.FLOAT32, rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        metadata["scaling.type"] = Value.from_content(rope["rope_type"])
        metadata["scaling.factor"] = Value(Kind.FLOAT32, rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        metadata["scaling.original_context_length"] = Value.from_content(original)
    return {f"{arch}.rope.{key}": value for key, value in metadata.items()}


def rope_divisors(rope: Any, head_dim: int | None) -> Tensor | None:
    """Compute `rope_freqs.weight`, the divisors of the frequencies of llama3's RoPE.

    Args:
        rope: `rope_parameters` of a config.
        head_dim: head size of queries and keys.

    Returns:
        The divisors [head_dim / 2] float32; None for other kinds of RoPE.
    """
    if rope["rope_type"] != "llama3":
        return None
    assert head_dim is not None
    powers = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** powers)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - share) / rope["factor"] + share)).float()


def load_head(file: GgufFile, added: Collection[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load what the files of all heads share.

    Args:
        file: file of a head.
        added: names of tensors that are not the head's own.

    Returns:
        Sizes and RoPE under transformers' names, and the tensors by llama.cpp's names, but `d2t` as
        offsets.

    Raises:
        InputError: a key is missing, or a config cannot hold the RoPE.
    """
    tensors = {name: each for name, each in file.load_tensors().items() if name not in added}
    divisors = tensors.pop(ROPE_FREQS, None)
    sizes = {name: file.require_content(key) for name, key in SIZES.items() if key != "vocab_size"}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    sizes["vocab_size"] = len(tokens.content) if tokens else file.require_content("vocab_size")
    sizes["rms_norm_eps"] = file.require_content("attention.layer_norm_rms_epsilon")
    rope = {"rope_type": "default", "rope_theta": file.get_content("rope.freq_base", 10000.0)}
    if (kind := file.get_content("rope.scaling.type", "none")) != "none":
        rope |= {"rope_type": kind, "factor": file.require_content("rope.scaling.factor")}
    if kind == "yarn":
        original = file.require_content("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original
    elif divisors is not None:
        rope |= _recover_llama3_rope(divisors, rope["rope_theta"], file.label)
    base = file.metadata.get(BASE)
    target = {"base_model_name_or_path": base.content} if base else {}
    if "d2t" in tensors:
        tensors["d2t"] -= torch.arange(len(tensors["d2t"]))
    config = sizes | {"rope_parameters": rope, "rope_theta": rope["rope_theta"]} | target
    return config, tensors


def _recover_llama3_rope(divisors: Tensor, theta: float, label: str) -> dict[str, Any]:
    """Recover the RoPE settings from their divisors."""
    shared = {"rope_type": "llama3", "rope_theta": theta, "factor": float(divisors.max()), **LLAMA3}
    for power in range(4, 24):
        rope = shared | {"original_max_position_embeddings": 2**power}
        made = rope_divisors(rope, 2 * len(divisors))
        assert made is not None
        if torch.allclose(made, divisors, rtol=1e-5, atol=0):
            return rope
    raise InputError(
        f"{label}: {ROPE_FREQS} is not llama3's, which has {LLAMA3} and a power of two; convert it "
        "again"
    )
