"""What a call outside of `jax.jit` costs: `python benchmarks/eager.py`.

A scan of three steps over a carry of 20 arrays, called again and again. The body is defined
once; a call that traces it anew is slow, since the loop is compiled anew, too. The ratios are
to `jax.lax.scan` with the same body. Medians over rounds in which all of them run.

- jax.lax.scan: over a dict of arrays.
- loopax.filter_scan: over the same dict; over a Module of 20 arrays and a function; with a
  Module as the body, that has other weights at each call.
- copied: the `filter_scan` of the issue threads (Equinox 709 and 1046): partition the carry,
  close over what is static, call `jax.lax.scan`. The closure is new at each call. That of
  lerax 0.0.5 (`lerax/utils.py`) is the same and an `assert`, and so is what `haliax.scan` hands
  to `jax.lax.scan`; neither can be installed beside this version of JAX.
- flax.nnx.scan: over an `nnx.Module` of 20 parameters, transformed once.

    --rounds N    how many times to run each
"""

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from measure import in_turn, seconds, table

import loopax


LEAVES, STEPS = 20, 3

traces: list[str] = []


class Net(eqx.Module):
    weights: list[Any]
    activation: Any = jax.nn.relu


class Scale(eqx.Module):
    factor: Any

    def __call__(self, carry, _):
        traces.append("module")
        return {name: self.factor * leaf for name, leaf in carry.items()}, None


class FlaxNet(nnx.Module):
    def __init__(self):
        self.weights = nnx.List([nnx.Param(jnp.ones(3)) for _ in range(LEAVES)])


def of_dict(carry, _):
    traces.append("dict")
    return {name: 0.5 * leaf for name, leaf in carry.items()}, None


def of_net(net, _):
    traces.append("net")
    return Net([0.5 * weight for weight in net.weights], net.activation), None


def of_flax(net):
    traces.append("flax")
    for weight in net.weights:
        weight[...] = 0.5 * weight[...]
    return net


def copied_scan(f, init, xs=None, length=None):
    dynamic, static = eqx.partition(init, eqx.is_array)

    def body(dynamic, x):
        carry, y = f(eqx.combine(dynamic, static), x)
        return eqx.filter(carry, eqx.is_array), y

    out, ys = lax.scan(body, dynamic, xs, length=length)
    return eqx.combine(out, static), ys


def ways():
    """What to run, each with a first call behind it."""
    leaves = {f"leaf{i}": jnp.ones(3) for i in range(LEAVES)}
    net = Net([jnp.ones(3) for _ in range(LEAVES)])
    factors = [jnp.float32(0.5), jnp.float32(0.25)]
    flax_net = FlaxNet()
    flax_scan = nnx.scan(of_flax, length=STEPS, in_axes=nnx.Carry, out_axes=nnx.Carry)

    def with_new_weights():
        factors.reverse()
        return loopax.filter_scan(Scale(factors[0]), leaves, length=STEPS)

    programs = {
        "jax.lax.scan": lambda: lax.scan(of_dict, leaves, length=STEPS),
        "loopax.filter_scan, a dict": lambda: loopax.filter_scan(of_dict, leaves, length=STEPS),
        "loopax.filter_scan, a Module": lambda: loopax.filter_scan(of_net, net, length=STEPS),
        "loopax.filter_scan, a Module as the body": with_new_weights,
        "copied filter_scan, a Module": lambda: copied_scan(of_net, net, length=STEPS),
        "flax.nnx.scan, a Module": lambda: flax_scan(flax_net),
    }
    for program in programs.values():
        jax.block_until_ready(jax.tree.leaves(eqx.filter(program(), eqx.is_array)))
    return programs


def traces_of(program, calls=5):
    traces.clear()
    for _ in range(calls):
        program()
    return len(traces) / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1000)
    rounds = parser.parse_args().rounds
    programs = ways()
    times = in_turn(programs, rounds, limit=20.0)
    first = times["jax.lax.scan"]
    rows = [
        (name, seconds(times[name]), f"{times[name] / first:.2f}", f"{traces_of(program):g}")
        for name, program in programs.items()
    ]
    print(table(["eager call", "time", "ratio", "traces a call"], rows))


if __name__ == "__main__":
    main()
