"""Rows that show or play something are refused by field: a target reads their text alone."""

import pytest

from data.rows.values import MalformedRowError
from tests.data.rows.test_forms import ASSISTANT, USER, chat, read


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat(USER | {"content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}),
         r"'messages\[0\].content\[0\]': found a part of type 'image'; allowed: parts of type 't"),
        (chat(USER | {"content": [{"audio_url": {"url": "a.wav"}}]}, ASSISTANT),
         r"'messages\[0\].content\[0\].audio_url': found \{'url': 'a.wav'\} \(dict\)"),
        (chat(USER | {"images": ["a.png"]}, ASSISTANT),
         r"'messages\[0\].images': found \['a.png'\] \(list\); allowed: text alone"),
        ({"image": "a.png", "conversations": [{"from": "human", "value": "<image> What is it?"}]},
         r"'image': found 'a.png' \(str\); allowed: text alone, without this field"),
        ({"prompt": "What is said?", "audio": {"bytes": "x"}}, r"'audio': found \{'bytes': 'x'\}"),
    ],
)  # fmt: skip
def test_what_shows_or_plays_something_is_refused_by_field(row, message):
    with pytest.raises(MalformedRowError, match=message):
        read(row)
