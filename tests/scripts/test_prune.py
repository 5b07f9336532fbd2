import json
import re
from pathlib import Path

import pytest
import torch
from chats import assistant, chats, user, write_rows
from rich.console import Console
from safetensors.torch import load_file
from toys import eagle_head, noisy_head, packed, random_target, save_target, texts

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import DynamicTreeConfig, HeadRef
from conf.settings.eagle import EagleForm
from conf.settings.measure import AcceptanceRun
from conf.settings.scripts import PruneRun
from conf.settings.target import TargetConfig
from eval import acceptance
from heads.kinds import load_head
from heads.target_model.load import load_target
from scripts import prune


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Path:
    """A target of 300 ids, heads of 150 and 300, conversations and held-out ones."""
    folder = tmp_path_factory.mktemp("prune")
    path = str(save_target(folder / "target", num_hidden_layers=4))
    file = folder / "target/generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.5}))
    target = load_target(TargetConfig(path=path), torch.device("cpu"))
    eagle_head(target, EagleForm.eagle3, 150, num_updates=10).save(folder / "eagle3", {"a": 1})
    eagle_head(target, EagleForm.eagle1, num_updates=0).save(folder / "eagle1")
    noisy_head(target).save(folder / "medusa")
    chats(folder / "chats.jsonl")
    rows = [{"messages": [user(f"hello {n}, how are you?"), assistant("fine")]} for n in range(3)]
    write_rows(folder / "heldout.jsonl", rows)
    return folder


def settings(setting: Path, out_dir: Path, name: str, **changes) -> PruneRun:
    files = [str(setting / f"{name}.jsonl") for name in ("chats", "heldout")]
    data = DataConfig(path=files[0], eval_path=files[1], max_length=128)
    own = {
        "target": TargetConfig(path=str(setting / "target")),
        "data": data,
        "head": HeadRef(path=str(setting / name)),
        "sizes": [20, 60],
        "max_new_tokens": 16,
        "depth": 3,
        "out_dir": str(out_dir),
    }
    return PruneRun(**{**own, **changes})


def accepted(setting: Path, head: Path, out_dir: Path, **changes) -> dict:
    config = AcceptanceRun(
        target=TargetConfig(path=str(setting / "target")),
        data=DataConfig(path=str(setting / "heldout.jsonl")),
        head=HeadRef(path=str(head)),
        max_new_tokens=16,
        depth=3,
        num_turns=1,
        dynamic_tree=DynamicTreeConfig(1, 1, 1),  # chains are compared
        out_dir=str(out_dir),
        **changes,
    )
    acceptance.main(config)
    return json.loads((out_dir / "acceptance.json").read_text())


@pytest.mark.parametrize("head", ["eagle3", pytest.param("medusa", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_tau_is_what_acceptance_measures_of_the_saved_heads(setting, tmp_path, head: str) -> None:
    prune.main(settings(setting, tmp_path / "out", head))
    result = json.loads((tmp_path / "out/prune.json").read_text())
    folders = [*(tmp_path / "out" / f"{size}/head" for size in (20, 60)), setting / head]
    for row, folder in zip([*result["pruned"], result["before"]], folders, strict=True):
        measured = accepted(setting, folder, tmp_path / str(row["num_ids"]))
        # Not the interval: packing orders prompts otherwise, and with them the bootstrap's draws.
        assert (row["tau"], row["alpha"]) == (measured["tau"], measured["alpha"])
        assert len(load_head(str(folder)).vocab.ids) == row["num_ids"]
    coverages = [row["coverage"] for row in (*result["pruned"], result["before"])]
    assert coverages == sorted(coverages)
    # The EAGLE-3 head has 31 of the 76 tokens that the target chooses.
    assert coverages[-1] == pytest.approx(1.0 if head == "medusa" else 31 / 76)
    sizes = [row["weight_bytes"] for row in (*result["pruned"], result["before"])]
    # 64 float32 of each row, in each of three Medusa heads.
    assert sizes[1] - sizes[0] == 40 * 64 * 4 * (3 if head == "medusa" else 1)
    assert (tmp_path / "out/prune.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("head", "num_heads"), [("eagle1", 1), ("medusa", 3)])
def test_ranks_are_measured_as_acceptance_does(setting, tmp_path, head, num_heads) -> None:
    changes = {"sizes": [], "ranks": [4, 16]}
    prune.main(settings(setting, tmp_path / "out", head, **changes))
    result = json.loads((tmp_path / "out/prune.json").read_text())
    assert result["pruned"] == []
    assert [row["rank"] for row in result["low_rank"]] == [4, 16]
    for row in (*result["low_rank"], result["before"]):
        out_dir = tmp_path / f"accept{row['rank']}"
        measured = accepted(setting, setting / head, out_dir, output_rank=row["rank"])
        assert (row["tau"], row["alpha"]) == (measured["tau"], measured["alpha"])
    small, large, before = (row["weight_bytes"] for row in (*result["low_rank"], result["before"]))
    # float32: 300 rows and 64 columns per direction, and 32 exact rows of 64.
    assert large - small == num_heads * 12 * (300 + 64) * 4
    assert before - small == num_heads * (300 * 64 - 4 * (300 + 64) - 32 * 64) * 4


def test_all_rows_are_shown_and_the_head_itself_last(capsys) -> None:
    row = {
        "num_ids": 1500, "rank": None, "coverage": 0.5, "tau": 1.25, "tau_ci95": (1.125, 1.375),
        "weight_bytes": 2_500_000, "draft_s": 0.002, "speedup": 1.5,
    }  # fmt: skip
    result = {
        "num_prompts": 3, "num_counted": 4000, "pruned": [row],
        "low_rank": [row | {"rank": 16, "tau_ci95": None}], "before": row | {"num_ids": 32000},
    }  # fmt: skip
    prune.print_rows(result, Console(width=90))
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "Cheaper logits (3 prompts, 4,000 tokens counted)"
    assert [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in lines if line[0] in "│┃"] == [
        ["ids", "rank", "coverage", "tau", "95% interval", "MB read", "draft ms", "speed-up"],
        ["1,500", "", "50.00%", "1.250", "1.12-1.38", "2.5", "2.00", "1.50"],
        ["1,500", "16", "50.00%", "1.250", "-", "2.5", "2.00", "1.50"],
        ["32,000", "", "50.00%", "1.250", "1.12-1.38", "2.5", "2.00", "1.50"],
    ]


def test_a_pruned_head_says_where_it_came_from(setting, tmp_path, capsys) -> None:
    prune.main(settings(setting, tmp_path, "eagle3", sizes=[150]))
    said = capsys.readouterr().out
    assert "Cheaper logits (" in said
    assert f"\nwrote {tmp_path}/prune.json, {tmp_path}/prune.png and {tmp_path}/SIZE/head\n" in said
    record = json.loads((tmp_path / "150/head/headsmith.json").read_text())
    assert record["a"] == 1
    assert record["pruned"]["head"] == str(setting / "eagle3")
    assert record["pruned"]["config"]["sizes"] == [150]
    assert record["pruned"]["tau"] == record["pruned"]["before"]["tau"]
    # All 150 ids: nothing else changes either.
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (setting / "eagle3", tmp_path / "150/head")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_choices_are_the_targets_first_along_the_answers() -> None:
    target = random_target()
    documents = texts(target, 3, 10)
    # Greedy text is its own first choices, so a token is changed that is only read.
    documents[1][7] = (documents[1][7] + 1) % target.vocab_size
    rows = [{name: row[0] for name, row in packed(documents).items()}]
    expected = torch.zeros(target.vocab_size, dtype=torch.int64)
    for document in documents:
        with torch.no_grad():
            logits = target.model(torch.tensor([document])).logits[0, 3:-1]
        expected += torch.bincount(logits.argmax(-1), minlength=target.vocab_size)
    found = prune.count_target_choices(target, rows, num_sequences=5)  # type: ignore[arg-type]
    assert torch.equal(found, expected)
    assert int(found.sum()) == 30


@pytest.mark.parametrize(
    ("head", "changes", "message"),
    [
        ("eagle1", {}, r"this eagle1 head drafts with the target's output head"),
        ("eagle3", {"sizes": []}, r"sizes=\[\]: names nothing to do; type how many ids"),
        ("eagle3", {"sizes": [60, 151]}, r"this head drafts 150 ids; allowed: 1 to 150"),
        ("eagle3", {"sizes": [2]}, r"allowed: 4 to 150, including its special and end tokens"),
        ("medusa", {"depth": 4}, r"depth=4: this head drafts at most 3"),
        ("medusa", {"max_new_tokens": 300}, r"max_new_tokens=300 are 326, above"),
        ("medusa", {"head": HeadRef()}, r"head\.path is unset"),
        ("eagle1", {"sizes": [], "ranks": [64]}, r"ranks=64: must be below 64, the hidden size"),
    ],
)
def test_what_cannot_be_pruned_is_named(setting, tmp_path, head, changes, message) -> None:
    with pytest.raises(InputError, match=message):
        prune.main(settings(setting, tmp_path / "out", head, **changes))
    assert not (tmp_path / "out").exists()


def test_an_earlier_result_is_not_written_over(setting, tmp_path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match=r"is not an empty folder"):
        prune.main(settings(setting, tmp_path, "eagle3"))
