"""`filter_map`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

import loopax


class Rows(eqx.Module):
    x: jax.Array
    name: str


def double(rows):
    return Rows(2 * rows.x, rows.name + "!")


@pytest.mark.parametrize("batch_size", [None, 0, 1, 3, 7, 100])
@pytest.mark.parametrize("length", [0, 1, 6, 7])
def test_rows_are_mapped_whatever_the_batch(length, batch_size):
    x = jnp.arange(2.0 * length).reshape(length, 2)
    out = loopax.filter_map(double, Rows(x, "a"), batch_size=batch_size)
    assert jnp.array_equal(out.x, 2 * x)
    assert out.name == "a!"


@pytest.mark.parametrize("batch_size", [None, 2, 5])
def test_it_is_that_of_lax_on_arrays(batch_size):
    x = jr.normal(jr.key(0), (5, 3))
    ours = loopax.filter_map(jnp.cumsum, x, batch_size=batch_size, trace_numbers=True)
    assert jnp.array_equal(ours, lax.map(jnp.cumsum, x, batch_size=batch_size))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_typed_keys_and_numpy_arrays_are_rows(batch_size):
    keys = jr.split(jr.key(0), 7)
    xs = (keys, np.arange(7.0, dtype=np.float32))
    out = loopax.filter_map(lambda row: jr.normal(row[0]) + row[1], xs, batch_size=batch_size)
    assert jnp.allclose(out, jax.vmap(jr.normal)(keys) + xs[1])


@pytest.mark.parametrize("batch_size", [None, 4])
def test_gradients_reach_the_weights_of_the_function(batch_size):
    net = eqx.nn.Linear(2, 1, key=jr.key(0))
    x = jr.normal(jr.key(1), (7, 2))

    def loss(net):
        return jnp.sum(loopax.filter_map(net, x, batch_size=batch_size) ** 2)

    ours = eqx.filter_grad(loss)(net)
    want = eqx.filter_grad(lambda net: jnp.sum(jax.vmap(net)(x) ** 2))(net)
    assert jnp.allclose(ours.weight, want.weight, atol=1e-5)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_new_weights_are_not_traced_again(batch_size):
    traces = []

    class Scale(eqx.Module):
        factor: jax.Array

        def __call__(self, x):
            traces.append(x)
            return self.factor * x

    x = jnp.arange(6.0)
    counts = []
    for factor in (2.0, 3.0):
        out = loopax.filter_map(Scale(jnp.asarray(factor)), x, batch_size=batch_size)
        assert jnp.array_equal(out, factor * x)
        counts.append(len(traces))
    assert counts[0] == counts[1]


def test_what_is_static_may_be_made_anew_in_each_batch():
    class Tag:
        pass

    out, tag = loopax.filter_map(lambda x: (x, Tag()), jnp.arange(7.0), batch_size=3)
    assert out.shape == (7,)
    assert isinstance(tag, Tag)


def test_a_batch_of_less_than_none_is_refused():
    with pytest.raises(ValueError, match="batch_size"):
        loopax.filter_map(double, Rows(jnp.ones(3), "a"), batch_size=-1)


def test_a_batch_of_a_fraction_is_refused():
    with pytest.raises(TypeError, match="batch_size"):
        loopax.filter_map(double, Rows(jnp.ones(3), "a"), batch_size=1.5)
