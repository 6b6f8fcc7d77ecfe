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
from ._mismatch import compare
from ._split import HOLE, Arrays, Split, Static, names, split
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
        return merge_all(self.statics, arrays)


def merge_all(statics: Sequence[Static], arrays: Sequence[Any]) -> tuple[Any, ...]:
    rest = iter(arrays)
    return tuple(static.merge(rest) for static in statics)


class Call:
    """What is static in one call of a public function, while the call lasts."""

    def __init__(
        self,
        caller: str,
        function: Callable[..., Any],
        trace_numbers: bool,
        *operands: Operands,
    ):
        self.caller = caller
        self.function = function
        self.trace_numbers = trace_numbers
        self.statics = tuple(operand.statics for operand in operands)

    @property
    def leaves(self) -> list[Any]:
        return [leaf for part in self.statics for one in part for leaf in one.leaves]


class Step:
    """One run of the user's function: what it is given, and what is made of its results.

    The last tree of the first argument is the carry. All that stands before it there, the
    function and what it holds, goes round with the carry unchanged: `lax` turns what is
    forwarded into a constant of the loop.
    """

    def __init__(self, call: Call, inputs: Sequence[Arrays]):
        self._call = call
        self._state = inputs[0]

    @property
    def caller(self) -> str:
        return self._call.caller

    @property
    def function(self) -> Callable[..., Any]:
        return self._call.function

    def carry(self, tree: Any) -> Arrays:
        """The carry that was returned, checked against the one that was given."""
        static = self._call.statics[0][-1]
        held = len(self._state.arrays) - static.num_arrays
        kept, before = self._state.arrays[:held], self._state.arrays[held:]
        arrays, mismatches = compare(
            static, before, tree, "carry", self._call.trace_numbers
        )
        if mismatches:
            raise carry_mismatch(self.caller, self.function, mismatches)
        return Arrays([*kept, *arrays], self._state.names)

    def output(self, tree: Any) -> Arrays:
        """Any other result. Its static part travels as the metadata of the node.

        That is the one way in which it comes back when JAX finds the trace in its cache
        and the user's function does not run.
        """
        arrays, static = split(tree, self._call.trace_numbers)
        # JAX keeps the metadata for as long as the body. Static leaves that came in with
        # the call are therefore left out: they would keep themselves alive.
        known = {id(leaf): n for n, leaf in enumerate(self._call.leaves)}
        label = Static(
            static.treedef,
            [
                _Borrowed(known[id(leaf)])
                if leaf is not HOLE and id(leaf) in known
                else leaf
                for leaf in static.leaves
            ],
        )
        return Arrays(arrays, names(static), label)


class _Borrowed:
    """A static leaf of an output that is the n-th one of the call."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Borrowed) and self.index == other.index

    def __hash__(self) -> int:
        return self.index


class Body:
    """What JAX traces, and remembers the trace of.

    There is one for each function and static part of everything that it is called with,
    so that JAX knows it again. It holds none of them itself. While calls are in progress it
    takes them from there; which call does not matter, since all are alike.
    """

    def __init__(self, calling: Calling, call: Call, label: str):
        self.__name__ = self.__qualname__ = label
        self._calling = calling
        self._calls: list[Call] = []
        self._names = [
            tuple(name for static in statics for name in names(static))
            for statics in call.statics
        ]
        # References that take the body out of the cache when what it is for dies.
        self.evicting: list[Any] = []

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        # Makes JAX name the user's function and its arguments, not this class.
        if not self._calls:
            raise AttributeError("__wrapped__")
        return _plain(self._calls[-1].function)

    @contextlib.contextmanager
    def during(self, call: Call) -> Generator[None]:
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def arrays(self, position: int, operands: Operands) -> Arrays:
        """`operands` as the argument of that position."""
        return Arrays(operands.arrays, self._names[position])

    def __call__(self, *inputs: Any) -> Any:
        call = self._calls[-1]
        nodes = [node for node in inputs if isinstance(node, Arrays)]
        others = [value for value in inputs if not isinstance(value, Arrays)]
        trees = [
            tree
            for statics, node in zip(call.statics, nodes, strict=True)
            for tree in merge_all(statics, node.arrays)
        ]
        return self._calling(Step(call, nodes), *others, *trees)


def _plain(function: Any) -> Callable[..., Any]:
    # What `inspect` can take a signature and a place from.
    if hasattr(function, "__code__") or hasattr(function, "__wrapped__"):
        return function
    return function if _is_plain_partial(function) else function.__call__


def merge_output(call: Call, output: Arrays) -> Any:
    """The tree that `Step.output` split."""
    label = output.label
    leaves = call.leaves
    static = Static(
        label.treedef,
        [
            leaves[leaf.index] if isinstance(leaf, _Borrowed) else leaf
            for leaf in label.leaves
        ],
    )
    return static.merge(output.arrays)


# -- the cache ---------------------------------------------------------------------------

# Bodies that JAX may have a trace of, the latest last. An entry goes when any function or
# object that it was made for dies, or when the table is full.
_bodies: dict[Hashable, Body] = {}
_lock = threading.RLock()
_CAPACITY = 4096


def body_for(calling: Calling, call: Call) -> Body:
    """The body for a call: the same object as for the last call like it."""
    label = named(call.function)
    watched: list[Any] = []
    try:
        key = _key(calling, call, watch_with(watched))
        with _lock:
            body = _bodies.pop(key, None)
            if body is None:
                body = Body(calling, call, label)
                body.evicting = [_evict(key, value) for value in watched]
                if len(_bodies) >= _CAPACITY:
                    del _bodies[next(iter(_bodies))]
            _bodies[key] = body
            return body
    except NoToken:
        return Body(calling, call, label)


def _key(calling: Calling, call: Call, watch: Watch) -> Hashable:
    statics = (static.token(watch) for part in call.statics for static in part)
    return (calling, call.trace_numbers, *statics)


def _evict(key: Hashable, value: Any) -> Any:
    return weakref.ref(value, lambda _: _bodies.pop(key, None))
