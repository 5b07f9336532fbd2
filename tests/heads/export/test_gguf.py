"""GGUF files: the bytes themselves, and what a target's file and a head's share."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conf.errors import InputError
from heads.export.gguf import (
    GgufFile,
    Kind,
    Value,
    build_vocab_metadata,
    deinterleave_rows,
    interleave_rows,
    rope_divisors,
    rope_metadata,
    write_gguf,
)

METADATA = {
    "a": Value.from_content("é"),
    "b": Value.from_content(7),
    "c": Value.from_content(0.5),
    "d": Value.from_content(True),
    "e": Value.from_content([2, -1]),
    "f": Value.from_content(["x"]),
    "g": Value(Kind.UINT8, [1, 255]),
}
TENSORS = {
    "m": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    "h": torch.tensor([1.5], dtype=torch.float16),
    "n": torch.tensor([-2.5], dtype=torch.bfloat16),
    "i": torch.tensor([3, -1]),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "a.gguf", METADATA, TENSORS)
    return tmp_path / "a.gguf"


def test_a_file_is_read_back(file: Path) -> None:
    """The package of llama.cpp writes; the reader is our own."""
    found = GgufFile(file, "head.path")
    assert found.metadata == METADATA
    tensors = found.load_tensors()
    assert list(tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype is tensor.dtype
        assert tensors[name].equal(tensor)


def test_a_tensor_is_written_as_it_looks_not_as_it_lies(tmp_path: Path) -> None:
    turned = torch.arange(6.0).reshape(2, 3).T
    write_gguf(tmp_path / "a.gguf", {}, {"t": turned, "scalar": torch.tensor(1.0)})
    assert GgufFile(tmp_path / "a.gguf", "x").load_tensors()["t"].equal(turned)


def test_an_empty_list_is_refused_and_what_was_there_stays(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"old")
    with pytest.raises(
        InputError, match=r"eagle3\.target_layers=\[\]: a GGUF file cannot hold an empty list"
    ):
        write_gguf(file, {"eagle3.target_layers": Value.from_content([])}, {})
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b"", "not a complete GGUF file"),
        (lambda b: b"PK\3\4" + b[4:], "it begins with b'PK"),
        (lambda b: b"GGUF\1" + b[5:], "version 1"),
        (lambda b: b[:100], "not a complete GGUF file"),
        (lambda b: b[:24] + b"\xff" * 8 + b[32:], "it states 18446744073709551615 more bytes"),
        (lambda b: b[:-20], "cut off, as i lies beyond its end"),
        # The type of the tensor that begins at byte 64.
        (
            lambda b: b.replace(b"\x1e\0\0\0\x40", b"\x0c\0\0\0\x40"),
            "n has GGUF type 12, .*quant",
        ),
    ],
    ids=["empty", "zip", "old", "header", "length", "data", "quantised"],
)
def test_other_files_are_refused(file: Path, change: Callable[[bytes], bytes], said: str) -> None:
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(InputError, match=rf"head\.path=.*a\.gguf: .*{said}"):
        GgufFile(file, "head.path").load_tensors()


def test_a_vocabulary_without_a_tokenizer_has_names_for_ids() -> None:
    assert build_vocab_metadata(2) == {
        "tokenizer.ggml.model": Value(Kind.STRING, "gpt2"),
        "tokenizer.ggml.pre": Value(Kind.STRING, "default"),
        "tokenizer.ggml.tokens": Value(Kind.STRING, ["<0>", "<1>"]),
        "tokenizer.ggml.token_type": Value(Kind.INT32, [1, 1]),
        "tokenizer.ggml.merges": Value(Kind.STRING, ["a b"]),
    }


def test_a_vocabulary_is_copied_from_a_target_type_by_type(tmp_path: Path) -> None:
    kept = {
        "tokenizer.ggml.tokens": Value.from_content(["a", "b"]),
        "tokenizer.ggml.eos_token_id": Value.from_content(1),
        "tokenizer.x": Value(Kind.UINT8, [1]),
    }
    write_gguf(tmp_path / "t.gguf", {"general.name": Value.from_content("t")} | kept, {})
    assert build_vocab_metadata(2, tmp_path / "t.gguf") == kept
    with pytest.raises(
        InputError, match=r"tokenizer_gguf=.*t\.gguf: has 2 tokens, but the target has 3"
    ):
        build_vocab_metadata(3, tmp_path / "t.gguf")


def test_rows_of_a_head_become_neighbours_and_come_back() -> None:
    rows = torch.arange(12).reshape(12, 1)  # 2 heads of 6
    assert interleave_rows(rows, 2).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert deinterleave_rows(interleave_rows(rows, 2), 2).equal(rows)


def test_llama3_divides_frequencies_as_transformers_does() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = LlamaConfig(hidden_size=32, num_attention_heads=1, head_dim=32, rope_parameters=rope)
    divisors = rope_divisors(rope, 32)
    assert divisors is not None
    assert divisors[0] == 1
    assert divisors[-1] == 8
    plain = 1 / 10000 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(plain / divisors, LlamaRotaryEmbedding(config).inv_freq)
    assert rope_metadata(rope, "eagle3") == {"eagle3.rope.freq_base": Value(Kind.FLOAT32, 10000.0)}


def test_other_rope_is_metadata() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 500000,
        "factor": 4,
        "original_max_position_embeddings": 64,
    }
    assert rope_divisors(rope, 32) is None
    assert rope_metadata(rope, "dflash") == {
        "dflash.rope.freq_base": Value(Kind.FLOAT32, 500000),
        "dflash.rope.scaling.type": Value(Kind.STRING, "yarn"),
        "dflash.rope.scaling.factor": Value(Kind.FLOAT32, 4),
        "dflash.rope.scaling.original_context_length": Value(Kind.UINT32, 64),
    }
    linear = rope_metadata({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "dflash")
    assert [key.removeprefix("dflash.rope.") for key in linear] == [
        "freq_base", "scaling.type", "scaling.factor",
    ]  # fmt: skip
