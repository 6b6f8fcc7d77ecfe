"""What is taken from JAX's insides does what it is taken for."""

import os

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax._src import source_info_util

import loopax
from loopax._jax import VmapAxis, typematch


F32 = jax.typeof(jnp.zeros(3))


def test_a_type_is_taken_for_itself():
    assert typematch(F32, jax.typeof(jnp.ones(3)))


@pytest.mark.parametrize(
    "other",
    [jnp.zeros(4), jnp.zeros((3, 1)), jnp.zeros(3, "int32"), jr.split(jr.key(0), 3)],
    ids=["length", "rank", "dtype", "keys"],
)
def test_other_types_are_not(other):
    assert not typematch(F32, jax.typeof(other))


def test_whether_a_type_is_weak_does_not_matter():
    assert typematch(jax.typeof(1.0), jax.typeof(jnp.zeros((), "float32")))
    assert not typematch(jax.typeof(1), jax.typeof(jnp.zeros((), "float32")))


def test_the_source_of_a_loop_is_no_line_of_ours():
    def run(x):
        return loopax.filter_scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0]

    loop = jax.make_jaxpr(run)(jnp.ones(())).eqns[-1]
    assert loop.primitive.name == "scan"
    assert os.path.dirname(loopax.__file__) not in source_info_util.summarize(loop.source_info)


def test_which_results_have_the_axis_of_a_vmap():
    class Axis:
        size, name, spmd_name = 3, "lanes", None

    def function(x, shared, later):
        return [x, shared, x + shared, jax.lax.psum(x, "lanes"), later, jnp.ones(())]

    values = [jnp.ones((2, 3)), jnp.ones(()), jnp.ones(())]
    found = VmapAxis(Axis).reaches(function, values, [1, None, None], [True, False, True])
    assert found == [True, False, True, False, True, False]
