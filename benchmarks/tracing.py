"""What tracing costs, beside `jax.lax` and the partition by hand: `benchmarks/tracing.py`.

The time from the call of a loop to its return, while `jax.make_jaxpr` traces what is around it:
the first time, with a body that JAX has not seen, and again, with the body that it has seen.
Medians over rounds in which all of them take turns.

- by hand: what one writes today: partition the carry, close over what is static, combine in
  the body, partition again. That body is a new closure at each call, and traced each time.
- `jax.lax`: over the same tree without what is static, which `lax` does not take; its body is
  defined once. It says what there is to gain.

    --rounds N    how many times to trace each
"""

import functools
import sys
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from measure import Claim, claims, options, plot, sampled, seconds, table


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from programs import HAND, NET, OURS, PROGRAMS, XS


def traced(run, *trees):
    """How long `run` takes to be traced."""
    arrays, static = eqx.partition(trees, eqx.is_array)
    spent = []

    def within(arrays):
        trees = eqx.combine(arrays, static)
        start = time.perf_counter()
        result = run(*trees)
        spent.append(time.perf_counter() - start)
        return eqx.filter(result, eqx.is_array)

    jax.make_jaxpr(within)(arrays)
    return spent[0]


def first_and_again(ways, trees, rounds):
    """For each way, the time to trace it first, and again.

    A way makes the function to be traced, each time with a new body.
    """
    samples = {}
    for name, make in ways.items():
        kept = make()
        traced(kept, *trees)
        samples[name, "first"] = lambda make=make: traced(make(), *trees)
        samples[name, "again"] = lambda kept=kept: traced(kept, *trees)
    times = sampled(samples, rounds)
    return [{name: times[name, when] for name in ways} for when in ("first", "again")]


# -- bodies of realistic size ------------------------------------------------------------


class CartPole(eqx.Module):
    """The equations of motion of A. Barto, R. Sutton and C. Anderson (1983)."""

    gravity: float = 9.8
    cart: float = 1.0
    pole: float = 0.1
    length: float = 0.5
    force: float = 10.0
    tau: float = 0.02
    name: str = "cart pole"

    def step(self, state, action):
        _, speed, angle, turning = state
        force = jnp.where(action == 1, self.force, -self.force)
        total = self.cart + self.pole
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        push = (force + self.pole * self.length * turning**2 * sin) / total
        inertia = self.length * (4 / 3 - self.pole * cos**2 / total)
        turn = (self.gravity * sin - cos * push) / inertia
        pull = push - self.pole * self.length * turn * cos / total
        change = jnp.stack([speed, pull, turning, turn])
        state = state + self.tau * change
        return state, 1.0, (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 0.21)


POLICY = eqx.nn.MLP(4, 2, 64, 2, key=jr.key(0))
ROLLOUT = (POLICY, jnp.zeros(4), jr.key(1), CartPole())


def acted(carry, _):
    policy, state, key, env = carry
    key, choice, start = jr.split(key, 3)
    action = jr.categorical(choice, policy(state))
    state, reward, done = env.step(state, action)
    fresh = jr.uniform(start, (4,), minval=-0.05, maxval=0.05)
    return (policy, jnp.where(done, fresh, state), key, env), (action, reward, done)


def new(function):
    """The same function once more, which JAX has not seen."""

    def again(*args):
        return function(*args)

    return again


def rollout(impl):
    body = new(acted)
    return lambda *carry: impl.scan(body, carry, None, length=128)


def nested(impl):
    def within(body):
        return lambda carry, _: impl.scan(body, carry, None, length=3)

    body = within(within(new(acted)))
    return lambda *carry: impl.scan(body, carry, None, length=3)


def training(impl):
    def step(net, x):
        loss = lambda net: jnp.mean((net(x)) ** 2)
        value, gradient = eqx.filter_value_and_grad(loss)(net)
        change = jax.tree.map(lambda each: -0.1 * each, gradient)
        return eqx.apply_updates(net, change), value

    return lambda net, xs: impl.scan(step, net, xs)


REALISTIC = {
    "rollout: policy and environment": (rollout, ROLLOUT),
    "the same, three loops deep": (nested, ROLLOUT),
    "training: gradient and update": (training, (POLICY, jnp.ones((8, 4)))),
}


# -- sizes -------------------------------------------------------------------------------


class Many(eqx.Module):
    leaves: list[Any]
    activation: Any


SIZES = {
    1: "1",
    20: "20",
    84: "84, as the state of MuJoCo MJX",
    288: "288, as 24 layers of a transformer",
    2000: "2,000",
}


def many(count, activation):
    return Many([jnp.ones(3) for _ in range(count)], activation)


def small(carry, _):
    """Looks at one of the leaves."""
    return carry, jnp.sum(carry.leaves[0])


def large(carry, _):
    """Changes all of them."""
    return Many([0.5 * leaf for leaf in carry.leaves], carry.activation), None


def over(scan, function):
    body = new(function)
    return lambda carry: scan(body, carry, None, length=3)


# -- the report --------------------------------------------------------------------------


def by_program(rounds):
    rows = []
    for program in PROGRAMS:
        ways = {name: functools.partial(program, impl) for name, impl in IMPLS.items()}
        first, _ = first_and_again(ways, (NET, XS), rounds)
        rows.append(
            (program.__name__.replace("_", " "), f"{first['loopax'] / first['by hand']:.2f}")
        )
    print("## Programs of a few operations\n")
    print(table(["first trace, against by hand", "ratio"], rows))


IMPLS = {"loopax": OURS, "by hand": HAND}


def realistic(rounds):
    rows, found = [], []
    for name, (program, trees) in REALISTIC.items():
        ways = {way: functools.partial(program, impl) for way, impl in IMPLS.items()}
        first, again = first_and_again(ways, trees, rounds)
        ratios = [times["loopax"] / times["by hand"] for times in (first, again)]
        cells = [f"{ratio:.2f}" for ratio in ratios]
        rows.append((name, seconds(first["by hand"]), *cells))
        # Nested loops are all loop: of the time little is that of the body.
        limit = 1.15 if program is nested else 1.05
        found.append(Claim(f"{name}, first trace against by hand", ratios[0], limit))
        found.append(Claim(f"{name}, trace again against by hand", ratios[1], 0.3))
    print("## Bodies of realistic size\n")
    print(table(["", "by hand", "loopax, first", "loopax, again"], rows))
    return found


def sizes(rounds, counts, plots):
    lines = {}
    for body, what in ((small, "reads one leaf"), (large, "changes every leaf")):
        rows = []
        for count in counts:
            ways = {
                "loopax": lambda: over(OURS.scan, body),  # noqa: B023
                "by hand": lambda: over(HAND.scan, body),  # noqa: B023
            }
            mixed, arrays = many(count, jax.nn.relu), many(count, None)
            first, again = first_and_again(ways, (mixed,), rounds)
            bare = {"lax": lambda: over(lax.scan, body)}  # noqa: B023
            lax_first, lax_again = first_and_again(bare, (arrays,), rounds)
            first, again = first | lax_first, again | lax_again
            rows.append(
                (
                    SIZES[count],
                    *(seconds(first["by hand"]), seconds(again["lax"])),
                    f"{first['loopax'] / first['by hand']:.2f}",
                    f"{first['loopax'] / first['lax']:.2f}",
                    f"{again['loopax'] / again['by hand']:.2f}",
                    f"{again['loopax'] / again['lax']:.2f}",
                )
            )
            for when, times in (("first", first), ("again", again)):
                for way in ("loopax", "by hand", "lax"):
                    if (when, way) != ("again", "by hand"):
                        points = lines.setdefault(f"{way}, {when}", {})
                        points.setdefault(what, []).append((count, times[way]))
        print(f"\n## A carry of so many leaves, a body that {what}\n")
        head = ("leaves", "by hand, first", "lax, again")
        ratios = ("first / by hand", "first / lax", "again / by hand", "again / lax")
        print(table([*head, *ratios], rows))
    chosen = {way: points["changes every leaf"] for way, points in lines.items()}
    print()
    print(plot(plots, "tracing", "leaves of the carry", "time to trace (s)", chosen))


def main():
    chosen = options(__doc__, rounds=48)
    rounds = 6 if chosen.quick else chosen.rounds
    by_program(rounds)
    print()
    found = realistic(rounds)
    sizes(max(rounds // 3, 3), list(SIZES)[:3] if chosen.quick else list(SIZES), chosen.plots)
    print(claims(found))


if __name__ == "__main__":
    main()
