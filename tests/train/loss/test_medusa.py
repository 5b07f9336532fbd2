"""Sums, masks and labels of the Medusa loss, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

from heads.target_model.embeddings_and_output_head import Projection
from train.batch.batch import (
    SUPERVISION,
    Batch,
    StepTargets,
    Supervision,
    add_supervision,
    build_supervision_mask,
)
from train.loss import fused_linear as fused
from train.loss.divergences import fast_argmax, fast_topk, mark_top1_and_top5, p_log_p
from train.loss.teachers import TargetDistribution
from train.medusa import compute_head_weights, compute_medusa_loss


class Heads(nn.Module):
    """Heads whose logits for token v are a row of a table, times the state, times 1 + k."""

    def __init__(self, num_heads: int, vocab: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(num_heads, vocab, 3, generator=generator)
        self.table = nn.ParameterList(nn.Parameter(each) for each in drawn)

    def head_states(self, k: int, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * (1 + k)

    def make_projection(self, k: int) -> Projection:
        return Projection(self.table[k])


class Given:
    """A teacher whose logits are written down: [P, V]."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.p = logits.softmax(-1)
        self.num_rows, self.bytes_per_row = len(logits), logits[0].nbytes

    def compute_chunk(self, begin: int, end: int) -> TargetDistribution:
        p = self.p[begin:end]
        return TargetDistribution(p.argmax(-1), p, p.sum(-1), p_log_p(p))


ONES = torch.ones(3)


def packed(mask: list[int], documents: list[int]) -> Batch:
    length = len(mask)
    batch = {
        "input_ids": torch.arange(length)[None] % 5,
        "loss_mask": torch.tensor([mask], dtype=torch.bool),
        "document_ids": torch.tensor([documents]),
    }
    return add_supervision(batch, 4)


def random_batch(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "input_ids": torch.randint(0, 5, (num_rows, 12), generator=generator),
        "loss_mask": torch.rand(num_rows, 12, generator=generator) < 0.6,
        "document_ids": torch.tensor([[0] * 5 + [1] * 5 + [-1] * 2] * num_rows),
    }
    return torch.randn(num_rows, 12, 3, generator=generator), batch


def test_mask_is_that_of_the_predicted_token() -> None:
    batch = packed([0, 0, 0, 1, 1, 0], [0] * 6)
    assert build_supervision_mask(batch, 1).int().tolist() == [[0, 1, 1, 0, 0, 0]]
    assert build_supervision_mask(batch, 2).int().tolist() == [[1, 1, 0, 0, 0, 0]]
    assert build_supervision_mask(batch, 5).int().tolist() == [[0] * 6]
    assert batch[SUPERVISION].depth_counts.tolist() == [2.0, 2.0, 2.0, 1.0, 0.0]


def test_no_head_predicts_across_documents_or_into_padding() -> None:
    batch = packed([1] * 9, [0, 0, 0, 1, 1, 1, -1, -1, -1])
    assert build_supervision_mask(batch, 1).int().tolist() == [[1, 0, 0, 1, 0, 0, 0, 0, 0]]
    assert build_supervision_mask(batch, 2).int().tolist() == [[0] * 9]
    shorter_than_heads_look_ahead = packed([1, 1], [0, 0])
    assert shorter_than_heads_look_ahead[SUPERVISION].depth_counts.tolist() == [
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]


def test_hand_computed_cross_entropy() -> None:
    head = Heads(2, 5)
    with torch.no_grad():
        for table in head.table:
            table.zero_()
        head.table[0][2, 0] = math.log(4.0)  # p(2) = 4/8 at hidden [1, 0, 0]
        head.table[1][3, 0] = math.log(2.0) / 2  # p(3) = 2/6
    hidden = torch.tensor([[[1.0, 0, 0]] * 4])
    batch = packed([1, 1, 1, 1], [0] * 4)  # tokens 0 1 2 3
    sums = compute_medusa_loss(head, hidden, batch, ONES)
    # Head 1 at 0 and 1 predicts tokens 2 and 3; head 2 at 0 predicts token 3.
    expected = [math.log(2.0) + math.log(8.0), math.log(3.0)]
    loss, tokens, top1, top5 = sums.terms.tolist()
    assert loss == pytest.approx(expected, abs=1e-6)
    assert (tokens, top1, top5) == ([2.0, 1.0], [1.0, 1.0], [2.0, 1.0])
    assert sums.total.item() == pytest.approx(sum(expected), abs=1e-6)
    halved = compute_medusa_loss(head, hidden, batch, torch.tensor([0.5, 0.0]))
    assert halved.total.item() == pytest.approx(expected[0] / 2, abs=1e-6)
    assert compute_head_weights(3, 0.8).tolist() == pytest.approx([0.8, 0.64, 0.512])


@pytest.mark.parametrize("groups", [False, True])
def test_a_tie_has_one_first_choice_and_five_among_the_first_five(
    groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.loss.divergences._should_group", lambda _: groups)
    logits = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    top1, top5 = mark_top1_and_top5(logits, torch.tensor([0, 1]))
    assert (top1.tolist(), top5.tolist()) == ([1.0, 0.0], [1.0, 1.0])
    assert mark_top1_and_top5(torch.zeros(8, 8), torch.arange(8))[1].sum() == 5.0
    six = torch.tensor([[6.0, 5, 4, 3, 2, 1]] * 2)
    assert mark_top1_and_top5(six, torch.tensor([4, 5]))[1].tolist() == [1.0, 0.0]


def test_places_and_answers_of_every_depth_by_hand() -> None:
    """Documents a b c d | e f; c, d and f are in the mask."""
    learnt = packed([0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1])[SUPERVISION]
    assert learnt.token_indices.tolist() == [1, 2, 4]  # b, c and e come before them
    # Depth 1 predicts c from a and d from b; depth 2 predicts d from a.
    assert [rows.output_indices.tolist() for rows in learnt.depths] == [
        [1, 2, 4],
        [0, 1],
        [0],
        [],
        [],
    ]
    answers = [rows.teacher_rows.host.tolist() for rows in learnt.depths]
    assert answers == [[0, 1, 2], [0, 1], [1], [], []]


def test_what_steps_learn_lies_in_the_order_of_the_answers() -> None:
    learnt = packed([0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1])[SUPERVISION]
    found = StepTargets.from_supervision(Supervision(learnt.token_indices, learnt.depths[:3]))
    assert found.anchors.tolist() == [0, 1]
    # Step 0 gives rows 0 and 1, step 1 rows 2 and 3; of that, row 3 (from b, depth 2) is nothing.
    assert found.matched_rows.output_indices.tolist() == [0, 1, 2]
    assert found.matched_rows.teacher_rows.host.tolist() == [0, 1, 1]
    assert found.row_steps.tolist() == [0, 0, 1]
    assert found.step_order.tolist() == [0, 1, 2]
    assert found.step_sizes == (2, 1)
    nothing = StepTargets.from_supervision(packed([0] * 4, [0] * 4)[SUPERVISION])
    assert nothing.anchors.tolist() == [0]
    assert nothing.step_sizes == (0, 0, 0, 0)


@pytest.mark.parametrize("columns", [5, 64, 640, 1000])
def test_rankings_by_groups_are_those_of_torch(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Of few values, so that there are ties.
    logits = torch.randint(12, (40, columns), generator=generator).float()
    assert fast_argmax(logits).equal(logits.argmax(-1))
    values, places = fast_topk(logits, 5)
    assert values.equal(logits.topk(5).values)
    assert logits.gather(1, places).equal(values)
    assert all(len(set(row)) == 5 for row in places.tolist())


@pytest.mark.parametrize("soft", [False, True])
def test_chunks_and_batching_do_not_change_sums_or_gradients(
    soft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, batch = random_batch(4)
    projection = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))

    def run(parts: list[slice], rows_per_chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        monkeypatch.setattr(fused, "CPU_CHUNK_BYTES", 4 * 5 * rows_per_chunk)
        monkeypatch.setattr(fused, "CPU_CHUNK_ROWS", 1)
        monkeypatch.setattr(fused, "CPU_PIECE_BYTES", 4 * 5)
        head = Heads(3, 5)
        total = torch.zeros(4, 3)
        for part in parts:
            piece = add_supervision({name: value[part] for name, value in batch.items()}, 3)
            places = piece[SUPERVISION].token_indices
            logits = hidden[part].flatten(0, 1)[places] @ projection
            labels = (Given(logits), 0.5) if soft else None
            sums = compute_medusa_loss(head, hidden[part], piece, ONES, labels)
            sums.total.backward()
            total += sums.terms
        return total, torch.stack([table.grad for table in head.table])

    whole = run([slice(0, 4)], 1000)
    for other in (run([slice(0, 4)], 2), run([slice(0, 1), slice(1, 4)], 3)):
        for expected, found in zip(whole, other, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert whole[0][1].tolist() == add_supervision(batch, 3)[SUPERVISION].depth_counts[1:].tolist()


def test_drafts_off_the_targets_path_weigh_less_and_far_from_it_nothing() -> None:
    """A draft of head k at t learns what the target says at t + k, times a fifth for each of the k
    tokens before that came otherwise, twice at most."""
    hidden = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0))
    batch = packed([1] * 6, [1] * 6)
    says = torch.tensor([1, 2, 0, 0, 0])  # after each: right twice, then wrong
    logits = 3 * torch.nn.functional.one_hot(says, 5).float()
    head = Heads(3, 5)
    sums = compute_medusa_loss(head, hidden, batch, ONES, (Given(logits), 0.2))
    sums.total.backward()
    grads = [table.grad.clone() for table in head.table]
    # Of head 1 at 0 to 3 after 0, 0, 1, 1 strays, head 2 at 0 to 2 after 0, 1, 2, head 3 at 0
    # and 1 after 1, 2.
    shares = {1: [1.0, 1.0, 0.2, 0.2], 2: [1.0, 0.2, 0.0], 3: [0.2, 0.0]}
    assert sums.terms[1].tolist() == [4.0, 2.0, 1.0]
    total, said, reported = torch.zeros(()), logits.softmax(-1), torch.zeros(3)
    for k, mine in shares.items():
        for place, share in enumerate(mine):
            states = head.head_states(k - 1, hidden[0, place])
            log_q = (head.table[k - 1] @ states).log_softmax(-1)
            p = said[place + k]
            kl = (p * (p.log() - log_q)).sum()
            total = total + share * kl
            reported[k - 1] += kl.detach() * (share > 0)  # as it is
    torch.testing.assert_close(sums.total, total)
    torch.testing.assert_close(sums.terms[0], reported)
    theirs = torch.autograd.grad(total, [*head.table])
    for mine_grad, their_grad in zip(grads, theirs, strict=True):
        torch.testing.assert_close(mine_grad, their_grad)


def test_every_parameter_has_a_gradient_even_with_nothing_to_learn() -> None:
    head = Heads(2, 5)
    sums = compute_medusa_loss(head, torch.zeros(1, 4, 3), packed([0] * 4, [0] * 4), ONES)
    sums.total.backward()
    assert all(table.grad is not None for table in head.table)
    assert sums.terms[0].tolist() == [0.0, 0.0]
