"""What is taken from JAX's insides does what it is taken for."""

import functools
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


XS = jnp.ones(2)

CALLS = {
    "filter_scan": lambda f, tree: loopax.filter_scan(
        f("scan", lambda carry, x: (carry, x)), tree, jnp.ones((2, 3))
    ),
    "filter_while_loop": lambda f, tree: loopax.filter_while_loop(
        f("cond", lambda carry: carry["w"][0] > 2), f("body", lambda carry: carry), tree
    ),
    "filter_fori_loop": lambda f, tree: loopax.filter_fori_loop(
        0, 2, f("fori", lambda i, carry: carry), tree
    ),
    "filter_cond": lambda f, tree: loopax.filter_cond(
        True, f("true", lambda tree: tree), f("false", lambda tree: tree), tree
    ),
    "filter_switch": lambda f, tree: loopax.filter_switch(
        1, [f(n, lambda tree: tree) for n in range(3)], tree
    ),
    "filter_map": lambda f, tree: loopax.filter_map(f("map", lambda x: x), tree),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_path_is_written_for_what_is_traced_already(call, monkeypatch):
    functions = {}

    def keep(name, function):
        return functions.setdefault(name, function)

    tree = {"w": jnp.ones(3), "b": [jnp.ones(3), "static"]}
    call(keep, tree)

    def never(*_):
        raise AssertionError("a path was asked for")

    monkeypatch.setattr(loopax._tree, "leaves_with_path", never)
    monkeypatch.setattr(loopax._tree, "path_text", never)
    monkeypatch.setattr("jax._src.api_util._non_static_arg_names", never)
    monkeypatch.setattr("jax._src.linear_util._clean_keystr_arg_names", never)
    call(keep, tree)
    with pytest.raises(AssertionError, match="a path was asked for"):
        call(lambda _, function: function, tree)


@pytest.mark.parametrize("call", ["scan", "while_loop", "fori_loop", "cond", "switch"])
def test_functions_and_arguments_are_called_what_lax_calls_them(call):
    runs = {
        "scan": lambda lx, f: lx("scan")(lambda net, x: f(net["w"][0]), {"w": [1.0]}, XS),
        "while_loop": lambda lx, f: lx("while_loop")(
            lambda net: True, lambda net: f(net["w"][0]), {"w": [1.0]}
        ),
        "fori_loop": lambda lx, f: lx("fori_loop")(
            0, 2, lambda i, net: f(net["w"][0] + i), {"w": [1.0]}
        ),
        "cond": lambda lx, f: lx("cond")(
            jnp.bool_(True), lambda net: f(net["w"][0]), lambda net: 1.0, {"w": [1.0]}
        ),
        "switch": lambda lx, f: lx("switch")(
            jnp.int32(0), [lambda net: f(net["w"][0]), lambda net: 1.0], {"w": [1.0]}
        ),
    }

    def message(lx):
        # Python's `float` of a tracer: the error names the function and the argument.
        with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
            runs[call](lx, float)
        return str(caught.value)

    def ours(name):
        return functools.partial(getattr(loopax, f"filter_{name}"), trace_numbers=True)

    text = message(ours)
    assert "net['w'][0]" in text
    assert text == message(functools.partial(getattr, jax.lax))


class Pair:
    """A node without keys."""

    def __init__(self, first, second):
        self.parts = first, second


jax.tree_util.register_pytree_node(
    Pair, lambda pair: (pair.parts, None), lambda _, parts: Pair(*parts)
)


def test_leaves_of_nodes_without_keys_are_called_what_lax_calls_them():
    def message(scan):
        with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
            scan(lambda pair, _: float(pair.parts[1]), Pair(jnp.ones(()), jnp.ones(())), XS)
        return str(caught.value)

    text = message(loopax.filter_scan)
    assert "pair[1]" in text
    assert text == message(jax.lax.scan)


def test_a_function_may_bring_what_to_call_it():
    # `jax.lax.fori_loop` leaves this on the functions that it makes, and `functools.wraps`
    # copies it to others.
    def body(carry, x):
        return carry + x, None

    body.__fun_debug_info__ = jax.api_util.debug_info("scan", lambda a, b, c: a, (1, 2, 3), {})
    assert loopax.filter_scan(body, jnp.zeros(()), XS)[0] == 2
