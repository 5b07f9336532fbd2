"""Replaces the assistant's turns of a dataset with the target's own.

A draft head learns to predict its target, so it learns most from text that the target wrote:

    python scripts/regenerate.py data.path=chats.jsonl target.path=Qwen/Qwen3-8B
    python scripts/regenerate.py data.path=chats.jsonl endpoint=http://localhost:8000/v1

Where vLLM is installed and may be faster, on a GPU or a CPU with bfloat16, the first command starts
its server, asks it and stops it; elsewhere the target answers in this process. A repetition penalty
of the target's generation config also applies here, as in the measurement of heads; vLLM applies it
too, unless served with `--generation-config vllm`. A server of your own needs vLLM's parsers of
reasoning and tool calls. vLLM sends the token ids of an answer, which are kept.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command.entry import Command
from conf.command.run_record import collect_changed_settings, print_next_command, recipe_for
from conf.settings.scripts import RegenerateRun
from eval.preflight_checks import check_inputs

COMMAND = Command(__doc__, RegenerateRun, "regenerate", check=check_inputs)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from conf.command.clock import Stopwatch
from conf.command.jsonl_store import ROWS_NAME, JsonlStore
from conf.command.run_record import make_fingerprint
from conf.errors import InputError
from conf.files import split_gguf_path
from conf.settings.data import Form, OnBadRow
from conf.settings.target import Dtype, Quantization
from data.embedded import fill_default_paths
from data.prepared.packing import check_token_ids
from data.rows.messages import restore_parts
from data.rows.records import LoadedRecords, Record, load_records
from data.servers.http_client import (
    Answer,
    Endpoint,
    EndpointClient,
    RequestFailedError,
    RequestRefusedError,
    iter_completed,
)
from data.servers.vllm_server import find_vllm_python, serve_model
from data.templates.record_encoder import RecordEncoder
from data.templates.reply_parser import parse_reply
from eval.decode.engine import Request
from eval.decode.generation_config import NEUTRAL_VALUES, apply_generation_config
from eval.measure.prompts import select_user_messages
from eval.measure.target_answers import stream_answers
from heads.decoding.sampling import Sampling
from heads.devices import choose_fast_dtype, this_processor
from heads.layers.fast_linear import pack_weights
from heads.target_model.identity import identify_target
from heads.target_model.load import (
    load_config,
    load_generation_config,
    load_target,
    load_target_tokenizer,
    resolve_dtype,
)
from heads.target_model.model import Target

NUM_LISTED = 10
IN_FLIGHT = {"cpu": 64, "cuda": 256}
"""Requests to a vLLM of this command."""
TEMPLATE_TOKENS = 1024
"""Most tokens that a chat template adds to a conversation."""
BATCHES_AT_A_TIME = 8
"""Batches per group of conversations. A group ends before the next one starts. In a small group the
last batch runs half empty more often. A killed run answers its whole unfinished group again, so a
large group repeats more work."""
WITHOUT_FORECAST = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
"""Format of the bar until two batches have ended. Rows end in bursts, so earlier forecasts err."""


def main(config: RegenerateRun) -> None:
    """Regenerate or continue, then report; exit with 1 if conversations failed."""
    fill_default_paths(config)
    records = load_conversations(config)
    chosen = records.records[: config.data.num_prompts]
    dialogues = [Dialogue(index, record, config.seed) for index, record in enumerate(chosen)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    endpoint = None if config.endpoint is None else asyncio.run(make_endpoint(config))
    python = choose_vllm(config, device) if endpoint is None else None
    if python is not None:
        config.concurrency = IN_FLIGHT[device.type]
    manifest = make_manifest(config, records, endpoint, python, device)
    with JsonlStore(Path(config.out_dir), manifest) as journal:
        todo = [dialogue for dialogue in dialogues if dialogue.id not in journal.done_ids]
        num_done = len(dialogues) - len(todo)
        if journal.num_dropped_bytes:
            print(f"dropped a half-written row ({journal.num_dropped_bytes} bytes)")
        if num_done:
            print(f"continuing: {num_done} conversations are done")
        print(
            f"{len(todo)} conversations to answer, at most {config.max_new_tokens} tokens a turn; "
            f"answers go to {journal.path}"
        )
        counter = OutcomeCounter(config)
        is_asked = endpoint is not None or python is not None
        num_at_once = config.concurrency if is_asked else config.batch_size
        with ExitStack() as stack:
            answerer = load_answerer(config, device) if todo and not is_asked else None
            encoder = None
            if todo and python is not None:
                encoder = ConversationEncoder(load_target_tokenizer(config.target), config)
                endpoint = start_vllm(python, config, device, todo, stack)
            bar = stack.enter_context(
                tqdm(
                    desc="answering", total=len(dialogues), initial=num_done, unit="row",
                    smoothing=0, bar_format=WITHOUT_FORECAST,
                )
            )  # fmt: skip
            watch = Stopwatch()

            def report(outcomes: list[DialogueOutcome]) -> None:
                counter.record_outcomes(outcomes, journal)
                if counter.num_tokens:
                    rate = counter.num_tokens / watch.seconds()
                    bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                if bar.n + len(outcomes) >= num_done + 2 * num_at_once:
                    bar.bar_format = None
                bar.update(len(outcomes))

            if todo and endpoint is not None:
                asyncio.run(answer_from_endpoint(todo, endpoint, config, report, encoder))
            elif answerer is not None:
                answer_in_process(dialogues, answerer, journal.done_ids, report)
        rows = journal.write_sorted()
    print_report(config, rows, counter)
    if RequestFailedError in counter.problems:
        sys.exit(1)
    name = config.target.path if config.endpoint is None else config.model or "MODEL"
    target = collect_changed_settings(config, "target") | {"target.path": name}
    recipe = {"head": recipe_for(str(name))}
    print_next_command("regenerate", recipe | target | {"data.path": journal.path})


def make_manifest(
    config: RegenerateRun,
    records: LoadedRecords,
    endpoint: Endpoint | None,
    python: str | None,
    device: torch.device,
) -> dict[str, object]:
    """Make the settings that affect the contents of a row: a second start must have the same."""
    manifest: dict[str, object] = {
        "data_sha256": records.sha256,
        "form": records.form.value,
        "num_records": len(records.records),
    }
    if endpoint is not None:
        manifest |= {"source": "endpoint", "model": endpoint.model}
    else:
        dtype = resolve_dtype(config.target.dtype, device)
        manifest |= {
            "source": "in process" if python is None else "vLLM",
            **make_fingerprint(
                target=identify_target(config.target, load_target_tokenizer(config.target), dtype)
            ),
            "plain": config.plain,
            "generation_config": None if config.plain else load_generation_config(config.target),
        }
        if python is not None:
            manifest["served_dtype"] = choose_served_dtype(config.target.dtype, device)
    manifest |= {
        "temperature": config.temperature,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "chat_template_kwargs": config.data.chat_template_kwargs,
    }
    return manifest


def load_conversations(config: RegenerateRun) -> LoadedRecords:
    """Load the conversations of the data.

    Raises:
        InputError: the data are plain text.
    """
    path = str(config.data.path)
    records = load_records(path, config.data)
    if records.form is Form.text:
        raise InputError(
            f"data.path={path}: plain text has no questions to answer; allowed forms: "
            f"{', '.join(form.value for form in Form if form not in (Form.auto, Form.text))}"
        )
    print(
        f"data: {path}, form {records.form.value}, {len(records.records)} conversations, "
        f"{len(records.bad)} malformed rows skipped"
    )
    silent = [record for record in records.records if not select_user_messages(record)]
    if len(silent) == len(records.records):
        raise InputError(
            f"data.path={path}: no row has a user message to answer, first {silent[0].where}; "
            "give rows with a question"
        )
    if silent:
        print(f"{len(silent)} of them have no user message to answer, first {silent[0].where}")
    for line in records.format_lines():
        print(f"  {line}")
    return records


async def make_endpoint(config: RegenerateRun) -> Endpoint:
    """Make the endpoint; ask the server for its model's name if none is given."""
    endpoint = Endpoint(
        str(config.endpoint),
        config.model,
        os.environ.get(config.api_key_env),
        config.max_retries,
        config.timeout_s,
    )
    if config.model is not None:
        return endpoint
    async with EndpointClient(endpoint, concurrency=1) as client:
        return replace(endpoint, model=str((await client.request_models())[0]["id"]))


def choose_vllm(config: RegenerateRun, device: torch.device) -> str | None:
    """Choose the Python whose vLLM answers, and say so if none does.

    Raises:
        InputError: the setting names an environment without vLLM, or vLLM would answer otherwise
            than this process.
    """
    python = find_vllm_python(config.vllm)
    reason = "as no vLLM was found (docs/serving/vllm.md#install)"
    if python is not None and (unserved := list_unserved_settings(config)):
        if config.vllm != "auto":
            raise InputError(
                f"vllm={config.vllm}: does not answer with {unserved[0]} as this process does; set "
                "vllm=none to answer in process, or serve the target yourself and set endpoint=URL"
            )
        python, reason = None, f"for {unserved[0]}"
    is_slow = choose_fast_dtype(torch.bfloat16, device) is torch.float32
    if python is not None and config.vllm == "auto" and is_slow:
        python = None
        reason = f"as {this_processor()} imitates bfloat16, where vLLM was no faster (vllm=FOLDER)"
    if python is None and config.vllm != "none":
        print(f"answering in process, {reason}; on a GPU or a CPU with AMX vLLM may be faster")
    return python


def list_unserved_settings(config: RegenerateRun) -> list[str]:
    """List what answers in this process follow, but those of a vLLM that it starts would not."""
    target = config.target
    unserved = [
        f"target.{name}={value}"
        for name in ("adapter", "device_map", "attention")
        if (value := getattr(target, name)) is not None
    ]
    unserved += [f"target.path={target.path}"] if split_gguf_path(str(target.path)) else []
    if target.quantization is not Quantization.none:
        unserved.append(f"target.quantization={target.quantization.value}")
    if unserved or config.plain:
        return unserved
    rules = load_generation_config(target) or {}
    neutral = NEUTRAL_VALUES | {"stop_strings": None}
    del neutral["repetition_penalty"]  # vLLM applies it
    return [
        f"{name}={value} of its generation config"
        for name, value in rules.items()
        if name in neutral and value not in (None, []) and value != neutral[name]
    ]


def start_vllm(
    python: str,
    config: RegenerateRun,
    device: torch.device,
    dialogues: Iterable["Dialogue"],
    stack: ExitStack,
) -> Endpoint:
    """Start vLLM's server of the target; `stack` stops it.

    Args:
        python: Python that imports vLLM.
        config: settings of the command.
        device: device that vLLM runs on.
        dialogues: conversations to answer, for which the window of the server must suffice.
        stack: closed when the server is not needed any more.

    Raises:
        InputError: vLLM ended before it answered.
    """
    target = config.target
    dtype = choose_served_dtype(target.dtype, device)
    # A token has one byte at least. Templates add system prompts and markers.
    longest = TEMPLATE_TOKENS + max(
        len(json.dumps([d.record.messages, d.record.tools], ensure_ascii=False).encode())
        + d.num_questions * config.max_new_tokens
        for d in dialogues
    )
    text_config = load_config(target).get_text_config()
    window = getattr(text_config, "max_position_embeddings", None) or longest
    options = [
        *("--max-num-seqs", str(config.concurrency), "--dtype", dtype),
        *("--max-model-len", str(min(longest, window)), "--seed", str(config.seed)),
        *(("--revision", target.revision) if target.revision else ()),
        *(("--trust-remote-code",) if target.trust_remote_code else ()),
        *(("--generation-config", "vllm") if config.plain else ()),
    ]
    log = Path(config.out_dir) / "vllm.log"
    print(f"vLLM starts, which takes a minute or more; what it says goes to {log}")
    url = stack.enter_context(serve_model(python, str(target.path), options, log))
    retries = config.max_retries, config.timeout_s
    return Endpoint(url, str(target.path), None, *retries, "vllm")


def choose_served_dtype(dtype: Dtype, device: torch.device) -> str:
    """Choose vLLM's `--dtype`, whose `auto` is the dtype of the files: float32 for an emulated one.

    Args:
        dtype: dtype of the target's settings, taken unless it is `auto`.
        device: device that vLLM runs on.
    """
    fast = choose_fast_dtype(torch.bfloat16, device)
    return "float32" if dtype is Dtype.auto and fast is torch.float32 else dtype.value


class RowEmpty(Exception):  # noqa: N818  names what happened to the row
    """Signal that the target's answer is empty: no row to learn from, but no failure."""


class Dialogue:
    """Hold one conversation while the target replaces its answers."""

    def __init__(self, index: int, record: Record, seed: int) -> None:
        """Start before the first question.

        Args:
            index: id of the row.
            record: conversation; the assistant's turns are dropped.
            seed: seed of the run.
        """
        self.id, self.record = index, record
        self.messages: list[dict] = []
        self.truncated: list[int] = []
        self.is_cut = False
        """True if it ends early, at the result of a tool call by an earlier answer."""
        self.num_tokens = 0
        """Tokens of the answers so far, where the target tells them."""
        self._num_answers = 0
        self._seed = seed
        self._rest = [m for m in record.messages or [] if m["role"] != "assistant"]
        self.num_questions = sum(m["role"] == "user" for m in self._rest)
        self.num_chars = sum(len(m["content"]) for m in self._rest)

    def advance_to_question(self) -> bool:
        """Move on to the next question; return False at the end."""
        while self._rest and not self.is_cut:
            message = self._rest.pop(0)
            if message["role"] == "tool":
                self.is_cut = True
                return False
            self.messages.append(message)
            if message["role"] == "user":
                return True
        return False

    def add_answer(self, answer: Answer) -> None:
        """Add the answer to the current question to the context of the next.

        Raises:
            RowEmpty: the answer is empty.
        """
        if answer.is_empty:
            raise RowEmpty(f"the target's answer {self._num_answers + 1} is empty")
        if answer.truncated:
            self.truncated.append(self._num_answers)
        ids = {} if answer.token_ids is None else {"token_ids": answer.token_ids}
        self.messages.append(answer.message | ids)
        self.num_tokens += len(answer.token_ids or ())
        self._num_answers += 1

    @property
    def template_messages(self) -> list[dict]:
        """Return the conversation so far, as a chat template takes it."""
        return [{k: v for k, v in m.items() if k != "token_ids"} for m in self.messages]

    def build_request_arguments(self, template_kwargs: Mapping[str, Any] | None) -> dict:
        """Build the arguments for a server besides messages: tools, arguments of the template."""
        arguments = {
            "tools": self.record.tools,
            "chat_template_kwargs": {**(template_kwargs or {}), **self.record.template_kwargs},
        }
        return {key: value for key, value in arguments.items() if value}

    def compute_seed(self) -> int:
        """Compute a seed for the current answer from the run, the row and the turn alone."""
        key = f"{self._seed}:{self.id}:{self._num_answers}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") >> 1

    def build_row(self) -> dict:
        """Build the row to write; `truncated_turns` counts answers from 0."""
        return {
            "id": self.id,
            "messages": [restore_parts(message) for message in self.messages],
            **self.build_request_arguments(None),
            "category": self.record.category,
            "truncated_turns": self.truncated,
        }


class DialogueOutcome(NamedTuple):
    """Pair a conversation with the error that ended it; without an error it is a row."""

    dialogue: Dialogue
    problem: Exception | None = None


Report = Callable[[list[DialogueOutcome]], None]


def answer_in_process(
    dialogues: list[Dialogue], answerer: "ConversationAnswerer", done: set[int], report: Report
) -> None:
    """Answer the open conversations in groups of some batches.

    Conversations of similar length share a group, the longest first, so that a batch size too large
    for memory fails at once. Finished conversations of an unfinished group are answered again:
    padding changes the last bits of the sums in a batch, and a resumed run must write what an
    uninterrupted one writes.

    Args:
        dialogues: all conversations, finished ones too.
        answerer: the target and how it answers.
        done: ids of the finished conversations.
        report: called with each new outcome.

    Raises:
        InputError: a batch does not fit in memory.
    """
    ordered = sorted(dialogues, key=lambda d: (-d.num_questions, -d.num_chars, d.id))
    size = BATCHES_AT_A_TIME * answerer.config.batch_size
    try:
        for start in range(0, len(ordered), size):
            group = ordered[start : start + size]
            if any(dialogue.id not in done for dialogue in group):
                for outcome in iter_group_outcomes(group, answerer):
                    if outcome.dialogue.id not in done:
                        report([outcome])
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"batch_size={answerer.config.batch_size}: out of device memory; lower batch_size and "
            "start again (finished rows are kept)"
        ) from error


class ConversationEncoder:
    """Render conversations for a target, and split its answers."""

    def __init__(self, tokenizer: Any, config: RegenerateRun) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.encoder = RecordEncoder(tokenizer, config.data.chat_template_kwargs)
        # Refuses a tokenizer that cannot render, before any work.
        self.encoder.build_template({}, None)

    def encode_prompt(self, dialogue: Dialogue) -> list[int]:
        """Render a conversation up to the target's turn, as token ids.

        Raises:
            RequestRefusedError: the template refuses the conversation.
        """
        try:
            return self.encoder.encode_prompt(
                dialogue.template_messages, dialogue.record.tools, dialogue.record.template_kwargs
            )
        except InputError as error:
            raise RequestRefusedError(str(error)) from error

    def parse_answer(self, ids: list[int], dialogue: Dialogue, *, truncated: bool) -> Answer:
        """Split an answer to a conversation, as token ids, into thinking, text and tool calls."""
        written = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        tools = dialogue.record.tools
        template = self.encoder.build_template(dialogue.record.template_kwargs, tools)
        message = parse_reply(written, dialogue.template_messages, template, tools)
        return Answer(message, truncated, ids)


class ConversationAnswerer(ConversationEncoder):
    """Answer several conversations at once with a target in this process.

    The generation config of the target applies.
    """

    def __init__(self, target: Target, config: RegenerateRun) -> None:
        super().__init__(target.tokenizer, config)
        self.target = target
        self.max_prompt_tokens = (
            None if target.max_positions is None else target.max_positions - config.max_new_tokens
        )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise InputError(
                f"max_new_tokens={config.max_new_tokens}: leaves no room for a prompt in the "
                f"window of {target.name}, {target.max_positions} tokens"
            )

    def encode_prompt(self, dialogue: Dialogue) -> list[int]:
        """Render a conversation up to the target's turn, as token ids.

        Raises:
            RequestRefusedError: the template refuses the conversation, no room is left for the
                answer, or the target lacks some of the tokens.
        """
        ids = super().encode_prompt(dialogue)
        try:
            check_token_ids(ids, self.target, "its prompt".format)
        except InputError as error:
            raise RequestRefusedError(str(error)) from error
        if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            raise RequestRefusedError(
                f"{len(ids)} prompt tokens leave no room for max_new_tokens in the target's "
                f"window (at most {self.max_prompt_tokens})"
            )
        return ids


def load_answerer(config: RegenerateRun, device: torch.device) -> ConversationAnswerer:
    """Load the target to a device, to answer in this process with a command's settings."""
    target = load_target(config.target, device)
    apply_generation_config(target, plain=config.plain)
    pack_weights(target.model, target.output_head)
    return ConversationAnswerer(target, config)


def iter_group_outcomes(
    group: list[Dialogue], answerer: ConversationAnswerer
) -> Iterator[DialogueOutcome]:
    """Answer all dialogues of a group, turn by turn; yield their outcomes as they end.

    When one of `batch_size` answers ends, the next prompt starts.
    """
    config = answerer.config
    limits, sampling = (config.max_new_tokens, config.batch_size), Sampling(config.temperature)
    next_round: list[tuple[Dialogue, list[int]]] = []

    def ask(dialogue: Dialogue) -> Iterator[DialogueOutcome]:
        """Put the next question into the next round; yield the outcome if there is none."""
        try:
            if dialogue.advance_to_question():
                next_round.append((dialogue, answerer.encode_prompt(dialogue)))
            else:
                yield DialogueOutcome(dialogue)
        except RequestRefusedError as error:
            yield DialogueOutcome(dialogue, error)

    for dialogue in group:
        yield from ask(dialogue)
    while next_round:
        asked, next_round = next_round, []
        requests = [Request(prompt, dialogue.compute_seed()) for dialogue, prompt in asked]
        for number, ids in stream_answers(answerer.target, requests, *limits, sampling):
            dialogue, _ = asked[number]
            try:
                truncated = ids[-1] not in answerer.target.stop_ids
                dialogue.add_answer(answerer.parse_answer(ids, dialogue, truncated=truncated))
            except RowEmpty as error:
                yield DialogueOutcome(dialogue, error)
            else:
                yield from ask(dialogue)


async def answer_from_endpoint(
    dialogues: Iterable[Dialogue],
    endpoint: Endpoint,
    config: RegenerateRun,
    report: Report,
    encoder: ConversationEncoder | None = None,
) -> None:
    """Let a server answer all dialogues, many at a time.

    Args:
        dialogues: conversations to answer.
        endpoint: the server.
        config: settings of the command.
        report: called with new outcomes.
        encoder: renders prompts and splits answers, which vLLM then takes and gives as token ids.
            None: the server does both.
    """
    settings: dict[str, object] = {
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": 1.0,
    }
    async with EndpointClient(endpoint, config.concurrency) as client:
        # vLLM returns token ids on request.
        if all(model.get("owned_by") == "vllm" for model in await client.request_models()):
            # Text that the server's parsers leave unchanged must contain all that the ids do.
            settings |= {"return_token_ids": True, "skip_special_tokens": False}
            # Otherwise it samples according to the target's generation_config.json.
            settings |= {"top_k": 0, "min_p": 0.0}

        async def converse(dialogue: Dialogue) -> DialogueOutcome:
            try:
                while dialogue.advance_to_question():
                    asked = dict(settings)
                    if config.temperature > 0:
                        asked["seed"] = dialogue.compute_seed()
                    if encoder is None:
                        asked |= dialogue.build_request_arguments(config.data.chat_template_kwargs)
                        answer = await client.request_answer(dialogue.template_messages, asked)
                    else:
                        prompt = encoder.encode_prompt(dialogue)
                        ids, truncated = await client.request_continuation(prompt, asked)
                        answer = encoder.parse_answer(ids, dialogue, truncated=truncated)
                    dialogue.add_answer(answer)
            except (RequestFailedError, RequestRefusedError, RowEmpty) as error:
                return DialogueOutcome(dialogue, error)
            return DialogueOutcome(dialogue)

        results = iter_completed(dialogues, converse, config.concurrency)
        async with contextlib.aclosing(results):
            async for outcomes in results:
                report(outcomes)
        if client.num_retries:
            tqdm.write(f"{client.num_retries} requests were repeated")


@dataclass
class OutcomeCounter:
    """Count conversations that ended without a row, by reason; stop a run where nothing works."""

    config: RegenerateRun
    problems: dict[type[Exception], list[str]] = field(default_factory=dict)
    num_failed_in_a_row: int = 0
    num_cut: int = 0
    num_tokens: int = 0

    def record_outcomes(self, outcomes: list[DialogueOutcome], journal: JsonlStore) -> None:
        """Write the rows of finished conversations, and count the others.

        Raises:
            InputError: a row is refused but rows must not be skipped, or nothing works any more.
        """
        journal.append([o.dialogue.build_row() for o in outcomes if o.problem is None])
        for dialogue, problem in outcomes:
            self.num_cut += problem is None and dialogue.is_cut
            self.num_tokens += dialogue.num_tokens
            failed = isinstance(problem, RequestFailedError)
            self.num_failed_in_a_row = self.num_failed_in_a_row + 1 if failed else 0
            if problem is None:
                continue
            text = f"{dialogue.record.where}: {problem}"
            self.problems.setdefault(type(problem), []).append(text)
            if (
                isinstance(problem, RequestRefusedError)
                and self.config.data.on_bad_row is OnBadRow.error
            ):
                raise InputError(
                    f"{text} (set data.on_bad_row=skip to skip such rows; start again to continue)"
                )
            if self.num_failed_in_a_row >= 2 * self.config.concurrency:
                raise InputError(
                    f"{self.num_failed_in_a_row} conversations in a row failed, the last: {text}. "
                    "Finished rows are kept; start again to continue"
                )


def print_report(config: RegenerateRun, rows: list[dict], counter: OutcomeCounter) -> None:
    """Print the number of conversations, and the reasons of those without a row."""
    num_truncated = sum(bool(row["truncated_turns"]) for row in rows)
    print(f"{len(rows)} conversations in {Path(config.out_dir) / ROWS_NAME}")
    if num_truncated:
        print(
            f"{num_truncated} of them hold an answer cut off at "
            f"max_new_tokens={config.max_new_tokens}, or at a stop text; truncated_turns lists it"
        )
    if counter.num_cut:
        print(
            f"{counter.num_cut} of them end early, before the result of a tool that an answer of "
            "the data had called"
        )
    for error, reason in (
        (RowEmpty, "skipped, the target's answer is empty"),
        (RequestRefusedError, "skipped, refused"),
        (RequestFailedError, "failed; start again to retry them"),
    ):
        if problems := counter.problems.get(error):
            print(f"{len(problems)} conversations {reason}:")
            for problem in problems[:NUM_LISTED]:
                print(f"  {problem}")
            if len(problems) > NUM_LISTED:
                print(f"  and {len(problems) - NUM_LISTED} more")


if __name__ == "__main__":
    COMMAND.run(main)
