"""Replaces the assistant's turns of a dataset with the target's own.

A draft head learns to predict its target, so it learns most from text that the target wrote:

    python scripts/regenerate.py data.path=chats.jsonl target.path=Qwen/Qwen3-8B
    python scripts/regenerate.py data.path=chats.jsonl endpoint=http://localhost:8000/v1

A repetition penalty of the target's generation config also applies here, as in the measurement of
heads; vLLM applies it too, unless served with `--generation-config vllm`. Serve with vLLM's parsers
of reasoning and tool calls. vLLM sends the token ids of an answer, which are kept.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repo root

from conf.command import run_record as following
from conf.command.entry import Command
from conf.settings.scripts import RegenerateRun
from eval.preflight_checks import check_inputs

COMMAND = Command(__doc__, RegenerateRun, "regenerate", check=check_inputs)
if __name__ == "__main__":
    COMMAND.parse_command_line()

import torch
from tqdm import tqdm

from conf.command.jsonl_store import ROWS_NAME, JsonlStore
from conf.command.run_record import make_fingerprint
from conf.errors import InputError
from conf.settings.data import Form, OnBadRow
from data.embedded import fill_default_paths
from data.rows.records import LoadedRecords, load_records
from data.servers.http_client import (
    Endpoint,
    EndpointClient,
    RequestFailedError,
    RequestRefusedError,
    iter_completed,
)
from data.templates.record_encoder import RecordEncoder
from eval.decode.generation_config import apply_generation_config
from eval.measure.prompts import select_user_messages
from heads.layers.fast_linear import pack_weights
from heads.target_model.identity import identify_target
from heads.target_model.load import (
    load_generation_config,
    load_target,
    load_target_tokenizer,
    resolve_dtype,
)
from scripts.answers.dialogue import Dialogue, DialogueOutcome, RowEmpty
from scripts.answers.local import ConversationAnswerer

NUM_LISTED = 10
BATCHES_AT_A_TIME = 8
"""Batches of conversations to finish before others begin. With few, more rows are idle at their
ends; with many, more is answered again when a run is resumed."""


@dataclass
class OutcomeCounter:
    """Conversations that ended without a row, by reason; stops a run in which nothing works."""

    config: RegenerateRun
    problems: dict[type[Exception], list[str]] = field(default_factory=dict)
    num_failed_in_a_row: int = 0
    num_cut: int = 0

    def record_outcomes(self, outcomes: list[DialogueOutcome], journal: JsonlStore) -> None:
        """Write the rows, then count the others.

        Raises:
            InputError: a row is refused but rows must not be skipped, or nothing works any more.
        """
        journal.append([o.dialogue.build_row() for o in outcomes if o.problem is None])
        for dialogue, problem in outcomes:
            self.num_cut += problem is None and dialogue.is_cut
            failed = isinstance(problem, RequestFailedError)
            self.num_failed_in_a_row = self.num_failed_in_a_row + 1 if failed else 0
            if problem is None:
                continue
            text = f"{dialogue.where}: {problem}"
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


Report = Callable[[list[DialogueOutcome]], None]


def main(config: RegenerateRun) -> None:
    """Regenerate or continue, then report; exit with 1 if conversations failed."""
    fill_default_paths(config)
    records = load_conversations(config)
    chosen = records.records[: config.data.num_prompts]
    dialogues = [Dialogue(index, record, config.seed) for index, record in enumerate(chosen)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    endpoint = None if config.endpoint is None else asyncio.run(make_endpoint(config))
    # Settings that affect the contents of a row: a second start must have the same.
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
            "source": "in process",
            **make_fingerprint(
                target=identify_target(config.target, load_target_tokenizer(config.target), dtype)
            ),
            "plain": config.plain,
            "generation_config": None if config.plain else load_generation_config(config.target),
        }
    manifest |= {
        "temperature": config.temperature,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "chat_template_kwargs": config.data.chat_template_kwargs,
    }
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
        tally = OutcomeCounter(config)
        with tqdm(desc="answering", total=len(dialogues), initial=num_done, unit="row") as bar:

            def report(outcomes: list[DialogueOutcome]) -> None:
                tally.record_outcomes(outcomes, journal)
                bar.update(len(outcomes))

            if todo and endpoint is not None:
                asyncio.run(answer_from_endpoint(todo, endpoint, config, report))
            elif todo:
                answer_in_process(dialogues, config, device, journal.done_ids, report)
        rows = journal.write_sorted()
    print_report(config, rows, tally)
    if RequestFailedError in tally.problems:
        sys.exit(1)
    name = config.target.path if endpoint is None else config.model or "MODEL"
    target = following.collect_changed_settings(config, "target") | {"target.path": name}
    following.print_next_command(
        "regenerate", {"head": "eagle3_1", **target, "data.path": journal.path}
    )


def load_conversations(config: RegenerateRun) -> LoadedRecords:
    """Read the conversations of the data.

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
        return replace(endpoint, model=await client.first_model())


def answer_in_process(
    dialogues: list[Dialogue],
    config: RegenerateRun,
    device: torch.device,
    done: set[int],
    report: Report,
) -> None:
    """Answer all open dialogues, some batches at a time.

    Dialogues of similar length run together, longest first, so that too large a batch fails at
    once. Finished dialogues are grouped with the others: the sums in a batch depend, in the last
    bits, on its padding, and a resumed run must repeat those of an uninterrupted one.
    """
    target = load_target(config.target, device)
    apply_generation_config(target, plain=config.plain)
    pack_weights(target.model, target.output_head)
    encoder = RecordEncoder(target.tokenizer, config.data.chat_template_kwargs)
    local = ConversationAnswerer(
        target, encoder, config.batch_size, config.max_new_tokens, config.temperature
    )
    ordered = sorted(dialogues, key=lambda d: (-d.num_questions, -d.num_chars, d.id))
    size = BATCHES_AT_A_TIME * config.batch_size
    for start in range(0, len(ordered), size):
        group = ordered[start : start + size]
        if any(dialogue.id not in done for dialogue in group):
            for outcome in iter_group_outcomes(group, local):
                if outcome.dialogue.id not in done:
                    report([outcome])


def iter_group_outcomes(
    group: list[Dialogue], local: ConversationAnswerer
) -> Iterator[DialogueOutcome]:
    """Answer all dialogues of a group, turn by turn; yield their outcomes as they end."""
    following: list[tuple[Dialogue, list[int]]] = []

    def ask(dialogue: Dialogue) -> Iterator[DialogueOutcome]:
        """Put the next question into the next round; yield the outcome if there is none."""
        try:
            if dialogue.advance_to_question():
                following.append((dialogue, local.encode_prompt(dialogue)))
            else:
                yield DialogueOutcome(dialogue)
        except RequestRefusedError as error:
            yield DialogueOutcome(dialogue, error)

    for dialogue in group:
        yield from ask(dialogue)
    while following:
        asked, following = following, []
        seeds = [dialogue.compute_seed() for dialogue, _ in asked]
        for number, ids in local.answer_with_states([prompt for _, prompt in asked], seeds):
            dialogue, _ = asked[number]
            try:
                dialogue.add_answer(local.encode_response(ids, dialogue))
            except RowEmpty as error:
                yield DialogueOutcome(dialogue, error)
            else:
                yield from ask(dialogue)


async def answer_from_endpoint(
    dialogues: Iterable[Dialogue], endpoint: Endpoint, config: RegenerateRun, report: Report
) -> None:
    """Let a server answer all dialogues, many at a time."""
    settings: dict[str, object] = {
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": 1.0,
    }
    async with EndpointClient(endpoint, config.concurrency) as client:
        if await client.tells_token_ids():
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
                    asked |= dialogue.build_request_arguments(config.data.chat_template_kwargs)
                    dialogue.add_answer(
                        await client.request_answer(dialogue.template_messages, asked)
                    )
            except (RequestFailedError, RequestRefusedError, RowEmpty) as error:
                return DialogueOutcome(dialogue, error)
            return DialogueOutcome(dialogue)

        results = iter_completed(dialogues, converse, config.concurrency)
        async with contextlib.aclosing(results):
            async for outcomes in results:
                report(outcomes)
        if client.num_retries:
            tqdm.write(f"{client.num_retries} requests were repeated")


def print_report(config: RegenerateRun, rows: list[dict], tally: OutcomeCounter) -> None:
    """Print the number of conversations, and what happened to the others."""
    num_truncated = sum(bool(row["truncated_turns"]) for row in rows)
    print(f"{len(rows)} conversations in {Path(config.out_dir) / ROWS_NAME}")
    if num_truncated:
        print(
            f"{num_truncated} of them hold an answer cut off at "
            f"max_new_tokens={config.max_new_tokens}, or at a stop text; truncated_turns lists it"
        )
    if tally.num_cut:
        print(
            f"{tally.num_cut} of them end early, before the result of a tool that an answer of "
            "the data had called"
        )
    for error, words in (
        (RowEmpty, "skipped, the target's answer is empty"),
        (RequestRefusedError, "skipped, refused"),
        (RequestFailedError, "failed; start again to retry them"),
    ):
        if problems := tally.problems.get(error):
            print(f"{len(problems)} conversations {words}:")
            for problem in problems[:NUM_LISTED]:
                print(f"  {problem}")
            if len(problems) > NUM_LISTED:
                print(f"  and {len(problems) - NUM_LISTED} more")


if __name__ == "__main__":
    COMMAND.run(main)
