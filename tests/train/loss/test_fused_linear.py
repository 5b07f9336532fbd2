"""Fused losses against the naive formula: all logits at once, gradients by autograd, float64."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from toys import Watched, random_target

from conf.settings.eagle import Divergence, EagleConfig
from heads.target_model.embeddings_and_output_head import Projection
from heads.vocab import DraftVocab
from train.batch.batch import SortedIndices
from train.loss import fused_linear as fused
from train.loss.divergences import (
    MIN_ALPHA,
    DistributionPair,
    Softmax,
    negative_log_alpha,
    p_log_p,
    total_variation,
)
from train.loss.fused_linear import LowRank, Student, compute_fused_loss
from train.loss.teachers import (
    TargetDistribution,
    build_hidden_teacher,
    build_text_teacher,
    build_top_k_teacher,
)
from train.medusa import text_criterion
from train.step_objective import StepCriterion

NUM_ROWS, NUM_STUDENTS, WIDTH, VOCAB = 11, 29, 6, 13
DRAFTED = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 12])


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class Exact:
    """A teacher in float64 whose table is written down."""

    def __init__(self, vocab: DraftVocab, log_p: Tensor) -> None:
        self.vocab, self.whole = vocab, log_p
        self.num_rows, self.bytes_per_row = len(log_p), log_p[0].nbytes

    def compute_chunk(self, begin: int, end: int) -> TargetDistribution:
        rows = self.whole[begin:end]
        p = rows.exp()[:, self.vocab.ids]
        return TargetDistribution(rows.argmax(-1), p, p.sum(-1), p_log_p(p))


def naive(config: EagleConfig, whole_p: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
    """[M] the loss as the papers write it."""
    q, full = logits.softmax(-1), whole_p[:, ids]
    p = full / full.sum(-1, keepdim=True)
    alpha = torch.minimum(full, q).sum(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    middle = (p + q) / 2
    mix = torch.exp(-config.lk_eta * alpha.detach())
    of_kind = {
        Divergence.kl: kl,
        Divergence.rkl: (q * (q.log() - p.log())).sum(-1),
        Divergence.js: 0.5 * (p * (p / middle).log() + q * (q / middle).log()).sum(-1),
        Divergence.tv: 1 - alpha,
        Divergence.nla: -alpha.log(),
        Divergence.hybrid: mix * kl + (1 - mix) * (1 - alpha),
    }
    best = p.topk(config.top_k).indices
    top = -(p.gather(1, best) * q.gather(1, best).log()).sum(-1)
    loss = config.divergence_weight * of_kind[config.divergence] + config.top_k_weight * top
    return torch.where(torch.isin(whole_p.argmax(-1), ids), loss, 0.0)


def gradients(total: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Gradients of leaves, empty at first or as a fused loss has set them."""
    total.backward()
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def student(
    hidden: Tensor, weight: Tensor, rows: Tensor | None = None, scales: Tensor | None = None
) -> Student:
    """Rows of weight 1 that are compared with the teacher's in their order, unless told."""
    rows = torch.arange(len(hidden)) if rows is None else rows
    scales = torch.ones(len(hidden)) if scales is None else scales
    return Student(hidden, Projection(weight), SortedIndices(rows, rows), scales)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of the calls that would be compiled."""
    calls: list[tuple[Any, ...]] = []

    def run(*args: Any) -> object:
        calls.append(args)
        return fused.apply_criterion(*args)

    monkeypatch.setattr(fused, "_compile_criterion", lambda: run)
    return calls


CUTS = [(1, 1), (4, 3), (1000, 2), (1000, 1000)]


@pytest.fixture(params=CUTS)
def rows_per_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a chunk of float64 logits, and of a piece."""
    chunk, piece = request.param
    monkeypatch.setattr(fused, "CPU_CHUNK_BYTES", 8 * VOCAB * chunk)
    monkeypatch.setattr(fused, "CPU_CHUNK_ROWS", 1)
    monkeypatch.setattr(fused, "CPU_PIECE_BYTES", 4 * VOCAB * piece)
    monkeypatch.setattr(fused, "TILE_BYTES", 4 * WIDTH * 5)


VARIANTS: list[tuple[float, float | None, dict[str, float], bool]] = [
    (1.0, None, {}, False),
    (0.5, 3.0, {"top_k_weight": 0.7}, True),
    (0.5, None, {"text_weight": 0.7}, True),
]
"""Scale and cap of the logits, further losses, and whether a low-rank product is added."""
CASES = [
    (*case, CUTS[number % len(CUTS)]) for number, case in enumerate(product(Divergence, VARIANTS))
]


@pytest.mark.parametrize(("kind", "variant", "rows_per_chunk"), CASES, indirect=["rows_per_chunk"])
@pytest.mark.usefixtures("rows_per_chunk")
def test_loss_and_gradients_are_those_of_the_naive_formula(kind: Divergence, variant: Any) -> None:
    """The text is learnt where its token can be drafted, even where the target's choice cannot."""
    scale, cap, more, low_rank = variant
    config = EagleConfig(divergence=kind, top_k=4, divergence_weight=0.6, **more)
    hidden, states = (random(NUM_STUDENTS, n, seed=n).requires_grad_() for n in (WIDTH, 2))
    weight, added = (random(len(DRAFTED), n, seed=1 + n).requires_grad_() for n in (WIDTH, 2))
    bias = random(len(DRAFTED), seed=2)
    log_p = (2 * random(NUM_ROWS, VOCAB, seed=3)).log_softmax(-1)
    scales = random(NUM_STUDENTS, seed=4)
    rows = torch.randint(NUM_ROWS, (NUM_STUDENTS,), generator=torch.Generator().manual_seed(5))
    rows = rows.sort().values
    labels = torch.tensor([0, 3, 12, 1, 2, 6, 7, 9, 4, 5, 11])
    columns = torch.tensor([0, -1, 8, 1, 2, -1, 5, 7, 3, 4, -1])[rows]
    vocab = DraftVocab(DRAFTED, VOCAB)

    part = student(hidden, weight, rows, scales)
    part = part._replace(projection=Projection(weight, bias, scale, cap))
    teacher: Any = Exact(vocab, log_p)
    if low_rank:
        part = part._replace(added=LowRank(states, added))
    if config.text_weight:
        teacher = build_text_teacher(labels, teacher)
    total, (found,) = compute_fused_loss([part], teacher, StepCriterion(config, vocab))

    logits = scale * (hidden @ weight.T + bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = logits + states @ added.T if low_rank else logits
    text = logits.log_softmax(-1).gather(1, columns.clamp_min(0).unsqueeze(1)).squeeze(1)
    loss = naive(config, log_p.exp()[rows], DRAFTED, logits)
    loss = loss - config.text_weight * torch.where(columns < 0, 0.0, text)
    expected = (scales * loss).sum()
    torch.testing.assert_close(found[0], loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    leaves = (hidden, weight, states, added) if low_rank else (hidden, weight)
    for mine, theirs in zip(gradients(total, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    assert found[1].sum() == (DRAFTED[logits.argmax(-1)] == log_p[rows].argmax(-1)).sum()


def pair_of(p: list[float], q: list[float]) -> DistributionPair:
    likely, said = (torch.tensor([row], dtype=torch.float64) for row in (p, q))
    logits, nothing = said.log(), torch.zeros(1, dtype=torch.float64)
    return DistributionPair(likely, likely.sum(-1), nothing, Softmax(logits, said, nothing))


def test_where_both_are_equally_likely_acceptance_counts_by_half() -> None:
    # With a third of [0.5, 0, 1] each, as p is as likely as q, less and more: by the mean 0.45.
    found = total_variation(pair_of([0.5, 0.25, 0.25], [0.5, 0.3, 0.2]), needs_grad=True)
    assert found.loss.tolist() == pytest.approx([0.05])
    assert found.grad is not None
    assert found.grad[0].tolist() == pytest.approx([-0.05 * 0.5, 0.45 * 0.3, -0.55 * 0.2])


def test_acceptance_too_small_to_take_the_logarithm_of_pulls_no_more() -> None:
    for alpha, pulled in ((MIN_ALPHA / 2, 0.0), (MIN_ALPHA * 2, 1.0)):
        found = negative_log_alpha(pair_of([1.0, 0.0], [alpha, 1 - alpha]), needs_grad=True)
        assert found.loss.tolist() == pytest.approx([-math.log(max(alpha, MIN_ALPHA))])
        assert found.grad is not None
        expected = [-pulled * (1 - alpha), pulled * (1 - alpha)]
        assert found.grad[0].tolist() == pytest.approx(expected, rel=1e-3)


def hard_students(widths: list[int]) -> tuple[list[Student], list[Tensor]]:
    """A student of 7 rows of the text for each width of its logits; all that has a gradient."""
    students, leaves = [], []
    for number, width in enumerate(widths):
        hidden = random(7, WIDTH, seed=number).requires_grad_()
        weight = random(width, WIDTH, seed=10 + number).requires_grad_()
        scales = torch.full((7,), 0.5 + number, dtype=torch.float64)
        students.append(student(hidden, weight, torch.arange(7) + number, scales))
        leaves += [hidden, weight]
    return students, leaves


@pytest.mark.usefixtures("rows_per_chunk")
def test_hard_labels_of_several_projections_compiled_or_not(compiled: list) -> None:
    """Medusa: two heads with weights of their own over the same text."""
    labels = torch.randint(VOCAB, (NUM_ROWS,), generator=torch.Generator().manual_seed(0))
    students, leaves = hard_students([VOCAB, VOCAB])
    expected = torch.zeros((), dtype=torch.float64)
    for one in students:
        logits, wanted = one.hidden @ one.projection.weight.T, labels[one.teacher_rows.host]
        loss = F.cross_entropy(logits, wanted, reduction="none")
        expected = expected + (one.scales[:] * loss).sum()
    naively = [expected.detach(), *gradients(expected, *leaves)]
    got = []
    for way in (False, True):
        assert compiled == []
        teacher = build_text_teacher(labels)
        total, found = compute_fused_loss(students, teacher, text_criterion, compiled=way)
        got.append([*found, total.detach(), *gradients(total, *leaves)])
        torch.testing.assert_close(got[-1][len(found) :], naively)
        assert [tuple(values.shape) for values in found] == [(3, 7), (3, 7)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*got, strict=True))
    # What is compiled is the comparison of several rows.
    sizes = [len(args[3]) for args in compiled]
    most = fused.CPU_PIECE_BYTES // (4 * VOCAB)
    assert 1 not in sizes and max(sizes, default=0) <= most
    assert bool(sizes) == (min(most, fused.CPU_CHUNK_BYTES // (8 * VOCAB)) > 1)


def test_every_kind_of_loss_of_a_process_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo gives up beyond so many kinds, and runs all later ones as they are written."""
    given, usual, counted = [], torch.compile, torch._dynamo.utils.counters["stats"]

    def cheap(function: Callable, **options: object) -> Callable:
        given.append(options)
        return usual(function, dynamic=True, backend="eager")

    monkeypatch.setattr(torch, "compile", cheap)
    vocab, log_p = DraftVocab.make_full(VOCAB), random(NUM_ROWS, VOCAB, seed=3).log_softmax(-1)
    part = student(
        random(NUM_ROWS, WIDTH, seed=0), torch.nn.Parameter(random(VOCAB, WIDTH, seed=1))
    )
    torch._dynamo.reset()
    fused._compile_criterion.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=3):
        for of_first_round in (2, 0):  # with gradients and without
            for kind in (Divergence.kl, Divergence.tv):
                criterion, before = (
                    StepCriterion(EagleConfig(divergence=kind), vocab),
                    dict(counted),
                )
                for enabled in (True, False):
                    with torch.set_grad_enabled(enabled):
                        compute_fused_loss([part], Exact(vocab, log_p), criterion, compiled=True)
                graphs = counted["unique_graphs"] - before.get("unique_graphs", 0)
                assert graphs == of_first_round, kind
    fused._compile_criterion.cache_clear()
    torch._dynamo.reset()
    assert given == [{"dynamic": True, "options": {"split_reductions": False}}]


def test_logits_of_all_chunks_lie_in_one_place(
    compiled: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each width; gradients are not asked for, so nothing is kept for them."""
    monkeypatch.setattr(fused, "CPU_CHUNK_BYTES", 8 * VOCAB * 7)
    monkeypatch.setattr(fused, "CPU_CHUNK_ROWS", 1)
    students, _ = hard_students([VOCAB, VOCAB, VOCAB - 2, VOCAB])
    labels = torch.arange(NUM_ROWS) % 5
    with torch.no_grad():
        total, found = compute_fused_loss(
            students, build_text_teacher(labels), text_criterion, compiled=True
        )
    assert not total.requires_grad and not any(values.requires_grad for values in found)
    assert [args[4] for args in compiled] == [False] * 4
    places = [args[3].untyped_storage().data_ptr() for args in compiled]
    assert places[0] == places[1] == places[3] != places[2]


def test_slices_are_few_and_alike() -> None:
    assert fused.split_evenly(0, 7, 3) == [slice(0, 2), slice(2, 4), slice(4, 7)]
    assert fused.split_evenly(3, 9, 4) == [slice(3, 6), slice(6, 9)]
    assert fused.split_evenly(5, 5, 3) == []
    assert [fused.count_fitting_rows(num_bytes, 3) for num_bytes in (1, 3, 11)] == [1, 1, 3]


def added_by(func: Any, args: Any) -> list[int]:
    if func is not torch.ops.aten.add_.Tensor:
        return []
    return [args[1]._nnz() if args[1].is_sparse else args[1].numel()]


def test_a_backward_pass_only_tells_that_a_projections_gradient_is_there() -> None:
    (part,), (hidden, weight) = hard_students([VOCAB])
    hooked: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda each: hooked.append(each.grad.clone()))
    for _ in range(2):
        total, _ = compute_fused_loss(
            [part], build_text_teacher(torch.arange(NUM_ROWS)), text_criterion
        )
        added: list[int] = []  # numbers, by the in-place additions of this pass
        with Watched(lambda func, args, _, added=added: added.extend(added_by(func, args))):
            total.backward()
    assert added == [hidden.numel(), 0]
    torch.testing.assert_close(hooked[1], 2 * hooked[0])


def test_what_is_frozen_gets_no_gradient() -> None:
    (first, second), (_, weight, hidden, _) = hard_students([VOCAB, VOCAB])
    weight.requires_grad_(False)
    hidden.requires_grad_(False)
    total, _ = compute_fused_loss(
        [first, second], build_text_teacher(torch.arange(NUM_ROWS)), text_criterion
    )
    total.backward()
    assert weight.grad is None and hidden.grad is None
    assert first.hidden.grad is not None and second.projection.weight.grad is not None


def test_under_autocast_logits_are_narrow(compiled: list) -> None:
    hidden, weight = random(7, WIDTH, seed=0).float(), random(VOCAB, WIDTH, seed=1).float()
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.no_grad():
            text = build_text_teacher(torch.arange(7))
            compute_fused_loss([student(hidden, weight)], text, text_criterion, compiled=True)
    assert [args[3].dtype for args in compiled] == [torch.bfloat16, torch.float32]


def bucketed(config: EagleConfig, kept: Tensor, p: Tensor, rest: Tensor, logits: Tensor) -> Tensor:
    """The naive loss over the kept ids and one more that stands for all others."""
    q = logits.softmax(-1)
    q_kept = q.gather(1, kept)
    q = torch.cat([q_kept, 1 - q_kept.sum(-1, keepdim=True)], dim=1)
    whole = torch.cat([p, rest], dim=1)
    return naive(config, whole, torch.arange(whole.shape[1]), q.log())


@pytest.mark.parametrize("kind", list(Divergence))
def test_a_top_k_teacher_is_the_kept_ids_and_one_bucket_for_the_rest(kind: Divergence) -> None:
    config = EagleConfig(divergence=kind, top_k=4)
    hidden = random(NUM_ROWS, WIDTH, seed=0).requires_grad_()
    weight = random(VOCAB, WIDTH, seed=1).requires_grad_()
    kept = random(NUM_ROWS, VOCAB, seed=3).log_softmax(-1).topk(4)
    vocab = DraftVocab.make_full(VOCAB)
    # What was kept is float32, and so is the rest's mass.
    log_probs = kept.values.float()
    teacher = build_top_k_teacher(vocab, kept.indices.int(), log_probs)
    part = student(hidden, weight)
    total, _ = compute_fused_loss([part], teacher, StepCriterion(config, vocab))
    p = log_probs.double().exp()
    rest = 1 - p.sum(-1, keepdim=True)
    loss = bucketed(config, kept.indices, p, rest, hidden @ weight.T)
    torch.testing.assert_close(total, loss.sum(), rtol=1e-6, atol=1e-6)
    found, expected = (gradients(each, hidden, weight) for each in (total, loss.sum()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_ids_outside_the_draft_vocabulary_are_left_out_of_a_top_k_teacher() -> None:
    vocab = DraftVocab(torch.tensor([1, 3, 5]), 8)
    ids = torch.tensor([[3, 0, 5], [7, 6, 0]])
    probs = torch.tensor([[0.5, 0.2, 0.1], [0.6, 0.2, 0.1]])
    log_q = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]]).log()
    known = build_top_k_teacher(vocab, ids, probs.log()).compute_chunk(0, 2)
    found = known.pair_with(torch.tensor([0, 1]), Softmax.from_logits(log_q))
    # Row 0: 3 and 5 are kept, .2 is left for id 1. Row 1: all of .1 is spread as q is.
    expected = torch.tensor([[0.2, 0.5, 0.1], [0.02, 0.03, 0.05]])
    torch.testing.assert_close(found.p, expected)
    torch.testing.assert_close(found.mass, expected.sum(-1))
    torch.testing.assert_close(found.p_log_p, (expected * expected.log()).sum(-1))
    assert known.top1_ids.tolist() == [3, 7]


def test_a_loss_that_is_not_finite_where_nothing_is_learnt_does_not_spread() -> None:
    vocab = DraftVocab(torch.tensor([0, 1]), 3)
    log_p = torch.tensor([[-torch.inf, -torch.inf, 0.0], [0.0, -1.0, -9.0]]).double()
    hidden = random(2, WIDTH, seed=0).requires_grad_()
    weight = random(2, WIDTH, seed=1)
    part = student(hidden, weight)
    criterion = StepCriterion(EagleConfig(), vocab)
    total, (found,) = compute_fused_loss([part], Exact(vocab, log_p), criterion)
    (grad,) = gradients(total, hidden)
    assert torch.isfinite(total)
    assert found[0, 0] == 0
    assert not grad[0].any()
    assert grad[1].any()


def test_a_top_k_teacher_takes_its_rest_for_one_id_at_another_temperature() -> None:
    vocab = DraftVocab.make_full(4)
    log_probs = torch.tensor([[0.6, 0.2]]).log()
    known = build_top_k_teacher(
        vocab, torch.tensor([[2, 0]]), log_probs, temperature=0.5
    ).compute_chunk(0, 1)
    found = known.pair_with(
        torch.tensor([0]), Softmax.from_logits(torch.tensor([[0.1, 0.3, 0.5, 0.1]]).log())
    )
    # Squares of .6, .2 and the rest's .2 are 9 to 1 to 1; ids 1 and 3 share as the student does.
    expected = torch.tensor([[1 / 11, 0.75 / 11, 9 / 11, 0.25 / 11]])
    torch.testing.assert_close(found.p, expected)


def loss_of_a_target(dtype: torch.dtype, autocast: bool) -> tuple[Tensor, list[Tensor]]:
    target = random_target()
    vocab = DraftVocab(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    states = random(40, target.hidden_size, seed=0).float()
    teacher = build_hidden_teacher(target, vocab, states)
    hidden = random(40, target.hidden_size, seed=1).to(dtype).requires_grad_()
    weight = 0.2 * random(len(vocab.ids), target.hidden_size, seed=2)
    weight = weight.to(torch.float32 if autocast else dtype).requires_grad_()
    part = student(hidden, weight)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total, _ = compute_fused_loss([part], teacher, StepCriterion(EagleConfig(), vocab))
    return total, gradients(total, hidden, weight)


@pytest.mark.usefixtures("rows_per_chunk")
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_near_float32_and_gradients_have_their_tensors_dtype(autocast: bool) -> None:
    exact, exact_grads = loss_of_a_target(torch.float32, False)
    total, grads = loss_of_a_target(torch.bfloat16, autocast)
    assert total.item() == pytest.approx(exact.item(), rel=0.02)
    wanted = [torch.bfloat16, torch.float32 if autocast else torch.bfloat16]
    assert [grad.dtype for grad in grads] == wanted
    for grad, expected in zip(grads, exact_grads, strict=True):
        assert (grad.float() - expected).norm() < 0.05 * expected.norm()


def sizes_of(found: Any) -> list[int]:
    given = found if isinstance(found, tuple | list) else [found]
    return [each.numel() for each in given if isinstance(each, Tensor)]


def test_no_tensor_of_tokens_times_vocabulary_ever_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows, width, vocab_size = 512, 8, 1024
    monkeypatch.setattr(fused, "CPU_CHUNK_BYTES", 4 * vocab_size * 32)
    monkeypatch.setattr(fused, "CPU_CHUNK_ROWS", 1)
    monkeypatch.setattr(fused, "CPU_PIECE_BYTES", 4 * vocab_size * 8)
    vocab = DraftVocab.make_full(vocab_size)
    hidden = random(num_rows, width, seed=0).float().requires_grad_()
    weight = random(vocab_size, width, seed=1).float().requires_grad_()
    sizes: list[int] = []
    with Watched(lambda _func, _args, found: sizes.extend(sizes_of(found))):
        target = type(
            "T", (), {"compute_logits": lambda _, h: h @ weight.detach().T, "vocab_size": 1024}
        )()
        teacher = build_hidden_teacher(target, vocab, hidden.detach() + 1)
        part = student(hidden, weight)
        total, _ = compute_fused_loss([part], teacher, StepCriterion(EagleConfig(), vocab))
        total.backward()
    assert max(sizes) == 32 * vocab_size


@pytest.mark.parametrize("trained", [True, False])
def test_a_total_is_run_backward_once_and_as_it_is(trained: bool) -> None:
    """A number times it would be another loss, whose gradients are not those found."""
    (part,), (_, weight) = hard_students([VOCAB])
    weight.requires_grad_(trained)

    def total() -> Tensor:
        return compute_fused_loss(
            [part], build_text_teacher(torch.arange(NUM_ROWS)), text_criterion
        )[0]

    for scaled in (2 * total(), total() / 4, total() + total().detach() * total()):
        with pytest.raises(RuntimeError, match="a total must be run backward once and unscaled"):
            scaled.backward()
    (total() + total()).backward()
    again = total()
    again.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a total must be run backward once and unscaled"):
        again.backward()


@pytest.mark.parametrize(
    ("width", "cpu", "mebibytes"),
    [
        (1_000, False, 64),
        (65_536, False, 132),  # 528 rows
        (300_000, False, 260),
        (300_000, True, 2),
    ],
)
def test_a_piece_fills_a_gpu_with_rows_and_a_cpus_caches(
    width: int, cpu: bool, mebibytes: int
) -> None:
    assert fused.compute_piece_bytes(width, cpu) == mebibytes * 2**20


@pytest.mark.parametrize(
    ("width", "cpu", "rows"),
    [
        (4_096, True, 6_144),  # 96 MiB
        (151_936, True, 512),  # 297 MiB
        (300_000, True, 447),  # 512 MiB, as on a GPU
        (300_000, False, 447),
    ],
)
def test_a_cpus_chunk_has_rows_enough_for_a_fast_product(width: int, cpu: bool, rows: int) -> None:
    assert fused.count_chunk_rows(4 * width, cpu) == rows
