"""JAX's functions on trees, as the rest of the package calls them."""

import jax.tree_util as jtu
import numpy as np

from loopax import _tree


TREE = {"a": (1, [2, 3]), "b": None}


def is_list(node):
    return isinstance(node, list)


def test_what_is_said_to_be_a_leaf_is_one_in_each():
    keys = (jtu.DictKey("a"), jtu.SequenceKey(1))
    assert _tree.flatten(TREE, is_leaf=is_list)[0] == [1, [2, 3]]
    assert _tree.leaves(TREE, is_leaf=is_list) == [1, [2, 3]]
    assert _tree.leaves_with_path(TREE, is_leaf=is_list)[1] == (keys, [2, 3])
    assert _tree.map_leaves(lambda x: 2 * x, TREE, is_leaf=is_list) == {
        "a": (2, [2, 3, 2, 3]),
        "b": None,
    }


def test_nodes_are_no_leaves():
    assert [_tree.is_leaf(each) for each in (1, "a", np.ones(2), {}, None, (1,))] == [
        *(True,) * 3,
        *(False,) * 3,
    ]


def test_a_child_without_a_key_is_named_by_its_number():
    key = jtu.FlattenedIndexKey(3)
    assert _tree.path_text([jtu.GetAttrKey("net"), key]) == ".net[3]"
    assert _tree.path_text([jtu.DictKey("<"), key]) == "['<'][3]"
