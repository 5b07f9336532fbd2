"""States of recurrent layers: in which order nodes are run, and what each goes on from."""

import torch
from torch import Tensor
from toys import random_model, tree_of

from heads.decoding.cache import CONV, RECURRENT, RecurrentStates, State, group_nodes_by_depth
from heads.decoding.drafting import Draft
from heads.decoding.tree import Tree


def rows(*each: str) -> Tensor:
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
    assert order(rows("11010 10101"), [[0, 1, 1, 2, 2]]) == [([[0, 1]], [[2, 3]])]
    # The last token lies above the one before it.
    assert order(rows("1110 1001"), [[0, 1, 2, 1]]) == [([[1]], [[1]]), ([[0]], [[2]])]


def test_a_text_that_has_fewer_nodes_of_a_depth_repeats_one() -> None:
    chain_and_fork = rows("100 110 111", "100 110 101")
    assert order(chain_and_fork, [[0, 1, 2], [0, 1, 1]]) == [
        ([[0], [0]], [[0], [0]]),
        ([[1, 1], [1, 2]], [[1, 1], [1, 1]]),
        ([[2], [0]], [[2], [0]]),
    ]


def test_one_shape_may_lie_at_other_depths_in_every_text() -> None:
    """Two tokens that see nothing pending but themselves, of which the second text's are deeper."""
    assert order(rows("10 01"), [[0, 0], [0, 1]]) == [
        ([[0, 1], [0, 0]], [[0, 0], [0, 0]]),
        ([[0], [1]], [[0], [0]]),
    ]


# --- What is kept of them.

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
    states.start_pass([], (rows("100 110 101").bool(), torch.tensor([[0, 1, 1]])))
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
    states.start_pass([], (rows("1011").bool(), torch.tensor([[0, 1, 1, 2]])))
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
    states.start_pass([], (rows("1").bool(), torch.tensor([[0]])))
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
