"""vLLM on a CPU with block drafters: greedy texts, drafts and accepted tokens, to the unit.

vLLM 0.32 gives the context keys of every layer the first layer's `k_norm` on a CPU, so heads of
several layers have it equal here. Its runner for CPUs has no DSpark.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import block_head
from environments import VLLM, needs, opened
from peagle_heads import peagle_head
from test_engines_vllm import NUM_TOKENS, accepted_per_pass, counted
from toys import save_target, texts

from data.engine_counts import DraftCounts
from eval.measure.counts import drafted
from heads.blocks.drafter import BlockChain
from heads.blocks.head import BlockHead
from heads.dflash.formats import load_dflash
from heads.drafting import Drafter
from heads.kind import DraftHead
from heads.peagle.drafter import PEagleChain
from heads.peagle.formats import load_peagle
from heads.target.model import Target

DEPTH = 4
WINDOW = {"causal": True, "window": 24}
REDUCED = {"own_output_head": True, "draft_vocab_size": 150}

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return opened(save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=6))


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """Six that the heads have learnt from, and 14 that they have not."""
    return [text[:4] for text in texts(target, 20, 1)]


def even_keys(head: BlockHead) -> BlockHead:
    """With the first layer's norm of keys in all layers."""
    first: Any = head.layers[0]
    for layer in head.layers:
        layer.self_attn.k_norm.weight.data.copy_(first.self_attn.k_norm.weight)  # type: ignore[union-attr, operator]
    return head


@needs(VLLM)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_layers": 1}, id="one layer"),
        pytest.param({}, id="two layers"),
        pytest.param({"causal": True}, id="causal"),
        pytest.param(WINDOW, id="causal in a window"),
        pytest.param(REDUCED, id="150 ids"),
    ],
)
def test_vllm_drafts_and_accepts_what_we_do(
    target: Target, prompts: list[list[int]], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """A saved head in vLLM: our texts token for token, our counts to the unit."""
    torch.manual_seed(0)
    even_keys(block_head(target, "dflash", **settings)).save(tmp_path / "head")
    model = str(tmp_path / "head")
    theirs = counted(tmp_path, target, prompts, DEPTH, method="dflash", model=model)

    head = load_dflash(model).attach(target)
    compare(target, head, lambda: BlockChain(head, DEPTH), prompts, theirs)


@needs(VLLM)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_layers": 1}, id="one layer"),
        pytest.param({"num_layers": 3}, id="three layers"),
        pytest.param({"fc_norm": True, "norm_before_residual": True}, id="norms"),
        pytest.param({"draft_vocab_size": None}, id="all ids"),
    ],
)
def test_vllm_drafts_in_parallel_what_we_do(
    target: Target, prompts: list[list[int]], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The same of P-EAGLE."""
    torch.manual_seed(0)
    peagle_head(target, **{"draft_vocab_size": 150, **settings}).save(tmp_path / "head")
    model = str(tmp_path / "head")
    how = {"method": "eagle3", "parallel_drafting": True}
    theirs = counted(tmp_path, target, prompts, DEPTH, model=model, **how)
    head = load_peagle(model).attach(target)
    compare(target, head, lambda: PEagleChain(head, DEPTH), prompts, theirs)


def compare(
    target: Target,
    head: DraftHead,
    drafter: Callable[[], Drafter],
    prompts: list[list[int]],
    theirs: list[dict[str, Any]],
) -> None:
    """Texts, drafts and accepted tokens, as decoded and as replayed."""
    ours = []
    for prompt in prompts:
        found = drafted(target, drafter(), prompt, NUM_TOKENS, DEPTH)
        assert found == DraftCounts.of(found.text, accepted_per_pass(target, head, prompt), DEPTH)
        ours.append({"proposed": DEPTH * found.drafts, **vars(found)})
    assert ours == theirs
    assert min(sum(column) for column in zip(*(c["accepted"] for c in ours), strict=True)) > 10
