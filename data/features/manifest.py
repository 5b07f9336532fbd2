"""Describes a feature store in JSON: `capture.json` before it is whole, `manifest.json` after."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.command.statement import check_unchanged, flat, plain
from conf.errors import InputError
from conf.files import retried, write_whole
from conf.settings.data import Form
from data.features.format import MANIFEST, PLAN, VERSION, Contents, repair
from data.prepared.prepare import DataReport


@dataclass(frozen=True)
class Split:
    """The sequences of a split.

    Attributes:
        num_sequences: how many.
        num_tokens: without padding; None where the target has yet to write them.
        num_supervised_tokens: those that are learnt.
        checksum: of ids and masks.
    """

    num_sequences: int
    num_tokens: int | None
    num_supervised_tokens: int | None
    checksum: str


@dataclass(frozen=True)
class StorePlan:
    """Everything that decides what a store holds.

    Attributes:
        target: its identity, with checksums, and how it was loaded.
        contents: what is kept of its pass.
        data: the settings of the data, as JSON.
        sha256: of the data at `data.path`.
        max_length: tokens of a packed sequence.
        pad_id: token id of the padding.
        seed: of the packing.
        splits: by name.
        shard_bytes: at most, but for a longer sequence.
    """

    target: dict[str, Any]
    contents: Contents
    data: dict[str, Any]
    sha256: str
    max_length: int
    pad_id: int
    seed: int
    splits: dict[str, Split]
    shard_bytes: int

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "StorePlan":
        """The plan of which `as_json` made this."""
        values = {name: stored[name] for name in cls.__dataclass_fields__}
        values["contents"] = Contents.from_json(values["contents"])
        values["splits"] = {name: Split(**split) for name, split in values["splits"].items()}
        return cls(**values)

    def as_json(self) -> dict[str, Any]:
        """JSON content, with the version of the format."""
        return {"version": VERSION, **plain(self)}

    def check(self, folder: Path) -> None:
        """Refuses a folder that holds something else, or the same made in another way.

        Raises:
            InputError: naming what differs.
        """
        if folder.exists() and not folder.is_dir():
            raise InputError(f"out_dir={folder} is a file: name a folder")
        if (folder / PLAN).is_file():
            before = flat(_read_json(folder / PLAN, f"out_dir={folder}"))
            check_unchanged(f"out_dir={folder} holds a capture", before, flat(self.as_json()))
            return
        # A capture may have been killed while it wrote its plan.
        begun = {".lock", f"{PLAN}.tmp"}
        if folder.is_dir() and any(path.name not in begun for path in folder.iterdir()):
            raise InputError(
                f"out_dir={folder} is not empty and holds no capture to continue: name another"
            )

    def write(self, folder: Path) -> None:
        """Says what a store that is being captured is to hold."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / PLAN, json.dumps(self.as_json(), indent=2) + "\n")


@dataclass(frozen=True)
class ShardEntry:
    """A shard of a whole store."""

    name: str
    split: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """A whole store.

    Attributes:
        plan: what it was to hold.
        shards: in the order of their sequences.
        files: xxh3_64 by name, of what is no shard.
        provenance: of `conf.command.provenance`.
    """

    plan: StorePlan
    shards: list[ShardEntry]
    files: dict[str, str]
    provenance: dict[str, Any]

    @property
    def report(self) -> DataReport:
        """The report on the data that were captured."""
        stored = self.provenance["data"]
        return DataReport(**{**stored, "form": Form(stored["form"])})

    def write(self, folder: Path) -> None:
        """Says that the store is whole."""
        content = {
            **self.plan.as_json(),
            "shards": [asdict(shard) for shard in self.shards],
            "files": self.files,
            "provenance": self.provenance,
        }
        text = json.dumps(content, indent=2) + "\n"
        retried(lambda: write_whole(folder / MANIFEST, text))

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a store.

        Raises:
            InputError: there is none, or it is damaged, or of another version.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise InputError(
                f"data.features={folder}: no {MANIFEST} there, so no store or one whose capture "
                f"has not ended; {repair(folder)}"
            )
        stored = _read_json(path, f"data.features={folder}")
        if stored.get("version") != VERSION:
            raise InputError(
                f"data.features={folder}: version {stored.get('version')} of the format; this "
                f"Headsmith reads version {VERSION}: capture again, or use the Headsmith it is from"
            )
        try:
            shards = [ShardEntry(**entry) for entry in stored["shards"]]
            return cls(StorePlan.from_json(stored), shards, stored["files"], stored["provenance"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: damaged: {error!r}; {repair(folder)}") from error


def _read_json(path: Path, setting: str) -> dict[str, Any]:
    """A JSON object; raises an InputError that starts with `setting` where it is none."""
    try:
        stored = json.loads(retried(path.read_text))
    except (OSError, ValueError) as error:
        raise InputError(f"{setting}: {path.name} is damaged: {error}") from error
    if not isinstance(stored, dict):
        raise InputError(f"{setting}: {path.name} is damaged: not a JSON object")
    return stored
