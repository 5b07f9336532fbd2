"""`scripts/capture.py`: what is stored, and that kills, processes and full disks change nothing."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from commands import ROOT
from stores import NUM_LAYERS, SHARD_BYTES, captured, files, save_inputs, settings

from conf import files as places
from conf.errors import InputError
from conf.settings.data import StateFormat, TeacherKind
from conf.settings.scripts import CaptureRun
from conf.settings.target import Dtype
from data.features import store_writer as writer
from data.features.store_reader import FeatureStore, dequantize_batch
from data.features.store_writer import HostCopier
from eval.measure.target_answers import generate_greedy_answers
from heads.layers.documents import Documents
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.load import load_target
from heads.target_model.model import FeatureLayers
from scripts import capture as script
from scripts.capture import capture, fast_topk
from tests.conf.command.test_following import pasted
from tests.servers import relaying, serving
from tests.train.runs import ENV, TWO
from train.loop import evaluation as replay

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr(replay, "MAX_REPLAY_TOKENS", 12)
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture that nothing disturbed."""
    return captured(inputs, tmp_path_factory.mktemp("whole") / "store")


def test_states_of_a_bfloat16_target_are_its_own_to_the_bit(inputs: Path, tmp_path: Path) -> None:
    config = settings(inputs, tmp_path / "store", dtype=Dtype.bfloat16, micro_batch_size=1)
    capture(config, SHARD_BYTES)
    store = FeatureStore(tmp_path / "store")
    target = load_target(config.target, CPU)
    assert len(store.train) > 3
    assert len(store.train.shards) > 1
    for dataset in (store.train, store.heldout):
        for index in range(len(dataset)):
            row = dequantize_batch(dataset[index])
            batch = [row[name].unsqueeze(0) for name in ("input_ids", "position_ids")]
            documents = Documents.from_ids(row["document_ids"][None])
            output = target.encode_documents(*batch, documents, FeatureLayers((1, 2, 3)))
            real = row["document_ids"] >= 0
            for layer, states in {**output.layers, None: output.hidden_states}.items():
                found = row["hidden_states" if layer is None else f"layers.{layer}"]
                assert found.dtype == torch.bfloat16
                assert torch.equal(found[real], states[0][real])


def test_rows_are_those_that_training_without_a_store_packs(whole: Path, inputs: Path) -> None:
    work = script.plan_capture(settings(inputs, whole), script.join_processes(), SHARD_BYTES)
    store = FeatureStore(whole)
    for packed, stored in (
        (work.packed_by_split["train"], store.train),
        (work.packed_by_split["heldout"], store.heldout),
    ):
        assert len(packed) == len(stored)
        for index in range(len(packed)):
            found = stored[index]
            for name, expected in packed[index].items():
                assert found[name].dtype == expected.dtype
                assert torch.equal(found[name], expected)
        assert torch.equal(stored.count_token_ids(300), packed.count_token_ids(300))
    assert store.manifest.report == work.report


@pytest.mark.parametrize("state_format", [StateFormat.int8, StateFormat.fp8])
def test_top_k_teacher_and_one_byte_states(inputs, tmp_path, state_format) -> None:
    config = settings(
        inputs, tmp_path / "store", format=state_format, teacher=TeacherKind.top_k, top_k=7,
        layers=[3, 1], micro_batch_size=1, num_replay_prompts=0,
    )  # fmt: skip
    capture(config, SHARD_BYTES)
    store = FeatureStore(tmp_path / "store")
    assert len(store.replay) == 0
    target = load_target(config.target, CPU)
    row = store.train[0]
    assert {name for name in row if name[0] in "hlt" and name != "loss_mask"} == {
        "layers.1", "layers.1.scale", "layers.3", "layers.3.scale", "teacher.ids",
        "teacher.log_probs",
    }  # fmt: skip
    batch = [row[name].unsqueeze(0) for name in ("input_ids", "position_ids")]
    output = target.encode_documents(
        *batch, Documents.from_ids(row["document_ids"][None]), FeatureLayers((1, 3))
    )
    real = row["document_ids"] >= 0
    states, found = output.layers[3][0][real], dequantize_batch(row)["layers.3"][real]
    amax = states.abs().amax(1, keepdim=True)
    coarsest = amax / (254 if state_format is StateFormat.int8 else 16)
    assert ((found - states).abs() <= coarsest).all()
    # Every token that another of its document follows, the user's too.
    asked = real & (row["document_ids"] == row["document_ids"].roll(-1))
    expected = target.compute_logits(output.hidden_states[0][asked]).log_softmax(-1)
    best = expected.gather(1, row["teacher.ids"][asked].long())
    assert torch.equal(best, expected.topk(7).values)
    log_probs = row["teacher.log_probs"].float()
    assert ((log_probs[asked] - best).abs() <= 2**-11 * best.abs()).all()
    assert not asked.all()
    assert log_probs[~asked].exp().eq(0).all()


@pytest.mark.parametrize(("num_tokens", "k"), [(96, 5), (96, 13), (97, 7), (12, 12)])
def test_the_largest_are_those_of_topk(num_tokens: int, k: int) -> None:
    logits = torch.rand(50, num_tokens, generator=torch.Generator().manual_seed(0))
    logits = logits.round(decimals=1)
    values, places = fast_topk(logits, k)
    assert torch.equal(values, logits.topk(k).values)  # of equal ones it may name others
    assert torch.equal(logits.gather(1, places), values)
    assert all(len(set(row)) == k for row in places.tolist())


def test_answers_of_held_out_prompts_are_the_targets_own(whole: Path, inputs: Path) -> None:
    target = load_target(settings(inputs, whole).target, CPU)
    store = FeatureStore(whole)
    assert len(store.replay) == 2
    for index in range(2):
        row = store.replay.load_sequence(index)
        ids, answer = row["input_ids"], row["loss_mask"]
        prompt = ids[~answer].tolist()
        [alone] = generate_greedy_answers(target, [prompt], replay.MAX_REPLAY_TOKENS)
        assert ids[answer].tolist() == alone
        output = target.encode_text(ids[:-1].tolist(), FeatureLayers((2,)))
        expected = output.layers[2][0].bfloat16().float()
        torch.testing.assert_close(row["layers.2"][:-1].float(), expected, rtol=2**-7, atol=1e-5)


def test_the_ends_are_the_targets(whole: Path, inputs: Path) -> None:
    target = load_target(settings(inputs, whole).target, CPU)
    ends = EmbeddingsAndOutputHead.from_folder(whole / "target", CPU)
    states = torch.randn(3, target.hidden_size)
    assert torch.equal(ends.compute_logits(states), target.compute_logits(states))
    assert torch.equal(ends.embedding.weight, target.embedding.weight)
    for name in (
        "name", "dtype", "device", "hidden_size", "vocab_size", "num_layers", "stop_ids",
        "special_ids", "has_plain_head",
    ):  # fmt: skip
        assert getattr(ends, name) == getattr(target, name), name
    assert ends.tokenizer.chat_template == target.tokenizer.chat_template


def test_a_second_start_does_nothing_twice(whole, inputs, monkeypatch) -> None:
    def stop(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(script, "load_target", stop)
    before = files(whole)
    captured(inputs, whole)
    assert files(whole) == before


def test_a_damaged_shard_is_written_again(whole: Path, inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "store")
    path = tmp_path / "store/train-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 64
    path.write_bytes(content)
    assert files(captured(inputs, tmp_path / "store")) == files(whole)


def killed(action: Callable[[], object], where: ModuleType, name: str, number: int) -> None:
    """Runs in a child that kills itself as it calls `where.name` for the number-th time."""
    child = os.fork()
    if child == 0:
        real, calls = getattr(where, name), []

        def call(*arguments: object) -> object:
            calls.append(1)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        setattr(where, name, call)
        action()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("where", "name", "number"),
    [
        (writer, "memory_of", 12),  # in the middle of the first shard
        (os, "replace", 8),  # between some shard and its index
        (os, "replace", 38),  # the manifest
    ],
)
def test_kill_9_then_a_second_start_equals_an_uninterrupted_one(
    whole: Path, inputs: Path, tmp_path: Path, where: ModuleType, name: str, number: int
) -> None:
    out_dir = tmp_path / "store"
    killed(lambda: captured(inputs, out_dir), where, name, number)
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        FeatureStore(out_dir)
    assert files(captured(inputs, out_dir)) == files(whole)


def test_copies_of_a_batch_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three rows to a batch, the first wait is for the first batch, in the third one."""
    waits: list[int] = []

    class Event:
        def __init__(self) -> None:
            self.number = next(numbers)

        def record(self) -> None: ...

        def synchronize(self) -> None:
            waits.append(self.number)

    numbers = itertools.count()
    stream = SimpleNamespace(wait_stream=lambda _other: None, device=None)
    for name, fake in {
        "Stream": lambda _device: stream, "current_stream": lambda _device: stream,
        "stream": nullcontext, "Event": Event,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(HostCopier, "_copy_to_host", lambda _self, tensor: tensor)
    copies = HostCopier(torch.device("cuda"), 3, 0)
    for number in range(9):
        copies.start_copy({"states": torch.zeros(1)})
        assert waits == list(range(number - 5)), number


def in_turn(processes: int, config: CaptureRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture by several processes, one after the other, the first one last."""
    real = script.join_processes()
    for index in reversed(range(processes)):
        state = SimpleNamespace(
            process_index=index, num_processes=processes, is_main_process=index == 0,
            device=real.device, wait_for_everyone=lambda: None,
            main_process_first=real.main_process_first,
        )  # fmt: skip
        monkeypatch.setattr(script, "join_processes", lambda state=state: state)
        if index == processes - 1:  # what the first one does before the others go on
            script.plan_capture(config, state, SHARD_BYTES).plan.save(Path(config.out_dir))
        capture(config, SHARD_BYTES)


def test_shards_do_not_depend_on_who_writes_them(whole, inputs, tmp_path, monkeypatch) -> None:
    in_turn(3, settings(inputs, tmp_path / "store"), monkeypatch)
    assert files(tmp_path / "store") == files(whole)


@pytest.mark.slow
def test_two_processes_equal_one(inputs: Path, tmp_path: Path) -> None:
    arguments = [
        str(ROOT / "scripts/capture.py"), f"target.path={inputs / 'target'}",
        f"data.path={inputs / 'chat.jsonl'}",
        "data.max_length=128", "data.eval_fraction=0.2",
    ]  # fmt: skip
    for launcher, name in (([sys.executable], "one"), (TWO, "two")):
        done = subprocess.run(
            [*launcher, *arguments, f"out_dir={tmp_path / name}"],
            env=ENV, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("features saved to") == 1
        script, following = pasted(done.stdout)
        assert (script, following.data.features) == ("train/eagle.py", str(tmp_path / name))
    assert files(tmp_path / "two") == files(tmp_path / "one")


def test_a_full_disk_is_said_and_a_second_start_continues(
    whole: Path, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.fsync, [0] * 6

    def fsync(descriptor: int) -> None:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.pop()
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(InputError, match="No space left on device"):
            captured(inputs, tmp_path / "store")
    assert not list(tmp_path.rglob("*.safetensors.tmp"))
    assert files(captured(inputs, tmp_path / "store")) == files(whole)


def test_too_small_a_disk_is_refused_before_the_target_is_loaded(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20 // 2))
    monkeypatch.setattr(places, "LEAST_FREE", 0)
    config = settings(inputs, tmp_path / "store")
    with pytest.raises(InputError, match=r"needs 0\.00 GiB more, but 0\.00 GiB are free"):
        capture(config, SHARD_BYTES)
    assert not (tmp_path / "store").exists()
    said = capsys.readouterr().out
    assert "store: bf16, last hidden state, layers 1, 2, 3, 521 bytes/token" in said
    for line in ("bf16: 521 bytes/token", "fp8: 281 bytes/token", "int8: 281 bytes/token"):
        assert f"  {line}, 0.00 GiB\n" in said


def test_what_the_folder_or_the_target_does_not_allow_is_refused(whole, inputs, tmp_path) -> None:
    (tmp_path / "mine/file").parent.mkdir()
    (tmp_path / "mine/file").touch()
    new = tmp_path / "store"
    for out_dir, changes, message in (
        (whole, {"format": StateFormat.int8}, r"format was 'bf16', is 'int8'; type another"),
        (whole, {"seed": 3}, r"another way: seed was 0, is 3"),
        (whole, {"dtype": Dtype.bfloat16}, r"target\.dtype was 'float32', is 'bfloat16'"),
        (tmp_path / "mine", {}, "is not empty and holds no capture"),
        (tmp_path / "mine/file", {}, "is a file"),
        (new, {"layers": [1, 5]}, r"layers=\[1, 5\]: .* has hidden states 0\.\.4"),
        (new, {"layers": [1, 1]}, r"layers=\[1, 1\]: .* has hidden states 0\.\.4"),
    ):
        with pytest.raises(InputError, match=message):
            captured(inputs, out_dir, **changes)


def test_answers_that_a_generation_config_would_change_are_another_store(
    whole: Path, inputs: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "store")
    shutil.copytree(inputs, tmp_path / "inputs")
    path = tmp_path / "inputs/target/generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.5}))
    with pytest.raises(InputError, match=r"_config\.repetition_penalty was None, is 1\.5"):
        captured(tmp_path / "inputs", tmp_path / "store")


def test_what_was_killed_before_it_had_a_plan_is_begun_again(whole, inputs, tmp_path) -> None:
    (tmp_path / "capture.json.tmp").write_text('{"vers')
    lock = tmp_path / ".lock.0a1b.tmp"
    lock.touch()
    store = captured(inputs, tmp_path)
    lock.unlink()
    assert files(store) == files(whole)


def test_an_output_head_that_is_no_plain_projection_is_refused(inputs, tmp_path) -> None:
    target = load_target(settings(inputs, tmp_path).target, CPU)
    hook = target.output_head.register_forward_hook(lambda _module, _inputs, output: output * 2)
    with pytest.raises(InputError, match="is more than a projection"):
        script.save_embeddings_and_head(target, tmp_path / "target")
    hook.remove()
    weight = target.output_head.weight.to(torch.int8)
    target.output_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(InputError, match="output head is quantised"):
        target.save(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_says_where_a_store_is_from(whole: Path, inputs: Path) -> None:
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["target"]["name"] == str(inputs / "target")
    for name in ("config", "tokenizer", "template", "weights"):
        assert len(manifest["target"][name]) == 64
    assert manifest["contents"]["layers"] == [1, 2, 3]
    assert (manifest["max_length"], manifest["seed"], manifest["pad_id"]) == (128, 0, 0)
    assert manifest["sha256"] == manifest["provenance"]["data"]["sha256"]
    assert {"versions", "python", "argv", "git", "config"} <= set(manifest["provenance"])
    for entry in manifest["shards"]:
        assert (whole / f"{entry['name']}.safetensors").stat().st_size == entry["size"]


@pytest.mark.parametrize("seen", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_states_may_come_from_an_engine(seen, inputs, tmp_path, monkeypatch) -> None:
    """From its folder, or over a relay where this machine does not see it."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    whole = captured(inputs, tmp_path / "whole", layers=[1, 2])
    target = load_target(settings(inputs, tmp_path).target, CPU)
    with serving(target, tmp_path, [1, 2, NUM_LAYERS]) as server, relaying(server.folder) as relay:
        config = settings(inputs, tmp_path / "store", layers=[1, 2])
        config.target.engine = [server.url]
        if not seen:
            server.told_folder = Path("/elsewhere") / server.folder.name
            config.target.relay = [relay.url]
        # Two sequences in a shard, so that they are asked for together.
        capture(config, 4 * SHARD_BYTES)
    store, local = FeatureStore(tmp_path / "store"), FeatureStore(whole)
    for index in range(len(store.train)):
        expected = local.train[index]
        for name, found in store.train[index].items():
            torch.testing.assert_close(found, expected[name], rtol=2**-7, atol=1e-5)
    for index in range(2):
        expected = local.replay.load_sequence(index)
        assert torch.equal(store.replay.load_sequence(index)["input_ids"], expected["input_ids"])
    with pytest.raises(InputError, match=r"target\.by_engine was True, is False"):
        capture(settings(inputs, tmp_path / "store", layers=[1, 2]), 4 * SHARD_BYTES)
