"""Files of an export: the serving engine's, and the reference logits beside them.

Letters: S rows, D depths, L layers of the target, Ht its hidden size, H of the head, V vocabulary,
R compared ids.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.errors import InputError
from conf.files import load_json
from eval.parity.gguf import load_gguf

GGUF = ".gguf"
FILE_TYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
"""`general.file_type` of a GGUF file."""
GOLDEN = Path("parity") / "parity.safetensors"
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Export:
    """Files that a serving engine reads.

    Attributes:
        folder: folder of the files.
        format: name of the serving engine.
        kind: kind of the head.
        layers: hidden states that the head was trained on, as indices of `output_hidden_states`;
            None without `headsmith.json`.
        config: content of `config.json`, or the `eval.parity.gguf.Entry`s of a GGUF file, by key.
        weights: file of `tensors`.
        tensors: tensors by their names in the file.
        dtype: dtype of the floating-point tensors.
    """

    folder: Path
    format: str
    kind: str
    layers: list[int] | None
    config: dict[str, Any]
    weights: Path
    tensors: dict[str, Tensor]
    dtype: str


@dataclass(frozen=True)
class ReferenceLogits:
    """Hidden states and reference logits of the trained head.

    Attributes:
        file: file of the values.
        kind: kind of the head.
        num_layers: number L of the target's layers.
        max_position_embeddings: positions of the trained head.
        vocab_size: size V of the vocabulary.
        tensors: see `heads/export/writer.py`.
    """

    file: Path
    kind: str
    num_layers: int
    max_position_embeddings: int
    vocab_size: int
    tensors: dict[str, Tensor]

    def require_tensor(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        """Return a required tensor, with floats as float32.

        Args:
            name: name in the file.
            shape: required sizes; None allows any.

        Raises:
            InputError: the tensor is missing or has another shape.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InputError(
                f"{self.file}: no tensor {name}, only {sorted(self.tensors)}; export again"
            )
        sizes = zip(tensor.shape, shape, strict=False)
        if tensor.ndim != len(shape) or any(w not in (None, n) for n, w in sizes):
            wanted = ["any" if size is None else size for size in shape]
            raise InputError(
                f"{self.file}: {name} has shape {list(tensor.shape)}; must be {wanted}; export "
                "again"
            )
        return tensor.float() if tensor.is_floating_point() else tensor


def load_export(folder: Path, engine: str | None, golden: ReferenceLogits) -> Export:
    """Read the serving engine's files of an export.

    Args:
        folder: folder of the export.
        engine: format, if `headsmith.json` does not name it.
        golden: reference values, which name the kind of head.

    Raises:
        InputError: a file is missing, corrupt, pickled or unexpected.
    """
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
    if pickled:
        raise InputError(
            f"{folder}: has pickled files {pickled}, which are never opened; allowed: safetensors "
            "and JSON"
        )
    note = _load_export_note(folder, engine, golden.kind)
    is_gguf = note["format"] == "llamacpp"
    config = {} if is_gguf else load_json(folder / "config.json")
    if config is None:
        raise InputError(f"{folder / 'config.json'}: cannot be read: no such file; export again")
    suffix, title = (GGUF, "GGUF") if is_gguf else (".safetensors", "safetensors")
    files = sorted(folder.glob(f"*{suffix}"))
    if len(files) != 1:
        raise InputError(
            f"{folder}: has {title} files {[p.name for p in files]}; must be exactly one, as "
            "engines load each as weights"
        )
    weights = files[0]
    if is_gguf:
        config, tensors = load_gguf(weights)
        _check_finite(weights, tensors)
        stated = config.get("general.file_type")
        noted = [None if stated is None else FILE_TYPES.get(stated.value, "other")]
        # Only matrices have one dtype.
        typed = {n: t for n, t in tensors.items() if t.ndim > 1 and n.endswith(".weight")}
    else:
        typed = tensors = load_tensors(weights)[0]
        noted = [config.get("dtype"), config.get("torch_dtype")]
    return Export(
        folder, note["format"], golden.kind, note.get("layers"), config, weights, tensors,
        _check_float_dtype(weights, typed, [note.get("dtype"), *noted]),
    )  # fmt: skip


def load_reference_logits(folder: Path, kinds: Sequence[str]) -> ReferenceLogits:
    """Read the reference values of an export of one of these kinds of head.

    Raises:
        InputError: the file is missing, corrupt, or without its metadata.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name the folder of an export")
    file = folder / GOLDEN
    if not file.is_file():
        raise InputError(f"{file}: no such file, so the export cannot be checked; export again")
    tensors, metadata = load_tensors(file)
    numbers = ("num_layers", "max_position_embeddings", "vocab_size")
    bad = [name for name in numbers if not metadata.get(name, "").isdecimal()]
    if metadata.get("headsmith_parity") != "1" or bad or metadata.get("kind") not in kinds:
        raise InputError(
            f"{file}: metadata {metadata}: must hold headsmith_parity=1, a kind of "
            f"{list(kinds)} and the numbers {list(numbers)}; export again"
        )
    layers, positions, vocab = (int(metadata[name]) for name in numbers)
    return ReferenceLogits(file, metadata["kind"], layers, positions, vocab, tensors)


def load_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors of a safetensors file to the CPU, and its metadata.

    Raises:
        InputError: the file is corrupt or truncated, or has NaN or infinite values (logits may be
            -inf).
    """
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: corrupt or truncated safetensors file: {error}") from error
    _check_finite(file, tensors)
    return tensors, metadata


def _check_finite(file: Path, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        allowed = torch.isfinite(tensor)
        if file.name == GOLDEN.name and name == "logits":
            allowed |= tensor == -torch.inf
        if not allowed.all():
            raise InputError(f"{file}: {name}: {int((~allowed).sum())} values are NaN or infinite")


def _load_export_note(folder: Path, engine: str | None, kind: str) -> dict[str, Any]:
    """Read the `export` section of `headsmith.json`, with the format of the command line."""
    file = folder / "headsmith.json"
    note = (load_json(file) or {}).get("export", {})
    named = note.get("format", engine)
    if named is None:
        raise InputError(f"{file}: does not name the engine; give --format")
    if engine not in (None, named):
        raise InputError(f"{file}: export.format={named}, but --format {engine}; leave one out")
    if note.get("kind", kind) != kind:
        raise InputError(
            f"{file}: export.kind={note['kind']}, but {GOLDEN} holds the logits of a head of kind "
            f"{kind}; export again"
        )
    return {**note, "format": named}


def _check_float_dtype(file: Path, tensors: dict[str, Tensor], noted: list[str | None]) -> str:
    """Return the dtype of every float tensor, which the notes must confirm."""
    counts = Counter(str(FLOATS.get(t.dtype)) for t in tensors.values() if t.is_floating_point())
    dtypes = {*counts, *(dtype for dtype in noted if dtype is not None)}
    if len(dtypes) != 1 or not dtypes <= set(FLOATS.values()):
        raise InputError(
            f"{file}: its floats have dtypes {dict(counts)}, and headsmith.json (export.dtype) and "
            f"config.json (dtype, torch_dtype; general.file_type) say {noted}; all must be the "
            f"same one of {list(FLOATS.values())}"
        )
    return dtypes.pop()
