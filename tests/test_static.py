"""What is static, when two static values are the same, and when a trace is used again."""

import collections
import dataclasses
import datetime
import enum
import functools
import itertools
import math
import operator
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from jax import lax

import loopax
from loopax._body import _bodies
from loopax._static import (
    is_dynamic,
    is_number,
    is_reference,
    is_scalar,
    nodes,
    same,
    same_structure,
)
from loopax._token import NoToken, Tokens


class Mode(enum.Enum):
    TRAIN = "train"
    TEST = "test"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(collections.namedtuple("Point", ["x"])):
    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: Any

    def get(self):
        return self.rate


@dataclasses.dataclass
class Config:
    """Compared by value, and therefore not hashable."""

    rate: Any

    def get(self):
        return self.rate


class Layer(eqx.Module):
    weight: Any
    rate: Any = eqx.field(static=True, default=None)

    # Equinox makes a Module of any other method that is taken from one.
    def __call__(self, x):
        return self.weight * x

    def apply(self, x):
        return self.weight * x

    def other(self, x):
        return x


@functools.partial(jtu.register_dataclass, data_fields=["weight"], meta_fields=["table"])
@dataclasses.dataclass
class Lookup:
    """Equinox warns of arrays in static fields; this does not."""

    weight: Any
    table: Any


class Agent:
    """Compared by identity, as objects are unless they say otherwise."""

    def act(self):
        return None

    def rest(self):
        return None


class Named:
    """Compared by value."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self):
        return hash(self.name)

    def act(self):
        return self.name


class Vague:
    """Its `==` answers as `answer` does."""

    def __init__(self, answer):
        self.answer = answer

    def __eq__(self, other):
        return self.answer()

    __hash__ = object.__hash__


class Slotted:
    """Compared by identity, with its attributes in slots."""

    __slots__ = ("__weakref__", "rate")

    def __init__(self, rate):
        self.rate = rate


class Single:
    """A slot may be named by one string."""

    __slots__ = "rate"

    def __init__(self, rate):
        self.rate = rate


class Bare:
    """No attribute, nothing that a weak reference could be kept in."""

    __slots__ = ()


class Alike(Bare):
    """Equal to each of its class, and written like none of them."""

    __slots__ = ()

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 0


class Chatty(Named):
    """What it is written as says when."""

    times = itertools.count()

    def __repr__(self):
        return f"Chatty({self.name}, {next(self.times)})"


class Unwritable:
    """Equal by value, without attributes, and cannot be written."""

    __slots__ = ()

    def __eq__(self, other):
        return isinstance(other, Unwritable)

    def __hash__(self):
        return 0

    def __repr__(self):
        raise RuntimeError("written")


def fails():
    raise RuntimeError("compared")


def token_of(value):
    return Tokens().of(value)


def add(x, y=0):
    return x + y


def nan():
    """A NaN that is no object seen before."""
    return float("nan")


# -- what is dynamic ---------------------------------------------------------------------

ARRAYS = {
    "jax array": jnp.ones(2),
    "jax scalar": jnp.asarray(1),
    "boolean array": jnp.asarray(True),
    "numpy array": np.ones(2),
    "numpy integers": np.arange(3),
    "numpy bfloat16": np.ones(2, ml_dtypes.bfloat16),
    "numpy empty": np.zeros((0, 3)),
    "numpy scalar": np.float32(1),
    "numpy float64, a Python float too": np.float64(1),
    "numpy complex128, a Python complex too": np.complex128(1),
    "numpy boolean": np.bool_(True),
    "typed key": jr.key(0),
    "typed keys": jr.split(jr.key(0)),
    "legacy key": jr.PRNGKey(0),
}

NUMBERS = {"int": 1, "float": 0.5, "complex": 1j, "bool": True, "IntEnum": Level.LOW}

OTHERS = {
    "numpy string": np.array("a"),
    "numpy strings": np.array(["a", "b"]),
    "numpy bytes": np.array([b"a"]),
    "numpy string scalar": np.str_("a"),
    "numpy objects": np.array([None, "a"]),
    "numpy dates": np.array("2020-01-01", dtype="datetime64[D]"),
    "numpy durations": np.timedelta64(1, "s"),
    "numpy records": np.zeros(2, dtype=[("a", float)]),
    "string": "relu",
    "bytes": b"relu",
    "None": None,
    "Enum": Mode.TRAIN,
    "Python function": add,
    "NumPy function": np.tanh,
    "jitted function": jnp.tanh,
    "custom_jvp function": jax.nn.relu,
    "builtin function": math.sqrt,
    "bound method": Agent().act,
    "partial": functools.partial(add, 1),
    "class": Agent,
    "scalar type": jnp.float32,
    "dtype": np.dtype("float32"),
    "object": Agent(),
    "frozen dataclass": Settings(0.1),
    "slice": slice(0, 3),
    "set": {1, 2},
    "range": range(3),
}


def cases(table):
    return pytest.mark.parametrize(
        "leaf", [pytest.param(leaf, id=name) for name, leaf in table.items()]
    )


def either_way():
    return pytest.mark.parametrize("trace_numbers", [False, True])


@cases(ARRAYS)
@either_way()
def test_arrays_are_dynamic(leaf, trace_numbers):
    assert is_dynamic(leaf, trace_numbers)


@cases(NUMBERS)
def test_python_numbers_are_dynamic_on_request_only(leaf):
    assert not is_dynamic(leaf, trace_numbers=False)
    assert is_dynamic(leaf, trace_numbers=True)


@cases(OTHERS)
@either_way()
def test_everything_else_is_static(leaf, trace_numbers):
    assert not is_dynamic(leaf, trace_numbers)


@either_way()
def test_mutable_references_are_dynamic(trace_numbers):
    assert is_dynamic(jax.new_ref(jnp.zeros(2)), trace_numbers)


@either_way()
def test_shapes_without_values_are_static(trace_numbers):
    assert not is_dynamic(jax.ShapeDtypeStruct((2,), "float32"), trace_numbers)


def test_what_cannot_be_printed_is_static():
    class Unprintable:
        def __repr__(self):
            raise RuntimeError("no text")

    assert not is_dynamic(Unprintable(), trace_numbers=False)


def test_what_holds_itself_is_carried_and_no_trace_of_it_is_kept():
    traced = []

    def step(carry, x):
        traced.append(carry.table)
        return Lookup(carry.weight + x, cyclic("a")), None

    table = cyclic("a")
    with pytest.raises(NoToken):
        token_of(table)
    for _ in range(2):
        kept = set(_bodies)
        carry, _ = loopax.filter_scan(step, Lookup(jnp.zeros(()), table), jnp.ones(3))
        assert carry.weight == 3
        assert carry.table is table
        assert _bodies.keys() <= kept
    assert len(traced) == 2
    with pytest.raises(loopax.MismatchError):
        loopax.filter_scan(step, Lookup(jnp.zeros(()), cyclic("b")), jnp.ones(3))


@either_way()
def test_tracers_are_dynamic(trace_numbers):
    seen = []

    @jax.jit
    def function(x):
        seen.append(is_dynamic(x, trace_numbers))
        return x

    function(1.0)
    assert seen == [True]


def test_numpy_scalars_are_no_python_numbers():
    assert is_number(1.0)
    assert is_number(True)
    assert is_number(Level.LOW)
    assert not is_number(np.float64(1))
    assert not is_number(np.complex128(1))
    assert not is_number(jnp.asarray(1))


# -- same: equal values ------------------------------------------------------------------


def closure_over(value):
    def function(x):
        return x, value

    return function


def with_default(value):
    def function(x, y=value):
        return x, y

    return function


def with_keyword_default(value):
    def function(x, *, y=value):
        return x, y

    return function


def nested_closure(value):
    def inner(x):
        return x, value

    return lambda x: inner(x)


def recursive(value):
    def function(n):
        return value if n == 0 else function(n - 1)

    return function


def mutually_recursive(value):
    def even(n):
        return value if n == 0 else odd(n - 1)

    def odd(n):
        return even(n - 1)

    return even


def before_assignment():
    def function():
        return later

    if math.inf < 0:
        later = 1
    return function


def cyclic(value):
    items = [value]
    items.append(items)
    return items


ORDERS = itertools.cycle("CF")

# How to make two things that are no one object, and yet the same.
SAME = {
    "strings": lambda: "".join(["re", "lu"]),
    "integers": lambda: int("1000"),
    "floats": lambda: float("0.25"),
    "NaNs": nan,
    "complex NaNs": lambda: complex(1, nan()),
    "NumPy NaNs": lambda: np.float32(nan()),
    "tuples": lambda: (1, "a", (float("2"),)),
    "lists": lambda: [1, "a", [2.0]],
    "dicts": lambda: {"a": 1, "b": {"c": None}},
    "sets": lambda: {"a", "b"},
    "NaN in a tuple": lambda: (1, nan()),
    "NaN in a list": lambda: [1, [nan()]],
    "NaN in a dict": lambda: {"a": {"b": nan()}},
    "NaN in a namedtuple": lambda: Point(nan()),
    "NumPy arrays": lambda: np.arange(3.0),
    "NumPy arrays with NaN": lambda: np.array([1.0, nan()]),
    "NumPy arrays in other orders of memory": (
        lambda: np.array([[1, 2], [3, 4]], order=next(ORDERS))
    ),
    "NumPy strings": lambda: np.array(["a", "b"]),
    "NumPy scalars": lambda: np.float32(1.5),
    "frozen dataclasses": lambda: Settings((1, 2)),
    "values with an == of their own": lambda: Named("a"),
    "slices": lambda: slice(1, 2),
    "an == that answers with a NumPy boolean": lambda: Vague(lambda: np.bool_(True)),
    "functions made again": lambda: lambda x: x + 1,
    "equal closures": lambda: closure_over((1, nan())),
    "closures over equal functions": lambda: closure_over(closure_over("a")),
    "closures in closures": lambda: nested_closure("a"),
    "equal defaults": lambda: with_default([1]),
    "equal keyword defaults": lambda: with_keyword_default({"a": 1}),
    "recursive functions": lambda: recursive("a"),
    "mutually recursive functions": lambda: mutually_recursive("a"),
    "closures over what is not there yet": before_assignment,
    "lists that hold themselves": lambda: cyclic("a"),
    "bound methods of equal receivers": lambda: Named("a").act,
    "partials": lambda: functools.partial(add, 1, y=[2]),
    "partials of equal closures": lambda: functools.partial(closure_over(1), 2),
    "Equinox partials": lambda: eqx.Partial(add, 1, y="a"),
    "Modules": lambda: Layer("w", rate=(1, nan())),
}

ARRAY = jnp.ones(2)

DIFFERENT = {
    "values": ("relu", "tanh"),
    "True and 1": (True, 1),
    "False and 0": (False, 0),
    "1 and 1.0": (1, 1.0),
    "1.0 and 1+0j": (1.0, 1 + 0j),
    "1 and an IntEnum": (1, Level.LOW),
    "a float and a NumPy float": (1.0, np.float64(1)),
    "0 and None": (0, None),
    "NaN and a number": (nan(), 1.0),
    "complex NaNs with other parts": (complex(1, nan()), complex(2, nan())),
    "True and 1 in a tuple": ((True,), (1,)),
    "1 and 1.0 in a list": ([1], [1.0]),
    "1 and 1.0 in a dict": ({"a": 1}, {"a": 1.0}),
    "True and 1 in a namedtuple": (Point(True), Point(1)),
    "a tuple and a list": ((1,), [1]),
    "a tuple and a namedtuple": ((1,), Point(1)),
    "lengths": ((1, 2), (1, 2, 3)),
    "keys": ({"a": 1}, {"b": 1}),
    "one key more": ({"a": 1}, {"a": 1, "b": 2}),
    "NumPy dtypes": (np.ones(2, np.float32), np.ones(2, np.float64)),
    "NumPy shapes": (np.ones((2, 1)), np.ones((1, 2))),
    "NumPy values": (np.arange(3), np.arange(3) + 1),
    "NumPy zeros of either sign": (np.array([0.0]), np.array([-0.0])),
    "NumPy dates of other units": (np.datetime64(0, "s"), np.datetime64(0, "ms")),
    "NumPy arrays and lists": (np.ones(1), [1.0]),
    "equal JAX arrays": (jnp.ones(2), jnp.ones(2)),
    "equal JAX scalars": (jnp.asarray(1), jnp.asarray(1)),
    "plain objects": (Agent(), Agent()),
    "an == that raises": (Vague(fails), Vague(fails)),
    "an == that answers with an array": (
        Vague(lambda: np.array([True])),
        Vague(lambda: np.array([True])),
    ),
    "an == that answers with a JAX scalar": (
        Vague(lambda: jnp.asarray(True)),
        Vague(lambda: jnp.asarray(True)),
    ),
    "an == that answers with no boolean": (Vague(lambda: 1), Vague(lambda: 1)),
    "an == that is not implemented": (
        Vague(lambda: NotImplemented),
        Vague(lambda: NotImplemented),
    ),
    "functions": (add, closure_over),
    "functions of equal text": (lambda x: x, lambda x: x),
    "closures": (closure_over(1), closure_over(2)),
    "closures over True and 1": (closure_over(True), closure_over(1)),
    "closures over objects": (closure_over(Agent()), closure_over(Agent())),
    "closures over equal JAX arrays": (
        closure_over(jnp.ones(2)),
        closure_over(jnp.ones(2)),
    ),
    "closures in closures": (nested_closure("a"), nested_closure("b")),
    "defaults": (with_default(1), with_default(2)),
    "keyword defaults": (with_keyword_default(1), with_keyword_default(2)),
    "recursive functions": (recursive("a"), recursive("b")),
    "mutually recursive functions": (mutually_recursive("a"), mutually_recursive("b")),
    "lists that hold themselves": (cyclic("a"), cyclic("b")),
    "a function and a partial": (add, functools.partial(add)),
    "partials of functions": (functools.partial(add, 1), functools.partial(max, 1)),
    "partials with arguments": (functools.partial(add, 1), functools.partial(add, 2)),
    "partials with True and 1": (functools.partial(add, 1), functools.partial(add, True)),
    "partials with keywords": (functools.partial(add, y=1), functools.partial(add, y=2)),
    "methods of plain objects": (Agent().act, Agent().act),
    "methods of other values": (Named("a").act, Named("b").act),
    "methods of one receiver": (Layer(ARRAY).apply, Layer(ARRAY).other),
    "Modules with equal arrays": (Layer(jnp.ones(2)), Layer(jnp.ones(2))),
    "Modules with True and 1": (Layer(ARRAY, rate=True), Layer(ARRAY, rate=1)),
    "Modules with other leaves": (Layer("a"), Layer("b")),
    "Modules with other structure": (Layer(None), Layer(ARRAY)),
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME.keys())
def test_is_the_same_when_made_again(make):
    before, after = make(), make()
    assert before is not after or isinstance(before, (str, int))
    assert same(before, after)
    assert same(after, before)


@pytest.mark.parametrize(("before", "after"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_is_not_the_same(before, after):
    assert not same(before, after)
    assert not same(after, before)


@pytest.mark.parametrize("value", [v for pair in DIFFERENT.values() for v in pair])
def test_anything_is_the_same_as_itself(value):
    assert same(value, value)


@cases({**ARRAYS, **NUMBERS, **OTHERS})
def test_any_leaf_is_the_same_as_itself(leaf):
    assert same(leaf, leaf)


def test_modules_that_share_their_arrays_are_the_same():
    assert same(Layer(ARRAY, rate=1), Layer(ARRAY, rate=1))


def test_methods_of_modules_that_share_their_arrays_are_the_same():
    assert same(Layer(ARRAY).apply, Layer(ARRAY).apply)
    assert not same(Layer(jnp.ones(2)).apply, Layer(jnp.ones(2)).apply)


def test_functions_in_other_globals_are_not_the_same():
    here, there = {}, {}
    code = compile("def scaled(x): return scale * x", "scale.py", "exec")
    for space in (here, there):
        exec(code, space)
    again = type(add)(here["scaled"].__code__, here)
    assert same(here["scaled"], again)
    assert not same(here["scaled"], type(add)(again.__code__, there))


def test_the_keys_of_dicts_may_be_in_another_order():
    assert same({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_numpy_objects_are_compared_by_identity():
    objects = np.array([Agent(), None])
    assert same(objects, objects)
    assert not same(objects, objects.copy())


def test_numpy_records_are_compared_by_their_fields_too():
    assert not same(np.zeros(2, [("a", float)]), np.zeros(2, [("b", float)]))


def test_numpy_dtypes_from_elsewhere_are_told_apart():
    signed, unsigned = (np.ones(2, t) for t in (ml_dtypes.int4, ml_dtypes.uint4))
    assert same(signed, signed.copy())
    assert not same(signed, unsigned)
    assert token_of(signed) != token_of(unsigned)


# -- structure ---------------------------------------------------------------------------


def structure(tree):
    return jtu.tree_structure(tree)


def test_nodes_are_listed_parents_first():
    tree = {"a": (1, None), "b": [2]}
    assert list(nodes(structure(tree))) == [
        (dict, ["a", "b"], 2, False),
        (tuple, None, 2, False),
        (None, None, 0, False),
        (type(None), None, 0, True),
        (list, None, 1, True),
    ]


@pytest.mark.parametrize(
    ("before", "after", "agree"),
    [
        (Layer(0, rate=1), Layer(9, rate=1), True),
        (Layer(0, rate=nan()), Layer(0, rate=nan()), True),
        (Layer(0, rate=(1, nan())), Layer(0, rate=(1, nan())), True),
        (Lookup(0, np.ones(2)), Lookup(0, np.ones(2)), True),
        (Layer(0, rate=lambda: 1), Layer(0, rate=lambda: 1), False),
        (Layer(0, rate=True), Layer(0, rate=1), False),
        (Layer(0, rate=1), Layer(0, rate=1.0), False),
        (Lookup(0, np.ones(2)), Lookup(0, np.zeros(2)), False),
        (Layer(Layer(0, rate=True)), Layer(Layer(0, rate=1)), False),
        (Layer(0), Layer(None), False),
        (Layer(0), Layer((0,)), False),
        ([1, 2], (1, 2), False),
        ([1, 2], [1, 2, 3], False),
        ([[1], 2], [1, [2]], False),
        ([[1], 2], [[1, 2]], False),
        ({"a": 1}, {"b": 1}, False),
        ({1: "a"}, {True: "a"}, False),
        ((1,), Point(1), False),
        (None, (), False),
        ({"b": 1, "a": 2}, {"a": 3, "b": 4}, True),
    ],
)
def test_structures_agree_when_nodes_and_metadata_are_the_same(before, after, agree):
    assert same_structure(structure(before), structure(after)) is agree
    assert same_structure(structure(after), structure(before)) is agree


# -- tokens ------------------------------------------------------------------------------

# As in `SAME`, but for trace caches: here functions count by identity.
EQUAL_TOKENS = {
    "None": lambda: None,
    "strings": lambda: "".join(["re", "lu"]),
    "integers": lambda: int("1000"),
    "floats": lambda: float("0.25"),
    "NaNs": nan,
    "complex NaNs": lambda: complex(nan(), 1),
    "tuples": lambda: (1, (nan(), "a")),
    "lists": lambda: [1, [2.0]],
    "dicts": lambda: {"a": [1], "b": {}},
    "NumPy arrays": lambda: np.arange(3.0),
    "NumPy scalars": lambda: np.float32(nan()),
    "functions": lambda: add,
    "NumPy functions": lambda: np.tanh,
    "jitted functions": lambda: jnp.tanh,
    "builtin functions": lambda: math.sqrt,
    "classes": lambda: Agent,
    "Enums": lambda: Mode.TRAIN,
    "frozen dataclasses": lambda: Settings((1, 2)),
    "dataclasses": lambda: Config([1, nan()]),
    "namedtuples": lambda: Point(nan()),
    "frozen sets": lambda: frozenset({1, 2}),
    "frozen sets of NaNs": lambda: frozenset({nan()}),
    "Modules": lambda: Layer("w", rate=(1, nan())),
    "methods of Modules": lambda: Layer("w", rate=1).apply,
    "methods of dataclasses": lambda: Config([1]).get,
    "PyTree nodes": lambda: Lookup([1], np.ones(2)),
    "Equinox partials": lambda: eqx.Partial(add, 1, y="a"),
    "OrderedDicts": lambda: collections.OrderedDict(a=[1], b=nan()),
    "values with an == of their own": lambda: Named("a"),
    "bound methods": lambda: Named("a").act,
    "partials": lambda: functools.partial(add, 1, y=[2]),
    "ranges": lambda: range(1, 5, 2),
    "moments": lambda: NOON.astimezone(datetime.UTC),
    "values that are not written alike but have attributes": lambda: Chatty("a"),
    "values that are written as objects are": Alike,
    "methods of builtin values": lambda: {"a": 1}.get,
    "methods of builtin classes": lambda: dict.fromkeys,
    "partials with attributes": lambda: with_name(functools.partial(add, 1), "a"),
}


def with_name(value, name):
    value.name = name
    return value


NOON = datetime.datetime(2000, 1, 1, 12, tzinfo=datetime.UTC)
AGENTS = Agent(), Agent()
TABLE = {"a": 1}
# What a set is in has no token by its parts.
CONFIGS = Config({1}), Config({1})

DIFFERENT_TOKENS = {
    "values": ("relu", "tanh"),
    "True and 1": (True, 1),
    "1 and 1.0": (1, 1.0),
    "1 and an IntEnum": (1, Level.LOW),
    "zeros of either sign": (0.0, -0.0),
    "zeros of either sign in a tuple": ((0.0,), (-0.0,)),
    "zeros of either sign in a dict": ({"a": 0.0}, {"a": -0.0}),
    "complex zeros of either sign": (complex(0, 0.0), complex(0, -0.0)),
    "NumPy zeros of either sign": (np.float64(0.0), np.float64(-0.0)),
    "True and 1 in a list": ([True], [1]),
    "True and 1 as keys": ({True: "a"}, {1: "a"}),
    "the order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "a tuple and a list": ((1,), [1]),
    "a string and bytes": ("a", b"a"),
    "NumPy dtypes": (np.ones(2, np.float32), np.ones(2, np.int32)),
    "NumPy shapes": (np.ones((2, 1)), np.ones((1, 2))),
    "NumPy values": (np.arange(3), np.arange(3) + 1),
    "functions of one code": (closure_over(1), closure_over(1)),
    "functions": (add, closure_over),
    "objects": AGENTS,
    "methods of objects": (AGENTS[0].act, AGENTS[1].act),
    "methods": (AGENTS[0].act, AGENTS[0].rest),
    "methods of dataclasses": (Config(True).get, Config(1).get),
    "dataclasses": (Config(1), Config(2)),
    "dataclasses of other classes": (Config(1), Settings(1)),
    "True and 1 in a namedtuple": (Point(True), Point(1)),
    "a tuple and a namedtuple": ((1,), Point(1)),
    "True and 1 in a frozen set": (frozenset({True}), frozenset({1})),
    "Modules": (Layer(True), Layer(1)),
    "Modules with other static fields": (Layer("w", rate=True), Layer("w", rate=1)),
    "methods of Modules": (Layer(True).apply, Layer(1).apply),
    "methods of one Module": (Layer("w").apply, Layer("w").other),
    "NumPy arrays in a PyTree node": (Lookup(0, np.ones(2)), Lookup(0, np.zeros(2))),
    "partials": (functools.partial(add, 0.0), functools.partial(add, -0.0)),
    "equal ranges": (range(0, 3, 2), range(0, 4, 2)),
    "one moment in two time zones": (
        NOON,
        NOON.astimezone(datetime.timezone(datetime.timedelta(hours=1))),
    ),
    "objects that no weak reference can be to": (Bare(), Bare()),
    "an object without weak references and a value": (Bare(), 1),
    "the values of which a method is": ({"a": 1}.get, {"a": 2}.get),
    "methods of one builtin value": (TABLE.get, TABLE.pop),
    "builtin functions": (math.sin, math.cos),
    "the attributes of partials": (
        with_name(functools.partial(add, 1), "a"),
        with_name(functools.partial(add, 1), "b"),
    ),
}


@pytest.mark.parametrize("make", EQUAL_TOKENS.values(), ids=EQUAL_TOKENS.keys())
def test_tokens_of_equal_values_are_equal(make):
    before, after = make(), make()
    assert token_of(before) == token_of(after)
    assert hash(token_of(before)) == hash(token_of(after))


@pytest.mark.parametrize(
    ("before", "after"), DIFFERENT_TOKENS.values(), ids=DIFFERENT_TOKENS.keys()
)
def test_tokens_of_what_a_trace_can_tell_apart_differ(before, after):
    assert token_of(before) != token_of(after)


NO_TOKEN = {
    "sets": {1, 2},
    "bytearrays": bytearray(b"a"),
    "sets in a tuple": (1, [{2}]),
    "an == that raises": Vague(fails),
    "an == that answers with an array": Vague(lambda: np.array([True, False])),
    "what is not equal to itself": Vague(lambda: False),
    "what cannot be written": Unwritable(),
    "arrays": ARRAY,
    "arrays in a dict": {"a": [ARRAY]},
    "Modules with arrays": Layer(ARRAY),
    "methods of Modules with arrays": Layer(ARRAY).apply,
    "sets in a dataclass": Config({1}),
    "sets in a Module": Layer({1}),
    "sets in a namedtuple": Point({1}),
}


@pytest.mark.parametrize("value", NO_TOKEN.values(), ids=NO_TOKEN.keys())
def test_what_cannot_be_hashed_has_no_token(value):
    with pytest.raises(NoToken):
        token_of(value)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (1, x), lambda x: {"a": [x]}])
def test_tracers_have_no_token(wrap):
    @jax.jit
    def function(x):
        with pytest.raises(NoToken):
            token_of(wrap(x))
        return x

    function(1.0)


def test_methods_of_what_has_no_token_have_none():
    with pytest.raises(NoToken):
        token_of(Config({1}).get)


def test_methods_of_modules_with_arrays_have_one_by_identity():
    one, two = (eqx.nn.Linear(2, 2, key=jr.key(0)) for _ in range(2))
    assert token_of(one.__call__) == token_of(one.__call__)
    assert token_of(one.__call__) != token_of(two.__call__)


def test_partials_of_what_has_no_token_have_one_by_their_identity():
    one, two = functools.partial(add, ARRAY), functools.partial(add, ARRAY)
    assert token_of(one) == token_of(one)
    assert token_of(one) != token_of(two)


def test_the_token_of_what_may_change_changes_with_it():
    config = Config([1])
    first, method = token_of(config), token_of(config.get)
    config.rate.append(2)
    assert token_of(config) != first
    assert token_of(config.get) != method


@pytest.mark.parametrize("make", [Slotted, Single])
def test_the_token_of_an_object_changes_with_its_slots(make):
    value = make([1])
    first = token_of(value)
    assert token_of(value) == first
    value.rate = [2]
    assert token_of(value) != first
    del value.rate
    assert token_of(value) != first


def test_a_weak_reference_to_an_object_does_not_change_its_token():
    value = Slotted(1)
    first = token_of(value)
    reference = weakref.ref(value)
    assert token_of(value) == first
    assert reference() is value


def test_the_token_of_an_object_that_no_weak_reference_can_be_to_is_its_own():
    value = Bare()
    assert token_of(value) == token_of(value)
    assert hash(token_of(value)) == hash(token_of(value))
    # In one place, so that the values meet each other and not only what they are in.
    assert len({token_of(value), token_of(value), token_of(Bare())}) == 2


def test_arrays_in_a_module_are_known_by_identity_where_they_may_be_replaced():
    layer = Layer([jnp.ones(2)])
    first = token_of(layer.__call__)
    assert token_of(layer.__call__) == first
    layer.weight[0] = jnp.ones(2)
    assert token_of(layer.__call__) != first


def test_after_a_method_of_a_module_with_arrays_an_array_still_has_no_token():
    tokens = Tokens()
    tokens.of(Layer(ARRAY).__call__)
    with pytest.raises(NoToken):
        tokens.of(ARRAY)


def test_tokens_do_not_keep_objects_alive_and_never_equal_later_ones():
    reused = 0
    for _ in range(1000):
        function = closure_over(1)
        reference, first = weakref.ref(function), token_of(function)
        del function
        assert reference() is None
        # Objects of one size take each other's place, and so may this one.
        later = closure_over(1)
        reused += hash(token_of(later)) == hash(first)
        assert token_of(later) != first
    assert reused


def test_watching_notes_what_the_token_knows_by_identity_only():
    tokens = Tokens()
    agent = Agent()
    tokens.of({"f": add, "g": (add, agent), "n": 1, "s": "a", "m": agent.act})
    assert {id(one) for one in tokens.watched} == {
        id(one) for one in (add, agent, Agent, Agent.act)
    }


@pytest.mark.parametrize(
    ("before", "after", "agree"),
    [
        (Layer(0, rate=1), Layer(9, rate=1), True),
        (Layer(0, rate=nan()), Layer(0, rate=nan()), True),
        (Layer(0, rate=[1]), Layer(0, rate=[1]), True),
        (Layer(0, rate=True), Layer(0, rate=1), False),
        (Layer(0, rate=0.0), Layer(0, rate=-0.0), False),
        ({"a": 1}, {"b": 1}, False),
        ({1: "a"}, {True: "a"}, False),
        ([1], (1,), False),
        ([[1], 2], [1, [2]], False),
        ([[1], 2], [[1, 2]], False),
        (None, (), False),
        ((1,), Point(1), False),
    ],
)
def test_tokens_of_structures(before, after, agree):
    before, after = (Tokens().of_structure(structure(tree)) for tree in (before, after))
    assert (before == after) is agree


# What compares equal by Python's `==`, and is told apart by any trace.
CONFUSABLE = [(True, 1), (1, 1.0), (0.0, -0.0)]
INSIDE = [
    pytest.param(Point, id="namedtuple"),
    pytest.param(Settings, id="frozen dataclass"),
    pytest.param(lambda v: Settings(v).get, id="method of a dataclass"),
    pytest.param(lambda v: Layer(None, v), id="Module"),
    pytest.param(lambda v: Layer(None, v).other, id="method of a Module"),
    pytest.param(lambda v: frozenset({v}), id="frozen set"),
    pytest.param(lambda v: collections.OrderedDict(a=v), id="OrderedDict"),
    pytest.param(lambda v: slice(v), id="slice"),
]


@pytest.mark.parametrize(("before", "after"), CONFUSABLE)
@pytest.mark.parametrize("inside", INSIDE)
def test_what_a_trace_can_tell_apart_has_no_equal_tokens_inside_of(inside, before, after):
    try:
        tokens = token_of(inside(before)), token_of(inside(after))
    except NoToken:
        return
    assert operator.ne(*tokens)


# -- both together -----------------------------------------------------------------------

# Each value as a function that makes it, so that it can be made twice.
scalars = st.sampled_from(
    [
        *(lambda v=v: v for v in (None, True, False, 0, 1, 2, 0.0, -0.0, 1.0, 1j, 0j)),
        *(lambda v=v: v for v in ("a", "b", b"a", "", Mode.TRAIN, Level.LOW)),
        *(lambda v=v: v for v in (add, closure_over, math.sqrt, np.tanh, jax.nn.relu)),
        *(lambda v=v: v for v in (Agent, Layer, ARRAY, AGENTS[0], AGENTS[0].act)),
        nan,
        lambda: closure_over(1),
        lambda: complex(nan(), 0),
        lambda: np.float32(1),
        lambda: np.float64(1),
        lambda: np.arange(2),
        lambda: np.arange(2.0),
        lambda: np.zeros((1, 2)),
        lambda: Named("a"),
        lambda: Named("a").act,
        lambda: {1},
        lambda: Vague(fails),
    ]
)


def containers(inner):
    several = st.lists(inner, max_size=3)
    keys = st.sampled_from(["a", "b", 1, True])
    return st.one_of(
        several.map(lambda makes: lambda: tuple(make() for make in makes)),
        several.map(lambda makes: lambda: [make() for make in makes]),
        st.lists(st.tuples(keys, inner), max_size=3).map(
            lambda items: lambda: {key: make() for key, make in items}
        ),
        inner.map(lambda make: lambda: functools.partial(add, make())),
    )


values = st.recursive(scalars, containers, max_leaves=5)


@given(values, values)
@settings(deadline=None, max_examples=500)
@example(lambda: (True,), lambda: (1,))
@example(lambda: {True: 1}, lambda: {1: 1})
def test_values_with_equal_tokens_are_the_same(make, make_another):
    for before, after in [(make(), make()), (make(), make_another())]:
        try:
            equal = token_of(before) == token_of(after)
        except NoToken:
            continue
        assert not equal or same(before, after)


@given(values, values)
@settings(deadline=None, max_examples=300)
def test_being_the_same_goes_both_ways(make, make_another):
    before, after = make(), make_another()
    assert same(before, before)
    assert same(before, after) == same(after, before)


# -- smaller questions -------------------------------------------------------------------


def test_references_are_told_from_arrays():
    assert is_reference(jax.new_ref(jnp.ones(2)))
    assert not is_reference(jnp.ones(2))


@pytest.mark.parametrize(
    ("value", "kinds", "answer"),
    [
        (1, "i", True),
        (2**100, "i", True),
        (2**100, "b", False),
        (True, "b", True),
        (True, "i", False),
        (1.5, "i", False),
        (1.5, "if", True),
        (jnp.asarray(1), "i", True),
        (jnp.ones(1, int), "i", False),
        (np.bool_(True), "b", True),
        (jr.key(0), "iu", False),
        ("a", "i", False),
        (None, "b", False),
    ],
)
def test_scalars_are_told_by_their_kind(value, kinds, answer):
    assert is_scalar(value, kinds) is answer


def test_a_token_of_jax_is_no_scalar():
    assert not is_scalar(lax.create_token(), "biuf")


def test_what_jax_refuses_once_it_is_not_asked_about_again():
    class Unknown:
        reprs = 0

        def __repr__(self):
            # JAX puts it into its message.
            Unknown.reprs += 1
            return "unknown"

    assert not is_dynamic(Unknown(), False)
    asked = Unknown.reprs
    assert not is_dynamic(Unknown(), False)
    assert Unknown.reprs == asked


def test_what_has_a_type_without_a_hash_is_static():
    class Meta(type):
        def __hash__(cls):
            raise TypeError("no hash")

    assert not is_dynamic(Meta("Odd", (), {})(), False)


def test_zeros_of_either_sign_are_the_same():
    assert same(0.0, -0.0)
    assert not same(0.0, 1.0)


@pytest.mark.parametrize("wrap", [lambda x: {x}, lambda x: {x: "a"}, lambda x: frozenset([x])])
def test_keys_and_elements_are_told_apart_by_type(wrap):
    assert same(wrap(1), wrap(1))
    assert not same(wrap(1), wrap(True))


def test_dataclasses_are_compared_by_fields_and_by_what_else_they_hold():
    @dataclasses.dataclass
    class Loose:
        rate: Any

    @dataclasses.dataclass(slots=True)
    class Slotted:
        rate: Any
        name: Any

    def loose(**others):
        made = Loose(1)
        made.__dict__.update(others)
        return made

    assert same(loose(extra=1), loose(extra=1))
    assert not same(loose(extra=1), loose(extra=2))
    assert not same(loose(extra=1), loose())
    unset, another = Slotted(1, 2), Slotted(1, 2)
    assert not same(Slotted(1, 2), Slotted(1, 3))
    del unset.name, another.name
    assert same(unset, another)
    assert not same(unset, Slotted(1, 2))
