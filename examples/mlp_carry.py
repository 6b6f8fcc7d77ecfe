"""A network as the carry of a scan, and a stack of stateful layers as its `xs`.

The programs of two Equinox issues: 630, an MLP as the carry; and 934, layers and their
states, built with `eqx.filter_vmap`, run one after the other.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from checks import Check, distance, report
from jaxtyping import Array

from loopax import filter_scan


def roll(mlp: eqx.nn.MLP, x: Array) -> tuple[eqx.nn.MLP, Array]:
    return mlp, mlp(x)


class Layer(eqx.Module):
    """A residual layer with two states: its spectral norm and a mean of its outputs."""

    linear: eqx.nn.SpectralNorm
    activation: Callable
    mean: eqx.nn.StateIndex

    def __init__(self, key: Array, size: int = 16):
        linear_key, norm_key = jr.split(key)
        linear = eqx.nn.Linear(size, size, key=linear_key)
        self.linear = eqx.nn.SpectralNorm(linear, "weight", key=norm_key)
        self.activation = jax.nn.gelu
        self.mean = eqx.nn.StateIndex(jnp.zeros(size))

    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        y, state = self.linear(x, state)
        y = x + self.activation(y)
        return y, state.set(self.mean, 0.9 * state.get(self.mean) + 0.1 * y)


def apply(x: Array, layer_and_state) -> tuple[Array, eqx.nn.State]:
    layer, state = layer_and_state
    return layer(x, state)


def forward(layers: Layer, states: eqx.nn.State, x: Array):
    """Runs `x` through the layers: the output, and the new state of each layer."""
    return filter_scan(apply, x, (layers, states))


def forward_unrolled(layers, states, x):
    """`forward` as a Python loop, to compare with."""
    new_states = []
    for i in range(layers.linear.layer.weight.shape[0]):
        layer, state = row((layers, states), i)
        x, state = layer(x, state)
        new_states.append(state)
    return x, stack(new_states)


def row(tree, i):
    return jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, tree)


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def main(seed: int = 0) -> list[Check]:
    mlp_key, xs_key, layers_key, batch_key = jr.split(jr.key(seed), 4)

    mlp = eqx.nn.MLP(3, 1, 32, 2, activation=jax.nn.tanh, key=mlp_key)
    xs = jr.normal(xs_key, (200, 3))
    last, ys = filter_scan(roll, mlp, xs)
    unchanged = eqx.tree_equal(last, mlp) and last.activation is mlp.activation

    make_layer = eqx.filter_vmap(eqx.nn.make_with_state(Layer))
    layers, states = make_layer(jr.split(layers_key, 5))
    batch = jr.normal(batch_key, (7, 16))
    alone = forward(layers, states, batch[0])
    batched = jax.vmap(lambda x: forward(layers, states, x))(batch)
    wanted = [forward_unrolled(layers, states, x) for x in batch]

    return [
        Check("MLP: distance to jax.vmap", distance(ys, jax.vmap(mlp)(xs)), "<=", 1e-5),
        Check("MLP: comes back with its activation", bool(unchanged), "==", True),
        Check("layers: distance to the loop", distance(alone, wanted[0]), "<=", 1e-5),
        Check("batch of 7: distance", distance(batched, stack(wanted)), "<=", 1e-5),
    ]


if __name__ == "__main__":
    report(main())
