"""What a feature store is, in JSON: `capture.json` before it is whole, `manifest.json` after."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.command.statement import check_unchanged, flat, plain
from conf.errors import InputError
from conf.files import retried, write_whole
from conf.settings.data import Form
from data.features.layout import Contents
from data.features.shards import repair
from data.prepared.pack import DataReport

VERSION = 1
PLAN, MANIFEST = "capture.json", "manifest.json"
ENDS, TOKEN_COUNTS = "target/ends.safetensors", "token_counts.safetensors"


@dataclass(frozen=True)
class Split:
    """Packed sequences of one kind.

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
class Plan:
    """Everything that decides what a store holds.

    Attributes:
        target: which one, with checksums, and how it was loaded.
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
    def from_json(cls, stored: Mapping[str, Any]) -> "Plan":
        """What `as_json` made of one."""
        values = {name: stored[name] for name in cls.__dataclass_fields__}
        values["contents"] = Contents.from_json(values["contents"])
        values["splits"] = {name: Split(**split) for name, split in values["splits"].items()}
        return cls(**values)

    def as_json(self) -> dict[str, Any]:
        """JSON content, with the version of the format."""
        return {"version": VERSION, **plain(self)}


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

    plan: Plan
    shards: list[ShardEntry]
    files: dict[str, str]
    provenance: dict[str, Any]

    @property
    def report(self) -> DataReport:
        """What became of the data."""
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
        stored = read_json(path, f"data.features={folder}")
        if stored.get("version") != VERSION:
            raise InputError(
                f"data.features={folder}: version {stored.get('version')} of the format; this "
                f"Headsmith reads version {VERSION}: capture again, or use the Headsmith it is from"
            )
        try:
            shards = [ShardEntry(**entry) for entry in stored["shards"]]
            return cls(Plan.from_json(stored), shards, stored["files"], stored["provenance"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: damaged: {error!r}; {repair(folder)}") from error


def begin(folder: Path, plan: Plan) -> None:
    """Writes the plan of a store that is being captured."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / PLAN, json.dumps(plan.as_json(), indent=2) + "\n")


def check_plan(folder: Path, plan: Plan) -> None:
    """Refuses a folder that holds something else, or the same made in another way.

    Raises:
        InputError: naming what differs.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out_dir={folder} is a file: name a folder")
    if not (folder / PLAN).is_file():
        # A capture may have been killed while it wrote its plan.
        begun = {".lock", f"{PLAN}.tmp"}
        if folder.is_dir() and any(path.name not in begun for path in folder.iterdir()):
            raise InputError(
                f"out_dir={folder} is not empty and holds no capture to continue: name another"
            )
        return
    before = flat(read_json(folder / PLAN, f"out_dir={folder}"))
    check_unchanged(f"out_dir={folder} holds a capture", before, flat(plan.as_json()))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        InputError: starting with `what`, where it is none.
    """
    try:
        stored = json.loads(retried(path.read_text))
    except (OSError, ValueError) as error:
        raise InputError(f"{what}: {path.name} is damaged: {error}") from error
    if not isinstance(stored, dict):
        raise InputError(f"{what}: {path.name} is damaged: not a JSON object")
    return stored
