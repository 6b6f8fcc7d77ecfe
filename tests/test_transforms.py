"""Every function under every transformation, against plain Python.

A row of the table is a program, written once against a namespace of control flow. It is run
with `loopax` under a transformation, and with `Plain`, which is Python's own control flow,
without one where that would be in the way.
"""

import types

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

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


# -- the two namespaces ------------------------------------------------------------------


class Plain:
    """What the functions stand for."""

    @staticmethod
    def jit(function):
        return function

    @staticmethod
    def filter_scan(f, init, xs):
        carry, ys = init, []
        for x in rows(xs):
            carry, y = f(carry, x)
            ys.append(y)
        return carry, stack(ys)

    @staticmethod
    def filter_while_loop(cond_fun, body_fun, init_val):
        while cond_fun(init_val):
            init_val = body_fun(init_val)
        return init_val

    @staticmethod
    def filter_fori_loop(lower, upper, body_fun, init_val):
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
        first, *rest = rows(elems)
        results = [first]
        for elem in rest:
            results.append(fn(results[-1], elem))
        return stack(results)


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


# -- programs ----------------------------------------------------------------------------

PROGRAMS = {}


def program(reverse=True):
    """Adds a row to the table. `reverse`: whether reverse mode goes through it."""

    def register(function):
        PROGRAMS[function.__name__] = (function, reverse)
        return function

    return register


class Recurrent(eqx.Module):
    """A network as the body of a scan."""

    net: eqx.nn.MLP
    name: str = "recurrent"

    def __call__(self, carry, x):
        carry = {**carry, "h": jnp.tanh(self.net(carry["h"]) + x)}
        return carry, {"h": 2 * carry["h"], "tag": self.name}

    def step(self, carry):
        return {**carry, "h": self.net(carry["h"]), "n": carry["n"] + 1}

    def indexed(self, i, carry):
        return {**carry, "h": jnp.tanh(self.net(carry["h"]) + i)}


class Fewer(eqx.Module):
    """A predicate that holds an array."""

    limit: Array
    name: str = "fewer"

    def __call__(self, carry):
        return carry["n"] < self.limit


@program()
def scan_over_a_carry(fl, net, x):
    def step(carry, x):
        h = jnp.tanh(carry["net"](carry["h"]) + x)
        return {**carry, "h": h, "n": carry["n"] + 1}, {"h": h, "tag": carry["tag"]}

    init = {"net": net, "h": x, "tag": "t", "rate": 0.5, "n": jnp.int32(0)}
    carry, ys = fl.filter_scan(step, init, jnp.stack([x, 2 * x, -x]))
    return {"net": carry["net"], "h": carry["h"], "ys": ys["h"], "n": carry["n"]}


@program()
def scan_over_modules(fl, net, x):
    def step(h, layer):
        return jnp.tanh(layer["net"](h)) * len(layer["name"]), h

    layers = stack([net, jax.tree.map(lambda w: w * 2 if eqx.is_array(w) else w, net)])
    return fl.filter_scan(step, x, {"net": layers, "name": "layers"})


@program()
def scan_with_a_module_as_body(fl, net, x):
    xs = jnp.stack([x, 2 * x])
    carry, ys = fl.filter_scan(Recurrent(net), {"h": x, "name": "t"}, xs)
    return carry["h"], ys["h"]


@program(reverse=False)
def while_loop_over_a_carry(fl, net, x):
    def body(carry):
        return {**carry, "h": carry["net"](carry["h"]), "n": carry["n"] + 1}

    init = {"net": net, "h": x, "name": "t", "limit": 3, "n": jnp.int32(0)}
    carry = fl.filter_while_loop(lambda c: c["n"] < c["limit"], body, init)
    return {"net": carry["net"], "h": carry["h"], "n": carry["n"]}


@program(reverse=False)
def while_loop_with_modules_as_functions(fl, net, x):
    init = {"h": x, "n": jnp.int32(0), "name": "t"}
    return fl.filter_while_loop(Fewer(jnp.int32(3)), Recurrent(net).step, init)["h"]


@program()
def fori_loop_over_a_carry(fl, net, x):
    def body(i, carry):
        return {**carry, "h": jnp.tanh(carry["net"](carry["h"]) + i)}

    carry = fl.filter_fori_loop(0, 3, body, {"net": net, "h": x, "name": "t"})
    return {"net": carry["net"], "h": carry["h"]}


@program()
def fori_loop_with_a_module_as_body(fl, net, x):
    init = {"h": x, "name": "t"}
    return fl.filter_fori_loop(0, 3, Recurrent(net).indexed, init)["h"]


@program(reverse=False)
def fori_loop_with_a_dynamic_bound(fl, net, x):
    def body(i, carry):
        return {**carry, "h": jnp.tanh(carry["net"](carry["h"]) + i)}

    def run(n, net, x):
        return fl.filter_fori_loop(0, n, body, {"net": net, "h": x, "name": "t"})["h"]

    return fl.jit(run)(np.int32(3), net, x)


@program()
def cond_between_modules(fl, net, x):
    def scaled(net, x, rate):
        return {"h": net(x) * rate, "net": net, "name": "t"}

    def plain(net, x, rate):
        return {"h": jnp.sin(x), "net": net, "name": "t"}

    out = fl.filter_cond(jnp.sum(x) > 0, scaled, plain, net, x, 0.5)
    return {"h": out["h"], "net": out["net"]}


@program()
def switch_with_modules_as_branches(fl, net, x):
    branches = [jnp.sin, net, eqx.nn.Lambda(jnp.cos)]
    return fl.filter_switch((x[0] > 0).astype(int), branches, x)


@program()
def map_over_rows(fl, net, x):
    def row(x):
        return {"h": x["net"](x["x"]), "name": x["name"]}

    layers = stack([net, jax.tree.map(lambda w: w * 2 if eqx.is_array(w) else w, net)])
    xs = {"net": layers, "x": jnp.stack([x, 2 * x]), "name": "t"}
    return fl.filter_map(row, xs)["h"]


class Affine(eqx.Module):
    """Maps composed by an associative operation."""

    scale: Array
    shift: Array
    name: str

    def then(self, other):
        shift = other.scale * self.shift + other.shift
        return Affine(self.scale * other.scale, shift, self.name)


@program()
def associative_scan_of_modules(fl, net, x):
    elems = Affine(jnp.stack([net(x), x, x + 1]), jnp.stack([x, net(x), -x]), "t")
    return fl.filter_associative_scan(Affine.then, elems)


# -- transformations ---------------------------------------------------------------------

NET = eqx.nn.MLP(2, 2, 3, 1, activation=jnp.tanh, key=jr.key(0))
X = jnp.array([0.5, -1.0])
XS = jnp.stack([X, X + 1])
WEIGHTS, STATIC = eqx.partition(NET, eqx.is_array)
ENSEMBLE = jax.tree.map(lambda w: jnp.stack([w, -2 * w]), WEIGHTS)


class Subject:
    """A program as a function of arrays, and as a function of any trees."""

    def __init__(self, function, namespace):
        self.function = function
        self.namespace = namespace

    def of_trees(self, net, x):
        return eqx.filter(self.function(self.namespace, net, x), eqx.is_array)

    def of_arrays(self, weights, x):
        return self.of_trees(eqx.combine(weights, STATIC), x)

    def loss(self, weights, x):
        leaves = jax.tree.leaves(self.of_arrays(weights, x))
        floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum(jnp.sum(leaf**2) for leaf in floats)

    def loss_of_trees(self, trees):
        return self.loss(eqx.filter(trees[0], eqx.is_array), trees[1])


def value(plain):
    return plain.of_arrays(WEIGHTS, X)


def value_of_each_row(plain):
    return stack([plain.of_arrays(WEIGHTS, x) for x in XS])


def value_of_each_member(plain):
    return stack([plain.of_arrays(weights, X) for weights in rows(ENSEMBLE)])


def gradient(plain):
    return jax.grad(plain.loss, argnums=(0, 1))(WEIGHTS, X)


def gradient_of_each_row(plain):
    return stack([jax.grad(plain.loss, argnums=(0, 1))(WEIGHTS, x) for x in XS])


def value_and_tangent(plain):
    return jax.jvp(plain.loss, (WEIGHTS, X), (WEIGHTS, X))


def shapes(plain):
    out = plain.of_arrays(WEIGHTS, X)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), out)


def eager(ours):
    return ours.of_arrays(WEIGHTS, X)


def jit(ours):
    return jax.jit(ours.of_arrays)(WEIGHTS, X)


def filter_jit(ours):
    return eqx.filter_jit(ours.of_trees)(NET, X)


def vmap(ours):
    return jax.vmap(ours.of_arrays, (None, 0))(WEIGHTS, XS)


def vmap_of_jit_over_weights(ours):
    return jax.vmap(jax.jit(ours.of_arrays), (0, None))(ENSEMBLE, X)


def filter_vmap(ours):
    ensemble = eqx.combine(ENSEMBLE, STATIC)
    return eqx.filter_vmap(ours.of_trees, in_axes=(eqx.if_array(0), None))(ensemble, X)


def shard_map(ours):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.shard_map(
        lambda weights, xs: stack([ours.of_arrays(weights, x) for x in xs]),
        mesh=mesh,
        in_specs=(P(), P("i")),
        out_specs=P("i"),
        check_vma=False,
    )
    return jax.jit(function)(WEIGHTS, XS)


def grad(ours):
    return jax.grad(ours.loss, argnums=(0, 1))(WEIGHTS, X)


def jit_of_grad(ours):
    return jax.jit(jax.grad(ours.loss, argnums=(0, 1)))(WEIGHTS, X)


def vmap_of_grad(ours):
    return jax.vmap(jax.grad(ours.loss, argnums=(0, 1)), (None, 0))(WEIGHTS, XS)


def filter_grad(ours):
    net, x = eqx.filter_grad(ours.loss_of_trees)((NET, X))
    return eqx.filter(net, eqx.is_array), x


def grad_of_checkpoint(ours):
    return jax.grad(jax.checkpoint(ours.loss), argnums=(0, 1))(WEIGHTS, X)


def grad_of_filter_checkpoint(ours):
    net, x = eqx.filter_grad(eqx.filter_checkpoint(ours.loss_of_trees))((NET, X))
    return eqx.filter(net, eqx.is_array), x


def jvp(ours):
    return jax.jvp(ours.loss, (WEIGHTS, X), (WEIGHTS, X))


def jit_of_jvp(ours):
    return jax.jit(lambda w, x: jax.jvp(ours.loss, (w, x), (w, x)))(WEIGHTS, X)


def filter_jvp(ours):
    weights = (eqx.filter(NET, eqx.is_inexact_array), X)
    return eqx.filter_jvp(ours.loss_of_trees, ((NET, X),), (weights,))


def linearize(ours):
    out, tangent = jax.linearize(ours.loss, WEIGHTS, X)
    return out, tangent(WEIGHTS, X)


def checkpoint(ours):
    return jax.checkpoint(ours.of_arrays)(WEIGHTS, X)


def filter_checkpoint(ours):
    return eqx.filter_checkpoint(ours.of_trees)(NET, X)


def disable_jit(ours):
    with jax.disable_jit():
        return ours.of_arrays(WEIGHTS, X)


def eval_shape(ours):
    return jax.eval_shape(ours.of_arrays, WEIGHTS, X)


def filter_eval_shape(ours):
    return eqx.filter_eval_shape(ours.of_trees, NET, X)


def make_jaxpr(ours):
    jaxpr, out = jax.make_jaxpr(ours.of_arrays, return_shape=True)(WEIGHTS, X)
    leaves = jax.extend.core.jaxpr_as_fun(jaxpr)(*jax.tree.leaves((WEIGHTS, X)))
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


def export(ours):
    # Modules do not go into what is exported.
    leaves, treedef = jax.tree.flatten((WEIGHTS, X))
    function = jax.jit(
        lambda leaves: jax.tree.leaves(ours.of_arrays(*treedef.unflatten(leaves)))
    )
    exported = jax.export.export(function)(leaves)
    out = jax.eval_shape(ours.of_arrays, WEIGHTS, X)
    return jax.tree.unflatten(jax.tree.structure(out), exported.call(leaves))


# What each transformation of a program has to give. Those of the second table go through it
# in reverse.
TRANSFORMS = {
    eager: value,
    jit: value,
    filter_jit: value,
    vmap: value_of_each_row,
    vmap_of_jit_over_weights: value_of_each_member,
    filter_vmap: value_of_each_member,
    shard_map: value_of_each_row,
    jvp: value_and_tangent,
    jit_of_jvp: value_and_tangent,
    filter_jvp: value_and_tangent,
    linearize: value_and_tangent,
    checkpoint: value,
    filter_checkpoint: value,
    disable_jit: value,
    eval_shape: shapes,
    filter_eval_shape: shapes,
    make_jaxpr: value,
    export: value,
}
REVERSE = {
    grad: gradient,
    jit_of_grad: gradient,
    vmap_of_grad: gradient_of_each_row,
    filter_grad: gradient,
    grad_of_checkpoint: gradient,
    grad_of_filter_checkpoint: gradient,
}

_wanted = {}


def wanted(name, reference):
    """What `reference` says. Worked out once."""
    if (name, reference) not in _wanted:
        _wanted[name, reference] = reference(Subject(PROGRAMS[name][0], Plain))
    return _wanted[name, reference]


def assert_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not isinstance(b, jax.ShapeDtypeStruct):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def name_of(value):
    return value.__name__ if isinstance(value, types.FunctionType) else str(value)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=name_of)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_transformed_program_is_the_plain_one(name, transform):
    got = transform(Subject(PROGRAMS[name][0], Ours))
    assert_close(got, wanted(name, TRANSFORMS[transform]))


@pytest.mark.parametrize("transform", REVERSE, ids=name_of)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if PROGRAMS[name][1]])
def test_reverse_mode_is_that_of_the_plain_program(name, transform):
    got = transform(Subject(PROGRAMS[name][0], Ours))
    assert_close(got, wanted(name, REVERSE[transform]))


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_are_those_of_the_plain_program(outer):
    def second(namespace):
        loss = Subject(scan_over_a_carry, namespace).loss
        return outer(jax.grad(loss, argnums=1), argnums=1)(WEIGHTS, X)

    assert_close(second(Ours), second(Plain))


@pytest.mark.parametrize("transform", [grad, jit_of_grad], ids=name_of)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if not PROGRAMS[name][1]])
def test_where_there_is_no_reverse_mode_the_error_names_the_loop(name, transform):
    with pytest.raises(ValueError, match="while_loop"):
        transform(Subject(PROGRAMS[name][0], Ours))


def test_the_plain_programs_are_no_constants():
    for name in PROGRAMS:
        one, other = wanted(name, value_of_each_row), wanted(name, value_of_each_member)
        for tree in (one, other):
            assert any(not np.allclose(a[0], a[1]) for a in jax.tree.leaves(tree))
