"""Files of an export: those of the serving engine, and the golden logits beside them.

Letters: S rows, D depths, L layers of the target, Ht its hidden size, H of the head, V
vocabulary, R compared ids.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.errors import InputError
from eval.parity.gguf import parse

GGUF = ".gguf"
FILE_TYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
"""`general.file_type` of a GGUF file."""
GOLDEN = Path("parity") / "parity.safetensors"
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Export:
    """The files that a serving engine reads.

    Attributes:
        folder: where they lie.
        format: the serving engine's name.
        kind: of the head.
        layers: target features that the head was trained on, as indices of
            `output_hidden_states`; None in a folder without `headsmith.json`.
        config: `config.json`; of a GGUF file, its `eval.parity.gguf.Entry`s by key.
        weights: the file of `tensors`.
        tensors: by the names in the file.
        dtype: of its floating-point tensors.
    """

    folder: Path
    format: str
    kind: str
    layers: list[int] | None
    config: dict[str, Any]
    weights: Path
    tensors: dict[str, Tensor]
    dtype: str

    @property
    def config_name(self) -> str:
        """The file that says what is built."""
        return self.weights.name if self.weights.suffix == GGUF else "config.json"


@dataclass(frozen=True)
class Golden:
    """Features and logits of the trained head.

    Attributes:
        file: where they come from.
        kind: of the head.
        num_layers: L.
        max_position_embeddings: of the trained head.
        vocab_size: V.
        tensors: see `heads/export/golden.py`.
    """

    file: Path
    kind: str
    num_layers: int
    max_position_embeddings: int
    vocab_size: int
    tensors: dict[str, Tensor]

    def need(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        """A tensor that must be there; floats as float32.

        Args:
            name: in the file.
            shape: sizes; None allows any.

        Raises:
            InputError: missing or misshapen.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InputError(
                f"{self.file}: no tensor {name}; found {sorted(self.tensors)}: export again"
            )
        sizes = zip(tensor.shape, shape, strict=False)
        if tensor.ndim != len(shape) or any(w not in (None, n) for n, w in sizes):
            wanted = ["any" if size is None else size for size in shape]
            raise InputError(
                f"{self.file}: {name} is {list(tensor.shape)}: must be {wanted}; export again"
            )
        return tensor.float() if tensor.is_floating_point() else tensor


def read_export(folder: Path, engine: str | None, golden: Golden) -> Export:
    """Reads the serving engine's files of an export.

    Args:
        folder: of the export.
        engine: the format, for a folder whose `headsmith.json` does not name it.
        golden: says what kind of head this is.

    Raises:
        InputError: a file is missing, corrupt, pickled or one too many.
    """
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
    if pickled:
        raise InputError(f"{folder}: pickled files {pickled}: only safetensors and JSON are read")
    note = _note(folder, engine, golden.kind)
    if note["format"] == "llamacpp":
        return _read_gguf(folder, note, golden.kind)
    config = read_json(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise InputError(
            f"{folder}: safetensors files {[p.name for p in files]}: must be exactly one, as "
            "engines load every one as weights"
        )
    weights = files[0]
    tensors, _ = read_tensors(weights)
    noted = [note.get("dtype"), config.get("dtype"), config.get("torch_dtype")]
    return Export(
        folder, note["format"], golden.kind, note.get("layers"), config, weights, tensors,
        _dtype(weights, tensors, noted),
    )  # fmt: skip


def _read_gguf(folder: Path, note: dict[str, Any], kind: str) -> Export:
    """Reads an export that is one GGUF file, whose matrices have one dtype.

    Raises:
        InputError: as `read_export`.
    """
    files = sorted(folder.glob(f"*{GGUF}"))
    if len(files) != 1:
        raise InputError(f"{folder}: GGUF files {[p.name for p in files]}: must be exactly one")
    entries, tensors = parse(files[0])
    matrices = {n: t for n, t in tensors.items() if t.ndim > 1 and n.endswith(".weight")}
    stated = entries.get("general.file_type")
    noted = [note.get("dtype"), None if stated is None else FILE_TYPES.get(stated.value, "other")]
    dtype = _dtype(files[0], matrices, noted)
    layers = note.get("layers")
    return Export(folder, note["format"], kind, layers, entries, files[0], tensors, dtype)


def read_golden(folder: Path, kinds: Sequence[str]) -> Golden:
    """Reads the golden file of an export of one of these kinds of head.

    Raises:
        InputError: missing, corrupt, or without its metadata.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name the folder of an export")
    file = folder / GOLDEN
    if not file.is_file():
        raise InputError(f"{file}: no such file; the export cannot be checked: export again")
    tensors, metadata = read_tensors(file)
    numbers = ("num_layers", "max_position_embeddings", "vocab_size")
    bad = [name for name in numbers if not metadata.get(name, "").isdecimal()]
    if metadata.get("headsmith_parity") != "1" or bad or metadata.get("kind") not in kinds:
        raise InputError(
            f"{file}: metadata {metadata}: must hold headsmith_parity=1, a kind of "
            f"{list(kinds)} and the numbers {list(numbers)}; export again"
        )
    layers, positions, vocab = (int(metadata[name]) for name in numbers)
    return Golden(file, metadata["kind"], layers, positions, vocab, tensors)


def read_json(file: Path) -> dict[str, Any]:
    """Reads an object from a JSON file.

    Raises:
        InputError: missing or no JSON object.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: is no JSON object")
    return content


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads all tensors of a safetensors file, onto the CPU, and its metadata.

    Raises:
        InputError: corrupt, truncated, or values that are NaN or infinite (logits may be
            -inf).
    """
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: corrupt or truncated safetensors file: {error}") from error
    for name, tensor in tensors.items():
        allowed = torch.isfinite(tensor)
        if file.name == GOLDEN.name and name == "logits":
            allowed |= tensor == -torch.inf
        if not allowed.all():
            raise InputError(f"{file}: {name}: {int((~allowed).sum())} values are NaN or infinite")
    return tensors, metadata


def _note(folder: Path, engine: str | None, kind: str) -> dict[str, Any]:
    """The `export` part of `headsmith.json`, with the format of the command line."""
    file = folder / "headsmith.json"
    note = read_json(file).get("export", {}) if file.is_file() else {}
    named = note.get("format", engine)
    if named is None:
        raise InputError(f"{file}: does not name the engine: give --format")
    if engine not in (None, named):
        raise InputError(f"{file}: export.format={named}, but --format {engine}: leave one out")
    if note.get("kind", kind) != kind:
        raise InputError(
            f"{file}: export.kind={note['kind']}, but {GOLDEN} holds the logits of a head of "
            f"kind {kind}"
        )
    return {**note, "format": named}


def _dtype(file: Path, tensors: dict[str, Tensor], noted: list[str | None]) -> str:
    """The dtype of every float tensor, and of the notes about it."""
    counts = Counter(str(FLOATS.get(t.dtype)) for t in tensors.values() if t.is_floating_point())
    dtypes = {*counts, *(dtype for dtype in noted if dtype is not None)}
    if len(dtypes) != 1 or not dtypes <= set(FLOATS.values()):
        raise InputError(
            f"{file}: dtypes of its floats {dict(counts)}, and noted in headsmith.json "
            f"(export.dtype) and config.json (dtype, torch_dtype; general.file_type) {noted}: "
            f"must be one of {list(FLOATS.values())} throughout"
        )
    return dtypes.pop()
