"""Layers for stacks of them, and stacks as they would be without: one layer after the other."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np


SIZE = 4


class Block(eqx.Module):
    """A residual layer with dropout, a setting, a function and an argument of its own."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Any
    scale: float
    name: str = eqx.field(static=True)

    def __init__(self, *, key, activation=jnp.tanh, scale=0.5, name="block", size=SIZE):
        self.linear = eqx.nn.Linear(size, size, key=key)
        self.dropout = eqx.nn.Dropout(0.5)
        self.activation = activation
        self.scale = scale
        self.name = name

    def __call__(self, x, shift=0.0, *, key=None, gain=1.0):
        y = self.activation(self.linear(x)) + shift
        y = self.dropout(y, key=key, inference=key is None)
        return x + self.scale * gain * y


class Running(eqx.nn.StatefulLayer):
    """A layer with what there are states for: a batch norm, a spectral norm, a count."""

    linear: eqx.nn.SpectralNorm
    norm: eqx.nn.BatchNorm
    calls: eqx.nn.StateIndex

    def __init__(self, *, key):
        linear_key, norm_key = jr.split(key)
        linear = eqx.nn.Linear(SIZE, SIZE, key=linear_key)
        self.linear = eqx.nn.SpectralNorm(linear, "weight", key=norm_key)
        self.norm = eqx.nn.BatchNorm(SIZE, "batch", mode="batch")
        self.calls = eqx.nn.StateIndex(jnp.array(0))

    def __call__(self, x, state, *, key=None):
        y, state = self.linear(x, state)
        y, state = self.norm(y, state)
        calls = state.get(self.calls) + 1
        return x + jnp.tanh(y) / calls, state.set(self.calls, calls)


class Cached(eqx.Module):
    """A layer that keeps what it was called with. Not a `StatefulLayer`, as many are not."""

    linear: eqx.nn.Linear
    seen: eqx.nn.StateIndex
    position: eqx.nn.StateIndex

    def __init__(self, key):
        self.linear = eqx.nn.Linear(SIZE, SIZE, key=key)
        self.seen = eqx.nn.StateIndex(jnp.zeros((8, SIZE)))
        self.position = eqx.nn.StateIndex(jnp.array(0))

    def __call__(self, x, state):
        at = state.get(self.position)
        seen = state.get(self.seen).at[at].set(x)
        state = state.set(self.seen, seen).set(self.position, at + 1)
        return x + jnp.tanh(self.linear(jnp.sum(seen, 0) / (at + 1))), state


def in_turn(layers, x, state, *arguments, keys=None, **keywords):
    """The layers as a Python loop: what comes out, the state, and what came out of each."""
    outputs = []
    for i, layer in enumerate(layers):
        own = keywords if keys is None else {**keywords, "key": keys[i]}
        x, state = layer(x, state, *arguments, **own)
        outputs.append(x)
    return x, state, outputs


def copied(state):
    """A state may be used once, so that to use it twice takes a copy."""
    return jax.tree.map(jnp.copy, state)


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(b):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
        else:
            assert a == b or a is b
