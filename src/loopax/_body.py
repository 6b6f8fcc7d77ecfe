"""The function that JAX traces in place of the user's: merge, call, split, compare."""

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import equinox as eqx

from ._errors import carry_mismatch, named
from ._mismatch import Comparison
from ._split import HOLE, Arrays, Split, Static, names, split, split_held
from ._static import NoToken, Watch, watch_with


# How a loop calls the user's functions. It is given the step and the trees that the loop
# was called with, and returns what `lax` expects of the body.
Calling = Callable[..., Any]


def as_tree(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a PyTree, so that the arrays inside it are seen.

    A Module is one already. Python's own bound methods and partial applications are not;
    to JAX they are opaque.
    """
    if isinstance(function, types.MethodType):
        return eqx.Partial(function.__func__, function.__self__)
    if _is_plain_partial(function):
        partial: Any = function
        return eqx.Partial(as_tree(partial.func), *partial.args, **partial.keywords)
    return function


def _is_plain_partial(function: Any) -> bool:
    # JAX has a subclass of it that is a PyTree.
    return type(function) is functools.partial


class Operands:
    """The trees that go through one argument of a primitive, split and side by side."""

    def __init__(self, *splits: Split):
        self.arrays = [array for part in splits for array in part.arrays]
        self.statics = tuple(part.static for part in splits)

    def merge(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The trees again, over other arrays."""
        return _merge(self.statics, arrays)


def _merge(statics: Sequence[Static], arrays: Sequence[Any]) -> tuple[Any, ...]:
    rest = iter(arrays)
    return tuple(static.merge(rest) for static in statics)


def views(functions: Sequence[Split], *others: Split) -> list[Operands]:
    """What each of several functions is called with: all of them, and the other trees.

    Each view has the same arrays. Of the other functions it has nothing else, so that no
    trace depends on what is static in a function that it does not call.
    """
    bare = [split_held(part.arrays) for part in functions]
    return [
        Operands(*bare[:own], part, *bare[own + 1 :], *others)
        for own, part in enumerate(functions)
    ]


class Call:
    """What is static in one call of a public function, while the call lasts.

    - `caller`: the public function.
    - `function`: the function of the user's that is to be traced.
    - `operands`: for each argument of the traced function that holds arrays, its trees.
        The first holds the functions, and last of all the carry.
    - `functions`, `own`: how many functions there are, and which one is `function`.
    - `as_arrays`: which leaves of its outputs are arrays even if they are numbers.
    """

    def __init__(
        self,
        caller: str,
        function: Callable[..., Any],
        trace_numbers: bool,
        *operands: Operands,
        functions: int = 1,
        own: int = 0,
        as_arrays: frozenset[int] = frozenset(),
    ):
        self.caller = caller
        self.function = function
        self.trace_numbers = trace_numbers
        self.statics = tuple(operand.statics for operand in operands)
        self.functions = functions
        self.own = own
        self.as_arrays = as_arrays

    @property
    def leaves(self) -> list[Any]:
        return [leaf for part in self.statics for one in part for leaf in one.leaves]

    def merge(self, inputs: Sequence[Arrays]) -> tuple[Any, ...]:
        """The function, and the trees to call it with."""
        trees = [
            tree
            for statics, node in zip(self.statics, inputs, strict=True)
            for tree in _merge(statics, node.arrays)
        ]
        return trees[self.own], *trees[self.functions :]

    def token(self, watch: Watch) -> Hashable:
        statics = (static.token(watch) for part in self.statics for static in part)
        return (self.trace_numbers, self.functions, self.own, self.as_arrays, *statics)


class Step:
    """One run of the user's function: what it is given, and what is made of its results."""

    def __init__(self, body: "Body", call: Call, inputs: Sequence[Arrays]):
        self._body = body
        self._call = call
        self._inputs = inputs

    @property
    def caller(self) -> str:
        return self._call.caller

    @property
    def function(self) -> Callable[..., Any]:
        return self._call.function

    @property
    def trace_numbers(self) -> bool:
        return self._call.trace_numbers

    def unchanged(self) -> Arrays:
        """The first argument as it is, where there is no carry in it."""
        return self._inputs[0]

    def carry(self, tree: Any) -> Arrays:
        """The carry that was returned, checked against the one that was given.

        All that stands before the carry, such as the arrays of the function, goes round
        with it unchanged: `lax` turns what is forwarded into a constant of the loop.
        """
        state, static = self._inputs[0], self._call.statics[0][-1]
        held = len(state.arrays) - static.num_arrays
        kept, before = state.arrays[:held], state.arrays[held:]
        # A weakly typed carry, such as a Python number, is promoted by `lax` to the type
        # that the body gives it. `lax` then traces the body again, over what is no longer
        # weakly typed.
        rules = Comparison(self.trace_numbers, weak_fits=True)
        arrays, mismatches = rules.compare(static, before, tree, "carry")
        if mismatches:
            raise carry_mismatch(self.caller, self.function, mismatches)
        return Arrays([*kept, *arrays], state.names)

    def output(self, tree: Any) -> Arrays:
        """Any other result. Its static part travels as the metadata of the node.

        That is the one way in which it comes back when JAX finds the trace in its cache
        and the user's function does not run.
        """
        arrays, static = split(tree, self.trace_numbers, self._call.as_arrays)
        return Arrays(arrays, names(static), _Label(static, self._body, self._call))


class _Label(Static):
    """The static part of an output.

    JAX keeps it for as long as it keeps the body. Leaves that came in with the call are
    therefore left out, and looked up in the call in progress: held here, they would keep
    alive the very things whose death takes the body out of the cache.
    """

    __slots__ = ("_body", "_known")

    def __init__(self, static: Static, body: "Body", call: Call):
        index = {id(leaf): n for n, leaf in enumerate(call.leaves)}
        self._known = [index.get(id(leaf)) for leaf in static.leaves]
        self._body = weakref.ref(body)
        super().__init__(
            static.treedef,
            [
                leaf if leaf is HOLE or known is None else None
                for leaf, known in zip(static.leaves, self._known, strict=True)
            ],
        )

    @property
    def leaves(self) -> tuple[Any, ...]:
        given = self._given()
        return tuple(
            leaf if leaf is HOLE or known is None else given[known]
            for leaf, known in zip(self._leaves, self._known, strict=True)
        )

    def _given(self) -> Sequence[Any]:
        body = self._body()
        if body is None or not body.calls:
            # Between calls there is nothing to tell but which leaf it would be.
            return range(1 + max((n for n in self._known if n is not None), default=-1))
        return body.calls[-1].leaves


class Body:
    """What JAX traces, and remembers the trace of.

    There is one for each function and static part of everything that it is called with,
    so that JAX knows it again. It holds none of them itself. While calls are in progress it
    takes them from there; which call does not matter, since all are alike.
    """

    def __init__(self, calling: Calling, call: Call):
        self.__name__ = self.__qualname__ = named(call.function)
        self._calling = calling
        # The calls in progress, the latest last.
        self.calls: list[Call] = []
        self._names = [
            tuple(name for static in statics for name in names(static))
            for statics in call.statics
        ]
        # References that take the body out of the cache when what it is for dies.
        self.evicting: list[Any] = []

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        # Makes JAX name the user's function and its arguments, not this class.
        if not self.calls:
            raise AttributeError("__wrapped__")
        return _plain(self.calls[-1].function)

    @contextlib.contextmanager
    def during(self, call: Call) -> Generator[None]:
        self.calls.append(call)
        try:
            yield
        finally:
            self.calls.remove(call)

    def argument(self, operands: Operands, position: int = 0) -> Arrays:
        """`operands` as the argument of that position."""
        return Arrays(operands.arrays, self._names[position])

    def __call__(self, *inputs: Any) -> Any:
        call = self.calls[-1]
        nodes = [value for value in inputs if isinstance(value, Arrays)]
        others = [value for value in inputs if not isinstance(value, Arrays)]
        return self._calling(Step(self, call, nodes), *others, *call.merge(nodes))


def _plain(function: Any) -> Callable[..., Any]:
    # What `inspect` can take a signature and a place from.
    if hasattr(function, "__code__") or hasattr(function, "__wrapped__"):
        return function
    return function if _is_plain_partial(function) else function.__call__


def merge_output(output: Arrays) -> Any:
    """The tree that `Step.output` split, while its call lasts."""
    return output.label.merge(output.arrays)


# -- the cache ---------------------------------------------------------------------------

# Bodies that JAX may have a trace of, the latest last. An entry goes when any function or
# object that it was made for dies, or when the table is full.
_bodies: dict[Hashable, Body] = {}
_lock = threading.RLock()
_CAPACITY = 4096


def body_for(calling: Calling, call: Call) -> Body:
    """The body for a call: the same object as for the last call like it."""
    watched: list[Any] = []
    try:
        key = (calling, call.token(watch_with(watched)))
    except (NoToken, RecursionError):
        return Body(calling, call)
    with _lock:
        body = _bodies.pop(key, None)
        if body is None:
            body = Body(calling, call)
            body.evicting = [_evict(key, value) for value in watched]
            if len(_bodies) >= _CAPACITY:
                del _bodies[next(iter(_bodies))]
        _bodies[key] = body
        return body


def _evict(key: Hashable, value: Any) -> Any:
    return weakref.ref(value, lambda _: _bodies.pop(key, None))
