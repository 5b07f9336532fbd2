"""Output heads of low rank: literal logits, and drafts that are checked as ever."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from feature_heads import feature_head
from toys import eagle_head, noisy_head, random_target, texts

from conf.errors import InputError
from conf.settings.eagle import EagleForm
from eval.decode.drafters.draft_model import DraftModel
from eval.decode.drafters.self_speculation import SelfDraft, list_skipped_layers
from eval.decode.engine import NoDraft, decode
from eval.measure.replay import rank_candidates, replay_tree
from heads.decoding.sampling import GREEDY
from heads.decoding.tree import Tree
from heads.draft_head import DraftHead
from heads.layers.fast_linear import LowRankOutputHead, make_low_rank_target, reduce_rank
from heads.target_model.model import Target


def test_logits_come_from_the_heaviest_direction_and_the_likeliest_is_exact() -> None:
    # W^T W is [[29, 18], [18, 29]], so its heaviest direction is (1, 1).
    weight = torch.tensor([[5.0, 2.0], [2.0, 4.0], [0.0, 3.0]])
    head = LowRankOutputHead(weight, 1)
    head.num_candidates = 1
    # Along it (1, 0) is (0.5, 0.5): half of the sum of each row, and the best of them exactly.
    expected = torch.tensor([[5.0, 3.0, 1.5], [2.0, 3.0, 1.5]])
    found = head(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(found, expected)
    # Two directions, three rows, and two candidates of two columns each.
    assert head.read_bytes == 4 * (2 + 3 + 2)


def test_a_matrix_of_that_rank_loses_nothing() -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 6) @ torch.randn(6, 24)
    hidden = torch.randn(3, 5, 24)
    near = {"atol": 1e-3, "rtol": 0.0}
    torch.testing.assert_close(LowRankOutputHead(weight, 6)(hidden), hidden @ weight.T, **near)
    one_less = LowRankOutputHead(weight, 5)(hidden)
    best = (hidden @ weight.T).topk(3, dim=-1)
    torch.testing.assert_close(one_less.gather(-1, best.indices), best.values)
    assert not torch.allclose(one_less, hidden @ weight.T, **near)


HEADS: dict[str, Callable[[Target], DraftHead]] = {
    "medusa": noisy_head,
    "eagle1": partial(eagle_head, form=EagleForm.eagle1, num_updates=4, num_texts=2),
    "eagle3": partial(eagle_head, form=EagleForm.eagle3, num_updates=4, num_texts=2),
    "dspark": partial(feature_head, name="dspark", num_updates=4, num_texts=2),
    "peagle": partial(feature_head, name="peagle", num_updates=4, num_texts=2),
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_draft_otherwise_and_texts_stay(kind: str) -> None:
    target = random_target(num_hidden_layers=4)
    head = HEADS[kind](target)
    head.attach(target).eval()
    prompt = texts(target, 1, 4)[0]
    plain = decode(target, NoDraft(), prompt, 14).token_ids
    chain = Tree.make_chain(3)
    output = target.encode_text(prompt + plain[:-1], head.taps)
    whole = rank_candidates(head, chain, output, prompt, plain)
    made = reduce_rank(head, target, 2)
    assert len(made) == (3 if kind == "medusa" else 1)
    for each in made:
        each.num_candidates = 2
    ranked = rank_candidates(head, chain, output, prompt, plain)
    assert ranked != whole
    drafter = head.make_drafter(chain, GREEDY, [0])
    drafted = decode(target, drafter, prompt, 14)
    assert drafted.token_ids == plain
    assert drafted.steps == replay_tree(chain, ranked, plain)


def test_a_draft_model_and_the_target_itself_draft_through_a_head_of_low_rank() -> None:
    target = random_target(num_hidden_layers=4)
    prompt = texts(target, 1, 4)[0]
    plain = decode(target, NoDraft(), prompt, 16)
    lent = make_low_rank_target(target, 2)
    lent.output_head.num_candidates = 1
    for rank in (None, 2):
        model = random_target(num_hidden_layers=4)
        if rank is not None:
            model.output_head = lent.output_head
        itself = SelfDraft(
            target, list_skipped_layers(target, 4), 3, output_head=None if rank is None else lent
        )
        for drafter in (DraftModel(model, Tree.make_chain(3)), itself):
            found = decode(target, drafter, prompt, 16)
            assert found.token_ids == plain.token_ids
            # The same model drafts what it will say, unless it sees two directions of its states.
            assert (len(found.steps) <= 4) == (rank is None)


def test_what_does_not_fit_is_named() -> None:
    target = random_target()
    with pytest.raises(InputError, match=r"output_rank=64: must be below 64, the hidden size of"):
        reduce_rank(noisy_head(target), target, 64)
    weight = target.output_head.weight.to(torch.int8)
    target.output_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(
        InputError, match=r"output_rank=8: the output head of target.path=.* quantis"
    ):
        make_low_rank_target(target, 8)
