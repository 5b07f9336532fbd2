"""Pictures of README.md are those that the script draws."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs import draw as pictures

TABLE = """
## On two cores of a CPU

| method | tau | speed-up | 95% interval | a step: draft, verify, ms |
|---|---|---|---|---|
| `vanilla` | 1 | 1 | | 0, 59 |
| `eagle_tree`, depth 4, top-k 4, 8 tokens | 1.633 | **1.34** | 1.25 to 1.44 | 10, 60 |

## Next

| `suffix` | 1 | 9 | 1 to 2 | 0 |
"""


def test_speed_ups_are_those_of_the_table() -> None:
    found = {"vanilla": (1.0, ""), "eagle_tree": (1.34, "1.25 to 1.44")}
    assert pictures.parse_speedups(TABLE) == found


def test_a_bar_says_who_serves_its_method() -> None:
    drawn = ElementTree.fromstring(pictures.draw_speedups(TABLE))
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.index("every engine") < texts.index("EAGLE-3.1 head, tree of 8")
    assert texts[texts.index("1.25 to 1.44") + 1] == "SGLang"


def test_committed_pictures_are_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = {file.name: file.read_text() for file in pictures.FOLDER.glob("*.svg")}
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main()
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert committed == drawn, "run python docs/draw.py"
    for content in drawn.values():
        ElementTree.fromstring(content)
