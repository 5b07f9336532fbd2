"""Start and end of every measurement: processes, target, heads, prompts, and the results file."""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from rich.console import Console
from tqdm import tqdm

from conf.command.environment import check_launch
from conf.command.jsonl_store import PARTIAL, JsonlStore
from conf.command.run_record import collect_provenance, flatten_settings, to_json
from conf.errors import InputError
from conf.files import make_folder
from conf.settings.data import OnBadRow
from conf.settings.drafting import HeadRef
from conf.settings.measure import MeasureRun
from data.embedded import fill_default_paths
from data.rows.data_files import find_dataset_revision
from data.rows.records import Record, compute_prompt_digest, load_records
from data.servers.server_pool import HiddenStatesPool
from data.templates.record_encoder import RecordEncoder
from eval.decode.generation_config import apply_generation_config
from eval.measure.data_statement import (
    DataStatement,
    compare_statements,
    format_training_notes,
)
from eval.measure.engine_answers import AnswerSource, EngineAnswerSource, open_states_pool
from eval.measure.measured_head import MeasuredHead, get_device_name, load_measured_head
from eval.measure.prompts import (
    Prompt,
    check_prompt,
    format_unread_settings,
    render_first_turns,
    render_next_turn,
    select_process_prompts,
    select_user_messages,
)
from eval.measure.results import describe_conditions, write_files
from eval.measure.target_answers import AnswerWriter, LocalAnswerSource
from eval.preflight_checks import adopt_head_target, check_measurement
from heads.decoding.sampling import Sampling
from heads.layers.fast_linear import pack_weights, reduce_rank
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.identity import (
    compute_weights_checksum,
    format_target_change,
    identify_target,
)
from heads.target_model.kernels import kernel_notice
from heads.target_model.load import RemoteTarget, load_target
from heads.target_model.model import Target

Item = TypeVar("Item")
STATED_SETTINGS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
"""Settings that a result repeats beside its figures."""
NUM_SPARE = 8
"""First questions of dialogues that are not measured, for searches."""


@dataclass(frozen=True)
class Measurement:
    """A target with heads and prompts to measure, in one of several processes.

    A context manager, as its end closes engines that run the target's layers.

    Attributes:
        embeddings_and_output_head: the target; if engines run its layers, only its embeddings,
            final norm, output head and tokenizer.
        heads: heads; the head of `head.path` is first, if given.
        prompts: this process's share, dialogue by dialogue within each turn.
        spare_prompts: first questions of dialogues that are not measured, for searches.
        engines: engines that run the target's layers.
        writer: writes the answers of earlier turns in place of the target.
        resources: stack that closes the engines at the end.
        sampling: how tokens are chosen.
        data: origin of the prompts, for the results file.
        is_main_process: whether this process prints and writes.
    """

    embeddings_and_output_head: EmbeddingsAndOutputHead
    heads: list[MeasuredHead]
    prompts: list[Prompt]
    sampling: Sampling
    data: dict[str, Any]
    is_main_process: bool
    spare_prompts: list[Prompt] = field(default_factory=list)
    engines: HiddenStatesPool | None = None
    writer: AnswerWriter | None = None
    resources: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.resources.close()

    @property
    def answer_source(self) -> AnswerSource:
        """Return the source of the target's own texts: this process or engines."""
        if self.engines is None:
            return LocalAnswerSource(self.target)
        assert isinstance(self.embeddings_and_output_head, RemoteTarget)
        return EngineAnswerSource(self.engines, self.embeddings_and_output_head)

    @property
    def target(self) -> Target:
        """Return the target with its layers, for measurements that run them."""
        assert isinstance(self.embeddings_and_output_head, Target)
        return self.embeddings_and_output_head

    @property
    def head(self) -> MeasuredHead:
        """Return the only head of a measurement that needs one."""
        return self.heads[0]


def open_measurement(
    run: MeasureRun,
    result_name: str,
    more_heads: Sequence[str] = (),
    may_use_engines: bool = False,
    writer: AnswerWriter | None = None,
    like: Measurement | None = None,
) -> Measurement:
    """Open a measurement: make cheap checks first, then load target, heads and prompts.

    Args:
        run: settings of the command.
        result_name: name of the file to write.
        more_heads: paths besides `head.path`.
        may_use_engines: whether engines may run the target's layers; without a head, nothing runs
            the layers.
        writer: writes the answers of earlier turns in place of the target.
        like: measurement that differs in data and sampling only, whose target and heads are
            reused; it closes its engines after the new measurement.

    Raises:
        InputError: before anything is written.
    """
    adopted = adopt_head_target(run)
    check_measurement(run, result_name)
    state = join_processes()
    if state.is_main_process:
        print_notes(adopted)
    with state.main_process_first():
        fill_default_paths(run, prompts=True)
    assert run.data.path is not None
    records = load_records(run.data.path, run.data)
    print_notes(*records.format_lines())
    refs = [*([] if run.head.path is None else [run.head]), *map(HeadRef, more_heads)]
    heads = like.heads if like else [load_measured_head(run, ref) for ref in refs]
    target = like.embeddings_and_output_head if like else _open_target(run, heads, may_use_engines)
    print_notes(
        *(
            f"{head.path}: its draft tree was searched on data.path itself, so the tree's figures "
            "are too good; measure on other prompts"
            for head in heads
            if head.tree_data_sha256 == records.sha256
        )
    )
    stated = DataStatement(
        run.data.path,
        records.sha256,
        to_json(run.data.chat_template_kwargs or {}),
        str(target.dtype).removeprefix("torch."),
    )
    chosen = records.records[: run.data.num_prompts]
    encoder = RecordEncoder(target.tokenizer, run.data.chat_template_kwargs)
    prompts, left_out = select_fitting_prompts(run, target, render_first_turns(chosen, encoder))
    if not prompts:
        raise InputError(f"data.path: no prompt can be used, the first because: {left_out[0]}")
    target_changes: list[str] = []
    if state.is_main_process:
        print_notes(
            *kernel_notice(target.device),
            *(f"left out: {why}" for why in left_out),
            *format_unread_settings(prompts, encoder),
        )
        lengths = [len(prompt.token_ids) + run.max_new_tokens for prompt in prompts]
        windows = [(head.path, head.draft_head.max_positions or max(lengths)) for head in heads]
        print_notes(
            *(
                f"{path}: knows {window} positions (max_position_embeddings), but {beyond} of "
                f"{len(prompts)} texts may be longer; beyond them it drafts nothing"
                for path, window in windows
                if (beyond := sum(length > window for length in lengths))
            )
        )
        target_changes = _format_target_changes(run, target, refs)
        print_notes(*target_changes)
    digests = [compute_prompt_digest(chosen[prompt.dialogue]) for prompt in prompts]
    trained_on = [
        compare_statements(str(ref.path), trained, digests)
        for ref in refs
        if (trained := DataStatement.from_head(str(ref.path), ref.revision)) is not None
    ]
    if state.is_main_process:
        for each in trained_on:
            print_notes(*format_training_notes(stated.to_json(), each, each["head"]))
    own_prompts = select_process_prompts(prompts, state.process_index, state.num_processes)
    if not own_prompts:
        raise InputError(
            f"data.num_prompts={len(prompts)}: fewer dialogues than the {state.num_processes} "
            "processes of this launch; raise it, or start fewer processes"
        )
    data = {
        "path": run.data.path,
        "subset": run.data.subset,
        "split": run.data.split,
        "form": records.form.value,
        "sha256": records.sha256,
        "chat_template_kwargs": stated.chat_template_kwargs,
        "target_dtype": stated.target_dtype,
        "trained_on": trained_on,
        "target_changes": target_changes,
        "num_copies": records.num_copies,
        "num_prompts": 0,
        "num_bad": len(records.bad) + len(left_out),
        "most_turns": max(len(select_user_messages(record)) for record in chosen),
    }
    sampling = Sampling(run.temperature, run.top_p, run.top_k, min_p=run.min_p)
    others = records.records[len(chosen) : len(chosen) + NUM_SPARE]
    spare = _render_spare_prompts(run, others, target, encoder)
    resources, main = ExitStack(), state.is_main_process
    engines = like.engines if like else None
    if may_use_engines and run.target.engine and like is None:
        engines = resources.enter_context(_open_engines(run, target, heads, own_prompts))
    measurement = Measurement(
        target, heads, own_prompts, sampling, data, main, spare, engines, writer, resources
    )
    with ExitStack() as if_it_fails:
        if_it_fails.push(measurement)
        prompts = _render_later_turns(run, chosen, own_prompts, measurement, encoder)
        data["num_prompts"] = len(gather_items(prompts))
        if_it_fails.pop_all()
    return replace(measurement, prompts=prompts)


def _format_target_changes(
    run: MeasureRun, target: EmbeddingsAndOutputHead, refs: Sequence[HeadRef]
) -> list[str]:
    """Format a line for each head that was trained for another target."""
    identity = identify_target(run.target, target.tokenizer, target.dtype)
    lines = (
        format_target_change("head.path", str(ref.path), ref.revision, identity) for ref in refs
    )
    return [line for line in lines if line is not None]


def _open_target(
    run: MeasureRun, heads: Sequence[MeasuredHead], may_use_engines: bool
) -> EmbeddingsAndOutputHead:
    """Open the target, or only its parts if engines or nothing runs its layers; prepare heads."""
    without_layers = may_use_engines and (bool(run.target.engine) or not heads)
    load: Callable[..., EmbeddingsAndOutputHead] = (
        RemoteTarget.from_config if without_layers else load_target
    )
    target = load(run.target, join_processes().device)
    apply_generation_config(target, stop=run.stop or (), plain=run.plain, ignore_eos=run.ignore_eos)
    for head in heads:
        head.draft_head.attach(target, target.dtype).eval()
        if run.output_rank is not None:
            reduce_rank(head.draft_head, target, run.output_rank)
    whole = [target.model] if isinstance(target, Target) else []
    pack_weights(*whole, target.output_head, *(head.draft_head for head in heads))
    return target


def _open_engines(
    run: MeasureRun, target: Any, heads: Sequence[MeasuredHead], prompts: Sequence[Prompt]
) -> AbstractContextManager[HiddenStatesPool]:
    """Open the engines that give the hidden states that heads read."""
    layers = {index for head in heads for index in head.draft_head.taps.layers}
    text = max((prompt.token_ids for prompt in prompts), key=len)
    return open_states_pool(run.target, target, sorted({*layers, target.num_layers}), text)


def _render_spare_prompts(
    run: MeasureRun,
    records: Sequence[Record],
    target: EmbeddingsAndOutputHead,
    encoder: RecordEncoder,
) -> list[Prompt]:
    spare: list[Prompt] = []
    for record in records:
        with suppress(InputError):  # these prompts are optional
            [prompt] = render_first_turns([record], encoder)
            check_prompt(target, prompt, run.max_new_tokens)
            spare.append(prompt)
    return spare


def _render_later_turns(
    run: MeasureRun,
    records: Sequence[Record],
    prompts: list[Prompt],
    measurement: Measurement,
    encoder: RecordEncoder,
) -> list[Prompt]:
    """Render the prompts of all turns; all methods get the same answers in them.

    Raises:
        InputError: a prompt leaves no room and must not be skipped. If this does not depend on
            answers, the error comes before the first answer.
    """
    least = prompts
    for _ in range(1, run.num_turns):
        # After empty answers, if the template allows them.
        following: list[Prompt] = []
        for prompt in least:
            with suppress(InputError):
                following += render_next_turn(records[prompt.dialogue], prompt, [], encoder)
        least, _ = select_fitting_prompts(run, measurement.embeddings_and_output_head, following)
    turns, latest = list(prompts), prompts
    for turn in range(1, run.num_turns):
        going_on = [p for p in latest if len(select_user_messages(records[p.dialogue])) > turn]
        latest = []
        # The longest first, so that prompts without room fail early.
        going_on.sort(key=lambda p: -len(p.token_ids))
        token_ids = [prompt.token_ids for prompt in going_on]
        write = measurement.writer or measurement.answer_source.stream_answers
        texts = write(token_ids, run.max_new_tokens)
        told = "the target answers earlier turns"
        for number, ids in tqdm(texts, told, len(token_ids), unit="prompt", disable=not token_ids):
            prompt = going_on[number]
            following = render_next_turn(records[prompt.dialogue], prompt, ids, encoder)
            fit, left_out = select_fitting_prompts(
                run, measurement.embeddings_and_output_head, following
            )
            print_notes(*(f"left out: {why}" for why in left_out))
            latest += fit
        latest.sort(key=lambda p: p.dialogue)
        turns += latest
    return turns


def select_fitting_prompts(
    run: MeasureRun, target: EmbeddingsAndOutputHead, prompts: Sequence[Prompt]
) -> tuple[list[Prompt], list[str]]:
    """Select the prompts that a target can answer; give reasons against the others.

    Raises:
        InputError: a prompt does not fit, and `data.on_bad_row` does not skip it.
    """
    fit, left_out = [], []
    for prompt in prompts:
        try:
            check_prompt(target, prompt, run.max_new_tokens)
        except InputError as error:
            if run.data.on_bad_row is OnBadRow.error:
                raise
            left_out.append(str(error))
        else:
            fit.append(prompt)
    return fit, left_out


def compute_prompt_seed(prompt: Prompt, seed: int) -> int:
    """Compute the seed of a prompt's text, independent of processes and of other prompts."""
    return seed * 1_000_003 + prompt.dialogue * 16 + prompt.turn


def open_jsonl_store(
    run: MeasureRun, name: str, measurement: Measurement, **more: object
) -> JsonlStore:
    """Open the store of a measurement's runs, which an earlier start may have begun.

    Args:
        run: settings of the command.
        name: name of the results file.
        measurement: measurement that runs.
        more: other JSON values that the rows depend on.

    Raises:
        InputError: an earlier start measured with other settings, or the journal cannot be written.
    """
    state, target = join_processes(), measurement.embeddings_and_output_head
    settings = {key: value for key, value in vars(run).items() if key != "out_dir"}
    provenance = collect_provenance(settings, target.name, measurement.data)
    manifest: dict[str, object] = flatten_settings(
        {
            **{key: provenance[key] for key in ("config", "data", "versions", "git")},
            "target": to_json(identify_target(run.target, target.tokenizer, target.dtype)),
            "heads": [compute_weight_checksums(head.path) for head in measurement.heads],
            "generation_config": target.logits_processing,
            "stop": [*target.stop_ids, *target.stop_strings],
            "device": get_device_name(),
            "torch_threads": torch.get_num_threads(),
            "num_processes": state.num_processes,
            **more,
        }
    )
    folder = get_partial_folder(run, name) / str(state.process_index)
    try:
        journal = JsonlStore(folder, manifest, "runs.jsonl")
    except OSError as error:
        raise InputError(f"out_dir={run.out_dir}: cannot write {folder}: {error}") from error
    if measurement.is_main_process:
        print_notes(
            f"{len(measurement.prompts)} prompts, answers of at most {run.max_new_tokens} tokens; "
            f"writing results to {Path(run.out_dir) / name}"
        )
        if journal.done_ids:
            num = len(journal.done_ids)
            print_notes(f"continuing with {num} runs of an earlier start in {folder}")
    return journal


def compute_weight_checksums(path: str) -> list[str | None]:
    """Compute checksums of a folder's weight files; none for a Hub id, whose revision is fixed."""
    files = sorted(Path(path).glob("*.safetensors"))
    return [compute_weights_checksum(file.parent, file.stem) for file in files]


def get_partial_folder(run: MeasureRun, name: str) -> Path:
    """Return the folder of a measurement's journals until its result is written."""
    return (Path(run.out_dir) / name).with_suffix(PARTIAL)


def write_result(
    run: MeasureRun, name: str, result: dict[str, Any], measurement: Measurement
) -> tuple[Path, dict[str, Any]]:
    """Write `out_dir/name` whole or not at all, with its settings; return path and content."""
    target = measurement.embeddings_and_output_head
    origin = {**measurement.data, "version": find_dataset_revision(measurement.data["path"])}
    if isinstance(target, Target):
        layers = {
            "target_attention": target.attention_description,
            "target_state_bytes": target.state_bytes,
        }
    else:
        layers = {"engines": measurement.engines.server_lines if measurement.engines else []}
    result = {
        **result,
        "head": run.head.path,
        "target_identity": to_json(identify_target(run.target, target.tokenizer, target.dtype)),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        **layers,
        "device": get_device_name(),
        "torch_threads": torch.get_num_threads(),
        **{name: getattr(run, name) for name in STATED_SETTINGS},
        "stop": list(target.stop_strings),
        "ignore_eos": run.ignore_eos,
        "generation_config": target.logits_processing,
        "num_turns": run.num_turns,
        "seed": run.seed,
        "tree": measurement.heads[0].describe_tree() if measurement.heads else None,
        **collect_provenance(run, target.name, origin),
    }
    result["conditions"] = describe_conditions(result)
    # A list of numbers stands on one line; strings contain no line breaks.
    numbers = r"\[\n\s*([-+.,\deE\s]*?)\s*\]"
    text = re.sub(
        numbers, lambda found: f"[{' '.join(found[1].split())}]", json.dumps(result, indent=2)
    )
    make_folder(Path(run.out_dir))
    [path] = write_files({Path(run.out_dir) / name: text + "\n"}, f"out_dir={run.out_dir}")
    shutil.rmtree(get_partial_folder(run, name), ignore_errors=True)
    return path, json.loads(text)


def join_processes() -> PartialState:
    """Join the processes of this launch; without a launch there is one.

    Raises:
        InputError: the processes do not see each other.
    """
    cpu = not torch.cuda.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    # A process that is done waits for the others, whose prompts may be much longer.
    state = PartialState(cpu=cpu, timeout=timedelta(days=30))
    check_launch(os.environ, state.num_processes)
    return state


def gather_items(items: list[Item]) -> list[Item]:
    """Collect the items of all processes, in process order, on every process."""
    return gather_object(items) if PartialState().num_processes > 1 else items


def print_notes(*lines: str | None) -> None:
    """Print lines to stderr, unwrapped; None is left out."""
    for line in lines:
        if line is not None:
            Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
