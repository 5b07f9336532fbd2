"""Passes of recurrent and sliding targets, and of LongRoPE: as on the CPU, and without waits."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from emulated.device import Counts, counted, off
from emulated.test_decoding import PROMPTS
from torch import Tensor
from toys import random_model, stream, tree_of
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from eval.decode import cuda_graphs as captured
from eval.decode.cuda_graphs import GraphDecoder
from eval.decode.drafters.lookup import Recycling, SuccessorTable
from eval.decode.engine import NoDraft, Request, decode_many
from heads.decoding.drafting import Drafter
from heads.decoding.sampling import GREEDY
from heads.layers.documents import Documents
from heads.target_model.model import Target
from heads.target_model.recurrent import _group_documents

LENGTHS = (20, 6, 2, 19, 7, 2)  # of two sequences


def recurrent_of(device: str) -> Target:
    """A target of two layers with short convolutions, and two that attend."""
    model = random_model("lfm2", num_hidden_layers=4)
    return Target(model.to(device), None, "lfm2")


def longrope_of(device: str) -> Target:
    """A target for which some documents are longer than the switch."""
    settings = {"short_factor": [1.5] * 16, "long_factor": [3.0 + n for n in range(16)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12}
    rope["partial_rotary_factor"] = 1.0
    model = random_model(
        "phi3", original_max_position_embeddings=12, rope_parameters=rope | settings
    )
    return Target(model.to(device), None, "phi3")


@pytest.fixture
def waiting_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 5.17: the host decides by the largest position."""
    update = Phi3RotaryEmbedding.forward

    @wraps(update)
    def forward(module: Any, x: Tensor, position_ids: Tensor) -> Any:
        assert int(position_ids.max()) >= 0
        return update(module, x, position_ids)

    monkeypatch.setattr(Phi3RotaryEmbedding, "forward", forward)


@pytest.mark.usefixtures("waiting_rope")
@pytest.mark.parametrize("target_of", [recurrent_of, longrope_of])
def test_reading_documents_waits_for_nothing(target_of: Callable[[str], Target]) -> None:
    assert len(_group_documents(LENGTHS)) == 3
    numbers = torch.arange(sum(LENGTHS))
    owners = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    ids = (numbers * 7 % 90).view(2, -1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).view(2, -1)
    found = {}
    for device in ("cpu", "cuda"):
        target, documents = target_of(device), Documents.from_ids(owners.view(2, -1))
        given = ids.to(device), positions.to(device), documents.to_device(torch.device(device))
        with torch.no_grad():
            target.encode_documents(*given)  # makes what lasts
            with counted() as counts:
                states = target.encode_documents(*given).hidden_states
        found[device] = states.cpu()
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=1e-4, rtol=1e-4)
    assert counts.num_waits == 0, str(counts)


def decoded(device: str, drafter: Drafter) -> tuple[list[list[int]], list[Counts]]:
    target = recurrent_of(device)
    target.model.generation_config.eos_token_id = []
    texts: list[list[int]] = [[] for _ in PROMPTS]
    prompts = [[token % 90 for token in ids] for ids in PROMPTS]
    steps, found = stream(target, drafter, prompts, 8, GREEDY, [3, 4, 5]), []
    while True:
        with counted() as counts:
            new = next(steps, None)
        if new is None:
            return texts, found[2:-1]
        found.append(counts)
        for text, tokens in new.items():
            texts[text] += tokens


@pytest.mark.parametrize("tree", [False, True])
def test_a_step_waits_for_its_tree_and_for_what_is_kept(tree: bool) -> None:
    def drafter() -> Any:
        return Recycling(SuccessorTable(), tree_of([0, 0, 1, 1])) if tree else NoDraft()

    with off():
        expected, _ = decoded("cpu", drafter())
    texts, steps = decoded("cuda", drafter())
    assert texts == expected
    for counts in steps:
        assert counts.num_waits <= 1 + tree, str(counts)


def test_captured_trees_in_sliding_layers_are_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured, "WIDTH", 32)
    requests = [Request([token % 90 for token in ids] * 3) for ids in PROMPTS[:2]]

    def make(_seeds: list[int]) -> Drafter:
        return Recycling(SuccessorTable(), tree_of([0, 0, 1, 1]))

    def texts(device: str) -> list[list[int]]:
        target = Target(random_model("mistral").to(device), None, "mistral")
        target.model.generation_config.eos_token_id = []
        if device == "cpu":
            found = decode_many(target, make, requests, 30, 2)
        else:
            found = GraphDecoder(target, make, 30).decode_requests(requests, 2)
        return [each.token_ids for each in found]

    with off():
        expected = texts("cpu")
    assert texts("cuda") == expected
