"""Every kind of head can be saved, pruned, trained from stores and compared."""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import HEADS, made
from feature_heads import BLOCKS, fresh, settings_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from stores import captured, save_inputs, settings
from torch import Tensor
from toys import noisy_head, random_model, random_target, save_target, texts

from conf.errors import InputError
from conf.settings.blocks import DSparkRun
from conf.settings.data import DataConfig, StateFormat
from conf.settings.drafting import DynamicTreeConfig, HeadRef
from conf.settings.export import MergeAdapterRun
from conf.settings.measure import AcceptanceRun, Mode
from conf.settings.scripts import CompareRun
from conf.settings.target import Dtype, Quantization, TargetConfig
from conf.settings.training import TrainConfig
from eval import acceptance
from eval.measure.measured_head import load_measured_head
from heads import kinds
from heads.draft_head import DraftHead
from heads.kinds import find_kind_name, load_head
from heads.target_model.load import load_target
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from scripts import compare, merge_adapter, prune
from train import dspark
from train.loop import evaluation as replay

OWN = {"own_output_head": True, "draft_vocab_size": 64}


def head_of(target: Target, name: str, **changes: Any) -> DraftHead:
    """An untrained head, of fewer ids where its kind may have fewer."""
    if name == "medusa":
        return noisy_head(target, num_heads=4)
    own = {} if name == "dflash2" or "eagle" in name else OWN
    return fresh(target, settings_of(name, **{**own, **changes})).eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(num_hidden_layers=4)


@torch.no_grad()
def candidates(head: DraftHead, target: Target, token_ids: list[int], width: int) -> Tensor:
    output = target.encode_text(token_ids[:-1], head.taps)
    return head.compute_candidates(output, token_ids, 4, 4, width)


def test_every_kind_stands_in_the_table_of_exports() -> None:
    """But that which is exported by stitching, and so a new one is under test."""
    assert {find_kind_name(made(name)) for name in HEADS} == kinds.HEADS.keys() - {"mtp"}


@pytest.mark.parametrize("name", HEADS)
def test_a_saved_head_is_the_head(name: str, tmp_path: Path) -> None:
    head = made(name)
    head.save(tmp_path / "head")
    found = load_head(str(tmp_path / "head"))
    assert (type(found), found.config) == (type(head), head.config)
    assert found.vocab.ids.equal(head.vocab.ids)
    expected, tensors = head.state_dict(), found.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(tensors[key].equal(each) for key, each in expected.items())


PRUNED = ["medusa", "eagle3, reduced", "dflash", "dspark", "dspark, rnn", "peagle"]


@pytest.mark.parametrize("name", PRUNED)
def test_a_pruned_head_drafts_what_is_left_in_the_same_order(target: Target, name: str) -> None:
    head = head_of(target, name)
    same = head.prune_vocab(head.vocab).state_dict()
    assert all(same[key].equal(each) for key, each in head.state_dict().items())
    kept = head.vocab.ids[5:53:2]
    small = head.prune_vocab(DraftVocab(kept, target.vocab_size)).attach(target).eval()
    assert {len(each) for each in small.find_output_heads()} == {24}
    (text,) = texts(target, 1, 20)
    of_all = candidates(head, target, text, len(head.vocab.ids))
    still = of_all[torch.isin(of_all, kept)].reshape(*of_all.shape[:2], 24)
    assert still.equal(candidates(small, target, text, 24))


BY_FREQUENCY = {
    "eagle3, reduced": ["lm_head.weight"],
    "peagle": ["lm_head.weight"],
    "dflash": ["lm_head.weight"],
    "dspark": ["lm_head.weight", "markov_head.markov_w2.weight"],
    "dspark, rnn": ["lm_head.weight", "markov_head.markov_w2.weight"],
}


@pytest.mark.parametrize("by_ids", [False, True], ids=["with t2d", "without"])
@pytest.mark.parametrize("name", BY_FREQUENCY)
def test_draft_ids_in_order_of_frequency_are_the_same_head(
    target: Target, tmp_path: Path, name: str, by_ids: bool
) -> None:
    """Their rows, moved to rising ids by hand, are those of the saved head."""
    own = {} if "eagle" in name else OWN
    head = fresh(target, settings_of(name, **own)).eval()
    torch.manual_seed(3)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    head.save(tmp_path / "head")
    file = tmp_path / "head/model.safetensors"
    tensors = load_file(file)
    order = torch.randperm(len(head.vocab.ids), generator=torch.Generator().manual_seed(1))
    ids = head.vocab.ids[order]
    assert not ids.equal(head.vocab.ids)
    tensors |= {each: tensors[each][order].contiguous() for each in BY_FREQUENCY[name]}
    tensors["d2t"] = ids - torch.arange(len(ids))
    if by_ids:
        assert int(tensors["d2t"].min()) < 0  # so they are no ids
        tensors.pop("t2d", None)
    save_file(tensors, file)
    found = load_head(str(tmp_path / "head"))
    assert found.vocab.ids.equal(head.vocab.ids)
    assert all(each.equal(head.state_dict()[key]) for key, each in found.state_dict().items())
    found = found.attach(target).eval()
    (text,) = texts(target, 1, 20)
    drafted = candidates(found, target, text, 8)
    assert drafted.equal(candidates(head, target, text, 8))


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
def test_what_borrows_the_target_s_output_head_cannot_be_pruned(target: Target, name: str) -> None:
    borrowing = {} if name == "dflash2" else {"own_output_head": False, "draft_vocab_size": None}
    head = head_of(target, name, **borrowing)
    problem = str(head.pruning_problem)
    assert "with the target's output head, which cannot lose rows" in problem
    assert ("head.own_output_head=true" in problem) == (name != "dflash2")


def test_bytes_that_a_draft_reads_are_of_all_that_is_multiplied(target: Target) -> None:
    """DSpark: both factors of its logits by tokens are of 8; the first is only looked up."""
    borrowed = head_of(target, "dspark", own_output_head=False, draft_vocab_size=None)
    whole, own = (
        prune.attach_for_measuring(each, target, None)["weight_bytes"]
        for each in (borrowed, head_of(target, "dspark"))
    )
    assert whole is not None
    assert own is not None
    assert whole - own == 4 * (96 - 64) * (64 + 8)
    beside = ("embed_tokens.weight", "markov_head.markov_w1.weight")
    matrices = dict(borrowed.named_parameters()).items()
    read = sum(each.numel() for name, each in matrices if name not in beside)
    assert whole == 4 * (read + 96 * 64)
    low = prune.attach_for_measuring(borrowed, target, 4)["weight_bytes"]
    assert low is not None
    # 96 rows and 64 columns per direction, and 32 exact rows of 64.
    assert whole - low == 4 * (96 * 64 - 4 * (96 + 64) - 32 * 64)


@pytest.mark.parametrize("name", [*BLOCKS, "peagle"])
def test_matrices_with_a_row_per_id_are_told_from_hidden_ones(name: str) -> None:
    """Muon is for the hidden ones."""
    target = random_target(vocab_size=77, num_hidden_layers=4)
    head = head_of(target, name, **({} if name == "dflash2" else {"draft_vocab_size": 40}))
    by_id = {id(each) for each in (*head.find_output_heads(), *head.find_embeddings())}
    trained = [each for each in head.parameters() if each.requires_grad and each.dim() == 2]
    assert by_id <= {id(each) for each in trained}
    assert all((len(each) in (40, 77)) == (id(each) in by_id) for each in trained)


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr(replay, "MAX_REPLAY_TOKENS", 12)
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, conversations, an adapter that has learnt something, and prompts."""
    folder = save_inputs(tmp_path_factory.mktemp("inputs"))
    model = random_model(vocab_size=300, num_hidden_layers=4)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    for parameter in (p for n, p in adapted.named_parameters() if "lora_B" in n):
        parameter.data.normal_(std=0.3)
    adapted.save_pretrained(folder / "adapter")
    rows = [{"turns": [f"hello {n}, how are you?"]} for n in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(out_dir: Path, target: TargetConfig, data: DataConfig) -> list[float]:
    """Losses of a short run of DSpark, and its tau; the others go the same ways."""
    train = TrainConfig(
        max_steps=2, batch_size=2, warmup_steps=1, log_steps=1, num_eval_sequences=2,
        num_replay_prompts=1, learning_rate=1e-2,
    )  # fmt: skip
    head = settings_of("dspark", mask_token_id=0, **OWN)
    dspark.main(DSparkRun(head=head, train=train, target=target, data=data, out_dir=str(out_dir)))
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    return [each.get("train/loss", each.get("eval/loss")) for each in lines] + [
        lines[-1]["eval/tau"]
    ]


def test_losses_from_a_store_are_those_with_the_target(inputs: Path, tmp_path: Path) -> None:
    """bf16: equal, as tau is; a byte (int8 stands for both): within 4% of the loss, or 0.03."""
    given = settings(inputs, tmp_path, dtype=Dtype.bfloat16)
    online = trained(tmp_path / "online", given.target, deepcopy(given.data))
    same = {"dtype": Dtype.bfloat16, "micro_batch_size": 1, "num_replay_prompts": 1}
    for kind in (StateFormat.bf16, StateFormat.int8):
        store = captured(inputs, tmp_path / kind.value, format=kind, layers=[1, 2], **same)
        data = DataConfig(features=str(store))
        offline = trained(tmp_path / f"from-{kind.value}", TargetConfig(), data)
        if kind is StateFormat.bf16:
            assert offline == online
        else:
            assert offline[:-1] == pytest.approx(online[:-1], rel=0.04, abs=0.03)
            assert offline[:-1] != online[:-1]


def test_an_adapted_target_trains_as_a_merged_one(inputs: Path, tmp_path: Path) -> None:
    given = settings(inputs, tmp_path)
    adapted = replace(given.target, adapter=str(inputs / "adapter"))
    merge_adapter.main(MergeAdapterRun(target=adapted, out_dir=str(tmp_path / "merged")))
    merged = replace(given.target, path=str(tmp_path / "merged"))
    plain, one, other = (
        trained(tmp_path / f"out{n}", each, deepcopy(given.data))
        for n, each in enumerate((given.target, adapted, merged))
    )
    assert one == pytest.approx(other, rel=1e-3)
    assert one != pytest.approx(plain, rel=1e-3)


def test_a_quantised_target_trains_and_checks_a_head(inputs: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    data, folder = settings(inputs, tmp_path).data, tmp_path / "target"
    # Rows of 64 numbers share a scale.
    save_target(folder, num_hidden_layers=4, intermediate_size=128)
    whole = TargetConfig(path=str(folder), dtype=Dtype.float32)
    quantised = replace(whole, quantization=Quantization.int8)
    plain, losses = (
        trained(tmp_path / f"of-{each.quantization.value}", each, deepcopy(data))[:-1]
        for each in (whole, quantised)
    )
    assert losses == pytest.approx(plain, rel=0.3, abs=0.3)
    assert losses != plain
    where = {"target": quantised, "head": HeadRef(f"{tmp_path}/of-int8/head")}
    replayed, decoded = (
        accepted(inputs, tmp_path / mode.value, mode=mode, **where)
        for mode in (Mode.replay, Mode.decode)
    )
    assert replayed["tau"] == decoded["tau"]


def accepted(inputs: Path, out_dir: Path, **changes: Any) -> dict[str, Any]:
    data = DataConfig(path=str(inputs / "prompts.jsonl"))
    common = {"data": data, "max_new_tokens": 12, "num_turns": 1, "out_dir": str(out_dir)}
    acceptance.main(AcceptanceRun(**common, **changes))
    return json.loads((out_dir / "acceptance.json").read_text())


@pytest.mark.usefixtures("no_picture")
def test_heads_of_two_kinds_stand_side_by_side(inputs: Path, tmp_path: Path) -> None:
    where = TargetConfig(path=str(inputs / "target"))
    target = load_target(where, torch.device("cpu"))
    for name in ("dspark", "peagle"):
        head_of(target, name).save(tmp_path / name)
        accepted(inputs, tmp_path / f"of-{name}", target=where, head=HeadRef(f"{tmp_path / name}"))
    results = [str(tmp_path / f"of-{name}") for name in ("dspark", "peagle")]
    compare.main(CompareRun(results=results, out_dir=str(tmp_path / "out")))
    first, second = (tmp_path / "out/comparison.md").read_text().splitlines()[-2:]
    assert first.startswith("| of-dspark | ")
    assert len(first.split("|")[-2].split()) == 5
    assert second.startswith("| of-peagle | ")
    assert len(second.split("|")[-2].split()) == 4


@pytest.mark.parametrize("name", ["dflash", "peagle"])
def test_trees_deeper_than_a_block_are_refused(target: Target, name: str, tmp_path: Path) -> None:
    head_of(target, name).save(tmp_path / "head")
    ref = HeadRef(path=str(tmp_path / "head"))
    deep, deeper = (AcceptanceRun(head=ref, dynamic_tree=DynamicTreeConfig(n)) for n in (4, 5))
    head = load_measured_head(deep, ref)
    assert max(head.tree.depth, head.chain.depth) == 4
    with pytest.raises(InputError, match=r"dynamic_tree\.depth=5: this head drafts at most 4 tok"):
        load_measured_head(deeper, ref)
