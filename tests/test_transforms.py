"""Every function under every transformation, over every kind of contents.

There are three lists: `FUNCTIONS`, `TRANSFORMS` and `CONTENTS`. A function and a
transformation are one cell of the table, with contents that take turns, so that every two
entries of different lists meet. A cell gives what the same program gives in plain Python, or it
is in `REFUSED`, with the error that it raises.
"""

import functools
import itertools
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from versions import NEW_NAMES, enable_x64

import loopax


def rows(tree):
    """The rows of the arrays in a tree. All else is in each."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]
    for i in range(len(arrays[0])):
        yield jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, tree)


def stack(trees):
    return jax.tree.map(
        lambda *leaves: jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0], *trees
    )


# -- contents ----------------------------------------------------------------------------


class Content(eqx.Module):
    """What goes through a loop beside `x`: how it starts, and how a step changes both."""

    start: Callable[[], Any]
    step: Callable[[Any, Array], tuple[Any, Array]]


class Counter(eqx.Module):
    """A layer that counts its calls."""

    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.int32(0))

    def __call__(self, x, state):
        count = state.get(self.index) + 1
        return x * count, state.set(self.index, count)


class Counters(eqx.Module):
    layers: list[Counter]

    def __init__(self):
        self.layers = [Counter(), Counter(), Counter()]


LINEAR = eqx.nn.Linear(2, 2, key=jr.key(0))
COUNTER, COUNTER_STATE = eqx.nn.make_with_state(Counter)()
COUNTERS, COUNTERS_STATE = eqx.nn.make_with_state(Counters)()


def fresh(state):
    """A state that has not been set yet, made where it is asked for."""
    return jax.tree.map(lambda leaf: leaf + 0, state)


def split_key(key, x):
    key, now = jr.split(key)
    return key, x + jr.uniform(now, x.shape, x.dtype)


CONTENTS = {
    "arrays": Content(
        lambda: {"rate": jnp.array([0.5, 2.0], jnp.float32), "n": jnp.int32(0)},
        lambda rest, x: ({"rate": rest["rate"] / 2, "n": rest["n"] + 1}, x * rest["rate"]),
    ),
    "modules": Content(lambda: (LINEAR, jnp.sin), lambda rest, x: (rest, rest[0](rest[1](x)))),
    "state": Content(lambda: fresh(COUNTER_STATE), lambda state, x: COUNTER(x, state)[::-1]),
    "keys": Content(lambda: jr.key(1), split_key),
    "empty": Content(
        lambda: {"none": None, "nothing": ((), []), "size": jnp.zeros((0, 2), jnp.float32)},
        lambda rest, x: (rest, x + 0.5),
    ),
}

# -- functions ---------------------------------------------------------------------------


class Step(eqx.Module):
    """One step. It holds an array, and functions."""

    scale: Array
    content: Content
    tap: Callable[[Array], Array]

    def __call__(self, tree):
        rest, x = self.content.step(tree["rest"], tree["x"])
        return {**tree, "rest": rest, "x": self.tap(jnp.tanh(x) * self.scale)}

    def numbered(self, i, tree):
        return self({**tree, "x": tree["x"] + i})

    def other(self, tree):
        return {**tree, "x": jnp.cos(tree["x"])}

    def counted(self, carry):
        n, tree = carry
        return n + 1, self(tree)

    def scanned(self, tree, x):
        tree = self({**tree, "x": tree["x"] + x})
        return tree, {"x": tree["x"], "name": tree["name"], "nothing": ()}

    def counted_scanned(self, carry, x):
        n, tree = carry
        tree, y = self.scanned(tree, x)
        return (n + 1, tree), y

    def written(self, carry, i):
        tree, history = carry
        tree = self({**tree, "x": tree["x"] + history[jnp.maximum(i - 1, 0)]})
        return (tree, history.at[i].set(tree["x"])), None

    def join(self, one, other):
        return {**other, "x": self.tap(one["x"] * other["x"] * self.scale)}


class Layer(eqx.Module):
    step: Step
    rest: Any

    def __call__(self, x, *, key=None):
        return self.step({"rest": self.rest, "x": x})["x"]


class StateLayer(eqx.Module):
    step: Step
    counter: Counter

    def __call__(self, x, state, *, key=None):
        x, state = self.counter(x, state)
        return self.step.tap(jnp.tanh(x) * self.step.scale), state


class Plain:
    """What the functions stand for."""

    @staticmethod
    def jit(function):
        return function

    @staticmethod
    def filter_scan(f, init, xs, until=lambda carry: False, **options):
        carry, ys = init, []
        for x in rows(xs):
            if until(carry):
                break
            carry, y = f(carry, x)
            ys.append(y)
        zeros = jax.tree.map(lambda y: jnp.zeros_like(y) if eqx.is_array(y) else y, ys[0])
        return carry, stack(ys + [zeros] * (len(xs) - len(ys)))

    @staticmethod
    def filter_while_loop(cond_fun, body_fun, init_val, **options):
        while cond_fun(init_val):
            init_val = body_fun(init_val)
        return init_val

    @staticmethod
    def filter_fori_loop(lower, upper, body_fun, init_val, **options):
        for i in range(lower, upper):
            init_val = body_fun(i, init_val)
        return init_val

    @staticmethod
    def filter_cond(pred, true_fun, false_fun, *operands):
        return true_fun(*operands) if pred else false_fun(*operands)

    @staticmethod
    def filter_switch(index, branches, *operands):
        return branches[int(index)](*operands)

    @staticmethod
    def filter_map(f, xs):
        return stack([f(x) for x in rows(xs)])

    @staticmethod
    def filter_associative_scan(fn, elems):
        # `fn` is given many at a time, and here one.
        results = list(
            rows(jax.tree.map(lambda a: a[:, None] if eqx.is_array(a) else a, elems))
        )
        for i in range(1, len(results)):
            results[i] = fn(results[i - 1], results[i])
        joined = stack(results)
        return jax.tree.map(lambda a: a[:, 0] if eqx.is_array(a) else a, joined)

    @staticmethod
    def stacked(layers, x):
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def stacked_with_state(layers, x, state):
        for layer in layers:
            x, state = layer(x, state)
        return x, [state.get(layer.counter.index) for layer in layers]


class Ours:
    """`loopax`, and what makes a number known only when the program runs."""

    jit = staticmethod(eqx.filter_jit)
    filter_scan = staticmethod(loopax.filter_scan)
    filter_while_loop = staticmethod(loopax.filter_while_loop)
    filter_fori_loop = staticmethod(loopax.filter_fori_loop)
    filter_cond = staticmethod(loopax.filter_cond)
    filter_switch = staticmethod(loopax.filter_switch)
    filter_map = staticmethod(loopax.filter_map)
    filter_associative_scan = staticmethod(loopax.filter_associative_scan)

    @staticmethod
    def stacked(layers, x):
        return loopax.nn.Stacked.from_layers(layers)(x)

    @staticmethod
    def stacked_with_state(layers, x, state):
        deep, state = loopax.nn.Stacked.from_layers(layers, state)
        x, state = deep(x, state)
        layers, state = deep.unstack(state)
        return x, [state.get(layer.counter.index) for layer in layers]


FEW = jnp.array([0.1, 0.2, 0.3], jnp.float32)


def fewer(limit, carry):
    return carry[0] < limit


def reached(limit, carry):
    return carry[0] >= limit


def scan(fl, step, tree, **options):
    return fl.filter_scan(step.scanned, tree, FEW, **options)


def scan_until(fl, step, tree, **options):
    until = functools.partial(reached, jnp.int32(2))
    init = jnp.int32(0), tree
    return fl.filter_scan(step.counted_scanned, init, FEW, until=until, **options)


def scan_with_buffers(fl, step, tree, **options):
    init = tree, jnp.zeros((3, 2), tree["x"].dtype).at[0].set(tree["x"])
    body = functools.partial(step.written)
    options |= {"buffers": lambda carry: carry[1]}
    return fl.filter_scan(body, init, jnp.arange(1, 3), **options)[0]


def while_loop(fl, step, tree, **options):
    cond = functools.partial(fewer, jnp.int32(3))
    return fl.filter_while_loop(cond, step.counted, (jnp.int32(0), tree), **options)


def fori_loop(fl, step, tree, **options):
    return fl.filter_fori_loop(0, 3, step.numbered, tree, **options)


def fori_loop_to_a_dynamic_bound(fl, step, tree, **options):
    def run(n, step, tree):
        return fl.filter_fori_loop(0, n, step.numbered, tree, **options)

    return fl.jit(run)(np.int32(3), step, tree)


def cond(fl, step, tree):
    pred = tree["x"][0] > 0
    return fl.filter_cond(pred, step, step.other, tree)


def switch(fl, step, tree):
    index = (tree["x"][0] > 0).astype(jnp.int32)
    return fl.filter_switch(index, [step.other, step], tree)


def map_(fl, step, tree):
    return fl.filter_map(step, stack([tree, {**tree, "x": 2 * tree["x"]}]))


def associative_scan(fl, step, tree):
    elems = [{**tree, "x": tree["x"] * n} for n in (1, 2, 3)]
    return fl.filter_associative_scan(step.join, stack(elems))


def stacked(fl, step, tree):
    if isinstance(tree["rest"], eqx.nn.State):
        layers = [StateLayer(step, counter) for counter in COUNTERS.layers]
        return fl.stacked_with_state(layers, tree["x"], fresh(COUNTERS_STATE))
    return fl.stacked([Layer(step, tree["rest"]) for _ in range(3)], tree["x"])


FUNCTIONS = {
    "scan": scan,
    "scan checkpointed": functools.partial(scan, kind="checkpointed"),
    "scan bounded": functools.partial(scan, kind="bounded"),
    "scan until": scan_until,
    "scan buffers": scan_with_buffers,
    "while_loop": while_loop,
    "while_loop max_steps": functools.partial(while_loop, max_steps=4),
    "while_loop bounded": functools.partial(while_loop, max_steps=4, kind="bounded"),
    "fori_loop": fori_loop,
    "fori_loop dynamic": fori_loop_to_a_dynamic_bound,
    "fori_loop max_steps": functools.partial(fori_loop_to_a_dynamic_bound, max_steps=4),
    "cond": cond,
    "switch": switch,
    "map": map_,
    "associative_scan": associative_scan,
    "Stacked": stacked,
}


def identity(x):
    return x


class Program:
    """A function of the table over contents, as a function of one array.

    `tap` is called in each step. The arrays of the result come by their paths; what was static
    in it is kept for the comparison.
    """

    def __init__(self, namespace, function, content):
        self.namespace = namespace
        self.function = FUNCTIONS[function]
        self.content = CONTENTS[content]
        self.statics = []

    def __call__(self, x, tap=identity):
        tree = {"x": x, "rest": self.content.start(), "name": "t", "function": jnp.sin}
        out = self.function(self.namespace, Step(jnp.cos(x), self.content, tap), tree)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(out)
        static = [leaf for _, leaf in leaves if not eqx.is_array(leaf) and leaf is not tap]
        self.statics.append((treedef, static))
        arrays = {jax.tree_util.keystr(k): v for k, v in leaves if eqx.is_array(v)}
        is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        return {k: jr.key_data(v) if is_key(v) else v for k, v in arrays.items()}

    def loss(self, x, tap=identity):
        leaves = self(x, tap).values()
        return sum(jnp.sum(a**2) for a in leaves if jnp.issubdtype(a.dtype, jnp.floating))


# -- transformations ---------------------------------------------------------------------

X = np.array([0.5, -0.25], np.float32)
XS = np.stack([X, [0.75, 1.0]]).astype(np.float32)
TRANSFORMS = {}


def to_give(reference):
    """Adds a transformation to the table, and what it gives of the plain program.

    Its docstring is what `docs/transforms.md` calls it.
    """

    def register(transform):
        TRANSFORMS[transform.__name__] = transform, reference
        return transform

    return register


def value(program):
    return program(jnp.asarray(X))


def value_of_each_row(program):
    return stack([program(jnp.asarray(x)) for x in XS])


def gradient(program):
    return jax.grad(program.loss)(X)


def gradient_of_each_row(program):
    return stack([jax.grad(program.loss)(x) for x in XS])


def value_and_tangent(program):
    return jax.jvp(program.loss, (X,), (2 * X,))


def jacobian(program):
    return jax.jacfwd(program.loss)(X)


def second_derivative(program):
    return jax.hessian(program.loss)(X)


def the_same(transform):
    """For what plain Python does too."""
    return to_give(lambda program: transform(program, lambda function: function))(
        functools.wraps(transform)(lambda program: transform(program, jax.jit))
    )


@to_give(value)
def eager(program):
    """none (eager)"""
    return program(jnp.asarray(X))


@to_give(value)
def jit(program):
    """`jax.jit`"""
    return jax.jit(program)(X)


@to_give(value)
def filter_jit(program):
    """`eqx.filter_jit`"""
    return eqx.filter_jit(program)(jnp.asarray(X))


@to_give(value_of_each_row)
def vmap(program):
    """`jax.vmap`"""
    return jax.vmap(program)(XS)


@to_give(value_of_each_row)
def filter_vmap(program):
    """`eqx.filter_vmap` with `in_axes` and `out_axes`"""
    function = eqx.filter_vmap(
        lambda tree: program(tree["x"]),
        in_axes=({"x": 1, "name": None},),
        out_axes=eqx.if_array(0),
    )
    return function({"x": jnp.asarray(XS.T), "name": "t"})


@to_give(lambda program: stack([value_of_each_row(program)] * 2))
def nested_vmap(program):
    """`vmap` of `vmap`"""
    return jax.jit(jax.vmap(jax.vmap(program, in_axes=-1)))(np.stack([XS.T, XS.T]))


@to_give(lambda program: stack([program(jnp.asarray(x), lambda x: x + 0.3) for x in XS]))
def vmap_with_a_collective(program):
    """`vmap` with a collective in the body"""
    tap = lambda x: x + 0.1 * jax.lax.psum(jax.lax.axis_index("i") + 1, "i").astype(x.dtype)
    return jax.jit(jax.vmap(lambda x: program(x, tap), axis_name="i"))(XS)


@to_give(value_of_each_row)
def shard_map(program):
    """`jax.shard_map`"""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    function = lambda xs: stack([program(x) for x in xs])
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    )(XS)


@to_give(gradient)
def grad(program):
    """`jax.grad`"""
    return jax.grad(program.loss)(X)


@to_give(gradient_of_each_row)
def vmap_of_grad(program):
    """`vmap` of `grad`"""
    return jax.jit(jax.vmap(jax.grad(program.loss)))(XS)


@to_give(gradient)
def filter_grad(program):
    """`eqx.filter_grad`"""
    tree = {"x": jnp.asarray(X), "name": "t"}
    return eqx.filter_jit(eqx.filter_grad(lambda tree: program.loss(tree["x"])))(tree)["x"]


@to_give(value_and_tangent)
def jvp(program):
    """`jax.jvp`"""
    return jax.jvp(program.loss, (X,), (2 * X,))


@to_give(value_and_tangent)
def filter_jvp(program):
    """`eqx.filter_jvp`"""
    return eqx.filter_jvp(jax.jit(program.loss), (X,), (2 * X,))


@to_give(value_and_tangent)
def linearize(program):
    """`jax.linearize`"""
    out, tangent = jax.linearize(jax.jit(program.loss), X)
    return out, tangent(2 * X)


@to_give(gradient)
def vjp(program):
    """`jax.vjp`"""
    return jax.vjp(jax.jit(program.loss), X)[1](jnp.float32(1))[0]


@to_give(jacobian)
def jacfwd(program):
    """`jax.jacfwd`"""
    return jax.jit(jax.jacfwd(program.loss))(X)


@to_give(jacobian)
def jacrev(program):
    """`jax.jacrev`"""
    return jax.jit(jax.jacrev(program.loss))(X)


@to_give(second_derivative)
def hessian(program):
    """`jax.hessian`"""
    return jax.jit(jax.hessian(program.loss))(X)


@to_give(gradient)
def checkpoint_of_dots(program):
    """`jax.checkpoint` with the policy `dots_saveable`"""
    policy = jax.checkpoint_policies.dots_saveable
    return jax.jit(jax.grad(jax.checkpoint(program.loss, policy=policy)))(X)


@to_give(gradient)
def checkpoint_of_names(program):
    """`eqx.filter_checkpoint` with `save_only_these_names`"""
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    loss = lambda x: program.loss(x, functools.partial(checkpoint_name, name="kept"))
    return jax.jit(jax.grad(eqx.filter_checkpoint(loss, policy=policy)))(X)


@jax.custom_vjp
def thrice_backwards(x):
    return jnp.sin(x)


thrice_backwards.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * x,))


@jax.custom_jvp
def thrice_forwards(x):
    return jnp.sin(x)


thrice_forwards.defjvp(lambda xs, ts: (jnp.sin(xs[0]), 3 * xs[0] * ts[0]))


@the_same
def custom_vjp(program, wrap):
    """`jax.custom_vjp`"""
    return wrap(jax.grad(lambda x: program.loss(x, thrice_backwards)))(X)


@the_same
def custom_jvp(program, wrap):
    """`jax.custom_jvp`"""
    loss = lambda x: program.loss(x, thrice_forwards)
    return wrap(lambda x: jax.jvp(loss, (x,), (x,))[1])(X)


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@to_give(lambda program: shapes(value(program)))
def eval_shape(program):
    """`jax.eval_shape`"""
    return jax.eval_shape(program, X)


@to_give(lambda program: shapes(value(program)))
def filter_eval_shape(program):
    """`eqx.filter_eval_shape`"""
    return eqx.filter_eval_shape(program, X)


@to_give(value)
def make_jaxpr(program):
    """`jax.make_jaxpr`"""
    jaxpr, out = jax.make_jaxpr(program, return_shape=True)(X)
    leaves = jax.extend.core.jaxpr_as_fun(jaxpr)(X)
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


@to_give(value)
def ahead_of_time(program):
    """`lower().compile()` with `jax.named_scope`"""

    def tap(x):
        with jax.named_scope("within"):
            return x * jnp.ones_like(x)

    lowered = jax.jit(lambda x: program(x, tap)).lower(X)
    # The name is found again in what was lowered.
    assert "within" in lowered.as_text(debug_info=True)
    return lowered.compile()(X)


@to_give(value)
def export(program):
    """`jax.export`"""
    exported = jax.export.export(jax.jit(program))(jnp.asarray(X))
    return jax.export.deserialize(exported.serialize()).call(jnp.asarray(X))


@to_give(value)
def donated(program):
    """`donate_argnums`"""
    with warnings.catch_warnings():
        # Of an output of another shape there is no use for it.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return jax.jit(program, donate_argnums=0)(jnp.array(X))


@to_give(value)
def disable_jit(program):
    """`jax.disable_jit`"""
    with jax.disable_jit():
        return program(jnp.asarray(X))


def in_x64(program):
    with enable_x64():
        return program(jnp.asarray(X, jnp.float64))


@to_give(in_x64)
def x64(program):
    """`jax.enable_x64`"""
    with enable_x64():
        return jax.jit(program)(X.astype(np.float64))


@to_give(value)
def debug_nans(program):
    """`jax.debug_nans`"""
    with jax.debug_nans(True):
        return jax.jit(program)(X)


@to_give(lambda program: "FloatingPointError")
def debug_nans_finds_one(program):
    """a NaN that `jax.debug_nans` finds"""
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        jax.jit(lambda x: program(x, lambda x: jnp.log(-1 - x**2)))(X)
    return error.type.__name__


@to_give(value)
def checking_leaks(program):
    """`jax.checking_leaks`"""
    with jax.checking_leaks():
        return jax.jit(program)(X)


def seen(program, wrap, callback):
    """The result, and what a callback in each step saw, in order."""
    calls = []

    def tap(x):
        callback(lambda x: calls.append(np.ravel(x)), x)
        return x

    out = wrap(lambda x: program(x, tap))(jnp.asarray(X))
    jax.effects_barrier()
    return out, calls


@the_same
def ordered_io_callback(program, wrap):
    """`io_callback` in order"""
    return seen(program, wrap, lambda f, x: io_callback(f, None, x, ordered=True))


@the_same
def debug_callback(program, wrap):
    """`jax.debug.callback`"""
    out, calls = seen(program, wrap, jax.debug.callback)
    return out, sorted(calls, key=lambda x: x.tolist())


@the_same
def pure_callback(program, wrap):
    """`jax.pure_callback`"""

    def tap(x):
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.tanh, kind, x, vmap_method="sequential")

    return wrap(lambda x: program(x, tap))(X)


def with_references(transform):
    return the_same(transform) if hasattr(jax, "new_ref") else transform


@with_references
def reference_in_the_closure(program, wrap):
    """in the closure"""

    def run(x):
        ref = jax.new_ref(jnp.zeros(2))

        def tap(x):
            ref[...] += x.reshape(2)
            return x + ref[0]

        return program(x, tap), ref[...]

    return wrap(run)(jnp.asarray(X))


@with_references
def reference_as_operand(program, wrap):
    """in an operand"""

    def run(x):
        ref = jax.new_ref(jnp.zeros(2))

        def add(ref, x):
            ref[...] += x.reshape(2)
            return x + ref[0]

        return program(x, jax.tree_util.Partial(add, ref)), ref[...]

    return wrap(run)(jnp.asarray(X))


REFUSED = {}

# Versions of JAX without references are without these rows.
REFERENCES = [name for name in TRANSFORMS if name.startswith("reference")]
AGAIN = "scan checkpointed", "scan until", "while_loop max_steps", "fori_loop max_steps"
IN_REVERSE = [
    "grad",
    "vmap_of_grad",
    "filter_grad",
    "vjp",
    "jacrev",
    "hessian",
    "checkpoint_of_dots",
    "checkpoint_of_names",
    "custom_vjp",
]
# With the beginning of the line in `docs/transforms.md`.
REASONS = {
    "Mutable references in a `filter_scan`": (
        REFERENCES,
        AGAIN,
        loopax.ArgumentError,
        'no use for mutable references.*kind="lax"',
    ),
    "A mutable reference in the layers": (
        [name for name in REFERENCES if "operand" in name],
        ["Stacked"],
        loopax.ArgumentError,
        "mutable reference in layers.0., of which there can be no stack",
    ),
    "A mutable reference in what `eqx.filter_jit` is given": (
        [name for name in REFERENCES if "operand" in name],
        ["fori_loop dynamic", "fori_loop max_steps"],
        ValueError,
        "Non-hashable static arguments",
    ),
    "`jax.export` of a `filter_fori_loop` with `max_steps`": (
        ["export"],
        ["fori_loop max_steps"],
        NotImplementedError,
        "serialization of host_callbacks",
    ),
    "Reverse mode through `filter_while_loop`, or `filter_fori_loop`": (
        IN_REVERSE,
        ["while_loop", "fori_loop dynamic"],
        ValueError,
        r"filter_\w+_loop: .*max_steps",
    ),
}
for names, functions, error, match in REASONS.values():
    REFUSED |= dict.fromkeys(itertools.product(names, functions), (error, match))


# What does not work with JAX 0.7.
OF_OLD = {
    **dict.fromkeys(
        itertools.product(["hessian", "jacrev"], ["scan bounded", "while_loop bounded"]),
        "keys in such a loop cannot be lowered",
    ),
    ("hessian", "while_loop"): "an error within JAX comes before the refusal",
    ("hessian", "fori_loop dynamic"): "an error within JAX comes before the refusal",
    ("reference_as_operand", "fori_loop dynamic"): "`eqx.filter_jit` takes references",
    ("reference_as_operand", "fori_loop max_steps"): "`eqx.filter_jit` takes references",
}


# -- the table ---------------------------------------------------------------------------


def cells():
    for (i, function), (j, transform) in itertools.product(
        enumerate(FUNCTIONS), enumerate(TRANSFORMS)
    ):
        yield transform, function, list(CONTENTS)[(i + j) % len(CONTENTS)]


CELLS = list(cells())


@functools.cache
def wanted(reference, function, content):
    program = Program(Plain, function, content)
    return reference(program), program.statics[-1] if program.statics else None


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if isinstance(b, str):
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not isinstance(b, jax.ShapeDtypeStruct):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("transform", "function", "content"), CELLS)
def test_a_cell_is_plain_python_or_says_why_not(transform, function, content):
    if not NEW_NAMES and (transform, function) in OF_OLD:
        pytest.skip(OF_OLD[transform, function])
    program = Program(Ours, function, content)
    run, reference = TRANSFORMS[transform]
    if (transform, function) in REFUSED:
        error, match = REFUSED[transform, function]
        with pytest.raises(error, match=match):
            run(program)
        return
    got = run(program)
    want, static = wanted(reference, function, content)
    assert_same(got, want)
    if static is not None and program.statics:
        assert program.statics[-1] == static


def test_every_two_entries_meet():
    met = {pair for cell in CELLS for pair in itertools.combinations(cell, 2)}
    lists = TRANSFORMS, FUNCTIONS, CONTENTS
    for one, other in itertools.combinations(lists, 2):
        assert met.issuperset(itertools.product(one, other))


def test_what_is_refused_is_in_the_table():
    assert REFUSED.keys() <= {cell[:2] for cell in CELLS}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_plain_programs_are_no_constants(function, content):
    out = wanted(value_of_each_row, function, content)[0]
    assert any(not np.allclose(a[0], a[1]) for a in jax.tree.leaves(out))


# -- the page ----------------------------------------------------------------------------


def page():
    """The lines of the two tables: what there is, and what is refused."""
    text = (pathlib.Path(__file__).parents[1] / "docs" / "transforms.md").read_text()
    for part in text.split("## What is refused"):
        lines = [line for line in part.splitlines() if line.startswith("| ")]
        yield [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no references")
def test_the_page_has_the_lines_of_the_table():
    there, refused = page()
    assert sorted(name for _, names in there for name in names.split(", ")) == sorted(
        run.__doc__ for run, _ in TRANSFORMS.values()
    )
    assert len(refused) == len(REASONS)
    for what, error, _ in refused:
        (reason,) = (each for each in REASONS if what.startswith(each))
        assert f"`{REASONS[reason][2].__name__}`" in error
