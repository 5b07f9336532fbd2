"""Changes that count between two statements of what something was made of, and of code."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import save_target

from conf.command import run_record
from conf.command.run_record import (
    check_unchanged,
    compute_code_checksum,
    find_changed_keys,
    format_changes,
    git_revision,
    make_fingerprint,
)
from conf.errors import InputError
from conf.settings.target import TargetConfig
from heads.target_model.identity import TargetIdentity, compute_weights_checksum, identify_target
from heads.target_model.load import load_target_tokenizer

KNOWN = TargetIdentity(
    name="org/model", revision="a1", config="c" * 64, tokenizer="d" * 64, template=None,
    weights="e" * 64, adapter=None, adapter_weights=None, quantization="none", dtype="float32",
)  # fmt: skip


def test_a_revision_is_that_of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        if len(asked) > 1:
            raise FileNotFoundError
        return SimpleNamespace(stdout="a1+changes\n")

    monkeypatch.setattr(run_record.subprocess, "run", run)
    assert [git_revision(), git_revision()] == ["a1+changes", None]
    assert asked[0] == [
        "git", "-C", str(run_record.ROOT), "describe", "--always", "--abbrev=40", "--exclude=*",
        "--dirty=+changes",
    ]  # fmt: skip
    monkeypatch.setattr(run_record, "PACKAGE", "headsmith.")  # inside the user's repository
    assert git_revision() is None and len(asked) == 2


@pytest.mark.parametrize(
    ("before", "now", "keys"),
    [
        ({}, {}, []),
        ({}, {"weights": "f" * 64}, ["target.weights"]),
        ({}, {"dtype": "bfloat16"}, ["target.dtype"]),
        ({}, {"template": "f" * 64}, ["target.template"]),
        # A model may lie in several places.
        ({}, {"name": "/mine", "revision": None}, []),
        ({}, {"name": "/mine", "revision": None, "weights": "f" * 64}, ["target.weights"]),
        # Not downloaded yet: the commit says as much.
        ({"weights": None}, {}, []),
        ({"weights": None}, {"revision": "a2"}, ["target.revision"]),
        # Nothing but the name is known.
        ({"weights": None, "revision": None}, {"name": "org/other"}, ["target.name"]),
        ({}, {"adapter": "mine"}, ["target.adapter"]),
        ({"adapter": "a", "adapter_weights": "f"}, {"adapter": "b", "adapter_weights": "f"}, []),
        ({"adapter": "a"}, {"adapter": "b"}, ["target.adapter"]),
    ],
)
def test_a_target_is_another(before: dict, now: dict, keys: list[str]) -> None:
    one, other = (make_fingerprint(target=replace(KNOWN, **each)) for each in (before, now))
    assert find_changed_keys(one, other) == keys


def test_a_difference_is_said_with_what_can_be_compared_by_eye() -> None:
    one = make_fingerprint(target={"weights": "ab" * 32}, seed=0, data={"path": "a.jsonl"})
    other = make_fingerprint(target={"weights": "cd" * 32}, seed=1, data={"path": "a.jsonl"})
    said = "target.weights was abababababab, is cdcdcdcdcdcd; seed was 0, is 1"
    assert format_changes(one, other, find_changed_keys(one, other)) == said
    with pytest.raises(InputError, match=rf"^out holds rows made in another way: {said}; type"):
        check_unchanged("out holds rows", one, other)


def identity(folder: Path) -> TargetIdentity:
    config = TargetConfig(path=str(folder))
    return identify_target(config, load_target_tokenizer(config), torch.float32)


def test_weights_are_those_that_are_loaded(tmp_path: Path) -> None:
    """A folder of shards that was later saved over as one file, which is what loads."""
    folder = save_target(tmp_path / "target")
    one = folder / "model.safetensors"
    weights: dict[str, Any] = load_file(one)
    before = identity(folder)
    shard = "model-00001-of-00001.safetensors"
    index = {"weight_map": dict.fromkeys(weights, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert identity(folder) == before  # an index of files that are gone
    save_file({name: each + 1 for name, each in weights.items()}, folder / shard)
    assert identity(folder) == before  # and of files that are not read
    one.unlink()
    assert identity(folder).weights not in (before.weights, None)
    save_file(weights, folder / shard)
    assert identity(folder) == before  # the same weights in another file


@pytest.mark.parametrize("change", ["renamed", "one value", "dtype", "shape"])
def test_one_tensor_makes_other_weights(tmp_path: Path, change: str) -> None:
    weights = {f"w{n}": torch.full((128, 128), float(n)) for n in range(40)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    before = compute_weights_checksum(tmp_path, "model")
    save_file(dict(reversed(weights.items())), tmp_path / "model.safetensors")
    assert compute_weights_checksum(tmp_path, "model") == before
    last = weights.pop("w39")
    if change == "one value":
        last[64, 5] += 1
    name = "other" if change == "renamed" else "w39"
    other = {"dtype": last.half(), "shape": last.view(256, 64)}.get(change, last)
    save_file(weights | {name: other}, tmp_path / "model.safetensors")
    assert compute_weights_checksum(tmp_path, "model") != before


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a large number of something")
    with pytest.raises(InputError, match=r"model\.safetensors: not a safetensors file"):
        compute_weights_checksum(tmp_path, "model")


# --- Checksums of code go by what it does, not by its words.

CODE = '''"""Reads rows."""
import math
LIMIT = 5
"""The most that are read."""


class Rows:
    """Of a file."""

    name = "rows"

    async def read(self, path, limit=LIMIT):
        """Reads them."""
        # From the start.
        return f"{path}:{min(limit, 7)}"


def empty():
    """Nothing."""
'''
WORDS = [
    ('"""Reads rows."""\n', ""),
    ('"""Reads rows."""', '"""Reads all rows.\n\nOf a file.\n"""'),
    ('"""The most that are read."""', "'''At most.'''"),
    ('"""Of a file."""', '"""Of a folder."""'),
    ('"""Reads them."""', ""),
    ('"""Nothing."""', '"""Something."""'),
    ("# From the start.", "# From the end."),
    ("        # From the start.\n", "\n"),
    ("(self, path, limit=LIMIT)", "(\n        self,\n        path,\n        limit=LIMIT,\n    )"),
    ('"rows"', "'rows'"),
]
DOING = [
    ("5", "6"),
    ("7", "8"),
    ('"rows"', '"row"'),
    ("limit=LIMIT", "limit=None"),
    ("min", "max"),
    ("async def", "def"),
    ("{path}:", "{path}!"),
    ("import math", "import cmath"),
    ("return f", "f"),
]


def key(folder: Path, *texts: str) -> str:
    files = [folder / f"{number}.py" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    return compute_code_checksum(files)


@pytest.mark.parametrize(
    ("old", "new", "stays"),
    [*((*each, True) for each in WORDS), *((*each, False) for each in DOING)],
)
def test_words_keep_a_key_and_code_changes_it(tmp_path, old, new, stays) -> None:
    edited = CODE.replace(old, new)
    assert edited != CODE
    assert (key(tmp_path, edited) == key(tmp_path, CODE)) is stays


def test_it_is_of_all_files_in_their_order(tmp_path: Path) -> None:
    assert len({key(tmp_path, *each) for each in ("a", "b", "ab", "ba", ("ab", ""))}) == 5
