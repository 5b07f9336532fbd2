"""Training from a feature store, and heads that go on: what fits, and what comes out of it."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exported import edited_json
from stores import NUM_LAYERS, captured, save_inputs, settings
from toys import noisy_head, save_target

from conf.errors import InputError
from conf.settings.data import DataConfig, RowsConfig, TeacherKind
from conf.settings.eagle import EagleConfig, EagleForm, EagleRun
from conf.settings.medusa import MedusaConfig, MedusaRun
from conf.settings.scripts import RegenerateRun
from conf.settings.target import Dtype, TargetConfig
from conf.settings.training import TrainConfig
from data.features.store_reader import StoredDataset
from eval.measure.target_answers import LocalAnswerSource
from heads.eagle.eagle import EagleHead
from heads.kinds import load_head
from heads.medusa import MedusaHead
from heads.target_model.embeddings_and_output_head import EmbeddingsAndOutputHead
from heads.target_model.identity import format_target_change, identify_target
from heads.target_model.load import load_target, load_target_tokenizer
from heads.target_model.model import FeatureLayers
from heads.vocab import DraftVocab
from scripts import regenerate
from tests.train.runs import curve as column
from train import eagle, medusa
from train.loop import loop, sources
from train.loop.command import TrainingCommand
from train.loop.evaluation import make_heldout_replay, make_stored_replay
from train.loop.loop import Outcome, TrainingJob
from train.loop.sources import (
    check_feature_layers,
    format_authorship,
    load_embeddings_and_head,
    load_store,
    load_target_source,
)
from train.objective import Objective

CPU = torch.device("cpu")
AS_TRAINED: dict[str, Any] = {"dtype": Dtype.bfloat16, "micro_batch_size": 1}
"""A capture reads one sequence at a time, as training does."""


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, a target, and one of the same shape in `changed`."""
    folder = save_inputs(tmp_path_factory.mktemp("inputs"))
    save_target(folder / "changed", seed=1, num_hidden_layers=NUM_LAYERS)
    return folder


@pytest.fixture(scope="module")
def store(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(inputs, tmp_path_factory.mktemp("store") / "hidden", **AS_TRAINED)


@pytest.fixture(scope="module")
def top_k(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without last hidden states."""
    folder = tmp_path_factory.mktemp("store") / "top_k"
    return captured(inputs, folder, **AS_TRAINED, teacher=TeacherKind.top_k)


def open_with(store: Path, target: dict[str, Any] | None = None, **data: Any) -> None:
    load_store(DataConfig(features=str(store), **data), TargetConfig(**(target or {})))


def test_what_agrees_with_the_store_may_be_said_again(store: Path, inputs: Path) -> None:
    open_with(store)
    open_with(store, {"path": str(inputs / "target"), "dtype": Dtype.bfloat16})
    open_with(store, path=str(inputs / "chat.jsonl"), max_length=128, eval_fraction=0.2)


@pytest.mark.parametrize(
    ("target", "data", "message"),
    [
        ({}, {"max_length": 64}, r"data\.max_length=64: .*captured with data\.max_length=128"),
        (
            {},
            {"path": "other.jsonl"},
            r"data\.path=other\.jsonl: .*captured with data\.path=.*chat",
        ),
        ({}, {"num_prompts": 3}, r"data\.num_prompts=3: .*data\.num_prompts=None; leave it unset"),
        ({"dtype": Dtype.float32}, {}, r"target\.dtype=float32: .* captured in bfloat16"),
        ({"adapter": "lora"}, {}, r"target\.adapter=lora: .* captured with target\.adapter=None"),
        ({"revision": "v2"}, {}, r"target\.revision=v2: .* captured with target\.revision=None"),
    ],
)
def test_settings_that_contradict_the_store(
    store: Path, target: dict, data: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        open_with(store, target, **data)


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("named", ["config", "tokenizer", "template", "weights"])
def test_another_target_is_refused(store: Path, inputs: Path, tmp_path: Path, named: str) -> None:
    folder = shutil.copytree(inputs / "target", tmp_path / "copy")
    open_with(store, {"path": str(folder)})
    if named == "config":
        with edited_json(folder / "config.json") as content:
            content["rms_norm_eps"] = 1e-5
    elif named == "tokenizer":
        with edited_json(folder / "tokenizer.json") as content:
            content["added_tokens"][-1]["lstrip"] = True
    elif named == "template":
        (folder / "chat_template.jinja").write_text("{{ 1 }}")
    else:
        flip_last_bit(folder / "model.safetensors")
    said = rf"not the target of .*: target\.{named} was \w{{12}}, is \w{{12}}\. Leave"
    with pytest.raises(InputError, match=said):
        open_with(store, {"path": str(folder)})


def test_what_is_not_there_is_refused(store: Path, inputs: Path, tmp_path: Path) -> None:
    target = {"path": str(inputs / "target"), "adapter": str(tmp_path)}
    with pytest.raises(InputError, match=rf"target\.adapter={tmp_path}: .*adapter_config\.json"):
        open_with(store, target)
    with pytest.raises(InputError, match=rf"data\.features={tmp_path}: manifest"):
        open_with(tmp_path)


def test_damaged_ends_are_refused(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "store")
    flip_last_bit(tmp_path / "store/target/ends.safetensors")
    opened = load_store(DataConfig(features=str(tmp_path / "store")), TargetConfig())
    with pytest.raises(InputError, match=r"ends\.safetensors: damaged"):
        load_embeddings_and_head(opened, CPU)


def test_heads_that_read_what_is_not_stored_are_refused(store: Path, top_k: Path) -> None:
    hidden, without = (
        load_store(DataConfig(features=str(each)), TargetConfig()) for each in (store, top_k)
    )
    for fits in (FeatureLayers(), FeatureLayers((1,)), FeatureLayers((3, 1))):
        check_feature_layers(hidden, fits)
    check_feature_layers(without, FeatureLayers((1, 2, 3)))
    with pytest.raises(InputError, match=r"head\.layers=\[4\]: .* has \[1, 2, 3\]; .*=\[1,4\]"):
        check_feature_layers(hidden, FeatureLayers((4, 1)))
    with pytest.raises(InputError, match="teacher=top_k, without the last hidden states"):
        check_feature_layers(without, FeatureLayers())


def fitted(config: MedusaRun, monkeypatch: pytest.MonkeyPatch) -> TrainingJob:
    """The job of a training run, which itself is left out."""
    jobs: list[TrainingJob] = []

    def fit(_accelerator: object, job: TrainingJob) -> Outcome:
        jobs.append(job)
        return Outcome(True, 0, {}, {"step": 0})

    def build(_self: Any, _config: Any, target: Any, _train: Any) -> tuple[Any, list[str]]:
        class Two(Objective):
            head = MedusaHead.from_target(target, num_heads=2, num_layers=1)
            term_weights = torch.ones(2)

        two = Two()
        two.target = target
        return two, ["head: two"]

    def stop(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(loop, "fit_head", fit)
    monkeypatch.setattr(sources, "load_target", stop)
    monkeypatch.setattr(TrainingCommand, "build_objective", build)
    medusa.main(config)
    return jobs[0]


def test_a_run_from_a_store_needs_neither_target_nor_data(
    store: Path,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("HEADSMITH_CACHE", str(tmp_path / "none"))
    config = MedusaRun(data=DataConfig(features=str(store)), out_dir=str(tmp_path / "out"))
    job = fitted(config, monkeypatch)
    assert isinstance(job.train, StoredDataset)
    assert (job.train.split, len(job.train)) == ("train", 12)
    assert len(job.heldout) == 3
    assert job.provenance["target"] == str(inputs / "target")
    assert job.provenance["data"]["num_records"] == 40
    stated = job.provenance["trained_on"]
    assert (stated["target_dtype"], stated["num_prompts"]) == ("bfloat16", 32)
    assert job.head_documents["trained_prompts.json"]["num_prompts"] == 32
    assert job.objective.head.config.target == str(inputs / "target")
    assert job.evaluate is not None
    opened = load_store(config.data, TargetConfig())
    head = job.objective.head.eval()
    replay = make_stored_replay(
        load_embeddings_and_head(opened, CPU), opened.replay, 16, 2, head.taps
    )
    assert job.evaluate(head) == replay(head)
    said = capsys.readouterr().out
    assert f"target: {inputs / 'target'}\n" in said
    assert "bf16, last hidden state, layers 1, 2, 3, 521 bytes/token" in said
    config = MedusaRun(data=config.data, out_dir=str(tmp_path / "out"))
    config.train.num_replay_prompts = 0
    assert fitted(config, monkeypatch).evaluate is None


def eagle3(target: EmbeddingsAndOutputHead) -> EagleHead:
    counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))
    config = EagleConfig(form=EagleForm.eagle3, layers=[1, 2, 3])
    return EagleHead.from_settings(target, config, DraftVocab.from_counts(counts, 100, [0]), seed=0)


@pytest.mark.parametrize("teacher", ["store", "top_k"])
def test_tau_from_a_store_is_that_of_the_target(
    teacher: str, inputs: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(teacher)
    opened = load_store(DataConfig(features=str(folder)), TargetConfig())
    ends = load_embeddings_and_head(opened, CPU)
    target = load_target(settings(inputs, folder, dtype=Dtype.bfloat16).target, CPU)
    heads = [(eagle3(ends), eagle3(target))]
    if teacher == "store":
        heads.append((noisy_head(ends), noisy_head(target)))
    for mine, theirs in heads:
        stored = make_stored_replay(ends, opened.replay, 16, 3, mine.taps)
        live = make_heldout_replay(LocalAnswerSource(target), stored.prompts, 3, theirs.taps)
        assert len(stored.prompts) == 2
        assert [answer for answer, _ in stored.answers] == [answer for answer, _ in live.answers]
        assert stored(mine.eval()) == live(theirs.eval())
    assert len(make_stored_replay(ends, opened.replay, 1, 3, FeatureLayers((1,))).prompts) == 1


def curve(config: MedusaRun | EagleRun) -> list[float]:
    """Losses of a run, trained and held out, and its tau."""
    entry = medusa if isinstance(config, MedusaRun) else eagle
    config.train = TrainConfig(
        max_steps=3, batch_size=2, warmup_steps=1, log_steps=1, num_eval_sequences=2,
        num_replay_prompts=1, learning_rate=1e-2,
    )  # fmt: skip
    entry.main(config)
    names = ("train/loss", "eval/loss", "eval/tau")
    return [value for name in names for value in column(Path(config.out_dir), name)]


def from_store(run: Any, store: Path, out_dir: Path) -> list[float]:
    return curve(run(data=DataConfig(features=str(store)), out_dir=str(out_dir)))


def with_target(run: Any, inputs: Path, out_dir: Path) -> list[float]:
    given = settings(inputs, out_dir, dtype=Dtype.bfloat16)
    return curve(run(target=given.target, data=given.data, out_dir=str(out_dir)))


def test_losses_from_a_store_are_those_with_the_target(
    store: Path, top_k: Path, inputs: Path, tmp_path: Path
) -> None:
    """A byte a number is near: `tests/heads/test_kinds.py`."""
    for run in (MedusaRun, EagleRun):
        online = with_target(run, inputs, tmp_path / f"{run.__name__}-online")
        assert len(online) == 5
        assert from_store(run, store, tmp_path / f"{run.__name__}-store") == online
    *_, tau = from_store(EagleRun, top_k, tmp_path / "from-top-k")
    opened = load_store(DataConfig(features=str(top_k)), TargetConfig())
    ends = load_embeddings_and_head(opened, CPU)
    head = load_head(str(tmp_path / "from-top-k/head")).attach(ends).eval()
    replay = make_stored_replay(ends, opened.replay, 1, 7, head.taps)
    assert tau == pytest.approx(replay(head).figures["tau"])


@pytest.mark.parametrize(
    "family",
    ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "qwen3_next"))],
)
def test_sinks_and_states_change_nothing_about_that(family: str, tmp_path: Path) -> None:
    inputs = save_inputs(tmp_path, family)
    online = with_target(EagleRun, inputs, tmp_path / "online")
    store = captured(inputs, tmp_path / "store", **AS_TRAINED)
    assert from_store(EagleRun, store, tmp_path / "offline") == online


def test_tied_ends_and_biases_are_kept(tmp_path: Path) -> None:
    for name, changes in (("tied", {"tie_word_embeddings": True}), ("biased", {})):
        folder = save_target(tmp_path / name, **changes)
        target = load_target(TargetConfig(path=str(folder)), CPU)
        if name == "biased":
            target.output_head.bias = torch.nn.Parameter(torch.arange(300.0))
        target.save(tmp_path / f"{name}-ends")
        ends = EmbeddingsAndOutputHead.from_folder(tmp_path / f"{name}-ends", CPU)
        shared = ends.output_head.weight.data_ptr() == ends.embedding.weight.data_ptr()
        assert shared == (name == "tied")
        assert ends.has_plain_head == (name == "tied")
        states = torch.randn(2, 64)
        assert torch.equal(ends.compute_logits(states), target.compute_logits(states))
        assert torch.equal(
            ends.compute_logits(states.bfloat16()), target.compute_logits(states.bfloat16().float())
        )


def test_a_target_in_the_hubs_cache_is_known_by_its_commit(
    store: Path, inputs: Path, tmp_path: Path
) -> None:
    commits = ["a1" * 20, "b2" * 20]
    cached, other = (tmp_path / "snapshots" / commit for commit in commits)
    for folder in (cached, other):
        shutil.copytree(inputs / "target", folder)
    store = shutil.copytree(store, tmp_path / "store")
    with edited_json(store / "manifest.json") as manifest:
        manifest["target"]["revision"] = commits[0]
    for same in (cached, inputs / "target"):
        open_with(store, {"path": str(same)})
    with pytest.raises(InputError, match=rf"target\.revision was '?{commits[0][:6]}"):
        open_with(store, {"path": str(other)})


def test_a_run_and_its_head_say_who_wrote_the_answers(inputs: Path, tmp_path: Path) -> None:
    config = TargetConfig(path=str(inputs / "target"), dtype=Dtype.float32)
    identity = identify_target(config, load_target_tokenizer(config), torch.float32)
    others, own = inputs / "chat.jsonl", tmp_path / "own/conversations.jsonl"

    def said(path: Path) -> str:
        (line,) = format_authorship(str(path), identity)
        return line.removeprefix("answers of data.path: ")

    assert said(others) == (
        "no record says that the target wrote them, and heads learn less from others' words "
        "(docs/data.md); to have them written: python scripts/regenerate.py "
        f"data.path={others} target.path={inputs}/target"
    )
    regenerate.main(
        RegenerateRun(
            target=replace(config, dtype=Dtype.bfloat16),  # another dtype: still its own words
            data=RowsConfig(path=str(others), num_prompts=4),
            max_new_tokens=4, out_dir=str(tmp_path / "own"), vllm="none",
        )
    )  # fmt: skip
    assert said(own) == said(own.parent) == "the target wrote them"
    (tmp_path / "ids.jsonl").write_bytes(own.read_bytes())
    assert said(tmp_path / "ids.jsonl") == "a model wrote them, whose token ids stand beside them"
    manifest = own.with_name("manifest.json")
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(facts | {"target.weights": "0" * 64}))
    assert "another target wrote them (target.weights was 000000000000, is " in said(own)
    manifest.write_text(json.dumps({"source": "endpoint", "model": "me/toy"}))
    assert said(own) == "me/toy wrote them, on a server"
    with_target(MedusaRun, inputs, tmp_path / "run")
    about = json.loads((tmp_path / "run/head/headsmith.json").read_text())["about_head"]
    assert about[0].startswith("training: 3 steps of ")
    assert about[1] == format_authorship(str(others), identity)[0]
    assert about[2].startswith("tokens to learn from: ")


# --- A head that goes on, for the target it was trained for or for one that has changed since.


def run_of(inputs: Path, out_dir: Path, head: str | None = None, **changes: Any) -> MedusaRun:
    return MedusaRun(
        target=TargetConfig(path=str(inputs / changes.pop("target", "target"))),
        data=DataConfig(path=str(inputs / "chat.jsonl"), max_length=64, eval_fraction=0.2),
        head=MedusaConfig(num_heads=2, path=head),
        train=TrainConfig(
            max_steps=2, batch_size=2, warmup_steps=1, log_steps=1, num_eval_sequences=2,
            num_replay_prompts=1, save_steps=1,
        ),
        out_dir=str(out_dir),
        **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def head(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    medusa.main(run_of(inputs, folder))
    return folder


def test_tau_is_known_before_the_first_step_of_what_goes_on(
    inputs: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    medusa.main(run_of(inputs, tmp_path, str(head / "head")))
    assert "was trained for" not in capsys.readouterr().out
    before, after = column(tmp_path, "eval/loss")
    assert before == pytest.approx(column(head, "eval/loss")[0], rel=1e-6)
    assert after != before
    lines = [json.loads(each) for each in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 0
    assert "eval/tau" in lines[0]
    assert len(column(head, "eval/loss")) == 1
    anew, gone_on = (
        json.loads((each / "head" / "headsmith.json").read_text())["config"]["train"]
        for each in (head, tmp_path)
    )
    assert gone_on["learning_rate"] == pytest.approx(0.2 * anew["learning_rate"])


WORDS = re.compile(
    r"head: trained for another target \((\S+), not (\S+)\), so fewer draft tokens may be "
    r"accepted; set target\.path=\1, or train the head further \(docs/data\.md, A target that "
    r"has changed\)\. "
    r"What differs: target\.weights was \w{12}, is \w{12}"
)


def test_a_head_of_another_target_is_told_of(
    inputs: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    medusa.main(run_of(inputs, tmp_path / "other", str(head / "head"), target="changed"))
    assert WORDS.search(capsys.readouterr().out)


def test_a_head_from_a_store_knows_the_target_that_was_captured(
    inputs: Path, tmp_path: Path
) -> None:
    store = captured(inputs, tmp_path / "store")
    run = run_of(inputs, tmp_path / "out")
    data, target = DataConfig(features=str(store)), TargetConfig()
    medusa.main(replace(run, data=data, target=target))
    found = tmp_path / "out/head"
    for name, told in (("target", False), ("changed", True)):
        where = TargetConfig(path=str(inputs / name))
        identity = identify_target(where, load_target_tokenizer(where), torch.float32)
        assert (format_target_change("head.path", str(found), None, identity) is not None) == told
    with edited_json(found / "headsmith.json") as noted:
        noted["target_identity"]["name"] = identity.name
    said = format_target_change("head.path", str(found), None, identity)
    assert f"({identity.name} as it was), so fewer" in str(said)
    assert "; train the head further (docs/data.md" in str(said)
    with edited_json(found / "headsmith.json") as noted:
        del noted["target_identity"]
    assert format_target_change("head.path", str(found), None, identity) is None
    (found / "headsmith.json").unlink()
    assert format_target_change("head.path", str(found), None, identity) is None


def test_a_run_goes_on_with_the_target_and_the_data_that_it_began_with(
    inputs: Path, head: Path, tmp_path: Path
) -> None:
    text = (inputs / "chat.jsonl").read_text()
    middle = len(text) // 2
    # Some of the last rows are others, each as long as it was.
    rows = text[:middle] + text[middle:].replace("than", "thin")
    (tmp_path / "chat.jsonl").write_text(rows)
    for group, name, value, says in (
        ("target", "path", inputs / "changed", r"target\.weights was \w{12}, is \w{12}\."),
        ("target", "dtype", Dtype.bfloat16, r"target\.dtype was 'float32', is 'bfloat16'\."),
        ("data", "path", tmp_path / "chat.jsonl", r"data\.checksum was '\w{16}', is '\w{16}'\."),
    ):
        again = run_of(inputs, tmp_path / "out")
        again.train.resume = str(head / "checkpoints/step-000001")
        setattr(getattr(again, group), name, str(value) if name == "path" else value)
        with pytest.raises(InputError, match=f"{says} Continue"):
            medusa.main(again)


def test_training_answers_as_the_generation_config_says(inputs: Path, tmp_path: Path) -> None:
    """Its tau, and what rollouts learn: both ask the target that is made here."""
    folder = shutil.copytree(inputs / "target", tmp_path / "target")
    run = run_of(inputs, tmp_path / "out")
    run.target.path = str(folder)
    launched: Any = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    file = folder / "generation_config.json"
    usual = json.loads(file.read_text())

    def source(**asks: Any) -> Any:
        file.write_text(json.dumps(usual | asks))
        return load_target_source(run, launched)

    assert source().target.logits_processing == {}
    found = source(repetition_penalty=1.5, stop_strings=["end"])
    assert (found.target.logits_processing, found.target.stop_strings) == (
        {"repetition_penalty": 1.5},
        ("end",),
    )
    found = source(num_beams=4)
    assert found.target.logits_processing == {}
    assert found.lines[0].startswith("tau is measured on plain greedy answers: ")
    assert "num_beams=4, which drafts cannot be verified with" in found.lines[0]
    run.rollout.steps = 1
    with pytest.raises(InputError, match="num_beams=4, which drafts cannot be verified with"):
        source(num_beams=4)


def test_rollouts_go_on_with_the_answers_that_they_began_with(inputs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(inputs / "target", tmp_path / "target")
    run = run_of(inputs, tmp_path / "out")
    run.target.path, run.rollout.steps, run.rollout.max_new_tokens = str(folder), 1, 4
    medusa.main(run)
    with edited_json(folder / "generation_config.json") as content:
        content["repetition_penalty"] = 1.5
    run.train.resume = "auto"
    said = r"answers\.generation_config was \[\], is \[\['repetition_penalty', 1\.5\]\]\. Continue"
    with pytest.raises(InputError, match=said):
        medusa.main(run)
