"""Block drafters: what trains is what drafts, nothing leaks, texts stay the target's own."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from block_heads import KINDS, MASK, block_head, fresh, objective_of, settings_of
from torch import Tensor
from toys import packed, random_target, texts

from eval.decode.engine import NoDraft, decode, decode_batch
from eval.measure.replay import replay
from heads.blocks.drafter import BlockChain, BlockTree
from heads.blocks.head import BlockHead
from heads.decoding.drafting import PAD, Committed, Roots
from heads.decoding.sampling import Sampling
from heads.decoding.tree import DynamicShape, Tree
from heads.target_model.model import Target, TargetOutput
from train.batch.supervision import UNROLLED

QUICK = ("dflash2", "dspark, rnn")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]


@pytest.fixture(scope="module")
def target() -> Target:
    target = random_target(num_hidden_layers=4)
    target.model.generation_config.eos_token_id = None
    return target


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """Two that the heads have learnt from, and one that they have not."""
    return [*(text[:4] for text in texts(target, 2, 1)), [61, 23, 77]]


@pytest.fixture(scope="module")
def answers(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """The target's own, without drafts."""
    return [decode(target, NoDraft(), prompt, 40).token_ids for prompt in prompts]


class Heads(dict[str, BlockHead]):
    """Made when they are asked for."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target

    def __missing__(self, name: str) -> BlockHead:
        with torch.inference_mode(mode=False):
            self[name] = block_head(self.target, name, num_updates=30, num_texts=2)
        return self[name]


@pytest.fixture(scope="module")
def heads(target: Target) -> Heads:
    return Heads(target)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_replay_equals_chain_decoding_step_for_step(
    target, prompts, answers, heads, name, depth
) -> None:
    num_accepted = 0
    for prompt, text in zip(prompts, answers, strict=True):
        decoded = decode(target, BlockChain(heads[name], depth), prompt, 40)
        assert decoded.token_ids == text
        assert replay(target, heads[name], Tree.chain(depth), prompt, text) == decoded.steps
        num_accepted += sum(step.num_accepted for step in decoded.steps)
    assert num_accepted > 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [DynamicShape(4, 3, 10), DynamicShape(1, 4, 4)])
def test_trees_are_lossless(target, prompts, answers, heads, name, shape: DynamicShape) -> None:
    for prompt, text in zip(prompts, answers, strict=True):
        decoded = decode(target, BlockTree(heads[name], shape), prompt, 20)
        assert decoded.token_ids == text[:20]
        assert any(step.num_accepted for step in decoded.steps) or prompt == prompts[-1]


def observed(target: Target, drafter: BlockChain | BlockTree, text: list[int]) -> None:
    """Gives a drafter a text, whose last token is the root of what it drafts next."""
    output = target.read_response(text[:1], text[1:], drafter.taps)
    drafter.observe(Committed([text[:-1]], output, target.new_cache(1)))


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_tree_holds_the_likeliest_paths_of_all(target, heads, name: str) -> None:
    head, text = heads[name], texts(target, 1, 12)[0]
    width, kept = 7, 9
    drafter = BlockTree(head, DynamicShape(3, width, kept))
    observed(target, drafter, text)
    draft = drafter.propose(Roots.of(text[-1:]))
    sure, outputs, base = drafter._slots(Roots.of(text[-1:]))
    paths: dict[tuple[int, ...], float] = {}

    def follow(path: tuple[int, ...], score: float, state: Tensor | None) -> None:
        slot, before = len(path), torch.tensor([path[-1] if path else int(sure)])
        logits, after = head.step(base[:, slot], outputs[:, slot], before, state)
        best = logits[0].log_softmax(-1).topk(width)
        for log_q, index in zip(best.values.tolist(), best.indices, strict=True):
            longer = (*path, int(head.vocab.to_target(index)))
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
@pytest.mark.parametrize(
    "kind", [pytest.param("chain", marks=pytest.mark.slow), "tree", "sampled chain"]
)
def test_a_batch_gives_every_text_that_it_gives_alone(
    target, prompts, heads, name: str, kind: str
) -> None:
    warm = Sampling(temperature=0.7) if kind == "sampled chain" else Sampling()

    def drafter(*seeds: int) -> BlockChain | BlockTree:
        if kind == "tree":
            return BlockTree(heads[name], DynamicShape(3, 3, 8))
        return BlockChain(heads[name], 3, warm, seeds)

    batch = [*prompts, prompts[0][:2] * 5]
    together = decode_batch(target, drafter(10, 11, 12, 13), batch, 20, warm, range(4))
    for row, (prompt, found) in enumerate(zip(batch, together, strict=True)):
        alone = decode(target, drafter(10 + row), prompt, 20, warm, row)
        assert (found.token_ids, found.steps) == (alone.token_ids, alone.steps)


@pytest.mark.parametrize("name", ["dflash2", "dspark, rnn"])
def test_a_sampled_token_has_the_probability_that_is_told(target, heads, name: str) -> None:
    head, text, number = heads[name], texts(target, 1, 10)[0], 3000
    warm = Sampling(temperature=1.3)
    drafter = BlockChain(head, 2, warm, range(number))
    output = target.read_response(text[:1], text[1:], head.taps)
    many = TargetOutput(
        output.hidden_states.expand(number, -1, -1),
        {index: each.expand(number, -1, -1) for index, each in output.layers.items()},
    )
    drafter.observe(Committed([text[:-1]] * number, many, target.new_cache(number)))
    draft = drafter.propose(Roots.of([text[-1]] * number))
    assert draft.draft_probs is not None
    first, second = draft.tokens.unbind(1)
    told = draft.draft_probs[0, 0]
    counts = Counter(first.tolist())
    likely = told.topk(5)
    for share, token in zip(likely.values.tolist(), likely.indices.tolist(), strict=True):
        deviation = (share * (1 - share) / number) ** 0.5
        assert abs(counts[token] / number - share) < 4.5 * deviation
    # What the second is drawn from is the distribution behind the first.
    rows = first == likely.indices[0]
    share = draft.draft_probs[rows][0, 1].max().item()
    best = int(draft.draft_probs[rows][0, 1].argmax())
    spread = (share * (1 - share) / int(rows.sum())) ** 0.5
    assert abs((second[rows] == best).double().mean().item() - share) < 4.5 * spread


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_what_trains_is_what_drafts(target, heads, name: str) -> None:
    """Packed documents, drawn anchors and no cache, against a text alone with one."""
    documents = texts(target, 3, 14)
    objective = objective_of(heads[name], target, settings_of(name, num_anchors=9))
    batch = objective.prepare(objective.indexed(packed(documents)))
    anchors = batch[UNROLLED].drafts
    assert len(anchors) == 9
    trained = objective._outputs(batch)
    for row, anchor in enumerate(anchors.tolist()):
        document, place = divmod(anchor, len(documents[0]))
        text = documents[document][: place + 2]
        drafter = BlockChain(heads[name], 4 if name.startswith("dflash") else 5)
        observed(target, drafter, text)
        assert drafter.cache.opened.lengths == [place + 1]
        _, outputs, _ = drafter._slots(Roots.of(text[-1:]))
        torch.testing.assert_close(trained[row], outputs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_leaks_from_behind_the_anchor(target, name: str) -> None:
    config = settings_of(name)
    head = fresh(target, config).eval()
    objective = objective_of(head, target, config)
    document = texts(target, 1, 20)[0]
    other = [*document[:12], *(5 + token % 80 for token in document[12:])]
    found = []
    for text in (document, other):
        batch = objective.prepare(objective.indexed(packed([text])))
        rows = batch[UNROLLED].drafts < 11  # whose root is token 11 at most
        found.append((objective._outputs(batch)[rows], rows))
    assert found[0][1].sum() > 3
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)


@torch.inference_mode()
def test_masks_are_embedded_as_the_mask_token(target) -> None:
    head = fresh(target, settings_of("dflash"))
    assert head.config.mask_token_id == MASK
    other = fresh(target, settings_of("dflash"))
    other.config = replace(head.config, mask_token_id=MASK + 1)
    text = texts(target, 1, 8)[0]
    drawn = []
    for each in (head, other):
        drafter = BlockChain(each, 4)
        observed(target, drafter, text)
        drawn.append(drafter._slots(Roots.of(text[-1:]))[1])
    assert not torch.allclose(drawn[0], drawn[1])


@torch.inference_mode()
def test_no_row_lies_beyond_the_window(target, heads) -> None:
    head, text = heads["dflash2"], texts(target, 1, 12)[0]
    rows = len(text) - 1  # the root's place
    head.window, window = rows + 3, head.window
    try:
        drafter = BlockChain(head, 4)
        observed(target, drafter, text)
        tokens = drafter.propose(Roots.of(text[-1:])).tokens[0].tolist()
        assert [token == PAD for token in tokens] == [False, False, True, True]
        output = target.read_response(text[:4], text[4:], head.taps)
        ranked = head.candidates(output, text, len(text) - 2, 4, 2)
        assert (ranked == PAD).all(-1).flatten().tolist() == [False, False, True, True]
        assert ranked[:2, 0, 0].tolist() == tokens[:2]
    finally:
        head.window = window
