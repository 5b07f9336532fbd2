"""What a cache holds: slots of keys and values, and states of recurrent layers."""

import pytest
import torch
from torch import Tensor
from toys import random_model, random_target, tree_of

from heads.decoding.cache import (
    CONV,
    RECURRENT,
    CacheSlots,
    KeptNodes,
    RecurrentStates,
    SlotBuffer,
    State,
    _build_slot_index,
    group_nodes_by_depth,
)
from heads.decoding.drafting import Draft
from heads.decoding.tree import Tree

CPU = torch.device("cpu")


def states(*rows: list[int]) -> torch.Tensor:
    """[B, 1, n, 1] keys that are easy to read."""
    return torch.tensor(rows, dtype=torch.float32)[:, None, :, None]


def rows(buffer: torch.Tensor) -> list[list[int]]:
    return buffer[:, 0, :, 0].int().tolist()


def test_accepted_nodes_move_to_their_places_and_the_rest_is_forgotten() -> None:
    slots, buffer = CacheSlots(2, CPU), SlotBuffer()
    # Prompts of 3 and 1 tokens, the shorter one filled up.
    new = states([1, 2, 3], [7, 0, 0])
    buffer.write(new, new, slots.compute_pending_slots(3, 3), slots.count_used_slots(3))
    slots.commit([[0, 1, 2], [0]], [buffer])
    # Trees of 4 nodes behind them.
    new = states([10, 11, 12, 13], [20, 21, 22, 23])
    keys, _ = buffer.write(new, new, slots.compute_pending_slots(4, 4), slots.count_used_slots(4))
    assert rows(keys) == [[1, 2, 3, 10, 11, 12, 13], [7, 20, 21, 22, 23, 0, 0]]
    slots.commit([[0, 2], [0, 1, 3]], [buffer])
    assert slots.lengths == [5, 4]
    assert [row[:5] for row in rows(buffer.keys)] == [[1, 2, 3, 10, 12], [7, 20, 21, 23, 23]]
    new = states([30], [40])
    keys, _ = buffer.write(new, new, slots.compute_pending_slots(1, 1), slots.count_used_slots(1))
    assert rows(keys) == [[1, 2, 3, 10, 12, 30], [7, 20, 21, 23, 40, 0]]
    slots.select_rows([1], buffer)
    assert slots.lengths == [4]
    assert rows(buffer.keys)[0][:5] == [7, 20, 21, 23, 40]


def test_a_longer_text_takes_a_row() -> None:
    """The rows are made anew for it, and the other text stays."""
    slots, buffer = CacheSlots(2, CPU), SlotBuffer()
    buffer.write(states([1, 2], [7, 8]), states([1, 2], [7, 8]), 0, 2)
    slots.commit([[0, 1], [0, 1]], [buffer])
    other, text = SlotBuffer(), states(list(range(100, 200)))
    other.write(text, text, 0, 100)
    slots.insert_row(0, 100)
    buffer.insert_row(0, other, 100, 2)
    assert (slots.lengths, slots.committed.tolist()) == ([100, 2], [[100], [2]])
    assert rows(buffer.keys)[0][:100] == list(range(100, 200))
    assert rows(buffer.values)[1][:3] == [7, 8, 0]


def test_a_row_of_nothing_yet_is_taken() -> None:
    """By a text, where no other has been read; and by one of which nothing has been."""
    buffer, other = SlotBuffer(), SlotBuffer()
    buffer.insert_row(1, other, 0, 2)
    assert buffer.keys is None
    other.write(states([1, 2]), states([1, 2]), 0, 2)
    buffer.insert_row(1, other, 2, 2)
    assert [row[:3] for row in rows(buffer.keys)] == [[0, 0, 0], [1, 2, 0]]


def test_a_pending_token_sees_its_text_and_its_ancestors() -> None:
    slots = CacheSlots(2, CPU)
    slots.commit([[0, 1], []])
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    assert slots.attention_mask(tree, 5).int().tolist() == [
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0]],
    ]
    everything = slots.compute_positions(torch.tensor([[0, 1, 1]]), 5)
    assert everything.tolist() == [[0, 1, 2, 3, 3], [0, 1, 1, 3, 4]]
    # One more, below the second.
    deeper = torch.tensor([[[1, 1, 0, 1]]], dtype=torch.bool)
    assert slots.attention_mask(deeper, 6)[0, 0].int().tolist() == [1, 1, 1, 1, 0, 1]
    assert slots.compute_pending_slots(1, 4).tolist() == [[5], [3]]


def test_a_buffer_grows_and_keeps_what_it_holds() -> None:
    buffer = SlotBuffer()
    first = torch.arange(64).reshape(1, 1, 64, 1).float()
    buffer.write(first, first, torch.arange(64)[None], 64)
    more = states([99])
    keys, values = buffer.write(more, more, torch.tensor([[64]]), 65)
    assert keys.flatten().tolist() == values.flatten().tolist() == [*range(64), 99]
    assert buffer.keys.shape[2] == 128


def test_the_rows_that_a_graph_has_captured_stay_however_large_batches_get() -> None:
    slots = torch.zeros(1, 1, dtype=torch.int64)
    captured, _ = _build_slot_index(slots, slots)
    for num_texts in range(2, 100):
        _build_slot_index(slots.expand(num_texts, 1), slots)
    again, _ = _build_slot_index(slots, slots)
    assert again.data_ptr() == captured.data_ptr()


def test_a_buffer_of_fixed_size_never_grows() -> None:
    buffer = SlotBuffer(capacity=4)
    for width in (1, 4):
        keys, _ = buffer.write(states([5]), states([5]), torch.tensor([[0]]), width)
        assert rows(keys) == [[5, 0, 0, 0][:width]]
        assert buffer.keys.shape[2] == 4
    with pytest.raises(RuntimeError, match="5 slots needed in a cache of 4"):
        buffer.write(states([6]), states([6]), torch.tensor([[4]]), 5)


# A family of each kind of cache; `test_documents` checks the others.
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma4_text", "llama4_text", "lfm2", "qwen3_next", "mamba2"]
)
@torch.no_grad()
def test_a_text_read_in_pieces_equals_the_models_own_pass(family: str) -> None:
    """Prompt, a tree of which a second branch is kept, then one more token."""
    target = random_target(family)
    text = [5, 17, 40, 8, 77, 23]
    cache = target.new_cache(1)
    causal = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    target.run_pending(cache, torch.tensor([text[:3]]), causal, torch.arange(3)[None])
    cache.commit([[0, 1, 2]])
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    target.run_pending(
        cache, torch.tensor([[text[3], 60, text[4]]]), tree, torch.tensor([[0, 1, 1]])
    )
    cache.commit([[0, 2]])
    one = torch.ones(1, 1, 1, dtype=torch.bool)
    output = target.run_pending(cache, torch.tensor([text[5:]]), one, torch.zeros(1, 1).long())
    expected = target.model(torch.tensor([text])).logits[:, -1:]
    torch.testing.assert_close(
        target.compute_logits(output.hidden_states), expected, rtol=1e-3, atol=1e-3
    )


def test_held_slots_count_on_the_device_alone_and_leave_room_for_what_is_pending() -> None:
    slots = CacheSlots(2, torch.device("cpu"))
    slots.commit([[0, 1, 2], [0]])
    slots.fix_width(16, 4)
    place = slots.committed.data_ptr()
    assert (slots.count_used_slots(4), slots.count_used_slots(9)) == (16, 16)
    slots.advance(torch.tensor([2, 8]), [])
    assert slots.committed.tolist() == [[5], [9]]
    slots.advance(torch.tensor([1, 4]), [])
    assert slots.committed.tolist() == [[6], [12]]
    assert slots.committed.data_ptr() == place
    other = CacheSlots(1, torch.device("cpu"))
    other.copy_fixed_width(slots)
    other.advance(torch.tensor([14]), [])
    assert (other.count_used_slots(1), other.committed.tolist()) == (16, [[12]])


def test_held_slots_move_what_the_device_found() -> None:
    slots, buffer = CacheSlots(1, torch.device("cpu")), SlotBuffer()
    values = torch.arange(8.0).view(1, 1, 8, 1)
    buffer.write(values, values, 0, 8)
    slots.commit([[0, 1]])
    slots.fix_width(8, 4)
    slots.commit([], [buffer], KeptNodes(torch.tensor([[0, 3, 0]]), torch.tensor([2])))
    assert slots.committed.tolist() == [[4]]
    assert buffer.keys[0, 0, :4, 0].tolist() == [0, 1, 2, 5]


# --- In which order nodes are run, and what each goes on from.


def sight(*each: str) -> Tensor:
    """[B, n, P] bool, a token per word, a 1 for each that it sees."""
    return torch.tensor([[[int(seen) for seen in word] for word in row.split()] for row in each])


def order(mask: Tensor, depths: list[list[int]]) -> list[tuple[list[list[int]], list[list[int]]]]:
    found = group_nodes_by_depth(mask.bool(), torch.tensor(depths))
    return [(level.nodes.tolist(), level.parents.tolist()) for level in found]


def of_tree(tree: Tree) -> list[tuple[list[list[int]], list[list[int]]]]:
    layout = Draft.from_tree(tree, torch.zeros(1, tree.num_nodes - 1).long()).build_layout()
    return order(layout.mask.long(), layout.depths.tolist())


def test_a_chain_is_run_token_by_token() -> None:
    assert of_tree(Tree.make_chain(2)) == [([[0]], [[0]]), ([[1]], [[1]]), ([[2]], [[2]])]


def test_the_nodes_of_one_depth_are_run_together() -> None:
    assert of_tree(tree_of([0, 0, 2, 2, 3])) == [
        ([[0]], [[0]]),
        ([[1, 2]], [[1, 1]]),
        ([[3, 4]], [[3, 3]]),
        ([[5]], [[4]]),
    ]


def test_new_tokens_go_on_from_pending_ones() -> None:
    """New tokens of a forest below tokens 1 and 2, which were run before."""
    assert order(sight("11010 10101"), [[0, 1, 1, 2, 2]]) == [([[0, 1]], [[2, 3]])]
    # The last token lies above the one before it.
    assert order(sight("1110 1001"), [[0, 1, 2, 1]]) == [([[1]], [[1]]), ([[0]], [[2]])]


def test_a_text_that_has_fewer_nodes_of_a_depth_repeats_one() -> None:
    chain_and_fork = sight("100 110 111", "100 110 101")
    assert order(chain_and_fork, [[0, 1, 2], [0, 1, 1]]) == [
        ([[0], [0]], [[0], [0]]),
        ([[1, 1], [1, 2]], [[1, 1], [1, 1]]),
        ([[2], [0]], [[2], [0]]),
    ]


def test_one_shape_may_lie_at_other_depths_in_every_text() -> None:
    """Two tokens that see nothing pending but themselves, of which the second text's are deeper."""
    assert order(sight("10 01"), [[0, 0], [0, 1]]) == [
        ([[0, 1], [0, 0]], [[0, 0], [0, 0]]),
        ([[0], [1]], [[0], [0]]),
    ]


# --- What is kept of the states of recurrent layers.

MIXER, KEY, OTHER = 5, (CONV, 0), (RECURRENT, 0)
BOTH, FIRST = torch.tensor([0, 1]), torch.tensor([0, 0])


def state(*values: float) -> State:
    """[m, 1] and, of the other kind, [m, 2, 1]."""
    found = torch.tensor(values).unsqueeze(1)
    return {KEY: found, OTHER: -torch.stack([found, found], 1)}


def held(states: RecurrentStates, texts: list[int], tokens: list[int]) -> list[float]:
    found = states.select_states(MIXER, torch.tensor(texts), torch.tensor(tokens))
    assert torch.equal(found[OTHER], -torch.stack([found[KEY]] * 2, 1))
    return found[KEY].flatten().tolist()


def prefilled() -> RecurrentStates:
    """Texts of 3 and 2 tokens have left 10 and 20."""
    states = RecurrentStates(random_model("lfm2").config, 2)
    states.start_pass([3, 2], None)
    assert states.by_depth == []
    assert states.select_states(MIXER, BOTH, FIRST) == {}
    states.store_states(MIXER, BOTH, FIRST, state(10.0, 20.0))
    states.commit([[0, 1, 2], [0, 1]])
    return states


def drafted() -> RecurrentStates:
    """A root and two children have left 11, 12, 13 and 21, 22, 23."""
    states = prefilled()
    states.start_pass([], (sight("100 110 101").bool(), torch.tensor([[0, 1, 1]])))
    assert states.num_earlier == 0
    assert held(states, [1, 0], [0, 0]) == [20.0, 10.0]
    for node in range(3):
        states.store_states(MIXER, BOTH, FIRST + 1 + node, state(11.0 + node, 21.0 + node))
    return states


def test_every_node_has_a_state_until_some_are_kept() -> None:
    states = drafted()
    assert held(states, [0, 0, 0, 0, 1], [0, 1, 2, 3, 3]) == [10.0, 11.0, 12.0, 13.0, 23.0]
    states.commit([[0, 2], [0]])
    assert held(states, [0, 1], [0, 0]) == [13.0, 21.0]


def test_a_text_that_keeps_nothing_stays_where_it_was() -> None:
    states = drafted()
    states.commit([[], [0, 1]])
    assert held(states, [0, 1], [0, 0]) == [10.0, 22.0]


def test_more_may_be_drafted_below_what_is_pending() -> None:
    states = drafted()
    states.start_pass([], (sight("1011").bool(), torch.tensor([[0, 1, 1, 2]])))
    assert states.num_earlier == 3
    assert [level.parents.tolist() for level in states.by_depth] == [[[3]]]
    states.store_states(MIXER, BOTH, FIRST + 4, state(14.0, 24.0))
    assert held(states, [0, 0, 1], [3, 4, 4]) == [13.0, 14.0, 24.0]
    states.commit([[0, 2, 3], [0, 2]])
    assert held(states, [0, 1], [0, 0]) == [14.0, 23.0]


def test_a_text_that_ends_takes_its_states_with_it() -> None:
    states = drafted()
    states.commit([[0], [0, 1]])
    states.select_rows([1])
    assert held(states, [0], [0]) == [22.0]
    states.start_pass([], (sight("1").bool(), torch.tensor([[0]])))
    states.store_states(MIXER, torch.tensor([0]), torch.tensor([1]), state(30.0))
    states.commit([[0]])
    assert held(states, [0], [0]) == [30.0]


def test_bytes_of_one_token_of_one_text() -> None:
    states = drafted()
    assert states.bytes_per_token == 4 * (1 + 2)
    states.store_states(MIXER + 1, BOTH, FIRST, {KEY: torch.zeros(2, 7)})
    assert states.bytes_per_token == 4 * (1 + 2 + 7)


def test_a_module_finds_its_state_in_a_cache_of_transformers_own() -> None:
    states, first = drafted(), torch.tensor([0])
    states.store_states(MIXER + 1, first, first, {KEY: torch.tensor([[[1.0, 2.0, 3.0]]])})
    before = states.select_states(MIXER + 1, first, first)
    cache = states.make_layer_cache(0, before)
    assert cache.has_previous_state(0)
    cache.update_conv_state(torch.full((1, 1, 1), 9.0), 0)
    assert states.collect_layer_states(0)[KEY].tolist() == [[[2.0, 3.0, 9.0]]]
    # What others go on from is not what the module wrote to.
    assert states.select_states(MIXER + 1, first, first)[KEY].tolist() == [[[1.0, 2.0, 3.0]]]
    assert not states.make_layer_cache(0, {}).has_previous_state(0)
    assert states.collect_layer_states(0) == {}
