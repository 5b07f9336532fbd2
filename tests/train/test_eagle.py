from math import exp, log

import pytest
import torch
from toys import eagle_head, endless_target, packed, random_target, texts

from conf.settings.eagle import (
    Divergence,
    EagleConfig,
    EagleForm,
    StepNormalizer,
    TokenNormalizer,
)
from heads.layers.branch_attention import BranchCache, build_causal_range
from heads.layers.documents import Documents
from heads.vocab import DraftVocab
from train.batch.batch import DOCUMENTS, NOISE_SEEDS
from train.eagle import EagleObjective, compute_step_weights
from train.loss.divergences import (
    DistributionPair,
    Softmax,
    compute_divergence,
    p_log_p,
    top_k_cross_entropy,
)
from train.loss.fused_linear import LossSums
from train.loss.teachers import TargetDistribution, build_hidden_teacher

# Draft vocabulary of 3 of the target's 4 ids; p over the four is (.4, .2, .2, .2).
P = torch.tensor([[0.4, 0.2, 0.2]]).log()
Q = torch.tensor([[0.5, 0.25, 0.25]]).log()
ALPHA = 0.4 + 0.2 + 0.2
# Renormalised over the draft vocabulary p is (.5, .25, .25), which q is too; r is not.
R = torch.tensor([[0.25, 0.5, 0.25]]).log()
R_ALPHA = 0.25 + 0.2 + 0.2
R_KL = 0.5 * log(2) - 0.25 * log(2)
# The middle of p and r is (.375, .375, .25).
R_JS = 0.5 * (0.5 * log(0.5 / 0.375) + 0.25 * log(0.25 / 0.375)) * 2


def pair(log_p: torch.Tensor, log_q: torch.Tensor) -> DistributionPair:
    p = log_p.exp()
    target = TargetDistribution(log_p.argmax(-1), p, p.sum(-1), p_log_p(p))
    return target.pair_with(torch.tensor([0]), Softmax.from_logits(log_q))


@pytest.mark.parametrize(
    ("kind", "of_q", "of_r"),
    [
        (Divergence.kl, 0.0, R_KL),
        (Divergence.rkl, 0.0, R_KL),  # p and r are one another's mirror image
        (Divergence.js, 0.0, R_JS),
        (Divergence.tv, 1 - ALPHA, 1 - R_ALPHA),
        (Divergence.nla, -log(ALPHA), -log(R_ALPHA)),
        (Divergence.hybrid, (1 - exp(-3 * ALPHA)) * (1 - ALPHA),
         exp(-3 * R_ALPHA) * R_KL + (1 - exp(-3 * R_ALPHA)) * (1 - R_ALPHA)),
    ],
)  # fmt: skip
def test_divergences_by_hand(kind: Divergence, of_q: float, of_r: float) -> None:
    for other, expected in ((Q, of_q), (R, of_r)):
        found = compute_divergence(kind, pair(P, other), eta=3.0, needs_grad=False)
        assert found.loss.item() == pytest.approx(expected, abs=1e-6)
        assert found.grad is None


def test_top_k_loss_by_hand() -> None:
    both = pair(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.2, 0.3, 0.5]]).log())
    expected = -(0.5 * log(0.2) + 0.3 * log(0.3))
    assert top_k_cross_entropy(both, 2, False).loss.item() == pytest.approx(expected)
    assert top_k_cross_entropy(both, 10, False).loss.item() == pytest.approx(
        expected - 0.2 * log(0.5)
    )


def test_step_weights() -> None:
    config = EagleConfig(num_steps=3, step_decay=0.5)
    assert compute_step_weights(config).tolist() == [1.0, 0.5, 0.25]
    config.step_normalizer = StepNormalizer.mean
    assert compute_step_weights(config).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])


@pytest.fixture(scope="module")
def setting():
    target = endless_target(num_hidden_layers=4)
    batch = packed(texts(target, 3, 9))
    return target, batch


def run(objective: EagleObjective, batch: dict, only: int | None = None) -> LossSums:
    """The sums of a batch, with the total of all steps or `only` one."""
    scale = torch.ones(len(objective.term_weights))
    if only is not None:
        scale = torch.zeros_like(scale)
        scale[only] = 1.0
    return objective(objective.prepare_batch(objective.index_batch(batch)), scale)


def literal_sums(
    head, target, batch, config: EagleConfig, temperature: float = 1.0
) -> list[list[float]]:
    """The sums row by row: every token's chain is run on its own."""
    where = Documents.from_ids(batch["document_ids"])
    output = target.encode_documents(batch["input_ids"], batch["position_ids"], where, head.taps)
    ids, mask = batch["input_ids"][0], batch["loss_mask"][0]
    documents = batch["document_ids"][0]
    hidden = output.hidden_states[0]
    text = head.encode_context(
        head.fuse(head.collect_features(output)[0]), ids.roll(-1), batch["position_ids"][0]
    )
    drafted = head.vocab.ids.tolist()
    sums = [[0.0] * 4 for _ in range(config.num_steps)]
    for t in range(len(ids)):
        row = torch.tensor([t])
        branches = BranchCache(text.keys[None], text.values[None], build_causal_range(where, row))
        outputs = head.unroll(text, ids, row, branches)
        for d in range(1, config.num_steps + 1):
            out = next(outputs)
            end = t + 1 + d
            if end >= len(ids) or documents[end] != documents[t] or not mask[end]:
                continue
            p = (target.compute_logits(hidden[t + d]) / temperature).softmax(-1)
            q = head.compute_logits(out)[0].softmax(-1)
            best = int(p.argmax())
            inside = p[drafted]
            alpha = float(torch.minimum(inside, q).sum())
            loss = 0.0
            if best in drafted:
                renormed = inside / inside.sum()
                kl = float((renormed * (renormed.log() - q.log())).sum())
                loss = config.divergence_weight * kl
                if config.regression_weight:
                    gap = (out[0] - hidden[t + d]).abs()
                    near = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
                    loss += config.regression_weight * float(near)
            agrees = drafted[int(q.argmax())] == best
            for place, value in enumerate((loss, 1.0, float(agrees), alpha)):
                sums[d - 1][place] += value
    return sums


@pytest.mark.parametrize(
    ("form", "num_ids", "more"),
    [
        (EagleForm.eagle3, None, {}),
        (EagleForm.eagle3, 40, {"fc_norm": True, "norm_output": True}),
        (EagleForm.eagle1, None, {"divergence_weight": 0.1}),
    ],
)
def test_the_objective_is_the_sum_over_each_tokens_own_chain(setting, form, num_ids, more) -> None:
    target, batch = setting
    head = eagle_head(target, form, num_ids, num_updates=3, **more)
    config = EagleConfig(form=form, num_steps=4, **more)
    config.regression_weight = 1.0 if form is EagleForm.eagle1 else 0.0
    objective = EagleObjective(head, target, config)
    scale = torch.tensor([1.0, 0.5, 0.25, 2.0])
    for training, temperature in ((True, 0.6), (False, 1.0)):
        objective.train(training)
        with torch.no_grad():
            total, found = objective(objective.prepare_batch(objective.index_batch(batch)), scale)
            expected = torch.tensor(literal_sums(head, target, batch, config, temperature))
        assert total.item() == pytest.approx(float((scale * expected[:, 0]).sum()), rel=1e-4)
        torch.testing.assert_close(found.T, expected, rtol=1e-4, atol=1e-4)
        assert found[1].tolist() == [27.0, 27.0, 27.0, 24.0]


@pytest.mark.parametrize(
    ("normalizer", "prompts", "expected"),
    [
        (TokenNormalizer.all, False, [39, 39, 39, 39]),
        (TokenNormalizer.supervised, False, [27, 27, 27, 24]),
        (TokenNormalizer.supervised, True, [33, 30, 27, 24]),
    ],
)
def test_counts_are_what_the_losses_are_divided_by(
    setting, normalizer: TokenNormalizer, prompts: bool, expected: list
) -> None:
    """Three documents of 13 tokens, 9 of each answers; training learns of prompts if told."""
    target, batch = setting
    head = eagle_head(target, EagleForm.eagle3, num_updates=1)
    config = EagleConfig(num_steps=4, token_normalizer=normalizer, learn_prompts=prompts)
    objective = EagleObjective(head, target, config)
    assert objective.compute_divisors(objective.index_training_batch(batch)).tolist() == expected


@pytest.mark.parametrize(("has_bias", "temperature"), [(False, 1.0), (True, 1.0), (False, 0.25)])
def test_the_teacher_says_what_the_target_says(has_bias: bool, temperature: float) -> None:
    target = random_target(num_hidden_layers=4)
    plain = target.output_head
    target.output_head = torch.nn.Linear(64, 96, bias=has_bias)
    target.output_head.weight = plain.weight
    assert target.has_plain_head is not has_bias
    vocab = DraftVocab(torch.tensor([3, 50, 95]), 96)
    hidden = torch.randn(4, 64)
    expected = (target.compute_logits(hidden) / temperature).log_softmax(-1)
    known = build_hidden_teacher(target, vocab, hidden, temperature).compute_chunk(1, 4)
    assert known.top1_ids.equal(expected[1:].argmax(-1))
    at = torch.tensor([2, 0, 2])
    found = known.pair_with(at, Softmax.from_logits(torch.zeros(3, 3))).p
    torch.testing.assert_close(found, expected[1 + at][:, vocab.ids].exp())


@pytest.mark.parametrize("detach", [False, True])
def test_detached_features_cut_the_gradient_between_steps(setting, detach: bool) -> None:
    """With the loss of the second step alone, the first step's output head input is reached
    through its features only."""
    target, batch = setting
    head = eagle_head(target, EagleForm.eagle1, num_updates=1)
    config = EagleConfig(form=EagleForm.eagle1, num_steps=2, detach_features=detach)
    objective = EagleObjective(head, target, config)
    whole = torch.autograd.grad(run(objective, batch, 1).total, head.layer.mlp.down_proj.weight)[0]
    config.detach_features = True
    cut = torch.autograd.grad(run(objective, batch, 1).total, head.layer.mlp.down_proj.weight)[0]
    assert torch.allclose(whole, cut) is detach


def test_noise_is_added_while_training_only(setting) -> None:
    """The same for a sequence in any company."""
    target, _ = setting
    head = eagle_head(target, EagleForm.eagle1, num_updates=1)
    objective = EagleObjective(head, target, EagleConfig(form=EagleForm.eagle1, noise=0.2))

    def noisy(*seeds: int, train: bool = True) -> torch.Tensor:
        where = Documents.from_ids(torch.tensor([[0] * 64 + [1] * 32] * len(seeds)))
        batch = {NOISE_SEEDS: seeds, DOCUMENTS: where}
        return objective.train(train)._add_noise(torch.zeros(96 * len(seeds), 8), batch)

    long, short = noisy(3).split([64, 32])
    # As wide as the original's is on each document alone.
    assert 0.7 < long.abs().max() <= 0.5 * 0.2 * 512 / 64
    assert 1.4 < short.abs().max() <= 0.5 * 0.2 * 512 / 32
    assert noisy(3, 4).equal(torch.cat([noisy(3), noisy(4)]))
    assert not noisy(3).equal(noisy(4))
    assert noisy(5, train=False).equal(torch.zeros(96, 8))


def test_a_batch_without_anything_to_learn_reaches_every_parameter(setting) -> None:
    target, batch = setting
    head = eagle_head(target, EagleForm.eagle3, num_updates=1)
    empty = {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}
    sums = run(EagleObjective(head, target, EagleConfig(num_steps=2)), empty)
    sums.total.backward()
    assert sums.terms[1].tolist() == [0, 0]
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
