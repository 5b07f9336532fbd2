"""vLLM on a CPU with block drafters: greedy texts, drafts and accepted tokens, to the unit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import VLLM, counts_of_vllm, drafted, needs, opened
from feature_heads import feature_head
from toys import save_target, texts

from conf.settings.export import ExportFormat
from data.servers.serving_engines import DraftCounts
from heads.blocks.block_head import BlockDrafter
from heads.decoding.drafting import Drafter
from heads.draft_head import DraftHead
from heads.eagle.peagle import PEagleDrafter
from heads.export.writer import compute_reference_tensors, export_head
from heads.kinds import load_head
from heads.target_model.model import Target
from tests.engines.test_vllm import NUM_TOKENS, accepted_per_pass, counted

DEPTH, FEW_TOKENS = 4, 40
WINDOW = {"causal": True, "window": 24}
SCALED = {
    "input_embedding_scale": 1.2,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 4.0,
}
REDUCED = {"own_output_head": True, "draft_vocab_size": 150}

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return opened(save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=6))


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """Six that the heads have learnt from, and 14 that they have not."""
    return [text[:4] for text in texts(target, 20, 1)]


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
    feature_head(target, "dflash", **settings).save(tmp_path / "head")
    model = str(tmp_path / "head")
    theirs = counted(tmp_path, target, prompts, DEPTH, method="dflash", model=model)

    head = load_head(model).attach(target)
    compare(target, head, lambda: BlockDrafter(head, DEPTH), prompts, theirs)


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
    feature_head(target, "peagle", **{"draft_vocab_size": 150, **settings}).save(tmp_path / "head")
    model = str(tmp_path / "head")
    how = {"method": "eagle3", "parallel_drafting": True}
    theirs = counted(tmp_path, target, prompts, DEPTH, model=model, **how)
    head = load_head(model).attach(target)
    compare(target, head, lambda: PEagleDrafter(head, DEPTH), prompts, theirs)


@needs(VLLM)
@pytest.mark.parametrize(
    ("kind", "settings", "changes"),
    [
        pytest.param("dspark", {"num_layers": 1}, {}, id="DSpark, one layer"),
        pytest.param("dspark", {}, {}, id="DSpark, two layers"),
        pytest.param("dflash2", {"num_layers": 1}, {}, id="DFlash-2, one layer"),
        pytest.param("dflash2", {}, {}, id="DFlash-2, two layers"),
        pytest.param("dflash2", {}, SCALED, id="DFlash-2, scaled"),
        pytest.param(
            "dflash", WINDOW, {"full_layers": (1,)}, id="a layer of DFlash without a window"
        ),
    ],
)
def test_vllm_on_interpreted_kernels_drafts_what_we_do(
    target: Target, prompts: list[list[int]], tmp_path: Path, kind, settings, changes
) -> None:
    """The check of the GPU, on fewer and shorter texts; also in speculators' layout."""
    torch.manual_seed(0)
    trained = feature_head(target, kind, **settings)
    trained.config = replace(trained.config, **changes)
    trained.save(tmp_path / "head")
    engine = ExportFormat.vllm if changes else ExportFormat.speculators
    export_head(
        trained,
        engine,
        compute_reference_tensors(trained, target, num_rows=5),
        tmp_path / "export",
        {},
    )
    method = "dspark" if kind == "dspark" else "dflash"
    common = {"method": method, "num_speculative_tokens": DEPTH}
    settings = [common | {"model": str(tmp_path / name)} for name in ("head", "export")]
    some = [*prompts[:3], prompts[-1]]
    script = "vllm_interpreted.py"
    saved, exported = counts_of_vllm(tmp_path, target, some, FEW_TOKENS, settings, script)

    head = load_head(str(tmp_path / "head")).attach(target)
    compare(target, head, lambda: BlockDrafter(head, DEPTH), some, saved, FEW_TOKENS)
    assert exported == saved


def compare(
    target: Target,
    head: DraftHead,
    drafter: Callable[[], Drafter],
    prompts: list[list[int]],
    theirs: list[dict[str, Any]],
    num_tokens: int = NUM_TOKENS,
) -> None:
    """Texts, drafts and accepted tokens, as decoded and as replayed."""
    ours = []
    for prompt in prompts:
        found = drafted(target, drafter(), prompt, num_tokens, DEPTH)
        passes = accepted_per_pass(target, head, prompt, num_tokens)
        assert found == DraftCounts.from_passes(found.text, passes, DEPTH)
        ours.append(vars(found))
    assert ours == theirs
    least = 10 if num_tokens == NUM_TOKENS else 3
    assert min(sum(column) for column in zip(*(c["accepted"] for c in ours), strict=True)) > least
