"""JSON descriptions of a feature store: `capture.json` at first, `manifest.json` once whole."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.command.run_record import check_unchanged, flatten_settings, to_json
from conf.errors import InputError
from conf.files import retry_io, write_atomically
from conf.settings.data import Form
from data.features.format import MANIFEST, PLAN, VERSION, StoreContents, format_repair_advice
from data.prepared.prepare import DataReport


@dataclass(frozen=True)
class Split:
    """Sequences of a split.

    Attributes:
        num_sequences: number of sequences.
        num_tokens: tokens without padding; None before the target has written them.
        num_supervised_tokens: learnt tokens; None likewise.
        checksum: checksum of ids and masks.
    """

    num_sequences: int
    num_tokens: int | None
    num_supervised_tokens: int | None
    checksum: str


@dataclass(frozen=True)
class StorePlan:
    """Everything that decides the content of a store.

    Attributes:
        target: identity of the target with checksums, and its load settings.
        contents: parts of the target's pass to keep.
        data: data settings as JSON.
        sha256: checksum of the data at `data.path`.
        max_length: tokens per packed sequence.
        pad_id: token id of the padding.
        seed: seed of the packing.
        splits: splits by name.
        shard_bytes: largest size of a shard, unless one sequence is larger.
    """

    target: dict[str, Any]
    contents: StoreContents
    data: dict[str, Any]
    sha256: str
    max_length: int
    pad_id: int
    seed: int
    splits: dict[str, Split]
    shard_bytes: int

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "StorePlan":
        """Read the plan from the JSON of `as_json`."""
        values = {name: stored[name] for name in cls.__dataclass_fields__}
        values["contents"] = StoreContents.from_json(values["contents"])
        values["splits"] = {name: Split(**split) for name, split in values["splits"].items()}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """JSON content, with the version of the format."""
        return {"version": VERSION, **to_json(self)}

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder with other content, or with a capture of other settings.

        Raises:
            InputError: naming the difference.
        """
        if folder.exists() and not folder.is_dir():
            raise InputError(f"out_dir={folder}: is a file; name a folder")
        if (folder / PLAN).is_file():
            before = flatten_settings(_read_json(folder / PLAN, f"out_dir={folder}"))
            check_unchanged(
                f"out_dir={folder} holds a capture", before, flatten_settings(self.to_json())
            )
            return
        # A capture may have been killed while writing its plan.
        begun = {".lock", f"{PLAN}.tmp"}
        if folder.is_dir() and any(path.name not in begun for path in folder.iterdir()):
            raise InputError(
                f"out_dir={folder}: is not empty and holds no capture to continue; name another "
                "folder"
            )

    def save(self, folder: Path) -> None:
        """Write the plan of a store before its capture."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / PLAN, json.dumps(self.to_json(), indent=2) + "\n")


@dataclass(frozen=True)
class ShardEntry:
    """Shard of a whole store."""

    name: str
    split: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Description of a whole store.

    Attributes:
        plan: plan of the capture.
        shards: shards in the order of their sequences.
        files: xxh3_64 by name of the files that are no shards.
        provenance: result of `conf.command.run_record`.
    """

    plan: StorePlan
    shards: list[ShardEntry]
    files: dict[str, str]
    provenance: dict[str, Any]

    @property
    def report(self) -> DataReport:
        """Report about the captured data."""
        stored = self.provenance["data"]
        return DataReport(**{**stored, "form": Form(stored["form"])})

    def save(self, folder: Path) -> None:
        """Write the manifest, which marks the store as whole."""
        content = {
            **self.plan.to_json(),
            "shards": [asdict(shard) for shard in self.shards],
            "files": self.files,
            "provenance": self.provenance,
        }
        text = json.dumps(content, indent=2) + "\n"
        retry_io(lambda: write_atomically(folder / MANIFEST, text))

    @classmethod
    def from_folder(cls, folder: Path) -> "Manifest":
        """Read the manifest of a store.

        Raises:
            InputError: the manifest is missing, damaged or of another version.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise InputError(
                f"data.features={folder}: {MANIFEST} is missing, so this is no store or its "
                f"capture has not ended; {format_repair_advice(folder)}"
            )
        stored = _read_json(path, f"data.features={folder}")
        if stored.get("version") != VERSION:
            raise InputError(
                f"data.features={folder}: version {stored.get('version')} of the format, but this "
                f"Headsmith reads version {VERSION}; capture again, or use the Headsmith that "
                "wrote it"
            )
        try:
            shards = [ShardEntry(**entry) for entry in stored["shards"]]
            return cls(StorePlan.from_json(stored), shards, stored["files"], stored["provenance"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"data.features={folder}: {path.name} is damaged: {error!r}; "
                f"{format_repair_advice(folder)}"
            ) from error


def _read_json(path: Path, setting: str) -> dict[str, Any]:
    """Read a JSON object; raise an InputError that starts with `setting` for anything else."""
    try:
        stored = json.loads(retry_io(path.read_text))
    except (OSError, ValueError) as error:
        raise InputError(f"{setting}: {path.name} is damaged: {error}") from error
    if not isinstance(stored, dict):
        raise InputError(f"{setting}: {path.name} is damaged: not a JSON object")
    return stored
