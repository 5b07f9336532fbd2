import pytest
import torch

from conf.errors import InputError
from heads.decoding.tree import Tree, make_static_tree


def test_tree_from_paths() -> None:
    tree = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
    assert tree.parents == (-1, 0, 0, 1, 1, 2)
    assert tree.ranks == (-1, 0, 1, 0, 1, 0)
    assert tree.depths == (0, 1, 1, 2, 2, 2)
    assert tree.children == ((1, 2), (3, 4), (5,), (), (), ())
    assert (tree.num_nodes, tree.depth, tree.width) == (6, 2, 2)


def test_mask_is_self_and_ancestors() -> None:
    tree = Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
    assert tree.build_mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_chain_is_a_tree_of_width_one() -> None:
    chain = Tree.make_chain(3)
    assert chain.parents == (-1, 0, 1, 2)
    assert torch.equal(chain.build_mask(), torch.ones(4, 4).tril().bool())
    assert Tree.make_chain(0).num_nodes == 1


@pytest.mark.parametrize("paths", [[[]], [[0], [0]], [[0, 0]], [[-1]]])
def test_bad_paths_are_named(paths) -> None:
    with pytest.raises(InputError, match="tree: path"):
        Tree.from_paths(paths)


def test_best_takes_the_likeliest_paths() -> None:
    # .6, then .6*.5=.30, then .2; .6*.3=.18 comes after.
    tree = Tree.from_accuracies([[0.6, 0.2], [0.5, 0.3]], 3)
    assert tree == Tree.from_paths([[0], [0, 0], [1]])
    assert Tree.from_accuracies([[0.6, 0.2], [0.5, 0.3]], 4) == Tree.from_paths(
        [[0], [1], [0, 0], [0, 1]]
    )


def test_default_tree_is_no_deeper_than_there_are_heads() -> None:
    for num_heads in (1, 3, 5):
        assert 1 <= make_static_tree(num_heads, 16).depth <= num_heads
