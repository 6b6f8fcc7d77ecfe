"""What a call outside of `jax.jit` costs, beside `jax.lax`: `python benchmarks/eager.py`.

Loops of three steps over a carry of 20 arrays, called again and again. The body is defined
once; a call that traces it anew is slow, since the loop is compiled anew, too. The ratios are
to the function of `jax.lax` with the same body. Medians over rounds in which all of them run.

- copied: the `filter_scan` of the issue threads (Equinox 709 and 1046): partition the carry,
  close over what is static, call `jax.lax.scan`. The closure is new at each call. That of
  lerax 0.0.5 (`lerax/utils.py`) is the same and an `assert`, and so is what `haliax.scan` hands
  to `jax.lax.scan`; neither can be installed beside this version of JAX.
- flax.nnx.scan: over an `nnx.Module` of 20 parameters, transformed once.

What is more than a ratio of 1 goes into splitting the trees and looking the body up. That it
can be less is because JAX writes the path of each array in the carry at each call of its own
functions, which loopax spares it.

    --rounds N    how many times to run each
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from measure import Claim, claims, in_turn, options, seconds, table

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


def cond_fun(carry):
    return carry["leaf0"][0] > 0.2


def body_fun(carry):
    traces.append("body")
    return {name: 0.5 * leaf for name, leaf in carry.items()}


def numbered(_, carry):
    return body_fun(carry)


def add(left, right):
    return {name: left[name] + right[name] for name in left}


BRANCHES = [body_fun, lambda carry: body_fun(carry)]


def functions():
    """For each function: a call of that of `jax.lax`, and of ours."""
    leaves = {f"leaf{i}": jnp.ones(3) for i in range(LEAVES)}

    def both(name, *args, **kwargs):
        pair = getattr(lax, name), getattr(loopax, f"filter_{name}")
        return [lambda function=function: function(*args, **kwargs) for function in pair]

    return {
        "scan": both("scan", of_dict, leaves, length=STEPS),
        "scan over the leaves": both("scan", lambda c, x: (c, x), None, leaves),
        "while_loop": both("while_loop", cond_fun, body_fun, leaves),
        "fori_loop": both("fori_loop", 0, STEPS, numbered, leaves),
        "cond": both("cond", True, *BRANCHES, leaves),
        "switch": both("switch", 1, BRANCHES, leaves),
        "map": both("map", body_fun, leaves),
        "associative_scan": both("associative_scan", add, leaves),
    }


def traces_of(program, calls=5):
    traces.clear()
    for _ in range(calls):
        program()
    return len(traces) / calls


def by_function(rounds):
    """Each of our functions beside that of `jax.lax`."""
    rows, found = [], []
    for name, (theirs, ours) in functions().items():
        theirs(), ours()
        times = in_turn({"lax": theirs, "ours": ours}, rounds, limit=8.0, calls=5)
        ratio = times["ours"] / times["lax"]
        rows.append((name, seconds(times["lax"]), f"{ratio:.2f}", f"{traces_of(ours):g}"))
        found.append(
            Claim(f"`filter_{name.split()[0]}` ({name}), against `jax.lax`", ratio, 1.3)
        )
    print("## Each function, over 20 arrays\n")
    print(table(["eager call", "`jax.lax`", "loopax", "traces a call"], rows))
    return found


def main():
    chosen = options(__doc__, rounds=100)
    rounds = 10 if chosen.quick else chosen.rounds
    programs = ways()
    times = in_turn(programs, rounds, limit=8.0, calls=5)
    first = times["jax.lax.scan"]
    again = {name: traces_of(program) for name, program in programs.items()}
    rows = [
        (name, seconds(times[name]), f"{times[name] / first:.2f}", f"{again[name]:g}")
        for name in programs
    ]
    print("## A scan, beside others\n")
    print(table(["eager call", "time", "ratio", "traces a call"], rows))
    print()
    of_functions = by_function(rounds)
    print()
    copied = times["copied filter_scan, a Module"]
    ours = [name for name in programs if name.startswith("loopax")]
    module = times["loopax.filter_scan, a Module"]
    print(
        claims(
            [
                *(
                    Claim(f"{name}, against `jax.lax`", times[name] / first, 1.3)
                    for name in ours
                ),
                *of_functions,
                Claim("traces in a call of ours", max(again[name] for name in ours), 0),
                Claim(
                    "a copied filter_scan, against ours", copied / module, 100, at_least=True
                ),
            ]
        )
    )


if __name__ == "__main__":
    main()
