"""vLLM on a CPU drafts with a stitched MTP layer as we do."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from environments import VLLM, counts_of_vllm, needs, opened
from feature_heads import feature_head
from toys import save_target, texts

from eval.measure.counts import drafted
from heads.eagle.drafter import EagleChain
from heads.kinds import load_head
from heads.mtp.head import MtpHead
from heads.mtp.stitch import stitched

NUM_TOKENS = 100

pytestmark = pytest.mark.engine


@needs(VLLM)
def test_vllm_drafts_and_accepts_what_we_do(tmp_path: Path) -> None:
    """MiMo's layer, which reads its own output: texts token for token, counts to the unit."""
    plain = save_target(tmp_path / "plain", "qwen2", num_hidden_layers=4)
    target = opened(plain)
    config = json.loads((plain / "config.json").read_text())
    config["architectures"] = ["MiMoForCausalLM"]
    (plain / "config.json").write_text(json.dumps(config))
    layer = feature_head(target, "mtp")
    assert isinstance(layer, MtpHead)
    stitched(plain, layer, tmp_path / "whole")

    whole = opened(tmp_path / "whole")
    head = load_head(str(tmp_path / "whole")).attach(whole)
    # Six that the layer has learnt from, and six that it has not.
    prompts = [text[:4] for text in texts(target, 12, 1)]
    ways = [{"method": "mtp", "num_speculative_tokens": depth} for depth in (1, 3)]
    for way, theirs in zip(
        ways, counts_of_vllm(tmp_path, whole, prompts, NUM_TOKENS, ways), strict=True
    ):
        depth = way["num_speculative_tokens"]
        ours = [
            asdict(drafted(whole, EagleChain(head, depth), prompt, NUM_TOKENS, depth))
            for prompt in prompts
        ]
        assert ours == theirs
        assert min(sum(column) for column in zip(*(c["accepted"] for c in ours), strict=True)) > 20
