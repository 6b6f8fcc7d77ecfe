"""The traced body and its cache: traced once, never wrong, kept no longer than needed."""

import functools
import gc
import inspect
import threading
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array
from versions import enable_x64

from loopax import (
    MismatchError,
    _body,
    filter_fori_loop,
    filter_map,
    filter_scan,
    filter_while_loop,
)
from loopax._body import Body, Calling, _signature, _with_code
from loopax._call import Call, Operands
from loopax._split import closed_over


# -- the loops, with bodies of one form --------------------------------------------------


class Loop:
    """A loop of three steps over a carry, for bodies that are written once for all.

    `carry` finds the carry among the arguments of the body, and `result` makes of them and
    of the new carry what the body returns.
    """

    def __init__(self, run, carry, result):
        self.run = run
        self.carry = carry
        self.result = result

    def body(self, update):
        return lambda *args: self.result(args, update(self.carry(args)))


def three_more(state):
    return state["n"] < 3


LOOPS = {
    "scan": Loop(
        lambda body, carry: filter_scan(body, carry, length=3)[0],
        lambda args: args[0],
        lambda args, carry: (carry, None),
    ),
    # The steps are counted beside the carry.
    "while": Loop(
        lambda body, carry: filter_while_loop(
            three_more, body, {"n": jnp.int32(0), "carry": carry}
        )["carry"],
        lambda args: args[0]["carry"],
        lambda args, carry: {"n": args[0]["n"] + 1, "carry": carry},
    ),
    "fori": Loop(
        lambda body, carry: filter_fori_loop(0, 3, body, carry),
        lambda args: args[1],
        lambda args, carry: carry,
    ),
}


@pytest.fixture(params=LOOPS)
def loop(request):
    return LOOPS[request.param]


# What is the same code for every loop is tried on one.
SCAN = LOOPS["scan"]


def Counter():
    """Counts traces. A function, whose attributes do not count for what it is."""

    def counter():
        raise NotImplementedError

    counter.count = 0
    return counter


X = jnp.array([1.0, 2.0, 3.0])
XS = jr.normal(jr.key(0), (4, 3))


def apply(loop, counter, weight, *args):
    counter.count += 1
    return loop.result(args, weight * loop.carry(args) + 1)


def applied(weight):
    """What three steps of `apply` make of `X`."""
    x = X
    for _ in range(3):
        x = weight * x + 1
    return x


class Applied(eqx.Module):
    weight: Array
    loop: Loop = eqx.field(static=True)
    counter: Counter = eqx.field(static=True)

    def __call__(self, *args):
        return apply(self.loop, self.counter, self.weight, *args)

    def method(self, *args):
        return self(*args)


class Opaque:
    def __init__(self, weight, loop, counter):
        self.weight, self.loop, self.counter = weight, loop, counter

    def __call__(self, *args):
        return apply(self.loop, self.counter, self.weight, *args)


# -- traced once -------------------------------------------------------------------------

WITH_NEW_ARRAYS = {
    "Module": lambda loop, counter, w: Applied(w, loop, counter),
    "bound method of a Module": lambda loop, counter, w: Applied(w, loop, counter).method,
    "__call__ of a Module": lambda loop, counter, w: Applied(w, loop, counter).__call__,
    "functools.partial": lambda *parts: functools.partial(apply, *parts),
    "functools.partial of functools.partial": lambda loop, counter, w: functools.partial(
        functools.partial(apply, loop, counter), w
    ),
    "functools.partial of a method": lambda loop, counter, w: functools.partial(
        Applied(w, loop, counter).method
    ),
    "functools.partial of a Module": lambda loop, counter, w: functools.partial(
        Applied.method, Applied(w, loop, counter)
    ),
    "eqx.Partial": lambda *parts: eqx.Partial(apply, *parts),
    "jax.tree_util.Partial": lambda *parts: jax.tree_util.Partial(apply, *parts),
}


@pytest.mark.parametrize("kind", WITH_NEW_ARRAYS)
def test_a_body_with_new_arrays_is_not_traced_again(loop, kind):
    counter = Counter()
    first = loop.run(WITH_NEW_ARRAYS[kind](loop, counter, jnp.float32(2)), X)
    traced = counter.count
    second = loop.run(WITH_NEW_ARRAYS[kind](loop, counter, jnp.float32(5)), X)
    third = loop.run(WITH_NEW_ARRAYS[kind](loop, counter, np.float32(7)), X)
    assert traced > 0
    assert counter.count == traced
    assert eqx.tree_equal([first, second, third], [*map(applied, (2.0, 5.0, 7.0))])


def make_function(loop, counter):
    return lambda *args: apply(loop, counter, 2.0, *args)


def make_jitted(loop, counter):
    return jax.jit(make_function(loop, counter))


def make_opaque(loop, counter):
    return Opaque(2.0, loop, counter)


def make_partial(loop, counter):
    return functools.partial(apply, loop, counter, 2.0)


@pytest.mark.parametrize("make", [make_function, make_jitted, make_opaque, make_partial])
def test_the_same_body_on_new_values_is_not_traced_again(loop, make):
    counter = Counter()
    body = make(loop, counter)
    first = loop.run(body, X)
    traced = counter.count
    again = [loop.run(body, k * X) for k in (1, 2, 3)]
    assert traced > 0
    assert counter.count == traced
    assert eqx.tree_equal(first, applied(2.0))
    assert eqx.tree_equal(again[0], first)
    assert not eqx.tree_equal(again[1], again[2])


def test_a_bound_method_taken_anew_from_an_object_is_not_traced_again(loop):
    counter = Counter()
    thing = Opaque(2.0, loop, counter)
    assert thing.__call__ is not thing.__call__
    loop.run(thing.__call__, X)
    traced = counter.count
    assert eqx.tree_equal(loop.run(thing.__call__, X), applied(2.0))
    assert counter.count == traced


def test_a_predicate_with_new_arrays_is_not_traced_again():
    def below(counter, limit, carry):
        counter.count += 1
        return carry < limit

    counter, body = Counter(), lambda carry: carry + 1
    run = lambda limit: filter_while_loop(
        functools.partial(below, counter, limit), body, jnp.float32(0)
    )
    assert float(run(jnp.float32(3))) == 3.0
    traced = counter.count
    assert float(run(jnp.float32(5))) == 5.0
    assert counter.count == traced


def test_functions_in_the_carry_do_not_cause_a_new_trace(loop):
    counter = Counter()

    def update(carry):
        counter.count += 1
        return {**carry, "x": carry["fn"](carry["x"])}

    body = loop.body(update)
    run = lambda fn: loop.run(body, {"fn": fn, "x": X, "net": NET, "name": "t"})["x"]
    run(jnp.sin)
    traced = counter.count
    run(jnp.sin)
    assert counter.count == traced
    got = run(jnp.tanh)
    assert counter.count > traced
    assert jnp.allclose(got, jnp.tanh(jnp.tanh(jnp.tanh(X))))


NET = eqx.nn.MLP(3, 3, 4, 1, key=jr.key(0))


def test_a_module_in_the_carry_with_new_weights_does_not_cause_a_new_trace(loop):
    counter = Counter()

    def update(carry):
        counter.count += 1
        return carry[0], carry[0](carry[1])

    body = loop.body(update)
    other = eqx.nn.MLP(3, 3, 4, 1, key=jr.key(1))
    loop.run(body, (NET, X))
    traced = counter.count
    got = loop.run(body, (other, X))[1]
    assert counter.count == traced
    assert jnp.allclose(got, other(other(other(X))), rtol=1e-5)


def test_static_leaves_of_xs_do_not_cause_a_new_trace():
    counter = Counter()

    def step(carry, x):
        counter.count += 1
        return carry, x["fn"](x["x"])

    run = lambda fn, name: filter_scan(step, None, {"x": XS, "fn": fn, "name": name})[1]
    run(jnp.sin, "a")
    traced = counter.count
    run(jnp.sin, "a")
    assert counter.count == traced
    assert jnp.allclose(run(jnp.cos, "a"), jnp.cos(XS))
    assert counter.count > traced


def test_a_second_jit_does_not_trace_the_body_again(loop):
    counter = Counter()
    body = make_function(loop, counter)
    jax.jit(lambda x: loop.run(body, x))(X)
    traced = counter.count
    got = jax.jit(lambda x: 2 * loop.run(body, x))(X)
    assert counter.count == traced
    assert eqx.tree_equal(got, 2 * applied(2.0))


def test_a_call_in_a_loop_of_python_is_traced_once(loop):
    counter = Counter()

    @jax.jit
    def run(weights, x):
        for weight in weights:
            x = loop.run(Applied(weight, loop, counter), x)
        return x

    run([jnp.float32(2)], X)
    traced = counter.count
    run([jnp.float32(2)] * 4, X)
    assert counter.count == traced


# -- traced anew, where it must be -------------------------------------------------------


def test_new_shapes_and_dtypes_are_traced_anew(loop):
    counter = Counter()
    body = make_function(loop, counter)
    for x in (X, X[:2], X.astype(jnp.float16), X[None]):
        before = counter.count
        got = loop.run(body, x)
        assert counter.count > before
        assert (got.shape, got.dtype) == (x.shape, x.dtype)


LOOK_ALIKES = [
    (1, True, 1.0, 1 + 0j),
    (0, False, 0.0, -0.0),
    ("1", b"1", 1),
    ((1, 2), (True, 2), (1.0, 2)),
    (float("nan"), float("inf")),
]


def read(loop, value_of):
    """A body in which the static value decides what is added."""

    def update(carry):
        return {**carry, "x": carry["x"] + len(repr(value_of(carry)))}

    return loop.body(update)


@pytest.mark.parametrize("values", LOOK_ALIKES, ids=repr)
def test_equal_static_leaves_of_different_types_are_not_confused(loop, values):
    body = read(loop, lambda carry: carry["value"])
    for value in (*values, *values):
        out = loop.run(body, {"value": value, "x": jnp.int32(0)})
        assert repr(out["value"]) == repr(value)
        assert int(out["x"]) == 3 * len(repr(value))


class Fielded(eqx.Module):
    x: Array
    value: Any = eqx.field(static=True)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("values", [*LOOK_ALIKES, (np.int64(1), 1, np.bool_(True))], ids=repr)
def test_equal_static_fields_of_different_types_are_not_confused(values):
    def update(carry):
        return Fielded(carry.x + len(repr(carry.value)), carry.value)

    body = SCAN.body(update)
    for value in (*values, *values):
        out = SCAN.run(body, Fielded(jnp.int32(0), value))
        assert repr(out.value) == repr(value)
        assert int(out.x) == 3 * len(repr(value))


@pytest.mark.parametrize("values", LOOK_ALIKES, ids=repr)
@pytest.mark.parametrize("partial", [functools.partial, eqx.Partial])
def test_equal_values_in_a_partial_are_not_confused(values, partial):
    def step(value, *args):
        return SCAN.result(args, SCAN.carry(args) + len(repr(value)))

    for value in (*values, *values):
        assert int(SCAN.run(partial(step, value), jnp.int32(0))) == 3 * len(repr(value))


def test_equal_values_in_xs_are_not_confused():
    step = lambda c, x: (c + len(repr(x["value"])), (x["value"], c))
    for value in (1, True, 1.0, 1, True):
        out, (same, _) = filter_scan(step, jnp.int32(0), {"value": value}, length=3)
        assert repr(same) == repr(value)
        assert int(out) == 3 * len(repr(value))


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_arrays_in_static_fields_are_told_apart_by_value():
    body = SCAN.body(lambda c: Fielded(c.x + int(c.value.sum()), c.value))
    for table in (np.arange(3), np.arange(4), np.zeros(3), np.arange(3)):
        out = SCAN.run(body, Fielded(jnp.int32(0), table))
        assert out.value is table
        assert int(out.x) == 3 * int(table.sum())


def test_static_fields_with_equal_reprs_are_told_apart():
    class Setting:
        def __init__(self, by):
            self.by = by

        def __eq__(self, other):
            return isinstance(other, Setting) and self.by == other.by

        def __hash__(self):
            return 0

        def __repr__(self):
            return "Setting()"

    body = SCAN.body(lambda c: Fielded(c.x + c.value.by, c.value))
    for by in (1, 2, 1):
        assert int(SCAN.run(body, Fielded(jnp.int32(0), Setting(by))).x) == 3 * by


def test_trace_numbers_and_its_absence_are_not_confused():
    seen = []

    def step(carry, x):
        seen.append(eqx.is_array(carry["n"]))
        return carry, (carry["n"], x)

    for trace_numbers in (False, True, False):
        ns, _ = filter_scan(step, {"n": 1}, XS, trace_numbers=trace_numbers)[1]
        assert np.shape(ns) == ((4,) if trace_numbers else ())
    assert seen == [False, True]


def test_functions_of_one_code_over_different_values_are_not_confused(loop):
    make = lambda by: loop.body(lambda c: c + by)
    one, two = make(1), make(2)
    assert [int(loop.run(f, jnp.int32(0))) for f in (one, two, one)] == [3, 6, 3]


def test_a_function_made_anew_sees_what_has_changed_in_what_it_closes_over(loop):
    box = [1]
    make = lambda: loop.body(lambda c: c + box[0])
    old = make()
    assert int(loop.run(old, jnp.int32(0))) == 3
    box[0] = 5
    new = make()
    assert int(loop.run(new, jnp.int32(0))) == 15


def test_functions_at_the_address_of_dead_ones_are_not_taken_for_them():
    for by in range(8):
        body = SCAN.body(lambda c: c + by)
        assert int(SCAN.run(body, jnp.int32(0))) == 3 * by
        del body


def test_objects_at_the_address_of_dead_ones_are_not_taken_for_them():
    class Setting:
        def __init__(self, by):
            self.by = by

    step = lambda c, _: (Fielded(c.x + c.value.by, c.value), None)
    for by in range(8):
        out = filter_scan(step, Fielded(jnp.int32(0), Setting(by)), length=3)[0]
        assert int(out.x) == 3 * by
        del out


def test_loops_with_the_same_body_are_not_confused():
    def body(*args):
        return tuple(args)

    out = filter_fori_loop(0, 3, lambda i, c: body(i, c)[1] + 1, jnp.int32(0))
    carry, ys = filter_scan(body, jnp.int32(0), jnp.arange(3))
    assert (int(out), int(carry), ys.tolist()) == (3, 0, [0, 1, 2])


def test_one_function_may_be_body_and_predicate():
    negate = lambda c: ~c
    assert bool(filter_while_loop(negate, negate, jnp.bool_(False))) is True


def test_results_of_a_cached_trace_follow_the_precision_in_force(loop):
    body = loop.body(lambda c: {**c, "x": c["x"] + jnp.zeros(()).sum() + 1})
    run = lambda: loop.run(body, {"x": jnp.zeros(()), "name": "t"})["x"].dtype
    assert run() == jnp.float32
    with enable_x64():
        assert run() == jnp.float64
    assert run() == jnp.float32


# -- what cannot be hashed or compared ---------------------------------------------------


class RaisesOnEquality:
    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("not to be compared")


class RaisesOnHash:
    def __hash__(self):
        raise RuntimeError("not to be hashed")


class AnswersWithArray:
    __hash__ = None

    def __eq__(self, other):
        return np.array([True, False])


class HashesButRaises:
    def __hash__(self):
        return 0

    def __eq__(self, other):
        raise RuntimeError("not to be compared")


ODD = {
    "set": {1, 2},
    "bytearray": bytearray(b"ab"),
    "raises on equality": RaisesOnEquality(),
    "raises on hash": RaisesOnHash(),
    "answers with an array": AnswersWithArray(),
    "hashes but raises on equality": HashesButRaises(),
    "slice": slice(0, 2),
    "not equal to itself": type("Never", (), {"__eq__": lambda a, b: False})(),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_static_leaves_work_in_the_carry(loop, name):
    odd = ODD[name]
    body = loop.body(lambda c: {**c, "x": c["x"] + 1})
    for start in (0, 5):
        out = loop.run(body, {"odd": odd, "x": jnp.int32(start)})
        assert out["odd"] is odd
        assert int(out["x"]) == start + 3


@pytest.mark.parametrize("name", ODD)
def test_odd_static_fields_work_in_the_carry(name):
    odd = ODD[name]
    body = SCAN.body(lambda c: Fielded(c.x + 1, c.value))
    for start in (0, 5):
        out = SCAN.run(body, Fielded(jnp.int32(start), odd))
        assert out.value is odd
        assert int(out.x) == start + 3


@pytest.mark.parametrize("name", ODD)
def test_odd_static_leaves_work_in_xs_and_ys(name):
    odd = ODD[name]
    step = lambda c, x: (c + 1, (x["odd"], Fielded(c, odd)))
    for start in (0, 5):
        _, ys = filter_scan(step, jnp.int32(start), {"odd": odd}, length=3)
        assert ys[0] is odd
        assert ys[1].value is odd
        assert ys[1].x.tolist() == [start, start + 1, start + 2]


@pytest.mark.parametrize("name", ODD)
def test_odd_static_leaves_work_under_jit_jvp_and_vmap(name):
    odd = ODD[name]
    body = SCAN.body(lambda c: {**c, "x": 2 * c["x"]})
    run = lambda x: SCAN.run(body, {"odd": odd, "x": x})["x"]
    assert jnp.allclose(jax.jit(run)(X), 8 * X)
    assert jnp.allclose(jax.vmap(run)(X), 8 * X)
    assert jnp.allclose(jax.jvp(run, (X,), (X,))[1], 8 * X)


def test_a_changed_value_that_cannot_be_hashed_is_seen(loop):
    body = loop.body(lambda c: {**c, "tags": c["tags"] | {"new"}})
    with pytest.raises(MismatchError, match="tags"):
        loop.run(body, {"tags": {"old"}, "x": X})


def test_an_unhashable_value_that_was_mutated_is_read_anew(loop):
    tags = {1}
    body = loop.body(lambda c: {**c, "x": c["x"] + len(c["tags"])})
    run = lambda: int(loop.run(body, {"tags": tags, "x": jnp.int32(0)})["x"])
    assert run() == 3
    tags.add(2)
    assert run() == 6


def test_a_list_in_a_static_field_that_was_mutated_is_read_anew():
    sizes = [1]
    body = SCAN.body(lambda c: Fielded(c.x + sum(c.value), c.value))
    run = lambda: int(SCAN.run(body, Fielded(jnp.int32(0), sizes)).x)
    assert run() == 3
    sizes.append(1)
    assert run() == 6


# -- nothing is kept alive ---------------------------------------------------------------


@pytest.fixture
def no_gc():
    """Whatever dies in the test dies by its reference count."""
    gc.disable()
    yield
    gc.enable()


class Held:
    """Stands for something large: what holds on to it is a leak."""

    def __init__(self):
        self.by = 1

    def update(self, loop, *args):
        return loop.result(args, loop.carry(args) + self.by)


def returning(value):
    return lambda: value


def in_body_closure(loop, held):
    return loop.run(loop.body(lambda c: c + held.by), X)


def in_body_partial(loop, held):
    def step(held, *args):
        return loop.result(args, loop.carry(args) + held.by)

    return loop.run(functools.partial(step, held), X)


def in_body_module(loop, held):
    class Body(eqx.Module):
        held: Held = eqx.field(static=True)

        def __call__(self, *args):
            return loop.result(args, loop.carry(args) + self.held.by)

    return loop.run(Body(held), X)


def as_receiver(loop, held):
    return loop.run(functools.partial(held.update, loop), X)


def in_carry(loop, held):
    return loop.run(loop.body(lambda c: (c[0], c[1] + c[0].by)), (held, X))


def in_closure_in_carry(loop, held):
    fn = lambda x: x + held.by
    return loop.run(loop.body(lambda c: (c[0], c[0](c[1]))), (fn, X))


def in_partial_in_carry(loop, held):
    fn = functools.partial(lambda held, x: x + held.by, held)
    return loop.run(loop.body(lambda c: (c[0], c[0](c[1]))), (fn, X))


def in_static_field(loop, held):
    return loop.run(loop.body(lambda c: Fielded(c.x + c.value.by, c.value)), Fielded(X, held))


def in_closure_in_static_field(loop, held):
    fn = lambda x: x + held.by
    return loop.run(loop.body(lambda c: Fielded(c.value(c.x), c.value)), Fielded(X, fn))


def in_container_in_static_field(loop, held):
    body = loop.body(lambda c: Fielded(c.x + c.value["held"][0].by, c.value))
    return loop.run(body, Fielded(X, {"held": (held,)}))


HOLDERS = [
    in_body_closure,
    in_body_partial,
    in_body_module,
    as_receiver,
    in_carry,
    in_closure_in_carry,
    in_partial_in_carry,
    in_static_field,
    in_closure_in_static_field,
    in_container_in_static_field,
]


@pytest.mark.parametrize("program", HOLDERS)
def test_what_a_call_was_given_is_freed_when_the_caller_lets_go(loop, program, no_gc):
    held = Held()
    alive = weakref.ref(held)
    for leaf in jax.tree.leaves(eqx.filter(program(loop, held), eqx.is_array)):
        assert jnp.array_equal(leaf, X + 3)
    del held
    assert alive() is None


# The same, with the body in a place where it outlives the call.


def forever_scan(carry, x):
    return carry, (carry, x)


def forever_update(*args):
    return args[-1]


def test_a_body_that_lives_on_keeps_nothing_of_what_was_carried(no_gc):
    held = Held()
    alive = weakref.ref(held)
    carry = {"held": held, "fn": returning(held), "x": X, "field": Fielded(X, held)}
    xs = {"held": held, "fn": returning(held), "xs": XS, "field": Fielded(XS, held)}
    filter_scan(forever_scan, carry, xs)
    filter_fori_loop(0, 3, forever_update, carry)
    filter_while_loop(lambda c: c["x"][0] < 0, forever_update, carry)
    del held, carry, xs
    assert alive() is None


def test_a_predicate_is_freed_when_the_caller_lets_go(no_gc):
    held = Held()
    alive = weakref.ref(held)

    def run(held):
        filter_while_loop(lambda c: c[0] < held.by, forever_update, X)

    run(held)
    del held
    assert alive() is None


def test_arrays_that_a_body_closes_over_are_freed_with_it(loop, no_gc):
    array = jnp.ones(3)
    alive = weakref.ref(array)
    get = returning(array)
    body = loop.body(lambda c, get=get: c + get())
    loop.run(body, X)
    del array, get
    assert alive() is not None
    del body
    assert alive() is None


def test_what_ys_hold_is_freed_with_the_body_and_the_result(no_gc):
    held = Held()
    alive = weakref.ref(held)

    def make(held):
        return lambda c, x: (c, (lambda: held, held, Fielded(x, held)))

    step = make(held)
    ys = filter_scan(step, None, XS)[1]
    assert ys[0]() is held
    del held, ys
    assert alive() is not None
    del step
    assert alive() is None


def calls_its_function(carry, x):
    return {**carry, "x": carry["fn"](carry["x"])}, x


def adds_its_table(carry, x):
    return Fielded(carry.x + carry.value, carry.value), x


def array_in_a_partial_in_the_carry(array):
    carry = {"fn": functools.partial(jnp.add, array), "x": X}
    filter_scan(calls_its_function, carry, XS)


def array_in_a_closure_in_the_carry(array):
    filter_scan(calls_its_function, {"fn": lambda x: x + array, "x": X}, XS)


def array_in_a_static_field(array):
    filter_scan(adds_its_table, Fielded(X, array), XS)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize(
    "program",
    [
        array_in_a_partial_in_the_carry,
        array_in_a_closure_in_the_carry,
        array_in_a_static_field,
    ],
)
def test_a_body_that_lives_on_keeps_no_array_of_what_was_carried(program, no_gc):
    array = jnp.ones(3)
    alive = weakref.ref(array)
    program(array)
    del array
    assert alive() is None


class Environment:
    def reward(self, x):
        return -x

    def step(self, carry, x):
        return carry + x, {"reward": self.reward, "row": x}

    def itself(self, carry, x):
        return carry + x, self


@pytest.mark.parametrize("method", ["step", "itself"])
def test_a_receiver_that_appears_in_ys_is_freed(method, no_gc):
    environment = Environment()
    alive = weakref.ref(environment)
    filter_scan(getattr(environment, method), jnp.zeros(3), XS)
    del environment
    assert alive() is None


def test_a_body_that_appears_in_ys_is_freed(no_gc):
    def run():
        def step(carry, x):
            return carry, (step, x)

        ys = filter_scan(step, None, XS)[1]
        assert ys[0] is step
        alive = weakref.ref(step)
        # A function that names itself is a cycle of its own. Break it.
        step = None
        return alive

    assert run()() is None


def test_the_cache_is_as_large_as_what_is_alive(loop, no_gc):
    before = len(_body._bodies)
    bodies = [loop.body(lambda c, k=k: c + k) for k in range(3)]
    for body in bodies:
        loop.run(body, X)
    assert len(_body._bodies) >= before + 3
    del body, bodies
    assert len(_body._bodies) <= before + 1  # The predicate of the while loop lives on.


def test_a_full_cache_lets_go_of_the_body_that_was_used_longest_ago(monkeypatch):
    def counted(k):
        def step(carry, _):
            traced[k] += 1
            return carry + k, None

        return step

    def run(k):
        return filter_scan(bodies[k], X, None, length=2)[0]

    traced = [0] * 4
    bodies = [counted(k) for k in range(4)]
    monkeypatch.setattr(_body, "_bodies", {})
    monkeypatch.setattr(_body, "_CAPACITY", 3)
    for k in (0, 1, 0, 2, 3):
        run(k)
    assert len(_body._bodies) == 3
    assert traced == [1, 1, 1, 1]
    assert jnp.allclose(run(0), X)
    assert traced == [1, 1, 1, 1]
    assert jnp.allclose(run(1), X + 2)
    assert traced == [1, 2, 1, 1]


# -- leaks of tracers --------------------------------------------------------------------


def over_traced_values(loop):
    """A program with traced values in the body's closure, in its partial and in a Module."""

    def run(x):
        def step(weight, *args):
            carry = loop.carry(args)
            h = jnp.tanh(weight * carry["net"](carry["h"]) + x)
            return loop.result(args, {**carry, "h": h})

        net = eqx.tree_at(lambda net: net.layers[-1].bias, NET, x)
        init = {"net": net, "h": X, "fn": returning(None)}
        return loop.run(functools.partial(step, x), init)["h"]

    return run


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": lambda run: lambda x: jax.vmap(run)(jnp.stack([x, 2 * x])),
    "jvp": lambda run: lambda x: jax.jvp(run, (x,), (x,)),
    "grad": lambda run: jax.grad(lambda x: jnp.sum(run(x))),
}
REVERSE = [
    (loop, transform)
    for loop in LOOPS
    for transform in TRANSFORMS
    if transform != "grad" or loop in ("scan", "fori")
]


@pytest.mark.parametrize(("name", "transform"), REVERSE)
def test_no_tracer_leaks(name, transform):
    run = TRANSFORMS[transform](over_traced_values(LOOPS[name]))
    want = run(X)
    with jax.checking_leaks():
        got = TRANSFORMS[transform](over_traced_values(LOOPS[name]))(X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5)


def test_no_tracer_leaks_from_traced_bounds():
    def run(n):
        return filter_fori_loop(0, n, lambda i, c: (c[0] + n, c[1]), (X, "t"))[0]

    with jax.checking_leaks():
        assert eqx.tree_equal(jax.jit(run)(2), X + 4)
        assert eqx.tree_equal(jax.vmap(run)(jnp.arange(3)), jnp.stack([X, X + 1, X + 4]))


def test_no_tracer_leaks_from_a_predicate_over_traced_values():
    def run(limit):
        return filter_while_loop(lambda c: jnp.sum(c) < limit, lambda c: c + 1, X)

    with jax.checking_leaks():
        assert eqx.tree_equal(jax.jit(run)(12.0), X + 2)
        assert eqx.tree_equal(jax.vmap(run)(jnp.array([6.0, 9.0]))[1], X + 1)


# -- recursion and threads ---------------------------------------------------------------


def test_a_body_may_call_the_loop_that_it_is_the_body_of(loop):
    def update(carry):
        if carry["depth"] == 0:
            return {**carry, "x": carry["x"] + 1}
        inner = loop.run(body, {**carry, "depth": carry["depth"] - 1})
        return {**carry, "x": inner["x"]}

    body = loop.body(update)
    for depth in (0, 1, 2):
        out = loop.run(body, {"depth": depth, "x": jnp.int32(0)})
        assert (int(out["x"]), out["depth"]) == (3 ** (depth + 1), depth)


def test_recursion_with_nothing_changed_is_refused_as_lax_refuses_it():
    def recursion_error(scan):
        def body(carry, x):
            return scan(body, carry, length=3)

        with pytest.raises(RecursionError) as caught:
            scan(body, jnp.int32(0), length=3)
        return str(caught.value)

    for scan in (lax.scan, filter_scan):
        assert recursion_error(scan).startswith("Recursively calling")


def in_threads(number, function):
    """What `function` gives for 0, 1, ..., each in a thread, all at once."""
    results = [None] * number
    barrier = threading.Barrier(number)

    def run(i):
        barrier.wait()
        try:
            results[i] = function(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_that_share_a_body_get_each_their_own_results(loop):
    counter = Counter()
    weights = [jnp.float32(i) for i in range(8)]
    run = lambda i: loop.run(Applied(weights[i], loop, counter), X)
    got = in_threads(8, run)
    assert eqx.tree_equal(got, [applied(float(i)) for i in range(8)])


def test_threads_that_share_a_body_get_each_their_own_static_leaves():
    def step(carry, x):
        return {**carry, "x": carry["x"] + len(carry["name"])}, (carry["name"], x["tag"])

    def run(i):
        for _ in range(3):
            carry = {"name": "n" * i, "x": jnp.int32(0), "mark": marks[i]}
            xs = {"tag": f"tag {i}", "x": XS}
            out, ys = filter_scan(step, carry, xs)
        return int(out["x"]), out["name"], out["mark"], *ys

    marks = [object() for _ in range(8)]
    assert in_threads(8, run) == [
        (4 * i, "n" * i, marks[i], "n" * i, f"tag {i}") for i in range(8)
    ]


def test_threads_that_make_and_drop_bodies_get_right_results(loop):
    def run(i):
        return [int(loop.run(loop.body(lambda c: c + i), jnp.int32(0))) for _ in range(3)]

    assert in_threads(6, run) == [[3 * i] * 3 for i in range(6)]


# -- failures ----------------------------------------------------------------------------


def test_a_body_that_failed_may_be_called_again(loop):
    failing = [True]

    def update(carry):
        if failing[0]:
            raise ZeroDivisionError("the user's own")
        return carry + 1

    body = loop.body(update)
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        loop.run(body, X)
    failing[0] = False
    assert eqx.tree_equal(loop.run(body, X), X + 3)


def calls_in_progress():
    return [call for body in _body._bodies.values() for call in body.calls]


def test_a_failed_trace_leaves_no_call_in_progress(loop):
    def fails(carry):
        seen.append(len(calls_in_progress()))
        raise ZeroDivisionError

    seen = []
    body = loop.body(fails)
    with pytest.raises(ZeroDivisionError):
        loop.run(body, X)
    assert seen[0] > 0
    assert calls_in_progress() == []


def test_a_mismatch_leaves_no_call_in_progress(loop):
    body = loop.body(lambda c: {**c, "name": c["name"] + "!"})
    with pytest.raises(MismatchError):
        loop.run(body, {"x": X, "name": "t"})
    assert calls_in_progress() == []


def test_a_failed_trace_keeps_nothing_alive(loop, no_gc):
    def fails(loop, held):
        def update(carry):
            raise ZeroDivisionError(held.by)

        with pytest.raises(ZeroDivisionError) as caught:
            loop.run(loop.body(update), X)
        # The traceback holds the frames, and they hold everything else.
        caught.value.__traceback__ = None
        del caught

    held = Held()
    alive = weakref.ref(held)
    fails(loop, held)
    del held
    gc.collect()
    assert alive() is None


# -- what JAX is told of a body ----------------------------------------------------------


def test_the_signature_that_jax_sees_holds_nothing_of_the_users():
    class Held:
        pass

    def body(carry: Held, x=Held(), *, key: Held = Held()):  # noqa: B008
        return carry

    signature = _signature(body)
    assert list(signature.parameters) == ["carry", "x", "key"]
    for each, like in zip(
        signature.parameters.values(), inspect.signature(body).parameters.values(), strict=True
    ):
        assert each.kind is like.kind
        assert each.annotation is inspect.Parameter.empty
        assert each.default in (inspect.Parameter.empty, None)
        assert (each.default is None) == (like.default is not inspect.Parameter.empty)


def test_the_function_that_jax_names_is_the_one_that_is_called_in_the_end():
    def body(carry, x):
        return carry, x

    class Callable(eqx.Module):
        def __call__(self, carry, x):
            return carry, x

    assert _with_code(functools.partial(functools.partial(body, 1), 2)) is body
    assert _with_code(body) is body
    assert _with_code(Callable()).__func__ is Callable.__call__


def test_a_body_between_calls_has_no_function():
    body, call = _a_body(lambda carry, x: (carry, x))
    with body.during(call):
        assert body.__wrapped__ is call.function
    with pytest.raises(AttributeError, match="__wrapped__"):
        _ = body.__wrapped__


def _a_body(function):
    split = closed_over(function)
    call = Call("filter_scan", function, False, Operands(split))
    return Body(Calling(lambda step, *trees: trees, "scan"), call), call


def test_methods_of_what_a_body_makes_come_out_bound():
    class Made:
        def __init__(self, n):
            self.n = n

        def get(self):
            return self.n

    def body(carry, x):
        return carry, (Made(3).get, x)

    for _ in range(2):
        _, (get, _) = filter_scan(body, jnp.ones(()), jnp.ones(2))
        assert get() == 3


def test_a_module_with_arrays_is_mapped():
    linear = eqx.nn.Linear(2, 3, key=jr.key(0))
    xs = jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_allclose(filter_map(linear, xs), jax.vmap(linear)(xs), rtol=1e-6)
