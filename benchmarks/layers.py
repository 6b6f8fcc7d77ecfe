"""What layers cost as one scan, beside the alternatives: `python benchmarks/layers.py`.

For each depth the alternatives are compiled, checked to compute the same, and run in turn: the
time to trace, lower and compile the loss of a stack of transformer blocks and its gradient with
respect to all parameters, the time to run that, and the memory that XLA wants beside arguments
and results. Each time is shown as it is and as a ratio to the unrolled stack, or above the
depth to which that is compiled, to the scan by hand. Medians over rounds in which all of them
alternate; what takes long to compile is compiled once. Times depend on what else runs on the
machine, ratios less so. On a CPU, mapping memory anew in each call makes up much of the time of
deep stacks.

The alternatives, all with the same weights:

- unrolled: a Python loop over the layers, as in `eqx.nn.Sequential`.
- by hand: what Equinox's documentation recommends. The layers are made under
  `eqx.filter_vmap` and partitioned, their arrays go through `jax.lax.scan`, whose body combines
  them again.
- Stacked: `loopax.nn.Stacked`, as it is and with options. With `remat=dots` the policy is
  `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`: the results of matrix products
  with weights are kept, and all else is computed again.
- flax.nnx: the layers are made under `nnx.vmap` of split rngs, and called by `nnx.scan`. The
  block is that of Flax's own layers with the same arithmetic; the variance in its LayerNorm is
  computed in another way.
- haliax, by hand: what `haliax.nn.Stacked(..., gradient_checkpointing=True).fold` does.
  haliax 1.3 imports private names of JAX that JAX 0.10 does not have, so its steps are written
  out here, without the names of axes: modules made under vmap, and `jax.lax.scan` of
  `jax.checkpoint` of the block with `prevent_cse=False`. Without gradient checkpointing, its
  default, the steps are those of the scan by hand.

"apart" is the largest relative difference, over the output and the gradient of each parameter,
to what the ratios are to.

    --rounds N         how many times to run each
    --compilations N   how many times to compile each
    --unrolled N       the greatest depth at which to unroll
"""

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flax import nnx
from jax import lax
from measure import Claim, claims, options, plot, table

import loopax


WIDTH, HEADS, TOKENS = 128, 4, 64
EPSILON = 1e-5

# Up to this depth it may pay to unroll.
SHALLOW = 12
# In seconds. What compiles more slowly is compiled once.
SLOW_COMPILE = 6.0
# By how much rounding may set results apart, in float32.
APART = 1e-4


class Block(eqx.Module):
    before_attention: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    before_mlp: eqx.nn.LayerNorm
    widen: eqx.nn.Linear
    narrow: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.before_attention = eqx.nn.LayerNorm(WIDTH, EPSILON)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.before_mlp = eqx.nn.LayerNorm(WIDTH, EPSILON)
        self.widen = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1])
        self.narrow = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2])

    def __call__(self, x):
        h = jax.vmap(self.before_attention)(x)
        x = x + self.attention(h, h, h)
        h = jax.vmap(self.before_mlp)(x)
        h = jax.nn.gelu(jax.vmap(self.widen)(h))
        return x + jax.vmap(self.narrow)(h)


class FlaxBlock(nnx.Module):
    def __init__(self, rngs):
        self.before_attention = nnx.LayerNorm(WIDTH, epsilon=EPSILON, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs
        )
        self.before_mlp = nnx.LayerNorm(WIDTH, epsilon=EPSILON, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.narrow(nnx.gelu(self.widen(self.before_mlp(x))))


def flax_names(blocks):
    """The arrays of stacked Equinox blocks, under the names and in the shapes of Flax."""
    attention = blocks.attention

    def inward(linear):
        return {"kernel": split_heads(linear.weight.mT, axis=-1)}

    def split_heads(array, axis):
        shape = list(array.shape)
        shape[axis : axis + 1 or None] = HEADS, WIDTH // HEADS
        return array.reshape(shape)

    def norm(layer):
        return {"scale": layer.weight, "bias": layer.bias}

    def linear(layer):
        return {"kernel": layer.weight.mT, "bias": layer.bias}

    return {
        "before_attention": norm(blocks.before_attention),
        "attention": {
            "query": inward(attention.query_proj),
            "key": inward(attention.key_proj),
            "value": inward(attention.value_proj),
            "out": {"kernel": split_heads(attention.output_proj.weight.mT, axis=-2)},
        },
        "before_mlp": norm(blocks.before_mlp),
        "widen": linear(blocks.widen),
        "narrow": linear(blocks.narrow),
    }


# -- ways --------------------------------------------------------------------------------


class Way(NamedTuple):
    """One alternative, over a flat list of arrays, so that calling it costs the same for all.

    - `loss_and_gradient`: `(arrays, x) -> ((loss, output), gradient)`.
    - `named`: a list of arrays as what is to be compared: those of stacked Equinox blocks.
    """

    arrays: list[Any]
    loss_and_gradient: Callable[..., Any]
    named: Callable[[list[Any]], dict[str, Any]]


def loss_of(y):
    return jnp.mean(y**2), y


def equinox_way(model, forward, stacked=lambda model: model):
    """`stacked` is from gradients to those of the stacked blocks."""
    arrays, static = eqx.partition(model, eqx.is_array)
    leaves, treedef = jax.tree.flatten(arrays)

    def loss(leaves, x):
        model = eqx.combine(jax.tree.unflatten(treedef, leaves), static)
        return loss_of(forward(model, x))

    def named(leaves):
        return flax_names(stacked(jax.tree.unflatten(treedef, leaves)))

    return Way(leaves, jax.value_and_grad(loss, has_aux=True), named)


@functools.cache
def make_blocks(depth):
    return eqx.filter_vmap(Block)(jr.split(jr.key(0), depth))


@functools.cache
def make_stacked(depth):
    return loopax.nn.Stacked(Block, depth, key=jr.key(0))


def unrolled(depth):
    def forward(layers, x):
        for layer in layers:
            x = layer(x)
        return x

    def stacked(layers):
        return jax.tree.map(lambda *arrays: np.stack(arrays), *layers)

    return equinox_way(make_stacked(depth).unstack(), forward, stacked)


def by_hand(depth):
    def forward(blocks, x):
        arrays, static = eqx.partition(blocks, eqx.is_array)

        def body(x, arrays):
            return eqx.combine(arrays, static)(x), None

        return lax.scan(body, x, arrays)[0]

    return equinox_way(make_blocks(depth), forward)


def haliax_by_hand(depth):
    def forward(blocks, x):
        arrays, static = eqx.partition(blocks, eqx.is_array)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def call(x, arrays):
            return eqx.combine(arrays, static)(x)

        return lax.scan(lambda x, arrays: (call(x, arrays), None), x, arrays)[0]

    return equinox_way(make_blocks(depth), forward)


def ours(**options):
    def way(depth):
        model = make_stacked(depth).with_options(**options)
        return equinox_way(model, lambda model, x: model(x), lambda model: model.layers)

    return way


def flax_nnx(depth):
    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return FlaxBlock(rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, block):
        return block(x)

    blocks = make(nnx.Rngs(0))
    nnx.update(blocks, flax_names(make_blocks(depth)))
    graph, parameters, rest = nnx.split(blocks, nnx.Param, ...)
    leaves, treedef = jax.tree.flatten(parameters)

    def loss_and_gradient(leaves, x):
        blocks = nnx.merge(graph, jax.tree.unflatten(treedef, leaves), rest)
        loss = nnx.value_and_grad(lambda blocks: loss_of(forward(x, blocks)), has_aux=True)
        value, gradient = loss(blocks)
        return value, jax.tree.leaves(gradient)

    def named(leaves):
        return nnx.to_pure_dict(jax.tree.unflatten(treedef, leaves))

    return Way(leaves, loss_and_gradient, named)


DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

WAYS = {
    "unrolled": unrolled,
    "by hand": by_hand,
    "Stacked": ours(),
    "Stacked, unroll=2": ours(unroll=2),
    "Stacked, remat=True": ours(remat=True),
    "Stacked, remat=dots": ours(remat=DOTS),
    "flax.nnx": flax_nnx,
    "haliax, by hand": haliax_by_hand,
}
SHALLOW_WAYS = {
    "unrolled": unrolled,
    "Stacked": ours(),
    "Stacked, unroll=2": ours(unroll=2),
    "Stacked, unroll=4": ours(unroll=4),
    "Stacked, unroll=True": ours(unroll=True),
}


# -- measuring ---------------------------------------------------------------------------


class Cost(NamedTuple):
    """In seconds and bytes."""

    compile: float
    time: float
    memory: int
    arguments: int
    apart: float


def example():
    return jr.normal(jr.key(1), (TOKENS, WIDTH))


def compiled(way, x):
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    program = jax.jit(way.loss_and_gradient).lower(way.arrays, x).compile()
    return program, time.perf_counter() - start


def timed(program, arrays, x):
    start = time.perf_counter()
    jax.block_until_ready(program(arrays, x))
    return time.perf_counter() - start


def shuffled(names, rounds):
    """In another order each round: what ran before leaves memory behind, mapped or not."""
    random = np.random.default_rng(0)
    for _ in range(rounds):
        yield from random.permutation(names).tolist()


def compile_all(tables, compilations):
    """Programs and times by depth and name, from the tables of ways of each depth."""
    x = example()
    programs = {depth: {} for depth in tables}
    times = {depth: {name: [] for name in ways} for depth, ways in tables.items()}
    # One depth after the other, so that the times tell how compiling grows with the depth.
    names = dict.fromkeys(name for ways in tables.values() for name in ways)
    pairs = [(depth, name) for name in names for depth in tables if name in tables[depth]]
    for depth, name in pairs * compilations:
        earlier = times[depth][name]
        if earlier and earlier[0] > SLOW_COMPILE:
            continue
        programs[depth][name], seconds = compiled(tables[depth][name], x)
        earlier.append(seconds)
        say(f"depth {depth}: {name} compiled in {seconds:.2f} s")
    return programs, {
        depth: {name: statistics.median(times) for name, times in of_depth.items()}
        for depth, of_depth in times.items()
    }


def measure(depth, ways, programs, compiling, rounds):
    x, names = example(), list(ways)
    results = {}
    for name in names:
        result = programs[name](ways[name].arrays, x)
        (_, y), gradient = jax.tree.map(np.asarray, result)
        results[name] = {"output": y, **ways[name].named(gradient)}
    apart = {name: difference(results[name], results[names[0]]) for name in names}
    for name, value in apart.items():
        if not value < APART:
            raise SystemExit(f"{name} and {names[0]} do not compute the same: {value:.1e}")
    del results

    running = {name: [] for name in names}
    for name in shuffled(names, rounds):
        running[name].append(timed(programs[name], ways[name].arrays, x))
    costs = {}
    for name in names:
        memory = programs[name].memory_analysis()
        costs[name] = Cost(
            compiling[name],
            statistics.median(running[name]),
            memory.temp_size_in_bytes,
            memory.argument_size_in_bytes + memory.output_size_in_bytes,
            apart[name],
        )
        say(f"depth {depth}: {name} runs in {1e3 * costs[name].time:.1f} ms")
    return costs


def difference(result, expected):
    """The largest relative difference of an array."""
    apart = jax.tree.map(
        lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), result, expected
    )
    # Not Python's `max`, which may pass over what is not a number.
    return float(np.max(jax.tree.leaves(apart)))


# -- showing -----------------------------------------------------------------------------


HEAD = (
    *("depth", "", "compile s", "ratio", "run ms", "ratio"),
    *("temporary MB", "arguments and results MB", "apart", "ratios to"),
)


def say(line):
    print(line, file=sys.stderr, flush=True)


def show(title, names, found):
    rows = []
    for depth, costs in found.items():
        of = next(iter(costs))
        for name in names:
            cells = [str(depth), name]
            if name in costs:
                cost, base = costs[name], costs[of]
                cells += [f"{cost.compile:.2f}", f"{cost.compile / base.compile:.3f}"]
                cells += [f"{1e3 * cost.time:.1f}", f"{cost.time / base.time:.2f}"]
                cells += [f"{cost.memory / 1e6:.1f}", f"{cost.arguments / 1e6:.1f}"]
                cells += ["" if name == of else f"{cost.apart:.0e}" if cost.apart else "0", of]
            else:
                cells += ["not run", *[""] * 7]
            rows.append(cells)
    print(f"## {title}\n\n{table(HEAD, rows)}\n")


# What the documentation shows of it: the depths, and a name for each way.
SHOWN = {
    "unrolled": "layers one by one",
    "Stacked": "`Stacked`",
    "Stacked, remat=True": "`Stacked`, `remat=True`",
    "Stacked, remat=dots": "`Stacked`, `remat=` see below",
}


def show_short(found):
    """The table of the page about layers, which takes it from between these marks."""
    rows = [
        (
            depth,
            title,
            f"{costs[name].compile:.1f} s",
            f"{1e3 * costs[name].time:.1f} ms",
            f"{costs[name].memory / 1e6:.1f} MB",
        )
        for depth, costs in found.items()
        for name, title in SHOWN.items()
        if name in costs and "unrolled" in costs
    ]
    print("## In short\n\n<!-- --8<-- [start:stacks] -->")
    print(table(["depth", "", "compile", "run", "memory"], rows))
    print("<!-- --8<-- [end:stacks] -->\n")


PLOTTED = ("unrolled", "by hand", "Stacked", "Stacked, remat=True", "flax.nnx")


def plots(found, folder):
    for of, label, unit in (
        ("compile", "time to compile (s)", 1),
        ("memory", "temporary memory (MB)", 1e-6),
    ):
        lines = {
            name: [
                (depth, unit * getattr(costs[name], of))
                for depth, costs in found.items()
                if name in costs
            ]
            for name in PLOTTED
        }
        print(plot(folder, f"layers-{of}", "layers", label, lines))


def claimed(found):
    """What is claimed of the depths that were measured."""
    out = []

    def claim(what, of, depths, names, limit):
        costs = [
            found.get(depth, {}).get(name) for depth, name in zip(depths, names, strict=True)
        ]
        if None not in costs:
            one, other = (getattr(cost, of) for cost in costs)
            out.append(Claim(what, one / other, limit))

    both = ("Stacked", "unrolled")
    claim("24 layers against unrolled: compile", "compile", (24, 24), both, 0.2)
    claim("48 layers against 12: compile", "compile", (48, 12), ("Stacked",) * 2, 1.3)
    claim("48 layers against unrolled: time", "time", (48, 48), both, 1.2)
    claim(
        "24 layers against the scan by hand: time",
        "time",
        (24, 24),
        ("Stacked", "by hand"),
        1.1,
    )
    apart = max(costs["Stacked"].apart for costs in found.values())
    out.append(Claim("largest relative difference to the layers one by one", apart, 1e-5))
    return out


def main():
    chosen = options(__doc__, rounds=21, compilations=3, unrolled=48)
    depths = (4, 8) if chosen.quick else (4, 12, 24, 48, 96)

    # What is imported and set up at the first use counts for nobody.
    for way in WAYS.values():
        compiled(way(2), example())

    tables = {}
    for depth in depths:
        names = {**WAYS, **SHALLOW_WAYS} if depth <= SHALLOW else WAYS
        tables[depth] = {
            name: make(depth)
            for name, make in names.items()
            if name != "unrolled" or depth <= chosen.unrolled
        }
    programs, compiling = compile_all(tables, 1 if chosen.quick else chosen.compilations)
    found = {}
    for depth, ways in tables.items():
        found[depth] = measure(
            depth, ways, programs.pop(depth), compiling[depth], chosen.rounds
        )

    show_short(found)
    show("Stacks of transformer blocks, loss and gradient", WAYS, found)
    plots(found, chosen.plots)
    shallow = {depth: costs for depth, costs in found.items() if depth <= SHALLOW}
    if shallow:
        show("Shallow stacks, loss and gradient", SHALLOW_WAYS, shallow)
    print(claims(claimed(found)))


if __name__ == "__main__":
    main()
