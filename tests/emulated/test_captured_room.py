"""Slots that captured passes keep for drafts: as many as are drafted."""

from typing import Any

import pytest
import torch
from emulated.device import off
from emulated.test_captured import LENGTHS, NUM_TOKENS, prompts, random_target, told

from eval.decode import cuda_graphs as captured
from eval.decode.cuda_graphs import CapturedPasses, CaptureError, GraphDecoder, PassShape
from eval.decode.drafters.lookup import PromptLookup
from eval.decode.engine import Generation, Request, decode_many
from heads.decoding import cache as tree_cache
from heads.decoding.drafting import PAD, Draft, Roots
from heads.decoding.tree import Tree


class Growing(PromptLookup):
    """Drafts more with every step, up to a dozen tokens."""

    def __init__(self) -> None:
        super().__init__(4)
        self.size = 0

    def propose(self, roots: Roots) -> Draft:
        self.size = min(self.size + 1, 12)
        tokens = roots.tokens.unsqueeze(1).expand(-1, self.size).contiguous()
        return Draft(Tree.make_chain(self.size), tokens, self.size)


def in_turn(way: GraphDecoder) -> list[Generation]:
    """Texts one after the other, the longest first."""
    way.target.model.generation_config.eos_token_id = []
    return [text for ids in prompts()[:2] for text in way.decode_requests([Request(ids)], 1)]


def test_passes_have_room_for_what_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "WIDTH", 8)
    monkeypatch.setattr(tree_cache, "ROUND_TO", 1)
    with off():
        target = random_target("cpu")
        target.model.generation_config.eos_token_id = []
        requests = [[Request(ids)] for ids in prompts()[:2]]
        texts = [decode_many(target, lambda _: Growing(), each, NUM_TOKENS, 1) for each in requests]
    way = GraphDecoder(random_target("cuda"), lambda _: Growing(), NUM_TOKENS)
    assert told(in_turn(way)) == told([text for [text] in texts])
    assert way.last_captured is not None
    assert way.last_captured.capacity == captured.compute_num_slots(LENGTHS[0] + NUM_TOKENS, 13)
    assert way.last_captured.graphs.captured


def test_drawn_chains_of_one_size_share_a_graph() -> None:
    tokens, probs = torch.tensor([[5, 6, 7]]), torch.rand(1, 3, 9)
    draft = Draft.from_tree(Tree.make_chain(3), tokens, probs)
    shape = PassShape.from_draft(draft)
    assert shape == PassShape.from_draft(
        Draft.from_tree(Tree.make_chain(4), tokens[:, [0, 1, 2, 2]], probs[:, [0] * 4])
    )
    assert shape != PassShape.from_draft(Draft.from_tree(Tree.make_chain(3), tokens))
    padded = shape.pad_draft(draft)
    assert padded.tokens.tolist() == [[5, 6, 7, PAD]]
    assert padded.draft_probs is not None
    assert padded.draft_probs.tolist() == [[*probs[0].tolist(), [0.0] * 9]]


@pytest.mark.parametrize("num_nodes", [13, 9])
def test_a_compiled_target_needs_room_for_what_is_drafted(
    num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "WIDTH", 1)
    target, made = random_target("cuda"), list[CapturedPasses]()
    usual = CapturedPasses.__init__

    def noted(passes: CapturedPasses, *given: Any) -> None:
        made.append(passes)
        usual(passes, *given)

    monkeypatch.setattr(CapturedPasses, "__init__", noted)
    target.capacity = captured.compute_num_slots(LENGTHS[0] + NUM_TOKENS, num_nodes)
    way = GraphDecoder(target, lambda _: Growing(), NUM_TOKENS)
    if num_nodes == 13:
        in_turn(way)
        assert len(made) == 1  # whose graphs serve the second text too
        return
    with pytest.raises(CaptureError, match=r"12 draft tokens .* compiled target's \d+ slots"):
        in_turn(way)
