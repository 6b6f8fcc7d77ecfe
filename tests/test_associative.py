"""`filter_associative_scan`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax import lax

import loopax


class Affine(eqx.Module):
    a: jax.Array
    b: jax.Array
    name: str


def then(first, second):
    return Affine(first.a * second.a, second.a * first.b + second.b, first.name)


def one_by_one(a, b):
    h, rows = jnp.zeros(a.shape[1:]), []
    for i in range(len(a)):
        h = a[i] * h + b[i]
        rows.append(h)
    return jnp.stack(rows)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 11])
def test_it_is_the_recurrence(length):
    a, b = jr.uniform(jr.key(0), (2, length, 3))
    out = loopax.filter_associative_scan(then, Affine(a, b, "ssm"))
    assert jnp.allclose(out.b, one_by_one(a, b), atol=1e-5)
    assert out.name == "ssm"


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_that_of_lax_on_arrays(axis, reverse):
    x = jr.normal(jr.key(0), (4, 5))
    ours = loopax.filter_associative_scan(jnp.add, x, reverse, axis)
    # In reverse `lax` takes no negative axis.
    want = lax.associative_scan(jnp.add, x, reverse, axis % 2)
    assert jnp.array_equal(ours, want)


def test_gradients_flow():
    a, b = jr.uniform(jr.key(0), (2, 6))
    ours = jax.grad(
        lambda a: jnp.sum(loopax.filter_associative_scan(then, Affine(a, b, "ssm")).b)
    )(a)
    assert jnp.allclose(ours, jax.grad(lambda a: jnp.sum(one_by_one(a, b)))(a), atol=1e-5)


def test_a_static_leaf_that_changes_is_named():
    def renamed(first, second):
        return Affine(first.a, first.b, first.name + second.name)

    with pytest.raises(loopax.MismatchError) as caught:
        loopax.filter_associative_scan(renamed, Affine(jnp.ones(4), jnp.ones(4), "m"))
    assert [m.path for m in caught.value.mismatches] == ["elems.name"]


def test_an_array_of_another_dtype_is_named():
    def widened(first, second):
        return Affine(first.a, first.b.astype(jnp.float16), first.name)

    with pytest.raises(loopax.MismatchError) as caught:
        loopax.filter_associative_scan(widened, Affine(jnp.ones(4), jnp.ones(4), "m"))
    assert [m.path for m in caught.value.mismatches] == ["elems.b"]


def test_arrays_of_two_lengths_are_named():
    with pytest.raises(ValueError, match=r"elems\.b"):
        loopax.filter_associative_scan(then, Affine(jnp.ones(4), jnp.ones(3), "m"))


def test_a_fraction_is_no_axis():
    with pytest.raises(TypeError, match="axis"):
        loopax.filter_associative_scan(jnp.add, jnp.ones(3), axis=0.5)
