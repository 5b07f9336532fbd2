"""Writing a trained head for the engine that will serve it.

A folder holds `config.json`, one safetensors file, `README.md`, `headsmith.json`, and
`parity/parity.safetensors`: golden values, apart because engines take every safetensors file
beside `config.json` for weights.
"""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from conf.errors import InputError
from conf.settings.export import ExportFormat
from heads.export.engines import ENGINES, dtype_of
from heads.export.serve import readme
from heads.folders import PROVENANCE
from heads.kind import DraftHead
from heads.kinds import kind_of
from heads.storage import write_folder

PARITY = Path("parity") / "parity.safetensors"


def check_format(head: DraftHead, engine: ExportFormat) -> None:
    """Refuses an engine that cannot serve a head, whatever its target.

    Raises:
        InputError: with the formats that can.
    """
    kind = kind_of(head)
    problem = kind.export_problem(head, engine)
    if problem is not None:
        able = [each.value for each in ExportFormat if kind.export_problem(head, each) is None]
        raise InputError(
            f"format={engine.value}: {ENGINES[engine]} {problem}; allowed for this head: "
            f"{', '.join(able) or 'none'}"
        )


def check_target(head: DraftHead, engine: ExportFormat) -> None:
    """Refuses, beside `check_format`, what the engine takes otherwise from an attached target.

    Raises:
        InputError: with what it takes.
    """
    check_format(head, engine)
    kind_of(head).check_target(head, engine)


def export_head(
    head: DraftHead,
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
    check_target(head, engine)
    kind = kind_of(head)
    files = kind.files(head, engine)
    tensors = {name: each.detach().cpu().contiguous() for name, each in files.tensors.items()}
    about = {
        "format": engine.value,
        "kind": kind.form(head),
        "layers": files.layers,
        "target": head.target_name,
        "dtype": dtype_of(head),
        # For whoever reads the head back.
        "added": files.added,
    }
    documents = {"config.json": files.config, PROVENANCE: provenance | {"export": about}}

    def fill(staging: Path) -> None:
        for name, content in documents.items():
            (staging / name).write_text(json.dumps(content, indent=2) + "\n")
        (staging / "README.md").write_text(readme(head, engine, files.layers, provenance))
        save_file(tensors, staging / files.weights, metadata={"format": "pt"})
        (staging / PARITY).parent.mkdir()
        save_file(golden[0], staging / PARITY, metadata=golden[1])

    write_folder(out_dir, fill)
