"""Checksums of code go by what it does, not by its words."""

from pathlib import Path

import pytest

from conf.command.run_record import compute_code_checksum

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


@pytest.mark.parametrize(("old", "new"), WORDS)
def test_words_keep_a_key(tmp_path: Path, old: str, new: str) -> None:
    edited = CODE.replace(old, new)
    assert edited != CODE
    assert key(tmp_path, edited) == key(tmp_path, CODE)


@pytest.mark.parametrize(("old", "new"), DOING)
def test_code_changes_it(tmp_path: Path, old: str, new: str) -> None:
    edited = CODE.replace(old, new)
    assert edited != CODE
    assert key(tmp_path, edited) != key(tmp_path, CODE)


def test_it_is_of_all_files_in_their_order(tmp_path: Path) -> None:
    assert len({key(tmp_path, *each) for each in ("a", "b", "ab", "ba", ("ab", ""))}) == 5
