"""Differences between two trees: each is found, at its path, and nothing else is."""

import collections
import dataclasses
import functools
import os
import random
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import loopax
from loopax import Mismatch
from loopax._mismatch import Comparison, key_text, quoted
from loopax._split import split


class Pair(collections.namedtuple("Pair", ["first", "second"])):
    __slots__ = ()


class Layer(eqx.Module):
    weight: Any
    inner: Any = None
    rate: Any = eqx.field(static=True, default=0.1)
    name: Any = eqx.field(static=True, default="layer")


class OtherLayer(eqx.Module):
    weight: Any
    inner: Any = None
    rate: Any = eqx.field(static=True, default=0.1)
    name: Any = eqx.field(static=True, default="layer")


@functools.partial(jtu.register_dataclass, data_fields=["position"], meta_fields=["title"])
@dataclasses.dataclass
class Env:
    position: Any
    title: Any


class Node:
    """A node with metadata, whose children have no names."""

    def __init__(self, children, metadata=None):
        self.children = children
        self.metadata = metadata


jtu.register_pytree_node(
    Node,
    lambda node: (node.children, node.metadata),
    lambda metadata, children: Node(tuple(children), metadata),
)


def double(x):
    return 2 * x


def halve(x):
    return x / 2


def scaled_by(factor):
    return lambda x: factor * x


def differences(before, after, trace_numbers=False, **rules):
    arrays, static = split(before, trace_numbers)
    rules = Comparison(trace_numbers, **rules)
    arrays, mismatches = rules.compare(static, arrays, after, "carry")
    assert not (arrays and mismatches)
    return mismatches


def the_only(before, after, trace_numbers=False, **rules):
    (mismatch,) = differences(before, after, trace_numbers, **rules)
    return mismatch


F3 = jnp.zeros(3)
F3_TYPE = jax.typeof(F3)


# -- what the loops say ------------------------------------------------------------------


def scan(advance, carry, **options):
    return loopax.filter_scan(lambda c, _: (advance(c), None), carry, length=2, **options)


def while_loop(advance, carry, **options):
    return loopax.filter_while_loop(lambda _: jnp.asarray(False), advance, carry, **options)


def fori_loop(advance, carry, **options):
    return loopax.filter_fori_loop(0, 2, lambda _, c: advance(c), carry, **options)


def fori_loop_of_unknown_length(advance, carry, **options):
    # Under a trace the sum is not known, and so JAX takes a while loop for it.
    steps = jnp.asarray(1) + 1
    return loopax.filter_fori_loop(0, steps, lambda _, c: advance(c), carry, **options)


def checkpointed(loop):
    return functools.partial(loop, kind="checkpointed")


def bounded(loop):
    return functools.partial(loop, kind="bounded", max_steps=4)


LOOPS = {
    "scan": scan,
    "while": while_loop,
    "fori": fori_loop,
    "fori of unknown length": fori_loop_of_unknown_length,
    "checkpointed scan": checkpointed(scan),
    "checkpointed while": functools.partial(while_loop, max_steps=4),
    "checkpointed fori": checkpointed(fori_loop),
    "bounded scan": functools.partial(scan, kind="bounded"),
    "bounded while": bounded(while_loop),
    "bounded fori": functools.partial(fori_loop_of_unknown_length, kind="bounded", max_steps=4),
}


def found_by(loop, carry, advance, **options):
    """What the loop says of it, as paths and kinds. It is traced, and not run."""

    def run():
        loop(advance, carry, **options)

    try:
        jax.eval_shape(run)
    except loopax.MismatchError as error:
        found = [(m.path, m.kind) for m in error.mismatches]
        assert len(set(found)) == len(found)
        return set(found)
    return set()


# -- what is not a difference ------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (F3, jnp.ones(3)),
        (F3, np.ones(3, np.float32)),
        (jnp.zeros(()), 1.0),
        (jnp.zeros(()), np.float32(1)),
        (jnp.zeros((), int), 1),
        (np.zeros(3), jnp.zeros(3)),
        (jr.key(0), jr.key(1)),
        ("relu", "relu"),
        (float("nan"), float("nan")),
        (double, double),
        (scaled_by(2), scaled_by(2)),
        (None, None),
        ({"a": 1, "b": F3}, {"b": F3, "a": 1}),
        ((), ()),
        (Layer(F3, rate=float("nan")), Layer(F3, rate=float("nan"))),
        (Layer(F3, rate=scaled_by(2)), Layer(F3, rate=scaled_by(2))),
        (Node((F3,), np.array([1, 2])), Node((F3,), np.array([1, 2]))),
    ],
)
def test_trees_that_differ_in_array_values_only_have_no_mismatch(before, after):
    assert differences(before, after) == []


def test_the_arrays_of_the_new_tree_are_returned_in_order():
    arrays, static = split({"a": F3, "b": ("relu", F3)}, False)
    after = {"a": jnp.ones(3), "b": ("relu", jnp.ones(3))}
    arrays, mismatches = Comparison(False).compare(static, arrays, after, "carry")
    assert mismatches == []
    assert arrays[0] is after["a"]
    assert arrays[1] is after["b"][1]


@pytest.mark.parametrize("after", [1, 2.5, True, 1j])
def test_numbers_may_change_when_they_are_traced(after):
    before, after = {"a": 0}, {"a": after}
    assert differences(before, after, trace_numbers=True, weak_fits=True) == []


# -- the facts of each kind --------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0, 1),
        (1, True),
        (1, 1.0),
        (True, False),
        ("relu", "tanh"),
        ("relu", None),
        (None, "relu"),
        (double, halve),
        (1, "relu"),
    ],
)
def test_another_static_value_is_given_with_the_value_before(before, after):
    mismatch = the_only({"a": before}, {"a": after})
    assert mismatch == Mismatch('carry["a"]', "value", before, after)
    assert type(mismatch.before) is type(before)
    assert type(mismatch.after) is type(after)


@pytest.mark.parametrize("before", [0, True, "relu", None, double])
def test_an_array_in_place_of_something_static_is_given_as_its_type(before):
    mismatch = the_only([before], [F3])
    assert mismatch == Mismatch("carry[0]", "value", before, F3_TYPE)


@pytest.mark.parametrize("after", ["relu", None, double])
def test_something_static_in_place_of_an_array_is_given_as_it_is(after):
    mismatch = the_only([F3], [after])
    assert mismatch == Mismatch("carry[0]", "static", F3_TYPE, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (F3, jnp.zeros(4)),
        (F3, jnp.zeros((3, 1))),
        (F3, jnp.zeros(3, "int32")),
        (F3, jnp.zeros(3, "bfloat16")),
        (F3, np.zeros(3, bool)),
        (F3, jr.split(jr.key(0), 3)),
        (jr.key(0), jr.PRNGKey(0)),
        (jr.key(0), jr.key(0, impl="rbg")),
        (jnp.zeros((), bool), jnp.zeros((), "int32")),
    ],
)
def test_an_array_of_another_type_is_given_as_both_types(before, after):
    mismatch = the_only(Layer(before), Layer(after))
    assert mismatch == Mismatch("carry.weight", "array", jax.typeof(before), jax.typeof(after))


def test_a_number_in_place_of_an_array_is_an_array():
    mismatch = the_only([F3], [1.5])
    assert mismatch == Mismatch("carry[0]", "array", F3_TYPE, jax.typeof(1.5))


WEAK = jnp.asarray(0)


def test_a_weakly_typed_array_fits_other_dtypes_only_on_request():
    assert jax.typeof(WEAK).weak_type
    before, after = [WEAK], [jnp.zeros((), "float32")]
    assert differences(before, after, weak_fits=True) == []
    assert the_only(before, after) == Mismatch(
        "carry[0]", "array", jax.typeof(WEAK), jax.typeof(after[0])
    )


def test_an_array_that_is_not_weakly_typed_never_fits_another_dtype():
    before, after = [jnp.zeros((), "int32")], [jnp.zeros((), "float32")]
    assert the_only(before, after, weak_fits=True).kind == "array"


def test_a_number_fits_an_array_only_on_request():
    before, after = [0], [jnp.zeros((), "int32")]
    assert the_only(before, after).kind == "value"
    assert differences(before, after, numbers_join=True) == []


def test_a_number_that_joins_arrays_still_has_to_be_of_their_type():
    mismatch = the_only([0], [F3], numbers_join=True)
    assert mismatch == Mismatch("carry[0]", "array", jax.typeof(0), F3_TYPE)


def test_of_two_numbers_neither_joins_the_other():
    assert the_only([0], [1], numbers_join=True) == Mismatch("carry[0]", "value", 0, 1)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_weakly_typed_carry_may_change_its_dtype(loop):
    after = jnp.zeros((), "float32")
    assert found_by(LOOPS[loop], {"a": WEAK}, lambda c: {"a": after}) == set()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_weakly_typed_carry_may_not_change_its_shape(loop):
    found = found_by(LOOPS[loop], {"a": WEAK, "s": "relu"}, lambda c: {**c, "a": F3})
    assert found == {('carry["a"]', "array")}


@pytest.mark.parametrize("after", [F3, jr.key(0)], ids=["a vector", "a key"])
def test_weakly_typed_arrays_are_named_together_with_the_others(after):
    before, after = {"weak": WEAK, "n": 0}, {"weak": after, "n": 1}
    assert found_by(scan, before, lambda _: after) == {
        ('carry["weak"]', "array"),
        ('carry["n"]', "value"),
    }


def test_a_weakly_typed_array_may_not_become_a_key():
    before, after = {"a": WEAK, "s": "relu"}, {"a": jr.key(0), "s": "relu"}
    assert found_by(scan, before, lambda _: after) == {('carry["a"]', "array")}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_dtype_that_lax_does_not_promote_to_is_found_when_all_else_fits(loop):
    before = {"weak": jnp.asarray(0.5), "n": 0}
    after = {"weak": jnp.zeros((), "int8"), "n": 0}
    found = functools.partial(found_by, LOOPS[loop], before)
    assert found(lambda _: {**after, "n": 1}) == {('carry["n"]', "value")}
    assert found(lambda _: after) == {('carry["weak"]', "array")}


@pytest.mark.parametrize(
    ("before", "after"), [(0.1, 0.2), (True, 1), (1, 1.0), ("a", None), (double, halve)]
)
def test_another_static_field_is_named_as_a_field(before, after):
    mismatch = the_only([Layer(F3, rate=before)], [Layer(F3, rate=after)])
    assert mismatch == Mismatch("carry[0].rate", "field", before, after)
    assert type(mismatch.after) is type(after)


def test_several_static_fields_are_named_each():
    before, after = Layer(F3, rate=1, name="a"), Layer(F3, rate=2, name="b")
    assert differences(before, after) == [
        Mismatch("carry.rate", "field", 1, 2),
        Mismatch("carry.name", "field", "a", "b"),
    ]


def test_the_static_field_of_a_registered_dataclass_is_a_field_too():
    assert the_only(Env(F3, "a"), Env(F3, "b")) == Mismatch("carry.title", "field", "a", "b")


def test_the_metadata_of_any_other_node_are_given_whole():
    mismatch = the_only({"a": Node((F3,), ("m", 1))}, {"a": Node((F3,), ("m", True))})
    assert mismatch == Mismatch('carry["a"]', "metadata", ("m", 1), ("m", True))
    assert mismatch.after[1] is True


def structure(tree):
    return jtu.tree_structure(tree)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([F3], (F3,)),
        ((F3,), [F3]),
        (Pair(F3, 1), (F3, 1)),
        ({"a": F3}, [F3]),
        (Layer(F3), OtherLayer(F3)),
        (Layer(F3), {"weight": F3}),
    ],
)
def test_another_kind_of_container_is_given_as_both_structures(before, after):
    assert the_only([before], [after]) == Mismatch(
        "carry[0]", "type", structure(before), structure(after)
    )


@pytest.mark.parametrize(
    ("leaf", "fact"), [(F3, F3_TYPE), ("relu", "relu"), (1, 1), (None, None)]
)
def test_a_container_in_place_of_a_leaf_and_the_other_way_round(leaf, fact):
    tree = [F3, "relu"]
    assert the_only({"a": leaf}, {"a": tree}) == Mismatch(
        'carry["a"]', "type", fact, structure(tree)
    )
    assert the_only({"a": tree}, {"a": leaf}) == Mismatch(
        'carry["a"]', "type", structure(tree), fact
    )


@pytest.mark.parametrize("kind", [list, tuple])
def test_another_length_is_given_as_both_lengths(kind):
    before, after = kind([F3, 1]), kind([F3, 1, 2])
    assert the_only({"a": before}, {"a": after}) == Mismatch('carry["a"]', "length", 2, 3)
    assert the_only({"a": after}, {"a": before}) == Mismatch('carry["a"]', "length", 3, 2)


def test_a_new_key_and_a_missing_key_are_given_as_keys():
    less, more = {"a": F3}, {"a": F3, "b": {"c": F3}}
    assert the_only([less], [more]) == Mismatch("carry[0]", "new", None, jtu.DictKey("b"))
    assert the_only([more], [less]) == Mismatch("carry[0]", "missing", jtu.DictKey("b"), None)


def test_a_key_that_was_renamed_is_missing_and_new():
    assert differences({"a": F3}, {"b": F3}) == [
        Mismatch("carry", "missing", jtu.DictKey("a"), None),
        Mismatch("carry", "new", None, jtu.DictKey("b")),
    ]


def test_keys_are_told_apart_by_type():
    assert differences({1: F3}, {True: F3}) == [
        Mismatch("carry", "missing", jtu.DictKey(1), None),
        Mismatch("carry", "new", None, jtu.DictKey(True)),
    ]


def test_new_and_missing_keys_come_in_the_order_of_the_tree():
    names = [f"key{n}" for n in range(10)]
    tree = dict.fromkeys(names, 1)
    found = differences(tree, {}), differences({}, tree)
    assert [m.before.key for m in found[0]] == names
    assert [m.after.key for m in found[1]] == names


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            collections.OrderedDict(a=F3, b=F3),
            collections.OrderedDict(b=F3, a=F3),
        ),
        (
            collections.defaultdict(list, a=F3),
            collections.defaultdict(tuple, a=F3),
        ),
    ],
    ids=["the order of an OrderedDict", "the factory of a defaultdict"],
)
def test_the_metadata_of_other_kinds_of_dicts_count(before, after):
    assert the_only({"d": before}, {"d": after}).path == 'carry["d"]'


def test_below_another_key_or_length_the_rest_is_still_compared():
    before = {"a": 1, "gone": 1, "list": [1, 2], "z": F3}
    after = {"a": 2, "more": 1, "list": [1], "z": jnp.zeros(4)}
    assert {(m.path, m.kind) for m in differences(before, after)} == {
        ("carry", "missing"),
        ("carry", "new"),
        ('carry["a"]', "value"),
        ('carry["list"]', "length"),
        ('carry["z"]', "array"),
    }


def test_paths_read_as_one_writes_them():
    before = {"net": [Layer(F3, inner=Pair(1, Node((1, 2)))), {3: 0, 4: 0}], "x y": 0}
    after = {"net": [Layer(F3, inner=Pair(0, Node((1, 0)))), {3: 1, 4: 0}], "x y": 1}
    assert [m.path for m in differences(before, after)] == [
        'carry["net"][0].inner.first',
        'carry["net"][0].inner.second[<child 1>]',
        'carry["net"][1][3]',
        'carry["x y"]',
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [("a", '"a"'), ('say "a"', "'say \"a\"'"), ("it's", '"it\'s"'), ("\n", '"\\n"')],
)
def test_strings_are_quoted_as_python_takes_them(value, text):
    assert quoted(value) == text
    assert eval(text) == value
    assert key_text(jtu.DictKey(value)) == f"[{text}]"


def test_a_mismatch_is_a_value():
    first, second = Mismatch("carry", "value", 1, 2), Mismatch("carry", "value", 1, 2)
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.path = "init"


# -- state that cannot be flattened twice ------------------------------------------------


class Counter(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, state):
        return state.set(self.index, state.get(self.index) + 1)


def test_a_state_that_was_set_is_carried():
    counter, state = eqx.nn.make_with_state(Counter)()
    state, _ = loopax.filter_scan(lambda s, _: (counter(s), None), state, length=3)
    assert state.get(counter.index) == 3
    state = loopax.filter_fori_loop(0, 2, lambda _, s: counter(s), state)
    assert state.get(counter.index) == 5
    state = loopax.filter_while_loop(lambda s: s.get(counter.index) < 9, counter, state)
    assert state.get(counter.index) == 9


def test_what_else_changed_is_named_when_a_state_was_set():
    counter, state = eqx.nn.make_with_state(Counter)()
    carry = {"state": state, "phase": "early", "n": 0}

    def advance(carry):
        return {"state": counter(carry["state"]), "phase": "late", "n": carry["n"] + 1}

    for loop in LOOPS.values():
        assert found_by(loop, carry, advance) == {
            ('carry["phase"]', "value"),
            ('carry["n"]', "value"),
        }


def test_a_state_that_is_left_out_is_named():
    counter, state = eqx.nn.make_with_state(Counter)()

    def advance(carry):
        return {"n": counter(carry["state"]).get(counter.index)}

    for loop in LOOPS.values():
        assert found_by(loop, {"state": state, "n": F3}, advance) == {
            ("carry", "missing"),
            ('carry["n"]', "array"),
        }


# -- random trees, changed at random, through the loops ----------------------------------


ARRAYS = [
    jnp.zeros((), "float32"),
    jnp.zeros(3, "float32"),
    jnp.zeros((2, 3), "int32"),
    jnp.zeros(2, "bfloat16"),
    jnp.zeros((), "complex64"),
    jnp.zeros((), bool),
    jnp.zeros((0,), "uint8"),
    np.zeros(3, "float32"),
    np.zeros(2, "int32"),
    np.float32(0),
    jr.key(0),
    jnp.asarray(0),
    jnp.asarray(0.5),
]
NUMBERS = [0, 1, 2.5, True, False, float("nan"), 1j]
OTHERS = ["relu", "", double, jnp.tanh, None, bytes, (1).__add__, scaled_by(1)]

KEYS = ["a", "b", "c d", "0"]


MOST_LEAVES = 10


def tree_of(rng, leaves, room=MOST_LEAVES):
    """A tree of such leaves."""
    if room < 2 or rng.random() < 0.25:
        return rng.choice(leaves)
    kind = rng.randrange(7)
    if kind > 3:
        first, second = (tree_of(rng, leaves, room // 2) for _ in range(2))
        if kind == 4:
            return Pair(first, second)
        if kind == 5:
            return OtherLayer(first)
        return Layer(first, second, rng.choice([0, 0.1, "relu", double]))
    keys = [*KEYS] if kind == 2 else [0, 1, 2]
    rng.shuffle(keys)
    keys = keys[: rng.randrange(4)]
    children = [tree_of(rng, leaves, room // max(1, len(keys))) for _ in keys]
    if kind > 1:
        return dict(zip(keys, children, strict=True))
    return children if kind else tuple(children)


@functools.cache
def zeros(shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


@functools.cache
def keys(shape):
    return jr.split(jr.key(0), shape)


def is_array(leaf):
    return eqx.is_array(leaf) or isinstance(leaf, np.generic)


def leaf_changes(leaf):
    """Other leaves, and subtrees, that may stand there; each with the kind of mismatch."""
    yield [leaf], "type"
    yield {"a": leaf, "b": 1}, "type"
    yield Layer(leaf), "type"
    if not is_array(leaf):
        yield zeros(3), "value"
        yield from (
            (other, "value")
            for other in ["tanh", 7, -1.5, halve, None, scaled_by(2)]
            if other is not leaf
        )
        if isinstance(leaf, bool):
            yield not leaf, "value"
            yield int(leaf), "value"
        return
    yield from ((other, "static") for other in ["relu", double, None, Layer])
    yield zeros((*leaf.shape, 1)), "array"
    yield zeros((4, *leaf.shape)), "array"
    if not jax.typeof(leaf).weak_type:
        yield zeros(leaf.shape, "int8"), "array"
    yield keys((5, *leaf.shape)), "array"


def children_of(tree):
    """The children of a node by the text of their place, and how to replace some."""
    if isinstance(tree, Pair):
        fields = {".first": "first", ".second": "second"}
        parts = {text: getattr(tree, name) for text, name in fields.items()}
        return parts, lambda new: Pair(*new.values())
    if isinstance(tree, (list, tuple)):
        parts = {f"[{n}]": child for n, child in enumerate(tree)}
        return parts, lambda new: type(tree)(new.values())
    if isinstance(tree, dict):
        texts = {f'["{k}"]' if isinstance(k, str) else f"[{k}]": k for k in tree}
        parts = {text: tree[key] for text, key in texts.items()}
        return parts, lambda new: {texts[text]: child for text, child in new.items()}
    if isinstance(tree, (Layer, OtherLayer)):
        parts = {".weight": tree.weight, ".inner": tree.inner}
        return parts, lambda new: type(tree)(*new.values(), tree.rate, tree.name)
    return None


def own_changes(tree):
    """Changes to a node that leave its children as they are."""
    yield "relu", "", "type"
    yield None, "", "type"
    yield zeros(3), "", "type"
    if isinstance(tree, Pair):
        yield tuple(tree), "", "type"
        return
    if isinstance(tree, (list, tuple)):
        kind, other = (list, tuple) if isinstance(tree, list) else (tuple, list)
        yield other(tree), "", "type"
        yield kind([*tree, 1]), "", "length"
        yield kind([*tree, zeros(3)]), "", "length"
        if tree:
            yield kind(tree[:-1]), "", "length"
    if isinstance(tree, dict):
        new = "new" if not tree or isinstance(next(iter(tree)), str) else 9
        yield {**tree, new: 1}, "", "new"
        yield {new: zeros(3), **tree}, "", "new"
        for key in tree:
            yield {k: v for k, v in tree.items() if k != key}, "", "missing"
    if isinstance(tree, (Layer, OtherLayer)):
        other = OtherLayer if isinstance(tree, Layer) else Layer
        yield other(tree.weight, tree.inner, tree.rate, tree.name), "", "type"
        yield type(tree)(tree.weight, tree.inner, 0.9, tree.name), ".rate", "field"
        yield type(tree)(tree.weight, tree.inner, tree.rate, "n"), ".name", "field"


def changed(rng, tree, several, path="carry"):
    """`tree` with one change, or with several, and what is to be found there."""
    node = children_of(tree)
    if node is None:
        after, kind = rng.choice(list(leaf_changes(tree)))
        return after, {(path, kind)}
    children, rebuild = node
    if not children or rng.random() < 0.3:
        after, suffix, kind = rng.choice(list(own_changes(tree)))
        return after, {(path + suffix, kind)}
    count = rng.randrange(1, len(children) + 1) if several else 1
    expected = set()
    for place in rng.sample(list(children), count):
        children[place], found = changed(rng, children[place], several, path + place)
        expected |= found
    return rebuild(children), expected


def equal(tree):
    """The same tree, with NaN and other numbers made anew."""
    return jtu.tree_map(
        lambda leaf: float(repr(leaf)) if isinstance(leaf, float) else leaf, tree
    )


# Few for every run. The 10,000 for each take an hour: see CONTRIBUTING.md.
TREES = int(os.environ.get("LOOPAX_TREES", "50"))


def rngs(what):
    """Sources of chance, each the same in every run."""
    for seed in range(TREES):
        yield random.Random(f"{what} {seed}")


@pytest.mark.parametrize("loop", LOOPS)
def test_one_change_anywhere_is_found_and_nothing_else(loop):
    for rng in rngs(loop):
        carry = tree_of(rng, [*ARRAYS, *NUMBERS, *OTHERS])
        after, expected = changed(rng, carry, several=False)
        assert found_by(LOOPS[loop], carry, lambda _, after=after: after) == expected


@pytest.mark.parametrize("loop", ["scan", "fori", "checkpointed while"])
def test_all_changes_are_found_at_once(loop):
    for rng in rngs(loop):
        carry = tree_of(rng, [*ARRAYS, *NUMBERS, *OTHERS])
        after, expected = changed(rng, carry, several=True)
        assert found_by(LOOPS[loop], carry, lambda _, after=after: after) == expected


@pytest.mark.parametrize("loop", ["while", "checkpointed scan"])
def test_changes_to_arrays_of_the_carry_itself_are_found(loop):
    for rng in rngs(loop):

        def advance(carry, rng=rng):
            after, wanted = changed(rng, carry, several=True)
            expected.append(wanted)
            return after

        # A weakly typed carry is traced again, over what the first trace promoted it to.
        expected: list[Any] = []
        found = found_by(LOOPS[loop], tree_of(rng, ARRAYS), advance)
        assert found == expected[-1]


def test_changes_are_found_with_traced_numbers_too():
    for rng in rngs("traced"):
        carry = tree_of(rng, [*ARRAYS, *OTHERS])
        after, expected = changed(rng, carry, several=True)
        loop = LOOPS[rng.choice(list(LOOPS))]
        found = found_by(loop, carry, lambda _, after=after: after, trace_numbers=True)
        assert found == expected


def test_without_a_change_nothing_is_found():
    for rng in rngs("equal"):
        carry = tree_of(rng, [*ARRAYS, *NUMBERS, *OTHERS])
        loop = LOOPS[rng.choice(list(LOOPS))]
        assert found_by(loop, carry, equal, trace_numbers=rng.random() < 0.5) == set()


# -- random trees, changed at random in one branch ---------------------------------------


def cond(branches):
    return loopax.filter_cond(jnp.asarray(True), *branches)


def switch(branches):
    return loopax.filter_switch(jnp.asarray(0), branches)


BRANCHES = {"cond": (cond, 2), "switch": (switch, 3)}


def found_in_branches(choose, branches):
    """What is said of the branches, as paths and kinds."""

    try:
        jax.eval_shape(lambda: jax.tree.leaves(choose(branches))[:0])
    except loopax.MismatchError as error:
        return {(m.path, m.kind) for m in error.mismatches}
    return set()


@pytest.mark.parametrize("name", BRANCHES)
def test_one_change_in_one_branch_is_found_and_nothing_else(name):
    choose, count = BRANCHES[name]
    for rng in rngs(name):
        output = tree_of(rng, [*ARRAYS, *OTHERS])
        after, expected = changed(rng, output, several=False, path="output")
        branches = [lambda output=output: output] * count
        branches[rng.randrange(1, count)] = lambda after=after: after
        assert found_in_branches(choose, branches) == expected


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_that_agree_are_taken(name):
    choose, count = BRANCHES[name]
    for rng in rngs(name):
        output = tree_of(rng, [*ARRAYS, *NUMBERS, *OTHERS])
        branches = [lambda output=output: equal(output)] * count
        assert found_in_branches(choose, branches) == set()


# -- rarer trees -------------------------------------------------------------------------


def test_a_traced_number_is_given_as_its_type_wherever_it_stands():
    (found,) = differences({"a": "b"}, {"a": 1}, trace_numbers=True)
    assert str(found.after) == "~int32[]"
    (found,) = differences({"a": "b"}, {"a": 1})
    assert found.after == 1
    (found,) = differences({"a": {"b": 1}}, {"a": 1}, trace_numbers=True)
    assert str(found.after) == "~int32[]"


def test_of_a_loop_a_traced_number_is_given_as_its_type():
    with pytest.raises(loopax.MismatchError) as caught:
        scan(lambda _: 1, "a", trace_numbers=True)
    assert str(caught.value.mismatches[0].after) == "~int32[]"


def test_a_field_that_was_not_set_differs_from_none():
    def layer(**fields):
        made = object.__new__(Layer)
        for name, value in {"weight": F3, "inner": None, "rate": 1.0, **fields}.items():
            object.__setattr__(made, name, value)
        return made

    found = the_only(layer(), layer(name=None))
    assert (found.path, found.kind, found.after) == ("carry.name", "field", None)


def test_an_attribute_of_an_object_that_became_a_wrapper_is_missing():
    class Counter:
        def __init__(self):
            self.n = 1

    def wrap(carry):
        carry[0].__wrapped__ = double
        return carry

    with pytest.raises(loopax.MismatchError, match=r"carry\[0\]"):
        scan(wrap, (Counter(), F3))


class Keyed:
    """A node whose keys are of no kind that JAX has."""

    def __init__(self, child):
        self.child = child


jtu.register_pytree_with_keys(
    Keyed,
    lambda node: ((("@child", node.child),), None),
    lambda _, children: Keyed(*children),
)


def test_a_key_of_any_kind_is_written_as_it_prints():
    assert the_only(Keyed("a"), Keyed("b")).path == "carry@child"


def test_a_carry_may_become_what_a_promoted_one_is():
    def body(carry, _):
        number, _ = carry
        # In the first trace it is an integer, which the other is not.
        return (number + 1.5, number), None

    carry = (0, jnp.float32(7))
    ours, _ = loopax.filter_scan(body, carry, length=3, trace_numbers=True)
    want, _ = jax.lax.scan(body, carry, length=3)
    assert ours == want == (4.5, 3.0)
    with pytest.raises(loopax.MismatchError, match=r"carry\[1\]"):
        loopax.filter_scan(body, (0.0, jnp.int32(7)), length=3, trace_numbers=True)


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_loops_of_python_may_change_the_types_of_arrays(loop):
    def grow(x):
        return jnp.concatenate([x, x]).astype(int)

    with jax.disable_jit():
        if loop == "scan":
            result, _ = loopax.filter_scan(lambda c, _: (grow(c), None), jnp.ones(1), length=2)
        else:
            result = loopax.filter_while_loop(lambda x: x.shape[0] < 4, grow, jnp.ones(1))
    assert result.tolist() == [1, 1, 1, 1]
