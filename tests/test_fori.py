"""`filter_fori_loop` against the dullest Python loop, and against `jax.lax.fori_loop`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array
from versions import NEW_NAMES

from loopax import filter_fori_loop


def python_fori(lower, upper, body_fun, init_val):
    """The loop that `filter_fori_loop` stands for."""
    val = init_val
    for i in range(int(lower), int(upper)):
        val = body_fun(i, val)
    return val


def through_jit(loop):
    """`loop` with bounds that are known only when it runs."""

    def run(lower, upper, body_fun, init_val):
        jitted = eqx.filter_jit(lambda n, m, val: loop(n, m, body_fun, val))
        return jitted(jnp.asarray(lower), jnp.asarray(upper), init_val)

    return run


BOUNDS = {"static": lambda loop: loop, "dynamic": through_jit}


@pytest.fixture(params=BOUNDS)
def bounds(request):
    return BOUNDS[request.param]


def assert_close(got, want):
    """The same trees, up to rounding of the arrays."""
    got_arrays, got_rest = eqx.partition(got, eqx.is_array)
    want_arrays, want_rest = eqx.partition(want, eqx.is_array)
    assert eqx.tree_equal(got_rest, want_rest) is True
    arrays = zip(jax.tree.leaves(got_arrays), jax.tree.leaves(want_arrays), strict=True)
    for a, b in arrays:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jr.key_data(a), jr.key_data(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def types(tree):
    """Dtypes and shapes, and weak types too, which `jnp` operations go by."""
    return jax.tree.map(jax.typeof, tree)


def raised_by(function, *args, **kwargs):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*args, **kwargs)
    return caught.value


NET = eqx.nn.MLP(3, 3, 4, 1, key=jr.key(0))
X = jr.normal(jr.key(7), (3,))
ZERO = jnp.int32(0)


# -- trees of arrays: as lax -------------------------------------------------------------

INDEX = lambda i, c: c.at[i].add(i + 1)
TOTAL = lambda i, c: c + i

ARRAYS_ONLY = {
    "static bounds": (0, 4, INDEX, jnp.zeros(4)),
    "from elsewhere": (2, 4, INDEX, jnp.zeros(4)),
    "negative bounds": (-3, 2, TOTAL, jnp.int32(0)),
    "empty range": (3, 3, TOTAL, jnp.int32(5)),
    "range below": (4, 1, TOTAL, jnp.int32(5)),
    "NumPy bounds": (np.int32(1), np.int64(4), TOTAL, jnp.int32(0)),
    "array bounds": (jnp.int32(1), jnp.int32(4), TOTAL, jnp.int32(0)),
    "one bound of each kind": (0, jnp.int32(4), TOTAL, jnp.int32(0)),
    "narrow bounds": (jnp.int8(0), jnp.int8(4), lambda i, c: c + i, jnp.int8(0)),
    "weak carry": (0, 4, TOTAL, jnp.asarray(0)),
    "weak carry promoted": (0, 4, lambda i, c: c + jnp.float32(i), jnp.asarray(0)),
    "weak carry promoted in turns": (
        0,
        4,
        lambda i, c: (c[1], c[0] + c[1]),
        (jnp.asarray(0), jnp.float32(1)),
    ),
    "the index itself": (0, 4, lambda i, c: i, jnp.int32(0)),
    "an array becomes a number": (0, 3, lambda i, c: (7, c[1] + i), (ZERO, ZERO)),
    "no carry": (0, 3, lambda i, c: c, None),
    "NumPy carry": (0, 3, lambda i, c: c * 2, np.ones(3, np.float32)),
}


@pytest.mark.parametrize("name", ARRAYS_ONLY)
def test_on_trees_of_arrays_it_is_lax_in_values_dtypes_and_weak_types(name):
    args = ARRAYS_ONLY[name]
    got, want = filter_fori_loop(*args), lax.fori_loop(*args)
    assert types(got) == types(want)
    assert eqx.tree_equal(got, want)


UNROLL = [None, 1, 2, 3, 9, True, False]


@pytest.mark.parametrize("unroll", UNROLL)
def test_unroll_changes_no_result(unroll):
    body = lambda i, c: {**c, "h": jnp.tanh(c["net"](c["h"]) + i)}
    init = {"net": NET, "h": X, "tag": "t"}
    got = filter_fori_loop(0, 5, body, init, unroll=unroll)
    assert_close(got, python_fori(0, 5, body, init))


@pytest.mark.parametrize("unroll", [0, True, False])
def test_unroll_is_what_it_is_to_lax(unroll):
    if unroll == 0 and unroll is not False and not NEW_NAMES:
        pytest.skip("JAX 0.7 refuses it")
    want = lax.fori_loop(0, 4, INDEX, jnp.zeros(4), unroll=unroll)
    assert_close(filter_fori_loop(0, 4, INDEX, jnp.zeros(4), unroll=unroll), want)


REFUSED = {
    "negative": lambda loop: loop(0, 4, TOTAL, ZERO, unroll=-1),
    "traced bound": lambda loop: jax.jit(lambda n: loop(0, n, TOTAL, ZERO, unroll=2))(4),
    "bounds of two types": lambda loop: loop(jnp.int8(0), jnp.int16(4), TOTAL, ZERO),
    "bound that is a float": lambda loop: loop(0, 4.0, TOTAL, ZERO),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bounds_that_lax_refuses_are_refused_in_the_same_words(name):
    ours = raised_by(REFUSED[name], filter_fori_loop)
    theirs = raised_by(REFUSED[name], lax.fori_loop)
    assert isinstance(ours, type(theirs))
    assert str(ours) == str(theirs)


def test_a_bound_that_is_no_scalar_is_refused():
    error = raised_by(lambda loop: loop(0, jnp.arange(1), TOTAL, ZERO), filter_fori_loop)
    assert str(error).startswith("filter_fori_loop: `upper` must be an integer, a scalar")


NUMBERS = {
    "one number": (0, 4, TOTAL, 0),
    "promoted": (0, 4, lambda i, c: c + 0.5, 0),
    "with a flag": (0, 3, lambda i, c: (c[0] + i, jnp.logical_not(c[1])), (0, True)),
    "unchanged": (0, 3, lambda i, c: c, (1, 2.0, True)),
    "dynamic bound": (0, jnp.int32(3), TOTAL, 0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_with_trace_numbers_python_numbers_are_what_they_are_to_lax(name):
    args = NUMBERS[name]
    got, want = filter_fori_loop(*args, trace_numbers=True), lax.fori_loop(*args)
    assert types(got) == types(want)
    assert eqx.tree_equal(got, want)


def test_trace_numbers_takes_numbers_beside_static_leaves():
    body = lambda i, c: {**c, "n": c["n"] + i}
    out = filter_fori_loop(0, 4, body, {"n": 0, "name": "a"}, trace_numbers=True)
    assert out["name"] == "a"
    assert types(out["n"]) == types(lax.fori_loop(0, 4, TOTAL, 0))
    assert int(out["n"]) == 6


@pytest.mark.parametrize("where", ["carry", "closure"])
def test_gradients_on_trees_of_arrays_are_those_of_lax(where):
    def gradient(loop):
        def loss(w):
            body = lambda i, c: jnp.tanh(c * (1 if where == "carry" else w) + i)
            return jnp.sum(loop(0, 4, body, w if where == "carry" else X))

        return jax.grad(loss)(X)

    assert eqx.tree_equal(gradient(filter_fori_loop), gradient(lax.fori_loop))


# -- bounds ------------------------------------------------------------------------------


@pytest.mark.parametrize(("lower", "upper"), [(0, 4), (-2, 3), (3, 3), (5, -5)])
@pytest.mark.parametrize("convert", [int, np.int32, jnp.asarray], ids=lambda f: f.__name__)
def test_bounds_of_any_kind_run_the_range_between_them(lower, upper, convert):
    body = lambda i, c: {**c, "x": 2 * c["x"] + i}
    got = filter_fori_loop(convert(lower), convert(upper), body, {"x": ZERO, "t": "t"})
    assert_close(got, python_fori(lower, upper, body, {"x": ZERO, "t": "t"}))


@pytest.mark.parametrize(("lower", "upper"), [(0, 4), (-2, 3), (5, -5)])
def test_bounds_may_be_traced(lower, upper):
    body = lambda i, c: {**c, "x": 2 * c["x"] + i}
    run = lambda n, m: filter_fori_loop(n, m, body, {"x": ZERO, "t": "t"})["x"]
    want = python_fori(lower, upper, body, {"x": ZERO})["x"]
    assert_close(jax.jit(run)(lower, upper), want)


def test_traced_bounds_may_differ_between_lanes():
    body = lambda i, c: (c[0] + i, c[1])
    run = lambda n: filter_fori_loop(0, n, body, (ZERO, "t"))[0]
    assert jax.vmap(run)(jnp.arange(-1, 5)).tolist() == [0, 0, 0, 1, 3, 6]


LIMITS = [
    (0, 3),
    (np.int16(0), np.int16(3)),
    (jnp.int8(0), jnp.int8(3)),
    (0, jnp.int32(3)),
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_index_has_the_type_that_it_has_in_lax(limits):
    def index_type(loop):
        seen = []

        def body(i, c):
            seen.append(jax.typeof(i))
            return c

        loop(*limits, body, X)
        return seen[-1]

    assert index_type(filter_fori_loop) == index_type(lax.fori_loop)


# -- static leaves -----------------------------------------------------------------------


def test_a_module_in_the_carry_is_called_at_each_step(bounds):
    body = lambda i, c: (c[0], c[0](c[1]) + i)
    got = bounds(filter_fori_loop)(0, 4, body, (NET, X))
    assert_close(got, python_fori(0, 4, body, (NET, X)))


def test_static_leaves_come_back_as_the_same_objects(bounds):
    marker, table = object(), frozenset({"a"})
    init = {"net": NET, "marker": marker, "table": table, "x": X}
    out = bounds(filter_fori_loop)(0, 3, lambda i, c: {**c, "x": c["x"] + i}, init)
    assert out["net"].activation is NET.activation
    assert out["marker"] is marker
    assert out["table"] is table


def test_arrays_that_the_body_does_not_change_are_handed_on():
    weight = NET.layers[0].weight
    out = filter_fori_loop(0, 3, lambda i, c: (c[0], c[1] + i), (NET, X))
    assert out[0].layers[0].weight is weight


def test_a_loop_that_never_runs_gives_its_carry_back(bounds):
    init = {"net": NET, "x": X, "n": 1}
    body = lambda i, c: {**c, "x": c["x"] + i}
    assert_close(bounds(filter_fori_loop)(0, 0, body, init), init)
    assert_close(bounds(filter_fori_loop)(0, -3, body, init), init)


def test_static_numbers_stay_static():
    init = {"rate": 0.5, "count": 3, "on": True, "x": X}
    body = lambda i, c: {**c, "x": c["x"] * c["rate"] + (c["count"] if c["on"] else 0)}
    got = filter_fori_loop(0, 3, body, init)
    assert_close(got, python_fori(0, 3, body, init))
    assert [type(got[k]) for k in ("rate", "count", "on")] == [float, int, bool]


def test_gradient_of_a_loss_over_a_module_in_the_carry():
    def gradient(loop):
        body = lambda i, c: (c[0], jnp.tanh(c[0](c[1]) + i))
        return eqx.filter_grad(lambda net: jnp.sum(loop(0, 3, body, (net, X))[1]))(NET)

    assert_close(gradient(filter_fori_loop), gradient(python_fori))


# -- what may be the body ----------------------------------------------------------------


class Plus(eqx.Module):
    by: Array

    def __call__(self, i, carry):
        return self.add(i, carry)

    def add(self, i, carry):
        return jnp.tanh(carry + i * self.by)


class OpaquePlus:
    def __init__(self, by):
        self.by = by

    def __call__(self, i, carry):
        return self.add(i, carry)

    def add(self, i, carry):
        return jnp.tanh(carry + i * self.by)


def plus(by, i, carry):
    return jnp.tanh(carry + i * by)


def by_keyword(i, carry, *, by):
    return plus(by, i, carry)


BODIES = {
    "Module": Plus,
    "bound method of a Module": lambda by: Plus(by).add,
    "callable object": OpaquePlus,
    "bound method of an object": lambda by: OpaquePlus(by).add,
    "functools.partial": lambda by: functools.partial(plus, by),
    "by keyword": lambda by: functools.partial(by_keyword, by=by),
    "functools.partial of a method": lambda by: functools.partial(Plus.add, Plus(by)),
    "eqx.Partial": lambda by: eqx.Partial(plus, by),
    "jax.tree_util.Partial": lambda by: jax.tree_util.Partial(plus, by),
    "lambda": lambda by: lambda i, carry: plus(by, i, carry),
    "jitted function": lambda by: jax.jit(lambda i, carry: plus(by, i, carry)),
    "jitted Module": lambda by: eqx.filter_jit(Plus(by)),
}


@pytest.mark.parametrize("name", BODIES)
def test_any_callable_may_be_the_body(name, bounds):
    got = bounds(filter_fori_loop)(0, 3, BODIES[name](X), jnp.zeros(3))
    assert_close(got, python_fori(0, 3, Plus(X), jnp.zeros(3)))


@pytest.mark.parametrize("name", BODIES)
def test_gradients_flow_to_the_arrays_of_the_body(name):
    def gradient(loop):
        return jax.grad(lambda by: jnp.sum(loop(0, 3, BODIES[name](by), X)))(X)

    got, want = gradient(filter_fori_loop), gradient(python_fori)
    assert_close(got, want)
    assert jnp.all(want != 0)


def test_reverse_mode_with_a_dynamic_bound_is_refused_in_words_that_name_the_loop():
    def run(x, n):
        return filter_fori_loop(0, n, lambda i, c: (c[0] * x, c[1]), (x, "t"))[0]

    error = raised_by(jax.jit(jax.grad(run)), jnp.float32(1.5), 3)
    assert "while_loop" in str(error)


# -- keys, references, effects, state ----------------------------------------------------


def test_typed_keys_are_carried():
    body = lambda i, c: {**c, "key": jr.fold_in(c["key"], i)}
    init = {"key": jr.key(0), "name": "noise"}
    assert_close(filter_fori_loop(0, 3, body, init), python_fori(0, 3, body, init))


def test_a_mutable_reference_may_be_closed_over(bounds):
    def run(loop):
        ref = jax.new_ref(jnp.zeros(4))

        def body(i, c):
            ref[i] = c
            return c + 2

        return bounds(loop)(0, 4, body, jnp.float32(0)), ref[...]

    got = run(filter_fori_loop)
    assert_close(got, run(lax.fori_loop))
    assert got[1].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_mutable_reference_may_be_held_by_the_body(bounds):
    ref = jax.new_ref(jnp.zeros(4))

    def body(ref, i, c):
        ref[i] = c
        return c + 2

    bounds(filter_fori_loop)(0, 4, functools.partial(body, ref), jnp.float32(0))
    assert ref[...].tolist() == [0.0, 2.0, 4.0, 6.0]


def carries_a_reference(loop, n):
    def body(i, c):
        c[0][i] = 1.0
        return c[0], c[1] + 1

    return loop(0, n, body, (jax.new_ref(jnp.zeros(4)), ZERO))


@pytest.mark.parametrize("wrap", [lambda run: run, jax.jit], ids=["static", "dynamic"])
def test_a_mutable_reference_in_the_carry_is_refused_as_lax_refuses_it(wrap):
    ours = raised_by(wrap(functools.partial(carries_a_reference, filter_fori_loop)), 4)
    theirs = raised_by(wrap(functools.partial(carries_a_reference, lax.fori_loop)), 4)
    assert isinstance(ours, type(theirs))
    assert str(ours) == str(theirs)


def test_ordered_callbacks_run_once_a_step_and_in_order(bounds):
    seen = []

    def body(i, c):
        jax.debug.callback(lambda v: seen.append(int(v)), i, ordered=True)
        return c

    run = jax.jit(lambda x: bounds(filter_fori_loop)(0, 4, body, (x, "t"))[0])
    jax.block_until_ready(run(X))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("upper", [0, 4])
def test_disable_jit_gives_the_same_results(upper):
    body = lambda i, c: {**c, "h": c["net"](c["h"]) + i}
    init = {"net": NET, "h": X, "tag": "t"}
    with jax.disable_jit():
        got = filter_fori_loop(0, upper, body, init)
    assert_close(got, python_fori(0, upper, body, init))


class Ticker(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

    def __call__(self, x, state):
        n = state.get(self.index)
        return x + n, state.set(self.index, n + 1)


def test_a_state_that_the_body_sets_is_carried(bounds):
    ticker, state = eqx.nn.make_with_state(Ticker)()
    x, state = bounds(filter_fori_loop)(0, 4, lambda i, c: ticker(*c), (ZERO, state))
    assert (int(x), int(state.get(ticker.index))) == (0 + 1 + 2 + 3, 4)
