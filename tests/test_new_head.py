"""A kind of head that the project does not know joins by a line of the table, and by that alone."""

import json
import sys
from dataclasses import replace
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_head
from chats import chats
from safetensors.torch import load_file, save_file
from toy_head import train as toy_train
from toy_head.head import ToyConfig, ToyDrafter, ToyHead
from toy_head.train import ToyRun
from toys import save_target

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.export import ExportFormat, ExportRun
from conf.settings.measure import AcceptanceRun, Mode
from conf.settings.scripts import PruneRun
from conf.settings.target import TargetConfig
from conf.settings.training import Schedule, TrainConfig
from eval import acceptance
from eval.parity import readers
from eval.parity.parity_check import check_parity
from eval.preflight_checks import list_methods
from heads.decoding.cache import TreeCache
from heads.decoding.drafting import CommittedTokens, HeadDrafter, Roots
from heads.decoding.tree import Tree
from heads.draft_head import WEIGHTS, DraftHead
from heads.kinds import HEADS, load_head
from heads.target_model.model import TargetOutput
from heads.vocab import DraftVocab
from scripts import export, prune
from scripts.bench import decoding as bench_decoding
from scripts.bench.training import make_objective
from tests.scripts.publish.test_push import hub, upload
from train import api
from train.objective import Objective

__all__ = ["hub"]  # a fixture
SCHEDULE = {"batch_size": 2, "warmup_steps": 1, "learning_rate": 0.01, "save_steps": 2,
            "eval_steps": 4, "num_eval_sequences": 2, "num_replay_prompts": 2,
            "compile": True}  # fmt: skip
"""Compiled, as usual on a GPU; this head has no parts that would be."""


@pytest.fixture(autouse=True)
def line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that a new head's author writes: a line, a reader and an entry script."""
    monkeypatch.setitem(HEADS, "toy", ToyHead)
    folder = str(Path(toy_head.__file__).parent / "readers")
    monkeypatch.setattr(readers, "__path__", [*readers.__path__, folder])
    monkeypatch.setitem(sys.modules, "train.toy", toy_train)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and conversations."""
    folder = tmp_path_factory.mktemp("toy")
    save_target(folder / "target")
    chats(folder / "chats.jsonl", 40)
    return folder


def asked(base: type) -> list[str]:
    """Methods that a head's author may write for a class: its public ones that are not final."""
    methods = {name: getattr(each, "__func__", each) for name, each in vars(base).items()}
    return [
        name
        for name, method in methods.items()
        if isfunction(method) and not name.startswith("_") and not hasattr(method, "__final__")
    ]


def test_a_head_answers_fifteen_questions_at_most() -> None:
    questions = [name for base in (DraftHead, HeadDrafter, Objective) for name in asked(base)]
    assert len(questions) <= 15, questions
    derived = {name for name, each in vars(DraftHead).items() if isinstance(each, property)}
    for head in HEADS.values():
        families = [each for each in head.__mro__ if each not in DraftHead.__mro__]
        assert not derived & {name for family in families for name in vars(family)}


def test_the_toy_is_short() -> None:
    files = Path(toy_head.__file__).parent.rglob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) <= 120


def trained(inputs: Path, out_dir: Path, **changes: Any) -> Path:
    """The folder of a head after 4 steps, or what `changes` say."""
    config = ToyRun(
        target=TargetConfig(path=str(inputs / "target")),
        data=DataConfig(path=str(inputs / "chats.jsonl"), max_length=64),
        train=TrainConfig(**{"max_steps": 4, **SCHEDULE, **changes}),
        out_dir=str(out_dir),
    )
    toy_train.main(config)
    return out_dir / "head"


@pytest.fixture(scope="module")
def head(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(inputs, tmp_path_factory.mktemp("trained"))


def measuring(inputs: Path, head: Path, out_dir: Path) -> dict[str, Any]:
    return {
        "target": TargetConfig(path=str(inputs / "target")),
        "data": DataConfig(path=str(inputs / "chats.jsonl"), num_prompts=3),
        "head": HeadRef(path=str(head)),
        "max_new_tokens": 12,
        "num_turns": 1,
        "out_dir": str(out_dir),
    }


def test_it_trains_and_resumes_to_the_same_weights(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("train.loop.command.find_missing_toolchain", lambda _: "a compiler")
        trained(inputs, tmp_path, schedule=Schedule.constant, max_steps=2)
    told = " ".join(capsys.readouterr().out.split())
    assert "not compiled, which is slower: torch.compile needs a compiler" in told
    resumed = trained(inputs, tmp_path, schedule=Schedule.constant, resume="auto")
    straight = trained(inputs, tmp_path / "straight", schedule=Schedule.constant)
    mine, theirs = (load_file(folder / WEIGHTS) for folder in (resumed, straight))
    assert torch.equal(mine["out.weight"], theirs["out.weight"])
    lines = (straight.parent / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["eval/loss"] < json.loads(lines[0])["train/loss"] - 0.5


@pytest.mark.usefixtures("no_picture")
def test_replay_and_decoding_agree(inputs: Path, head: Path, tmp_path: Path) -> None:
    found = {}
    for mode in (Mode.replay, Mode.decode):
        run = AcceptanceRun(**measuring(inputs, head, tmp_path / mode.value), mode=mode)
        acceptance.main(run)
        found[mode] = json.loads((tmp_path / mode.value / "acceptance.json").read_text())
    for figure in ("tau", "alpha", "per_position", "static_tree"):
        assert found[Mode.replay][figure] == found[Mode.decode][figure]
    assert len(found[Mode.replay]["alpha"]) == 1


def test_other_programs_draft_with_it_and_train_it(inputs: Path, head: Path) -> None:
    target = api.load_target(str(inputs / "target"), device="cpu")
    loaded = api.load_head(str(head), target)
    own, drafted = (api.generate(target, each, "hello there", 12) for each in (None, loaded))
    assert drafted.token_ids == own.token_ids
    ids = torch.tensor([own.prompt_ids + own.token_ids])
    step = api.training_step(api.training_objective(loaded, target), ids, torch.ones_like(ids))
    step.loss.backward()
    assert loaded.out.weight.grad.any()


def test_a_drafter_goes_on_with_some_texts() -> None:
    head = ToyHead(ToyConfig(hidden_size=2, vocab_size=2, target="t"), DraftVocab.make_full(2))
    head.out.weight.data = torch.eye(2)
    drafter = ToyDrafter(head, Tree.make_chain(1))
    drafter.select_rows([0])  # perhaps before any was seen
    output = TargetOutput(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), {})
    drafter.observe(CommittedTokens([[5], [6]], output, TreeCache(2, torch.device("cpu"), 1)))
    drafter.select_rows([1])
    assert drafter.propose(Roots.from_ids([7])).tokens.tolist() == [[1]]


def test_its_export_is_verified_and_published(inputs, head, tmp_path, hub, capsys) -> None:
    out = tmp_path / "export"
    run = ExportRun(head=HeadRef(str(head)), format=ExportFormat.original, out_dir=str(out))
    export.main(run)
    assert f"play {out}" in capsys.readouterr().out
    with pytest.raises(InputError, match="vLLM loads no toys; allowed for this head: original"):
        export.main(replace(run, format=ExportFormat.vllm, out_dir=str(tmp_path / "vllm")))
    upload(head.parent, repo_id="me/toy", base_model="me/chat", exports=[str(out)])
    files = hub.repos["me/toy"].files("main") or {}
    assert files[WEIGHTS] == (head / WEIGHTS).read_bytes()
    assert b"Toy" in files["README.md"]
    weights = load_file(out / WEIGHTS)
    weights["out.weight"][5] += 1
    save_file(weights, out / WEIGHTS)
    with pytest.raises(InputError, match="differ from the trained head's"):
        check_parity(out)


@pytest.mark.usefixtures("no_picture")
def test_it_is_pruned(inputs: Path, head: Path, tmp_path: Path) -> None:
    run = PruneRun(
        target=TargetConfig(path=str(inputs / "target")),
        data=DataConfig(path=str(inputs / "chats.jsonl"), max_length=64),
        head=HeadRef(path=str(head)),
        sizes=[20],
        out_dir=str(tmp_path / "out"),
    )
    prune.main(run)
    small, whole = (load_head(str(each)) for each in (tmp_path / "out/20/head", head))
    assert small.out.weight.equal(whole.out.weight[small.vocab.ids])


def test_benchmarks_and_measurements_find_it(head: Path) -> None:
    target = bench_decoding.make_certain_target(torch.float32, num_layers=4, width=128, vocab=512)
    drafters = {name: tree for name, _, tree in bench_decoding.iter_drafters(target, "cpu")}
    assert {"toy tree", "medusa tree"} <= drafters.keys()
    assert (drafters["toy chain"].num_nodes, drafters["medusa chain"].num_nodes) == (2, 5)
    objective = make_objective("toy", target, DraftVocab.make_full(512))
    assert type(objective) is toy_train.ToyObjective
    assert {"toy_chain", "toy_tree", "toy_typical"} <= list_methods().keys()
