"""Writing a trained head for the engine that will serve it.

A folder holds `config.json`, one safetensors file, `README.md`, `headsmith.json`, and
`parity/parity.safetensors`: golden values, apart because engines take every safetensors file
beside `config.json` for weights.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.schema_export import ExportFormat
from heads.eagle.head import LAYER_NAMES, EagleHead
from heads.export.config import config_of, dtype_of, target_name
from heads.export.layouts import (
    EAGLE_WEIGHTS,
    EagleLayout,
    MedusaLayout,
    check_target,
    layout_of,
    takes_own_embedding,
)
from heads.export.serve import readme
from heads.kinds import Head, kind_of
from heads.medusa.head import MedusaHead
from heads.storage import PROVENANCE, write_folder

PARITY = Path("parity") / "parity.safetensors"
EMBEDDING, OUTPUT_HEAD, FC_BIAS = "embed_tokens.weight", "lm_head.weight", "fc.bias"


def export_head(
    head: Head,
    engine: ExportFormat,
    golden: tuple[dict[str, Tensor], dict[str, str]],
    out_dir: Path,
    provenance: dict[str, object],
) -> None:
    """Writes an export, whole or not at all.

    Args:
        head: in the dtype of the export, attached to its target.
        engine: the format.
        golden: what `heads.export.golden.golden` made of them.
        out_dir: replaced if it exists.
        provenance: how the head was trained; goes into `headsmith.json`.

    Raises:
        InputError: the engine cannot serve this head, or the disk is full or not writable; what
            was there before is untouched.
    """
    layout = layout_of(head, engine)
    check_target(head, engine)
    tensors, added = _tensors(head, layout)
    about = {
        "format": engine.value,
        "kind": kind_of(head),
        "layers": list(head.config.layers) if isinstance(head, EagleHead) else [],
        "target": target_name(head),
        "dtype": dtype_of(head),
        # For whoever reads the head back: not its own, but the target's, or zeros.
        "added": added,
    }
    documents = {
        "config.json": config_of(head, engine, layout),
        PROVENANCE: provenance | {"export": about},
    }
    weights = layout.weights if isinstance(layout, MedusaLayout) else EAGLE_WEIGHTS

    def fill(staging: Path) -> None:
        for name, content in documents.items():
            (staging / name).write_text(json.dumps(content, indent=2) + "\n")
        (staging / "README.md").write_text(readme(head, engine))
        save_file(tensors, staging / weights, metadata={"format": "pt"})
        (staging / PARITY).parent.mkdir()
        save_file(golden[0], staging / PARITY, metadata=golden[1])

    write_folder(out_dir, fill)


def _tensors(head: Head, layout: MedusaLayout | EagleLayout) -> tuple[dict[str, Tensor], list[str]]:
    """The file's tensors, on the CPU, and the names of those that are not the head's own."""
    if isinstance(head, MedusaHead):
        assert isinstance(layout, MedusaLayout)
        own, added = _medusa_tensors(head, layout), {}
    else:
        assert isinstance(layout, EagleLayout)
        own, added = _eagle_tensors(head, layout), _added(head, layout)
    tensors = {name: each.detach().cpu().contiguous() for name, each in (own | added).items()}
    return tensors, sorted(added)


def _medusa_tensors(head: MedusaHead, layout: MedusaLayout) -> dict[str, Tensor]:
    if not layout.own_names:
        return head.tensors()
    named = {}
    for name, tensor in head.tensors().items():
        k, layer, *rest = name.split(".")
        block = f"blocks.{k}.layers.{layer}.{rest[-1]}"
        named[block if rest[0] == "linear" else f"lm_heads.{k}.weight"] = tensor
    return named


def _eagle_tensors(head: EagleHead, layout: EagleLayout) -> dict[str, Tensor]:
    prefix = LAYER_NAMES[head.config.form]
    named = {
        layout.layer_prefix + name.removeprefix(prefix) if name.startswith(prefix) else name: each
        for name, each in head.tensors().items()
    }
    if "d2t" in named:
        named["d2t"] = named["d2t"].to(layout.d2t)
    if not layout.t2d:
        named.pop("t2d", None)
    if not takes_own_embedding(head, layout):
        named.pop(EMBEDDING, None)
    return named


def _added(head: EagleHead, layout: EagleLayout) -> dict[str, Tensor]:
    """What the engine would otherwise start at random."""
    added = {}
    if layout.embedding and head.embed_tokens is None:
        added[EMBEDDING] = head.target.embedding.weight.to(head.dtype)
    if layout.output_head and head.lm_head is None and kind_of(head) == "eagle3":
        # A copy, as one file cannot hold a tensor that is tied to the embedding.
        added[OUTPUT_HEAD] = head.target.output_head.weight.to(head.dtype, copy=True)
    if layout.zero_fc_bias and head.fc.bias is None:
        added[FC_BIAS] = torch.zeros(len(head.fc.weight), dtype=head.dtype)
    return added
