"""The compiled program is that of the partition written by hand, byte for byte."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax import lax
from programs import HAND, NET, OURS, PROGRAMS, XS, optimised

from loopax.nn import Stacked


pytestmark = pytest.mark.optimised


X = jnp.ones(4)


def partitioned(program):
    arrays, static = eqx.partition(NET, eqx.is_array)

    def run(arrays, xs):
        return eqx.filter(program(eqx.combine(arrays, static), xs), eqx.is_array)

    return optimised(run, arrays, XS)


def optimised_gradient(stack, run):
    arrays, static = eqx.partition(stack, eqx.is_array)

    def loss(arrays, x):
        return jnp.sum(run(eqx.combine(arrays, static), x) ** 2)

    return optimised(jax.value_and_grad(loss), arrays, X)


@pytest.mark.parametrize("remat", [False, True])
def test_a_stack_of_layers_is_the_scan_by_hand(remat):
    stack = Stacked(functools.partial(eqx.nn.MLP, 4, 4, 8, 1), 5, key=jr.key(0), remat=remat)

    def by_hand(stack, x):
        arrays, static = eqx.partition(stack.layers, eqx.is_array)

        def one(x, arrays):
            return eqx.combine(arrays, static)(x), None

        return lax.scan(jax.checkpoint(one, prevent_cse=False) if remat else one, x, arrays)[0]

    ours = optimised_gradient(stack, lambda stack, x: stack(x))
    assert ours == optimised_gradient(stack, by_hand)


@pytest.mark.parametrize("program", PROGRAMS)
def test_optimised_hlo_is_that_of_the_partition_by_hand(program):
    assert partitioned(program(OURS)) == partitioned(program(HAND))
