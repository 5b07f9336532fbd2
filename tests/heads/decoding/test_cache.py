import pytest
import torch
from toys import FAMILIES, random_target

from heads.decoding.cache import CacheSlots, KeptNodes, SlotBuffer, _build_slot_index

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


@pytest.mark.parametrize("family", sorted(FAMILIES))
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
