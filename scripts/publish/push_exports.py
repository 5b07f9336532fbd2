"""Exports that are pushed with a head: are they of this head, and do they still compute it?"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from conf.errors import InputError
from conf.settings.export import ExportDtype, ExportFormat
from eval.parity.gate import check_parity
from heads.export.engines import LOADERS
from heads.folders import PROVENANCE
from heads.kind import DraftHead
from heads.kinds import load_head
from scripts.publish.card_facts import ExportFacts
from scripts.publish.staging import place, published, read_json, scrubbed, write_json

# Of these, too, only the root of a repository counts; the others open local folders.
TAKE_HUB_IDS = (
    ExportFormat.vllm, ExportFormat.sglang, ExportFormat.tgi, ExportFormat.speculators
)  # fmt: skip
WEIGHTS = ".safetensors"
TEXTS = (".md", ".yaml")
PARITY = "parity/parity.safetensors"
# Tensors that are the target's own, in an export or among its golden features.
TARGET_WEIGHTS = {
    "embed_tokens": "its token embedding",
    "token_embeddings": "some rows of its token embedding",
    "output_head": "rows of its output head",
}


@dataclass(frozen=True)
class ExportFolder:
    """An export folder and what its `headsmith.json` says of it."""

    folder: Path
    format: ExportFormat
    dtype: torch.dtype


def open_exports(folders: list[str]) -> list[ExportFolder]:
    """Looks at export folders without reading their weights.

    Raises:
        InputError: no such folder, not an export, or two of one format.
    """
    found: dict[ExportFormat, ExportFolder] = {}
    for name in folders:
        export = _opened(Path(name).expanduser(), name)
        if export.format in found:
            raise InputError(
                f"exports: {found[export.format].folder} and {name} are both for "
                f"{export.format.value}; name one of each format"
            )
        found[export.format] = export
    return list(found.values())


def _opened(folder: Path, name: str) -> ExportFolder:
    if not folder.is_dir():
        raise InputError(f"exports={name}: no such folder")
    facts = (read_json(folder / PROVENANCE) or {}).get("export") or {}
    try:
        engine = ExportFormat(facts.get("format"))
        dtype = ExportDtype(facts.get("dtype"))
    except ValueError as error:
        raise InputError(
            f"exports={name}: {PROVENANCE} says {error}; name a folder that scripts/export.py wrote"
        ) from error
    return ExportFolder(folder, engine, getattr(torch, dtype.value))


def check_same(head: DraftHead, export: ExportFolder) -> None:
    """Checks that an export is of this head.

    Args:
        head: in float32.
        export: read back as a head.

    Raises:
        InputError: a tensor differs from the head's, rounded to the export's dtype.
    """
    ours, theirs = head.tensors(), load_head(str(export.folder)).tensors()
    for name, tensor in ours.items():
        expected = (
            tensor.to(export.dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor
        )
        if name not in theirs or not torch.equal(theirs[name].to(tensor.dtype), expected):
            raise InputError(
                f"exports={export.folder}: its {name} is not that of head.path: an export of "
                "another head, or of an earlier state of it; export again"
            )


def stage_export(export: ExportFolder, staged: Path) -> None:
    """Effects: fills `staged` with what others may have of the export."""
    staged.mkdir()
    for path in sorted(export.folder.iterdir()):
        if path.name == PROVENANCE:
            write_json(staged / PROVENANCE, published(read_json(path) or {}))
        elif path.suffix == ".json":
            write_json(staged / path.name, scrubbed(read_json(path)))
        elif path.suffix in TEXTS:
            (staged / path.name).write_text(scrubbed(path.read_text("utf-8")), "utf-8")
        elif path.suffix == WEIGHTS:
            place(path, staged / path.name)
    if (export.folder / PARITY).is_file():
        (staged / PARITY).parent.mkdir()
        place(export.folder / PARITY, staged / PARITY)


def verified(export: ExportFolder, staged: Path, repo_id: str, folder: str) -> ExportFacts:
    """Checks a staged export with the independent reader.

    Args:
        export: what was staged.
        staged: exactly the files that will be uploaded.
        repo_id: of the repository they go to.
        folder: in it; empty for its root.

    Raises:
        InputError: it does not compute the trained head.
    """
    try:
        verdict = check_parity(staged)
    except InputError as error:
        raise InputError(f"exports={export.folder}: {error}") from error
    download, served = _download(export.format, repo_id, folder)
    facts = ExportFacts(
        format=export.format.value,
        repo_id=repo_id,
        folder=folder,
        loaders=LOADERS[export.format],
        commands=download + re.sub(r"\bDIR\b", served, _serve_command(export, staged)),
        max_difference=verdict.max_difference,
        scale=verdict.scale,
        target_weights=_target_weights(staged),
    )
    print(f"exports={export.folder}: parity: {facts.parity}")
    return facts


def _serve_command(export: ExportFolder, staged: Path) -> str:
    """From the export's README, where `DIR` stands for its folder."""
    readme = staged / "README.md"
    text = readme.read_text("utf-8") if readme.is_file() else ""
    found = re.search(r"^## Serve\n+```\n(.+?)\n```$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise InputError(f"exports={export.folder}: its README.md says nothing under Serve")
    return found[1]


def _download(engine: ExportFormat, repo_id: str, folder: str) -> tuple[str, str]:
    """The line that downloads an export, if the engine does not, and what the engine is given."""
    name = repo_id.rsplit("/", maxsplit=1)[-1]
    if folder:
        line = f"hf download {repo_id} --include '{folder}/*' --local-dir {name}\n"
        return line, f"{name}/{folder}"
    if engine in TAKE_HUB_IDS:
        return "", repo_id
    return f"hf download {repo_id} --local-dir {name}\n", name


def _target_weights(staged: Path) -> tuple[str, ...]:
    """What of the target's weights an export holds, by its tensors' names."""
    names: set[str] = set()
    for path in staged.rglob(f"*{WEIGHTS}"):
        with safe_open(path, "pt") as file:
            names |= {part for name in file.keys() for part in name.split(".")}  # noqa: SIM118
    return tuple(words for name, words in TARGET_WEIGHTS.items() if name in names)
