"""Sources to train from: a target with data, serving engines, or a feature store.

A `TrainingSource` holds the target, packed sequences and a replay. If engines run the target's
layers, `ServedSequences` ask them for the hidden states of each document. A feature store is
checked against the settings and against the layers that the head reads.

Letters: S tokens of a document, T tokens of a packed sequence, D hidden.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from conf.command.clock import Stopwatch
from conf.command.jsonl_store import MANIFEST_NAME, ROWS_NAME
from conf.command.run_record import (
    find_changed_keys,
    format_changes,
    format_command,
    is_embedded_path,
    make_fingerprint,
    to_json,
)
from conf.errors import InputError
from conf.files import load_json
from conf.settings.data import DataConfig, PackedConfig, TeacherKind
from conf.settings.target import Dtype, TargetConfig
from conf.settings.training import TrainRun
from data.embedded import fill_default_paths
from data.features.store_format import EMBEDDINGS_AND_HEAD, LAYER_PREFIX, StorePlan
from data.features.store_reader import FeatureStore, TrainingData
from data.prepared.dataset_cache import NON_CONTENT_SETTINGS
from data.prepared.packing import PackedDataset
from data.prepared.prepare import DataReport, prepare_datasets
from data.rows.data_files import find_source, iter_rows
from data.servers.server_pool import HiddenStatesPool, join_documents, split_documents
from data.servers.state_files import HiddenStatesError
from eval.decode.generation_config import try_generation_config
from eval.measure.data_statement import DataStatement
from eval.measure.engine_answers import EngineAnswerSource, build_request_settings, open_states_pool
from eval.measure.target_answers import LocalAnswerSource
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.identity import TargetIdentity, identify_target
from heads.target_model.load import RemoteTarget, load_target, load_target_tokenizer
from heads.target_model.model import FeatureLayers, Target
from train.loop.evaluation import (
    Replay,
    make_heldout_replay,
    make_stored_replay,
    select_heldout_prompts,
)
from train.parallel import processes

STEPS_AHEAD = 4
"""Largest number of optimizer steps whose sequences are requested together."""
SHARE_OF_MEMORY = 0.25
"""Fraction of the host's memory for the hidden states of these sequences."""
NUM_LOOKED_AT = 64
"""Number of sequences to search for the longest document."""
PADDING = -1
"""Document id of tokens that are not supervised."""
AUTHORS = (
    "target.name", "target.revision", "target.weights", "target.adapter", "target.adapter_weights",
)  # fmt: skip
"""Keys of a fingerprint that name who wrote answers."""
MIN_NOTABLE_WAIT = 0.1
"""Fraction of a run's time from which waiting matters."""


@dataclass
class ServedSequences:
    """Packed sequences with the hidden states of their documents, named as in `add_target_states`.

    Documents without states are not supervised, so that all processes stay in step.

    Attributes:
        rows: sequences without states.
        pool: servers of the states.
        lost: counter of skipped documents over all threads.
    """

    rows: PackedDataset
    pool: HiddenStatesPool
    lost: Iterator[int] = field(default_factory=partial(count, 1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        documents, ids = split_documents(row), row["document_ids"].clone()
        document_states: list[dict[str, Tensor]] = []
        for number, future in enumerate([self.pool.submit(document) for document in documents]):
            try:
                document_states.append(future.result())
            except HiddenStatesError as error:
                document_states.append({})
                ids[row["document_ids"] == number] = PADDING
                tqdm.write(
                    f"document {number} of sequence {index} is left out (number {next(self.lost)} "
                    f"of this run): {error}"
                )
        dtype = next(
            (t.dtype for states in document_states for t in states.values()), torch.bfloat16
        )
        states = {}
        for layer in self.pool.taps.layers:
            name, width = f"{LAYER_PREFIX}{layer}", self.pool.taps.hidden_size
            parts = [
                given[name] if given else torch.zeros(len(document), width, dtype=dtype)
                for given, document in zip(document_states, documents, strict=True)
            ]
            states[name] = join_documents(row, parts)
        return {**row, "document_ids": ids, **states}


@dataclass(frozen=True)
class TrainingSource:
    """Target and data to train a head on.

    Attributes:
        target: the whole target, or its embedding and output head beside a feature store.
        identity: identity of the target.
        checksum: checksum of all training data.
        train: packed sequences, with or without the target's hidden states.
        heldout: packed sequences to evaluate on.
        report: counts of the prepared data.
        statement: statement of the data to train on.
        lines: lines to print about the data.
        make_replay: function from a depth and the layers that the head reads to a replay of tau on
            held-out prompts.
        server_settings: settings of the servers of hidden states, if any.
        prompts: held-out prompts for these servers to answer.
        server_lines: lines to print about these servers.
    """

    target: EmbeddingsAndOutputHead
    identity: TargetIdentity
    checksum: str
    train: TrainingData | ServedSequences
    heldout: TrainingData | ServedSequences
    report: DataReport
    statement: DataStatement
    lines: list[str]
    make_replay: Callable[[int, FeatureLayers], Replay] | None
    server_settings: TargetConfig | None = None
    prompts: Sequence[list[int]] = ()
    server_lines: Sequence[str] = ()

    @contextmanager
    def open_states(self, taps: FeatureLayers) -> Iterator["TrainingSource"]:
        """Open the servers of the hidden states that a head reads, if servers give them.

        Raises:
            InputError: a server does not give them.
        """
        if self.server_settings is None:
            yield self
            return
        target = self.target
        assert isinstance(target, RemoteTarget)
        assert isinstance(self.train, PackedDataset)
        assert isinstance(self.heldout, PackedDataset)
        layers = sorted({*taps.layers, target.num_layers})
        text = find_longest_document(self.train)
        with open_states_pool(self.server_settings, target, layers, text) as pool:
            replay = partial(
                make_heldout_replay, EngineAnswerSource(pool, target), list(self.prompts)
            )
            train, heldout = ServedSequences(self.train, pool), ServedSequences(self.heldout, pool)
            yield replace(
                self,
                train=train,
                heldout=heldout,
                make_replay=replay,
                server_lines=pool.server_lines,
            )


def load_target_source(config: TrainRun, accelerator: Accelerator) -> TrainingSource:
    """Load the target, without its layers if engines run them, and prepare the data.

    Raises:
        InputError: the target must answer, but its generation config cannot be followed.
    """
    fill_default_paths(config)
    urls, must_answer = config.target.engine, config.rollout.steps is not None
    target = (RemoteTarget.from_config if urls else load_target)(config.target, accelerator.device)
    checks = [build_request_settings] if urls else []
    plain = try_generation_config(target, *checks, required=must_answer)
    train_data, heldout, report = prepare_datasets(
        config.data, target.tokenizer, config.seed, accelerator.is_main_process
    )
    for data in (train_data, heldout):
        data.check_token_ids(target)
    processes.wait_for_processes()  # other nodes may read slower disks
    prompts = select_heldout_prompts(heldout, config.train.num_replay_prompts)
    lines = [f"hidden states: from {', '.join(urls)}"] if urls else []
    lines += [*filter(None, [plain]), *report.format_lines()]
    make_replay = None
    if isinstance(target, Target):
        make_replay = partial(make_heldout_replay, LocalAnswerSource(target), prompts)
        lines.append(f"attention of the target: {target.attention_description}")
    identity = identify_target(config.target, target.tokenizer, target.dtype)
    kwargs = to_json(config.data.chat_template_kwargs or {})
    statement = DataStatement(
        report.path, report.sha256, kwargs, identity.dtype, train_data.prompts
    )
    return TrainingSource(
        target, identity, train_data.checksum, train_data, heldout, report, statement, lines,
        make_replay, config.target if urls else None, prompts,
    )  # fmt: skip


def format_authorship(path: str, identity: TargetIdentity) -> list[str]:
    """Format who wrote the answers of the data, with a warning unless it was the target.

    Records are the manifest that scripts/regenerate.py writes beside its rows, and token ids in
    the first row.

    Args:
        path: path of the data, as typed.
        identity: identity of the target.
    """
    file, own = Path(path).expanduser(), {"data.path": path, "target.path": identity.name}
    if is_embedded_path(path):
        return []
    rows = file / ROWS_NAME if file.is_dir() else file
    manifest = load_json(rows.with_name(MANIFEST_NAME)) if rows.name == ROWS_NAME else None
    if manifest is not None:
        now = make_fingerprint(target=identity)
        if "target.name" not in manifest:
            return [
                f"answers of data.path: {manifest.get('model', 'a model')} wrote them, on a server"
            ]
        changed = [key for key in find_changed_keys(manifest, now) if key in AUTHORS]
        if not changed:
            return ["answers of data.path: the target wrote them"]
        whose = f"another target wrote them ({format_changes(manifest, now, changed)})"
    elif rows.is_file() and _has_written_ids(rows):
        return ["answers of data.path: a model wrote them, whose token ids stand beside them"]
    else:
        whose = "no record says that the target wrote them"
    return [
        f"answers of data.path: {whose}, and heads learn less from others' words (docs/data.md); "
        f"to have them written: {format_command('scripts/regenerate.py', own)}"
    ]


def _has_written_ids(file: Path) -> bool:
    """Tell whether the first row of a file holds the token ids that a model wrote."""
    row = next(iter_rows(find_source(str(file)), hashlib.sha256()), None)
    if row is None:
        return False
    text = json.dumps(row.value).encode() if row.raw is None else row.raw
    return re.search(rb'"token_ids"\s*:', text) is not None


def load_store_source(
    config: TrainRun, store: FeatureStore, device: torch.device
) -> TrainingSource:
    """Load the target's embedding and output head, and the data, from a feature store."""
    target = load_embeddings_and_head(store, device)
    replay = partial(make_stored_replay, target, store.replay, config.train.num_replay_prompts)
    lines = [f"features: {store.folder} ({store.manifest.plan.contents.format_line()})"]
    for data in (store.train, store.heldout, store.replay):
        data.check_token_ids(target)
    report, plan = store.manifest.report, store.manifest.plan
    kwargs, dtype = plan.data["chat_template_kwargs"] or {}, plan.target["dtype"]
    statement = DataStatement(report.path, report.sha256, kwargs, dtype, store.load_prompts())
    return TrainingSource(
        target, get_store_identity(plan), plan.splits["train"].checksum, store.train, store.heldout,
        report, statement, lines + report.format_lines(), replay,
    )  # fmt: skip


def load_store(data: PackedConfig, target: TargetConfig) -> FeatureStore:
    """Open the store of `data.features`, if it is whole and no setting contradicts it.

    A setting with its default value counts as not given.

    Raises:
        InputError: naming the missing or damaged file, or the contradicting setting.
    """
    assert data.features is not None
    store = FeatureStore(Path(data.features).expanduser())
    plan = store.manifest.plan
    skipped = ("features", *NON_CONTENT_SETTINGS)
    names = (field.name for field in fields(DataConfig) if field.name not in skipped)
    _check_unset("data", data, plan.data, names, data.features)
    _check_target(target, plan, data.features)
    return store


def load_embeddings_and_head(store: FeatureStore, device: torch.device) -> EmbeddingsAndOutputHead:
    """Load the embedding and the output head of the store's target.

    Raises:
        InputError: a file is missing or damaged.
    """
    return EmbeddingsAndOutputHead.from_folder(store.check_file(EMBEDDINGS_AND_HEAD).parent, device)


def get_store_identity(plan: StorePlan) -> TargetIdentity:
    """Return the identity of the target that a store was captured from."""
    names = (field.name for field in fields(TargetIdentity))
    return TargetIdentity(**{name: plan.target[name] for name in names})


def check_feature_layers(store: FeatureStore, taps: FeatureLayers) -> None:
    """Refuse a head that reads hidden states the store lacks.

    Raises:
        InputError: naming the missing states and how to capture them.
    """
    contents = store.manifest.plan.contents
    missing = sorted(set(taps.layers) - set(contents.layers))
    if missing:
        wanted = ",".join(map(str, sorted(taps.layers)))
        raise InputError(
            f"head.layers={missing}: not in data.features={store.folder}, which has "
            f"{list(contents.layers)}; name layers of these, or capture with layers=[{wanted}]"
        )
    # Every head reads layers or the last hidden state.
    if not taps.layers and contents.teacher is not TeacherKind.hidden:
        raise InputError(
            f"data.features={store.folder}: captured with teacher={contents.teacher.value}, "
            "without the last hidden states that this head reads; capture with teacher=hidden, or "
            "train an EAGLE-3 head"
        )


def _check_target(target: TargetConfig, plan: StorePlan, folder: str) -> None:
    stored, dtype = plan.target, plan.target["dtype"]
    if target.dtype is not Dtype.auto and target.dtype.value != dtype:
        raise InputError(
            f"target.dtype={target.dtype.value}: data.features={folder} was captured in {dtype}; "
            "leave target.dtype unset, or capture again"
        )
    if target.path is None:
        _check_unset("target", target, stored, ("revision", "adapter", "quantization"), folder)
        return
    given = identify_target(target, load_target_tokenizer(target), getattr(torch, dtype))
    before, now = make_fingerprint(target=get_store_identity(plan)), make_fingerprint(target=given)
    differ = find_changed_keys(before, now)
    if differ:
        raise InputError(
            f"target.path={target.path}: not the target of data.features={folder}: "
            f"{format_changes(before, now, differ)}. Leave target.* unset to train for the store's "
            "target, or capture again"
        )


def _check_unset(
    group: str, config: Any, stored: Mapping[str, Any], names: Iterable[str], folder: str | None
) -> None:
    """Refuse settings that differ from the store's, unless they have their default."""
    for name in names:
        given, default = getattr(config, name), getattr(type(config)(), name)
        if given != default and to_json(given) != stored[name]:
            raise InputError(
                f"{group}.{name}={to_json(given)}: data.features={folder} was captured with "
                f"{group}.{name}={stored[name]}; leave it unset, or capture again"
            )


def find_longest_document(rows: PackedDataset) -> list[int]:
    """Find the longest document of the first sequences; return its token ids."""
    first = (rows[index] for index in range(min(len(rows), NUM_LOOKED_AT)))
    return max((document for row in first for document in split_documents(row)), key=len)


def count_prefetch_steps(pool: HiddenStatesPool | None, num_tokens: int) -> int:
    """Count the optimizer steps to load in advance; from servers, limited by the host's memory.

    Args:
        pool: servers; they give bfloat16 or float32. None without servers.
        num_tokens: tokens per step in this process.
    """
    if pool is None:
        return 1
    itemsize = 4  # float32, the widest dtype of a server
    num_bytes = num_tokens * len(pool.taps.layers) * pool.taps.hidden_size * itemsize
    room = psutil.virtual_memory().available * SHARE_OF_MEMORY
    room /= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(STEPS_AHEAD, int(room // num_bytes)))


class WaitTimer:
    """Timer of the fraction of a run's time spent waiting for data.

    Attributes:
        num_looks: number of fractions returned so far.
    """

    def __init__(self) -> None:
        self.num_looks = 0
        self.restart()

    def restart(self) -> None:
        """Forget all times."""
        self._watch, self._waited_s = Stopwatch(), 0.0

    @contextmanager
    def measure_wait(self) -> Iterator[None]:
        """Count the time inside as waiting."""
        watch = Stopwatch()
        yield
        self._waited_s += watch.host_seconds()

    def pop_wait_fraction(self) -> float:
        """Return the fraction since the last call, and restart."""
        fraction = self._waited_s / self._watch.host_seconds()
        self.num_looks += 1
        self.restart()
        return fraction


def format_server_balance(waiting: float) -> str:
    """Format a line that tells whether servers of hidden states or their trainers wait.

    Args:
        waiting: fraction of the trainers' time.
    """
    balance = "the servers keep up and could feed more processes"
    if waiting > MIN_NOTABLE_WAIT:
        times = 1 / (1 - waiting)
        balance = f"{times:.1f} times as many servers in target.engine would keep it busy"
    return f"training waits for hidden states {waiting:.0%} of the time; {balance}"
