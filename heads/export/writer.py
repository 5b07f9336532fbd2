"""Writer of trained heads for serving engines.

A folder holds `config.json`, one safetensors file, `README.md`, `headsmith.json`, and
`parity/parity.safetensors` with reference values, in a subfolder because engines load every
safetensors file beside `config.json` as weights. A GGUF file holds config and weights.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from conf.errors import InputError
from conf.settings.export import ExportFormat
from heads.export.engines import (
    ENGINE_NAMES,
    LOADER_VERSIONS,
    SERVED_HEADS,
    format_dtype,
    format_template_note,
)
from heads.export.gguf import write_gguf
from heads.export.llamacpp import build_vocab_metadata, target_hint
from heads.folders import PROVENANCE
from heads.head import DraftHead
from heads.storage import write_folder

PARITY = Path("parity") / "parity.safetensors"


def check_format(head: DraftHead, engine: ExportFormat) -> None:
    """Refuse an engine that cannot serve a head with any target.

    Raises:
        InputError: naming the possible formats.
    """
    problem = head.plan_export(engine).problem
    if problem is not None:
        more = SERVED_HEADS.get(engine, "")
        able = [each.value for each in ExportFormat if head.plan_export(each).problem is None]
        raise InputError(
            f"format={engine.value}: {ENGINE_NAMES[engine]} {problem}; allowed for this head: "
            f"{', '.join(able) or 'none'}{more and f'; {more}'}"
        )


def check_export_target(head: DraftHead, engine: ExportFormat) -> None:
    """Refuse, beside `check_format`, what the engine reads differently from an attached target.

    Raises:
        InputError: naming what the engine reads.
    """
    check_format(head, engine)
    head.plan_export(engine).files()


def export_head(
    head: DraftHead,
    engine: ExportFormat,
    golden: tuple[dict[str, Tensor], dict[str, str]],
    out_dir: Path,
    provenance: dict[str, object],
    tokenizer_gguf: Path | None = None,
) -> None:
    """Write an export atomically.

    Args:
        head: attached head in the dtype of the export.
        engine: format.
        golden: result of `heads.export.golden.golden`.
        out_dir: folder, replaced if it exists.
        provenance: record of the training, for `headsmith.json`.
        tokenizer_gguf: GGUF file of the target, whose vocabulary a GGUF file of the head copies.

    Raises:
        InputError: the engine cannot serve this head, or the disk is full or not writable. Earlier
            content stays untouched.
    """
    check_format(head, engine)
    files = head.plan_export(engine).files()
    tensors = {name: each.detach().cpu().contiguous() for name, each in files.tensors.items()}
    about = {
        "format": engine.value,
        "kind": head.variant,
        "layers": files.layers,
        "target": head.target_name,
        "dtype": format_dtype(head),
        # For readers of the export.
        "added": files.added,
    }
    documents: dict[str, object] = {PROVENANCE: provenance | {"export": about}}
    gguf = files.weights.endswith(".gguf")
    if gguf:
        words = build_vocab_metadata(head.vocab.size, tokenizer_gguf)
    else:
        documents["config.json"] = files.config

    def fill(staging: Path) -> None:
        for name, content in documents.items():
            (staging / name).write_text(json.dumps(content, indent=2) + "\n")
        (staging / "README.md").write_text(format_readme(head, engine, files.layers, provenance))
        if gguf:
            # The head's mask token takes precedence over the target's.
            write_gguf(staging / files.weights, words | files.config, tensors)
        else:
            save_file(tensors, staging / files.weights, metadata={"format": "pt"})
        (staging / PARITY).parent.mkdir()
        save_file(golden[0], staging / PARITY, metadata=golden[1])

    write_folder(out_dir, fill)


def format_readme(
    head: DraftHead, engine: ExportFormat, layers: Sequence[int], provenance: dict[str, Any]
) -> str:
    """README of an export, with `DIR` for its folder."""
    export = head.plan_export(engine)
    notes = [export.hint, format_template_note(provenance)]
    if engine is ExportFormat.llamacpp:
        notes.append(target_hint(head.target.config.model_type))
    further = "".join(f"{note}\n\n" for note in notes if note)
    taps = f", reads `output_hidden_states` {list(layers)} of the target" if layers else ""
    return (
        f"# {head.variants[head.variant].title} for {head.target_name}\n\n"
        f"For speculative decoding with {ENGINE_NAMES[engine]}, {format_dtype(head)} "
        f"weights{taps}. "
        f"Written by Headsmith after the loaders of {LOADER_VERSIONS[engine]}.\n\n"
        "## Serve\n\n"
        f"```\n{export.command}\n```\n\n`DIR` is this folder.\n\n{further}"
        "## Verify\n\n"
        "`parity/parity.safetensors` holds hidden states of the target and the logits of the "
        "trained head on them. On any machine with Headsmith\n\n"
        "```\npython scripts/verify_export.py DIR\n```\n\n"
        "computes the head again from these files alone, as the engine reads them, and compares.\n"
    )
