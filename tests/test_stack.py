"""`filter_stack` and `filter_unstack`: each undoes the other, and says what does not fit."""

import collections
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from versions import enable_x64

import loopax
from loopax import filter_stack, filter_unstack


class Pair(collections.namedtuple("Pair", ["first", "second"])):
    __slots__ = ()


class Layer(eqx.Module):
    weight: Any
    bias: Any = None
    activation: Any = jax.nn.relu
    name: Any = eqx.field(static=True, default="layer")

    def __call__(self, x):
        return self.activation(self.weight @ x + self.bias)


class Counter(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, state):
        return state.set(self.index, state.get(self.index) + 1)


def double(x):
    return 2 * x


def scaled_by(factor):
    return lambda x: factor * x


def raw(array):
    """The bits of an array, which for NaN are equal too."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jr.key_data(array) if is_key else array).tobytes()


def assert_identical(one, two):
    """The same tree to the last bit; what is static is the very same object."""
    leaves_one, treedef_one = jtu.tree_flatten(one)
    leaves_two, treedef_two = jtu.tree_flatten(two)
    assert treedef_one == treedef_two
    for a, b in zip(leaves_one, leaves_two, strict=True):
        if eqx.is_array(a):
            assert eqx.is_array(b)
            assert jax.typeof(a) == jax.typeof(b)
            assert jax.typeof(a).weak_type == jax.typeof(b).weak_type
            assert raw(a) == raw(b)
        else:
            assert a is b


def assert_close(ours, theirs):
    """The same, up to the order in which a compiled program adds."""
    ours, theirs = (eqx.filter(tree, eqx.is_array) for tree in (ours, theirs))
    assert jtu.tree_structure(ours) == jtu.tree_structure(theirs)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, ours, theirs)


def round_trip(*trees, **options):
    stacked = filter_stack(trees, **options)
    again = filter_unstack(stacked, **options)
    assert len(again) == len(trees)
    for tree, other in zip(trees, again, strict=True):
        assert_identical(tree, other)
    assert_identical(filter_stack(again, **options), stacked)
    return stacked


# -- there and back ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda n: jnp.arange(3.0) + n,
        lambda n: jnp.full((2, 3), n, "int8"),
        lambda n: jnp.full((2,), n, "bfloat16"),
        lambda n: jnp.full((), n * 1j, "complex64"),
        lambda n: jnp.asarray([n == 0, True]),
        lambda n: jnp.asarray(n == 0),
        lambda n: jnp.zeros((0, 3), "uint8"),
        lambda n: jnp.asarray([jnp.nan, -0.0, n]),
        lambda n: jnp.asarray(n),
        lambda n: jnp.asarray(n / 2),
        lambda n: jr.key(n),
        lambda n: jr.key(n, impl="rbg"),
        lambda n: jr.split(jr.key(n), (2, 2)),
        lambda n: jr.PRNGKey(n),
    ],
)
def test_arrays_come_back_to_the_last_bit(make):
    stacked = round_trip(*map(make, range(3)))
    assert stacked.shape == (3, *make(0).shape)
    assert stacked.dtype == make(0).dtype


@pytest.mark.parametrize("weak", [jnp.asarray(1), jnp.asarray(0.5)])
def test_weakly_typed_arrays_stay_so(weak):
    assert round_trip(weak, weak).weak_type


def test_weakly_and_strongly_typed_arrays_make_a_strongly_typed_one():
    trees = [jnp.asarray(1), jnp.asarray(2, "int32")]
    for some in (trees, trees[::-1]):
        stacked = filter_stack(some)
        assert not stacked.weak_type
        assert [int(row) for row in filter_unstack(stacked)] == [int(tree) for tree in some]


@pytest.mark.parametrize(
    "static",
    ["relu", 1, True, False, 0.5, 1j, None, double, jnp.tanh, Layer, float("nan"), b"a"],
)
def test_what_is_static_comes_back_as_it_is(static):
    stacked = round_trip({"a": jnp.zeros(2), "s": static}, {"a": jnp.ones(2), "s": static})
    assert stacked["s"] is static


def test_what_is_static_is_taken_from_the_first_tree():
    first, second = scaled_by(2), scaled_by(2)
    trees = [{"f": first, "x": jnp.zeros(())}, {"f": second, "x": jnp.ones(())}]
    assert filter_stack(trees)["f"] is first
    assert filter_unstack(filter_stack(trees))[1]["f"] is first


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda n: np.full(2, n, "float32"), "float32"),
        (lambda n: np.full((2, 1), n, "int8"), "int8"),
        (lambda n: np.asarray([n == 0, True]), "bool"),
        (lambda n: np.bool_(n == 0), "bool"),
        (lambda n: np.float32(n), "float32"),
        (lambda n: np.float64(n), "float32"),
        (lambda n: np.full(2, n, "int64"), "int32"),
    ],
)
def test_numpy_arrays_come_back_as_those_that_jax_makes_of_them(make, dtype):
    trees = [{"x": make(n), "name": "a"} for n in range(3)]
    stacked = filter_stack(trees)
    assert stacked["x"].dtype == dtype
    for tree, row in zip(trees, filter_unstack(stacked), strict=True):
        assert isinstance(row["x"], jax.Array)
        np.testing.assert_array_equal(row["x"], tree["x"], strict=False)
        assert row["name"] == "a"


def test_numpy_arrays_keep_64_bits_where_jax_does():
    with enable_x64():
        stacked = filter_stack([np.arange(2.0), np.arange(2.0) + 1e-12])
        assert stacked.dtype == "float64"
        assert filter_unstack(stacked)[1][0] == 1e-12


def test_numpy_and_jax_arrays_stack_with_each_other():
    stacked = filter_stack([np.zeros(2, "float32"), jnp.ones(2)])
    assert stacked.tolist() == [[0, 0], [1, 1]]


def test_a_number_where_the_first_tree_has_an_array_is_one():
    stacked = filter_stack([{"n": jnp.asarray(1.0)}, {"n": 2.0}])
    assert stacked["n"].tolist() == [1, 2]


def test_numbers_are_arrays_on_request():
    stacked = filter_stack([{"n": 1, "b": True}, {"n": 2, "b": False}], trace_numbers=True)
    assert stacked["n"].tolist() == [1, 2]
    assert stacked["b"].tolist() == [True, False]
    rows = filter_unstack(stacked, trace_numbers=True)
    assert [(int(row["n"]), bool(row["b"])) for row in rows] == [(1, True), (2, False)]


def test_modules_come_back():
    layers = [eqx.nn.MLP(2, 3, 4, 1, key=key) for key in jr.split(jr.key(0), 3)]
    stacked = round_trip(*layers)
    assert type(stacked) is eqx.nn.MLP
    assert stacked.layers[0].weight.shape == (3, 4, 2)
    assert stacked.activation is layers[0].activation


def test_stacked_modules_are_those_that_a_mapped_constructor_makes():
    keys = jr.split(jr.key(0), 3)
    make = lambda key: eqx.nn.MLP(2, 3, 4, 1, key=key)
    stacked, mapped = filter_stack([make(key) for key in keys]), eqx.filter_vmap(make)(keys)
    assert jtu.tree_structure(stacked) == jtu.tree_structure(mapped)
    assert_close(stacked, mapped)


def test_state_comes_back():
    counter, state = eqx.nn.make_with_state(Counter)()
    arrays, rest = eqx.partition(state, eqx.is_array)
    states = [
        eqx.combine(jax.tree.map(lambda leaf, n=n: leaf + n, arrays), rest) for n in range(3)
    ]
    stacked = round_trip(*states)
    assert stacked.get(counter.index).tolist() == [0, 1, 2]
    assert [s.get(counter.index) for s in filter_unstack(stacked)] == [0, 1, 2]


def test_a_stacked_state_is_scanned_over():
    counter, state = eqx.nn.make_with_state(Counter)()
    arrays, rest = eqx.partition(state, eqx.is_array)
    states = [
        eqx.combine(jax.tree.map(lambda leaf, n=n: leaf + n, arrays), rest) for n in range(3)
    ]
    after = loopax.filter_map(counter, filter_stack(states))
    assert after.get(counter.index).tolist() == [1, 2, 3]


def test_one_tree():
    assert round_trip({"x": jnp.ones(2), "name": "a"})["x"].shape == (1, 2)


@pytest.mark.parametrize("kind", [list, tuple, collections.deque])
def test_the_trees_may_come_in_any_sequence(kind):
    stacked = filter_stack(kind([jnp.zeros(2), jnp.ones(2)]))
    assert stacked.tolist() == [[0, 0], [1, 1]]


def test_trees_without_arrays_stack_into_the_first():
    assert filter_stack([{"name": "a", "n": 1}] * 3) == {"name": "a", "n": 1}


def test_arrays_without_rows_come_apart_into_nothing():
    assert filter_unstack({"x": jnp.zeros((0, 3)), "name": "a"}) == []


def test_the_order_of_keys_does_not_matter():
    stacked = filter_stack([{"a": 1, "b": jnp.ones(2)}, {"b": jnp.zeros(2), "a": 1}])
    assert stacked["b"].tolist() == [[1, 1], [0, 0]]


def test_the_trees_are_left_as_they_were():
    trees = [{"x": np.zeros(2), "l": [jnp.ones(2)]}, {"x": np.ones(2), "l": [jnp.ones(2)]}]
    kept = [jtu.tree_leaves(tree) for tree in trees]
    filter_stack(trees)
    for tree, leaves in zip(trees, kept, strict=True):
        assert all(a is b for a, b in zip(jtu.tree_leaves(tree), leaves, strict=True))
    assert [type(tree["l"]) for tree in trees] == [list, list]


# -- random trees ------------------------------------------------------------------------

DTYPES = ["float32", "int32", "bool", "bfloat16", "complex64", "uint8", "weak", "key"]
STATICS = ["relu", "", 1, True, 0.5, None, double, jnp.tanh, Layer, float("nan"), b"a"]


class Varied:
    """Stands where each of the trees has an array of its own."""

    def __init__(self, dtype, shape, seed):
        self.dtype = dtype
        self.shape = shape
        self.seed = seed

    def array(self, row):
        random = np.random.default_rng((self.seed, row))
        if self.dtype == "weak":
            return jnp.asarray(float(random.integers(9)))
        if self.dtype == "key":
            return jr.split(jr.key(int(random.integers(9))), self.shape)
        return jnp.asarray(random.integers(0, 9, self.shape)).astype(self.dtype)


arrays = st.builds(
    Varied,
    st.sampled_from(DTYPES),
    st.lists(st.sampled_from([0, 1, 2, 3]), max_size=2).map(tuple),
    st.integers(0, 99),
)


def nodes(inner):
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Layer, inner, inner, st.sampled_from([double, jnp.tanh])),
        st.builds(Layer, inner, name=st.sampled_from(["a", 1, None, double])),
    )


forms = st.recursive(st.one_of(arrays, st.sampled_from(STATICS)), nodes, max_leaves=8)


def grown(form, row):
    def one(leaf):
        return leaf.array(row) if isinstance(leaf, Varied) else leaf

    return jax.tree.map(one, form)


@given(forms, st.integers(1, 4))
@settings(deadline=None, max_examples=150)
def test_any_trees_come_back_to_the_last_bit(form, count):
    # Without an array there would be no telling how many trees there were.
    trees = [{"row": jnp.asarray(row), "tree": grown(form, row)} for row in range(count)]
    round_trip(*trees)


@given(forms, st.integers(2, 4), st.data())
@settings(deadline=None, max_examples=100)
def test_a_change_in_any_tree_is_found_at_its_index_and_path(form, count, data):
    trees = [{"tree": grown(form, row), "s": "a", "x": jnp.ones(2)} for row in range(count)]
    index = data.draw(st.integers(1, count - 1))
    key, other, kind = data.draw(
        st.sampled_from(
            [
                ("s", "b", "value"),
                ("s", None, "value"),
                ("s", ["a"], "type"),
                ("x", jnp.ones(3), "array"),
                ("x", jnp.ones(2, "int32"), "array"),
                ("x", "b", "static"),
                ("x", (), "type"),
            ]
        )
    )
    trees[index] = {**trees[index], key: other}
    with pytest.raises(loopax.MismatchError) as caught:
        filter_stack(trees)
    (mismatch,) = caught.value.mismatches
    assert (mismatch.path, mismatch.kind) == (f'trees[{index}]["{key}"]', kind)


# -- what does not fit -------------------------------------------------------------------


def mismatches(*trees, **options):
    with pytest.raises(loopax.MismatchError) as caught:
        filter_stack(trees, **options)
    return [(m.path, m.kind, m.before, m.after) for m in caught.value.mismatches]


X2, X3 = jnp.zeros(2), jnp.zeros(3)


def test_each_difference_is_found_with_the_index_of_its_tree():
    first = Layer(X2, X3)
    trees = [first, Layer(X3, X3), first, Layer(X2, None, name="b"), Layer(X2, X3, double)]
    assert mismatches(*trees) == [
        ("trees[1].weight", "array", jax.typeof(X2), jax.typeof(X3)),
        ("trees[3].name", "field", "layer", "b"),
        ("trees[3].bias", "static", jax.typeof(X3), None),
        ("trees[4].activation", "value", first.activation, double),
    ]


@pytest.mark.parametrize(
    ("before", "after", "path", "kind"),
    [
        (1, 2, "", "value"),
        (1, True, "", "value"),
        (1, 1.0, "", "value"),
        (1.0, jnp.asarray(1.0), "", "value"),
        (X2, X3, "", "array"),
        (X2, np.zeros(3), "", "array"),
        (X2, X2.astype("int32"), "", "array"),
        (jnp.asarray(0), jnp.asarray(0.5), "", "array"),
        (jr.key(0), jr.key(0, impl="rbg"), "", "array"),
        (jr.key(0), jr.PRNGKey(0), "", "array"),
        (X2, 1.0, "", "array"),
        (X2, None, "", "static"),
        ([X2], [X2, X2], "", "length"),
        ([X2], (X2,), "", "type"),
        ({"a": X2}, {"a": X2, "b": X2}, "", "new"),
        ({"a": X2, "b": X2}, {"a": X2}, "", "missing"),
        ({"a": [X2, {"b": "x"}]}, {"a": [X2, {"b": "y"}]}, '["a"][1]["b"]', "value"),
        (Pair(X2, "x"), Pair(X2, "y"), ".second", "value"),
    ],
)
def test_what_differs_is_found_at_its_path(before, after, path, kind):
    found = mismatches({"t": before}, {"t": before}, {"t": after})
    assert [entry[:2] for entry in found] == [(f'trees[2]["t"]{path}', kind)]


def test_traced_numbers_have_to_be_of_one_type():
    assert mismatches({"n": 1}, {"n": 0.5}, trace_numbers=True) == [
        ('trees[1]["n"]', "array", jax.typeof(1), jax.typeof(0.5))
    ]


def test_states_of_other_modules_do_not_stack():
    _, one = eqx.nn.make_with_state(Counter)()
    _, two = eqx.nn.make_with_state(lambda: (Counter(), Counter()))()
    ((path, *_),) = mismatches(one, two)
    assert path.startswith("trees[1]")


def test_what_differs_is_found_under_jit():
    @jax.jit
    def run(x):
        return filter_stack([{"x": x, "n": 1}, {"x": x[1:], "n": 2}])["x"]

    with pytest.raises(loopax.MismatchError) as caught:
        run(X3)
    assert [m.path for m in caught.value.mismatches] == ['trees[1]["n"]', 'trees[1]["x"]']


# -- transformations ---------------------------------------------------------------------


def affine(w, b):
    return Layer(w, b, jnp.tanh)


WEIGHTS = jr.normal(jr.key(0), (3, 4, 4)) / 2
BIASES = jr.normal(jr.key(1), (3, 4))
LAYERS = [affine(w, b) for w, b in zip(WEIGHTS, BIASES, strict=True)]
X = jr.normal(jr.key(2), (4,))


def there_and_back(xs):
    """The sum over trees that were stacked and taken apart, weighted by their index."""
    rows = filter_unstack(filter_stack([{"x": jnp.sin(x), "name": "a"} for x in xs]))
    return sum(n * jnp.sum(row["x"]) for n, row in enumerate(rows))


def plain(xs):
    return sum(n * jnp.sum(jnp.sin(x)) for n, x in enumerate(xs))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        jax.grad,
        lambda f: jax.jit(jax.grad(f)),
        jax.vmap,
        lambda f: jax.vmap(jax.grad(f)),
        jax.jacfwd,
        lambda f: jax.jit(jax.vmap(f)),
        jax.checkpoint,
    ],
    ids=["none", "jit", "grad", "jit grad", "vmap", "vmap grad", "jvp", "jit vmap", "remat"],
)
def test_transformations_go_through(transform):
    xs = [jr.normal(key, (5, 2)) for key in jr.split(jr.key(3), 3)]
    ours, theirs = transform(there_and_back)(xs), transform(plain)(xs)
    assert_close(ours, theirs)


def test_stacking_under_vmap_stacks_along_the_first_axis_of_each_lane():
    out = jax.vmap(lambda x: filter_stack([x, 2 * x, 3 * x]))(jnp.ones((5, 2)))
    assert out.shape == (5, 3, 2)
    out = jax.vmap(lambda x: filter_unstack(x)[1])(jnp.arange(30.0).reshape(5, 3, 2))
    assert out.shape == (5, 2)
    assert out[0].tolist() == [2, 3]


def test_modules_go_through_jit_stacked():
    stacked = eqx.filter_jit(filter_stack)(LAYERS)
    assert_identical(stacked, filter_stack(LAYERS))
    for one, two in zip(eqx.filter_jit(filter_unstack)(stacked), LAYERS, strict=True):
        assert_identical(one, two)


def test_taking_apart_inside_of_a_loop():
    def step(total, rows):
        first, second = filter_unstack(rows)
        return total + first["x"] - 2 * second["x"], rows["name"]

    rows = {"x": jnp.arange(6.0).reshape(3, 2), "name": "a"}
    total, names = loopax.filter_scan(step, jnp.zeros(()), rows)
    assert total == sum(a - 2 * b for a, b in rows["x"].tolist())
    assert names == "a"


# -- layers ------------------------------------------------------------------------------


def looped(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def scanned(layers, x):
    return loopax.filter_scan(lambda h, layer: (layer(h), None), x, filter_stack(layers))[0]


def test_stacked_layers_in_a_scan_are_the_loop_over_the_layers():
    assert_close(scanned(LAYERS, X), looped(LAYERS, X))
    assert_close(eqx.filter_jit(scanned)(LAYERS, X), looped(LAYERS, X))


def test_stacked_layers_in_a_scan_under_vmap():
    xs = jr.normal(jr.key(4), (5, 4))
    ours, theirs = (jax.vmap(lambda x, f=f: f(LAYERS, x))(xs) for f in (scanned, looped))
    assert_close(ours, theirs)


def test_gradients_reach_each_of_the_layers():
    ours, theirs = (
        eqx.filter_grad(lambda layers, f=f: jnp.sum(f(layers, X)))(LAYERS)
        for f in (scanned, looped)
    )
    assert len(ours) == 3
    assert_close(ours, theirs)


def test_gradients_of_stacked_layers_come_apart_into_those_of_the_layers():
    def loss(stacked):
        return jnp.sum(loopax.filter_scan(lambda h, layer: (layer(h), None), X, stacked)[0])

    ours = filter_unstack(eqx.filter_grad(loss)(filter_stack(LAYERS)))
    theirs = eqx.filter_grad(lambda layers: jnp.sum(looped(layers, X)))(LAYERS)
    assert_close(ours, theirs)


def test_layers_of_the_library_in_a_scan():
    layers = [eqx.nn.MLP(4, 4, 8, 1, key=key) for key in jr.split(jr.key(5), 3)]
    assert_close(scanned(layers, X), looped(layers, X))


def test_outputs_of_a_scan_come_apart_into_those_of_its_steps():
    def step(h, layer):
        h = layer(h)
        return h, {"h": h, "name": layer.name}

    _, ys = loopax.filter_scan(step, X, filter_stack(LAYERS))
    h = X
    for layer, y in zip(LAYERS, filter_unstack(ys), strict=True):
        h, expected = step(h, layer)
        assert_close(y["h"], expected["h"])
        assert y["name"] == expected["name"]


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no references")
def test_of_mutable_references_there_is_no_stack():
    reference = jax.new_ref(jnp.zeros(2))
    with pytest.raises(loopax.ArgumentError) as caught:
        filter_stack([{"a": reference}, {"a": reference}])
    assert str(caught.value) == (
        "filter_stack: there is a mutable reference in trees[0], of which there can be no "
        "stack. Stack what it holds, `ref[...]`, and make one of that."
    )
