"""`filter_while_loop` against the dullest Python loop, and against `jax.lax.while_loop`."""

import functools
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array

from loopax import filter_while_loop


def python_while(cond_fun, body_fun, init_val):
    """The loop that `filter_while_loop` stands for."""
    val = init_val
    while cond_fun(val):
        val = body_fun(val)
    return val


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

ARRAYS_ONLY = {
    "scalar": (lambda c: c < 10, lambda c: c * 2, jnp.float32(1)),
    "weak scalar": (lambda c: c < 10, lambda c: c * 2, jnp.asarray(1)),
    "weak promoted": (
        lambda c: c[0] < 10,
        lambda c: (c[0] + c[1], c[1]),
        (jnp.asarray(1), jnp.float32(2.5)),
    ),
    "weak promoted in turns": (
        lambda c: c[2] < 5,
        lambda c: (c[1], c[0] + c[1], c[2] + 1),
        (jnp.asarray(0), jnp.float32(1), jnp.asarray(0)),
    ),
    "several dtypes": (
        lambda c: c["i"] < 3,
        lambda c: {"i": c["i"] + 1, "h": c["h"] * 2, "b": ~c["b"], "z": c["z"] * 1j},
        {
            "i": jnp.int8(0),
            "h": jnp.float16(1),
            "b": jnp.array(True),
            "z": jnp.complex64(1),
        },
    ),
    "never runs": (lambda c: c < 0, lambda c: c + 1, jnp.float32(3)),
    "weak and never runs": (lambda c: c < 0, lambda c: c + 1, jnp.asarray(3.0)),
    "constant predicate": (lambda c: False, lambda c: c + 1, jnp.float32(3)),
    "predicate of NumPy's": (lambda c: np.bool_(False), lambda c: c + 1, jnp.float32(3)),
    "NumPy carry": (
        lambda c: c[0] < 4,
        lambda c: (c[0] + 1, c[1] * 2),
        (np.int32(0), np.ones(3, np.float32)),
    ),
    "vector": (
        lambda c: jnp.sum(c) < 100,
        lambda c: c + jnp.arange(3.0),
        jnp.zeros(3),
    ),
    "array becomes a number": (
        lambda c: c[1] < 10,
        lambda c: (7, c[1] + 1),
        (jnp.int32(33), jnp.int32(4)),
    ),
}


@pytest.mark.parametrize("name", ARRAYS_ONLY)
def test_on_trees_of_arrays_it_is_lax_in_values_dtypes_and_weak_types(name):
    args = ARRAYS_ONLY[name]
    got, want = filter_while_loop(*args), lax.while_loop(*args)
    assert types(got) == types(want)
    assert eqx.tree_equal(got, want)


NUMBERS = {
    "one number": (lambda c: c < 10, lambda c: c * 2, 1),
    "promoted": (lambda c: c[0] < 10, lambda c: (c[0] + c[1], c[1]), (1, jnp.float32(2))),
    "unchanged": (lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1], c[2]), (0, 0.5, True)),
    "set": (lambda c: c[1] < 10, lambda c: (7, c[1] + 1), (33, 4)),
    "flag": (lambda c: c, lambda c: jnp.logical_not(c), True),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_with_trace_numbers_python_numbers_are_what_they_are_to_lax(name):
    args = NUMBERS[name]
    got, want = filter_while_loop(*args, trace_numbers=True), lax.while_loop(*args)
    assert types(got) == types(want)
    assert eqx.tree_equal(got, want)


def test_trace_numbers_takes_numbers_beside_static_leaves():
    out = filter_while_loop(
        lambda c: c["n"] < 5,
        lambda c: {**c, "n": c["n"] + 1},
        {"n": 0, "name": "a"},
        trace_numbers=True,
    )
    assert out["name"] == "a"
    assert jax.typeof(out["n"]) == jax.typeof(
        lax.while_loop(lambda n: n < 5, lambda n: n + 1, 0)
    )


def test_static_numbers_may_be_read_by_the_predicate():
    init = {"n": ZERO, "limit": 5, "on": True, "step": 2}
    got = filter_while_loop(
        lambda c: c["on"] and c["n"] < c["limit"],
        lambda c: {**c, "n": c["n"] + c["step"]},
        init,
    )
    assert (int(got["n"]), got["limit"], got["on"], got["step"]) == (6, 5, True, 2)
    assert type(got["on"]) is bool


def test_forward_gradients_on_trees_of_arrays_are_those_of_lax():
    def tangent(loop):
        run = lambda x: loop(
            lambda c: c[1] < 4, lambda c: (jnp.tanh(c[0] * x), c[1] + 1), (x, ZERO)
        )[0]
        return jax.jvp(run, (X,), (jnp.ones(3),))

    assert eqx.tree_equal(tangent(filter_while_loop), tangent(lax.while_loop))


# -- static leaves -----------------------------------------------------------------------


class Newton(eqx.Module):
    x: Array
    fn: Callable
    steps: Array
    method: str

    def unfinished(self):
        return (jnp.abs(self.fn(self.x)) > 1e-5) & (self.method == "newton")

    def step(self):
        x = self.x - self.fn(self.x) / jax.grad(self.fn)(self.x)
        return Newton(x, self.fn, self.steps + 1, self.method)


def test_a_solver_state_with_a_function_and_a_name():
    fn = lambda x: x * x - 2.0
    init = Newton(jnp.float32(1), fn, ZERO, "newton")
    got = filter_while_loop(Newton.unfinished, Newton.step, init)
    assert_close(got, python_while(Newton.unfinished, Newton.step, init))
    assert (got.fn, got.method) == (fn, "newton")
    assert float(got.x) == pytest.approx(math.sqrt(2), abs=1e-4)


def test_static_leaves_come_back_as_the_same_objects():
    marker, table = object(), {"a"}
    init = {"net": NET, "marker": marker, "table": table, "i": ZERO}
    out = filter_while_loop(lambda c: c["i"] < 3, lambda c: {**c, "i": c["i"] + 1}, init)
    assert out["net"].activation is NET.activation
    assert out["marker"] is marker
    assert out["table"] is table


def test_arrays_that_the_body_does_not_change_are_handed_on():
    weight = NET.layers[0].weight
    body = lambda c: (c[0], c[1] + 1)
    ours = filter_while_loop(lambda c: c[1] < 3, body, (NET, ZERO))
    lax_weight, _ = lax.while_loop(lambda c: c[1] < 3, body, (weight, ZERO))
    assert (ours[0].layers[0].weight is weight) is (lax_weight is weight)
    assert_close(ours[0], NET)


def test_a_carry_without_arrays_comes_back_from_a_loop_that_never_runs():
    out = filter_while_loop(lambda c: c["go"], lambda c: c, {"go": False, "tag": "t"})
    assert out == {"go": False, "tag": "t"}


def test_the_predicate_may_call_a_module_of_the_carry():
    cond = lambda c: (jnp.sum(c[0](c[1])) < 5.0) & (c[2] < 20)
    body = lambda c: (c[0], c[1] + 1, c[2] + 1)
    got = filter_while_loop(cond, body, (NET, X, ZERO))
    assert_close(got, python_while(cond, body, (NET, X, ZERO)))
    assert int(got[2]) > 0


# -- what may be the body and the predicate ----------------------------------------------


class Below(eqx.Module):
    limit: Array

    def __call__(self, carry):
        return self.holds(carry)

    def holds(self, carry):
        return jnp.sum(carry) < self.limit


class Plus(eqx.Module):
    by: Array

    def __call__(self, carry):
        return self.add(carry)

    def add(self, carry):
        return carry + self.by


class OpaqueBelow:
    def __init__(self, limit):
        self.limit = limit

    def __call__(self, carry):
        return self.holds(carry)

    def holds(self, carry):
        return jnp.sum(carry) < self.limit


class OpaquePlus:
    def __init__(self, by):
        self.by = by

    def __call__(self, carry):
        return self.add(carry)

    def add(self, carry):
        return carry + self.by


def below(limit, carry):
    return jnp.sum(carry) < limit


def plus(by, carry):
    return carry + by


LIMIT, BY = jnp.float32(20), jnp.array([1.0, 2.0, 3.0])

PREDICATES = {
    "lambda": lambda carry: below(LIMIT, carry),
    "Module": Below(LIMIT),
    "bound method of a Module": Below(LIMIT).holds,
    "callable object": OpaqueBelow(LIMIT),
    "bound method of an object": OpaqueBelow(LIMIT).holds,
    "functools.partial": functools.partial(below, LIMIT),
    "eqx.Partial": eqx.Partial(below, LIMIT),
    "jax.tree_util.Partial": jax.tree_util.Partial(below, LIMIT),
    "jitted function": jax.jit(functools.partial(below, LIMIT)),
    "jitted Module": eqx.filter_jit(Below(LIMIT)),
}

BODIES = {
    "lambda": lambda carry: plus(BY, carry),
    "Module": Plus(BY),
    "bound method of a Module": Plus(BY).add,
    "callable object": OpaquePlus(BY),
    "bound method of an object": OpaquePlus(BY).add,
    "functools.partial": functools.partial(plus, BY),
    "functools.partial of a method": functools.partial(Plus.add, Plus(BY)),
    "eqx.Partial": eqx.Partial(plus, BY),
    "jax.tree_util.Partial": jax.tree_util.Partial(plus, BY),
    "jitted function": jax.jit(functools.partial(plus, BY)),
    "jitted Module": eqx.filter_jit(Plus(BY)),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_any_callable_may_be_the_predicate(name):
    got = filter_while_loop(PREDICATES[name], BODIES["lambda"], jnp.zeros(3))
    assert_close(got, 4 * BY)


@pytest.mark.parametrize("name", BODIES)
def test_any_callable_may_be_the_body(name):
    got = filter_while_loop(PREDICATES["lambda"], BODIES[name], jnp.zeros(3))
    assert_close(got, 4 * BY)


@pytest.mark.parametrize("wrap", [lambda run: run, jax.jit], ids=["eager", "jit"])
def test_body_and_predicate_may_hold_arrays_both(wrap):
    run = wrap(lambda limit, by: filter_while_loop(Below(limit), Plus(by), jnp.zeros(3)))
    assert_close(run(jnp.float32(20), BY), 4 * BY)
    assert_close(run(jnp.float32(10), BY), 2 * BY)
    assert_close(run(jnp.float32(20), 2 * BY), 4 * BY)


@pytest.mark.parametrize("name", ["Module", "functools.partial", "eqx.Partial", "closure"])
def test_tangents_flow_to_the_arrays_of_the_body(name):
    make = {
        "Module": Plus,
        "functools.partial": lambda by: functools.partial(plus, by),
        "eqx.Partial": lambda by: eqx.Partial(plus, by),
        "closure": lambda by: lambda carry: plus(by, carry),
    }[name]
    run = lambda by: filter_while_loop(PREDICATES["lambda"], make(by), jnp.zeros(3))
    primal, tangent = jax.jvp(run, (BY,), (jnp.array([1.0, 10.0, 100.0]),))
    assert_close((primal, tangent), (4 * BY, jnp.array([4.0, 40.0, 400.0])))


def test_predicate_and_body_may_be_the_same_module():
    class Both(eqx.Module):
        net: eqx.nn.MLP

        def more(self, carry):
            return jnp.sum(self.net(carry[0])) + carry[1] < 6.0

        def __call__(self, carry):
            return self.net(carry[0]), carry[1] + 1

    both = Both(NET)
    got = filter_while_loop(both.more, both, (X, jnp.float32(0)))
    assert_close(got, python_while(both.more, both, (X, jnp.float32(0))))


# -- reverse mode ------------------------------------------------------------------------


def carry_depends(x):
    return filter_while_loop(lambda c: c[0] < 9.0, lambda c: (2 * c[0], c[1]), (x, "t"))


def body_closes_over(x):
    return filter_while_loop(lambda c: c[0] < 9.0, lambda c: (x * c[0], c[1]), (X[0], "t"))


def body_holds(x):
    body = functools.partial(lambda x, c: (x * c[0], c[1]), x)
    return filter_while_loop(lambda c: c[0] < 9.0, body, (X[0], "t"))


@pytest.mark.parametrize("run", [carry_depends, body_closes_over, body_holds])
def test_reverse_mode_is_refused_in_words_that_name_the_loop(run):
    error = raised_by(jax.grad(lambda x: run(x)[0]), jnp.float32(1.5))
    assert "while_loop" in str(error)


# -- keys, references, effects, state ----------------------------------------------------


def test_typed_keys_are_carried():
    cond = lambda c: c[1] < 3
    body = lambda c: (jr.split(c[0])[0], c[1] + 1, c[2])
    init = (jr.key(0), ZERO, "noise")
    assert_close(filter_while_loop(cond, body, init), python_while(cond, body, init))


@pytest.mark.parametrize("wrap", [lambda run: run, jax.jit], ids=["eager", "jit"])
def test_a_mutable_reference_may_be_closed_over(wrap):
    def run(loop):
        ref = jax.new_ref(jnp.zeros(4))

        def body(i):
            ref[i] = 2.0 * i
            return i + 1

        return loop(lambda i: i < 4, body, ZERO), ref[...]

    got = wrap(lambda: run(filter_while_loop))()
    assert_close(got, wrap(lambda: run(lax.while_loop))())
    assert got[1].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_mutable_reference_may_be_held_by_the_body():
    ref = jax.new_ref(jnp.zeros(4))

    def body(ref, i):
        ref[i] = 2.0 * i
        return i + 1

    filter_while_loop(lambda i: i < 4, functools.partial(body, ref), ZERO)
    assert ref[...].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_mutable_reference_in_the_carry_is_refused_as_lax_refuses_it():
    def program(loop):
        def body(c):
            c[0][c[1]] = 1.0
            return c[0], c[1] + 1

        return loop(lambda c: c[1] < 4, body, (jax.new_ref(jnp.zeros(4)), ZERO))

    ours = raised_by(program, filter_while_loop)
    theirs = raised_by(program, lax.while_loop)
    assert isinstance(ours, type(theirs))
    assert str(ours) == str(theirs)


def test_ordered_callbacks_run_once_a_step_and_in_order():
    seen = []

    def body(c):
        jax.debug.callback(lambda v: seen.append(int(v)), c[0], ordered=True)
        return c[0] + 1, c[1]

    run = jax.jit(lambda n: filter_while_loop(lambda c: c[0] < 4, body, (n, "t"))[0])
    jax.block_until_ready(run(0))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]


def test_disable_jit_gives_the_same_results():
    cond = lambda c: c["i"] < 3
    body = lambda c: {**c, "h": c["net"](c["h"]), "i": c["i"] + 1}
    init = {"net": NET, "h": X, "i": ZERO, "tag": "t"}
    with jax.disable_jit():
        got = filter_while_loop(cond, body, init)
        none = filter_while_loop(lambda c: c["i"] < 0, body, init)
    assert_close(got, filter_while_loop(cond, body, init))
    assert_close(none, init)


class Ticker(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

    def __call__(self, x, state):
        n = state.get(self.index)
        return x + n, state.set(self.index, n + 1)


def test_a_state_that_the_body_sets_is_carried():
    ticker, state = eqx.nn.make_with_state(Ticker)()
    x, state = filter_while_loop(
        lambda c: c[1].get(ticker.index) < 5, lambda c: ticker(*c), (ZERO, state)
    )
    assert (int(x), int(state.get(ticker.index))) == (0 + 1 + 2 + 3 + 4, 5)


# -- batches -----------------------------------------------------------------------------


def test_each_lane_stops_when_its_own_predicate_says_so():
    cond = lambda c: c[1] < c[2]
    body = lambda c: (c[0] * 2, c[1] + 1, c[2], c[3])
    run = lambda n: filter_while_loop(cond, body, (jnp.float32(1), ZERO, n, "t"))[0]
    assert jax.vmap(run)(jnp.arange(5)).tolist() == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_an_ensemble_of_modules_runs_each_its_own_loop():
    nets = eqx.filter_vmap(lambda k: eqx.nn.MLP(3, 3, 4, 1, key=k))(jr.split(jr.key(0), 3))
    cond = lambda c: (jnp.sum(jnp.abs(c[1])) < 2.0) & (c[2] < 6)
    body = lambda c: (c[0], c[0](c[1]) + 0.3, c[2] + 1)
    run = lambda net: filter_while_loop(cond, body, (net, X / 4, ZERO))[1:]
    got = eqx.filter_vmap(run)(nets)
    for i in range(3):
        net = jax.tree.map(lambda a: a[i] if eqx.is_array(a) else a, nets)
        want = python_while(cond, body, (net, X / 4, ZERO))[1:]
        assert_close(jax.tree.map(lambda a: a[i], got), want)


def test_an_ensemble_of_predicates_stops_each_on_its_own():
    run = lambda limit: filter_while_loop(Below(limit), Plus(BY), jnp.zeros(3))
    got = eqx.filter_vmap(run)(jnp.array([0.0, 6.5, 20.0]))
    assert_close(got, jnp.stack([0 * BY, 2 * BY, 4 * BY]))
