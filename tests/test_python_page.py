"""docs/python.md: its code runs as it stands, and its list is what is public."""

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from train import api

PAGE = (Path(__file__).resolve().parents[1] / "docs/python.md").read_text()
LISTED = dict(re.findall(r"^\| `(\w+)(?:\(.*\))?` \| (.+) \|$", PAGE, re.M))
ROOMS = ("train", "heads", "data", "eval", "conf", "scripts")
SIGNATURES = dict(re.findall(r"^\| `(\w+)\((.*)\)` \|", PAGE, re.M))


@pytest.fixture
def quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads where the quickstart leaves its own; these have learnt one answer."""
    monkeypatch.chdir(tmp_path)
    target = api.load_target()
    objective = api.training_objective("medusa", target, num_heads=3)
    asked = re.search(r'head, "(.+)", max', PAGE)
    assert asked
    answer = api.generate(target, None, asked[1], 64)
    ids = torch.tensor([answer.prompt_ids + answer.token_ids])
    optimizer = torch.optim.AdamW(objective.head.parameters(), lr=3e-3)
    for _ in range(10):
        api.training_step(objective, ids, torch.ones_like(ids)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    objective.head.save(Path("outputs/quickstart/head"))


def test_the_code_runs(quickstart: None) -> None:
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
        exec(block, found)
    assert found["answer"].tau >= found["replayed"].tau > 1  # a tree, and a chain
    assert found["metrics"]["alpha_d1"] > 0
    assert "lm_head.weight" in found["tensors"]


def test_every_public_name_is_listed_and_told_of() -> None:
    assert {*LISTED} == {*api.PUBLIC}
    for name in api.PUBLIC:
        assert inspect.getdoc(getattr(api, name)), name
    own = {n for n, each in vars(api).items() if getattr(each, "__module__", "") == api.__name__}
    assert {name for name in own if name[0] != "_"} <= {*api.PUBLIC}


def test_every_word_in_code_is_an_argument_or_a_field() -> None:
    rest = re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S)
    words = {*re.findall(r"`([a-z]\w*)`", rest)}
    known = {*LISTED, *ROOMS, "output_hidden_states", "folder"}
    for text in (*SIGNATURES.values(), *LISTED.values()):
        known |= {*re.findall(r"\w+", text)}
    assert words <= known


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stay(name: str) -> None:
    signature = inspect.signature(getattr(api, name))
    kinds = {inspect.Parameter.VAR_KEYWORD: "**"}
    found = [kinds.get(each.kind, "") + each.name for each in signature.parameters.values()]
    assert ", ".join(found) == SIGNATURES[name]


@pytest.mark.parametrize("name", ["Answer", "Acceptance", "StepLoss", "TargetOutput"])
def test_fields_stay(name: str) -> None:
    kind = getattr(api, name)
    found = [each.name for each in fields(kind)] if is_dataclass(kind) else kind._fields
    assert {*re.findall(r"`(\w+)`", LISTED[name])} <= {*found}
