"""Digests of prompts and rows: what makes two equal, and how many of a set are known."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import xxhash
from pyarrow import parquet

from conf.errors import InputError
from data.rows.records import compute_prompt_digest, load_records
from data.rows.row_digests import PromptDigests
from tests.chats import write_rows

FORMS = {
    "messages": {"messages": [{"role": "user", "content": "Why?"}]},
    "answered": {
        "messages": [
            {"role": "user", "content": "Why?\n"},
            {"role": "assistant", "content": "So."},
            {"role": "user", "content": "Who?"},
        ]
    },
    "conversations": {"conversations": [{"from": "human", "value": "Why?"}]},
    "turns": {"turns": ["Why?", "Who?"]},
    "prompt": {"prompt": "Why?", "response": "So."},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_prompt_has_one_digest_in_every_form_and_file(
    tmp_path: Path, name: str, ending: str
) -> None:
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        write_rows(path, [FORMS[name]])
    else:
        parquet.write_table(pyarrow.Table.from_pylist([FORMS[name]]), path)
    [record] = load_records(str(path)).records
    assert compute_prompt_digest(record) == xxhash.xxh3_64_intdigest(b'"Why?"')


def test_another_question_makes_another_prompt_and_a_system_message_does_not(
    tmp_path: Path,
) -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = [FORMS["messages"]["messages"], [system, *FORMS["messages"]["messages"]]]
    rows.append([{"role": "user", "content": "Why not?"}])
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": row} for row in rows])
    digests = [compute_prompt_digest(record) for record in load_records(str(path)).records]
    assert digests[0] == digests[1] != digests[2]


def test_digests_are_stored_and_counted(tmp_path: Path) -> None:
    known = PromptDigests.from_values([2**64 - 1, 7, 7, 0])
    assert known.values.tolist() == [0, 7, 2**64 - 1]
    assert known.count_known([7, 7, 8, 2**64 - 1]) == 3
    path = tmp_path / "digests.json"
    assert PromptDigests.from_file(path) is None
    path.write_text(json.dumps(known.to_json()))
    stored = PromptDigests.from_file(path)
    assert stored is not None
    assert np.array_equal(stored.values, known.values)
    assert (stored | PromptDigests.from_values([5])).values.tolist() == [0, 5, 7, 2**64 - 1]
    path.write_text(json.dumps(known.to_json() | {"num_prompts": 4}))
    with pytest.raises(InputError, match=r"digests\.json: damaged \(3 digests in place of 4\)"):
        PromptDigests.from_file(path)
