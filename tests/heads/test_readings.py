"""Readings of a head's files that change more than a setting: orders of features, rows, ids."""

from typing import Any

import pytest
import torch
from feature_heads import fresh, settings_of
from toys import eagle_head, random_target

from conf.settings.eagle import EagleForm
from heads.draft_head import DraftHead
from heads.target_model.model import Target
from heads.vocab import DraftVocab


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(num_hidden_layers=6)


def of(head: DraftHead, words: str) -> Any:
    return next(other for name, other in head.iter_config_variants() if name == words)


@pytest.mark.parametrize("fc_norm", [False, True])
def test_features_that_lie_in_another_order(target: Target, fc_norm: bool) -> None:
    """Files whose parts are of hidden states 4, 1 and 2, where they should be of 1, 2 and 4."""
    right = eagle_head(target, EagleForm.eagle3, num_updates=2, layers=[1, 2, 4], fc_norm=fc_norm)
    first, second, third = right.fc.weight.detach().chunk(3, dim=1)
    state = right.state_dict() | {"fc.weight": torch.cat([third, first, second], 1)}
    for place, old in enumerate((2, 0, 1)):
        if fc_norm:
            value = torch.full((64,), 1.0 + old)
            right.state_dict()[f"fc_norm.{old}.weight"].copy_(value)
            state[f"fc_norm.{place}.weight"] = value
    shuffled = type(right)(right.config, right.vocab)
    shuffled.load_state_dict(state)
    found = of(shuffled.attach(target), "features in the order [4, 1, 2]")
    assert found.config.layers == (1, 2, 4)
    for name, tensor in right.state_dict().items():
        assert tensor.equal(found.state_dict()[name]), name


def test_rows_that_hold_the_feature_first(target: Target) -> None:
    head = eagle_head(target, EagleForm.eagle1, num_updates=0)
    found = of(head, "fc reads the hidden state before the embedding")
    embedding, feature = found.fc.weight.chunk(2, dim=1)
    assert torch.cat([feature, embedding], 1).equal(head.fc.weight)


def test_ids_that_were_taken_for_offsets(target: Target) -> None:
    """Draft ids 0, 1, 2 of target ids 5, 6, 9, read as 0 + 5, 1 + 6, 2 + 9."""
    head = fresh(target, settings_of("dflash", own_output_head=True, draft_vocab_size=3))
    head.vocab = DraftVocab(torch.tensor([5, 7, 11]), target.vocab_size)
    assert of(head, "d2t holds target ids, not offsets").vocab.ids.tolist() == [5, 6, 9]
    head.vocab = DraftVocab(torch.tensor([5, 6, 9]), target.vocab_size)
    assert "d2t holds target ids, not offsets" not in dict(head.iter_config_variants())


def test_windows_masks_and_rotations_that_readers_would_take(target: Target) -> None:
    head = fresh(target, settings_of("dspark", causal=True, window=24))
    target.config.sliding_window = 40
    names = list(dict(head.iter_config_variants()))
    assert names[0] == "sample_from_anchor=false"
    assert {"no sliding window", "a sliding window of 40", "causal=false"} < set(names)
    assert "RoPE with theta 1e+06" in names
    theirs = of(head, "RoPE with theta 1e+06")
    assert theirs.config.llama.rope_parameters["rope_theta"] == 1e6
    assert head.config.llama.rope_parameters["rope_theta"] == 1e4
    assert theirs.fc.weight.data_ptr() == head.fc.weight.data_ptr()
    size = target.vocab_size
    assert of(head, f"mask token {size - 1}").config.mask_token_id == size - 1
