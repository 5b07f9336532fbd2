"""Block drafters: what trains is what drafts, nothing leaks, texts stay the target's own."""

import copy
from dataclasses import replace

import pytest
import torch
from feature_heads import (
    BLOCKS,
    MASK,
    fresh,
    learnt,
    objective_of,
    observed,
    settings_of,
    shared_target,
    texts_of_target,
)
from torch import Tensor
from toys import packed

from heads.blocks.block_head import BlockDrafter
from heads.decoding.drafting import Roots
from heads.decoding.tree import DynamicShape
from train.batch.batch import STEP_TARGETS

QUICK = ("dflash2", "dspark, rnn")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS]


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_tree_holds_the_likeliest_paths_of_all(name: str) -> None:
    head, text = learnt(name), texts_of_target(1, 12)[0]
    width, kept = 7, 9
    drafter = BlockDrafter(head, DynamicShape(3, width, kept))
    observed(drafter, text)
    draft = drafter.propose(Roots.from_ids(text[-1:]))
    sure, (base, outputs) = text[-1], drafter._compute_slots(Roots.from_ids(text[-1:]))
    paths: dict[tuple[int, ...], float] = {}

    def follow(path: tuple[int, ...], score: float, state: Tensor | None) -> None:
        slot, before = len(path), torch.tensor([path[-1] if path else int(sure)])
        logits, after = head.compute_slot_logits(base[:, slot], outputs[:, slot], before, state)
        best = logits[0].log_softmax(-1).topk(width)
        for log_q, index in zip(best.values.tolist(), best.indices, strict=True):
            longer = (*path, int(head.vocab.to_target_ids(index)))
            paths[longer] = score + log_q
            if len(longer) < 3:
                follow(longer, paths[longer], after)

    follow((), 0.0, None)
    expected = set(sorted(paths, key=lambda path: -paths[path])[:kept])
    parents = draft.tree[0].tolist()
    tokens, found = draft.tokens[0].tolist(), {0: ()}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True), start=1):
        found[node] = (*found[parent], token)
    assert set(found.values()) - {()} == expected


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_what_trains_is_what_drafts(name: str) -> None:
    """Packed documents, drawn anchors and no cache, against a text alone with one."""
    documents = texts_of_target(3, 14)
    objective = objective_of(learnt(name), shared_target(), settings_of(name, num_anchors=9))
    batch = objective.prepare_batch(objective.index_batch(packed(documents)))
    anchors = batch[STEP_TARGETS].anchors
    assert len(anchors) == 9
    trained = objective.compute_outputs(batch)
    for row, anchor in enumerate(anchors.tolist()):
        document, place = divmod(anchor, len(documents[0]))
        text = documents[document][: place + 2]
        drafter = BlockDrafter(learnt(name), 4 if name.startswith("dflash") else 5)
        observed(drafter, text)
        assert drafter.cache.prepared_slots.lengths == [place + 1]
        _, outputs = drafter._compute_slots(Roots.from_ids(text[-1:]))
        torch.testing.assert_close(trained[row], outputs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_leaks_from_behind_the_anchor(name: str) -> None:
    config = settings_of(name)
    head = fresh(shared_target(), config).eval()
    objective = objective_of(head, shared_target(), config)
    document = texts_of_target(1, 20)[0]
    other = [*document[:12], *(5 + token % 80 for token in document[12:])]
    found = []
    for text in (document, other):
        batch = objective.prepare_batch(objective.index_batch(packed([text])))
        rows = batch[STEP_TARGETS].anchors < 11  # whose root is token 11 at most
        found.append((objective.compute_outputs(batch)[rows], rows))
    assert found[0][1].sum() > 3
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)


@torch.inference_mode()
def test_masks_are_embedded_as_the_mask_token() -> None:
    head = fresh(shared_target(), settings_of("dflash"))
    assert head.config.mask_token_id == MASK
    other = fresh(shared_target(), settings_of("dflash"))
    other.config = replace(head.config, mask_token_id=MASK + 1)
    text = texts_of_target(1, 8)[0]
    drawn = []
    for each in (head, other):
        drafter = BlockDrafter(each, 4)
        observed(drafter, text)
        drawn.append(drafter._compute_slots(Roots.from_ids(text[-1:]))[1])
    assert not torch.allclose(drawn[0], drawn[1])


@pytest.mark.parametrize("name", ["dflash2", "dspark, rnn"])
@torch.inference_mode()
def test_a_chain_takes_the_best_token_after_the_one_before(name: str) -> None:
    head, text = copy.deepcopy(learnt(name)), texts_of_target(1, 12)[0]
    for matrix in head.find_embeddings():  # so that the token before decides
        matrix.copy_(torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0)))
    drafter = BlockDrafter(head, 4)
    observed(drafter, text)
    tokens = drafter.propose(Roots.from_ids(text[-1:])).tokens[0].tolist()
    roots = Roots.from_ids(text[-1:])
    before, (base, outputs) = roots.tokens, drafter._compute_slots(roots)
    expected: list[int] = []
    state: Tensor | None = None
    for slot in range(4):
        logits, state = head.compute_slot_logits(base[:, slot], outputs[:, slot], before, state)
        before = head.vocab.to_target_ids(logits.argmax(-1))
        expected.append(int(before))
    assert tokens == expected
    assert tokens != head.vocab.to_target_ids(base[0, :4].argmax(-1)).tolist()
