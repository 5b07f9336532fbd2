"""Loader of conversations and texts that checks every row.

A row has one of the published forms (`FORMS`). The form of a path is recognised from its first
rows; each row is then parsed into a `Record`.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress, islice
from typing import Any

from conf.command.run_record import format_setting
from conf.errors import InputError
from conf.settings.data import Form, OnBadRow, RowsConfig
from data.rows.data_files import Row, find_source, iter_rows
from data.rows.field_checks import (
    MalformedRowError,
    is_empty,
    make_value_error,
    parse_if_json,
    parse_list,
    parse_object,
    parse_text,
    remove_white_space,
    show_fields,
)
from data.rows.messages import (
    LEARNT,
    LEARNT_RANGES,
    ROLES,
    SYSTEM,
    Conversation,
    Messages,
    parse_token_ids,
    parse_tools,
    parse_unlearnt,
    pop_cut_off,
    refuse_media,
)
from data.rows.row_digests import compute_digest, count_copies

NUM_ROWS_TO_DETECT = 100
"""Rows from which the form is recognised."""
NUM_BAD_SHOWN = 10
"""Malformed rows whose messages are printed."""
NAME = re.compile(r"\w+")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Start of the prompts of SPEED-Bench that its publisher may not share."""
TOOLS = ("tools", "functions")
TEMPLATE_KWARGS = ("chat_template_kwargs",)
TRUNCATED_TURNS = "truncated_turns"
SYSTEM_TEXTS = ("system", "system_prompt")
PROMPTS = ("prompt", "question", "instruction", "query", "problem", "input")
RESULTS = ("answer", "Answer")
"""Replies that may be numbers, as in AIME's problems."""
REPLIES = ("response", "completion", "output", "solution", "answer", "Solution", "Answer")
CATEGORIES = ("category", "subject")
MASKS = ("loss_mask", "assistant_masks", "completion_mask")
GOOD = ("label", "kto_tag")
"""Fields of TRL, LlamaFactory and ms-swift: false is a bad answer, from which KTO learns."""
VERDICTS = {"is_correct": False, "correct": False, "desirable": False, "rejected": True}
"""Fields of logged answers, and the truth value that tells a bad answer."""
CELLS = {"true": True, "false": False, "0": 0, "0.0": 0, "1": 1, "1.0": 1}
"""Truth values as cells of a CSV file have them."""
CONTEXTS = ("context", "passage")
"""Texts that a question is about."""
COMPLETE = (Form.messages, Form.conversations, Form.turns)
"""Forms whose messages need no field beside them."""
MEANT = re.compile(
    r"history|story|knowledge|evidence|background|snippets|docs|ctxs|schema|ddl|create_tables?"
    r"|(\w+_)?(context|passage|document|article|paragraph)s?"
    r"|choices|options|endings|answer_choices|[A-D]|op[a-d]|(choice|option)_?\w"
)
"""Fields without which a row means something else."""
ANSWERS = (*REPLIES, "answers", "code", "role")
"""Fields that tell that a `text` is one turn of a dialogue."""
DIALOGUES = ("conversations", "conversation", "dialogue", "dialog")
ROLE_NAME = r"(im_start|start|bom|\w*(user|assistant|header|turn|role)\w*)"
BARE_ROLE = (
    r"(<(s|bos|\|begin_of_text\||\|endoftext\||SPECIAL_\d+)>|\]~b\])"
    r"(system|user|bot|assistant|ai)(?=\n)"
)
"""A token that names no role, in front of a role on a line of its own (Saiga, MiniMax)."""
ROLE_TOKEN = re.compile(
    rf"<[|\uff5c]{ROLE_NAME}[|\uff5c]?>|\[\|{ROLE_NAME}\|\]|<start_of_turn>|{BARE_ROLE}",
    re.IGNORECASE | re.ASCII,
)
RENDERED_END = re.compile(r"(\[/INST\]|ASSISTANT:|\nAssistant:|### (Assistant|Response):?)\s*\Z")
"""Start of an answer at the end of a rendered prompt, of templates without turn tokens."""
RENDERED_START = re.compile(rf"\s*(<[^<>\s]+>\s*)?({ROLE_TOKEN.pattern}|\[INST\])", re.IGNORECASE)
"""Start of a rendered prompt, perhaps after a token that begins any text."""
TURN_END = re.compile(
    r"(<\|(im_end|eot_id|eom_id|eot|end|end_of_text|endoftext|return|user)\|>|</s>|<end_of_turn>"
    r"|<eos>|<\uff5cend\u2581of\u2581sentence\uff5c>)\s*\Z"
)
"""Token that ends an answer, of any model."""
MARKER_TEXTS = (
    ("[INST]", "[/INST]"),
    ("### Assistant",),
    ("### Instruction", "### Response"),
    ("Human:", "\nAssistant:"),
    ("User:", "\nAssistant:"),
    ("USER:", "ASSISTANT:"),
)
"""Strings that occur together in dialogues of a common template without turn tokens."""


@dataclass(frozen=True)
class Record:
    """Checked row. Exactly one of `messages`, `text` and `tokens` is set."""

    messages: Messages | None
    text: str | None
    where: str
    """`file:line`, `file[row n]` or `id[split]:row`, counted from 1."""
    category: str = "all"
    row: dict = field(default_factory=dict)
    """The row as read."""
    tools: list[dict] | None = None
    """Function schemas for `apply_chat_template(tools=)`."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs` of the row."""
    unlearnt_messages: frozenset[int] = frozenset()
    """Indices of messages that the row excludes from learning."""
    truncated_messages: frozenset[int] = frozenset()
    """Indices of messages that the target did not finish."""
    written_ids: dict[int, list[int]] = field(default_factory=dict)
    """Token ids by message index, for messages that the target wrote."""
    tokens: tuple[list[int], list[bool]] | None = None
    """Ids and loss mask of a tokenised row."""
    unread_fields: tuple[str, ...] = ()
    """Names of fields that have a value but are not read."""


@dataclass(frozen=True)
class LoadedRecords:
    """Checked rows of a path."""

    records: list[Record]
    form: Form
    bad: list[str]
    """One message per skipped row."""
    sha256: str
    """Checksum of the unpacked files (of a folder in name order), or of the rows of a Hub
    dataset."""
    unread: dict[str, int] = field(default_factory=dict)
    """Number of rows per field that has a value but is not read, e.g. `id`."""
    left_out: tuple[str, ...] = ()
    """Files of a folder that are not read, with reasons."""
    num_copies: int = 0
    """Rows that repeat an earlier row."""

    def format_lines(self) -> list[str]:
        """Format the rows, fields and files that are not read as lines of text."""
        copies = f"copies: {self.num_copies:,} rows repeat an earlier one"
        return [
            *format_malformed_rows(self.bad),
            *format_counts("fields not read", self.unread, "rows"),
            *(f"not read: {name}" for name in self.left_out),
            *([copies] if self.num_copies else []),
        ]


def load_records(path: str, config: RowsConfig | None = None) -> LoadedRecords:
    """Load and check every row of a file, a folder or a Hub dataset.

    Args:
        path: file, folder of files, or Hub dataset id.
        config: data settings; its own `path` is ignored.

    Raises:
        InputError: missing data, no rows, mixed forms, or a malformed row.
    """
    config = config or RowsConfig()
    source = find_source(path, config)
    digest = hashlib.sha256()
    rows = iter_rows(source, digest)
    first = list(islice(rows, NUM_ROWS_TO_DETECT))
    if not first:
        raise InputError(f"{path}: holds no rows; name data with rows")
    detected = config.form is Form.auto
    form = detect_form(first, path, config.columns) if detected else config.form
    records, bad, unread = [], [], Counter[str]()
    for row in chain(first, rows):
        try:
            record = parse_record(row, form, config.columns, detected=detected)
        except MalformedRowError as error:
            bad.append(f"{row.location}: {error}")
            if config.on_bad_row is OnBadRow.error:
                hint = "fix the row or set data.on_bad_row=skip"
                raise InputError(f"{bad[0]} ({hint})") from None
            continue
        records.append(record)
        unread.update(record.unread_fields)
    if not records:
        raise InputError(f"{path}: every row is malformed ({len(bad)}); the first: {bad[0]}")
    num_copies = count_copies(map(compute_row_digest, records))
    return LoadedRecords(
        records, form, bad, digest.hexdigest(), dict(unread), source.left_out, num_copies
    )


def compute_prompt_digest(record: Record) -> int:
    """Compute the digest of a row's first prompt: the user's first text.

    Rows without a message of the user count whole. System messages and answers do not count, so the
    digest of a prompt stays when a target answers it anew, under another system message too.
    """
    messages = record.messages or []
    first = next((each["content"].strip() for each in messages if each["role"] == "user"), None)
    return compute_digest(first) if first else compute_row_digest(record)


def compute_row_digest(record: Record) -> int:
    """Compute the digest of a whole row: its messages, text or tokens."""
    return compute_digest(record.messages or record.text or record.tokens)


def format_malformed_rows(bad: list[str]) -> list[str]:
    """Format the first messages of malformed rows as lines, with the number of others."""
    more = len(bad) - NUM_BAD_SHOWN
    lines = [f"malformed: {message}" for message in bad[:NUM_BAD_SHOWN]]
    return [*lines, *([f"malformed: {more:,} more"] if more > 0 else [])]


def format_counts(what: str, counts: Mapping[str, int], unit: str) -> list[str]:
    """Format names with counts as one line; return no line without names."""
    names = ", ".join(f"{name} ({count:,} {unit})" for name, count in counts.items())
    return [f"{what}: {names}"] if names else []


Fields = dict[str, Any]
"""Fields of a row that have not been read yet. Functions that read a field remove it."""


def detect_form(rows: Sequence[Row], path: str, columns: Mapping[str, str] | None = None) -> Form:
    """Recognise the form of the first rows.

    Args:
        rows: some rows from the start.
        path: path of the rows, for messages.
        columns: `data.columns`, which maps names of fields in forms to names in the data.

    Raises:
        InputError: no row has a form, or none has a named column.
    """
    columns = columns or {}
    values = [row.parse_raw().value for row in rows[:NUM_ROWS_TO_DETECT]]
    for name, column in columns.items():
        if not any(isinstance(value, dict) and column in value for value in values):
            raise InputError(
                f"data.columns={{{name}: {column}}}: none of the first {len(values)} rows of "
                f"{path} has '{column}'; {rows[0].location} has {show_fields(values[0])}"
            )
    # Columns that the user names take precedence.
    named = [
        {name: value.get(columns[name]) for name in columns} if isinstance(value, dict) else {}
        for value in values
    ]
    candidates = chain(named, (_rename_fields(value, columns)[0] for value in values))
    if form := next(filter(None, map(_find_form, candidates)), None):
        return form
    first = rows[0].parse_raw()
    keys = ", ".join(key for form_keys, _ in FORMS.values() for key in form_keys)
    fields = first.value if isinstance(first.value, dict) and first.value else {"FIELD": ""}
    sentences = (name for name, value in fields.items() if " " in str(value))
    columns = {"prompt": next(sentences, next(iter(fields)))}
    raise InputError(
        f"{path}: none of the first {len(values)} rows has a known form; "
        f"{first.location} has {first.problem or show_fields(first.value)}; allowed: one of the "
        f"fields {keys}; map other names, e.g. "
        f"{format_setting('data.columns', columns)}, with a response for the field of answers"
    )


def parse_record(
    row: Row, form: Form, columns: Mapping[str, str] | None = None, *, detected: bool = False
) -> Record:
    """Check a row and parse it into a record.

    Args:
        row: row, decoded or not.
        form: expected form.
        columns: `data.columns`, which maps names of fields in forms to names in the data.
        detected: whether the form was recognised from the first rows; then rows of other forms and
            rendered dialogues are refused.

    Raises:
        MalformedRowError: a field does not fit the form.
        InputError: the row has another form than the recognised one.
    """
    columns = columns or {}
    try:
        return _parse_record(row.parse_raw(), form, columns, detected)
    except MalformedRowError as error:
        field_name = NAME.match(error.name)
        if field_name is None or field_name[0] not in columns:
            raise
        name = columns[field_name[0]] + error.name[field_name.end() :]
        raise MalformedRowError(name, error.found, error.allowed) from None


def _parse_record(row: Row, form: Form, columns: Mapping[str, str], detected: bool) -> Record:
    if row.problem:
        raise MalformedRowError("(whole row)", row.problem, "one JSON object")
    value = row.value
    if not isinstance(value, dict):
        raise make_value_error("(whole row)", value, "an object with fields")
    fields, hidden = _rename_fields(value, columns)
    keys, parse = FORMS[form]
    key = next((key for key in keys if fields.get(key) is not None), None)
    if key is None:
        other = _find_form(fields) if detected else None
        if other:
            raise InputError(
                f"{row.location}: a row of form {other.value} ({show_fields(value)}) among rows of "
                f"form {form.value}; split the file, or set data.form= to one of "
                + ", ".join(each.value for each in FORMS)
            )
        raise MalformedRowError(keys[0], show_fields(value), f"a row of data.form={form.value}")
    named = next((name for name in CATEGORIES if not is_empty(fields.get(name))), None)
    category = "all" if named is None else str(fields.pop(named))
    record = Record(None, None, row.location, category=category, row=value)
    conversation = Conversation()
    if parse is not None:
        refuse_media(fields)
        conversation = Conversation(_pop_first(fields, SYSTEM_TEXTS, _parse_system_prompt))
        tools = _pop_first(fields, TOOLS, parse_tools)
        kwargs = _pop_first(fields, TEMPLATE_KWARGS, partial(parse_object, allowed="an object"))
        parse(fields, key, conversation)
        _refuse_rendered_messages(conversation, key)
        if all(message["role"] in SYSTEM for message in conversation.messages):
            raise MalformedRowError(key, "only a system message", "at least one user message")
        if any(PLACEHOLDER in message["content"] for message in conversation.messages):
            problem = "a placeholder of SPEED-Bench in place of the prompt"
            allowed = "rows that its own script has fetched (NeMo-Skills, speed-bench/prepare.py)"
            raise MalformedRowError(key, problem, allowed)
        record = replace(
            record,
            tools=tools,
            template_kwargs=kwargs or {},
            messages=conversation.messages,
            unlearnt_messages=_pop_unlearnt_messages(fields, conversation),
            truncated_messages=_pop_cut_off_messages(fields, conversation),
            written_ids=conversation.written,
        )
        _refuse_lost_fields(fields, form, conversation.messages)
    elif form is Form.text:
        record = replace(record, text=parse_text(fields.pop("text"), "text"))
        if _pop_exclusion(fields):
            raise MalformedRowError("text", "a text that is not learnt", "a row to learn")
        if detected:
            refuse_dialogue(find_turn_marker(str(record.text)))
            _refuse_answered_text(fields, str(record.text))
    else:
        ids, mask = _parse_tokens(fields)
        excluded = _pop_exclusion(fields)
        record = replace(record, tokens=(ids, [learnt and not excluded for learnt in mask]))
    unread = [name for name, value in fields.items() if not is_empty(value)]
    return replace(record, unread_fields=(*unread, *hidden, *conversation.unread))


def _pop_cut_off_messages(fields: Fields, conversation: Conversation) -> frozenset[int]:
    """Remove the fields that tell unfinished answers; return their indices among the messages."""
    answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    cut_off = {*conversation.cut_off, *(answers[-1:] if pop_cut_off(fields) else ())}
    if is_empty(parse_if_json(fields.get(TRUNCATED_TURNS))):
        return frozenset(cut_off)
    numbers = parse_list(fields.pop(TRUNCATED_TURNS), TRUNCATED_TURNS, "numbers of answers")
    for number in numbers:
        if type(number) is not int or not 0 <= number < len(answers):
            allowed = f"numbers of the {len(answers)} answers, counted from 0"
            raise make_value_error(TRUNCATED_TURNS, number, allowed)
    return frozenset(cut_off | {answers[number] for number in numbers})


def _pop_unlearnt_messages(fields: Fields, conversation: Conversation) -> frozenset[int]:
    """Remove the fields that exclude answers from learning; return the indices of these answers."""
    is_excluded = _pop_exclusion(fields)
    answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    for name in GOOD if answers else ():
        value = _parse_cell(fields.get(name))
        if isinstance(value, bool):
            is_excluded |= not value
            del fields[name]
        elif isinstance(value, int | float) and value in (-1, 0, 1):
            allowed = "false (a bad answer) or true; a number may be a class: name it otherwise"
            raise make_value_error(name, value, allowed)
    for name, bad in VERDICTS.items() if answers else ():
        value = _parse_cell(fields.get(name))
        if value is bad:
            allowed = f"{not bad}, or label: false, with which the answer is not learnt"
            raise make_value_error(name, value, allowed)
    return frozenset(answers if is_excluded else conversation.unlearnt)


def _pop_exclusion(fields: Fields) -> bool:
    """Remove the fields that tell whether a row is learnt; tell whether it is excluded."""
    has_ids = "input_ids" in fields
    flags: Fields = {}
    for name in (*LEARNT, *LEARNT_RANGES, *MASKS):
        value = _parse_cell(fields.get(name))
        if name == "mask" and isinstance(value, str):  # NeMo names the role that is not learnt
            role = ROLES.get(value.lower())
            value = value if role is None else int(role != "assistant")
        is_of_ids = has_ids and isinstance(value, list)
        is_measured = name == "loss" and not isinstance(value, bool)
        if is_empty(value) or isinstance(value, str) or is_of_ids or is_measured:
            continue
        flags[name] = value
        del fields[name]
        if name not in (*LEARNT, *LEARNT_RANGES):
            raise make_value_error(name, value, "a list beside input_ids")
    return parse_unlearnt(flags)


def _parse_cell(value: object) -> object:
    return CELLS.get(value.lower(), value) if isinstance(value, str) else value


def _refuse_lost_fields(fields: Fields, form: Form, messages: Messages) -> None:
    """Refuse a row with a field that changes what its messages mean, and that is not read.

    Raises:
        MalformedRowError: such a field has a text that the messages lack.
    """
    is_answered = any(message["role"] == "assistant" for message in messages)
    of_answers = ("chosen", *(() if form in COMPLETE else PROMPTS[1:]))
    for name, value in fields.items():
        if not (is_answered if name in of_answers else MEANT.fullmatch(name)):
            continue
        said = remove_white_space("".join(message["content"] for message in messages))
        if any(remove_white_space(text) not in said for text in _list_texts(value)):
            allowed = "a text that the messages hold too; write it into the question"
            if isinstance(value, str) and form not in COMPLETE:
                columns = {"instruction": "QUESTION", "input": name}
                allowed += f", set {format_setting('data.columns', columns)}"
            allowed += f", or leave it out: {format_setting('data.columns', {'unread': name})}"
            raise make_value_error(name, value, allowed)


def _refuse_answered_text(fields: Fields, text: str) -> None:
    """Refuse a text that is a question or an answer, as it would be learnt whole.

    Raises:
        MalformedRowError: a field beside it tells so.
    """
    said = remove_white_space(text)
    for name in ANSWERS:
        value = fields.get(name)
        texts = [] if isinstance(value, int | float) else _list_texts(value)  # no class of the text
        if any(remove_white_space(answer) not in said for answer in texts):
            columns = {"prompt": "text", "response": name}
            allowed = (
                f"plain text without it; map it, e.g. {format_setting('data.columns', columns)}, "
                "or set data.form=text to learn the whole text"
            )
            raise make_value_error(name, value, allowed)


def _list_texts(value: object) -> list[str]:
    """List the texts and numbers in a field, also of one written as JSON."""
    value = parse_if_json(value)
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return [text for part in value for text in _list_texts(part)]
    return [] if value is None else [str(value)]


def _rename_fields(value: object, columns: Mapping[str, str]) -> tuple[Fields, list[str]]:
    """Rename the fields of a row, and list the fields that renamed ones hide."""
    if not isinstance(value, dict):
        return {}, []
    if not columns:
        return dict(value), []
    sources = set(columns.values())
    fields = {name: v for name, v in value.items() if name not in sources and name not in columns}
    fields |= {name: value.get(source) for name, source in columns.items()}
    return fields, [
        name for name in columns if name not in sources and not is_empty(value.get(name))
    ]


def _find_form(fields: Fields) -> Form | None:
    # Parquet and Hub datasets fill absent columns with None.
    present = {name for name, value in fields.items() if value is not None}
    return next((form for form, (keys, _) in FORMS.items() if present & {*keys}), None)


def _pop_first(fields: Fields, names: Sequence[str], read: Callable[[Any, str], Any]) -> Any:
    """Parse the first field with a value among some names; remove those with the same value."""
    for name in names:
        value = fields.get(name)
        if is_empty(value):
            continue
        for other in names:
            if fields.get(other) == value:
                del fields[other]
        return read(value, name)
    return None


def _parse_system_prompt(value: object, name: str) -> str | None:
    return parse_text(value, name) if not isinstance(value, str) or value.strip() else None


def _add_conversation(fields: Fields, key: str, conversation: Conversation) -> None:
    conversation.add_messages(parse_list(fields.pop(key), key, "objects"), key)
    if not is_empty(fields.get("chosen")):
        _add_chosen(_parse_if_message(fields.pop("chosen")), conversation)


def _add_chosen(chosen: object, conversation: Conversation) -> None:
    """Add the answer that was chosen to the conversation before it, as LlamaFactory has them.

    A list may repeat the conversation before the answer. It replaces the conversation's own answer.
    """
    given = Conversation()
    _add_role_text(chosen, "chosen", "assistant", given)
    if given.messages == conversation.messages[-1:]:
        return
    *before, answer = given.messages
    has_answer = any(m["role"] == "assistant" for m in conversation.messages[-1:])
    asked = conversation.messages[:-1] if has_answer else conversation.messages
    has_system = any(message["role"] in SYSTEM for message in before)
    repeats = before == (asked if has_system else _drop_system(asked))
    if answer["role"] != "assistant" or ((before or has_answer) and not repeats):
        raise make_value_error("chosen", chosen, "the answer to the last question of the messages")
    index = len(asked)
    conversation.messages = [*asked, answer]
    conversation.unlearnt = {i for i in conversation.unlearnt if i < index}
    conversation.written = {i: ids for i, ids in conversation.written.items() if i < index}
    if len(before) in given.unlearnt:
        conversation.unlearnt.add(index)


def _drop_system(messages: Messages) -> Messages:
    return [message for message in messages if message["role"] not in SYSTEM]


def _add_turns(fields: Fields, key: str, conversation: Conversation) -> None:
    turns = parse_if_json(fields.pop(key))
    if isinstance(turns, str):  # one question, as speculators splits SPEED-Bench
        _add_role_text(turns, key, "user", conversation)
        return
    for index, turn in enumerate(parse_list(turns, key, "strings")):
        conversation.add_text("user", turn, f"{key}[{index}]")


def _add_preference(fields: Fields, key: str, conversation: Conversation) -> None:
    prompt_key = next((name for name in PROMPTS if not is_empty(fields.get(name))), None)
    chosen = _parse_if_message(fields.pop(key))
    start = Conversation()
    if isinstance(chosen, list):
        start.add_messages(chosen[:1], key)
    begins_with_answer = any(message["role"] == "assistant" for message in start.messages)
    # A list that does not begin with the answer repeats the prompt, if there is one.
    if isinstance(chosen, list) and (prompt_key is None or not begins_with_answer):
        conversation.add_messages(parse_list(chosen, key, "objects"), key)
        prompt = fields.pop(prompt_key) if prompt_key else None
        if prompt_key and not _starts_with_prompt(prompt, prompt_key, conversation.messages):
            raise make_value_error(prompt_key, prompt, f"what '{key}' begins with")
        return
    if prompt_key is None:
        raise make_value_error(key, chosen, "with a 'prompt' beside, or a list of messages")
    _add_history(fields, conversation)
    _add_role_text(_pop_question(fields, prompt_key), prompt_key, "user", conversation)
    _add_role_text(chosen, key, "assistant", conversation)


def _parse_if_message(value: object) -> object:
    """Make a list of a lone message, or of messages written as JSON; return others unchanged."""
    if isinstance(value, dict):
        return [value]
    parsed = parse_if_json(value)
    if isinstance(parsed, list) and any(
        isinstance(part, dict) and not {"role", "from"}.isdisjoint(part) for part in parsed
    ):
        return parsed
    return value


def _starts_with_prompt(prompt: object, name: str, messages: Messages) -> bool:
    start = Conversation()
    _add_role_text(prompt, name, "user", start)
    expected = start.messages
    if all(message["role"] not in SYSTEM for message in expected):
        messages = _drop_system(messages)
    return messages[: len(expected)] == expected


def _add_history(fields: Fields, conversation: Conversation) -> None:
    """Add the turns before a question: pairs of texts, or messages."""
    if is_empty(parse_if_json(fields.get("history"))):
        return
    for index, pair in enumerate(parse_list(fields.pop("history"), "history", "pairs")):
        if isinstance(pair, dict):
            conversation.add_message(pair, "history", index)
            continue
        if not isinstance(pair, list) or len(pair) != 2:
            allowed = "a pair of the user's text and the answer"
            raise make_value_error(f"history[{index}]", pair, allowed)
        conversation.add_text("user", pair[0], f"history[{index}][0]")
        conversation.add_text("assistant", pair[1], f"history[{index}][1]")


def _pop_question(fields: Fields, key: str) -> Any:
    """Remove a question from the fields; return it with the text beside it that it is about."""
    question = fields.pop(key)
    names = ("input", *CONTEXTS) if key == "instruction" else CONTEXTS
    name = next((name for name in names if not _is_blank(fields.get(name))), None)
    if name is None or not isinstance(question, str) or not question.strip():
        return question
    text = parse_text(fields[name], name)
    # A prompt may have been built from the question and its text.
    if key != "instruction" and remove_white_space(text) in remove_white_space(question):
        return question
    del fields[name]
    return f"{question}\n\n{text}"


def _is_blank(value: object) -> bool:
    return is_empty(value) or (isinstance(value, str) and value.isspace())


def _add_pair(fields: Fields, key: str, conversation: Conversation) -> None:
    _add_history(fields, conversation)
    question, is_alpaca = _pop_question(fields, key), key == "instruction"
    if is_alpaca:
        parse_text(question, key)
    _add_role_text(question, key, "user", conversation)
    _add_reply(fields, ("output", *REPLIES) if is_alpaca else REPLIES, conversation)


def _add_reply(fields: Fields, names: Sequence[str], conversation: Conversation) -> None:
    key = next((name for name in names if fields.get(name) is not None), None)
    if key is None:
        return
    value = fields.pop(key)
    if key in RESULTS and type(value) is int:
        value = str(value)
    _add_role_text(value, key, "assistant", conversation)
    if (
        not is_empty(fields.get("reasoning_content"))
        and conversation.messages[-1]["role"] == "assistant"
    ):
        reasoning = fields.pop("reasoning_content")
        conversation.messages[-1]["reasoning_content"] = parse_text(reasoning, "reasoning_content")


def _add_role_text(value: object, key: str, role: str, conversation: Conversation) -> None:
    """Add a field's value to a conversation.

    The value is a text of a role, a list of messages, or a list of the user's questions.
    """
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        conversation.add_messages(value, key)
    elif isinstance(value, list) and value and role == "user":  # MT-bench's questions on the Hub
        for index, text in enumerate(value):
            conversation.add_text(role, text, f"{key}[{index}]")
    else:
        text = parse_text(value, key, "a string or a list of messages")
        _refuse_rendered_prompt(text, key)
        conversation.messages.append({"role": role, "content": text})


def _refuse_rendered_prompt(text: str, key: str) -> None:
    start, end = find_rendered_start(text), RENDERED_END.search(text)
    marker = f"begins with {start!r}" if start else end and f"ends with {end.group().strip()!r}"
    if marker:
        problem = f"a rendered prompt (it {marker})"
        raise MalformedRowError(key, problem, "messages or a bare question, to render")


def _refuse_rendered_messages(conversation: Conversation, key: str) -> None:
    """Refuse messages with the tokens of a template around their text.

    Raises:
        MalformedRowError: a message begins as a turn, or an answer ends as one. An answer with the
            ids that the target wrote is not looked at.
    """
    for index, message in enumerate(conversation.messages):
        text, is_answer = message["content"], message["role"] == "assistant"
        start, end = find_rendered_start(text), TURN_END.search(text) if is_answer else None
        if (start or end) and index not in conversation.written:
            problem = f"ends with {end.group().strip()!r}" if end else f"begins with {start!r}"
            allowed = "text alone; the target's template puts its own tokens around the text"
            raise MalformedRowError(f"{key}, message {index}", f"text that {problem}", allowed)


# Order decides for rows with keys of several forms. Published datasets often have a rendered `text`
# or a bare `prompt` beside the structured conversation, and each of these may stand beside the
# `question` it came from.
FORMS: dict[Form, tuple[tuple[str, ...], Callable[[Fields, str, Conversation], None] | None]] = {
    Form.messages: (("messages",), _add_conversation),
    Form.conversations: (DIALOGUES, _add_conversation),
    Form.turns: (("turns",), _add_turns),
    Form.preference: (("chosen",), _add_preference),
    Form.alpaca: (("instruction",), _add_pair),
    Form.prompt: (("prompt",), _add_pair),
    Form.tokens: (("input_ids",), None),
    Form.text: (("text",), None),
    Form.question: (("question", "query", "problem", "input", "Question", "Problem"), _add_pair),
}
"""Of each form, the fields that identify it, of which the first one present is read, and the
function that adds the messages of a row to a conversation; None for a form without messages."""


def _parse_tokens(fields: Fields) -> tuple[list[int], list[bool]]:
    ids = parse_token_ids(
        parse_list(fields.pop("input_ids"), "input_ids", "token ids"), "input_ids"
    )
    keys = [name for name in (*MASKS, "labels") if not is_empty(fields.get(name))]
    if not keys:
        allowed = f"one of the fields {', '.join((*MASKS, 'labels'))} beside"
        raise MalformedRowError("input_ids", "ids without a loss mask", allowed)
    mask = _parse_mask(fields, keys[0], ids)
    for other in keys[1:]:
        second = _parse_mask(fields, other, ids)
        if not all(second) and second != mask:
            raise MalformedRowError(other, f"another mask than in '{keys[0]}'", "the same mask")
    if is_empty(fields.get("attention_mask")):
        return ids, mask
    attended = _parse_mask(fields, "attention_mask", ids)
    return [*compress(ids, attended)], [*compress(mask, attended)]


def _parse_mask(fields: Fields, key: str, ids: list[int]) -> list[bool]:
    mask = parse_list(fields.pop(key), key, "numbers")
    if len(mask) != len(ids):
        raise MalformedRowError(key, f"{len(mask)} values", f"one for each of {len(ids)} input_ids")
    for index, (value, token) in enumerate(zip(mask, ids, strict=True)):
        allowed = (-100, token) if key == "labels" else (0, 1)
        if value not in allowed:
            raise make_value_error(f"{key}[{index}]", value, " or ".join(map(str, allowed)))
    return [value != -100 if key == "labels" else bool(value) for value in mask]


def find_turn_marker(text: str) -> str:
    """Find the turn marker in a rendered dialogue of any model; return "" for other texts."""
    token = ROLE_TOKEN.search(text)
    if token:
        return token.group()
    groups = (group for group in MARKER_TEXTS if all(marker in text for marker in group))
    return next((group[-1].strip() for group in groups), "")


def refuse_dialogue(marker: str) -> None:
    """Refuse a text with a turn marker.

    Raises:
        MalformedRowError: the marker is not empty.
    """
    if marker:
        raise MalformedRowError(
            "text",
            f"a whole dialogue (turn marker {marker!r})",
            "messages, whose answers are learnt; or data.form=text to learn the whole text",
        )


def find_rendered_start(prompt: str) -> str:
    """Find the start of a prompt that is a rendered turn; return "" for other prompts."""
    start = RENDERED_START.match(prompt)
    return start.group().strip() if start else ""
