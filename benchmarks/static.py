"""What loopax does by itself, and how that grows: `python benchmarks/static.py`.

The parts of a call that are no work of JAX's, by themselves, over trees of up to 100,000
leaves: splitting a tree into its arrays and the rest, putting it together again, making the
token by which the body of an earlier call is found, and comparing the carry that a body returns
with the one that it was given. Medians. No body is looked up for a tree with more than 10,000
things that are no arrays: it is traced anew instead.

Then an eager call of `filter_scan`, over a Module of 20 arrays, taken apart. What was found
there, and what was done about it:

- JAX asks for the path of every array each time that its own functions are called, traced or
  not: a sixth of a call. A body says once what it and its arguments are called, and JAX does
  not ask again.
- `inspect.signature` of the function, for the words of an error that there may be: a tenth. A
  body keeps what it was.
- Whether an argument is of the type that it should be: numbers, strings, booleans and None are
  looked up by their type, all else is asked of beartype.
- Whether a leaf is an array is asked of its type, which is remembered, not of JAX.
- What is left is in proportion to the tree: each of its leaves is looked at twice, once in each
  direction.

    --rounds N    how many times to run each
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from eager import LEAVES, STEPS, Net, of_net
from jax import lax
from measure import Claim, claims, in_turn, options, plot, seconds, table

import loopax
from loopax import _scan
from loopax._body import body_for
from loopax._call import Call, Operands, as_tree
from loopax._mismatch import Comparison
from loopax._split import split, split_held
from loopax._token import NoToken, Tokens


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    activation: object
    name: str = eqx.field(static=True)


def arrays(count):
    """A list of arrays."""
    one = jnp.ones(())
    return [one] * count


def layers(count):
    """Layers of two arrays and a function, whose metadata is a name."""
    return [Layer(*arrays(2), jax.nn.relu, "linear") for _ in range(count // 3)]


TREES = {"arrays": arrays, "layers": layers}
COUNTS = (10, 100, 1000, 10_000, 100_000)


def parts(tree):
    """The parts of a call, over a tree."""
    values, static = split(tree, False)
    # The same once more, in new containers.
    other = jax.tree.map(lambda leaf: leaf, tree)
    rules = Comparison(False, weak_fits=True)
    found = {
        "flatten, by JAX": lambda: jax.tree.flatten(tree),
        "split": lambda: split(tree, False),
        "merge": lambda: static.merge(values),
        "compare": lambda: rules.compare(static, values, other, "carry"),
        "look up": lambda: static.token(Tokens()),
    }
    try:
        found["look up"]()
    except NoToken:
        del found["look up"]
    return found


def growth(counts, rounds, plots):
    """How each part grows with the number of leaves."""
    found = []
    for name, make in TREES.items():
        times = {}
        for count in counts:
            calls = max(1, 10_000 // count)
            times[count] = in_turn(parts(make(count)), rounds, limit=5.0, calls=calls)
        names = list(times[counts[0]])
        print(f"## Of so many leaves: {name}\n")
        rows = [
            (
                f"{count:,}",
                *(
                    seconds(times[count][part]) if part in times[count] else ""
                    for part in names
                ),
            )
            for count in counts
        ]
        print(table(["leaves", *names], rows))
        print()
        lines = {
            part: [(count, times[count][part]) for count in counts if part in times[count]]
            for part in names
        }
        label = f"leaves, {name}"
        print(plot(plots, f"static-{name}", label, "time (s)", lines))
        small, large = counts[-2:]
        found += [
            Claim(
                f"{part} of {name}: {large:,} leaves against {small:,}, for each leaf",
                times[large][part] / times[small][part] * small / large,
                2,
            )
            for part in names[1:]
            if part in times[large]
        ]
    return found


def apart(rounds):
    """An eager call, in the order in which things are done."""
    net = Net([jnp.ones(3) for _ in range(LEAVES)])
    carry = split(net, False)
    state = Operands(split_held(as_tree(of_net)), split_held(None), split_held(None), carry)
    inputs = Operands(split(None, False))
    call = Call("filter_scan", of_net, False, state, inputs)
    body = body_for(_scan._BODY, call)
    leaves = {f"leaf{n}": leaf for n, leaf in enumerate(net.weights)}
    plain = lambda leaves, _: (leaves, None)
    with body.during(call):
        pieces = {
            "all of `filter_scan`": lambda: loopax.filter_scan(of_net, net, length=STEPS),
            "split the carry": lambda: split(net, False),
            "split the function": lambda: split_held(as_tree(of_net)),
            "look the body up": lambda: body_for(
                _scan._BODY, Call("filter_scan", of_net, False, state, inputs)
            ),
            "JAX: `lax.scan` of that body": functools.partial(
                lax.scan, body, body.argument(state), body.argument(inputs, 1), length=STEPS
            ),
            "put the carry together": lambda: state.merge_last(state.arrays),
            "for comparison: `lax.scan` by itself": lambda: lax.scan(
                plain, leaves, length=STEPS
            ),
        }
        for piece in pieces.values():
            piece()
        times = in_turn(pieces, rounds, limit=20.0)
    whole = times["all of `filter_scan`"]
    rows = [(name, seconds(time), f"{time / whole:.0%}") for name, time in times.items()]
    print("## An eager call, taken apart\n")
    print(table(["", "time", "of the call"], rows))


def main():
    chosen = options(__doc__, rounds=200)
    rounds = 10 if chosen.quick else chosen.rounds
    counts = COUNTS[:-1] if chosen.quick else COUNTS
    found = growth(counts, max(rounds // 10, 3), chosen.plots)
    apart(rounds)
    print()
    print(claims(found))


if __name__ == "__main__":
    main()
