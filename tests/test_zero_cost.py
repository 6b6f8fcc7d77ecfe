"""The compiled program is that of the partition written by hand, byte for byte."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
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


HAND = (hand_scan, hand_while, hand_fori)
OURS = (loopax.filter_scan, loopax.filter_while_loop, loopax.filter_fori_loop)

NET = eqx.nn.MLP(4, 4, 8, 2, key=jr.key(0))
LAYERS = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 4, 8, 1, key=key))(
    jr.split(jr.key(1), 3)
)
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


def module_in_carry(scan, while_loop, fori_loop):
    return lambda net, xs: scan(lambda c, x: (c, c(x)), net, xs)[1]


def trained_module_in_carry(scan, while_loop, fori_loop):
    def step(net, x):
        loss, grads = eqx.filter_value_and_grad(lambda n: jnp.sum(n(x) ** 2))(net)
        return eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    return lambda net, xs: eqx.filter(scan(step, net, xs), eqx.is_array)


def module_in_xs(scan, while_loop, fori_loop):
    def run(net, xs):
        return scan(lambda h, layer: (layer(h) + net(h), None), xs[0], LAYERS)[0]

    return run


def module_as_body(scan, while_loop, fori_loop):
    return lambda net, xs: scan(Cell(net), xs[0], xs)


def module_in_while(scan, while_loop, fori_loop):
    def run(net, xs):
        return while_loop(
            lambda c: c[2] < 4, lambda c: (c[0], c[0](c[1]), c[2] + 1), (net, xs[0], 0 * jnp.int32(1))
        )[1]

    return run


def module_as_predicate(scan, while_loop, fori_loop):
    def run(net, xs):
        return while_loop(Settled(net), lambda c: (c[0], c[0](c[1]) + 1), (net, xs[0]))[1]

    return run


def module_in_fori(scan, while_loop, fori_loop):
    return lambda net, xs: fori_loop(0, 4, lambda i, c: (c[0], c[0](c[1]) + i), (net, xs[0]))[1]


def dynamic_fori(scan, while_loop, fori_loop):
    def run(net, xs):
        n = jnp.sum(xs > 0)
        return fori_loop(0, n, lambda i, c: (c[0], c[0](c[1]) + i), (net, xs[0]))[1]

    return run


def nested(scan, while_loop, fori_loop):
    def inner(net, x):
        body = lambda c: (c[0], jnp.tanh(c[0](c[1])), c[2] + 1)
        return while_loop(lambda c: c[2] < 2, body, (net, x, jnp.int32(0)))[1]

    def outer(c, x):
        return (c[0], c[1] + inner(c[0], x)), c[1]

    return lambda net, xs: scan(outer, (net, xs[0]), xs)[1]


def under_vmap(scan, while_loop, fori_loop):
    run = module_in_while(scan, while_loop, fori_loop)
    return lambda net, xs: jax.vmap(lambda x: run(net, x[None]))(xs)


def predicate_under_vmap(scan, while_loop, fori_loop):
    run = module_as_predicate(scan, while_loop, fori_loop)
    return lambda net, xs: jax.vmap(lambda x: run(net, x[None]))(xs)


def body_under_grad(scan, while_loop, fori_loop):
    run = module_as_body(scan, while_loop, fori_loop)
    return eqx.filter_grad(lambda net, xs: jnp.sum(run(net, xs)[0]))


def carry_under_grad(scan, while_loop, fori_loop):
    run = module_in_carry(scan, while_loop, fori_loop)
    return eqx.filter_grad(lambda net, xs: jnp.sum(run(net, xs)))


def layers_under_vmap_of_grad(scan, while_loop, fori_loop):
    run = module_in_xs(scan, while_loop, fori_loop)
    grad = eqx.filter_grad(lambda net, x: jnp.sum(run(net, x[None])))
    return lambda net, xs: jax.vmap(lambda x: eqx.filter(grad(net, x), eqx.is_array))(xs)


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
]


def optimised(program):
    arrays, static = eqx.partition(NET, eqx.is_array)

    def run(arrays, xs):
        return eqx.filter(program(eqx.combine(arrays, static), xs), eqx.is_array)

    text = jax.jit(run).lower(arrays, XS).compile().as_text()
    # Where each operation was written is all that may differ.
    text = re.sub(r",?\s*(metadata|stack_frame_id|frontend_attributes)=\{[^}]*\}", "", text)
    text = re.sub(r"\b(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text)
    return text


@pytest.mark.parametrize("program", PROGRAMS)
def test_optimised_hlo_is_that_of_the_partition_by_hand(program):
    assert optimised(program(*OURS)) == optimised(program(*HAND))
