"""Loops in reverse mode, against the same steps in Python."""

import contextlib
import functools
import gc
import operator
import os
import subprocess
import sys
import textwrap
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.experimental import io_callback
from versions import enable_x64

import loopax
from loopax import filter_fori_loop, filter_scan, filter_while_loop


@pytest.fixture
def x64():
    with enable_x64():
        yield


def check(actual, expected, tolerance=1e-12):
    """That two trees are equal, each array relatively to its largest element."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if b.size:
            scale = max(np.max(np.abs(b)), 1)
            np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=tolerance)


# All ways to run a loop of at most `BOUND` steps that has reverse mode.
BOUND = 7
KINDS = {
    "checkpointed": {"max_steps": BOUND},
    "checkpoints=1": {"max_steps": BOUND, "checkpoints": 1},
    "checkpoints=2": {"max_steps": BOUND, "checkpoints": 2},
    "checkpoints=all": {"max_steps": BOUND, "checkpoints": "all"},
    "online": {"checkpoints": 2},
    "online, 4": {"checkpoints": 4},
    "bounded": {"max_steps": BOUND, "kind": "bounded"},
}
FEW = {name: KINDS[name] for name in ("checkpoints=2", "online", "bounded")}


@pytest.fixture(params=list(KINDS))
def kind(request):
    return KINDS[request.param]


@pytest.fixture(params=list(FEW))
def few(request):
    return FEW[request.param]


def loop(step, x, count, options):
    """`step`, so many times. The number of times may be traced."""
    return filter_while_loop(
        lambda s: s[1] < count, lambda s: (step(s[0]), s[1] + 1), (x, jnp.int32(0)), **options
    )[0]


def unrolled(step, x, count, options):
    if isinstance(count, int):
        return functools.reduce(lambda x, _: step(x), range(count), x)
    for i in range(BOUND):
        keep = i < count
        x = jax.tree.map(functools.partial(jnp.where, keep), step(x), x)
    return x


def second(f, argnums=0):
    """A gradient of what depends on the gradient alone, and not linearly."""

    def of_gradient(*args):
        return sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(jax.grad(f, argnums)(*args)))

    return jax.grad(of_gradient, argnums)


def both_orders(f):
    """The gradient and the second derivative of a function of one number."""
    return jax.jit(jax.value_and_grad(jax.grad(f)))


# -- random bodies -----------------------------------------------------------------------


class Weights(eqx.Module):
    matrix: jax.Array
    name: str = eqx.field(static=True, default="weights")


def turn(s, w, c):
    return {**s, "a": jnp.tanh(w.matrix @ s["a"] + s["b"])}


def mix(s, w, c):
    return {**s, "b": jnp.sin(s["b"] * c + jnp.sum(s["a"]))}


def by_parity(s, w, c):
    return {**s, "b": jnp.where(s["odd"], s["b"] * 0.5, s["b"] + c), "odd": ~s["odd"]}


def draw(s, w, c):
    key, sub = jr.split(s["key"])
    return {**s, "key": key, "a": s["a"] + jr.normal(sub, (2,)) * s["b"]}


def by_count(s, w, c):
    return {**s, "a": s["a"].at[s["n"] % 2].mul(c)}


def swap(s, w, c):
    return {**s, "a": s["b"] * w.matrix[0], "b": s["a"][0] * s["a"][1]}


def branch(s, w, c):
    new = lax.cond(s["n"] % 3 == 0, lambda x: x * c, lambda x: jnp.cos(x), s["b"])
    return {**s, "b": new}


UPDATES = [turn, mix, by_parity, draw, by_count, swap, branch]


def state(a, b):
    return {"a": a, "b": b, "n": jnp.int32(0), "odd": jnp.bool_(False), "key": jr.key(1)}


def looped(updates, count, options, which, a, b, w, c):
    @functools.partial(eqx.Partial, w=w)  # an array of the body
    def step(s, *, w):
        for update in updates:
            s = update(s, w, c)  # `c` is closed over
        return {**s, "n": s["n"] + 1}

    s = state(a, b)
    if which == "while":
        s = filter_while_loop(lambda s: s["n"] < count, step, s, **options)
    elif which == "fori":
        s = filter_fori_loop(0, jnp.int32(count), lambda _, s: step(s), s, **options)
    else:
        length = options.pop("max_steps", count)
        s, _ = filter_scan(
            lambda s, _: (step(s), None), s, length=length, until=lambda s: s["n"] >= count,
            **options,
        )  # fmt: skip
    return jnp.sum(jnp.cos(s["a"])) + s["b"] ** 2


def in_python(updates, count, a, b, w, c):
    s = state(a, b)
    for _ in range(count):
        for update in updates:
            s = update(s, w, c)
        s["n"] = s["n"] + 1
    return jnp.sum(jnp.cos(s["a"])) + s["b"] ** 2


ALL = (0, 1, 2, 3)
DERIVATIVES = {
    "grad": lambda f: jax.value_and_grad(f, ALL),
    "grad of grad": lambda f: second(f, ALL),
    "jacfwd of grad": lambda f: jax.jacfwd(jax.grad(f, 0), 3),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f, 3), ALL),
    "jvp of jvp": lambda f: (
        lambda a, *rest: jax.jvp(
            lambda a: jax.jvp(lambda a: f(a, *rest), (a,), (a,))[1], (a,), (a**2,)
        )
    ),
}


@st.composite
def loops(draw):
    bound = draw(st.sampled_from([0, 1, 2, 3, 5, 7, 9]))
    count = draw(st.integers(0, bound))
    updates = draw(st.lists(st.sampled_from(UPDATES), min_size=1, max_size=3))
    which = draw(st.sampled_from(["while", "fori", "scan"]))
    name = draw(st.sampled_from(["checkpointed", "checkpointed", "online", "bounded"]))
    options = {"kind": "bounded" if name == "bounded" else "checkpointed"}
    if name == "online":
        options["checkpoints"] = draw(st.integers(1, 5))
    elif name == "checkpointed":
        options["checkpoints"] = draw(st.sampled_from([None, 1, 2, 3, "all"]))
    if name != "online" or which == "scan":
        options["max_steps"] = bound
    return updates, count, options, which


def arguments():
    matrix = jnp.array([[0.4, -0.7], [0.9, 0.3]])
    return jnp.array([0.3, -0.6]), jnp.array(0.7), Weights(matrix), jnp.array(1.1)


@settings(deadline=None, max_examples=8, derandomize=True, database=None)
@given(loops(), st.sampled_from(list(DERIVATIVES)))
def test_derivatives_are_those_of_the_steps_in_python(program, name):
    updates, count, options, which = program
    derivative = DERIVATIVES[name]
    with enable_x64():
        args = arguments()
        actual = derivative(functools.partial(looped, updates, count, {**options}, which))
        expected = derivative(functools.partial(in_python, updates, count))
        check(eqx.filter_jit(actual)(*args), eqx.filter_jit(expected)(*args))


@settings(deadline=None, max_examples=5, derandomize=True, database=None)
@given(loops())
def test_gradients_in_single_precision_are_those_of_the_steps_in_python(program):
    updates, count, options, which = program
    actual = jax.grad(functools.partial(looped, updates, count, {**options}, which), ALL)
    expected = jax.grad(functools.partial(in_python, updates, count), ALL)
    with enable_x64(False):
        args = arguments()
        check(eqx.filter_jit(actual)(*args), eqx.filter_jit(expected)(*args), 1e-5)


# -- how many steps, and how many are saved ----------------------------------------------


@pytest.mark.parametrize("checkpoints", [1, 2, 3, 6, "all", None])
@pytest.mark.parametrize("bound", [1, 2, 13, 40])
def test_any_number_of_checkpoints_gives_the_same_gradient(bound, checkpoints, x64):
    def power(x, count):
        options = {"max_steps": bound, "checkpoints": checkpoints}
        return loop(lambda y: y * x, jnp.ones(()), count, options)

    gradient = jax.jit(jax.grad(power))
    for count in {0, 1, bound // 2, bound}:
        expected = count * 1.1 ** (count - 1)
        np.testing.assert_allclose(gradient(1.1, count), expected, rtol=1e-12)


@pytest.mark.parametrize("checkpoints", [1, 2, 3, 8])
def test_a_loop_without_a_bound_may_take_any_number_of_steps(checkpoints, x64):
    def power(x, count):
        return loop(lambda y: y * x, jnp.ones(()), count, {"checkpoints": checkpoints})

    gradient = jax.jit(jax.grad(power))
    for count in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 100):
        expected = count * 1.1 ** (count - 1)
        np.testing.assert_allclose(gradient(1.1, count), expected, rtol=1e-12)


def test_a_bound_of_zero_returns_what_it_was_given(x64):
    for options in ({"kind": "checkpointed"}, {"kind": "bounded"}, {"checkpoints": 3}):
        f = functools.partial(filter_while_loop, lambda x: True, operator.neg, **options)
        assert jax.value_and_grad(lambda x, f=f: f(x, max_steps=0))(2.0) == (2, 1)


def test_what_is_left_of_a_bound_costs_no_steps(x64):
    calls = []

    def step(x):
        jax.debug.callback(lambda: calls.append(1))
        return x / 2

    for options in ({"max_steps": 10**6, "checkpoints": 4}, {"checkpoints": 4}):
        calls.clear()
        gradient = jax.grad(
            lambda x, o=options: filter_while_loop(lambda x: x > 1, step, x, **o)
        )
        assert gradient(jnp.array(8.0)) == 1 / 8
        jax.effects_barrier()
        assert len(calls) == 3


# -- what is differentiated --------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoints=all", "bounded"])
def test_third_derivatives_are_those_of_the_steps_in_python(name, x64):
    def f(run, x):
        return run(lambda y: jnp.sin(y * x), x, 3, KINDS[name])

    third = lambda run: jax.grad(jax.grad(jax.grad(functools.partial(f, run))))
    check(third(loop)(0.7), third(unrolled)(0.7))


def test_the_hessian_is_that_of_the_steps_in_python(few, x64):
    def f(run, x, w):
        return jnp.sum(run(lambda y: jnp.sin(w * y) + x[::-1], x, 3, few))

    args = jnp.array([0.3, 0.6]), jnp.array([1.1, 0.7])
    hessian = lambda run: jax.hessian(functools.partial(f, run), (0, 1))
    check(jax.jit(hessian(loop))(*args), hessian(unrolled)(*args))


def test_an_outer_gradient_reaches_what_an_inner_one_closes_over(few, x64):
    def f(run, x):
        inner = jax.grad(lambda y: run(lambda z: jnp.sin(z * x) * y, y, 3, few))
        return jax.jit(inner)(x) * x

    check(
        jax.grad(functools.partial(f, loop))(0.7), jax.grad(functools.partial(f, unrolled))(0.7)
    )


def scan_in_python(f, init, xs, reverse):
    carry, ys = init, [None] * len(xs)
    for i in reversed(range(len(xs))) if reverse else range(len(xs)):
        carry, ys[i] = f(carry, xs[i])
    return carry, jnp.stack(ys)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "options", [{"kind": "checkpointed"}, {"checkpoints": 1}, {"kind": "bounded"}]
)
def test_xs_and_ys_have_cotangents(options, reverse, x64):
    def f(scan, h, xs, w):
        h, ys = scan(lambda h, x: (jnp.sin(h * w + x), h * jnp.cos(x)), h, xs, reverse=reverse)
        return jnp.sum(h) + jnp.sum(jnp.sin(ys) * jnp.arange(10.0).reshape(5, 2))

    args = jnp.array([0.1, 0.2]), jr.normal(jr.key(0), (5, 2)), jnp.array(0.8)
    scan = functools.partial(filter_scan, **options)

    def both(scan):
        gradient = jax.grad(functools.partial(f, scan), (0, 1, 2))
        return jax.jit(lambda *args: jax.jvp(gradient, args, args))

    check(both(scan)(*args), both(scan_in_python)(*args))


def test_ys_that_nothing_asks_for_may_depend_on_anything(x64):
    def f(x):
        h, ys = filter_scan(
            lambda h, _: (h * x, (h, 3 * x, jnp.int32(1), True)),
            x,
            length=3,
            kind="checkpointed",
        )
        return h + ys[1][2]

    assert jax.grad(f)(2.0) == 4 * 8 + 3


def test_what_has_no_tangent_gets_float0(few):
    def f(n, x):
        return filter_while_loop(
            lambda s: s["n"] < n,
            lambda s: {**s, "x": s["x"] * 2, "n": s["n"] + 1, "key": jr.split(s["key"])[0]},
            {"x": x, "n": jnp.int32(0), "key": jr.key(0)},
            **few,
        )

    _, pull = jax.vjp(f, jnp.int32(3), jnp.float32(1))
    none = np.zeros((), jax.dtypes.float0)
    of_n, of_x = pull({"x": jnp.float32(1), "n": none, "key": none})
    assert of_n.dtype == jax.dtypes.float0
    assert of_x == 8


def test_a_carry_may_have_no_arrays_or_empty_ones(kind):
    assert filter_while_loop(lambda _: jnp.bool_(False), lambda s: s, (), **kind) == ()

    def f(empty):
        return jnp.sum(loop(lambda e: e * 2, empty, 3, kind))

    assert jax.grad(f)(jnp.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_gradient_is_of_the_type_of_what_it_is_of(dtype, few, x64):
    def f(run, x):
        return run(lambda y: y * x, jnp.ones((), dtype), 4, few)

    x = jnp.asarray(1.25, dtype)
    actual, expected = (jax.grad(functools.partial(f, run))(x) for run in (loop, unrolled))
    check(actual, expected)


def test_complex_carries_have_gradients(few, x64):
    def f(run, z):
        return run(lambda y: y * z + 1j, z, 4, few)

    z = jnp.array(0.3 + 0.5j)
    actual, expected = (functools.partial(f, run) for run in (loop, unrolled))
    check(jax.grad(actual, holomorphic=True)(z), jax.grad(expected, holomorphic=True)(z))
    check(
        jax.grad(lambda z: jnp.abs(actual(z)))(z), jax.grad(lambda z: jnp.abs(expected(z)))(z)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_python_numbers_in_the_carry_take_the_type_that_the_body_gives_them(dtype, few, x64):
    def f(x):
        return filter_while_loop(
            lambda s: s[1] < 3,
            lambda s: (s[0] * x, s[1] + 1),
            (1.0, 0),
            trace_numbers=True,
            **few,
        )[0]

    value, gradient = jax.value_and_grad(f)(jnp.asarray(2, dtype))
    assert (value.dtype, gradient.dtype) == (dtype, dtype)
    assert (value, gradient) == (8, 12)


# -- vmap --------------------------------------------------------------------------------


COUNTS = np.array([0, 3, 1, 7], "int32")
LANES = np.array([0.1, 0.4, 0.7, 1.0])


def lane(run, kind, x, w, count):
    return run(lambda y: jnp.sin(y * w) + x, x, count, kind)


VMAPS = {
    "grad of vmap": lambda f, axes: jax.grad(
        lambda x, w, n: jnp.sum(jax.vmap(f, axes)(x, w, n)), (0, 1)
    ),
    "vmap of grad": lambda f, axes: jax.vmap(jax.grad(f, (0, 1)), axes),
    "vmap of second": lambda f, axes: jax.vmap(second(f, (0, 1)), axes),
    "second of vmap": lambda f, axes: second(
        lambda x, w, n: jnp.sum(jax.vmap(f, axes)(x, w, n)), (0, 1)
    ),
    "vmap of jacrev of jacfwd": lambda f, axes: jax.vmap(
        jax.jacrev(jax.jacfwd(f), (0, 1)), axes
    ),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "checkpoints=2") for name in VMAPS),
        ("grad of vmap", "online"),
        ("vmap of grad", "online"),
        ("vmap of jacrev of jacfwd", "online"),
        ("vmap of grad", "bounded"),
        ("second of vmap", "bounded"),
    ],
)
def test_lanes_may_stop_at_different_steps(name, options, x64):
    args, axes = (LANES, jnp.array(1.2), COUNTS), (0, None, 0)
    actual, expected = (
        VMAPS[name](functools.partial(lane, run, KINDS[options]), axes)
        for run in (loop, unrolled)
    )
    check(jax.jit(actual)(*args), jax.jit(expected)(*args))


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)])
def test_any_of_the_operands_may_have_the_axis(axes, few, x64):
    args = (LANES, 1 + LANES, COUNTS)
    args = [arg if axis == 0 else arg[1] for arg, axis in zip(args, axes, strict=True)]
    for name in ("grad of vmap", "vmap of grad"):
        actual, expected = (
            VMAPS[name](functools.partial(lane, run, few), axes) for run in (loop, unrolled)
        )
        check(jax.jit(actual)(*args), jax.jit(expected)(*args))


@pytest.mark.parametrize("order", ["vv of grad", "v of grad of v", "grad of vv"])
def test_vmap_of_vmap(order, few, x64):
    def program(run):
        f = functools.partial(lane, run, few)
        inner, outer = (None, 0, None), (0, None, 0)
        if order == "vv of grad":
            return jax.vmap(jax.vmap(jax.grad(f, (0, 1)), inner), outer)
        if order == "v of grad of v":
            return jax.vmap(
                jax.grad(lambda *args: jnp.sum(jax.vmap(f, inner)(*args)), (0, 1)), outer
            )
        both = jax.vmap(jax.vmap(f, inner), outer)
        return jax.grad(lambda *args: jnp.sum(both(*args)), (0, 1))

    args = LANES, jnp.array([1.2, 0.8]), COUNTS
    check(jax.jit(program(loop))(*args), jax.jit(program(unrolled))(*args))


@pytest.mark.parametrize("name", ["vmap of grad", "grad of vmap"])
def test_a_body_may_use_the_axis_by_name(name, few, x64):
    def f(run, x, w, count):
        return run(
            lambda y: jnp.sin(y * w) + 0.1 * lax.psum(y, "i") + lax.axis_index("i"),
            x,
            count,
            few,
        )

    vmap = functools.partial(jax.vmap, in_axes=(0, None, None), axis_name="i")
    args = LANES, jnp.array(1.2), 3

    def program(run):
        if name == "vmap of grad":
            return vmap(jax.grad(functools.partial(f, run), (0, 1)))
        return jax.grad(lambda *args: jnp.sum(vmap(functools.partial(f, run))(*args)), (0, 1))

    check(program(loop)(*args), program(unrolled)(*args))


INDICES = {
    "jit": lambda: jax.jit(lambda: lax.axis_index("i"))(),
    "cond": lambda: lax.cond(True, lambda: lax.axis_index("i"), lambda: jnp.int32(0)),
    "scan": lambda: lax.scan(lambda c, _: (lax.axis_index("i"), None), jnp.int32(0), None, 1)[
        0
    ],
    "loop": lambda: filter_fori_loop(
        0, 1, lambda _, c: lax.axis_index("i"), jnp.int32(0), kind="checkpointed"
    ),
}


@pytest.mark.parametrize("where", list(INDICES))
def test_lanes_may_differ_by_their_number_alone(where, few):
    def f(x):
        return loop(lambda y: y * (1 + INDICES[where]()), x, 2, few)

    out = jax.vmap(jax.grad(f), in_axes=None, axis_size=3, axis_name="i")(1.0)
    assert out.tolist() == [1, 4, 9]


@pytest.mark.parametrize("where", list(INDICES))
def test_lanes_may_stop_by_their_number_alone(where, few):
    def f(x):
        return loop(lambda y: y * 2, x, INDICES[where](), few)

    out = jax.vmap(jax.grad(f), in_axes=None, axis_size=3, axis_name="i")(1.0)
    assert out.tolist() == [1, 2, 4]


# A step is defined where the loop goes on, and has no derivative where it has stopped.
UNDEFINED = {
    "root": (lambda y, w: jnp.sqrt(y) * w - 1, lambda y: y > 0),
    "quotient": (lambda y, w: y - w * y / y, lambda y: y > 0),
}


@pytest.mark.parametrize("name", list(UNDEFINED))
@pytest.mark.parametrize(
    ("order", "options"),
    [
        *((order, kind) for order in ("grad of vmap", "vmap of grad") for kind in FEW),
        ("second of vmap", "checkpoints=2"),
    ],
)
def test_a_lane_that_has_stopped_poisons_nothing(name, order, options, x64):
    step, goes_on = UNDEFINED[name]

    def f(x, w, _):
        return filter_while_loop(goes_on, lambda y: step(y, w), x, **KINDS[options])

    args = jnp.array([0.0, 1.0, 2.0]), jnp.array(1.0), None
    out = jax.jit(lambda *args: VMAPS[order](f, (0, None, None))(*args))(*args)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(out))


def test_pullbacks_can_be_mapped(few, x64):
    def pulled(run, cotangents):
        f = functools.partial(lane, run, few)
        _, pull = jax.vjp(lambda x, w: f(x, w, 5), LANES[1], LANES[2])
        of_lanes = jax.vmap(lambda x, n: jax.vjp(lambda x: f(x, 1.2, n), x)[1])(LANES, COUNTS)
        one_by_one = lax.map(
            lambda s: jax.vjp(lambda x: f(x, 1.2, s[1]), s[0])[1], (LANES, COUNTS)
        )
        apply = jax.vmap(lambda pull, each: pull(each))
        return (
            pull(1.0),
            pull(2.0),
            jax.vmap(pull)(cotangents),
            apply(of_lanes, cotangents),
            apply(one_by_one, cotangents),
        )

    check(pulled(loop, LANES), pulled(unrolled, LANES))


def test_jacobians_both_ways(few, x64):
    def f(run, x):
        return run(lambda y: jnp.sin(y[::-1] * x), x, 4, few)

    x = jnp.array([0.3, 0.6, 0.9])
    expected = jax.jacrev(functools.partial(f, unrolled))(x)
    check(jax.jacrev(functools.partial(f, loop))(x), expected)
    check(jax.jacfwd(functools.partial(f, loop))(x), expected)


# -- within other things, and they within a loop -----------------------------------------


@jax.custom_vjp
def slow_sin(x):
    return jnp.sin(x)


slow_sin.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (g * cos,))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.5, 0.5),))


@jax.custom_jvp
def steep(x):
    return jnp.sin(x)


steep.defjvp(lambda primals, tangents: (steep(*primals), 3 * jnp.cos(*primals) * tangents[0]))


WITHIN = {
    "scan": lambda run, x: lax.scan(
        lambda c, t: (run(lambda y: jnp.sin(y * c + t), c, 3), c), x, jnp.arange(2.0)
    )[0],
    "cond": lambda run, x: lax.cond(
        x > 0, lambda x: run(lambda y: jnp.sin(y * x), x, 3), lambda x: x, x
    ),
    "checkpoint": lambda run, x: jax.checkpoint(
        lambda x: run(lambda y: jnp.sin(y * x), x, 3) * x
    )(x),
    "saved by policy": lambda run, x: jax.checkpoint(
        lambda x: run(lambda y: jnp.sin(y * x), x, 3) * x,
        policy=jax.checkpoint_policies.everything_saveable,
    )(x),
    "around scan": lambda run, x: run(
        lambda y: lax.scan(lambda c, t: (jnp.sin(c * t + x), c), y, jnp.arange(2.0))[0], x, 3
    ),
    "around cond": lambda run, x: run(
        lambda y: lax.cond(y > 0.4, lambda y: jnp.sin(y * x), lambda y: y + x, y), x, 3
    ),
    "around checkpoint": lambda run, x: run(jax.checkpoint(lambda y: jnp.sin(y * x)), x, 3),
    "around jit": lambda run, x: run(jax.jit(lambda y: jnp.sin(y * x)), x, 3),
    "around filter_jit": lambda run, x: run(eqx.filter_jit(lambda y: jnp.sin(y * x)), x, 3),
    "around grad": lambda run, x: run(
        lambda y: jax.grad(lambda z: jnp.sin(z * x) * z)(y), x, 3
    ),
    "around custom_vjp": lambda run, x: run(lambda y: slow_sin(y * x), x, 3),
    "around custom_jvp": lambda run, x: run(lambda y: steep(y * x), x, 3),
    "around loops": lambda run, x: run(lambda y: run(lambda z: jnp.sin(z * x) + y, y, 2), x, 3),
    "around gradients of loops": lambda run, x: run(
        lambda y: jax.grad(lambda z: run(lambda q: jnp.sin(q * z), x, 2))(y), x, 2
    ),
}


@pytest.mark.parametrize("name", list(WITHIN))
def test_loops_stand_within_other_things_and_around_them(name, x64):
    options = {"max_steps": 4, "checkpoints": 2}

    def f(run, x):
        return WITHIN[name](lambda *args: run(*args, options), x)

    actual, expected = (both_orders(functools.partial(f, run)) for run in (loop, unrolled))
    check(actual(0.7), expected(0.7))


@pytest.mark.parametrize("inner", list(FEW))
def test_loops_of_all_kinds_stand_in_each_other(inner, few, x64):
    def f(run, x):
        return run(lambda y: run(lambda z: jnp.sin(z * x) + y, y, 2, FEW[inner]), x, 3, few)

    actual, expected = (jax.grad(functools.partial(f, run)) for run in (loop, unrolled))
    check(jax.jit(actual)(0.7), jax.jit(expected)(0.7))


def test_a_gradient_of_ones_own_is_that_of_each_step(few, x64):
    def f(run, x):
        return run(lambda y: clipped(y * 3), x, 4, few)

    actual, expected = (jax.grad(functools.partial(f, run))(1.0) for run in (loop, unrolled))
    check(actual, expected)
    assert actual == 1.5


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


# Twice the derivative, so that no other rule gives the same by chance.
doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


@pytest.mark.parametrize("second", [jax.grad, jax.jacfwd], ids=["grad", "jacfwd"])
@pytest.mark.parametrize("over", ["lanes", "vector"])
def test_second_derivatives_of_a_rule_of_ones_own_are_those_of_the_rule(few, over, second, x64):
    starts = jnp.array([0.4, 0.6])

    def f(run, a):
        def one(start):
            return run(lambda y: doubled(y * a + 0.1), start, 3, few)

        # Not linear in the result, so that the pullback itself is transposed.
        return jnp.sum((jax.vmap(one)(starts) if over == "lanes" else one(starts)) ** 2)

    actual, expected = (
        second(jax.grad(functools.partial(f, run)))(1.1) for run in (loop, unrolled)
    )
    check(actual, expected)


def test_rules_of_ones_own_may_be_made_of_loops(few, x64):
    def plain(x):
        return loop(lambda y: jnp.sin(y * x), x, 3, few)

    by_vjp, by_jvp = jax.custom_vjp(plain), jax.custom_jvp(plain)
    by_vjp.defvjp(lambda x: jax.vjp(plain, x), lambda pull, g: pull(g))
    by_jvp.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    expected = jax.grad(plain)(0.7)
    check(jax.grad(by_vjp)(0.7), expected)
    check(jax.grad(by_jvp)(0.7), expected)


# -- what a body does outside ------------------------------------------------------------


DEPTHS = {
    "itself": lambda f, y: f(y),
    "jit": lambda f, y: jax.jit(f)(y),
    "cond": lambda f, y: lax.cond(y > -100, f, lambda y: y, y),
    "scan": lambda f, y: lax.scan(lambda c, _: (f(c), None), y, None, 1)[0],
    "loop": lambda f, y: loop(f, y, 1, {"max_steps": 1}),
}


@pytest.mark.parametrize(
    ("how", "depth"),
    [*(("ordered", depth) for depth in DEPTHS), ("debug", "scan"), ("unordered", "cond")],
)
def test_a_callback_is_called_once_for_each_step(how, depth, x64):
    seen = []

    def record(y):
        seen.append(float(y))

    def noted(y):
        if how == "debug":
            jax.debug.callback(record, y, ordered=True)
        else:
            io_callback(record, None, lax.stop_gradient(y), ordered=how == "ordered")
        return y * 2

    def f(x):
        options = {"max_steps": 5, "checkpoints": 2}
        return loop(lambda y: DEPTHS[depth](noted, y) * x, x, 4, options)

    expected = [1.0, 2.0, 4.0, 8.0]
    for derivative in (f, jax.grad(f), jax.grad(jax.grad(f))):
        seen.clear()
        derivative(jnp.array(1.0))
        jax.effects_barrier()
        assert (sorted(seen) if how == "unordered" else seen) == expected


def test_results_of_a_callback_cannot_be_had_again(x64):
    def step(y):
        return y * io_callback(lambda: np.float64(2), jax.ShapeDtypeStruct((), "float64"))

    f = lambda x: loop(step, x, 3, KINDS["checkpointed"])
    assert f(jnp.array(1.0)) == 8
    with pytest.raises(NotImplementedError, match="its steps are run again"):
        jax.grad(f)(1.0)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no references")
def test_a_mutable_reference_is_refused_where_steps_are_run_again():
    count = jax.new_ref(jnp.int32(0))

    def step(y):
        count[...] += 1
        return y * 2

    with pytest.raises(loopax.ArgumentError, match="no use for mutable references"):
        loop(step, jnp.array(1.0), 3, KINDS["checkpointed"])


# -- the rest of JAX ---------------------------------------------------------------------


def powers(x, w):
    return jnp.sum(loop(lambda y: jnp.sin(y * w) + x, x, 4, KINDS["checkpoints=2"]))


def powers_in_python(x, w):
    return jnp.sum(unrolled(lambda y: jnp.sin(y * w) + x, x, 4, None))


POINT = np.array([0.3, 0.6]), np.array(0.8)


@pytest.mark.parametrize(
    "context",
    [
        contextlib.nullcontext,
        jax.disable_jit,
        jax.checking_leaks,
        functools.partial(jax.debug_nans, True),
    ],
    ids=["eager", "disable_jit", "checking_leaks", "debug_nans"],
)
def test_gradients_in_all_the_ways_to_run(context, x64):
    expected = jax.grad(powers_in_python, (0, 1))(*POINT)
    with context():
        check(jax.grad(powers, (0, 1))(*POINT), expected)
        check(jax.jit(jax.grad(powers, (0, 1)))(*POINT), expected)


def test_linearize(x64):
    actual, expected = (
        jax.linearize(f, *map(jnp.asarray, POINT)) for f in (powers, powers_in_python)
    )
    for tangents in ((jnp.ones(2), jnp.array(0.5)), (jnp.zeros(2), jnp.array(1.0))):
        check((actual[0], actual[1](*tangents)), (expected[0], expected[1](*tangents)))


def test_gradients_compile_ahead_of_time_and_take_donated_arrays(x64):
    expected = jax.grad(powers_in_python, (0, 1))(*POINT)
    gradient = jax.jit(jax.grad(powers, (0, 1)), donate_argnums=0)
    args = [jnp.array(each) for each in POINT]
    check(gradient.lower(*args).compile()(*args), expected)


def test_gradients_can_be_exported(x64):
    from jax import export

    args = [jnp.asarray(each) for each in POINT]
    exported = export.export(jax.jit(jax.grad(powers, (0, 1))))(*args)
    with contextlib.suppress(ImportError):  # for want of flatbuffers
        exported = export.deserialize(exported.serialize())
    check(exported.call(*args), jax.grad(powers_in_python, (0, 1))(*args))


SHARDED = """
import functools
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from loopax import filter_while_loop

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
x, w = jnp.linspace(0.1, 1, 16), jnp.array(0.9)


def steps(step, x, options):
    if options is None:
        for _ in range(4):
            x = step(x)
        return x
    start = (x, jnp.int32(0))
    return filter_while_loop(
        lambda s: s[1] < 4, lambda s: (step(s[0]), s[1] + 1), start, **options
    )[0]


def of_shards(options, x, w):
    def local(x, w):
        step = lambda y: jnp.sin(y * w) + 0.01 * jax.lax.psum(jnp.sum(y), "d")
        return steps(step, x, options)

    both = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    return jnp.sum(both(x, w) ** 2)


def within(options, x, w):
    def local(x, w):
        step = lambda y: jnp.sin(y * w) + 0.01 * jax.lax.psum(jnp.sum(y), "d")
        return jax.lax.psum(jnp.sum(steps(step, x, options) ** 2), "d")

    gradient = jax.grad(local, (0, 1))
    specs = P("d"), P()
    return jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs)(x, w)


def second(options, x, w):
    return jax.grad(jax.grad(of_shards, 2), 2)(options, x, w)


def whole(options, x, w):
    return jnp.sum(steps(lambda y: jnp.sin(y * w) + 0.01 * jnp.sum(y), x, options) ** 2)


def same(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


sharded = jax.device_put(x, NamedSharding(mesh, P("d")))
for options in ({"max_steps": 5, "checkpoints": 2}, {"checkpoints": 2}):
    for program in (jax.grad(of_shards, (1, 2)), within, second):
        actual, expected = (
            jax.jit(functools.partial(program, each))(x, w) for each in (options, None)
        )
        same(actual, expected)
    gradient = jax.jit(jax.grad(functools.partial(whole, options), (0, 1)))(sharded, w)
    same(gradient, jax.grad(whole, (1, 2))(None, x, w))
    assert gradient[0].sharding.is_equivalent_to(sharded.sharding, 1)
"""


def test_gradients_of_sharded_carries_with_collectives():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


# -- the cache ---------------------------------------------------------------------------


def test_a_body_is_traced_once_for_eager_calls_and_once_for_eager_gradients():
    traced = []

    def step(s):
        traced.append(1)
        return s[0] * s[1], s[1]

    def is_small(s):
        return s[0] < 100

    def f(x):
        return filter_while_loop(is_small, step, (x, x), max_steps=9)[0]

    for x in (2.0, 3.0, 4.0):
        f(jnp.array(x))
    forwards = len(traced)
    for x in (2.0, 3.0, 4.0):
        jax.grad(f)(jnp.array(x))
    assert forwards == 1
    assert len(traced) == 1


def test_a_body_that_dies_frees_its_arrays_after_gradients():
    gc.disable()
    try:
        array = jnp.full(3, 2.0)
        alive = weakref.ref(array)

        def make(array):
            return lambda s: (s[0] * array, s[1] + 1)

        test = lambda s: s[1] < 3

        def f(body, x):
            return jnp.sum(filter_while_loop(test, body, (x, jnp.int32(0)), max_steps=4)[0])

        body = make(array)
        gradient = jax.grad(functools.partial(f, body))(jnp.ones(3))
        assert gradient.tolist() == [8, 8, 8]
        del array
        assert alive() is not None
        del body
        assert alive() is None
    finally:
        gc.enable()
