"""Training and a rollout over several processes, each with its own rows of the batch.

Start one for each process: `python two_processes.py 127.0.0.1:1234 2 0`, and the same with `1`.
"""

import sys
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from loopax import filter_scan


WEIGHT = np.eye(4, dtype=np.float32) / 2
BATCH = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


class Net(eqx.Module):
    weight: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x):
        return self.activation(x @ self.weight)


def train(weight, x, average=lambda gradients: gradients):
    """Gradient descent, with the model and its activation function in the carry."""

    def loss(net):
        return jnp.mean((net(x) - jnp.sin(x)) ** 2)

    def step(net, _):
        gradients = average(eqx.filter_grad(loss)(net))
        return eqx.apply_updates(net, jax.tree.map(lambda g: -0.5 * g, gradients)), None

    net, _ = filter_scan(step, Net(weight, jnp.tanh), None, length=5)
    return net.weight


def by_hand(weight, x):
    """What each device does with its rows. `weight` varies, so that its gradient is local."""

    def average(gradients):
        means = jax.lax.pmean(gradients, "data")
        return jax.lax.pcast(means, ("data",), to="varying")

    local = jax.lax.pcast(weight, ("data",), to="varying")
    return jax.lax.pmean(train(local, x, average), "data")


def rollout(weight, x):
    """A policy and a step counter in the carry. The rewards are collected."""

    def step(carry, _):
        policy, state, count = carry
        state = 0.9 * state + policy(state)
        return (policy, state, count + 1), jnp.mean(state**2)

    carry = (Net(weight, jnp.tanh), x, jnp.asarray(0))
    return filter_scan(step, carry, None, length=5)[1]


def main():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))

    def placed(value, spec):
        # Each process hands over the rows that are its own.
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda at: value[at])

    weight, x = placed(WEIGHT, P()), placed(BATCH, P("data"))
    specs = (P(), P("data"))
    programs = {
        "jit": train,
        "shard_map": jax.shard_map(by_hand, mesh=mesh, in_specs=specs, out_specs=P()),
        "rollout": rollout,
    }
    whole = NamedSharding(mesh, P())
    return {
        name: np.asarray(jax.jit(program, out_shardings=whole)(weight, x))
        for name, program in programs.items()
    }


if __name__ == "__main__":
    address, processes, number = sys.argv[1:4]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(processes), int(number))
    for name, value in main().items():
        print(name, *value.ravel().tolist(), flush=True)
    jax.distributed.shutdown()
