from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import eagle_head, packed, random_target, texts
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from conf.errors import InputError
from conf.settings.eagle import EagleConfig, EagleForm, OutputHead
from heads.eagle.eagle import EagleHead, choose_output_head
from heads.eagle.network import EagleLayer, default_layers
from heads.layers.branch_attention import BranchCache, CausalRange, build_causal_range
from heads.layers.documents import Documents
from heads.layers.llama import LlamaAttention, RmsNorm
from heads.target_model.model import Target
from heads.vocab import DraftVocab
from train.eagle import EagleObjective

EAGLE1, EAGLE3 = EagleForm.eagle1, EagleForm.eagle3
VARIANTS = [
    (EAGLE1, {}),
    (EAGLE3, {}),
    (EAGLE3, {"fc_norm": True, "norm_output": True}),
    (EAGLE3, {"norm_before_residual": True}),
]


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(num_hidden_layers=4)


def untrained(target: Target, form: EagleForm, num_ids: int | None = None, **more) -> EagleHead:
    counts = torch.arange(target.vocab_size)
    vocab = DraftVocab.from_counts(counts, num_ids, [0, 1, 2])
    head = EagleHead.from_settings(target, EagleConfig(form=form, **more), vocab, seed=0)
    for parameter in head.parameters():
        parameter.data.mul_(3)
    return head.eval()


def test_layers_are_those_of_the_paper() -> None:
    assert default_layers(32) == (2, 16, 29)
    assert default_layers(8) == (2, 4, 5)
    assert default_layers(4) == (1, 2, 3)
    with pytest.raises(
        InputError, match=r"head\.layers is unset: no default for a target of 3 layers"
    ):
        default_layers(3)


def test_eagle3_reads_the_outputs_of_the_layers_before_those_indices(target: Target) -> None:
    """Against hooks of our own: index i is what enters decoder layer i."""
    head = untrained(target, EAGLE3)
    entering = {}

    def keep(index: int):
        return lambda _module, inputs: entering.update({index: inputs[0]})

    layers = enumerate(target.decoder.layers)
    handles = [layer.register_forward_pre_hook(keep(index)) for index, layer in layers]
    features = head.collect_features(target.encode_text([5, 9, 7], head.taps))
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(features, torch.cat([entering[i] for i in (1, 2, 3)], -1))


def test_eagle1_reads_the_state_that_the_output_head_reads(target: Target) -> None:
    head = untrained(target, EAGLE1)
    features = head.collect_features(target.encode_text([5, 9, 7], head.taps))
    expected = target.model(input_ids=torch.tensor([[5, 9, 7]])).logits
    torch.testing.assert_close(target.compute_logits(features), expected)


@pytest.mark.parametrize(("form", "more"), VARIANTS)
def test_training_and_decoding_read_the_same(target: Target, form: EagleForm, more: Any) -> None:
    """Features, tokens and positions of a packed training text against one read in pieces."""
    head = untrained(target, form, **more)
    first, second = texts(target, 2, 12)
    batch = packed([first, second])
    where = Documents.from_ids(batch["document_ids"])
    output = target.encode_documents(batch["input_ids"], batch["position_ids"], where, head.taps)
    ids = batch["input_ids"][0]
    text = head.encode_context(
        head.fuse(head.collect_features(output)[0]), ids.roll(-1), batch["position_ids"][0]
    )
    row = len(first) + 7  # token 7 of the second document
    rows = torch.tensor([row])
    branches = BranchCache(text.keys[None], text.values[None], build_causal_range(where, rows))
    unrolled = head.unroll(text, ids, rows, branches)
    trained = [next(unrolled) for _ in range(3)]

    alone = target.encode_text(second[:8], head.taps)
    piece = head.encode_context(
        head.fuse(head.collect_features(alone)[0]), torch.tensor(second[1:9]), torch.arange(8)
    )
    branches = BranchCache(
        piece.keys[None], piece.values[None], CausalRange.from_ends(torch.tensor([8]))
    )
    outputs = head.draft(piece, torch.tensor([7]), branches)
    for depth, expected in enumerate(trained):
        if depth:
            token, position = torch.tensor([second[8 + depth]]), torch.tensor([7 + depth])
            outputs = head.advance(outputs, token, position, branches)
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


def test_a_window_hides_what_lies_before_and_is_saved(target: Target, tmp_path: Path) -> None:
    """Of 12 tokens, those whose hidden states move the output after the last one, at each depth.

    Later depths read the first one's output, and so what moved that.
    """
    head, features = untrained(target, EAGLE3), torch.randn(12, 3 * target.hidden_size)
    head.config = replace(head.config, window=5)
    ids, places = torch.randint(target.vocab_size, (15,)), torch.arange(12)

    def compute_outputs(states: torch.Tensor) -> list[torch.Tensor]:
        return head.compute_text_outputs(states, ids, places, 11, 3)

    usual, moved = compute_outputs(features), [[], [], []]
    for place in range(12):
        changed = compute_outputs(features + (places == place)[:, None])
        for depth, (before, after) in enumerate(zip(usual, changed, strict=True)):
            if not torch.equal(before, after):
                moved[depth].append(place)
    assert moved == [[7, 8, 9, 10, 11]] * 3
    head.save(tmp_path)
    assert EagleHead.from_folder(tmp_path, "head", None).config.window == 5


@pytest.mark.parametrize(
    ("start", "trained", "equal"),
    [
        (OutputHead.scratch, True, False),
        (OutputHead.copy, True, True),
        (OutputHead.frozen, False, True),
    ],
)
def test_the_output_head_starts_where_it_is_told(target: Target, start, trained, equal) -> None:
    vocab = DraftVocab(torch.tensor([1, 4, 9]), target.vocab_size)
    config = EagleConfig(output_head=start)
    head = EagleHead.from_settings(target, config, vocab, seed=0)
    assert head.lm_head is not None
    assert head.lm_head.weight.requires_grad is trained
    assert head.lm_head.weight.equal(target.output_head.weight[[1, 4, 9]]) is equal


def test_unless_told_the_output_head_of_wide_targets_is_frozen() -> None:
    narrow, wide = (random_target(hidden_size=size, num_hidden_layers=4) for size in (736, 768))
    assert choose_output_head(OutputHead.auto, narrow) is OutputHead.copy
    assert choose_output_head(OutputHead.auto, wide) is OutputHead.frozen
    assert choose_output_head(OutputHead.scratch, wide) is OutputHead.scratch
    vocab = DraftVocab(torch.tensor([1, 4, 9]), wide.vocab_size)
    head = EagleHead.from_settings(wide, EagleConfig(), vocab, seed=0)
    assert head.lm_head is not None
    assert not head.lm_head.weight.requires_grad


def test_a_head_needs_its_own_target(target: Target) -> None:
    head = untrained(target, EAGLE3)
    with pytest.raises(InputError, match=r"vocab_size=96 .* but target\.path=llama has 64"):
        head.attach(random_target(vocab_size=64, num_hidden_layers=4))
    with pytest.raises(InputError, match=r"head\.layers=\[3\]: .*hidden states 0\.\.2"):
        head.attach(random_target())


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox"])
def test_a_head_is_made_and_learns_whatever_its_target_calls_its_parts(family: str) -> None:
    target = random_target(family, num_hidden_layers=4)
    untaught, head = (eagle_head(target, EAGLE3, 48, num_updates=number) for number in (0, 5))
    batch = packed(texts(target, 6, 40))

    def loss(head: EagleHead) -> float:
        objective = EagleObjective(head, target, EagleConfig(num_steps=1))
        learnt = objective.prepare_batch(objective.index_batch(batch))
        return objective(learnt, torch.ones(1)).total.item()

    assert loss(head) < 0.3 * loss(untaught)
    assert head.config.llama.head_dim == 32
    assert head.config.layers == (1, 2, 3)


def test_the_layer_is_llamas_own_where_the_input_is_the_normed_residual() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-5, attn_implementation="eager",
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 16},
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = LlamaDecoderLayer(config, 0)
    ours = EagleLayer(config, two_inputs=False, qk_norm=False)
    state = theirs.state_dict()
    norm = state.pop("input_layernorm.weight")
    ours.load_state_dict(state)
    residual, positions = torch.randn(9, 64), torch.arange(9)
    rotary = LlamaRotaryEmbedding(config)(residual[None], positions[None])
    causal = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    expected = theirs(residual[None], causal, positions[None], position_embeddings=rotary)
    inputs = theirs.input_layernorm(residual)
    assert norm.equal(torch.ones(64))
    rotation = ours.self_attn.compute_rotation(inputs, positions)
    keys, values = ours.self_attn.keys_values(inputs, rotation)
    branches = BranchCache(
        keys[None],
        values[None],
        build_causal_range(
            Documents.from_lengths([len(positions)], torch.device("cpu")), positions
        ),
    )
    torch.testing.assert_close(
        ours(inputs, residual, rotation, branches), expected[0], rtol=1e-5, atol=1e-5
    )


def test_mixed_precision_gives_queries_keys_and_values_of_one_dtype() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    attention = LlamaAttention(config, 64, qk_norm=True)
    norm = RmsNorm(64, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        inputs = norm(torch.randn(5, 64))
        rotation = attention.compute_rotation(inputs, torch.arange(5))
        found = [
            attention.compute_query(inputs, rotation),
            *attention.keys_values(inputs, rotation),
        ]
    assert [each.dtype for each in found] == [torch.bfloat16] * 3
