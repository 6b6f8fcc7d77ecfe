"""What gradients through loops keep, and that buffers are updated in place."""

import re

import jax
import jax.numpy as jnp
import pytest

import loopax


pytestmark = pytest.mark.optimised


W = jax.random.normal(jax.random.key(0), (16, 16)) / 4


def compiled(function, *args):
    return jax.jit(jax.grad(function)).lower(*args).compile()


def temporaries(function, *args):
    return compiled(function, *args).memory_analysis().temp_size_in_bytes


def scan(length, **options):
    def loss(w):
        def step(x, _):
            return jnp.tanh(w @ x), None

        x, _ = loopax.filter_scan(step, jnp.ones(16), length=length, **options)
        return jnp.sum(x**2)

    return loss


def while_loop(bound, width=16, **options):
    def loss(w):
        def step(carry):
            i, x = carry
            return i + 1, jnp.tanh(w @ x)

        start = (jnp.array(0), jnp.ones(width))
        _, x = loopax.filter_while_loop(
            lambda carry: carry[0] < bound, step, start, max_steps=bound, **options
        )
        return jnp.sum(x**2)

    return loss


@pytest.mark.parametrize(("kind", "less"), [("checkpointed", 20), ("bounded", 8)])
def test_a_scan_of_prime_length_keeps_no_more_than_one_of_square_length(kind, less):
    prime = temporaries(scan(4093, kind=kind), W)
    assert prime <= 1.2 * temporaries(scan(4096, kind=kind), W)
    assert less * prime <= temporaries(scan(4093, kind="lax"), W)


def test_memory_grows_with_the_square_root_of_the_number_of_steps():
    small, large = (temporaries(while_loop(n), W) for n in (1024, 16 * 1024))
    assert large <= 4.5 * small


def test_memory_is_that_of_the_checkpoints_where_there_are_few():
    few = temporaries(while_loop(4096, checkpoints=8), W)
    assert few <= temporaries(while_loop(4096), W) / 2
    assert few <= temporaries(while_loop(4096, checkpoints="all"), W) / 30


def test_a_loop_without_a_bound_keeps_its_checkpoints_only():
    def loss(w):
        def step(carry):
            i, x = carry
            return i + 1, jnp.tanh(w @ x)

        start = (jnp.array(0), jnp.ones(16))
        _, x = loopax.filter_while_loop(
            lambda carry: carry[0] < 4096, step, start, checkpoints=16
        )
        return jnp.sum(x**2)

    assert temporaries(loss, W) <= 4 * 16 * 64 + 16 * 1024


def test_what_the_body_hands_on_is_not_saved():
    def loss(w):
        def step(carry):
            i, x, big = carry
            return i + 1, jnp.tanh(w @ x), big

        start = (jnp.array(0), jnp.ones(16), jnp.ones((500, 500)) + jnp.sum(w))
        _, x, big = loopax.filter_while_loop(
            lambda carry: carry[0] < 100, step, start, max_steps=100
        )
        return jnp.sum(x**2) + jnp.sum(big)

    assert temporaries(loss, W) < 4 * 500 * 500 * 4


def test_a_step_that_leaves_much_behind_is_computed_again_rather_than_kept():
    # Ten activations of width 1024 a step, beside a carry of 4.
    def loss(w, **options):
        def step(carry):
            i, x = carry
            wide = jnp.ones(1024) * jnp.sum(x)
            for _ in range(10):
                wide = jnp.tanh(wide * w[0, 0])
            return i + 1, x + jnp.sum(wide) * 1e-6

        start = (jnp.array(0), jnp.ones(4))
        _, x = loopax.filter_while_loop(
            lambda carry: carry[0] < 1024, step, start, max_steps=1024, **options
        )
        return jnp.sum(x)

    assert temporaries(loss, W) < 32 * 1024 * 4 * 4


# -- in place ------------------------------------------------------------------------------


def copies_in_loops(program, shape):
    """How often a whole array of that shape is copied within a loop."""
    bodies = re.findall(r"^%?\S*(?:region|body)\S* \(.*?^\}", program, re.DOTALL | re.MULTILINE)
    assert bodies
    return sum(len(re.findall(rf"= {re.escape(shape)}\S* copy\(", body)) for body in bodies)


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
@pytest.mark.parametrize("reads", [False, True])
def test_buffers_are_updated_in_place_forwards_and_backwards(kind, reads):
    def loss(x):
        def step(history, i):
            row = jnp.sin(i * x)
            if reads:
                row = row + jnp.where(i > 0, history[i - 1], 0.0)
            return history.at[i].set(row), None

        history, _ = loopax.filter_scan(
            step, jnp.zeros((999, 8)), jnp.arange(999), buffers=lambda h: h, kind=kind
        )
        return jnp.sum(history**2)

    program = compiled(loss, 1.0).as_text()
    assert copies_in_loops(program, "f32[999,8]") == 0
    assert not re.search(r"f32\[999,999", program)


def test_xs_and_ys_are_read_and_written_in_place():
    def loss(xs):
        def step(x, row):
            x = jnp.tanh(W @ x + row)
            return x, x * row

        x, ys = loopax.filter_scan(step, jnp.ones(16), xs, kind="checkpointed")
        return jnp.sum(x) + jnp.sum(ys**2)

    program = compiled(loss, jnp.ones((999, 16))).as_text()
    assert copies_in_loops(program, "f32[999,16]") == 0


def test_nothing_saved_is_selected_from_under_vmap():
    def loss(x, n):
        _, x = loopax.filter_while_loop(
            lambda carry: carry[0] < n,
            lambda carry: (carry[0] + 1, jnp.tanh(W @ carry[1])),
            (jnp.array(0), x),
            max_steps=961,
        )
        return jnp.sum(x)

    run = jax.jit(jax.vmap(jax.grad(loss)))
    program = run.lower(jnp.ones((7, 16)), jnp.arange(7)).compile().as_text()
    assert "f32[31,7,16]" in program
    assert not re.search(r"f32\[31,7,16\]\S* select\(", program)
    assert copies_in_loops(program, "f32[31,7,16]") == 0
