"""`filter_scan` against the dullest Python loop, and against `jax.lax.scan`."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array
from versions import NEW_NAMES

from loopax import filter_scan


def python_scan(f, init, xs, length=None, reverse=False):
    """The loop that `filter_scan` stands for."""
    arrays = [leaf for leaf in jax.tree.leaves(xs) if eqx.is_array(leaf)]
    steps = range(len(arrays[0]) if arrays else length)
    carry, ys = init, []
    for i in reversed(steps) if reverse else steps:
        x = jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, xs)
        carry, y = f(carry, x)
        ys.append(y)
    if reverse:
        ys.reverse()
    return carry, jax.tree.map(
        lambda *rows: jnp.stack(rows) if eqx.is_array(rows[0]) else rows[0], *ys
    )


def assert_close(got, want):
    """The same trees, up to rounding of the arrays."""
    got_arrays, got_rest = eqx.partition(got, eqx.is_array)
    want_arrays, want_rest = eqx.partition(want, eqx.is_array)
    assert eqx.tree_equal(got_rest, want_rest)
    arrays = zip(jax.tree.leaves(got_arrays), jax.tree.leaves(want_arrays), strict=True)
    for a, b in arrays:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jr.key_data(a), jr.key_data(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def types(tree):
    """Dtypes and shapes, and weak types too, which `jnp` operations go by."""
    return jax.tree.map(jax.typeof, tree)


def raised_by(function, *args, **kwargs):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*args, **kwargs)
    return caught.value


XS = jr.normal(jr.key(7), (4, 3))
NET = eqx.nn.MLP(3, 3, 4, 1, key=jr.key(0))


class Kernel(eqx.Module):
    bias: Array
    link: Callable
    tag: str


class Pair(NamedTuple):
    lo: Any
    hi: Any


class Cell(eqx.Module):
    weight: Array

    def __call__(self, carry, x):
        return self.update(carry, x)

    def update(self, carry, x):
        carry = jnp.tanh(self.weight * carry + x)
        return carry, 2 * carry


class OpaqueCell:
    """Callable, and with a method, but not a PyTree."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, carry, x):
        return self.update(carry, x)

    def update(self, carry, x):
        carry = jnp.tanh(self.weight * carry + x)
        return carry, 2 * carry


# -- trees of arrays: as lax -------------------------------------------------------------


def add(carry, x):
    return carry + x, carry * x


def fibonacci(carry, _):
    return (carry[1], carry[0] + carry[1]), carry[0]


def mixed(carry, x):
    carry = {
        "f16": carry["f16"] * 2,
        "i8": carry["i8"] + 1,
        "b": jnp.logical_not(carry["b"]),
        "c": carry["c"] * 1j,
    }
    return carry, Pair(carry["f16"], (x, carry["b"]))


MIXED = {
    "f16": jnp.float16(0.5),
    "i8": jnp.int8(3),
    "b": jnp.array(True),
    "c": jnp.complex64(1),
}

ARRAYS_ONLY = {
    "vector": (add, (jnp.zeros(3), XS), {}),
    "several dtypes": (mixed, (MIXED, jnp.arange(3)), {}),
    "weak carry stays weak": (lambda c, _: (c + 1, c), (jnp.asarray(0.0),), {"length": 3}),
    "weak carry is promoted": (add, (jnp.asarray(1), XS[0]), {}),
    "weak carry is promoted twice": (
        fibonacci,
        ((jnp.asarray(0), jnp.float32(1.0)),),
        {"length": 5},
    ),
    "weak carry beside a strong one": (
        lambda c, x: ((c[0] * x, c[1] + 1), c),
        ((jnp.asarray(1.0), jnp.int16(0)), jnp.arange(3, dtype=jnp.bfloat16)),
        {},
    ),
    "weak y": (lambda c, x: (c, jnp.asarray(2.0)), (jnp.zeros(3), XS), {}),
    "reverse": (add, (jnp.zeros(3), XS), {"reverse": True}),
    "unroll by two": (add, (jnp.zeros(3), XS), {"unroll": 2}),
    "unroll by more than the length": (add, (jnp.zeros(3), XS), {"unroll": 9}),
    "unroll by what does not divide": (add, (jnp.zeros(3), XS), {"unroll": 3}),
    "unroll zero": (add, (jnp.zeros(3), XS), {"unroll": 0}),
    "unroll all": (add, (jnp.zeros(3), XS), {"unroll": True}),
    "unroll nothing": (add, (jnp.zeros(3), XS), {"unroll": False}),
    "unroll and reverse": (add, (jnp.zeros(3), XS), {"unroll": 3, "reverse": True}),
    "length only": (fibonacci, ((jnp.int32(0), jnp.int32(1)),), {"length": 6}),
    "length and xs": (add, (jnp.zeros(3), XS), {"length": 4}),
    "length of NumPy's": (add, (jnp.zeros(3), XS), {"length": np.int64(4)}),
    "reverse of NumPy's": (add, (jnp.zeros(3), XS), {"reverse": np.bool_(True)}),
    "no steps": (add, (jnp.zeros(3), XS[:0]), {}),
    "no steps, length only": (fibonacci, ((jnp.int32(0), jnp.int32(1)),), {"length": 0}),
    "no steps, unrolled": (add, (jnp.zeros(3), XS[:0]), {"unroll": 2}),
    "one step": (add, (jnp.zeros(3), XS[:1]), {}),
    "no carry": (lambda c, x: (c, x * 2), (None, XS), {}),
    "no ys": (lambda c, x: (c + x, None), (jnp.zeros(3), XS), {}),
    "no arrays at all": (lambda c, x: ((), {}), ((), None), {"length": 3}),
    "NumPy arrays": (add, (np.zeros(3, np.float32), np.asarray(XS)), {}),
    "NumPy scalars": (
        lambda c, x: (c * 2, c),
        (np.float32(1.5), np.arange(3)),
        {},
    ),
    "NumPy in ys": (
        lambda c, x: (c, (np.arange(2), np.float32(1))),
        (jnp.zeros(3), XS),
        {},
    ),
}


@pytest.mark.parametrize("name", ARRAYS_ONLY)
def test_on_trees_of_arrays_it_is_lax_in_values_dtypes_and_weak_types(name):
    if name == "unroll zero" and not NEW_NAMES:
        pytest.skip("JAX 0.7 refuses it")
    f, args, options = ARRAYS_ONLY[name]
    got, want = filter_scan(f, *args, **options), lax.scan(f, *args, **options)
    assert types(got) == types(want)
    assert eqx.tree_equal(got, want)


def count_and_flag(carry, x):
    n, flag, scale = carry
    return (n + 1, jnp.logical_not(flag), scale * 2), (n, 1.0, True, 3j)


NUMBERS = {
    "carry of one number": (add, (0.0, jnp.arange(3.0)), {}),
    "integer promoted": (add, (0, jnp.arange(3.0)), {}),
    "integer, float and flag": (count_and_flag, ((0, True, 0.5),), {"length": 3}),
    "numbers promoted in turns": (fibonacci, ((0, jnp.float32(1.0)),), {"length": 5}),
    "complex": (lambda c, x: (c * 1j, c), (1 + 0j,), {"length": 3}),
    "unchanged": (lambda c, x: (c, None), ((1, 2.0, True), jnp.arange(3)), {}),
    "set to a number": (lambda c, x: ((7, c[1] + 1), c), ((33, 4),), {"length": 2}),
    "in ys": (lambda c, x: (c, {"one": 1, "half": 0.5}), (jnp.zeros(2),), {"length": 2}),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_with_trace_numbers_python_numbers_are_what_they_are_to_lax(name):
    f, args, options = NUMBERS[name]
    got = filter_scan(f, *args, **options, trace_numbers=True)
    want = lax.scan(f, *args, **options)
    assert types(got) == types(want)
    assert eqx.tree_equal(got, want)


@pytest.mark.parametrize("start", [0, 0.0, 1j])
def test_trace_numbers_takes_numbers_beside_static_leaves(start):
    def step(carry, x):
        return {**carry, "n": carry["n"] + x}, carry["n"]

    xs = jnp.arange(3.0)
    out, ys = filter_scan(step, {"n": start, "name": "a"}, xs, trace_numbers=True)
    want, want_ys = lax.scan(lambda c, x: (c + x, c), start, xs)
    assert out["name"] == "a"
    assert types((out["n"], ys)) == types((want, want_ys))
    assert eqx.tree_equal((out["n"], ys), (want, want_ys))


def test_trace_numbers_refuses_to_scan_over_a_number_as_lax_does():
    step = lambda c, x: (c + x, None)
    ours = raised_by(filter_scan, step, 0, 3, length=2, trace_numbers=True)
    theirs = raised_by(lax.scan, step, 0, 3, length=2)
    assert (str(ours), isinstance(ours, type(theirs))) == (str(theirs), True)


def test_without_trace_numbers_a_flag_stays_a_flag():
    seen = []

    def step(drop, x):
        seen.append(drop.inference)
        return drop, drop(x)

    drop = eqx.nn.Dropout(0.5, inference=True)
    out, ys = filter_scan(step, drop, XS)
    assert out.inference is True
    assert set(map(type, seen)) == {bool}
    assert_close(ys, XS)


def test_a_number_in_place_of_an_array_becomes_an_array():
    out, _ = filter_scan(
        lambda c, x: ((7, c[1] + 1, c[2]), None), (jnp.int32(3), 4 * XS, "t"), XS
    )
    assert types(out[0]) == types(lax.scan(lambda c, x: (7, x), jnp.int32(3), XS)[0])
    assert (int(out[0]), out[2]) == (7, "t")


def test_without_trace_numbers_numbers_are_kept_as_they_are():
    init = {"n": 3, "half": 0.5, "yes": True, "z": 1j, "x": jnp.zeros(3)}
    out, _ = filter_scan(lambda c, x: ({**c, "x": c["x"] + x}, None), init, XS)
    numbers = {key: value for key, value in out.items() if key != "x"}
    assert {k: type(v) for k, v in numbers.items()} == {
        "n": int,
        "half": float,
        "yes": bool,
        "z": complex,
    }
    assert numbers == {"n": 3, "half": 0.5, "yes": True, "z": 1j}


GRADIENTS = {
    "carry": lambda scan, w, xs: scan(lambda c, x: (jnp.tanh(c + x), None), w, xs)[0],
    "ys": lambda scan, w, xs: scan(lambda c, x: (jnp.tanh(c + x), c * x), w, xs)[1],
    "closed over": lambda scan, w, xs: scan(
        lambda c, x: (jnp.sin(c * w + x), c), jnp.zeros(3), xs
    ),
    "reverse": lambda scan, w, xs: scan(lambda c, x: (jnp.sin(c * x), c), w, xs, reverse=True),
    "unrolled": lambda scan, w, xs: scan(lambda c, x: (jnp.sin(c * x), c), w, xs, unroll=3),
    "integers alongside": lambda scan, w, xs: scan(
        lambda c, x: ((c[0] + 1, c[1] * x), c[1]), (jnp.int32(0), w), xs
    )[1],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_on_trees_of_arrays_are_those_of_lax(name):
    def gradient(scan):
        def loss(w, xs):
            out = GRADIENTS[name](scan, w, xs)
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(out))

        return jax.grad(loss, argnums=(0, 1))(XS[0], XS)

    assert eqx.tree_equal(gradient(filter_scan), gradient(lax.scan))


# -- static leaves -----------------------------------------------------------------------


def test_a_module_in_the_carry_is_called_at_each_step():
    out, ys = filter_scan(lambda net, x: (net, net(x)), NET, XS)
    assert_close(ys, jnp.stack([NET(x) for x in XS]))
    assert_close(out, NET)


def test_static_leaves_of_the_carry_come_back_as_the_same_objects():
    marker, table = object(), {"a", "b"}
    init = {"net": NET, "marker": marker, "table": table, "x": jnp.zeros(3)}
    out, _ = filter_scan(lambda c, x: ({**c, "x": c["x"] + x}, None), init, XS)
    assert out["net"].activation is NET.activation
    assert out["marker"] is marker
    assert out["table"] is table


def test_arrays_that_the_body_does_not_change_are_handed_on():
    weight, bias = NET.layers[0].weight, NET.layers[0].bias
    out, _ = filter_scan(lambda c, x: ((c[0], c[1] + x), None), (NET, XS[0]), XS)
    assert out[0].layers[0].weight is weight
    assert out[0].layers[0].bias is bias
    assert out[1] is not XS[0]


def test_a_module_changes_in_its_arrays_only():
    def step(kernel, x):
        kernel = eqx.tree_at(lambda k: k.bias, kernel, kernel.link(kernel.bias + x))
        return kernel, kernel

    init = Kernel(jnp.zeros(3), jnp.sin, "k")
    got, want = filter_scan(step, init, XS), python_scan(step, init, XS)
    assert_close(got, want)
    assert isinstance(got[1], Kernel)
    assert got[1].link is jnp.sin
    assert got[1].bias.shape == (4, 3)


def test_static_leaves_of_xs_reach_every_step_unchanged():
    seen = []

    def step(carry, x):
        seen.append((x["mode"], x["fn"], x["n"], x["z"]))
        return x["fn"](carry + x["x"]), None

    xs = {"x": XS, "mode": "abc", "fn": jnp.sin, "n": 3, "z": None}
    got, want = filter_scan(step, XS[0], xs), python_scan(step, XS[0], xs)
    assert set(seen) == {("abc", jnp.sin, 3, None)}
    assert_close(got, want)


def test_a_module_is_scanned_over_as_stacked_layers():
    layers = eqx.filter_vmap(lambda k: eqx.nn.Linear(3, 3, key=k))(jr.split(jr.key(0), 4))
    step = lambda h, layer: (jnp.tanh(layer(h)), h)
    assert_close(filter_scan(step, XS[0], layers), python_scan(step, XS[0], layers))


def test_xs_without_arrays_take_the_number_of_steps_from_length():
    xs = {"mode": "abc", "fn": jnp.sin, "z": None}
    out, ys = filter_scan(lambda c, x: (c + len(x["mode"]), None), 0 * XS, xs, length=4)
    assert_close(out, jnp.full((4, 3), 12.0))
    assert ys is None


STATIC_YS = [1.0, 1, True, 2j, "name", b"raw", jnp.sin, len, object(), None, ..., float]


@pytest.mark.parametrize("value", STATIC_YS, ids=lambda value: type(value).__name__)
def test_static_leaves_of_ys_come_back_once_also_when_the_trace_is_cached(value):
    def step(carry, x):
        traces.append(None)
        return carry + x, {"static": value, "row": carry}

    traces = []
    first = filter_scan(step, jnp.zeros(3), XS)[1]
    n = len(traces)
    second = filter_scan(step, jnp.ones(3), XS)[1]
    assert len(traces) == n
    for ys in (first, second):
        assert type(ys["static"]) is type(value)
        assert ys["static"] is value or ys["static"] == value
        assert ys["row"].shape == (4, 3)


def test_static_ys_are_those_of_the_call_not_of_the_cached_trace():
    def step(carry, x):
        return carry, (carry["name"], carry["fn"], x["name"], x["x"])

    def run(name, fn):
        carry, xs = {"name": name, "fn": fn}, {"name": name + "!", "x": XS}
        return filter_scan(step, carry, xs)[1]

    for name, fn in [("a", jnp.sin), ("b", jnp.cos), ("a", jnp.sin), ("b", jnp.sin)]:
        ys = run(name, fn)
        assert ys[:3] == (name, fn, name + "!")
        assert_close(ys[3], XS)


def test_ys_of_no_steps_have_their_static_leaves_and_no_rows():
    step = lambda net, x: (net, Kernel(net(x), jnp.sin, "y"))
    out, ys = filter_scan(step, NET, XS[:0])
    assert (ys.link, ys.tag, ys.bias.shape) == (jnp.sin, "y", (0, 3))
    assert_close(out, NET)


def test_the_structure_of_ys_survives():
    def step(carry, x):
        return carry, Pair({"b": x, "a": [x, None, ()]}, (Kernel(x, jnp.sin, "t"),))

    assert_close(filter_scan(step, None, XS), python_scan(step, None, XS))


def test_the_body_may_make_its_lambda_anew():
    def step(kernel, x):
        return Kernel(kernel.bias + x, lambda z: 2 * z, "t"), kernel.link(kernel.bias)

    init = Kernel(jnp.zeros(3), step(Kernel(XS[0], jnp.sin, "t"), XS[0])[0].link, "t")
    out, ys = filter_scan(step, init, XS)
    assert out.link is init.link
    assert_close(ys[2], 2 * (XS[0] + XS[1]))


def test_nan_is_an_unchanged_static_value():
    init = {"fill": float("nan"), "x": jnp.zeros(3)}
    step = lambda c, x: ({"fill": float("nan"), "x": c["x"] + x}, None)
    out, _ = filter_scan(step, init, XS)
    assert math.isnan(out["fill"])
    assert_close(out["x"], XS.sum(0))


def test_the_order_in_which_a_dict_is_built_does_not_matter():
    init = {"a": XS[0], "tag": "t", "b": XS[1]}
    step = lambda c, x: ({"b": c["a"], "a": c["b"] + x, "tag": "t"}, None)
    assert_close(filter_scan(step, init, XS), python_scan(step, init, XS))


def test_the_body_may_return_its_pair_as_a_list():
    got = filter_scan(lambda c, x: [c + x, (c, "t")], XS[0], XS)
    assert_close(got, python_scan(lambda c, x: (c + x, (c, "t")), XS[0], XS))


def test_a_carry_of_static_leaves_only_comes_back():
    out, ys = filter_scan(lambda c, x: (c, 2 * x), {"only": "static"}, XS)
    assert out == {"only": "static"}
    assert_close(ys, 2 * XS)


def test_numpy_objects_and_strings_are_static():
    names = np.array(["a", "b"])
    things = np.array([None, "x"], dtype=object)
    init = {"names": names, "things": things, "x": jnp.zeros(3)}
    step = lambda c, x: ({**c, "x": c["x"] + x}, c["names"])
    out, ys = filter_scan(step, init, XS)
    assert out["names"] is names
    assert out["things"] is things
    assert ys is names


def test_numpy_arrays_are_indexed_by_a_carried_position():
    init = {"table": np.arange(10.0, dtype=np.float32), "at": jnp.int32(0)}
    step = lambda c, _: ({**c, "at": c["at"] + 2}, c["table"][c["at"]])
    out, ys = filter_scan(step, init, length=4)
    assert_close(ys, jnp.array([0.0, 2, 4, 6]))
    assert_close(jnp.asarray(out["table"]), jnp.arange(10.0))


def test_bool_arrays_may_change():
    step = lambda c, _: ({**c, "flag": ~c["flag"]}, c["flag"])
    out, ys = filter_scan(step, {"flag": np.True_, "n": "t"}, length=3)
    assert ys.tolist() == [True, False, True]
    assert out["flag"].dtype == bool
    assert not out["flag"]


# -- what may be the body ----------------------------------------------------------------

WEIGHT = jnp.array([0.5, 1.0, 2.0])


def plain(weight, carry, x):
    return Cell(weight).update(carry, x)


def by_keyword(carry, x, *, weight):
    return Cell(weight).update(carry, x)


@jax.jit
def jitted(carry, x):
    return Cell(WEIGHT).update(carry, x)


@jax.custom_jvp
def with_rule(carry, x):
    return Cell(WEIGHT).update(carry, x)


with_rule.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))


class WithClassMethod:
    @classmethod
    def update(cls, carry, x):
        return Cell(WEIGHT).update(carry, x)

    @staticmethod
    def static_update(carry, x):
        return Cell(WEIGHT).update(carry, x)


BODIES = {
    "lambda": lambda carry, x: Cell(WEIGHT).update(carry, x),
    "Module": Cell(WEIGHT),
    "bound method of a Module": Cell(WEIGHT).update,
    "__call__ of a Module": Cell(WEIGHT).__call__,
    "callable object": OpaqueCell(WEIGHT),
    "bound method of an object": OpaqueCell(WEIGHT).update,
    "class method": WithClassMethod.update,
    "static method": WithClassMethod.static_update,
    "functools.partial": functools.partial(plain, WEIGHT),
    "functools.partial by keyword": functools.partial(by_keyword, weight=WEIGHT),
    "functools.partial of a method": functools.partial(Cell.update, Cell(WEIGHT)),
    "functools.partial of a bound method": functools.partial(Cell(WEIGHT).update),
    "nested functools.partial": functools.partial(
        functools.partial(lambda a, b, c, x: plain(a * b, c, x), WEIGHT), 1.0
    ),
    "eqx.Partial": eqx.Partial(plain, WEIGHT),
    "jax.tree_util.Partial": jax.tree_util.Partial(plain, WEIGHT),
    "jitted function": jitted,
    "eqx.filter_jit": eqx.filter_jit(plain.__get__(WEIGHT)),
    "jitted Module": eqx.filter_jit(Cell(WEIGHT)),
    "jax.checkpoint": jax.checkpoint(functools.partial(plain, WEIGHT)),
    "custom_jvp": with_rule,
    "wrapped function": functools.wraps(plain)(functools.partial(plain, WEIGHT)),
}


@pytest.mark.parametrize("name", BODIES)
def test_any_callable_may_be_the_body(name):
    got = filter_scan(BODIES[name], XS[0], XS)
    assert_close(got, python_scan(Cell(WEIGHT), XS[0], XS))


BODIES_WITH_ARRAYS = {
    "Module": Cell,
    "bound method of a Module": lambda weight: Cell(weight).update,
    "functools.partial": lambda weight: functools.partial(plain, weight),
    "by keyword": lambda weight: functools.partial(by_keyword, weight=weight),
    "of a method": lambda weight: functools.partial(Cell(weight).update),
    "eqx.Partial": lambda weight: eqx.Partial(plain, weight),
    "jax.tree_util.Partial": lambda weight: jax.tree_util.Partial(plain, weight),
    "closure": lambda weight: lambda carry, x: plain(weight, carry, x),
    "callable object": OpaqueCell,
    "bound method of an object": lambda weight: OpaqueCell(weight).update,
}


@pytest.mark.parametrize("name", BODIES_WITH_ARRAYS)
def test_gradients_flow_to_the_arrays_of_the_body(name):
    def gradient(scan):
        loss = lambda w: jnp.sum(scan(BODIES_WITH_ARRAYS[name](w), XS[0], XS)[1])
        return jax.grad(loss)(WEIGHT)

    got, want = gradient(filter_scan), gradient(python_scan)
    assert_close(got, want)
    assert jnp.all(want != 0)


def test_gradient_of_a_loss_over_a_module_in_the_carry():
    def gradient(scan):
        step = lambda c, x: ((c[0], jnp.tanh(c[0](c[1]) + x)), c[1])
        loss = lambda net: jnp.sum(scan(step, (net, XS[0]), XS)[1])
        return eqx.filter_grad(loss)(NET)

    assert_close(gradient(filter_scan), gradient(python_scan))


def test_training_inside_a_scan_is_the_python_loop():
    @eqx.filter_value_and_grad
    def loss_and_grad(net, x):
        return jnp.sum((net(x) - x) ** 2)

    def step(net, x):
        loss, grad = loss_and_grad(net, x)
        return eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, grad)), loss

    got = filter_scan(step, NET, XS)
    assert_close(got, python_scan(step, NET, XS))
    assert got[0].activation is NET.activation


# -- bound methods and partials as data --------------------------------------------------


@pytest.mark.parametrize(
    "method", [Cell(WEIGHT).update, OpaqueCell(WEIGHT).update], ids=["Module", "object"]
)
def test_a_bound_method_may_sit_in_the_carry(method):
    def step(carry, x):
        h, y = carry["method"](carry["h"], x)
        return {"method": carry["method"], "h": h}, y

    out, ys = filter_scan(step, {"method": method, "h": XS[0]}, XS)
    want, want_ys = python_scan(Cell(WEIGHT), XS[0], XS)
    assert_close((out["h"], ys), (want, want_ys))


def test_a_bound_method_is_unchanged_when_taken_anew_from_the_same_object():
    cell = OpaqueCell(WEIGHT)

    def step(carry, x):
        return {"method": cell.update, "h": carry["method"](carry["h"], x)[0]}, None

    out, _ = filter_scan(step, {"method": cell.update, "h": XS[0]}, XS)
    assert out["method"].__self__ is cell
    assert_close(out["h"], python_scan(cell, XS[0], XS)[0])


def test_a_partial_with_arrays_may_change_them():
    start = jax.tree_util.Partial(jnp.add, jnp.float32(0))
    step = lambda p, _: (jax.tree_util.Partial(p.func, p.args[0] + 1), p(1.0))
    out, ys = filter_scan(step, start, length=3)
    assert_close(ys, jnp.array([1.0, 2, 3]))
    assert (out.func, float(out.args[0])) == (jnp.add, 3.0)


# -- keys, references, effects -----------------------------------------------------------


def test_typed_keys_are_carried_and_stacked():
    def step(carry, x):
        key, sub = jr.split(carry["key"])
        return {**carry, "key": key}, (sub, jr.normal(sub) + x)

    init = {"key": jr.key(0), "name": "agent"}
    got, want = filter_scan(step, init, XS), python_scan(step, init, XS)
    assert_close(got, want)
    assert jnp.issubdtype(got[1][0].dtype, jax.dtypes.prng_key)


def test_typed_keys_are_scanned_over():
    keys = jr.split(jr.key(0), 4)
    step = lambda c, x: (c, jr.normal(x["key"], (2,)))
    got = filter_scan(step, None, {"key": keys, "name": "noise"})[1]
    assert_close(got, jax.vmap(lambda key: jr.normal(key, (2,)))(keys))


def test_dropout_draws_as_in_the_python_loop():
    def step(carry, x):
        drop, key = carry
        key, sub = jr.split(key)
        return (drop, key), drop(x, key=sub)

    init = (eqx.nn.Dropout(0.5), jr.key(0))
    assert_close(filter_scan(step, init, XS), python_scan(step, init, XS))


@pytest.mark.parametrize("wrap", [lambda run: run, jax.jit], ids=["eager", "jit"])
def test_a_mutable_reference_may_be_closed_over(wrap):
    def run(scan):
        ref = jax.new_ref(jnp.zeros(4))

        def step(carry, i):
            ref[i] = carry
            return carry + 1, ref[0]

        out = scan(step, jnp.float32(1), jnp.arange(4))
        return out, ref[...]

    got, want = wrap(lambda: run(filter_scan))(), wrap(lambda: run(lax.scan))()
    assert_close(got, want)
    assert_close(got[1], jnp.array([1.0, 2, 3, 4]))


def test_a_mutable_reference_may_be_held_by_the_body():
    ref = jax.new_ref(jnp.zeros(4))

    def step(ref, carry, i):
        ref[i] = carry
        return carry + 1, None

    filter_scan(functools.partial(step, ref), jnp.float32(1), jnp.arange(4))
    assert_close(ref[...], jnp.array([1.0, 2, 3, 4]))


def test_a_mutable_reference_may_be_passed_whole_to_every_step():
    ref = jax.new_ref(jnp.zeros(4))

    def step(carry, x):
        x["ref"][x["i"]] = carry
        return carry + 1, None

    xs = {"ref": ref, "i": jnp.arange(4)}
    filter_scan(step, jnp.float32(1), xs, in_axes={"ref": None, "i": 0})
    assert_close(ref[...], jnp.array([1.0, 2, 3, 4]))


def test_a_mutable_reference_among_xs_is_written_row_by_row():
    def run(scan):
        ref = jax.new_ref(jnp.zeros((4, 2)))

        def step(carry, row):
            row[...] = carry * jnp.ones(2)
            return carry + 1, row[0]

        return scan(step, jnp.float32(1), ref), ref[...]

    got = run(filter_scan)
    assert_close(got, run(lax.scan))
    assert_close(got[1][:, 0], jnp.array([1.0, 2, 3, 4]))


def writes_to_carried_reference(scan):
    def step(carry, i):
        carry[0][i] = carry[1]
        return (carry[0], carry[1] + 1), None

    return scan(step, (jax.new_ref(jnp.zeros(4)), jnp.float32(0)), jnp.arange(4))


def returns_reference(scan):
    return scan(lambda c, i: (c, jax.new_ref(c)), jnp.zeros(4), jnp.arange(4))


@pytest.mark.parametrize("program", [writes_to_carried_reference, returns_reference])
def test_a_mutable_reference_that_lax_refuses_is_refused_in_the_same_words(program):
    ours, theirs = raised_by(program, filter_scan), raised_by(program, lax.scan)
    assert isinstance(ours, type(theirs))
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.jit(jax.grad(f))])
def test_ordered_callbacks_run_once_a_step_and_in_order(wrap):
    seen = []

    def run(x):
        def step(carry, _):
            jax.debug.callback(lambda v: seen.append(float(v)), carry[0], ordered=True)
            return (carry[0] * 2, carry[1]), None

        return filter_scan(step, (x, "t"), length=4)[0][0]

    jax.block_until_ready(wrap(run)(1.0))
    jax.effects_barrier()
    assert seen == [1.0, 2.0, 4.0, 8.0]


def test_reverse_runs_from_the_end_and_keeps_ys_beside_their_xs():
    step = lambda c, x: ((c[0] + 1, c[1]), (c[0], x))
    (n, tag), ys = filter_scan(step, (jnp.int32(0), "t"), jnp.arange(4), reverse=True)
    assert (int(n), tag) == (4, "t")
    assert ys[0].tolist() == [3, 2, 1, 0]
    assert ys[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}])
def test_disable_jit_gives_the_same_results(options):
    def step(carry, x):
        net, h = carry
        return (net, net(h) + x), {"h": h, "tag": "t", "n": 1}

    want = filter_scan(step, (NET, XS[0]), XS, **options)
    with jax.disable_jit():
        got = filter_scan(step, (NET, XS[0]), XS, **options)
    assert_close(got, want)


def test_under_disable_jit_the_body_sees_values():
    seen = []

    def step(carry, x):
        seen.append(float(carry["x"]))
        return {**carry, "x": carry["x"] + x}, None

    with jax.disable_jit():
        filter_scan(step, {"x": jnp.float32(0), "tag": "t"}, jnp.arange(3.0))
    assert seen[-3:] == [0.0, 0.0, 1.0]


# -- axes --------------------------------------------------------------------------------


def by_hand(f, init, xs, axes):
    """Moves each array's axis to the front, and hands over whole what has none."""
    moved = {
        key: x if axes[key] is None else jnp.moveaxis(x, axes[key], 0) for key, x in xs.items()
    }
    sliced = {key: x for key, x in moved.items() if axes[key] is not None}
    return lax.scan(lambda c, x: f(c, {**moved, **x}), init, sliced)


AXES = [
    {"a": 0, "b": 1, "c": None},
    {"a": 0, "b": -1, "c": None},
    {"a": -3, "b": 1, "c": None},
    {"a": None, "b": 1, "c": None},
]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_in_axes_slices_each_array_along_its_own(axes):
    xs = {
        "a": jr.normal(jr.key(1), (4, 2, 3)),
        "b": jr.normal(jr.key(2), (3, 4)),
        "c": jr.normal(jr.key(3), (3,)),
    }
    step = lambda c, x: (c + x["a"].sum() + x["b"], x["c"] * x["b"])
    got = filter_scan(step, jnp.zeros(3), xs, in_axes=axes)
    assert_close(got, by_hand(step, jnp.zeros(3), xs, axes))


@pytest.mark.parametrize("axis", [1, -1, -2, 2])
def test_in_axes_of_one_integer_holds_for_every_array(axis):
    xs = {"a": jr.normal(jr.key(1), (3, 4, 4)), "b": jr.normal(jr.key(2), (2, 4, 4))}
    step = lambda c, x: (c + x["a"].sum(), x["b"])
    got = filter_scan(step, jnp.float32(0), xs, in_axes=axis)
    assert_close(got, by_hand(step, jnp.float32(0), xs, {"a": axis, "b": axis}))


def test_in_axes_of_none_hands_everything_over_whole():
    step = lambda c, x: (c + x["x"].sum(), x["name"])
    xs = {"x": XS, "name": "t"}
    out, ys = filter_scan(step, jnp.float32(0), xs, length=3, in_axes=None)
    assert ys == "t"
    assert_close(out, 3 * XS.sum())


def test_in_axes_may_be_a_prefix():
    xs = {"seq": (XS.T, {"m": XS.T}), "whole": {"w": XS[0], "name": "t"}}

    def step(carry, x):
        w = x["whole"]["w"][0] + len(x["whole"]["name"])
        return carry + x["seq"][0] * w, x["seq"][1]["m"]

    out, ys = filter_scan(step, XS[0], xs, in_axes={"seq": 1, "whole": None})
    assert_close(out, XS[0] + XS.sum(0) * (XS[0, 0] + 1))
    assert_close(ys, XS)


def test_in_axes_of_a_module_prefix():
    axes = eqx.tree_at(lambda k: k.bias, Kernel(0, None, None), 1)
    xs = Kernel(XS.T, jnp.sin, "t")
    step = lambda c, k: (c + len(k.tag), k.link(k.bias))
    out, ys = filter_scan(step, jnp.float32(0), xs, in_axes=axes)
    assert_close((out, ys), (jnp.float32(4), jnp.sin(XS)))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_in_axes_takes_eqx_if_array(axis):
    xs = {"x": jr.normal(jr.key(0), (4, 4)), "name": "t", "n": 3}
    step = lambda c, x: (c * x["n"], (x["x"], x["name"]))
    _, ys = filter_scan(step, jnp.float32(1), xs, in_axes=eqx.if_array(axis))
    assert ys[1] == "t"
    assert_close(ys[0], jnp.moveaxis(xs["x"], axis, 0))


def test_in_axes_and_length_agree():
    out, ys = filter_scan(lambda c, x: (c + x, x), XS[0], XS.T, length=4, in_axes=1)
    assert_close((out, ys), (XS[0] + XS.sum(0), XS))


def test_arrays_passed_whole_get_gradients():
    def loss(w, scan_whole):
        step = lambda c, x: (jnp.tanh(c * x["w"] + x["x"]), None)
        if scan_whole:
            return jnp.sum(
                filter_scan(step, XS[0], {"w": w, "x": XS}, in_axes={"w": None, "x": 0})[0]
            )
        return jnp.sum(python_scan(lambda c, x: step(c, {"w": w, "x": x}), XS[0], XS)[0])

    got, want = jax.grad(loss)(WEIGHT, True), jax.grad(loss)(WEIGHT, False)
    assert_close(got, want)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_out_axes_is_where_the_rows_are_stacked(axis):
    step = lambda c, x: (c, (jnp.outer(x, x), "t"))
    _, (ys, tag) = filter_scan(step, None, XS, out_axes=axis)
    rows = lax.scan(lambda c, x: (c, jnp.outer(x, x)), None, XS)[1]
    assert tag == "t"
    assert_close(ys, jnp.moveaxis(rows, 0, axis))


def test_out_axes_may_be_a_prefix():
    step = lambda c, x: (c, {"a": (x, x + 1), "b": x, "tag": None})
    _, ys = filter_scan(step, None, XS, out_axes={"a": 1, "b": -2, "tag": None})
    assert_close(ys, {"a": (XS.T, XS.T + 1), "b": XS, "tag": None})


def test_out_axes_takes_eqx_if_array():
    step = lambda c, x: (c, {"x": x, "name": "t", "n": 1})
    _, ys = filter_scan(step, None, XS, out_axes=eqx.if_array(1))
    assert (ys["name"], ys["n"]) == ("t", 1)
    assert_close(ys["x"], XS.T)


def test_in_axes_and_out_axes_under_jit_and_grad():
    def loss(xs):
        step = lambda c, x: (c, jnp.sin(x))
        ys = filter_scan(step, None, xs, in_axes=-1, out_axes=-1)[1]
        return jnp.sum(ys * jnp.arange(12.0).reshape(3, 4))

    got = jax.jit(jax.grad(loss))(XS.T)
    assert_close(got, jnp.cos(XS.T) * jnp.arange(12.0).reshape(3, 4))


def test_key_arrays_move_along_axes_too():
    keys = jr.split(jr.key(0), (2, 4))
    step = lambda c, k: (c, (jr.normal(k[0]), k))
    _, (noise, out) = filter_scan(step, None, keys, in_axes=1, out_axes=(0, 1))
    assert_close(noise, jax.vmap(jr.normal)(keys[0]))
    assert_close(out, keys)


# -- eqx.nn.State ------------------------------------------------------------------------


def test_batch_norm_keeps_the_statistics_of_the_python_loop():
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    norm, state = make(3, axis_name="batch", mode="batch")
    batches = jr.normal(jr.key(0), (4, 6, 3))

    def step(carry, batch):
        norm, state = carry
        call = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = call(batch, state)
        return (norm, state), y

    got = filter_scan(step, (norm, state), batches)
    assert_close(got, python_scan(step, (norm, state), batches))


class Counting(eqx.Module):
    linear: eqx.nn.Linear
    calls: eqx.nn.StateIndex

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 3, key=key)
        self.calls = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, x, state):
        n = state.get(self.calls)
        return jnp.tanh(self.linear(x)) + n, state.set(self.calls, n + x.sum())


def test_a_state_that_the_body_sets_is_carried():
    layer, state = eqx.nn.make_with_state(Counting)(jr.key(0))

    def step(state, x):
        y, state = layer(x, state)
        return state, y

    state_got, ys = filter_scan(step, state, XS)
    state_want, want = python_scan(step, state, XS)
    assert_close(ys, want)
    assert_close(state_got.get(layer.calls), state_want.get(layer.calls))


def test_stateful_layers_are_scanned_over_with_their_states():
    make = eqx.filter_vmap(eqx.nn.make_with_state(Counting))
    layers, states = make(jr.split(jr.key(0), 4))
    got = filter_scan(lambda x, layer: layer[0](x, layer[1]), XS[0], (layers, states))
    x, counts = XS[0], []
    for i in range(4):
        one = jax.tree.map(lambda a: a[i] if eqx.is_array(a) else a, (layers, states))
        x, state = one[0](x, one[1])
        counts.append(state.get(one[0].calls))
    assert_close(got[0], x)
    assert_close(got[1].get(layers.calls), jnp.stack(counts))


# -- nesting -----------------------------------------------------------------------------


def test_a_scan_within_a_scan_with_modules_in_both():
    def outer(scan):
        inner = lambda c, x: ((c[0], jnp.tanh(c[0](c[1]) + x)), None)

        def step(carry, x):
            (net, h), _ = scan(inner, (carry[0], x), XS)
            return (net, carry[1] + h), h

        return scan(step, (NET, XS[0]), XS)

    assert_close(outer(filter_scan), outer(python_scan))
