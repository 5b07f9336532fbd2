"""What a path means: a file, a folder, a saved dataset or a Hub dataset."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from conf.errors import InputError
from conf.files import here
from conf.settings.data import DataConfig

TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TABLES = (".parquet", ".arrow")
PACKINGS = (".gz", ".zst")
SUFFIXES = (*TEXTS, *(kind + packing for kind in TEXTS for packing in PACKINGS), *TABLES)
ALLOWED = f"{', '.join((*TEXTS, *TABLES))}; the first {len(TEXTS)} also in .gz or .zst"

SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
# Written beside the rows by those who save, publish or regenerate data sets.
ABOUT_ROWS = (SAVED, SAVED_SPLITS, "dataset_info.json", "dataset_infos.json", "manifest.json")

SPLITS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]+)?$")
WORDS = re.compile(r"[^a-z]+")


@dataclass(frozen=True)
class Source:
    """What a path means.

    Attributes:
        path: as the user gave it.
        files: to be read in this order; none for a Hub dataset.
        left_out: what else lies in a folder and is not read, and why.
        subset: configuration of a Hub dataset; None is its default.
        split: of a Hub dataset.
        streaming: rows of a Hub dataset are read as they arrive, and it is not kept.
    """

    path: str
    files: tuple[Path, ...]
    left_out: tuple[str, ...] = ()
    subset: str | None = None
    split: str = "train"
    streaming: bool = False


def find_source(
    path: str, *, subset: str | None = None, split: str = "train", streaming: bool = False
) -> Source:
    """Finds out what a path means, reading no rows.

    Args:
        path: a file, a folder, a dataset that `save_to_disk` wrote, or a Hub dataset id.
        subset: configuration of a Hub dataset, or the folder of one in a clone of it.
        split: of a Hub dataset, and of a folder with files that are named for splits; a file
            that is named for none belongs to `train` then.
        streaming: of a Hub dataset.

    Raises:
        InputError: nothing is there, or no file of the split.
    """
    local = here("data.path", path, SUFFIXES)
    if local is None:
        return Source(path, (), subset=subset, split=split, streaming=streaming)
    if local.is_dir():
        return _folder(local, path, subset, split)
    kind_of(local)
    return Source(path, (local,))


def check_data(config: DataConfig, section: str = "data") -> None:
    """Refuses data that are not there, and files that are none of `SUFFIXES`.

    Args:
        config: the settings.
        section: their name in the command.

    Raises:
        InputError: with the path.
    """
    for name in ("path", "eval_path"):
        path = getattr(config, name)
        local = None if path is None else here(f"{section}.{name}", path, SUFFIXES)
        if local is not None and local.is_file():
            kind_of(local)
    if config.features is not None and not Path(config.features).expanduser().is_dir():
        raise InputError(f"{section}.features={config.features}: no such folder")


def _folder(folder: Path, path: str, subset: str | None, split: str) -> Source:
    saved_splits = folder / SAVED_SPLITS
    if saved_splits.is_file():
        names = [part.name for part in sorted(folder.iterdir()) if (part / SAVED).is_file()]
        if split not in names:
            raise InputError(f"{path}: data.split={split}: holds {', '.join(names) or 'no splits'}")
        others = tuple(f"{name}/ (data.split={split})" for name in names if name != split)
        return Source(path, _saved(folder / split), others)
    if (folder / SAVED).is_file():
        return Source(path, _saved(folder))
    found = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    inside = {file: file.relative_to(folder) for file in found}
    seen = [file for file in found if not any(p.startswith(".") for p in inside[file].parts)]
    files = [file for file in seen if _is_data(file)]
    if not files:
        raise InputError(f"{path}: a folder without files that end in {ALLOWED}")
    wanted = [file for file in files if subset is None or subset in inside[file].parts[:-1]]
    if not wanted:
        raise InputError(f"{path}: data.subset={subset}: no folder of this name with files in it")
    chosen = _of_split(wanted, inside, path, split)
    taken = set(chosen)
    return Source(
        path,
        tuple(chosen),
        tuple(
            f"{inside[file]} ({_why(file, subset, split)})"
            for file in seen
            if file not in taken and file.name not in ABOUT_ROWS
        ),
    )


def _saved(folder: Path) -> tuple[Path, ...]:
    """Returns the files of a dataset that `save_to_disk` wrote; caches may lie beside them."""
    try:
        state = json.loads((folder / SAVED).read_text(encoding="utf-8"))
        files = tuple(folder / str(part["filename"]) for part in state["_data_files"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / SAVED}: not of a saved dataset: {error!r}") from None
    if not files:
        raise InputError(f"{folder}: holds no rows")
    return files


def _why(file: Path, subset: str | None, split: str) -> str:
    if not _is_data(file):
        return "no rows"
    return f"data.split={split}" if subset is None else f"data.subset={subset} data.split={split}"


def _is_data(file: Path) -> bool:
    return file.name.lower().endswith(SUFFIXES) and file.name not in ABOUT_ROWS


def _of_split(files: list[Path], inside: dict[Path, Path], path: str, split: str) -> list[Path]:
    """Returns the files of a split, or all of them where none is named for a split."""
    names = {file: _names(inside[file]) for file in files}
    kinds = {file: _split_named(names[file]) for file in files}
    if not any(kinds.values()):
        return files
    wanted = SPLITS.get(split)
    chosen = [
        file
        for file in files
        if (split in names[file] if wanted is None else (kinds[file] or "train") == wanted)
    ]
    if not chosen:
        there = ", ".join(str(inside[file]) for file in files)
        raise InputError(f"{path}: data.split={split}: no file is named for it; it holds {there}")
    return chosen


def _names(file: Path) -> list[str]:
    """Returns what may name a split: the folders, and the file's name without its shard."""
    stem = file.name.lower()
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        stem = stem.removesuffix(suffix)
    return [*(folder.lower() for folder in file.parts[:-1]), SHARD.sub("", stem)]


def _split_named(names: list[str]) -> str | None:
    """Returns the split that a file is named for: `test-00000-of-00002`, `test_sft`, `my.test`."""
    *folders, stem = names
    words = [word for word in WORDS.split(stem) if word]
    ends = [words[0], words[-1]] if words else []
    return next((SPLITS[name] for name in (*ends, *folders) if name in SPLITS), None)


def kind_of(file: Path) -> str:
    """Returns the ending that says how a file is read, whatever it is packed in.

    Raises:
        InputError: it is none of `SUFFIXES`.
    """
    name = file.name.lower()
    for packing in PACKINGS:
        name = name.removesuffix(packing)
    kind = Path(name).suffix
    packed = name != file.name.lower()
    if kind not in TEXTS and (packed or kind not in TABLES):
        raise InputError(f"{file}: ends in '{file.suffix}'; allowed: {ALLOWED}")
    return kind
