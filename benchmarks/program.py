"""Whether the program is that of the partition by hand: `python benchmarks/program.py`.

Each program is written twice, with our functions and with what one writes by hand today: the
arrays of each tree go through `jax.lax`, and the rest is closed over. Both are compiled as they
are, under `jax.vmap`, differentiated, and both; the optimised HLO is compared as text, byte for
byte, but for the lines of source that operations come from. Where it is equal nothing about
the loop can be slower, or take more memory.
"""

import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
from measure import Claim, claims, options, table


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from programs import HAND, NET, OURS, PROGRAMS, XS, optimised


ARRAYS, STATIC = eqx.partition(NET, eqx.is_array)
MANY = jnp.stack([XS, 2 * XS, -XS])


def loss(run):
    def total(arrays, xs):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(run(arrays, xs)))

    return total


TRANSFORMS = {
    "jit": lambda run: (run, XS),
    "vmap": lambda run: (jax.vmap(run, (None, 0)), MANY),
    "grad": lambda run: (jax.grad(loss(run)), XS),
    "vmap of grad": lambda run: (jax.vmap(jax.grad(loss(run)), (None, 0)), MANY),
}


def text(program, impl, transform):
    def run(arrays, xs):
        return eqx.filter(program(impl)(eqx.combine(arrays, STATIC), xs), eqx.is_array)

    function, xs = transform(run)
    return optimised(function, ARRAYS, xs)


def compared(program, transform):
    try:
        by_hand = text(program, HAND, transform)
    except ValueError as error:
        if "Reverse-mode differentiation does not work" not in str(error):
            raise
        return "not in `lax`"
    return "equal" if text(program, OURS, transform) == by_hand else "**differs**"


def main():
    chosen = PROGRAMS[:4] if options(__doc__).quick else PROGRAMS
    cells = {
        program.__name__: [compared(program, transform) for transform in TRANSFORMS.values()]
        for program in chosen
    }
    rows = [(name.replace("_", " "), *row) for name, row in cells.items()]
    print(table(["program", *TRANSFORMS], rows))
    print()
    every = [cell for row in cells.values() for cell in row if "lax" not in cell]
    differ = sum(cell != "equal" for cell in every)
    what = f"programs, of {len(every)}, that differ from the partition by hand"
    print(claims([Claim(what, differ, 0)]))


if __name__ == "__main__":
    main()
