"""A feature store is written, read and refused byte by byte."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from conf.errors import InputError
from conf.files import compute_file_checksum, retry_io
from conf.settings.data import StateFormat, TeacherKind
from conf.settings.scripts import CaptureRun
from data.features.store_format import (
    TOKEN_COUNTS,
    Manifest,
    ShardEntry,
    Split,
    StoreContents,
    StorePlan,
    dequantize_states,
    is_shard_whole,
    quantize_states,
)
from data.features.store_reader import FeatureStore, dequantize_batch
from data.features.store_writer import (
    ALIGNMENT,
    HostCopier,
    PlannedShard,
    ShardWriterPool,
    plan_shards,
    write_shard,
)

D, T = 8, 6
LENGTHS = {"train": [[3, 6], [1]], "heldout": [[4]], "replay": [[5]]}


def contents(state_format: StateFormat, teacher: TeacherKind = TeacherKind.hidden) -> StoreContents:
    k = 2 if teacher is TeacherKind.top_k else 0
    return StoreContents(D, (1, 3), teacher, k, state_format)


def sequence(kept: StoreContents, num_tokens: int, seed: int) -> dict[str, Tensor]:
    """Tokens of two documents, the first of one token, and random states."""
    generator = torch.Generator().manual_seed(seed)
    found = {
        "input_ids": torch.arange(num_tokens, dtype=torch.int32) + 10,
        "document_ids": (torch.arange(num_tokens) > 0).int(),
        "loss_mask": torch.arange(num_tokens) > 1,
    }
    for name in kept.state_names:
        states = torch.randn(num_tokens, D, generator=generator)
        found[name], scale = quantize_states(states, kept.format)
        if scale is not None:
            found[name + ".scale"] = scale
    if kept.top_k:
        found["teacher.ids"] = torch.randint(9, (num_tokens, 2), generator=generator).int()
        found["teacher.log_probs"] = -torch.rand(num_tokens, 2, generator=generator).half()
    return found


def make_store(folder: Path, kept: StoreContents) -> dict[str, list[dict[str, Tensor]]]:
    """A whole store of random states; returns what each split holds."""
    folder.mkdir()
    entries, written = [], {}
    for split, shards in LENGTHS.items():
        written[split] = []
        for number, lengths in enumerate(shards):
            name = f"{split}-{number:05}"
            held = [sequence(kept, n, 10 * number + n) for n in lengths]
            index = write_shard(folder, name, kept.tensor_specs, held)
            entries.append(ShardEntry(name, split, index.size, index.checksum))
            written[split] += held
    counts = {split: torch.tensor([0, 7, 2]) for split in ("train", "heldout")}
    (folder / TOKEN_COUNTS).write_bytes(save(counts))
    splits = {name: Split(1, 1, 5, "") for name in LENGTHS}
    plan = StorePlan({}, kept, {}, "", T, 7, 0, splits, 1)
    files = {TOKEN_COUNTS: compute_file_checksum(folder / TOKEN_COUNTS)}
    Manifest(plan, entries, files, {}).save(folder)
    return written


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("state_format", [StateFormat.int8, StateFormat.fp8])
def test_one_byte_states_are_off_by_no_more_than_half_a_step(state_format: StateFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-30, 30, 400).unsqueeze(1)
    states = torch.randn(400, 256, generator=generator) * size
    states[7, 3], states[8] = 0, 0
    values, scale = quantize_states(states, state_format)
    assert scale is not None
    assert (values.dtype.itemsize, scale.shape) == (1, (400,))
    error = (dequantize_states(values, scale) - states).abs()
    amax = states.abs().amax(1, keepdim=True)
    if state_format is StateFormat.int8:
        allowed = amax / 254
    else:
        allowed = torch.maximum(states.abs() * 2**-4, amax / 448 * 2**-10)
    assert (error <= allowed * (1 + 1e-5)).all()
    assert error[8].eq(0).all()


def test_rounding_is_to_the_nearest_value() -> None:
    values, scale = quantize_states(torch.tensor([[127.0, 2.4, 2.6, -2.6]]), StateFormat.int8)
    assert (values.tolist(), scale.tolist()) == ([[127, 2, 3, -3]], [1.0])
    values, scale = quantize_states(torch.tensor([[448.0, 17.0, 19.0, -21.0]]), StateFormat.fp8)
    assert (values.float().tolist(), scale.tolist()) == ([[448, 16, 20, -20]], [1.0])
    values, scale = quantize_states(torch.tensor([[1.00390625, 3.0]]), StateFormat.bf16)
    assert (values.float().tolist(), scale) == ([[1.0, 3.0]], None)


def test_a_token_that_is_not_finite_stays_that() -> None:
    for state_format in (StateFormat.int8, StateFormat.fp8):
        for bad in (float("nan"), float("inf")):
            values, scale = quantize_states(torch.tensor([[1.0, bad], [1.0, 2.0]]), state_format)
            found = dequantize_states(values, scale)
            assert found.isfinite().all(1).tolist() == [False, True]


def test_bytes_per_token_of_a_target_with_4096_channels() -> None:
    def size(state_format: StateFormat, teacher: TeacherKind, k: int) -> int:
        return StoreContents(4096, (2, 16, 29), teacher, k, state_format).bytes_per_token

    states, tokens = 4 * 4096 * 2, 4 + 4 + 1
    assert size(StateFormat.bf16, TeacherKind.hidden, 0) == states + tokens
    assert states == 32 * 1024
    for small in (StateFormat.fp8, StateFormat.int8):
        assert size(small, TeacherKind.hidden, 0) == 4 * (4096 + 4) + tokens
        assert size(small, TeacherKind.top_k, 128) == 3 * (4096 + 4) + 128 * 6 + tokens
        assert size(small, TeacherKind.top_k, CaptureRun().top_k) <= 13 * 1024


@pytest.mark.parametrize(
    ("state_format", "teacher"),
    [
        (StateFormat.bf16, TeacherKind.hidden),
        (StateFormat.fp8, TeacherKind.hidden),
        (StateFormat.int8, TeacherKind.top_k),
    ],
)
def test_what_is_written_is_read_and_padded(
    state_format: StateFormat, teacher: TeacherKind, tmp_path: Path
) -> None:
    kept = contents(state_format, teacher)
    written = make_store(tmp_path / "store", kept)
    store = FeatureStore(tmp_path / "store")
    assert [len(each) for each in (store.train, store.heldout, store.replay)] == [3, 1, 1]
    for number, expected in enumerate(written["train"]):
        found = store.train[number]
        assert set(found) == {*expected, "position_ids"}
        n = len(expected["input_ids"])
        for name in set(found) - {"input_ids", "document_ids", "position_ids"}:
            assert found[name].dtype == expected[name].dtype
            assert bits(found[name][:n]) == bits(expected[name])
            padding = found[name][n:].float()
            assert padding.eq(-65504 if name == "teacher.log_probs" else 0).all()
    assert store.replay.load_sequence(0)["input_ids"].tolist() == [10, 11, 12, 13, 14]


def test_a_stored_sequence_looks_like_a_packed_one(tmp_path: Path) -> None:
    make_store(tmp_path / "store", contents(StateFormat.bf16))
    found = FeatureStore(tmp_path / "store").heldout[0]
    expected = {
        "input_ids": [10, 11, 12, 13, 7, 7],
        "loss_mask": [False, False, True, True, False, False],
        "position_ids": [0, 0, 1, 2, 0, 0],
        "document_ids": [0, 1, 1, 1, -1, -1],
    }
    for name, values in expected.items():
        assert found[name].tolist() == values, name
        assert found[name].dtype == (torch.bool if name == "loss_mask" else torch.int64)


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    kept = contents(StateFormat.fp8)
    held = [sequence(kept, n, n) for n in (3, 2)]
    index = write_shard(tmp_path, "train-00000", kept.tensor_specs, held)
    assert (index.num_tokens, index.size) == (
        [3, 2],
        (tmp_path / "train-00000.safetensors").stat().st_size,
    )
    with safe_open(tmp_path / "train-00000.safetensors", "pt") as file:
        assert set(file.keys()) == set(held[0])
        for name in file.keys():  # noqa: SIM118  not a mapping
            assert bits(file.get_slice(name)[3:]) == bits(held[1][name])


def test_restored_states_are_numbers_and_the_rest_passes(tmp_path: Path) -> None:
    make_store(tmp_path / "store", contents(StateFormat.int8))
    train = FeatureStore(tmp_path / "store").train
    rows = [train[0], train[1]]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    found = dequantize_batch(batch)
    assert found["input_ids"] is batch["input_ids"]
    assert {name for name in batch if name not in found} == {
        "hidden_states.scale", "layers.1.scale", "layers.3.scale",
    }  # fmt: skip
    for name in ("hidden_states", "layers.1", "layers.3"):
        scale = batch[f"{name}.scale"].unsqueeze(-1)
        assert torch.equal(found[name], batch[name].float() * scale)
        assert found[name].shape == (2, T, D)
    plain = {"layers.1": torch.ones(1, 2, 3, dtype=torch.bfloat16)}
    assert dequantize_batch(plain) == plain


def test_one_flipped_bit_is_named_and_its_neighbours_are_read(tmp_path: Path) -> None:
    kept = contents(StateFormat.int8)
    make_store(tmp_path / "store", kept)
    path = tmp_path / "store/train-00000.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    total = 9  # tokens: the second sequence has the last 6 of each tensor
    place = header
    for field in kept.tensor_specs:
        place += total * field.num_bytes
        damaged = bytearray(whole)
        damaged[place - 1] ^= 1
        path.write_bytes(damaged)
        train = FeatureStore(tmp_path / "store").train
        with pytest.raises(InputError, match=r"train-00000\.safetensors: sequence 1 is damaged"):
            train[1]
        assert len(train[0]) == len(train[2]) == len(kept.tensor_specs) + 1
        assert not is_shard_whole(tmp_path / "store", "train-00000")
    path.write_bytes(whole)
    assert is_shard_whole(tmp_path / "store", "train-00000")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: (s / "manifest.json").unlink(), r"manifest\.json is missing.*capture\.py"),
        (lambda s: (s / "manifest.json").write_text("{"), r"manifest\.json: not JSON"),
        (lambda s: (s / "train-00001.safetensors").unlink(), r"train-00001\.safetensors: missing"),
        (
            lambda s: os.truncate(s / "heldout-00000.safetensors", 600),
            r"heldout-00000\.safetensors: 600 bytes long, but",
        ),
        (lambda s: (s / "train-00000.json").unlink(), r"train-00000\.json: missing or damaged"),
        (lambda s: (s / "train-00000.json").write_text("[]"), r"missing or damaged"),
        (
            lambda s: (s / "train-00000.json").write_text((s / "train-00001.json").read_text()),
            r"train-00000\.json: not the index of the manifest",
        ),
        (
            lambda s: (s / "manifest.json").write_text('{"version": 2}'),
            r"version 2 of the format, but this Headsmith reads version 1",
        ),
    ],
)
def test_a_store_that_is_not_whole_is_refused(change, message: str, tmp_path: Path) -> None:
    make_store(tmp_path / "store", contents(StateFormat.bf16))
    change(tmp_path / "store")
    with pytest.raises(InputError, match=message):
        FeatureStore(tmp_path / "store")


def test_a_shard_that_shrinks_after_the_start_is_an_error(tmp_path: Path) -> None:
    make_store(tmp_path / "store", contents(StateFormat.bf16))
    train = FeatureStore(tmp_path / "store").train
    path = tmp_path / "store/train-00000.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert len(train[0]["input_ids"]) == T
    with pytest.raises(InputError, match="sequence 1 is cut off"):
        train[1]
    path.unlink()
    with pytest.raises(InputError, match="No such file"):
        train[0]


def test_token_counts_come_with_the_store_and_are_checked(tmp_path: Path) -> None:
    make_store(tmp_path / "store", contents(StateFormat.bf16))
    store = FeatureStore(tmp_path / "store")
    assert store.train.count_token_ids(3).tolist() == [0, 7, 2]
    path = tmp_path / "store" / TOKEN_COUNTS
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(InputError, match=r"token_counts\.safetensors: damaged"):
        store.train.count_token_ids(3)


def test_a_split_is_cut_where_the_next_sequence_would_not_fit() -> None:
    shards = plan_shards("train", [4, 5, 1, 30, 2, 2], bytes_per_token=10, shard_bytes=100)
    assert shards == [
        PlannedShard("train-00000", "train", 0, 3, 10),
        PlannedShard("train-00001", "train", 3, 4, 30),
        PlannedShard("train-00002", "train", 4, 6, 4),
    ]
    assert plan_shards("replay", [], 10, 100) == []


def test_an_error_that_passes_is_tried_again_and_one_that_stays_is_not() -> None:
    waits: list[float] = []
    left = [errno.EIO, errno.ESTALE]

    def action() -> str:
        if left:
            raise OSError(left.pop(), "for a moment")
        return "done"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conf.files.time.sleep", waits.append)
        assert retry_io(action) == "done"
        assert waits == [0.5, 1.0]
        left += [errno.EIO] * 4
        with pytest.raises(OSError, match="for a moment"):
            retry_io(action)
        assert left == []
        for number in (errno.ENOSPC, errno.ENOENT, errno.EACCES):
            left[:] = [errno.EIO, number]
            with pytest.raises(OSError, match="for a moment"):
                retry_io(action)
            assert left == [errno.EIO]


def test_a_write_that_failed_for_a_moment_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, left, real = contents(StateFormat.bf16), [errno.EIO], os.fsync

    def fsync(descriptor: int) -> None:
        if left:
            raise OSError(left.pop(), "for a moment")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("conf.files.time.sleep", lambda _: None)
    write_shard(tmp_path, "train-00000", kept.tensor_specs, [sequence(kept, 3, 0)])
    assert is_shard_whole(tmp_path, "train-00000")
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}


def test_what_a_writer_raises_the_next_call_raises() -> None:
    def fail() -> None:
        raise InputError("disk")

    with pytest.raises(InputError, match="disk"), ShardWriterPool() as writers:
        writers.submit_job(fail)
        while True:
            writers.raise_job_error()
    with pytest.raises(InputError, match="disk"), ShardWriterPool() as writers:
        writers.submit_job(fail)
    done: list[int] = []
    with ShardWriterPool() as writers:
        for number in range(20):
            writers.submit_job(lambda number=number: done.append(number))
    assert sorted(done) == list(range(20))


COPIED = [400, 371, 512, 512, 90, 488, 512, 33, 505, 460, 512, 512]


def rounded(size: int) -> int:
    """Bytes, as torch rounds them."""
    return 1 << (size - 1).bit_length()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each pinned tensor, on a device whose copies are done at once."""
    sizes, empty = list[int](), torch.empty

    def noted(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        found: Tensor = empty(*shape, **options)
        if pin_memory:
            sizes.append(found.numel() * found.element_size())
        return found

    stream = SimpleNamespace(wait_stream=lambda _other: None, device=None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    for name, fake in {
        "Stream": lambda _device: stream, "current_stream": lambda _device: stream,
        "stream": nullcontext, "Event": lambda: event,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch, "empty", noted)
    return sizes


@pytest.mark.parametrize(("width", "expected"), [(80, 1.1), (130, 1.0), (256, 1.1)])
def test_little_of_what_is_pinned_is_wasted(width: int, expected: float, asked: list[int]) -> None:
    taken, kept = [], []
    lengths = COPIED * 8
    total = sum(lengths) * (3 * 2 * width + 2)
    copies = HostCopier(torch.device("cuda"), 1, int(expected * total))
    for length in lengths:
        tensors = {str(n): torch.randn(length, width).bfloat16() for n in range(3)}
        tensors["scale"] = torch.randn(length).half()
        kept.append(tensors)
        taken.append(copies.start_copy(tensors)())
    for found, wanted in zip(taken, kept, strict=True):
        assert all(found[name].equal(wanted[name]) for name in wanted)
        assert all(
            each.data_ptr() % ALIGNMENT == taken[0]["0"].data_ptr() % ALIGNMENT
            for each in found.values()
        )
    assert sum(map(rounded, asked)) < 1.12 * total


def test_a_tensor_larger_than_was_expected_has_a_block_of_its_own(asked: list[int]) -> None:
    copies = HostCopier(torch.device("cuda"), 1, 10)
    for tensor in (torch.arange(1000), torch.zeros(0, 3), torch.tensor(5)):
        assert copies.start_copy({"x": tensor})()["x"].equal(tensor)
    assert asked == [8192]
