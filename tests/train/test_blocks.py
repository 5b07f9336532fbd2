"""Anchors, weights and losses of block drafters, against sums written out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.utils as moving
import torch.nn.functional as F  # noqa: N812
from exports import config_of
from feature_heads import feature_head, fresh, objective_of, settings_of
from torch import Tensor
from toys import endless_target, packed, random_target, texts, tokenizer

from conf.errors import InputError
from conf.settings.blocks import BlockConfig, DFlash2Run
from conf.settings.export import ExportFormat
from eval.parity.parity_check import check_parity
from heads.blocks.block_head import BlockHead, default_layers
from heads.export.writer import compute_reference_tensors, export_head
from heads.feature_head import choose_mask_token
from heads.target_model.model import Target
from train import dflash2
from train.batch.batch import (
    NOISE_SEEDS,
    STEP_TARGETS,
    SUPERVISION,
    Batch,
    StepTargets,
    add_supervision,
    map_tensors,
)
from train.block_objective import (
    CONTEXT_ENDS,
    CONTEXT_STARTS,
    compute_slot_weights,
    draw_anchors,
)


@pytest.fixture(scope="module")
def target() -> Target:
    return endless_target(num_hidden_layers=4)


def test_weights_fall_with_depth() -> None:
    found = compute_slot_weights(BlockConfig(slot_gamma=2.0), 3)
    assert found.tolist() == pytest.approx([1.0, 0.60653066, 0.36787944])


def test_default_features_are_in_even_steps() -> None:
    # Outputs of layers 1, 9, 17, 25 and 33 of 36, as the authors of DFlash and DSpark say.
    assert default_layers(36, 5) == (2, 10, 18, 26, 34)
    assert default_layers(8, 5) == (2, 3, 4, 5, 6)
    assert default_layers(36, 1) == (19,)
    with pytest.raises(
        InputError, match=r"head\.layers is unset: no default for a target of 3 layers"
    ):
        default_layers(3, 5)


def test_anchors_are_drawn_by_sequence() -> None:
    places = torch.tensor([1, 2, 5, 9, 10, 11, 14, 17, 19])
    assert draw_anchors(places, 10, 9, (0, 0)).equal(places)
    few = draw_anchors(places, 10, 2, (7, 8))
    assert len(few) == 4
    assert few.tolist() == sorted(few.tolist())
    assert set(few.tolist()) <= set(places.tolist())
    assert (few < 10).sum() == 2
    # Alike in any company, others with another seed.
    assert draw_anchors(places[4:] - 10, 10, 2, (8,)).add(10).equal(few[2:])
    others = {tuple(draw_anchors(places, 10, 2, (7, seed))[2:].tolist()) for seed in range(20)}
    assert len(others) > 3


def test_only_some_tokens_draft() -> None:
    learnt = add_supervision(packed([[*range(8)]], 2), 3)[SUPERVISION]
    found = StepTargets.from_supervision(learnt, [torch.tensor([1, 5])] * 3)
    assert found.anchors.tolist() == [1, 5]
    # From 1 all of x3, x4, x5; from 5 x7 alone. Rows lie in the order of the answers 2, 3, 4, 6.
    assert found.step_sizes == (2, 1, 1)
    assert found.matched_rows.output_indices.tolist() == [0, 2, 4, 1]
    assert found.row_steps.tolist() == [0, 1, 2, 0]
    assert found.row_anchors.tolist() == [1, 1, 1, 5]
    assert learnt.token_indices[found.matched_rows.teacher_rows.host].tolist() == [2, 3, 4, 6]


def test_tokens_may_draft_less_deep_than_others() -> None:
    learnt = add_supervision(packed([[*range(8)]], 2), 3)[SUPERVISION]
    found = StepTargets.from_supervision(
        learnt, [torch.tensor(each) for each in ([1, 2, 5], [1, 5], [5])]
    )
    # From 1 x3 and x4, from 2 x4 alone, from 5 x7 alone: what lies behind the text nobody learns.
    assert found.step_sizes == (3, 1, 0)
    assert found.matched_rows.output_indices.tolist() == [0, 1, 3, 2]
    assert found.row_steps.tolist() == [0, 0, 1, 0]
    assert found.row_anchors.tolist() == [1, 2, 1, 5]
    assert learnt.token_indices[found.matched_rows.teacher_rows.host].tolist() == [2, 3, 3, 6]


def test_what_python_looks_into_stays_when_a_wrapper_moves_a_batch(target: Target) -> None:
    """DDP and FSDP2 bring arguments to their device, and FSDP2 casts floats, before `forward`."""
    config = settings_of("dflash")
    objective = objective_of(fresh(target, config), target, config)
    whole = objective.index_batch(packed(texts(target, 2, 40)))
    batch = map_tensors(whole, lambda tensor: tensor.to("meta"))
    # As DDP does with what is not on its device, of which the meta device is one.
    (((found,),), _) = moving._to_kwargs((batch,), {}, torch.device("meta"), False)
    for after in (found, moving._apply_to_tensors(lambda tensor: tensor, found)):
        for name in (CONTEXT_STARTS, CONTEXT_ENDS):
            assert after[name].device.is_meta
            assert not after[name].host.is_meta
            assert after[name].host.equal(whole[name].host)
        answers = after[STEP_TARGETS].matched_rows.teacher_rows
        assert answers.host.equal(whole[STEP_TARGETS].matched_rows.teacher_rows.host)


def naive(objective: Any, batch: Batch, scale: Tensor) -> tuple[Tensor, list[float]]:
    """The total, anchor by anchor and slot by slot, with all logits there are; learnt drafts."""
    head, config, target = objective.head, objective.config, objective.target
    ids = batch["input_ids"].flatten()
    learnt = [set(rows.output_indices.tolist()) for rows in batch[SUPERVISION].depths]
    heat = config.teacher_temperature if objective.training else 1.0
    said = (target.compute_logits(batch["hidden_states"].flatten(0, 1)) / heat).softmax(-1)
    total, counts, state = torch.zeros(()), [0.0] * len(scale), None
    for (anchor, slot), slot_output in sorted(outputs_of(objective, batch).items()):
        if anchor not in learnt[1 + slot]:
            continue
        before = ids[anchor + 1 + slot : anchor + 2 + slot]
        logits = head.compute_logits(slot_output)
        if isinstance(head, BlockHead):
            state = state if slot else None
            logits, state = head.compute_slot_logits(logits, slot_output, before, state)
        log_q = logits[0].log_softmax(-1)
        place = anchor + 1 + slot
        p = said[place][head.vocab.ids]
        loss = config.divergence_weight * (p / p.sum() * ((p / p.sum()).log() - log_q)).sum()
        label = head.vocab.to_draft_ids(ids[place + 1][None])[0]
        if label >= 0:
            loss = loss - config.text_weight * log_q[label]
        if getattr(head, "confidence_head", None) is not None:
            alpha = torch.minimum(log_q.exp(), p).sum().detach()
            sure = head.compute_confidence(slot_output, before)[0]
            loss = loss + F.binary_cross_entropy_with_logits(sure, alpha)
        # Of the tokens that it does not see; those in no loss mask were given to the target.
        between = [n for n in range(anchor + 1, place) if n in learnt[0]]
        strays = sum(int(said[n].argmax() != ids[n + 1]) for n in between)
        share = config.off_path_weight**strays if objective.training else 1.0
        if share >= 0.05:
            counts[slot] += 1
            total = total + scale[slot] * share * loss
    return total, counts


def outputs_of(objective: Any, batch: Batch) -> dict[tuple[int, int], Tensor]:
    """[1, H] by anchor and slot."""
    outputs, unrolled = objective.compute_outputs(batch), batch[STEP_TARGETS]
    if isinstance(objective.head, BlockHead):
        places = [(n, slot) for n in range(len(outputs)) for slot in range(outputs.shape[1])]
        anchors = unrolled.anchors.tolist()
        return {(anchors[n], slot): outputs[n, slot][None] for n, slot in places}
    rows = torch.cat(outputs)[unrolled.matched_rows.output_indices]
    places = zip(unrolled.row_anchors.tolist(), unrolled.row_steps.tolist(), strict=True)
    return dict(zip(places, rows[:, None], strict=True))


@pytest.mark.parametrize("name", ["dflash", "dflash, reduced", "dspark", "dspark, rnn", "peagle"])
def test_the_loss_is_the_sum_over_slots_of_drawn_blocks(target: Target, name: str) -> None:
    more = {"draft_vocab_size": None} if name == "peagle" else {}
    config = settings_of(name, off_path_weight=0.2, teacher_temperature=0.8, num_anchors=7, **more)
    objective = objective_of(fresh(target, config), target, config)
    documents = texts(target, 2, 12)
    for place, token in ((8, 40), (9, 41), (10, 42)):  # that the target would not have said
        documents[0][place] = documents[1][place] = token
    batch = {**packed(documents), NOISE_SEEDS: (5,)}
    batch = objective.prepare_batch(objective.index_training_batch(batch))
    assert len(batch[STEP_TARGETS].anchors) == 7 or name == "peagle"
    scale = torch.rand(len(objective.term_weights), generator=torch.Generator().manual_seed(0))
    sums = objective(batch, scale)
    sums.total.backward()
    trained = {n: p for n, p in objective.head.named_parameters() if p.requires_grad}
    mine = {name: each.grad.clone() for name, each in trained.items()}
    expected, counts = naive(objective, batch, scale)
    torch.testing.assert_close(sums.total, expected, rtol=1e-4, atol=1e-4)
    theirs = torch.autograd.grad(expected, list(trained.values()), allow_unused=True)
    for (each, found), given in zip(mine.items(), theirs, strict=True):
        wanted = torch.zeros_like(found) if given is None else given
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4, msg=each)
    assert sums.terms[1].tolist() == counts
    assert sum(counts) < objective.compute_divisors(batch).sum()
    found = objective.eval()(batch, scale).total
    torch.testing.assert_close(found, naive(objective, batch, scale)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dflash", "peagle"])
def test_a_step_draws_anchors_and_noise_by_its_seeds(target: Target, name: str) -> None:
    config = settings_of(name, num_anchors=3, **({"noise": 0.5} if name == "peagle" else {}))
    objective = objective_of(fresh(target, config), target, config)

    def drawn(*seed: int) -> tuple[list[int], Tensor]:
        batch = packed(texts(target, 2, 12)) | ({NOISE_SEEDS: seed} if seed else {})
        batch = objective.prepare_batch(objective.index_training_batch(batch))
        return batch[STEP_TARGETS].row_anchors.tolist(), objective.compute_outputs(batch)[0]

    first, again, other = map(drawn, (1, 1, 2))
    assert first[0] == again[0] != other[0]
    assert first[1].equal(again[1])
    objective.eval()
    if name == "peagle":  # the first outputs are of all tokens
        assert not first[1].allclose(other[1])
        assert drawn(1)[1].equal(drawn(2)[1])
    assert drawn()[0] == drawn(0)[0]  # of rows that no step drew


def test_a_head_learns_what_it_measures(target: Target) -> None:
    """alpha, which the confidence is to say, and its own words of it."""
    head = feature_head(target, "dspark", num_updates=20)
    config = settings_of("dspark")
    objective = objective_of(head, target, config).eval()
    batch = objective.prepare_batch(objective.index_batch(packed(texts(target, 6, 40))))
    outputs = objective.compute_outputs(batch)
    said = objective.select_supervised_rows(
        head.compute_confidence(outputs, objective._gather_previous_tokens(batch)),
        batch[STEP_TARGETS],
    )
    total, sums = objective(batch, objective.term_weights)
    torch.testing.assert_close(
        total, (objective.term_weights * sums[0]).sum()
    )  # confidence included
    alpha = sums[3].sum() / sums[1].sum()
    assert abs(said.sigmoid().mean() - alpha) < 0.1
    assert 0.1 < alpha < 0.95


class Data:
    """Training data in which a token is used once."""

    def __init__(self, used: int) -> None:
        self.used = used

    def count_token_ids(self, size: int) -> Tensor:
        return F.one_hot(torch.tensor(self.used), size)


class Crowded:
    """A tokenizer none of whose tokens is to spare."""

    eos_token_id = 2
    chat_template = "{{ '<user>' + messages[0].content }}"
    special_tokens_map: ClassVar[dict[str, str]] = {"eos_token": "<end>"}
    added_tokens_decoder: ClassVar[dict[int, Any]] = {
        number: SimpleNamespace(content=name, special=True)
        for number, name in ((2, "<end>"), (5, "<user>"), (7, "<repo>"))
    }

    def __len__(self) -> int:
        return 10_000


def test_a_mask_token_is_one_that_no_text_uses(target: Target) -> None:
    target = random_target(num_hidden_layers=4, vocab_size=300)
    assert choose_mask_token(target, None) == 299
    assert choose_mask_token(target, 17) == 17
    with pytest.raises(InputError, match=r"mask_token_id=300: must be from 0 to 299"):
        choose_mask_token(target, 300)
    with pytest.raises(InputError, match=r"mask_token_id=2: ends texts"):
        choose_mask_token(target, 2)
    target.tokenizer = tokenizer()
    assert choose_mask_token(target, None) == len(tokenizer())  # which leaves rows to spare
    full = random_target(num_hidden_layers=4, vocab_size=len(tokenizer()))
    full.tokenizer = tokenizer()
    assert choose_mask_token(full, None) == 0  # <pad>
    full.tokenizer = Crowded()
    with pytest.raises(InputError, match=r"no spare token.*=7 \(<repo>\)$"):
        choose_mask_token(full, None)


def test_a_dflash2_head_repeats_the_scalings_of_its_target(tmp_path: Path) -> None:
    """Engines add what follows a token to the logits that the file tells them to make."""
    target = random_target(num_hidden_layers=4, vocab_size=300)
    target.model.config.update({"logits_scaling": 4.0, "final_logit_softcapping": 2.0})
    run = DFlash2Run(head=settings_of("dflash2"))
    head, _ = dflash2.main.make_head(run, target, Data(17))
    head.save(tmp_path / "head")
    written = config_of(tmp_path / "head")["dflash_config"]
    assert (written["output_multiplier"], written["final_logit_softcapping"]) == (0.25, 2.0)
    outputs = torch.randn(5, target.hidden_size)
    assert head.compute_logits(outputs).equal(target.compute_logits(outputs))
    assert head.make_projection() == target.projection
    export_head(
        head, ExportFormat.vllm, compute_reference_tensors(head, target, 5), tmp_path / "export", {}
    )
    check_parity(tmp_path / "export")
