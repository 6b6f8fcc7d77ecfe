"""Buffers of loops: rows that are written and read, and their gradients, against Python."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from versions import enable_x64

from loopax import filter_fori_loop, filter_scan, filter_while_loop


@pytest.fixture(autouse=True)
def in_double_precision():
    with enable_x64():
        yield


def check(actual, expected):
    """That two trees are equal, each array relatively to its largest element."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = max(np.max(np.abs(b), initial=0), 1)
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=1e-12)


ROWS = 5
KINDS = {
    "checkpointed": {"max_steps": ROWS, "checkpoints": 2},
    "all": {"max_steps": ROWS, "checkpoints": "all"},
    "online": {"checkpoints": 2},
    "bounded": {"max_steps": ROWS, "kind": "bounded"},
}


@pytest.fixture(params=list(KINDS))
def options(request):
    return KINDS[request.param]


@pytest.fixture(params=["checkpointed", "online"])
def few(request):
    return KINDS[request.param]


def loop(step, state, count, options, buffers=lambda s: s["b"]):
    """`step`, so many times, with buffers. The number of times may be traced."""

    def body(both):
        return step(both[0], both[1]), both[1] + 1

    return filter_while_loop(
        lambda both: both[1] < count,
        body,
        (state, jnp.int32(0)),
        buffers=lambda both: buffers(both[0]),
        **options,
    )[0]


def unrolled(step, state, count, options, buffers=None):
    for i in range(ROWS):
        if not isinstance(count, int):
            state = jax.tree.map(functools.partial(jnp.where, i < count), step(state, i), state)
        elif i < count:
            state = step(state, i)
    return state


def history(s, i):
    """Writes a row; reads that and an earlier one."""
    b = s["b"].at[i].set(s["x"] * s["w"])
    x = jnp.sin(b[i] + 0.5 * b[jnp.maximum(i - 2, 0)] + s["x"])
    return {**s, "x": x, "b": b}


def total(step, run, options, x, b, w, count):
    s = run(step, {"x": x, "b": b, "w": w}, count, options)
    weights = jnp.arange(1.0, ROWS + 1)[:, None]
    return jnp.sum(jnp.sin(s["b"]) * weights) + jnp.sum(s["x"])


def arguments():
    return jnp.array([0.3, 0.5]), jr.normal(jr.key(0), (ROWS, 2)), jnp.array([1.1, 0.9])


def values_and_derivatives(f, argnums=(0, 1, 2)):
    """The gradient, and its derivative along the arguments."""
    gradient = jax.grad(f, argnums)

    def both(*args):
        count = args[3:]
        return jax.jvp(lambda *some: gradient(*some, *count), args[:3], args[:3])

    return jax.jit(both, static_argnums=3)


@pytest.mark.parametrize("count", [0, 1, 4, ROWS])
def test_gradients_reach_rows_that_were_written_and_those_that_were_not(count, options):
    args = *arguments(), count
    actual, expected = (
        jax.jit(
            jax.value_and_grad(functools.partial(total, history, run, options), (0, 1, 2)),
            static_argnums=3,
        )(*args)
        for run in (loop, unrolled)
    )
    check(actual, expected)


def test_second_derivatives_go_through_buffers(options):
    args = *arguments(), 4
    actual, expected = (
        values_and_derivatives(functools.partial(total, history, run, options))(*args)
        for run in (loop, unrolled)
    )
    check(actual, expected)


def set_where(s, i):
    b = s["b"].at[i].set(s["x"] * s["w"], where=i % 2 == 0)
    return {**s, "x": jnp.sin(s["x"] + b[i]), "b": b}


def set_where_in_python(s, i):
    b = jnp.where(i % 2 == 0, s["b"].at[i].set(s["x"] * s["w"]), s["b"])
    return {**s, "x": jnp.sin(s["x"] + b[i]), "b": b}


def set_from_the_end(s, i):
    b = s["b"].at[-1 - i].set(s["x"] * s["w"])
    return {**s, "x": jnp.sin(s["x"] + b[-1 - i]), "b": b}


def set_beyond(s, i):
    b = s["b"].at[i + 2].set(s["x"] * s["w"])
    return {**s, "x": jnp.sin(s["x"] * 1.5), "b": b}


def read_in_a_branch(s, i):
    b = lax.cond(i % 2 == 0, lambda b: b.at[i].set(s["x"] * s["w"]), lambda b: b, s["b"])
    row = lax.cond(i % 2 == 0, lambda b: b[i], lambda b: b[i - 1], b)
    return {**s, "x": jnp.sin(s["x"] + row), "b": b}


def read_before(s, i):
    row = s["b"][i]
    return {**s, "x": jnp.sin(s["x"] * s["w"] + row)}


STEPS = {
    "where": (set_where, set_where_in_python),
    "from the end": (set_from_the_end, set_from_the_end),
    "beyond the end": (set_beyond, set_beyond),
    "in a branch": (read_in_a_branch, read_in_a_branch),
    "only read": (read_before, read_before),
}


@pytest.mark.parametrize("name", list(STEPS))
def test_rows_are_written_and_read_as_in_an_array(name, few):
    args = *arguments(), 4
    ours, plain = STEPS[name]
    derivative = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    actual = derivative(functools.partial(total, ours, loop, few))
    expected = derivative(functools.partial(total, plain, unrolled, few))
    check(jax.jit(actual, static_argnums=3)(*args), jax.jit(expected, static_argnums=3)(*args))


COUNTS = jnp.array([0, 2, ROWS, 3])
ORDERS = {
    "grad of vmap": lambda f, axes: jax.grad(
        lambda x, b, w, n: jnp.sum(jax.vmap(f, axes)(x, b, w, n)), (0, 1, 2)
    ),
    "vmap of grad": lambda f, axes: jax.vmap(jax.grad(f, (0, 1, 2)), axes),
    "vmap of grad of grad": lambda f, axes: jax.vmap(
        jax.grad(lambda *args: jnp.sum(jnp.sin(jax.grad(f, 1)(*args))), (0, 1, 2)), axes
    ),
    "vmap of jacrev of jacfwd": lambda f, axes: jax.vmap(jax.jacrev(jax.jacfwd(f), 1), axes),
}


@pytest.mark.parametrize(
    ("order", "options"),
    [
        *((order, "checkpointed") for order in ORDERS),
        ("grad of vmap", "online"),
        ("vmap of grad", "online"),
        ("vmap of jacrev of jacfwd", "online"),
    ],
)
@pytest.mark.parametrize("axes", [(0, 0, None, 0), (None, None, None, 0)])
def test_lanes_that_stop_at_different_steps_have_buffers_of_their_own(order, axes, options):
    x, b, w = arguments()
    x = x + jnp.arange(4.0)[:, None] / 8 if axes[0] == 0 else x
    b = b * jnp.arange(1.0, 5)[:, None, None] / 2 if axes[1] == 0 else b
    actual, expected = (
        jax.jit(ORDERS[order](functools.partial(total, history, run, KINDS[options]), axes))(
            x, b, w, COUNTS
        )
        for run in (loop, unrolled)
    )
    check(actual, expected)


@pytest.mark.parametrize("inner", ["checkpointed", "online", "bounded"])
def test_an_inner_loop_goes_on_with_the_buffer_of_the_outer(inner, few):
    def f(run, x, b, w):
        def outer(s, i):
            def step(t, j):
                t_b = t["b"].at[2 * i + j].set(t["x"] * w)
                row = t_b[2 * i + j] * t_b[jnp.maximum(2 * i + j - 3, 0)]
                return {"x": jnp.sin(row + t["x"]), "b": t_b}

            s = run(step, s, 2, KINDS[inner])
            return {**s, "x": s["x"] + s["b"][2 * i]}

        s = run(outer, {"x": x, "b": b}, 3, few)
        return jnp.sum(s["x"]) + jnp.sum(s["b"] ** 2)

    x, _, w = arguments()
    args = x, jr.normal(jr.key(1), (7, 2)), w
    actual, expected = (
        jax.jit(jax.value_and_grad(functools.partial(f, run), (0, 1, 2)))(*args)
        for run in (loop, unrolled)
    )
    check(actual, expected)


def test_there_may_be_several_buffers(few):
    def f(run, x, b, w):
        def step(s, i):
            one, other = s["b"]
            one = one.at[i].set(s["x"])
            other = other.at[ROWS - 1 - i].set(one[i][0] * w[0])
            return {"x": jnp.sin(one[i] * w + other[ROWS - 1 - i]), "b": (one, other)}

        s = run(step, {"x": x, "b": (b, b[:, 0])}, 4, few)
        return jnp.sum(s["x"]) + jnp.sum(s["b"][0] ** 2) + jnp.sum(jnp.sin(s["b"][1]))

    actual, expected = (
        jax.jit(jax.value_and_grad(functools.partial(f, run), (0, 1, 2)))(*arguments())
        for run in (loop, unrolled)
    )
    check(actual, expected)


def test_rows_may_be_integers_or_booleans(options):
    def step(s, i):
        counts, flags = s["b"]
        return {"x": s["x"] * 2, "b": (counts.at[i].set(i * i), flags.at[i].set(i > 1))}

    def f(x):
        start = {"x": x, "b": (jnp.zeros(ROWS, int), jnp.zeros(ROWS, bool))}
        s = loop(step, start, 4, options)
        return s["x"], s["b"]

    gradient, (counts, flags) = jax.grad(f, has_aux=True)(1.0)
    assert gradient == 16
    assert counts.tolist() == [0, 1, 4, 9, 0]
    assert flags.tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
@pytest.mark.parametrize("which", ["scan", "fori"])
def test_other_loops_have_buffers_too(which, kind):
    def f(ours, x, b):
        def step(i, s):
            b = s[1].at[i].set(s[0])
            return jnp.sin(b[i] * 1.5), b

        if not ours:
            for i in range(ROWS):
                x, b = step(i, (x, b))
        elif which == "scan":
            pick = lambda s: s[1]
            (x, b), _ = filter_scan(
                lambda s, i: (step(i, s), None),
                (x, b),
                jnp.arange(ROWS),
                buffers=pick,
                kind=kind,
            )
        else:
            x, b = filter_fori_loop(0, ROWS, step, (x, b), buffers=lambda s: s[1], kind=kind)
        return jnp.sum(x) + jnp.sum(jnp.cos(b))

    x, b, _ = arguments()
    actual, expected = (jax.value_and_grad(functools.partial(f, o), (0, 1)) for o in (1, 0))
    check(jax.jit(actual)(x, b), expected(x, b))


# -- scans that may stop -----------------------------------------------------------------


def stopping_in_python(f, init, xs, count):
    carry, ys = init, []
    for i in range(len(xs)):
        new, y = f(carry, xs[i])
        carry = jnp.where(i < count, new, carry)
        ys.append(jnp.where(i < count, y, 0))
    return carry, jnp.stack(ys)


def stopping(f, init, xs, count, **options):
    def step(s, x):
        carry, y = f(s[0], x)
        return (carry, s[1] + 1), y

    (carry, _), ys = filter_scan(
        step, (init, jnp.int32(0)), xs, until=lambda s: s[1] >= count, **options
    )
    return carry, ys


@pytest.mark.parametrize("options", [{}, {"checkpoints": 1}, {"kind": "bounded"}])
@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
def test_a_scan_that_stops_leaves_the_rest_of_ys_at_zero(order, options):
    def f(run, x, xs, w, count):
        x, ys = run(lambda h, x: (jnp.sin(h * w + x), h * jnp.cos(x)), x, xs, count)
        return jnp.sum(x) + jnp.sum(ys * jnp.arange(2.0 * ROWS).reshape(ROWS, 2))

    x, xs, w = arguments()
    for axes in ((None, None, None, 0), (None, 0, None, 0)):
        rows = xs * jnp.arange(1.0, 5)[:, None, None] if axes[1] == 0 else xs
        actual, expected = (
            jax.jit(ORDERS[order](functools.partial(f, run), axes))(x, rows, w, COUNTS)
            for run in (functools.partial(stopping, **options), stopping_in_python)
        )
        check(actual, expected)


@pytest.mark.parametrize("options", [{}, {"kind": "bounded"}])
def test_what_stands_in_xs_after_the_last_step_poisons_nothing(options):
    # No step is defined at zero.
    xs = jnp.array([[1.0, 2.0, 3.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0, 0.0]])

    def f(w, xs, count):
        step = lambda h, x: (h + jnp.log(w * x), h / x)
        h, ys = stopping(step, jnp.ones(()), xs, count, **options)
        return h + jnp.sum(ys)

    def of_weights(w):
        return jnp.sum(jax.vmap(f, (None, 0, 0))(w, xs, jnp.array([3, 1])))

    def in_python(w):
        h, ys = jnp.ones(()), 0
        for x in xs[0, :3]:
            h, ys = h + jnp.log(w * x), ys + h / x
        return h + ys + 1 + jnp.log(w * 5) + 1 / 5

    twice = lambda f: jax.value_and_grad(jax.grad(f))
    check(jax.jit(twice(of_weights))(1.1), twice(in_python)(1.1))
    of_rows = jax.jit(jax.vmap(jax.grad(f, 1), (None, 0, 0)))(1.1, xs, jnp.array([3, 1]))
    assert jnp.isfinite(of_rows).all()
    assert jnp.all(of_rows[xs == 0] == 0)
    alone = jax.jit(jax.grad(f, 1))(1.1, xs[0], 3)
    check(alone, of_rows[0])
