"""A tree as its arrays and the rest, and back."""

import collections
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from loopax._split import HOLE, Arrays, Name, Static, closed_over, names, split
from loopax._static import same
from loopax._token import NoToken, Tokens


class Pair(collections.namedtuple("Pair", ["first", "second"])):
    __slots__ = ()


class Layer(eqx.Module):
    weight: Any
    activation: Any
    inner: Any
    rate: Any = eqx.field(static=True)


@jtu.register_pytree_node_class
class Keyless:
    """A node that does not say what its children are called."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


ARRAYS = [
    jnp.ones(2),
    jnp.asarray(1),
    np.zeros((0, 3)),
    np.float32(1),
    jr.key(0),
    jnp.asarray(True),
]
OTHERS = ["relu", 1, True, 0.5, 1j, None, jnp.tanh, np.array("a"), float("nan"), Layer]
NUMBERS = [leaf for leaf in OTHERS if isinstance(leaf, (int, float, complex))]

leaves = st.sampled_from(ARRAYS + OTHERS)


def nodes(inner):
    several = st.lists(inner, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        several.map(lambda children: Keyless(*children)),
        st.dictionaries(st.sampled_from(["a", "b", "c d"]), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Layer, inner, leaves, inner, st.sampled_from([1, "relu", None])),
    )


trees = st.recursive(leaves, nodes, max_leaves=12)


def alike(before, after):
    """Whether two trees hold the very same leaves in the same structure."""
    leaves, treedef = jtu.tree_flatten(before)
    others, other_treedef = jtu.tree_flatten(after)
    return treedef == other_treedef and all(map(lambda a, b: a is b, leaves, others))


# -- split and merge ---------------------------------------------------------------------


@given(trees, st.booleans())
@settings(deadline=None, max_examples=300)
def test_merging_what_was_split_gives_the_tree_again(tree, trace_numbers):
    arrays, static = split(tree, trace_numbers)
    assert alike(static.merge(arrays), tree)


@given(trees, st.booleans())
@settings(deadline=None, max_examples=300)
def test_the_arrays_are_those_of_the_tree_in_order(tree, trace_numbers):
    dynamic = [*ARRAYS, *NUMBERS] if trace_numbers else ARRAYS
    wanted = [leaf for leaf in jtu.tree_leaves(tree) if any(leaf is array for array in dynamic)]
    arrays, static = split(tree, trace_numbers)
    assert [id(array) for array in arrays] == [id(leaf) for leaf in wanted]
    assert static.num_arrays == len(wanted)


def test_other_arrays_can_be_merged_in():
    static = split({"a": (jnp.ones(2), "relu"), "b": jnp.zeros(3)}, False).static
    assert static.merge(["x", "y"]) == {"a": ("x", "relu"), "b": "y"}


def test_what_is_merged_may_come_from_an_iterator_shared_with_others():
    static = split([jnp.ones(2), "relu"], False).static
    rest = iter(["x", "y"])
    assert [static.merge(rest), static.merge(rest)] == [["x", "relu"], ["y", "relu"]]


def test_numbers_are_arrays_on_request():
    tree = {"a": 1, "b": True, "c": "relu"}
    assert split(tree, False).arrays == []
    assert split(tree, True).arrays == [1, True]


def test_numbers_at_given_places_are_arrays():
    tree = {"a": 1, "b": jnp.ones(2), "c": [2, "relu", 3]}
    arrays, static = split(tree, False, as_arrays=frozenset({2, 3}))
    assert arrays == [tree["b"], 2]
    assert static.merge(["x", "y"]) == {"a": 1, "b": "x", "c": ["y", "relu", 3]}


def test_none_stays_where_it_is():
    arrays, static = split((None, jnp.ones(2)), False)
    assert len(arrays) == 1
    assert static.merge(["x"]) == (None, "x")


def test_nothing_is_taken_out_of_what_is_closed_over():
    tree = {"a": jnp.ones(2), "b": "relu", "c": [np.ones(3), None]}
    arrays, static = closed_over(tree)
    assert arrays == []
    assert static.num_arrays == 0
    assert alike(static.merge([]), tree)


def test_a_tree_is_flattened_once():
    flattened = []

    @jtu.register_pytree_node_class
    class Counted(Keyless):
        def tree_flatten(self):
            flattened.append(self)
            return super().tree_flatten()

    split(Counted(jnp.ones(2), "relu"), False)
    assert len(flattened) == 1


# -- the static part ---------------------------------------------------------------------


@given(trees)
@settings(deadline=None, max_examples=300)
def test_static_parts_of_one_tree_are_equal_and_hash_alike(tree):
    first, second = split(tree, False).static, split(tree, False).static
    assert first == second
    assert hash(first) == hash(second)


@given(trees, trees)
@settings(deadline=None, max_examples=300)
def test_equal_static_parts_hash_alike(tree, another):
    first, second = split(tree, False).static, split(another, False).static
    assert (first == second) == (second == first)
    assert first != second or hash(first) == hash(second)


@given(trees, trees)
@settings(deadline=None, max_examples=300)
def test_static_parts_with_equal_tokens_are_equal(tree, another):
    first, second = split(tree, False).static, split(another, False).static
    try:
        equal = first.token(Tokens()) == second.token(Tokens())
    except NoToken:
        return
    assert not equal or first == second


def test_arrays_do_not_count_in_the_static_part():
    before = split({"a": jnp.ones(2), "b": "relu"}, False).static
    after = split({"a": jnp.zeros((3, 4), int), "b": "relu"}, False).static
    assert before == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"b": 1}),
        ([1], (1,)),
        ([1, 2], [1]),
        (jnp.ones(2), "relu"),
        (jnp.ones(2), None),
        (None, "relu"),
        (Layer(1, 2, 3, rate=1), Layer(1, 2, 3, rate=True)),
        (Pair(1, 2), (1, 2)),
    ],
)
def test_static_parts_differ_with_the_tree(before, after):
    assert split(before, False).static != split(after, False).static


def test_a_static_part_equals_nothing_else():
    static = split("relu", False).static
    assert static != "relu"


def test_hashing_takes_leaves_that_have_no_hash():
    first, second = (split({"a": {1, 2}, "b": jnp.ones(2)}, False).static for _ in "12")
    assert first == second
    assert hash(first) == hash(second)


def test_a_static_part_prints_as_the_tree_with_stars_for_arrays():
    static = split({"a": jnp.ones(2), "b": ["relu", jnp.ones(2)]}, False).static
    assert repr(static) == "{'a': *, 'b': ['relu', *]}"


def test_the_token_of_a_static_part_does_not_see_values_of_arrays():
    first, second = (
        split({"a": jnp.full(2, n), "b": "relu"}, False).static.token(Tokens())
        for n in range(2)
    )
    assert first == second


def test_the_token_of_a_static_part_tells_an_array_from_none():
    first, second = (
        Static(jtu.tree_structure("leaf"), [leaf]).token(Tokens()) for leaf in (HOLE, "relu")
    )
    assert first != second


# -- names and keys ----------------------------------------------------------------------


@given(trees)
@settings(deadline=None, max_examples=300)
def test_names_are_what_keystr_makes_of_the_paths_of_the_arrays(tree):
    wanted = [
        re.sub("<flat index (.)>", r"\1", jtu.keystr(path))
        for path, leaf in jtu.tree_leaves_with_path(tree)
        if any(leaf is array for array in ARRAYS)
    ]
    assert list(names(split(tree, False).static)) == wanted


def test_names_read_as_one_writes_them():
    tree = {
        "net": Layer(jnp.ones(2), "relu", [jnp.ones(3), {"k": jnp.ones(4)}], rate=1),
        "pair": Pair(None, jnp.ones(2)),
        "box": Keyless(jnp.ones(2)),
    }
    assert names(split(tree, False).static) == (
        "['box'][0]",
        "['net'].weight",
        "['net'].inner[0]",
        "['net'].inner[1]['k']",
        "['pair'].second",
    )


def test_the_name_of_a_bare_array_is_empty():
    assert names(split(jnp.ones(2), False).static) == ("",)


def wrapped(tree, label=None):
    arrays, static = split(tree, False)
    return Arrays(arrays, names(static), label)


@given(trees)
@settings(deadline=None, max_examples=200)
def test_paths_into_the_node_print_as_paths_into_the_tree(tree):
    node = wrapped(tree)
    printed = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path({"in": node})]
    assert printed == ["['in']" + name for name in node.names]


def test_the_node_goes_through_jax_with_its_label_and_names():
    node = wrapped({"a": jnp.ones(2), "b": "relu"}, label=("a", "label"))
    out = jax.jit(lambda node: jtu.tree_map(lambda x: x + 1, node))(node)
    assert isinstance(out, Arrays)
    assert out.label == ("a", "label")
    assert out.names == ("['a']",)
    assert out.arrays[0].tolist() == [2, 2]


def test_nodes_with_other_labels_are_other_structures():
    tree = {"a": jnp.ones(2)}
    first, second, third = (jtu.tree_structure(wrapped(tree, n)) for n in (1, 2, 1))
    assert first != second
    assert first == third


def test_a_name_in_a_message_of_jax_is_the_path_of_the_array():
    before = wrapped({"net": Layer(jnp.ones(2), "relu", None, rate=1)})
    with pytest.raises(TypeError, match=r"c\['net'\]\.weight"):
        jax.lax.scan(lambda c, _: (Arrays([jnp.ones(3)], c.names), None), before, length=1)


def test_names_are_strings():
    (name,) = names(split([jnp.ones(2)], False).static)
    assert isinstance(name, Name)
    assert str(name) == name == "[0]"


def test_nan_in_a_static_part_equals_itself():
    first, second = (split({"a": float("nan")}, False).static for _ in "12")
    assert first == second
    assert same(first.leaves, second.leaves)
