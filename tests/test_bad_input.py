"""Bad input: always an ordinary exception, soon, which names what is wrong."""

import functools
import random
import threading
import traceback
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import loopax
from loopax import MismatchError


X = jnp.float32(1)
XS = jnp.arange(3.0)


def scan(body, carry=X, xs=XS, **options):
    return loopax.filter_scan(body, carry, xs, **options)


def goes_on(carry):
    return jax.tree.leaves(carry)[0] < 3


# Each public function, over one function of the user's of any number of arguments.
CALLS = {
    "filter_scan": lambda f: loopax.filter_scan(f, X, XS),
    "filter_scan, checkpointed": lambda f: loopax.filter_scan(f, X, XS, kind="checkpointed"),
    "filter_while_loop": lambda f: loopax.filter_while_loop(goes_on, f, X),
    "filter_while_loop, bounded": lambda f: loopax.filter_while_loop(
        goes_on, f, X, max_steps=4, kind="bounded"
    ),
    "filter_while_loop, predicate": lambda f: loopax.filter_while_loop(f, lambda c: c, X),
    "filter_fori_loop": lambda f: loopax.filter_fori_loop(0, 2, f, X),
    "filter_cond": lambda f: loopax.filter_cond(X > 0, f, lambda x: x, X),
    "filter_switch": lambda f: loopax.filter_switch(jnp.int32(1), [lambda x: x, f], X),
    "filter_map": lambda f: loopax.filter_map(f, XS),
    "filter_map, in batches": lambda f: loopax.filter_map(f, XS, batch_size=2),
    "filter_associative_scan": lambda f: loopax.filter_associative_scan(f, XS),
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def good(name):
    """A body that each function takes, and what comes of it does not matter."""
    if "scan" in name and "associative" not in name:
        return lambda c, x: (c, x)
    if "predicate" in name:
        return lambda c: c < 0
    return (lambda i, c: c) if "fori" in name else lambda *args: args[0]


# -- what the body raises ----------------------------------------------------------------


class Mine(Exception):
    def __str__(self):
        raise RuntimeError("has no text")


class NotEvenAnException(BaseException):
    pass


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "error",
    [
        Mine(),
        NotEvenAnException(),
        KeyboardInterrupt(),
        SystemExit(3),
        StopIteration(1),
        GeneratorExit(),
        TypeError("mine"),
        ValueError("mine"),
        RecursionError("mine"),
        MemoryError(),
        AttributeError("leaves"),
        ExceptionGroup("several", [ValueError("mine")]),
        MismatchError("mine", []),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_body_raises_comes_out_as_it_is(name, error):
    error.__traceback__ = error.__context__ = None

    def body(*_):
        raise error

    with pytest.raises(type(error)) as caught:
        CALLS[name](body)
    assert caught.value is error
    assert error.__context__ is error.__cause__ is None
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert (last.filename, last.name) == (__file__, "body")
    CALLS[name](good(name))


def test_the_cause_and_the_notes_of_an_exception_are_kept(call):
    def body(*_):
        try:
            raise KeyError("first")
        except KeyError as cause:
            error = ValueError("then")
            error.add_note("note")
            raise error from cause

    with pytest.raises(ValueError, match="then") as caught:
        call(body)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "note" in caught.value.__notes__


def test_endless_recursion_ends(call):
    def body(*_):
        return call(body)

    with pytest.raises(RecursionError):
        call(body)


def test_recursion_that_ends_is_right():
    def sums(scan, depth, xs):
        def body(carry, x):
            return carry + (x if depth == 0 else sums(scan, depth - 1, x * xs)), None

        return scan(body, 0.0, xs)[0]

    def in_python(body, carry, xs):
        for x in xs:
            carry, _ = body(carry, x)
        return carry, None

    xs = np.arange(1.0, 4)
    ours = functools.partial(loopax.filter_scan, trace_numbers=True)
    assert sums(ours, 2, jnp.asarray(xs)) == sums(in_python, 2, xs)


# -- what it returns ---------------------------------------------------------------------


async def coroutine(*_):
    return X


def generator(*_):
    yield X


class Garbage:
    pass


RETURNS = {
    "nothing": lambda *_: None,
    "a string": lambda *_: "abc",
    "a generator": generator,
    "another shape": lambda *_: jnp.ones((2, 3)),
    "many": lambda *_: (X,) * 7,
    "a dict": lambda *_: {"a": X},
    "an object": lambda *_: Garbage(),
    "a type": lambda *_: Garbage,
    "a function": lambda *_: lambda: X,
    "too large a number": lambda *_: (2**100, 2**100),
    "a lock": lambda *_: threading.Lock(),
}


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in CALLS if "map" not in name])
@pytest.mark.parametrize("wrong", RETURNS)
def test_a_wrong_return_is_said_to_be_that(name, wrong):
    with pytest.raises((TypeError, ValueError)) as caught:
        CALLS[name](RETURNS[wrong])
    assert name.split(",")[0] in str(caught.value)


@pytest.mark.parametrize("name", [name for name in CALLS if "map" not in name])
def test_a_coroutine_is_no_body(name):
    made = []

    def body(*args):
        made.append(coroutine(*args))
        return made[-1]

    with pytest.raises((TypeError, ValueError), match=name.split(",")[0]):
        CALLS[name](body)
    for each in made:
        each.close()


@pytest.mark.parametrize("wrong", [lambda: X, lambda a, b, c, d: a, lambda *, a: a])
def test_a_body_of_other_parameters_is_told_so_by_python(call, wrong):
    with pytest.raises(TypeError, match="argument"):
        call(wrong)


def test_a_tracer_of_another_trace_is_refused(call):
    kept = []
    jax.make_jaxpr(kept.append)(X)
    with pytest.raises((jax.errors.UnexpectedTracerError, TypeError, ValueError)):
        call(lambda *args: kept[0] + args[0])


# -- what it is called with --------------------------------------------------------------

BRANCHES = [lambda x: x, lambda x: x + 1]

WRONG = {
    "no body": lambda: scan(None),
    "a body that is an array": lambda: scan(X),
    "lengths that differ": lambda: scan(lambda c, x: (c, x), X, (XS, jnp.ones(4))),
    "a length that differs": lambda: scan(lambda c, x: (c, x), X, XS, length=4),
    "neither xs nor length": lambda: scan(lambda c, x: (c, x), X, None),
    "a scalar in xs": lambda: scan(lambda c, x: (c, x), X, (XS, X)),
    "a negative length": lambda: scan(lambda c, x: (c, x), X, None, length=-1),
    "a length that is a string": lambda: scan(lambda c, x: (c, x), X, None, length="3"),
    "a traced length": lambda: jax.jit(lambda n: scan(lambda c, x: (c, x), X, None, length=n))(
        3
    ),
    "unroll": lambda: scan(lambda c, x: (c, x), unroll="a"),
    "reverse": lambda: scan(lambda c, x: (c, x), reverse="yes"),
    "a kind that is none": lambda: scan(lambda c, x: (c, x), kind="nonsense"),
    "no checkpoints": lambda: scan(lambda c, x: (c, x), kind="checkpointed", checkpoints=0),
    "a misspelt keyword": lambda: scan(lambda c, x: (c, x), lenght=3),
    "no predicate": lambda: loopax.filter_while_loop(True, lambda c: c, X),
    "a predicate with a vector": lambda: loopax.filter_while_loop(
        lambda c: jnp.ones(2) > c, lambda c: c, X
    ),
    "a predicate with a string": lambda: loopax.filter_while_loop(
        lambda c: "yes", lambda c: c, X
    ),
    "a predicate with nothing": lambda: loopax.filter_while_loop(
        lambda c: None, lambda c: c, X
    ),
    "negative max_steps": lambda: loopax.filter_while_loop(
        goes_on, lambda c: c, X, max_steps=-1
    ),
    "max_steps=True": lambda: loopax.filter_while_loop(goes_on, lambda c: c, X, max_steps=True),
    "a string as max_steps": lambda: loopax.filter_while_loop(
        goes_on, lambda c: c, X, max_steps="a"
    ),
    "bounds that are floats": lambda: loopax.filter_fori_loop(0, 2.5, lambda i, c: c, X),
    "bounds that are strings": lambda: loopax.filter_fori_loop("0", 2, lambda i, c: c, X),
    "bounds that are vectors": lambda: loopax.filter_fori_loop(
        0, jnp.ones(2, int), lambda i, c: c, X
    ),
    "bounds that are nothing": lambda: loopax.filter_fori_loop(None, 2, lambda i, c: c, X),
    "a predicate of cond that is a vector": lambda: loopax.filter_cond(XS > 0, *BRANCHES, X),
    "a predicate of cond that is a string": lambda: loopax.filter_cond("a", *BRANCHES, X),
    "a predicate of cond that is nothing": lambda: loopax.filter_cond(None, *BRANCHES, X),
    "a branch that is none": lambda: loopax.filter_cond(X > 0, BRANCHES[0], None, X),
    "an index that is a float": lambda: loopax.filter_switch(X, BRANCHES, X),
    "an index that is a vector": lambda: loopax.filter_switch(jnp.ones(2, int), BRANCHES, X),
    "an index that is a string": lambda: loopax.filter_switch("0", BRANCHES, X),
    "no branches": lambda: loopax.filter_switch(0, [], X),
    "branches that are none": lambda: loopax.filter_switch(0, None, X),
    "one of the branches": lambda: loopax.filter_switch(0, [BRANCHES[0], 3], X),
    "nothing to map over": lambda: loopax.filter_map(lambda x: x, ()),
    "a scalar to map over": lambda: loopax.filter_map(lambda x: x, X),
    "a negative batch": lambda: loopax.filter_map(lambda x: x, XS, batch_size=-1),
    "batches of a string": lambda: loopax.filter_map(lambda x: x, XS, batch_size="a"),
    "lengths that differ in a map": lambda: loopax.filter_map(
        lambda x: x[0], (XS, jnp.ones(4))
    ),
    "an axis that is not there": lambda: loopax.filter_associative_scan(jnp.add, XS, axis=1),
    "a string as axis": lambda: loopax.filter_associative_scan(jnp.add, XS, axis="a"),
    "a scalar to scan over": lambda: loopax.filter_associative_scan(jnp.add, X),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_named(wrong):
    with pytest.raises((TypeError, ValueError, jax.errors.JAXTypeError)) as caught:
        WRONG[wrong]()
    assert str(caught.value)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    # Python's own, for a misspelt keyword, has no frame of ours either.
    assert "loopax/_" not in last.filename


# -- what is in the trees ----------------------------------------------------------------


def fails(*_):
    raise Mine


def class_of(name, *bases, **members):
    return type(name, bases, members)


class Answers:
    """Has every attribute."""

    def __getattr__(self, name):
        return self if name[:2] != "__" else fails()


class Unhashable(type):
    __hash__ = fails


class Unnamed(type):
    __repr__ = fails


class NoInstances(type):
    __instancecheck__ = __subclasscheck__ = fails


class Liar:
    __class__ = jax.Array


def holding_itself():
    found = types.SimpleNamespace()
    found.itself = found
    return found


def closing_over_itself():
    def function():
        return function

    return function


HOSTILE = {
    "no ==": class_of("Odd", __eq__=fails, __hash__=object.__hash__)(),
    "an array for ==": class_of("Odd", __eq__=lambda a, b: jnp.ones(2), __hash__=None)(),
    "a failing hash": class_of("Odd", __hash__=fails, __eq__=lambda a, b: True)(),
    "a changing hash": class_of("Odd", __hash__=lambda self: random.randrange(2**60))(),
    "a failing repr": class_of("Odd", __repr__=fails)(),
    "a repr that is no string": class_of("Odd", __repr__=lambda self: 3)(),
    "an enormous repr": class_of("Odd", __repr__=lambda self: "x" * 10**7)(),
    "failing attributes": class_of("Odd", __getattr__=fails)(),
    "all attributes": Answers(),
    "failing truth": class_of("Odd", __bool__=fails, __len__=fails)(),
    "a failing dict": class_of("Odd", __dict__=property(fails))(),
    "a class that lies": Liar(),
    "a class without a hash": Unhashable("Odd", (), {})(),
    "a class without a name": Unnamed("Odd", (), {})(),
    "a class without instances": NoInstances("Odd", (), {})(),
    "an empty slot": class_of("Odd", __slots__=("a",))(),
    "itself": holding_itself(),
    "a function of itself": closing_over_itself(),
    "a lock": threading.Lock(),
    "a module": types,
    "a number of NaN": float("nan"),
    "a large number": 2**100,
    "strings": np.array(["a", "b"]),
    "objects": np.array([{}, None]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "a subclass of int": class_of("Int", int)(3),
    "a subclass of str": class_of("Str", str)("3"),
    "a view of keys": {}.keys(),
    "an error": ValueError("a"),
}


class Model(eqx.Module):
    weight: Any
    static: Any = eqx.field(static=True)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_static_wherever_they_stand(name):
    value = HOSTILE[name]
    seen = []

    def body(carry, x):
        seen.append(x[1])
        return (carry[0] + x[0], carry[1]), (x[0], value)

    for _ in range(2):
        (total, held), (ys, y) = scan(body, (X, value), (XS, value))
        assert total == 4
        assert ys.shape == (3,)
        assert held is y is value
    assert all(each is value for each in seen)
    taken, held = loopax.filter_cond(X > 0, lambda *a: a, lambda *a: a, X, value)
    assert taken == 1
    assert held is value


# Equinox refuses it, as a field.
MEMBERS = [name for name in HOSTILE if name != "a class without a hash"]


@pytest.mark.parametrize("name", MEMBERS)
def test_hostile_values_are_arguments_of_a_partial(name):
    body = functools.partial(lambda _, x: 2 * x, HOSTILE[name])
    for _ in range(2):
        assert loopax.filter_map(body, XS).tolist() == [0, 2, 4]


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static:UserWarning")
@pytest.mark.parametrize("name", MEMBERS)
def test_hostile_values_are_metadata(name):
    def body(model, x):
        return Model(model.weight + x, model.static), None

    model, _ = scan(body, Model(X, HOSTILE[name]))
    assert model.weight == 4
    assert model.static is HOSTILE[name]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_value_that_changes_is_named_by_its_path(name):
    for before, after in ((HOSTILE[name], "other"), ("other", HOSTILE[name])):
        with pytest.raises(MismatchError, match="carry") as caught:
            scan(lambda c, x: ({**c, "b": after}, None), {"a": X, "b": before})
        assert [each.path for each in caught.value.mismatches] == ['carry["b"]']
        assert len(str(caught.value)) < 2000


class Node:
    """A node that does as its metadata, two functions, say."""

    def __init__(self, children, flatten, unflatten):
        self.children, self.flatten, self.unflatten = children, flatten, unflatten


jtu.register_pytree_node(
    Node,
    lambda node: (node.flatten(node), (node.flatten, node.unflatten)),
    lambda metadata, children: metadata[1](Node(tuple(children), *metadata)),
)


def as_it_is(node):
    return node.children


def validating(node):
    if not all(eqx.is_array(each) for each in node.children):
        raise Mine
    return node


@pytest.mark.parametrize("where", ["carry", "xs", "body", "results"])
@pytest.mark.parametrize(
    ("flatten", "unflatten", "error"),
    [(fails, lambda node: node, Mine), (lambda node: 3, lambda node: node, ValueError)],
)
def test_a_node_that_cannot_be_flattened_says_so_itself(where, flatten, unflatten, error):
    node = Node((X,), flatten, unflatten)
    calls = {
        "carry": lambda: scan(lambda c, x: (c, x), node),
        "xs": lambda: scan(lambda c, x: (c, x), X, (XS, node)),
        "body": lambda: scan(jtu.Partial(lambda node, c, x: (c, x), node)),
        "results": lambda: scan(lambda c, x: (c, node)),
    }
    with pytest.raises(error):
        calls[where]()


def test_a_node_that_takes_nothing_but_arrays_goes_through():
    node = Node((X, XS), as_it_is, validating)
    (carry, _), ys = scan(lambda c, x: ((c[0], c[1] + x), c[0]), (node, X))
    assert carry.children[0] == 1
    assert ys.children[1].shape == (3, 3)
    with pytest.raises(MismatchError, match="carry"):
        scan(lambda c, x: (Node((X,), as_it_is, validating), x), node)


def test_a_node_that_fails_to_be_made_again_says_so_itself():
    with pytest.raises(Mine):
        scan(lambda c, x: (c, x), Node((X,), as_it_is, fails))


def test_trees_of_very_many_leaves_and_levels():
    wide = {f"a{n}": n for n in range(20_000)} | {"x": X}
    carry, _ = scan(lambda c, x: ({**c, "x": c["x"] + x}, None), wide)
    assert carry == {**wide, "x": 4}
    deep = X
    for _ in range(500):
        deep = (deep, "a")
    carry, _ = scan(lambda c, x: (jax.tree.map(lambda a: a, c), None), deep)
    assert jax.tree.leaves(carry)[0] == 1


def test_what_was_donated_is_said_to_be_gone():
    gone = jnp.ones(3)
    gone.delete()
    for call in (
        lambda: scan(lambda c, x: (c + 1, x), gone),
        lambda: scan(lambda c, x: (c + x, None), X, gone),
        lambda: scan(lambda c, x: (c + gone[0], x), X),
        lambda: loopax.filter_cond(X > 0, lambda a: a, lambda a: a + 1, gone),
        lambda: loopax.filter_map(lambda a: a + 1, gone),
    ):
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            call()


def test_empty_trees():
    assert scan(lambda c, x: (c, x), (), (), length=3) == ((), ())
    assert scan(lambda c, x: (c, x), None, None, length=3) == (None, None)
    assert loopax.filter_fori_loop(0, 3, lambda i, c: c, {}) == {}
    assert loopax.filter_cond(X > 0, lambda: (), lambda: ()) == ()
    assert scan(lambda c, x: (c + x, x), X, jnp.ones(0))[0] == 1
