"""Decoder layers are found by what they are, and heads read, train and draft behind any."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from toys import eagle_head, noisy_head
from transformers import AutoConfig, AutoModelForCausalLM

from conf.errors import InputError
from conf.settings.eagle import EagleConfig, EagleForm, OutputHead
from conf.settings.scripts import CaptureRun
from conf.settings.target import Dtype, TargetConfig
from eval.decode.drafters.self_speculation import SelfDraft, list_skipped_layers
from eval.decode.engine import NoDraft, decode
from eval.measure.replay import replay_response
from heads.decoding.tree import Tree
from heads.eagle.eagle import EagleHead, choose_output_head
from heads.eagle.network import EagleDrafter
from heads.export.writer import compute_reference_tensors
from heads.kinds import load_head
from heads.layers.fast_linear import make_low_rank_target
from heads.medusa import MedusaDrafter
from heads.target_model.check import check_target_support
from heads.target_model.decoder import (
    count_layer_outputs,
    extract_hidden_state,
    find_decoder,
    find_decoder_layers,
)
from heads.target_model.load import find_final_norm, load_remote
from heads.target_model.model import FeatureLayers, Target
from heads.vocab import DraftVocab
from scripts.capture import choose_contents

CPU = torch.device("cpu")
PROMPT = [5, 17, 40, 8, 77, 23, 61]
COMMON = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MADE = json.loads((Path(__file__).parent / "decoders.json").read_text())
"""Model type and config of small models."""
WITHOUT_SDPA = {"gptj"}


def made(name: str, **changes: Any) -> Target:
    """A target whose weights are large enough that its text is not constant."""
    family, sizes = MADE[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **sizes, **changes})
    kind = "eager" if name in WITHOUT_SDPA else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kind)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4.0)
        elif not parameter.any():
            parameter.data.normal_(std=0.1)  # a bias of 0 would hide that it is left out
    model.generation_config.eos_token_id = None
    target = Target(model.eval(), None, name)
    check_target_support(target)
    return target


shared = cache(made)  # by tests that change nothing
ALL_LAYERS = FeatureLayers((0, 1, 2, 3, 4))


@pytest.mark.parametrize("name", [each for each in MADE if each not in {"gptj", "gemma3n"}])
def test_taps_are_the_hidden_states_of_transformers(name: str) -> None:
    target = shared(name)
    theirs = target.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    found = target.encode_text(PROMPT, ALL_LAYERS)
    assert len(theirs) == 5
    for index in range(4):
        torch.testing.assert_close(found.layers[index], theirs[index])
    if name != "opt, projected":
        torch.testing.assert_close(found.hidden_states, theirs[4])


def test_of_altup_s_streams_the_active_one_is_read() -> None:
    target = made("gemma3n", altup_active_idx=2, altup_num_inputs=3)
    theirs = target.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    found = target.encode_text(PROMPT, ALL_LAYERS)
    for index in range(4):
        assert theirs[index].shape == (3, 1, 7, 64)
        torch.testing.assert_close(found.layers[index], theirs[index][2])


def test_streams_that_all_layers_mix_are_averaged() -> None:
    streams = torch.arange(12.0).view(1, 2, 3, 2)
    assert extract_hidden_state((streams, None), active=None).tolist() == [[[2.0, 3.0], [8.0, 9.0]]]
    assert extract_hidden_state([torch.ones(1, 2, 3)], active=None).shape == (1, 2, 3)


class Block(nn.Module):
    """A block that hands on a second value and reads the one of the block before."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))

    def forward(self, state: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.part(state), state if before is None else before


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def test_the_decoder_of_a_model_that_calls_its_output_head_so() -> None:
    config = AutoConfig.for_model("modernbert-decoder", **{**COMMON, **MADE["phi"][1]})
    model = AutoModelForCausalLM.from_config(config)
    assert find_decoder(model) is model.model


def test_experts_projections_and_other_models_are_no_layers() -> None:
    decoder = nn.Module()
    decoder.h = blocks(3)
    decoder.streams = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    decoder.tower = nn.Module()
    decoder.tower.layers = blocks(3)
    assert find_decoder_layers(decoder, 3, "t") is decoder.h


def test_layers_in_no_list_or_in_several_are_refused_by_name() -> None:
    decoder = nn.Module()
    decoder.attentions, decoder.ffns = blocks(3), blocks(3)
    with pytest.raises(
        InputError, match=r"target\.path=t: Module has \['attentions', 'ffns'\] of 3"
    ):
        find_decoder_layers(decoder, 3, "t")
    with pytest.raises(InputError, match=r"target\.path=t: Module has no list of 4 layers"):
        find_decoder_layers(decoder, 4, "t")


@pytest.mark.parametrize("name", ["gpt2", "falcon"])
def test_layers_are_left_out_whatever_form_they_give_their_state_in(name: str) -> None:
    target = shared(name)
    assert target._num_outputs == [{"gpt2": 0, "falcon": 2}[name]] * 4
    text = decode(target, NoDraft(), PROMPT, 16).token_ids
    for skip in (list_skipped_layers(target, 2), (1,)):
        assert decode(target, SelfDraft(target, skip, 3), PROMPT, 16).token_ids == text


def test_layers_that_read_more_than_a_state_of_each_other_stay() -> None:
    layers = blocks(2)

    def run() -> None:
        given = layers[0](torch.ones(1, 1, 2))
        layers[1](*given)

    with pytest.raises(InputError, match=r"target\.path=t: Block reads more of the previous layer"):
        count_layer_outputs(layers, run, "t")
    assert count_layer_outputs(
        layers, lambda: [layer(torch.ones(1, 1, 2)) for layer in layers], "t"
    ) == [
        2,
        2,
    ]


@pytest.fixture
def with_a_layer_of_images() -> Target:
    """As Mllama, whose text goes around layers that look at images."""
    target = made("gpt2")
    target.__dict__["decoder_layers"] = nn.ModuleList(
        [*target.decoder_layers[:3], Block(), target.decoder_layers[3]]
    )
    target.config.n_layer = 5
    return target


def test_a_layer_that_no_text_passes_is_named(with_a_layer_of_images: Target) -> None:
    with pytest.raises(InputError, match=r"hidden states \[4\]: not available, as these layers"):
        with_a_layer_of_images.encode_text(PROMPT, FeatureLayers((1, 4)))


def test_golden_values_count_such_a_layer(with_a_layer_of_images: Target, tmp_path) -> None:
    target = with_a_layer_of_images
    tensors, _ = compute_reference_tensors(
        eagle3(target, layers=[1, 2, 5]), target, num_rows=4, depth=2
    )
    assert torch.equal(tensors["hidden_states.3"], tensors["hidden_states.4"])
    save_file(tensors, tmp_path / "golden.safetensors")


def test_a_head_asks_for_layers_when_it_is_attached() -> None:
    target = made("gpt2")
    target.config.n_layer = 5
    with pytest.raises(InputError, match=r"GPT2Model has no list of 5 layers"):
        eagle3(target)


def eagle3(
    target: Target, start: OutputHead = OutputHead.copy, layers: list[int] | None = None
) -> EagleHead:
    settings = EagleConfig(output_head=start, layers=layers)
    return EagleHead.from_settings(target, settings, DraftVocab.make_full(96), seed=0)


# --- Heads behind them.

HEADS = {
    "medusa": noisy_head,
    "eagle1": lambda target: eagle_head(target, EagleForm.eagle1, num_updates=3),
    "eagle3": lambda target: eagle_head(target, EagleForm.eagle3, num_updates=3, fc_norm=True),
}


# Taps of every form; and what each reads besides: a narrower last state, an output head's bias.
CASES = [
    *((name, "eagle3") for name in ("gpt2", "opt, projected", "falcon", "gemma4", "gptj", "phi")),
    ("opt, projected", "medusa"), ("opt, projected", "eagle1"), ("phi", "eagle1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_replay_equals_decoding_and_the_text_is_the_target_s(name: str, kind: str) -> None:
    target = shared(name)
    head = HEADS[kind](target)
    text = decode(target, NoDraft(), PROMPT, 14).token_ids
    drafter = (
        MedusaDrafter(head, Tree.make_chain(3)) if kind == "medusa" else EagleDrafter(head, 3)
    )  # fmt: skip
    decoded = decode(target, drafter, PROMPT, 14)
    assert decoded.token_ids == text
    assert replay_response(target, head, Tree.make_chain(3), PROMPT, text) == decoded.steps


def test_a_head_is_as_wide_as_a_projected_embedding_and_keeps_it(tmp_path) -> None:
    target = made("opt, projected")
    assert (target.hidden_size, target.feature_size) == (32, 64)
    head = eagle3(target)
    assert (head.fc.in_features, head.fc.out_features) == (3 * 64, 32)
    head.save(tmp_path / "head")
    loaded = load_head(str(tmp_path / "head")).attach(target)
    assert loaded.embed_tokens is not None
    assert torch.equal(loaded.embed_tokens.weight, target.embedding.weight)
    output = target.encode_text(PROMPT, head.taps)
    drafts = [each.compute_candidates(output, [*PROMPT, 9], 3, 2, 4) for each in (head, loaded)]
    assert torch.equal(*drafts)


def test_states_of_two_widths_are_not_stored() -> None:
    config, run = made("opt, projected").config, CaptureRun()
    run.layers = [1, 2]
    with pytest.raises(
        InputError, match=r"layers=\[1, 2\]: .* have width 64, but its last ones 32"
    ):
        choose_contents(run, config)
    run.layers = []
    assert choose_contents(run, config).hidden_size == 32


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma4", "bamba", "longcat"])
def test_the_final_norm_is_found_in_what_is_loaded_without_layers(name: str, tmp_path) -> None:
    if name == "longcat" and transformers.__version__.startswith("5.17"):
        pytest.skip("its layers are counted twice there, and loaded")
    target = shared(name)
    target.model.save_pretrained(tmp_path)
    bare = load_remote(TargetConfig(path=str(tmp_path), dtype=Dtype.float32), CPU)
    assert (
        sum(1 for each in bare.modules() if isinstance(each, type(target.decoder_layers[0]))) == 0
    )
    output = target.encode_text(PROMPT, FeatureLayers((4,)))
    assert torch.equal(find_final_norm(bare)(output.layers[4]), output.hidden_states)


def test_what_lies_behind_the_layers_besides_a_norm_is_named(tmp_path) -> None:
    with pytest.raises(
        InputError, match=r"OPTForCausalLM makes last .* with \['project_out'\] too"
    ):
        find_final_norm(made("opt, projected").model)
    made("gemma3n").model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"gemma3n_text makes last .* with \['altup_unembed"):
        load_remote(TargetConfig(path=str(tmp_path), dtype=Dtype.float32), CPU)


# --- Output heads with a bias.


def test_heads_start_from_the_rows_of_a_biased_output_head_but_cannot_freeze_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = made("phi")
    assert target.output_head.bias.abs().max() > 0.1
    assert torch.equal(eagle3(target).lm_head.weight, target.output_head.weight)
    message = r"output_head=frozen: .*=phi has a bias.*head=copy or scratch"
    with pytest.raises(InputError, match=message):
        eagle3(target, OutputHead.frozen)
    monkeypatch.setattr("heads.eagle.eagle.MIN_FROZEN_SIZE", 1)
    assert choose_output_head(OutputHead.auto, target) is OutputHead.copy


def test_an_output_head_of_low_rank_keeps_the_bias() -> None:
    target = made("phi")
    target.output_head.bias.data.mul_(100)  # decides which ids are likely
    lent = make_low_rank_target(target, 63)
    lent.output_head.num_candidates = 4
    states = target.encode_text(PROMPT).hidden_states
    found, expected = lent.compute_logits(states), target.compute_logits(states)
    torch.testing.assert_close(found.max(-1), expected.max(-1))
    target.output_head.bias.data.mul_(0)
    assert (target.compute_logits(states) - expected).abs().max() > 0.1
