"""Diffrax and Optimistix on our loops, beside those of Equinox: `python benchmarks/clients.py`.

For a solve and its gradient: the time to trace and to compile it, the memory that XLA wants
beside arguments and results, and the time to run it. The two alternate; times are medians.
"""

import contextlib
import statistics
import sys
import time
from pathlib import Path

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optimistix
from measure import Claim, claims, figure, options, table


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clients import on_loopax


COMPILED, ROUNDS = 3, 101
SIZE = 64


def diffrax_tsit5():
    """A network as the vector field, adaptive steps, saved at given times."""
    net = eqx.nn.MLP(SIZE, SIZE, width_size=SIZE, depth=1, key=jr.key(0))
    arrays, static = eqx.partition(net, eqx.is_array)

    def field(t, y, arrays):
        net = eqx.combine(arrays, static)
        return 3 * jnp.tanh(net(y)) + jnp.roll(y, 1) - jnp.roll(y, -1)

    def loss(arrays, y0):
        sol = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            t0=0.0,
            t1=10.0,
            dt0=None,
            y0=y0,
            args=arrays,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 10.0, 50)),
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-5),
            max_steps=4096,
        )
        return jnp.mean(sol.ys**2), sol.stats["num_steps"]

    return loss, (arrays, jr.normal(jr.key(1), (SIZE,)))


def optimistix_fixed_point():
    """A fixed point of a layer of a network, through the steps that find it."""

    def loss(weights, y0):
        sol = optimistix.fixed_point(
            lambda y, w: jnp.tanh(w @ y + 1.0),
            optimistix.FixedPointIteration(rtol=1e-5, atol=1e-5),
            y0,
            weights,
            max_steps=256,
            adjoint=optimistix.RecursiveCheckpointAdjoint(),
        )
        return jnp.mean(sol.value**2), sol.stats["num_steps"]

    weights = jr.normal(jr.key(0), (SIZE, SIZE))
    return loss, (0.9 * weights / jnp.linalg.norm(weights, 2), jnp.zeros(SIZE))


def optimistix_levenberg_marquardt():
    """The parameters of a curve, through the steps that find them."""
    x = jnp.linspace(0.0, 4.0, 64)

    def loss(y, start):
        def misfit(parameters, y):
            a, b, c, d = parameters
            return a * jnp.exp(-b * x) + c * jnp.sin(d * x) - y

        sol = optimistix.least_squares(
            misfit,
            optimistix.LevenbergMarquardt(rtol=1e-5, atol=1e-5),
            start,
            y,
            max_steps=256,
            adjoint=optimistix.RecursiveCheckpointAdjoint(),
        )
        return jnp.mean(sol.value**2), sol.stats["num_steps"]

    y = 2 * jnp.exp(-0.7 * x) + jnp.sin(3 * x) + 0.1 * jr.normal(jr.key(0), x.shape)
    return loss, (y, jnp.array([1.0, 1.0, 0.8, 2.7]))


def compiled(program, ours):
    """The program, the times to trace and to compile it, and the loops that were ours."""
    loss, arguments = program()
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    with on_loopax() if ours else contextlib.nullcontext([]) as calls:
        jax.clear_caches()
        start = time.perf_counter()
        lowered = run.lower(*arguments)
        traced = time.perf_counter()
        executable = lowered.compile()
        times = traced - start, time.perf_counter() - traced
    assert bool(calls) == ours
    return executable, arguments, times


def alternating(rounds):
    return [(False, True), (True, False)] * (rounds // 2) + [(False, True)] * (rounds % 2)


def timed(executable, arguments):
    start = time.perf_counter()
    jax.block_until_ready(executable(*arguments))
    return time.perf_counter() - start


def main():
    quick = options(__doc__).quick
    found = []
    for program in (diffrax_tsit5, optimistix_fixed_point, optimistix_levenberg_marquardt):
        programs, building = {}, {True: [], False: []}
        for order in alternating(1 if quick else COMPILED):
            for ours in order:
                *programs[ours], times = compiled(program, ours)
                building[ours].append(times)
        results = {ours: executable(*args) for ours, (executable, args) in programs.items()}
        (_, steps), _ = results[True]
        errors = jax.tree.map(
            lambda a, b: np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30),
            results[True],
            results[False],
        )
        running = {True: [], False: []}
        for order in alternating(ROUNDS):
            for ours in order:
                running[ours].append(timed(*programs[ours]))

        memory = [temporary(programs[ours][0]) for ours in (False, True)]
        costs = {
            "trace and lower (s)": medians(building, lambda times: times[0]),
            "compile (s)": medians(building, lambda times: times[1]),
            "temporary memory (kB)": memory,
            "solve and gradient (ms)": medians(running, lambda time: 1000 * time),
        }
        name = program.__name__.replace("_", " ")
        print(f"## {name}, {steps} steps\n")
        rows = [
            (what, figure(theirs), figure(ours), f"{ours / theirs:.2f}")
            for what, (theirs, ours) in costs.items()
        ]
        print(table(["", "on Equinox's loops", "on ours", "ratio"], rows), "\n", flush=True)
        for what in ("temporary memory (kB)", "solve and gradient (ms)"):
            theirs, ours = costs[what]
            found.append(Claim(f"{name}: {what.split(' (')[0]}", ours / theirs, 1.5))
        apart = max(jax.tree.leaves(errors))
        found.append(Claim(f"{name}: relative difference", apart, 1e-3))
    print(claims(found))


def medians(samples, value):
    return [statistics.median(map(value, samples[ours])) for ours in (False, True)]


def temporary(executable):
    return executable.memory_analysis().temp_size_in_bytes / 1000


if __name__ == "__main__":
    main()
