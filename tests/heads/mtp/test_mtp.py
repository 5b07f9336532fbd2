"""Every family's layer: what it computes, and its names in the target's files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mtp_targets import TARGETS, saved, target_with_layer
from safetensors.torch import load_file
from toys import texts, trained
from transformers import AutoConfig, AutoModelForCausalLM, modeling_layers

from conf.errors import InputError
from conf.settings.drafting import HeadRef
from conf.settings.eagle import MtpConfig
from conf.settings.export import ExportFormat, ExportRun
from conf.settings.target import TargetConfig
from eval.decode.engine import NoDraft, decode
from eval.measure.replay import replay_response
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import DynamicShape, Tree
from heads.kinds import load_head
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.layers.documents import Documents
from heads.mtp.checkpoint import join_experts, split_experts
from heads.mtp.families import FAMILIES
from heads.mtp.mtp import MtpHead, build_layer_settings, build_mtp_config
from heads.target_model.model import FeatureLayers, Target
from heads.vocab import DraftVocab
from scripts import export
from train.mtp import MtpObjective

NUM_STEPS = 4
HEAD = "shared_head.head"


@torch.no_grad()
def replica(target: Target, head: MtpHead, ids: list[int], num_drafts: int) -> list[int]:
    """Drafts by the table of families, each from all rows anew, under a causal mask."""
    row, layer = head.config, head.layer
    read = target.encode_text(ids, FeatureLayers((target.num_layers,)))
    tokens = [*ids[1:], int(target.compute_logits(read.hidden_states[0, -1]).argmax())]
    normed = read.hidden_states[0]
    states = list(read.layers[target.num_layers][0] if row.state_before_norm else normed)
    for _ in range(num_drafts):
        embeds = target.embedding.weight[torch.tensor(tokens)].clone()
        if row.zeroes_first:
            embeds[0] = 0
        halves = [head.enorm(embeds), head.hnorm(torch.stack(states))]
        rows = head.fc(torch.cat(halves[::-1] if row.state_first else halves, -1))[None]
        places = torch.arange(len(tokens))[None]
        config = layer.self_attn.config
        window = getattr(layer.self_attn, "sliding_window", None) or len(tokens)
        hidden = torch.full((len(tokens), len(tokens)), float("-inf"))
        mask = (hidden.triu(1) + hidden.tril(-window))[None, None]
        usual, config._attn_implementation = config._attn_implementation, "eager"
        found = layer(
            rows, **{**head._build_layer_arguments(rows[0], places[0]), "attention_mask": mask}
        )
        config._attn_implementation = usual
        output = (found[0] if isinstance(found, tuple) else found)[0, -1]
        normed = output if head.norm is None else head.norm(output)
        tokens.append(int(target.compute_logits(normed).argmax()))
        states.append(normed if row.feeds_back_normed else output)
    return tokens[len(ids) :]


@pytest.mark.parametrize("architecture", TARGETS)
def test_drafts_are_those_of_a_plain_replica(architecture: str) -> None:
    target, head = target_with_layer(architecture)
    ids = torch.randint(3, 290, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    drafter, proposed = head.make_drafter(Tree.make_chain(NUM_STEPS), GREEDY, [0]), []
    propose = drafter.propose
    drafter.propose = lambda roots: proposed.append(propose(roots)) or proposed[-1]
    text = decode(target, drafter, ids, 4).token_ids
    read = list(ids)
    assert len(proposed) >= 3
    for step, draft in enumerate(proposed[:3]):
        assert draft.tokens[0].tolist() == replica(target, head, read, NUM_STEPS), step
        read.append(text[step])  # none of the drafts is right
    assert len(set(proposed[0].tokens[0].tolist())) > 1


@pytest.mark.parametrize("architecture", ["MiMoForCausalLM", "MiMoV2FlashForCausalLM"])
def test_a_layer_that_learns_by_its_own_tokens_reads_what_it_drafts(architecture: str) -> None:
    target, head = target_with_layer(architecture)
    ids = torch.randint(3, 290, (20,), generator=torch.Generator().manual_seed(1))
    output = target.encode_text(ids.tolist(), head.taps)
    states = head.collect_features(output)[0]
    next_id = target.compute_logits(output.hidden_states[0, -1]).argmax(-1, keepdim=True)
    known = torch.cat([ids, next_id])
    places, last = torch.arange(20), torch.tensor([19])
    text = head.encode_context(states, known[1:], places)
    seen = build_causal_range(Documents.from_lengths([20], ids.device), last)
    branches = BranchCache(text.keys[None], text.values[None], seen)
    with torch.no_grad():
        steps = head.unroll(text, known, last, branches, own_tokens=True)
        found = [int(head.compute_logits(next(steps)).argmax()) for _ in range(NUM_STEPS)]
    assert found == replica(target, head, ids.tolist(), NUM_STEPS)


@pytest.mark.parametrize("architecture", ["MiMoV2FlashForCausalLM", "NemotronHForCausalLM"])
def test_decoding_loses_nothing_and_replays(architecture: str) -> None:
    """Of a layer with a window and sinks, and of one in parts without rotation."""
    target, _ = target_with_layer(architecture)
    shape = build_mtp_config(target.config, architecture, "toy", sparse=False)
    head = MtpHead(shape, DraftVocab.make_full(300)).initialise(target, seed=0)
    documents = texts(target, 1, 24)
    head = trained(MtpObjective(head, target, MtpConfig(num_steps=3)), documents, 25)
    prompt, text = documents[0][:4], documents[0][4:]
    chain = Tree.make_chain(3)
    found = decode(target, head.make_drafter(chain, GREEDY, [0]), prompt, 24)
    assert found.token_ids == text
    assert replay_response(target, head, chain, prompt, text) == found.steps
    assert sum(step.num_accepted for step in found.steps) > 10
    assert decode(target, head.drafter(head, DynamicShape(3, 3, 8)), prompt, 24).token_ids == text


# Of each kind of attention, and of a layer in parts.
OFTEN = ["DeepseekV3ForCausalLM", "MiMoV2FlashForCausalLM", "NemotronHForCausalLM",
         "Qwen3NextForCausalLM", "HYV3ForCausalLM", "Ernie4_5_MoeForCausalLM"]  # fmt: skip


@pytest.mark.parametrize("architecture", OFTEN)
def test_a_layer_learns_under_autocast(architecture: str) -> None:
    """Norms of queries and keys leave them wider than values."""
    target, head = target_with_layer(architecture)
    ids, places = torch.arange(5, 25), torch.arange(19)
    features = head.collect_features(target.encode_text(ids[:-1].tolist(), head.taps))[0]
    with torch.autocast("cpu", torch.bfloat16):
        text = head.encode_context(features, ids[1:], places)
        seen = build_causal_range(Documents.from_lengths([len(places)], ids.device), places)
        steps = head.unroll(
            text, ids, places, BranchCache(text.keys[None], text.values[None], seen)
        )
        loss = sum(next(steps).float().square().sum() for _ in range(2))
    loss.backward()
    assert head.fc.weight.grad.isfinite().all()
    head.zero_grad()


NAMES = json.loads((Path(__file__).parent / "names.json").read_text())
"""Of tensors in the published files of each family."""


@pytest.mark.parametrize("architecture", TARGETS)
def test_the_layer_is_read_from_the_targets_own_files(architecture: str, tmp_path: Path) -> None:
    target, head = target_with_layer(architecture)
    folder = saved(tmp_path / "model", architecture)
    stored = load_file(folder / "model-00002-of-00002.safetensors")
    assert set(NAMES[architecture]) <= set(stored)
    found = load_head(str(folder))
    assert isinstance(found, MtpHead)
    assert found.config.layer == head.config.layer
    expected = head.build_files().tensors
    assert found.build_files().tensors.keys() == expected.keys()
    assert all(torch.equal(found.build_files().tensors[name], t) for name, t in expected.items())
    found.attach(target).save(tmp_path / "own")
    own = load_head(str(tmp_path / "own"))
    assert all(torch.equal(own.build_files().tensors[name], t) for name, t in expected.items())


def test_a_head_knows_as_many_positions_as_its_indexer_takes(tmp_path: Path) -> None:
    """Further ones would see what the indexer chooses, which nothing here computes."""
    target, head = target_with_layer("GlmMoeDsaForCausalLM")
    assert (head.max_positions, target.max_positions) == (64, 256)
    assert load_head(str(saved(tmp_path / "model", "GlmMoeDsaForCausalLM"))).max_positions == 64
    kept = [name for name, each in head.named_parameters() if not each.requires_grad]
    parts = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    assert kept == [f"layer.self_attn.indexer.{name}" for name in parts]
    ids = list(range(5, 65))
    text = decode(target, head.make_drafter(Tree.make_chain(3), GREEDY, [0]), ids, 12).token_ids
    assert text == decode(target, NoDraft(), ids, 12).token_ids


EXAONE = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.mark.parametrize(
    ("says", "window"),
    [
        ({}, 6),
        ({"sliding_windows": [9, 0]}, 9),
        ({"mtp_layer_types": ["full_attention"], "mtp_sliding_windows": [0]}, 0),
        ({"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [7]}, 7),
    ],
)
def test_exaones_window_is_that_of_the_mtp_layer_or_of_the_first(says, window: int) -> None:
    config = AutoConfig.for_model("exaone_moe", num_hidden_layers=2, **EXAONE, **says)
    settings = build_layer_settings(config, FAMILIES["ExaoneMoeForCausalLM"], sparse=False)
    assert (settings["layer_types"], settings["sliding_window"]) == (["sliding_attention"], window)


@pytest.mark.parametrize("name", ["MiMoV2FlashForCausalLM", "ExaoneMoeForCausalLM"])
def test_a_fresh_layer_of_a_family_of_dense_ones_is_dense(name: str) -> None:
    target, _ = target_with_layer(name)
    with patch.object(type(target), "architectures", [name]):
        fresh = MtpHead.from_settings(target, MtpConfig(), DraftVocab.make_full(300), seed=0)
    assert not [each for each in fresh.collect_tensors() if "experts" in each]


def test_copies_of_the_targets_ends_are_not_of_the_layer(tmp_path: Path) -> None:
    ends = {f"model.layers.2.{n}.weight": torch.ones(300, 64) for n in ("embed_tokens", HEAD)}
    folder = saved(tmp_path / "model", "DeepseekV3ForCausalLM", ends)
    _, head = target_with_layer("DeepseekV3ForCausalLM")
    assert load_head(str(folder)).build_files().tensors.keys() == head.build_files().tensors.keys()


def test_experts_may_be_joined_in_the_file(tmp_path: Path) -> None:
    _, head = target_with_layer("Qwen3_5MoeForCausalLM")
    folder = saved(tmp_path / "model", "Qwen3_5MoeForCausalLM", joined=True)
    stored = load_file(folder / "model-00002-of-00002.safetensors")
    assert stored["mtp.layers.0.mlp.experts.gate_up_proj"].shape == (4, 64, 64)
    found, expected = load_head(str(folder)).build_files().tensors, head.build_files().tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_experts_are_joined_as_transformers_has_them() -> None:
    gate, up, down = torch.randn(3, 2, 4, 4).unbind()
    single = {
        f"layer.mlp.experts.{number}.{kind}_proj.weight": tensor[number]
        for kind, tensor in (("gate", gate), ("up", up), ("down", down))
        for number in range(2)
    }
    joined = join_experts(single)
    assert set(joined) == {"layer.mlp.experts.gate_up_proj", "layer.mlp.experts.down_proj"}
    assert torch.equal(joined["layer.mlp.experts.gate_up_proj"], torch.cat([gate, up], 1))
    assert torch.equal(joined["layer.mlp.experts.down_proj"], down)
    again = split_experts(joined)
    assert again.keys() == single.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in single.items())


INPUT, MORE = "model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.more.weight"
GONE = dict.fromkeys(f"model.mtp_layers.0.{name}" for name in (
    "input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight",
    "final_layernorm.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
    *(f"self_attn.{each}_proj.{kind}" for each in "qkv" for kind in ("weight", "bias")),
    "self_attn.o_proj.weight", *(f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
))  # fmt: skip


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        ({"model_type": "deepseek_v4"}, {}, "cannot be read yet, as .*several residual streams"),
        ({"model_type": "mimo_v2"}, {}, "cannot be read yet, as .*divided for eight GPUs"),
        ({}, {INPUT: None}, r"missing, .*\['model.mtp_layers.0.input_proj"),
        ({}, {MORE: torch.ones(1)}, r"of another shape: .*mtp_layers.0.more"),
        ({}, {INPUT: torch.ones(3, 3)}, r"of another shape: .*0.input_proj"),
        ({}, {INPUT: torch.ones(64, 128, dtype=torch.int8)},
         r"input_proj.weight is torch.int8, but a quantised MTP layer cannot be read"),
        ({}, GONE, r"names 1 MTP layers, .* fine-tuning, merging or"),
    ],
)  # fmt: skip
def test_a_layer_that_is_not_known_or_not_whole_is_refused(
    config: dict[str, Any], changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model", "MiMoForCausalLM", changed)
    if config:
        (folder / "config.json").write_text(
            json.dumps({"architectures": ["SomeForCausalLM"], **config})
        )
    with pytest.raises(InputError, match=message):
        load_head(str(folder))


def test_head_layers_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "MiMoForCausalLM")
    with pytest.raises(InputError, match=r"the last hidden state; leave head\.layers unset"):
        load_head(str(folder), layers=[1])


# --- The words of an MTP layer: its card, its readings, the refusal of exports.


def test_the_card_says_what_it_is_and_where_engines_read_it() -> None:
    _, head = target_with_layer("Qwen3NextForCausalLM")
    facts = head.build_card_facts({})
    assert (facts.tag, facts.num_draft_tokens, facts.vllm_method) == ("mtp", 5, None)
    assert "multi-token prediction of Qwen3NextForCausalLM (hidden size 64)" in facts.description
    assert "only from the target's own folder; write it there with" in facts.vllm_problem


def test_files_may_have_meant_the_other_order() -> None:
    target, head = target_with_layer("MiMoForCausalLM")
    readings = dict(head.attach(target).iter_config_variants())
    assert list(readings) == ["state_first=false", "feeds_back_normed=false", "zeroes_first=false"]
    ids = list(range(5, 25))
    output = target.encode_text(ids[:-1], head.taps)

    def drafts(reading: MtpHead) -> list[int]:
        return reading.compute_candidates(output, ids, 4, 3, 1).flatten().tolist()

    assert drafts(readings["state_first=false"]) != drafts(head)
    (again,) = (
        r
        for told, r in readings["state_first=false"].iter_config_variants()
        if "state_first" in told
    )
    assert drafts(again) == drafts(head)


def test_an_export_names_the_command_that_stitches(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "MiMoForCausalLM")
    run = ExportRun(
        head=HeadRef(path=str(folder)), target=TargetConfig(path=str(folder)),
        format=ExportFormat.vllm, out_dir=str(tmp_path / "out"),
    )  # fmt: skip
    with pytest.raises(InputError, match=r"write it there with `scripts/mtp\.py action=stitch`"):
        export.main(run)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("architecture", TARGETS)
def test_no_weight_of_a_fresh_layer_is_left_to_memory(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that nobody has filled is NaN here."""
    target, head = target_with_layer(architecture)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        fresh = MtpHead(head.config, DraftVocab.make_full(target.vocab_size))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, parameter in fresh.initialise(target, seed=0).named_parameters():
        assert parameter.isfinite().all(), name


# --- Our drafts are those of transformers' own MTP layers, where it has them.


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
    seen = build_causal_range(Documents.from_lengths([20], ids.device), last)
    outputs = head.draft(text, last, BranchCache(text.keys[None], text.values[None], seen))
    torch.testing.assert_close(head.compute_logits(outputs), expected[0], rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1
