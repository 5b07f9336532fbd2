"""Prepare files for publication: exports of the same head, and no local paths, keys or data.

An export that is pushed with a head must belong to the head and still compute it.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from conf.command.run_record import to_json
from conf.errors import InputError
from conf.files import load_json, split_gguf_path
from conf.settings.export import ExportDtype, ExportFormat
from eval.parity.parity_check import check_parity
from heads.draft_head import DraftHead
from heads.export.gguf import GgufFile
from heads.export.versions import LOADER_VERSIONS
from heads.folders import PROVENANCE, list_tensor_names, load_export_record
from heads.kinds import load_head
from scripts.publish.model_card import ExportFacts

# For these, too, only the root of a repository works; the others open local folders.
TAKE_HUB_IDS = (ExportFormat.vllm, ExportFormat.sglang, ExportFormat.speculators)
WEIGHTS, GGUF = ".safetensors", ".gguf"
TEXTS = (".md", ".yaml")
PARITY = "parity/parity.safetensors"
# Tensors that are the target's own, in an export or among its golden features.
TARGET_WEIGHTS = {
    "embed_tokens": "its token embedding",
    "token_embd": "its token embedding",
    "token_embeddings": "some rows of its token embedding",
    "output_head": "rows of its output head",
}
TARGET_KEYS = ("target", "path", "name", "base_model_name_or_path", "name_or_path")
"""Keys under which files of a head, an export or a record name the target."""
LOCAL_PATH = re.compile(
    r"""(?:(?:file:/*|(?<![\w./:-])~?)/|(?<!\w)[A-Za-z]:[/\\])   # where an absolute path starts
        (?:[^\s,;:'"\[\](){}=/\\]+[/\\]+)*                      # its folders
        ([^\s,;:'"\[\](){}=/\\]+)                               # its last name
    """,
    re.VERBOSE,
)
OWN_SERVER = re.compile(r"(https?://)(?!localhost|127\.)[^/\s,\]]+:\d+")


@dataclass(frozen=True)
class ExportFolder:
    """Name an export folder, and the format and dtype in its `headsmith.json`."""

    folder: Path
    format: ExportFormat
    dtype: torch.dtype


@dataclass(frozen=True)
class Renaming:
    """The target's local path, and the name by which others find the target.

    Attributes:
        local: name of the target in the files of a head or an export.
        public: Hub id of the target, or of a GGUF file there; None leaves `local`.
    """

    local: str
    public: str | None

    @property
    def _is_needed(self) -> bool:
        # The id of a repository does not name a file in it.
        is_file = self.public is not None and split_gguf_path(self.public) is not None
        return self.public not in (None, self.local) and is_file == self.local.endswith(GGUF)

    def rename_values(self, value: Any) -> Any:
        """Rename the target where a JSON object names it."""
        if isinstance(value, list):
            return [self.rename_values(item) for item in value]
        if not isinstance(value, dict) or not self._is_needed:
            return value
        return {
            key: self.public
            if key in TARGET_KEYS and item == self.local
            else self.rename_values(item)
            for key, item in value.items()
        }

    def rename_in_text(self, text: str) -> str:
        """Rename the target in a text and its commands; llama.cpp's download the target first."""
        if not self._is_needed:
            return text
        place = PurePosixPath(self.local).name
        name = rf"(?<![\w./-]){re.escape(self.local)}(?![\w/-]|\.\w)"

        def rename(match: re.Match[str]) -> str:
            parts = split_gguf_path(str(self.public))
            if match[1] == "-m " and parts is not None:
                return f"-hf {parts[0]} -hff {parts[1]}"
            if match[1] and match[1] != "-m ":
                download = f"hf download {self.public} --local-dir {place}"
                return f"{download}\n{match[1]}{place}"
            return f"{match[1] or ''}{self.public}"

        return re.sub(rf"(-m |python llama\.cpp/convert_hf_to_gguf\.py )?{name}", rename, text)


def load_export_folders(folders: list[str]) -> list[ExportFolder]:
    """Load the facts of export folders, without their weights.

    Raises:
        InputError: no such folder, not an export, or two of one format.
    """
    exports: dict[ExportFormat, ExportFolder] = {}
    for name in folders:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise InputError(
                f"exports={name}: no such folder; name a folder that scripts/export.py wrote"
            )
        facts = load_export_record(folder)
        try:
            engine = ExportFormat(facts.get("format"))
            dtype = ExportDtype(facts.get("dtype"))
        except ValueError as error:
            raise InputError(
                f"exports={name}: {PROVENANCE} says {error}; name a folder that scripts/export.py "
                "wrote"
            ) from error
        if engine in exports:
            raise InputError(
                f"exports: {exports[engine].folder} and {name} are both for {engine.value}; name "
                "one per format"
            )
        exports[engine] = ExportFolder(folder, engine, getattr(torch, dtype.value))
    return list(exports.values())


def check_export_of_head(head: DraftHead, export: ExportFolder) -> None:
    """Check that an export has the weights of this head.

    Args:
        head: trained head, in float32.
        export: export to read back as a head.

    Raises:
        InputError: a tensor differs from the head's, rounded to the export's dtype.
    """
    ours, exported = head.collect_tensors(), load_head(str(export.folder)).collect_tensors()
    for name, tensor in ours.items():
        expected = (
            tensor.to(export.dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor
        )
        if name not in exported or not torch.equal(exported[name].to(tensor.dtype), expected):
            raise InputError(
                f"exports={export.folder}: its {name} differs from that of head.path, so it is an "
                "export of another head or of an earlier state; export again"
            )


def stage_export(export: ExportFolder, staged: Path, target: str | None) -> None:
    """Fill `staged` with the publishable files of an export, which name the target as others do."""
    staged.mkdir()
    renaming = Renaming(str(load_export_record(export.folder).get("target")), target)
    for path in sorted(export.folder.iterdir()):
        if path.suffix in TEXTS:
            text = renaming.rename_in_text(path.read_text("utf-8"))
            (staged / path.name).write_text(scrub_private_data(text), "utf-8")
        elif path.suffix in (".json", WEIGHTS, GGUF):
            stage_file(path, staged, renaming)
    if (export.folder / PARITY).is_file():
        (staged / PARITY).parent.mkdir()
        link_file(export.folder / PARITY, staged / PARITY)


def stage_file(path: Path, staged: Path, renaming: Renaming) -> None:
    """Write a JSON file to `staged` in publishable form; link files of weights and their index."""
    if path.suffix != ".json" or path.name.endswith(".index.json"):
        link_file(path, staged / path.name)
        return
    stage_json(load_json(path), staged / path.name, renaming)


def stage_json(value: Any, there: Path, renaming: Renaming) -> None:
    """Write a JSON value to a file in publishable form."""
    scrub = scrub_provenance if there.name == PROVENANCE else scrub_private_data
    content = scrub(renaming.rename_values(value))
    there.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def verify_staged_export(
    export: ExportFolder, staged: Path, repo_id: str, folder: str
) -> ExportFacts:
    """Check a staged export with the independent reader.

    Args:
        export: export that was staged.
        staged: folder with exactly the files that will be uploaded.
        repo_id: repository of the upload.
        folder: folder in the repository; empty for its root.

    Raises:
        InputError: the export does not compute the trained head.
    """
    try:
        verdict = check_parity(staged)
    except InputError as error:
        raise InputError(f"exports={export.folder}: {error}") from error
    download_line, served = "", repo_id
    if folder or export.format not in TAKE_HUB_IDS:
        name = repo_id.rsplit("/", maxsplit=1)[-1]
        include = f" --include '{folder}/*'" if folder else ""
        download_line = f"hf download {repo_id}{include} --local-dir {name}\n"
        served = f"{name}/{folder}".removesuffix("/")
    readme = staged / "README.md"
    text = readme.read_text("utf-8") if readme.is_file() else ""
    command = re.search(r"^## Serve\n.*?^```\n(.+?)\n```$", text, re.MULTILINE | re.DOTALL)
    if command is None:
        raise InputError(
            f"exports={export.folder}: its README.md has no command under Serve; export again"
        )
    command_text = re.sub(r"\bDIR\b", served, command[1])
    if export.format is ExportFormat.llamacpp and not folder:
        # llama.cpp downloads from a repository's root the file whose prefix is the kind of head.
        download_line, command_text = "", re.sub(r" -md \S+", f" -hfd {repo_id}", command_text)
    names = {part for name in _iter_tensor_names(staged) for part in name.split(".")}
    record = load_export_record(staged)
    facts = ExportFacts(
        format=export.format.value,
        repo_id=repo_id,
        folder=folder,
        loaders=LOADER_VERSIONS[export.format],
        commands=download_line + command_text,
        target_problem=record.get("target_problem", ""),
        version_limit=record.get("version_limit", ""),
        parity=(
            f"max |difference| {verdict.max_difference:.1e} of logits up to {verdict.scale:.1f}"
        ),
        target_weights=tuple(words for name, words in TARGET_WEIGHTS.items() if name in names),
    )
    print(f"exports={export.folder}: parity: {facts.parity}")
    return facts


def _iter_tensor_names(staged: Path) -> Iterator[str]:
    """Yield the names of all tensors in a folder and its subfolders."""
    for path in staged.rglob(f"*{WEIGHTS}"):
        yield from list_tensor_names(path)
    for path in staged.rglob(f"*{GGUF}"):
        yield from GgufFile(path, "exports").table


def scrub_provenance(provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the publishable contents of a `headsmith.json`."""
    data = provenance.get("data")
    if isinstance(data, dict):
        # Malformed rows are quoted there; they are private data and not needed.
        provenance = {**provenance, "data": {k: v for k, v in data.items() if k != "bad"}}
    return dict(scrub_private_data(provenance))


def scrub_private_data(value: Any) -> Any:
    """Reduce every absolute local path in a JSON value to its last name, and mask keys.

    Also removes the hosts of URLs with a port, as these are private servers.
    """
    if isinstance(value, dict):
        return {_scrub_text(str(key)): scrub_private_data(item) for key, item in value.items()}
    if isinstance(value, list):
        return [scrub_private_data(item) for item in value]
    return _scrub_text(to_json(value)) if isinstance(value, str) else value


def _scrub_text(text: str) -> str:
    # A text that is one path, or key=path, may contain spaces; inside prose a path ends at them.
    text = OWN_SERVER.sub(r"\1HOST", text)
    key, equals, path = text.rpartition("=")
    if not re.search(r"[\s=]", key) and "\n" not in path:
        if path.startswith(("/", "~")):
            return f"{key}{equals}{PurePosixPath(path).name}"
        if PureWindowsPath(path).drive:
            return f"{key}{equals}{PureWindowsPath(path).name}"
    return LOCAL_PATH.sub(r"\1", text)


def link_file(source: Path, there: Path) -> None:
    """Link a large file to another place, without copying it.

    A hard link keeps the checked contents even if training rewrites the head. Without hard links,
    or across file systems, it is a symbolic link.
    """
    try:
        os.link(source.resolve(), there)
    except OSError:
        there.symlink_to(source.resolve())
