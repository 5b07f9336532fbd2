from dataclasses import replace

import pytest
import torch
from toys import eagle_head, packed, random_target, texts

from conf.errors import InputError
from conf.settings.eagle import EagleConfig, EagleForm, OutputHead
from heads.eagle.eagle import EagleHead
from heads.eagle.network import default_layers
from heads.layers.branch_attention import BranchCache, CausalRange, build_causal_range
from heads.layers.documents import Documents
from heads.target_model.model import Target, TargetOutput
from heads.vocab import DraftVocab
from train.eagle import EagleObjective

EAGLE1, EAGLE3 = EagleForm.eagle1, EagleForm.eagle3
CHANGED = ("lm_head.weight", "d2t", "t2d")
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


def compare_training_and_decoding(target: Target, head: EagleHead, reader: EagleHead) -> None:
    """Features, tokens and positions of a packed training text against one read in pieces.

    Args:
        target: the target.
        head: is trained.
        reader: drafts.
    """
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

    alone = target.encode_text(second[:8], reader.taps)
    piece = reader.encode_context(
        reader.fuse(reader.collect_features(alone)[0]), torch.tensor(second[1:9]), torch.arange(8)
    )
    branches = BranchCache(
        piece.keys[None], piece.values[None], CausalRange.from_ends(torch.tensor([8]))
    )
    outputs = reader.draft(piece, torch.tensor([7]), branches)
    for depth, expected in enumerate(trained):
        if depth:
            token, position = torch.tensor([second[8 + depth]]), torch.tensor([7 + depth])
            outputs = reader.advance(outputs, token, position, branches)
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("form", "more"), VARIANTS)
def test_training_and_decoding_read_the_same(target: Target, form, more) -> None:
    head = untrained(target, form, **more)
    compare_training_and_decoding(target, head, head)


@pytest.mark.parametrize("mistake", ["layer", "norm", "token", "position", "feedback"])
def test_that_comparison_sees_every_wrong_feature(target: Target, mistake: str) -> None:
    """The faults that halve tau in silence, in a head that is otherwise the same."""
    head = untrained(target, EAGLE3, norm_output=mistake == "feedback")
    config = {"layer": {"layers": (0, 1, 2)}, "feedback": {"norm_output": False}}
    wrong = EagleHead(replace(head.config, **config.get(mistake, {})), head.vocab)
    wrong.load_state_dict(head.state_dict())
    wrong.attach(target)
    read, advance, features = wrong.encode_context, wrong.advance, wrong.collect_features

    def normed(output: TargetOutput) -> torch.Tensor:
        output.layers[3] = target.decoder.norm(output.layers[3])
        return features(output)

    compare_training_and_decoding(target, head, head)
    if mistake == "norm":
        wrong.collect_features = normed
    if mistake == "token":
        wrong.encode_context = lambda fused, ids, places: read(fused, ids.roll(1), places)
    if mistake == "position":
        wrong.advance = lambda x, ids, places, seen: advance(x, ids, places - 1, seen)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        compare_training_and_decoding(target, head, wrong)


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


def test_the_seed_decides_the_first_weights(target: Target) -> None:
    vocab = DraftVocab.make_full(target.vocab_size)
    make = lambda seed: EagleHead.from_settings(target, EagleConfig(), vocab, seed).fc.weight  # noqa: E731
    assert make(3).equal(make(3))
    assert not make(3).equal(make(4))


def test_a_head_needs_its_own_target(target: Target) -> None:
    head = untrained(target, EAGLE3)
    with pytest.raises(InputError, match=r"vocab_size=96 .* but target\.path=llama has 64"):
        head.attach(random_target(vocab_size=64, num_hidden_layers=4))
    with pytest.raises(InputError, match=r"head\.layers=\[3\]: .*hidden states 0\.\.2"):
        head.attach(random_target())


def test_candidates_are_target_ids_of_the_reduced_vocabulary(target: Target) -> None:
    head = untrained(target, EAGLE3, num_ids=10)
    ids = [5, 17, 40, 8, 77, 23]
    output = target.encode_text(ids[:-1], head.taps)
    found = head.compute_candidates(output, ids, first=2, depth=3, width=4)
    assert found.shape == (3, 3, 4)
    assert set(found.flatten().tolist()) <= set(head.vocab.ids.tolist())


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_neox", "mixtral", "phi3", "mistral"])
def test_a_head_is_made_and_learns_for_every_family(family: str) -> None:
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


def test_a_pruned_head_has_the_logits_of_the_ids_it_keeps(target: Target) -> None:
    head = untrained(target, EAGLE3, 40)
    vocab = DraftVocab(head.vocab.ids[[0, 1, 2, 7, 30, 39]], target.vocab_size)
    small = head.prune_vocab(vocab).attach(target)
    outputs = torch.randn(5, target.hidden_size)
    expected = head.compute_logits(outputs)[:, [0, 1, 2, 7, 30, 39]]
    torch.testing.assert_close(small.compute_logits(outputs), expected, rtol=1e-5, atol=1e-6)
    kept = {name: each for name, each in head.collect_tensors().items() if name not in CHANGED}
    assert all(torch.equal(small.collect_tensors()[name], each) for name, each in kept.items())
    assert small.collect_tensors()["lm_head.weight"].shape == (6, target.hidden_size)


def test_pruning_to_all_of_its_ids_changes_nothing(target: Target) -> None:
    head = untrained(target, EAGLE3, 40)
    same = head.prune_vocab(head.vocab).collect_tensors()
    assert same.keys() == head.collect_tensors().keys()
    assert all(torch.equal(same[name], each) for name, each in head.collect_tensors().items())
