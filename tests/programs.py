"""Programs over Modules, each to be written with our functions or with partitions by hand."""

import re
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax

import loopax


def hand_scan(f, init, xs, **options):
    """What one writes today: partition, close over the static part, combine."""
    dynamic, static = eqx.partition(init, eqx.is_array)
    dynamic_xs, static_xs = eqx.partition(xs, eqx.is_array)

    def body(dynamic, x):
        carry, y = f(eqx.combine(dynamic, static), eqx.combine(x, static_xs))
        return eqx.filter(carry, eqx.is_array), y

    out, ys = lax.scan(body, dynamic, dynamic_xs, **options)
    return eqx.combine(out, static), ys


def hand_while(cond_fun, body_fun, init):
    dynamic, static = eqx.partition(init, eqx.is_array)

    def cond(dynamic):
        return cond_fun(eqx.combine(dynamic, static))

    def body(dynamic):
        return eqx.filter(body_fun(eqx.combine(dynamic, static)), eqx.is_array)

    return eqx.combine(lax.while_loop(cond, body, dynamic), static)


def hand_fori(lower, upper, body_fun, init):
    dynamic, static = eqx.partition(init, eqx.is_array)

    def body(i, dynamic):
        return eqx.filter(body_fun(i, eqx.combine(dynamic, static)), eqx.is_array)

    return eqx.combine(lax.fori_loop(lower, upper, body, dynamic), static)


def hand_branches(branches, operands):
    dynamic, static = eqx.partition(operands, eqx.is_array)
    held = []

    def over(branch):
        def run(dynamic):
            out = branch(*eqx.combine(dynamic, static))
            arrays, rest = eqx.partition(out, eqx.is_array)
            held.append(rest)
            return arrays

        return run

    return [over(branch) for branch in branches], dynamic, held


def hand_switch(index, branches, *operands):
    bodies, dynamic, held = hand_branches(branches, operands)
    return eqx.combine(lax.switch(index, bodies, dynamic), held[0])


def hand_cond(pred, true_fun, false_fun, *operands):
    bodies, dynamic, held = hand_branches((true_fun, false_fun), operands)
    return eqx.combine(lax.cond(pred, *bodies, dynamic), held[0])


def hand_map(f, xs, **options):
    dynamic, static = eqx.partition(xs, eqx.is_array)
    return lax.map(lambda x: f(eqx.combine(x, static)), dynamic, **options)


def hand_associative_scan(fn, elems, **options):
    dynamic, static = eqx.partition(elems, eqx.is_array)

    def combine(left, right):
        out = fn(eqx.combine(left, static), eqx.combine(right, static))
        return eqx.filter(out, eqx.is_array)

    return eqx.combine(lax.associative_scan(combine, dynamic, **options), static)


class Impl(NamedTuple):
    """The functions that a program is written with."""

    scan: Callable
    while_loop: Callable
    fori_loop: Callable
    cond: Callable
    switch: Callable
    map: Callable
    associative_scan: Callable


HAND = Impl(
    hand_scan,
    hand_while,
    hand_fori,
    hand_cond,
    hand_switch,
    hand_map,
    hand_associative_scan,
)
OURS = Impl(
    loopax.filter_scan,
    loopax.filter_while_loop,
    loopax.filter_fori_loop,
    loopax.filter_cond,
    loopax.filter_switch,
    loopax.filter_map,
    loopax.filter_associative_scan,
)

NET = eqx.nn.MLP(4, 4, 8, 2, key=jr.key(0))
LAYERS = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 4, 8, 1, key=key))(jr.split(jr.key(1), 3))
XS = jr.normal(jr.key(2), (5, 4))


class Cell(eqx.Module):
    net: eqx.nn.MLP

    def __call__(self, carry, x):
        carry = jnp.tanh(self.net(carry) + x)
        return carry, carry


class Settled(eqx.Module):
    target: eqx.nn.MLP

    def __call__(self, carry):
        return jnp.sum(self.target(carry[1])) < 3.0


def module_in_carry(lx):
    return lambda net, xs: lx.scan(lambda c, x: (c, c(x)), net, xs)[1]


def trained_module_in_carry(lx):
    def step(net, x):
        loss, grads = eqx.filter_value_and_grad(lambda n: jnp.sum(n(x) ** 2))(net)
        return eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    return lambda net, xs: eqx.filter(lx.scan(step, net, xs), eqx.is_array)


def module_in_xs(lx):
    def run(net, xs):
        return lx.scan(lambda h, layer: (layer(h) + net(h), None), xs[0], LAYERS)[0]

    return run


def module_as_body(lx):
    return lambda net, xs: lx.scan(Cell(net), xs[0], xs)


def module_in_while(lx):
    def run(net, xs):
        return lx.while_loop(
            lambda c: c[2] < 4,
            lambda c: (c[0], c[0](c[1]), c[2] + 1),
            (net, xs[0], 0 * jnp.int32(1)),
        )[1]

    return run


def module_as_predicate(lx):
    def run(net, xs):
        return lx.while_loop(Settled(net), lambda c: (c[0], c[0](c[1]) + 1), (net, xs[0]))[1]

    return run


def module_in_fori(lx):
    return lambda net, xs: lx.fori_loop(
        0, 4, lambda i, c: (c[0], c[0](c[1]) + i), (net, xs[0])
    )[1]


def dynamic_fori(lx):
    def run(net, xs):
        n = jnp.sum(xs > 0)
        return lx.fori_loop(0, n, lambda i, c: (c[0], c[0](c[1]) + i), (net, xs[0]))[1]

    return run


def nested(lx):
    def inner(net, x):
        body = lambda c: (c[0], jnp.tanh(c[0](c[1])), c[2] + 1)
        return lx.while_loop(lambda c: c[2] < 2, body, (net, x, jnp.int32(0)))[1]

    def outer(c, x):
        return (c[0], c[1] + inner(c[0], x)), c[1]

    return lambda net, xs: lx.scan(outer, (net, xs[0]), xs)[1]


def under_vmap(lx):
    run = module_in_while(lx)
    return lambda net, xs: jax.vmap(lambda x: run(net, x[None]))(xs)


def predicate_under_vmap(lx):
    run = module_as_predicate(lx)
    return lambda net, xs: jax.vmap(lambda x: run(net, x[None]))(xs)


def body_under_grad(lx):
    run = module_as_body(lx)
    return eqx.filter_grad(lambda net, xs: jnp.sum(run(net, xs)[0]))


def carry_under_grad(lx):
    run = module_in_carry(lx)
    return eqx.filter_grad(lambda net, xs: jnp.sum(run(net, xs)))


def layers_under_vmap_of_grad(lx):
    run = module_in_xs(lx)
    grad = eqx.filter_grad(lambda net, x: jnp.sum(run(net, x[None])))
    return lambda net, xs: jax.vmap(lambda x: eqx.filter(grad(net, x), eqx.is_array))(xs)


class Affine(eqx.Module):
    a: jax.Array
    b: jax.Array
    name: str


def modules_as_branches(lx):
    wide = eqx.nn.MLP(4, 4, 16, 1, key=jr.key(3))
    return lambda net, xs: lx.cond(xs[0, 0] > 0, net, wide, xs[1])


def module_as_operand(lx):
    def run(net, xs):
        one = lambda net, x: (net, net(x))
        two = lambda net, x: (net, net(net(x)))
        return lx.switch(jnp.sum(xs > 0), [one, two, one], net, xs[0])[1]

    return run


def branches_under_vmap_of_grad(lx):
    def loss(net, x):
        return jnp.sum(lx.cond(x[0] > 0, net, lambda x: jnp.sin(x), x))

    grad = eqx.filter_grad(loss)
    return lambda net, xs: jax.vmap(lambda x: eqx.filter(grad(net, x), eqx.is_array))(xs)


def module_mapped(lx):
    return lambda net, xs: lx.map(net, xs)


def module_mapped_in_batches(lx):
    return lambda net, xs: lx.map(net, jnp.concatenate([xs, xs]), batch_size=5)


def associative_modules(lx):
    def then(left, right):
        return Affine(left.a * right.a, right.a * left.b + right.b, left.name)

    def run(net, xs):
        elems = Affine(jax.vmap(net)(xs), xs, "recurrence")
        return lx.associative_scan(then, elems).b

    return run


PROGRAMS = [
    module_in_carry,
    trained_module_in_carry,
    module_in_xs,
    module_as_body,
    module_in_while,
    module_as_predicate,
    module_in_fori,
    dynamic_fori,
    nested,
    under_vmap,
    predicate_under_vmap,
    body_under_grad,
    carry_under_grad,
    layers_under_vmap_of_grad,
    modules_as_branches,
    module_as_operand,
    branches_under_vmap_of_grad,
    module_mapped,
    module_mapped_in_batches,
    associative_modules,
]


def optimised(function, *args):
    """The optimised program of a function of arrays, as text."""
    text = jax.jit(function).lower(*args).compile().as_text()
    # Where each operation was written is all that may differ.
    text = re.sub(r",?\s*(metadata|stack_frame_id|frontend_attributes)=\{[^}]*\}", "", text)
    return re.sub(r"\b(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text)
