"""Reads conversations and texts from files, folders and Hub datasets, and checks every row."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conf.schema import DataConfig, Form, InputError, OnBadRow

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")

# Order decides when a row has several of these keys: published datasets often carry a
# rendered `text` or a bare `prompt` beside the structured conversation, and each of these may
# stand beside the `question` that it was made from.
KEYS = {
    Form.messages: "messages",
    Form.conversations: "conversations",
    Form.turns: "turns",
    Form.alpaca: "instruction",
    Form.prompt: "prompt",
    Form.text: "text",
    Form.question: "question",
}

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}

# Roles that may follow a role; None is the start of the conversation.
NEXT_ROLES: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Record:
    """One checked row: either `messages` or `text` is set."""

    messages: Messages | None
    text: str | None
    where: str
    """`file:line`, `file[row n]` or `id[split]:row`, counted from 1."""
    category: str = "all"
    row: dict = field(default_factory=dict)
    """The row as it was read."""
    tools: list[dict] | None = None
    template_kwargs: dict = field(default_factory=dict)
    unlearnt: frozenset[int] = frozenset()
    written: dict[int, list[int]] = field(default_factory=dict)
    tokens: tuple[list[int], list[bool]] | None = None


@dataclass(frozen=True)
class Records:
    """What a path holds."""

    records: list[Record]
    form: Form
    bad: list[str]
    """One message per row that was skipped."""
    sha256: str
    """Of the file contents, unpacked (a folder: in name order), or of the rows of a Hub dataset."""


class MalformedRowError(Exception):
    """A field of a row is not what its form asks for."""

    def __init__(self, name: str, found: str, allowed: str):
        super().__init__(f"field '{name}': found {found}; allowed: {allowed}")


@dataclass(frozen=True)
class _Row:
    where: str
    value: object
    problem: str | None = None
    """Why the row could not be parsed at all."""


def load_records(
    path: str,
    *,
    subset: str | None = None,
    split: str = "train",
    form: Form = Form.auto,
    on_bad_row: OnBadRow = OnBadRow.error,
) -> Records:
    """Loads and checks every row of a file, a folder or a Hub dataset.

    Args:
        path: JSONL (also gzipped), JSON or Parquet file, a folder of them, or a Hub dataset id.
        subset: configuration of a Hub dataset; None is its default.
        split: split of a Hub dataset.
        form: shape of the rows; `auto` takes it from the first rows.
        on_bad_row: whether a malformed row stops or is skipped and listed.

    Raises:
        InputError: nothing at `path`, no rows, mixed forms, or a malformed row.
    """
    digest = hashlib.sha256()
    rows = list(_read(path, subset, split, digest))
    if not rows:
        raise InputError(f"{path}: holds no rows")
    forced = form is not Form.auto
    form = form if forced else _detect(rows, path)
    records, bad = [], []
    for row in rows:
        if not forced:
            _refuse_mixed(row, form)
        try:
            records.append(_record(row, form))
        except MalformedRowError as error:
            bad.append(f"{row.where}: {error}")
            if on_bad_row is OnBadRow.error:
                hint = "fix the row or set data.on_bad_row=skip"
                raise InputError(f"{bad[0]} ({hint})") from None
    if not records:
        raise InputError(f"{path}: every row is malformed ({len(bad)}); the first: {bad[0]}")
    return Records(records, form, bad, digest.hexdigest())


def load_data(path: str, config: DataConfig) -> Records:
    """`load_records`, as settings of the data say; their own `path` is not read.

    Raises:
        InputError: as `load_records` does.
    """
    return load_records(
        path, subset=config.subset, split=config.split, form=config.form,
        on_bad_row=config.on_bad_row,
    )  # fmt: skip


def _detect(rows: list[_Row], path: str) -> Form:
    for row in rows[:100]:
        found = _form_of(row.value)
        if found:
            return found
    first = rows[0]
    found_keys = first.problem or _keys(first.value)
    raise InputError(
        f"{path}: no row among the first {len(rows[:100])} has a known form; {first.where} has "
        f"{found_keys}; allowed: one of the fields {', '.join(KEYS.values())}"
    )


def _form_of(value: object) -> Form | None:
    if not isinstance(value, dict):
        return None
    # Parquet and Hub datasets fill absent columns with None.
    return next((form for form, key in KEYS.items() if value.get(key) is not None), None)


def _refuse_mixed(row: _Row, form: Form) -> None:
    other = _form_of(row.value)
    if other is None or other is form:
        return
    assert isinstance(row.value, dict)
    if row.value.get(KEYS[form]) is None:
        raise InputError(
            f"{row.where}: a row of form {other.value} ({_keys(row.value)}) among rows of form "
            f"{form.value}; split the file, or set data.form= to one of "
            f"{', '.join(form.value for form in KEYS)}"
        )


def _keys(value: object) -> str:
    if not isinstance(value, dict):
        return _show(value)
    return "the fields " + ", ".join(map(str, value)) if value else "no fields"


def _show(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def _record(row: _Row, form: Form) -> Record:
    if row.problem:
        raise MalformedRowError("(whole row)", row.problem, "one JSON object")
    value = row.value
    if not isinstance(value, dict):
        raise MalformedRowError("(whole row)", _show(value), "an object with fields")
    if value.get(KEYS[form]) is None:
        raise MalformedRowError(KEYS[form], _keys(value), f"a row of data.form={form.value}")
    category = value.get("category")
    category = "all" if category in (None, "") else str(category)
    if form is Form.text:
        return Record(None, _text(value, "text"), row.where, category, value)
    return Record(PARSERS[form](value), None, row.where, category, value)


def _text(value: dict, key: str, name: str | None = None) -> str:
    name = name or key
    text = value.get(key)
    if not isinstance(text, str):
        raise MalformedRowError(name, _show(text), "a string")
    if not text.strip():
        raise MalformedRowError(name, "empty text", "a non-empty string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MalformedRowError(name, "half of a surrogate pair", "valid Unicode") from None
    return text


def _list(value: dict, key: str, items: str) -> list:
    found = value[key]
    if not isinstance(found, list) or not found:
        raise MalformedRowError(key, _show(found), f"a non-empty list of {items}")
    return found


def _messages(value: dict) -> Messages:
    return _conversation(value, "messages", ("role", "content"), {role: role for role in ROLES})


def _sharegpt(value: dict) -> Messages:
    return _conversation(value, "conversations", ("from", "value"), SHAREGPT_ROLES)


def _conversation(value: dict, key: str, names: tuple[str, str], roles: dict[str, str]) -> Messages:
    role_key, content_key = names
    messages: Messages = []
    for index, item in enumerate(_list(value, key, "objects")):
        name = f"{key}[{index}]"
        if not isinstance(item, dict):
            wanted = f"an object with '{role_key}' and '{content_key}'"
            raise MalformedRowError(name, _show(item), wanted)
        role = item.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise MalformedRowError(f"{name}.{role_key}", _show(role), ", ".join(roles))
        if item.get("tool_calls"):
            raise MalformedRowError(f"{name}.tool_calls", "tool calls", "text in 'content' only")
        content = _text(item, content_key, f"{name}.{content_key}")
        messages.append({"role": roles[role], "content": content})
    _check_order(messages, key, role_key)
    return messages


def _check_order(messages: Messages, key: str, role_key: str) -> None:
    previous = None
    for index, message in enumerate(messages):
        role, allowed = message["role"], NEXT_ROLES[previous]
        if role not in allowed:
            after = f"after {previous}" if previous else "at the start"
            found = f"{role} {after}"
            raise MalformedRowError(f"{key}[{index}].{role_key}", found, " or ".join(allowed))
        previous = role
    if previous == "system":
        raise MalformedRowError(key, "only a system message", "at least one user message")


def _alpaca(value: dict) -> Messages:
    prompt = _text(value, "instruction")
    if value.get("input"):
        prompt += "\n\n" + _text(value, "input")
    return _exchange(prompt, value, "output")


def _prompt(value: dict) -> Messages:
    key = "completion" if value.get("response") is None else "response"
    return _exchange(_text(value, "prompt"), value, key)


def _question(value: dict) -> Messages:
    return _exchange(_text(value, "question"), value, "answer")


def _exchange(prompt: str, value: dict, key: str) -> Messages:
    messages = [{"role": "user", "content": prompt}]
    if value.get(key) is not None:
        messages.append({"role": "assistant", "content": _text(value, key)})
    return messages


def _turns(value: dict) -> Messages:
    turns = _list(value, "turns", "strings")
    named = {f"turns[{index}]": turn for index, turn in enumerate(turns)}
    return [{"role": "user", "content": _text(named, name)} for name in named]


ROLES = tuple(role for role in NEXT_ROLES if role)
PARSERS: dict[Form, Callable[[dict], Messages]] = {
    Form.messages: _messages,
    Form.conversations: _sharegpt,
    Form.turns: _turns,
    Form.alpaca: _alpaca,
    Form.prompt: _prompt,
    Form.question: _question,
}


def _read(path: str, subset: str | None, split: str, digest: "hashlib._Hash") -> Iterator[_Row]:
    local = Path(path).expanduser()
    if local.is_dir():
        files = sorted(file for file in local.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise InputError(f"{path}: a folder without {', '.join(SUFFIXES)} files")
        for file in files:
            yield from _read_file(file, digest)
    elif local.is_file():
        yield from _read_file(local, digest)
    elif local.name.endswith(SUFFIXES) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise InputError(f"data.path={path}: no such file or folder")
    else:
        yield from _read_hub(path, subset, split, digest)


def _read_file(file: Path, digest: "hashlib._Hash") -> Iterator[_Row]:
    if not file.name.endswith(SUFFIXES):
        raise InputError(f"{file}: ends in '{file.suffix}'; allowed: {', '.join(SUFFIXES)}")
    if file.name.endswith((".jsonl", ".jsonl.gz")):
        for number, line in enumerate(_lines(file), 1):
            digest.update(line)
            if line.strip():
                yield _parse_line(f"{file}:{number}", line)
        return
    with file.open("rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
    values = _parquet(file) if file.suffix == ".parquet" else _json(file)
    for number, value in enumerate(values, 1):
        yield _Row(f"{file}[row {number}]", value)


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            yield from stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{file}: not a readable gzip file: {error}") from None


def _parse_line(where: str, line: bytes) -> _Row:
    try:
        return _Row(where, json.loads(line.decode("utf-8-sig").rstrip()))
    except UnicodeDecodeError as error:
        return _Row(where, None, f"bytes that are not UTF-8 (at byte {error.start})")
    except json.JSONDecodeError as error:
        return _Row(where, None, f"invalid JSON ({error.msg} at column {error.colno})")


def _json(file: Path) -> list:
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 (at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file}:{error.lineno}: invalid JSON ({error.msg} at column {error.colno}); a file "
            "with one object a line must end in .jsonl"
        ) from None
    if not isinstance(values, list):
        raise InputError(f"{file}: found {_show(values)}; allowed: a list of objects")
    return values


def _parquet(file: Path) -> Iterator[dict]:
    import pyarrow
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file}: not a readable Parquet file: {error}") from None


def _read_hub(path: str, subset: str | None, split: str, digest: "hashlib._Hash") -> Iterator[_Row]:
    import datasets

    try:
        dataset = datasets.load_dataset(path, name=subset, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise InputError(
            f"data.path={path}: no such file or folder, and as a Hub dataset "
            f"(data.subset={subset or 'null'}, data.split={split}) it cannot be loaded: {error}"
        ) from error
    for number, row in enumerate(dataset, 1):
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        yield _Row(f"{path}[{split}]:{number}", row)
