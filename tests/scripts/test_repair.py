"""Faults that change no text are found by what a head accepts, and mended."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import assistant, user, write_rows
from exported import Fault, both, damage, key
from feature_heads import fresh, objective_of, settings_of
from toys import noisy_head, save_target, trained

from conf.errors import InputError
from conf.settings.data import DataConfig
from conf.settings.drafting import HeadRef
from conf.settings.scripts import RepairRun
from conf.settings.target import TargetConfig
from data.templates.record_encoder import RecordEncoder
from eval.decode.engine import NoDraft, decode
from heads.kinds import load_head
from heads.target_model.load import load_target
from heads.target_model.model import Target
from scripts import repair

QUESTIONS = [f"{word}, how are you {n} today?" for n, word in enumerate(("hello", "there", "you"))]
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and questions."""
    folder = tmp_path_factory.mktemp("repair")
    # Weights so large that its answers are not one word again and again.
    save_target(folder / "target", num_hidden_layers=6, initializer_range=0.1)
    write_rows(
        folder / "prompts.jsonl", [{"messages": [user(q), assistant("fine")]} for q in QUESTIONS]
    )
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(TargetConfig(path=str(folder / "target")), torch.device("cpu"))


SETTINGS = {
    "eagle3": {"norm_output": True, "draft_vocab_size": None},
    "peagle": {"draft_vocab_size": None},
}


@pytest.fixture(scope="module")
def heads(folder: Path, target: Target) -> Callable[[str], Path]:
    """Folders of heads that have learnt the very answers that are replayed, made once."""
    encoder = RecordEncoder(target.tokenizer, None)
    prompts = [encoder.encode_prompt([user(each)], None, {}) for each in QUESTIONS]
    documents = [each + decode(target, NoDraft(), each, TOKENS).token_ids for each in prompts]

    def of(name: str) -> Path:
        if not (folder / name).exists():
            config = settings_of(name, layers=[2, 4], **SETTINGS.get(name, {}))
            objective = objective_of(fresh(target, config), target, config)
            head = trained(objective, documents, 40, min(map(len, prompts)))
            head.save(folder / name, {"made": "here"})
        return folder / name

    return of


def settings(folder: Path, head: Path, out_dir: Path, **changes: Any) -> RepairRun:
    own = {
        "target": TargetConfig(path=str(folder / "target")),
        "data": DataConfig(path=str(folder / "prompts.jsonl")),
        "head": HeadRef(path=str(head)),
        "max_new_tokens": TOKENS,
        "out_dir": str(out_dir),
    }
    return RepairRun(**{**own, **changes})


def broken(head: Path, folder: Path, fault: Fault) -> Path:
    """A copy of a head with a fault."""
    copy = shutil.copytree(head, folder / "broken")
    damage(copy, fault)
    return copy


# Hidden states 3 and 5, which block heads' files count from 0.
DFLASH_LAYERS = key("dflash_config", "target_layer_ids", to=[2, 4])
DSPARK_LAYERS = key("target_layer_ids", to=[2, 4])
EAGLE_LAYERS = both(key("eagle_aux_hidden_state_layer_ids", to=[3, 5]), key("eagle_config", to={}))
# Both places that name theta, as a config that contradicts itself is refused.
THETA = both(key("rope_theta", to=3.0), key("rope_parameters", "rope_theta", to=3.0))
LAYERS = "hidden states [2, 4], not [3, 5]"
FAULTS = [
    ("dspark", key("sample_from_anchor", to=False), "sample_from_anchor=true"),
    ("dflash2", THETA, "the target's RoPE (default, theta 10000)"),
    ("dspark", DSPARK_LAYERS, LAYERS),
    ("eagle3", EAGLE_LAYERS, LAYERS),
    ("peagle", EAGLE_LAYERS, LAYERS),
]


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("eagle3", key("norm_output", to=False), "norm_output=true"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in FAULTS),
    ],
)
def test_a_fault_is_named_and_mended(folder, heads, tmp_path, name, fault, words) -> None:
    repair.main(settings(folder, broken(heads(name), tmp_path, fault), tmp_path / "out"))
    whole, mended = load_head(str(heads(name))), load_head(str(tmp_path / "out/head"))
    assert shown(mended) == shown(whole)
    tensors = mended.collect_tensors()
    assert all(each.equal(tensors[name]) for name, each in whole.collect_tensors().items())
    record = json.loads((tmp_path / "out/head/headsmith.json").read_text())
    assert record["repaired"] == words
    rows = json.loads((tmp_path / "out/repair.json").read_text())["readings"]
    assert rows[0] == {"reading": "as its files say", "tau": rows[0]["tau"], "more": 0.0,
                       "more_ci95": [0.0, 0.0]}  # fmt: skip
    best = max(rows, key=lambda row: row["tau"])
    assert best["reading"] == words
    assert best["more_ci95"][0] > 0


def shown(head: Any) -> dict[str, Any]:
    return vars(head.config) | {"llama": head.config.llama.to_dict()}


def test_a_right_head_is_left_alone(folder, heads, tmp_path, capsys) -> None:
    repair.main(settings(folder, heads("dflash"), tmp_path / "out"))
    said = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "out/head").exists()
    rows = json.loads((tmp_path / "out/repair.json").read_text())["readings"]
    names = [row["reading"] for row in rows]
    assert names[:4] == [
        "as its files say",
        "hidden states [1, 3], not [2, 4]",
        "hidden states [3, 5], not [2, 4]",
        "hidden states [2, 3], not [2, 4]",
    ]
    assert {"causal=true", "features in the order [4, 2]"} < set(names)
    assert all(row["more"] < 0 for row in rows[1:4])
    table = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in said if line[:1] in "│┃"]
    assert table[0] == ["read", "tau", "more", "95% interval"]
    assert table[1] == ["as its files say", f"{rows[0]['tau']:.3f}", "+0.000", "+0.000 to +0.000"]
    assert len(table) == 1 + len(rows)
    right = said.index("no other reading is significantly better, so the files are right")
    assert said[right + 1].startswith("wrote ")


@pytest.mark.slow
def test_readings_are_as_long_as_the_shortest(folder, heads, tmp_path) -> None:
    """A block of 5 that begins behind its anchor drafts 4."""
    repair.main(settings(folder, heads("dspark"), tmp_path / "out"))
    rows = json.loads((tmp_path / "out/repair.json").read_text())["readings"]
    assert rows[1]["reading"] == "sample_from_anchor=false"
    assert 4 < rows[0]["tau"] <= 5
    assert rows[1]["tau"] < rows[0]["tau"]


@pytest.mark.slow
def test_two_faults_are_found_one_after_the_other(folder, heads, tmp_path, capsys) -> None:
    head = broken(heads("dflash"), tmp_path, both(DFLASH_LAYERS, THETA))
    repair.main(settings(folder, head, tmp_path / "out"))
    assert "the files should say" in capsys.readouterr().out
    mended = load_head(str(tmp_path / "out/head"))
    assert shown(mended) == shown(load_head(str(heads("dflash"))))


def test_what_cannot_be_repaired_is_refused(folder: Path, target: Target, tmp_path: Path) -> None:
    noisy_head(target).save(tmp_path / "medusa")
    with pytest.raises(InputError, match="Medusa head has no settings with known silent faults"):
        repair.main(settings(folder, tmp_path / "medusa", tmp_path / "out"))
