"""What tracing costs, beside the partition written by hand: `python benchmarks/tracing.py`.

For each program of the test of equal HLO: the time to trace it the first time, and, where the
body is defined once, the second time, both as ratios to what the partition by hand takes.
Medians over rounds in which the two alternate.
"""

import gc
import statistics
import sys
import time
from pathlib import Path

import equinox as eqx
import jax


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from programs import HAND, NET, OURS, PROGRAMS, XS


ROUNDS = 48


def body(carry, x):
    return carry, carry(x)


def traced(run):
    """The time to trace `run` over the arrays of the network, in seconds."""
    arrays, static = eqx.partition(NET, eqx.is_array)

    def over_arrays(arrays, xs):
        return eqx.filter(run(eqx.combine(arrays, static), xs), eqx.is_array)

    gc.collect()
    start = time.perf_counter()
    jax.make_jaxpr(over_arrays)(arrays, XS)
    return time.perf_counter() - start


def below(frames, function):
    """Calls `function` with so many more frames on the stack."""
    return below(frames - 1, function) if frames else function()


def ratio(ours, hand):
    """How much longer `ours` takes to trace. Each makes the program to be traced."""
    times = {ours: [], hand: []}
    traced(ours()), traced(hand())
    for number in range(ROUNDS):
        for make in (ours, hand) if number % 2 else (hand, ours):
            # Python's stack comes in pieces, and calls across the end of one are slow. Where
            # that is differs between the two by chance, so they are run at many depths.
            times[make].append(below(number // 2, lambda make=make: traced(make())))
    return statistics.median(times[ours]) / statistics.median(times[hand])


def main():
    # So that no collection falls into one of the two by chance.
    gc.disable()
    for program in PROGRAMS:
        value = ratio(lambda p=program: p(OURS), lambda p=program: p(HAND))
        print(f"{program.__name__:<30} first time   {value:.2f}", flush=True)
    value = ratio(
        lambda: lambda net, xs: OURS.scan(body, net, xs)[1],
        lambda: lambda net, xs: HAND.scan(body, net, xs)[1],
    )
    print(f"{'module_in_carry':<30} again        {value:.2f}")


if __name__ == "__main__":
    main()
