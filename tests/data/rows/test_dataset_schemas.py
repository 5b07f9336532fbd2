"""Rows of popular datasets, toolkits and benchmarks with the fields of their cards, and readings.

They lie in `schemas.jsonl`. A reading is the texts of a row's messages in order; learnt texts stand
in [[ ]]. A row is read so, or refused by the name of a field, or of no known form. Rows of
benchmarks have a category besides.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import InputError
from data.rows.data_files import Row
from data.rows.field_checks import MalformedRowError
from data.rows.records import Record, detect_form, load_records, parse_record

LINES = (Path(__file__).parent / "schemas.jsonl").read_text(encoding="utf-8").splitlines()
SCHEMAS: dict[str, dict[str, Any]] = {each["name"]: each for each in map(json.loads, LINES)}
BENCHMARKS = [name for name, schema in SCHEMAS.items() if "category" in schema]


def format_reading(record: Record) -> str:
    """Format the texts of a record's messages, with the learnt ones in [[ ]]."""
    messages = record.messages or [{"role": "assistant", "content": f"[{record.text}]"}]
    return " | ".join(
        f"[[{message['content']}]]"
        if message["role"] == "assistant" and i not in record.unlearnt_messages
        else message["content"]
        for i, message in enumerate(messages)
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_row_of_every_schema_is_read_or_refused_by_name(name: str) -> None:
    schema = SCHEMAS[name]
    line = Row("rows.jsonl:1", raw=json.dumps(schema["row"]).encode())
    try:
        record = parse_record(line, detect_form([line], "rows.jsonl"), detected=True)
        reading = format_reading(record)
        assert record.category == schema.get("category", record.category)
    except MalformedRowError as error:
        reading = f"refused: {error.name}"
    except InputError:
        reading = "a row of no known form"
    assert reading == schema["reading"]


WRONG = (None, 3, 0.5, True, "", " ", [], {}, [None], [3], [[]], {"a": 1}, "\ud800")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "rows.jsonl"


@settings(max_examples=90)
@given(st.sampled_from(BENCHMARKS), st.sampled_from(["field", "cut", "byte"]), st.randoms())
def test_a_damaged_file_is_refused_by_name_or_read(
    file: Path, name: str, damage: str, rng: random.Random
) -> None:
    """A field of another type, a file that ends early, or one byte that is another."""
    row = SCHEMAS[name]["row"]
    content = 2 * (json.dumps(row) + "\n").encode()
    place = rng.randrange(len(content))
    if damage == "field":
        content = json.dumps(row | {rng.choice([*row]): rng.choice(WRONG)}).encode()
    elif damage == "cut":
        content = content[:place]
    else:
        content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
    file.write_bytes(content)
    try:
        records = load_records(str(file)).records
    except InputError as error:
        assert str(file) in str(error)
    else:
        assert all(record.messages or record.text for record in records)
