"""Our drafts are those of transformers' own MTP layers, where it has them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mtp_targets import saved, target_with_layer
from transformers import AutoModelForCausalLM, modeling_layers

from heads.kinds import load_head
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.layers.documents import Documents
from heads.mtp.mtp import MtpHead


@torch.no_grad()
@pytest.mark.skipif(
    not hasattr(modeling_layers, "MtpModel"), reason="this transformers has no MTP layers"
)
@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_logits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """It counts positions from the embedding's token, and so zeroes nothing at position 0."""
    folder = saved(tmp_path / "model", architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # It knows the number of layers of the published models alone.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]
    theirs = modeling_layers.MtpModel.from_pretrained(model).eval()
    ids = torch.randint(3, 290, (20,), generator=torch.Generator().manual_seed(1))
    states = model.model(ids[None]).last_hidden_state
    tokens = torch.cat([ids[1:], model.lm_head(states[0, -1:]).argmax(-1)])
    _, expected, _ = theirs(tokens[None], states, None, torch.arange(1, 21)[None], None)

    target, _ = target_with_layer(architecture)
    head = load_head(str(folder)).attach(target)
    assert isinstance(head, MtpHead)
    assert head.config.zeroes_first
    head.config = replace(head.config, zeroes_first=False)
    last, places = torch.tensor([19]), torch.arange(20)
    text = head.encode_context(states[0], tokens, places)
    seen = build_causal_range(Documents.from_length(20, ids.device), last)
    outputs = head.draft(text, last, BranchCache(text.keys[None], text.values[None], seen))
    torch.testing.assert_close(head.compute_logits(outputs), expected[0], rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1
