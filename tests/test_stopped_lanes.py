"""Nothing comes of the steps that a lane does not take, wherever they would lead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax


KINDS = ["checkpointed", "bounded"]


def counted(n, w, kind):
    """The sum of sqrt(w * k) for k from 1 to n, of which the next term is sqrt(0)."""
    return loopax.filter_fori_loop(
        0, n, lambda i, c: c + jnp.sqrt(w * (n - i)), jnp.float32(0), max_steps=5, kind=kind
    )


def while_counted(n, w, kind):
    def step(c):
        return c[0] + 1, c[1] + jnp.sqrt(w * (n - c[0]))

    start = (jnp.array(0), jnp.float32(0))
    return loopax.filter_while_loop(lambda c: c[0] < n, step, start, max_steps=5, kind=kind)[1]


def slope(n, w):
    """The derivative of both with respect to w."""
    return sum(np.sqrt(k) for k in range(1, n + 1)) / (2 * np.sqrt(w))


@pytest.mark.parametrize("run", [counted, while_counted])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_loop_is_not_poisoned_by_the_step_after_its_last(run, kind, n):
    gradient = jax.jit(jax.grad(lambda w: run(n, w, kind)))
    np.testing.assert_allclose(gradient(3.0), slope(n, 3.0), rtol=1e-5)


@pytest.mark.parametrize("run", [counted, while_counted])
@pytest.mark.parametrize("lanes", [[1, 2, 4], [0, 2], [5, 0, 0, 3]])
def test_lanes_that_have_stopped_or_never_started_have_their_own_gradients(run, lanes):
    n = jnp.array(lanes)
    gradient = jax.grad(lambda n, w: run(n, w, "checkpointed"), 1)
    each = jax.vmap(gradient, (0, None))(n, 3.0)
    np.testing.assert_allclose(each, [slope(k, 3.0) for k in lanes], rtol=1e-5)

    def total(w):
        return jnp.sum(jax.vmap(lambda n: run(n, w, "checkpointed"))(n))

    expected = sum(slope(k, 3.0) for k in lanes)
    np.testing.assert_allclose(jax.grad(total)(3.0), expected, rtol=1e-5)


def test_a_lane_without_a_step_passes_the_gradient_on():
    def run(n, x):
        return loopax.filter_fori_loop(0, n, lambda i, c: c / jnp.abs(x), x, max_steps=5)

    out = jax.vmap(jax.grad(run, 1))(jnp.array([0, 2]), jnp.array([0.0, 2.0]))
    np.testing.assert_allclose(out, [1.0, -0.25])


def test_rows_that_a_lane_does_not_reach_have_no_gradient():
    def run(n, xs):
        def step(c, x):
            return (c[0] + 1, c[1] + jnp.sqrt(x)), jnp.sqrt(x)

        start = (n, jnp.float32(0))
        (_, total), ys = loopax.filter_scan(step, start, xs, until=lambda c: c[0] >= 2)
        return total + jnp.sum(ys)

    xs = jnp.array([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    out = jax.vmap(jax.grad(run, 1))(jnp.array([2, 0]), xs)
    np.testing.assert_allclose(out, [[0, 0, 0], [1, 1, 0]])


# -- bounds ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lax", *KINDS])
def test_a_truncated_loop_is_an_error_in_its_gradient_too(kind):
    def run(x, n):
        return loopax.filter_fori_loop(0, n, lambda i, c: c * x, x, max_steps=3, kind=kind)

    def derivative(x, n):
        return jax.jvp(lambda x: run(x, n), (x,), (1.0,))[1]

    if kind != "lax":
        derivative = jax.grad(run)
    assert jax.jit(derivative)(2.0, 3) == 32
    with pytest.raises(Exception, match="there are more steps from `lower` to `upper`"):
        jax.block_until_ready(jax.jit(derivative)(2.0, 5))


def test_a_loop_that_throws_does_so_in_its_gradient_too():
    def run(x):
        return loopax.filter_while_loop(
            lambda c: c > 1, lambda c: c * 0.9, x, max_steps=5, throw=True
        )

    with pytest.raises(Exception, match="the condition still holds"):
        jax.block_until_ready(jax.jit(jax.grad(run))(100.0))


@pytest.mark.parametrize(
    ("lower", "upper", "steps"),
    [
        (jnp.int8(-100), jnp.int8(100), 200),
        (jnp.int8(100), jnp.int8(-100), 0),
        (jnp.uint8(3), jnp.uint8(250), 247),
        (jnp.uint8(250), jnp.uint8(3), 0),
        (-5, 5, 10),
    ],
)
def test_the_number_of_steps_does_not_overflow(lower, upper, steps):
    def run(lower, upper):
        return loopax.filter_fori_loop(
            lower, upper, lambda i, c: c + 1, jnp.array(0), max_steps=255
        )

    assert jax.jit(run)(lower, upper) == steps


def test_bounds_too_far_apart_are_more_than_any_number_of_steps():
    run = jax.jit(
        lambda a, b: loopax.filter_fori_loop(a, b, lambda i, c: c, jnp.ones(1), max_steps=9)
    )
    with pytest.raises(Exception, match="there are more steps"):
        jax.block_until_ready(run(-(2**31), 2**31 - 1))
    with pytest.raises(loopax.ArgumentError, match="`lower` is -3, which is no uint8"):
        jax.jit(lambda b: loopax.filter_fori_loop(-3, b, lambda i, c: c, 1.0, max_steps=9))(
            jnp.uint8(4)
        )


# -- buffers within functions of their own -------------------------------------------------


@pytest.mark.parametrize("kind", ["lax", *KINDS])
def test_rows_can_be_read_within_inner_functions_that_close_over_the_buffer(kind):
    def run(x):
        def step(c, i):
            history, total = c
            history = history.at[i].set(x * i)
            twice = jax.jit(lambda j: 2 * history[j])(i)
            chosen = jax.lax.cond(i > 1, lambda: history[i - 1], lambda: history[0])
            summed = loopax.filter_fori_loop(
                0, i, lambda j, s: s + history[j], jnp.zeros(()), max_steps=4
            )
            return (history, total + twice + chosen + summed), None

        start = (jnp.zeros(4), jnp.float32(0))
        carry, _ = loopax.filter_scan(
            step, start, jnp.arange(4), buffers=lambda c: c[0], kind=kind
        )
        return carry[1] + jnp.sum(carry[0])

    # Of x: 2 (1 + 2 + 3) read at once, 1 + 2 chosen, 0 + 1 + 3 summed, and 6 in the buffer.
    assert run(1.0) == 25
    np.testing.assert_allclose(jax.grad(run)(1.0), 25)


@pytest.mark.parametrize("kind", ["lax", *KINDS])
def test_branches_that_close_over_a_buffer_may_each_write(kind):
    def run(x):
        def step(b, i):
            return jax.lax.cond(i > 1, lambda: b.at[i].set(x), lambda: b.at[i].set(2 * x)), None

        out, _ = loopax.filter_scan(
            step, jnp.zeros(4), jnp.arange(4), buffers=lambda b: b, kind=kind
        )
        return jnp.sum(out)

    assert run(1.0) == 6
    assert jax.grad(run)(1.0) == 6
