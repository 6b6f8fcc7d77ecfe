"""What a public function was called with, split, while the call lasts."""

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import equinox as eqx

from ._split import Arrays, Split, Static, bare
from ._token import Tokens


def as_tree(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a PyTree, so that the arrays inside it are seen.

    A Module is one already. Python's own bound methods and partial applications are not;
    to JAX they are opaque.
    """
    if isinstance(function, types.MethodType):
        return Applied(function.__func__, (function.__self__,), {})
    if is_plain_partial(function):
        partial: Any = function
        return Applied(as_tree(partial.func), partial.args, partial.keywords)
    return function


class Applied(eqx.Module):
    """A function together with its first arguments, as a PyTree.

    Not `eqx.Partial`, whose frame would stand in the user's tracebacks.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*self.arguments, *arguments, **self.keywords)


def is_plain_partial(function: Any) -> bool:
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

    def merge_last(self, arrays: Sequence[Any]) -> Any:
        """The last of the trees alone, such as the carry, over other arrays."""
        static = self.statics[-1]
        return static.merge(arrays[len(arrays) - static.num_arrays :])


def _merge(statics: Sequence[Static], arrays: Sequence[Any]) -> tuple[Any, ...]:
    rest = iter(arrays)
    return tuple(static.merge(rest) for static in statics)


class View(NamedTuple):
    """What one of several functions is called with.

    - `operands`: the functions, and the first of the other trees.
    - `functions`, `own`: how many functions there are among them, and which is called.
    """

    operands: Operands
    functions: int
    own: int


def views(functions: Sequence[Split], *others: Split) -> list[View]:
    """What each of several functions is called with: the same arrays for each.

    Of the other functions it has nothing but those, so that no trace depends on what is
    static in a function that it does not call.
    """
    if not any(part.arrays for part in functions):
        return [View(Operands(part, *others), 1, 0) for part in functions]
    every = [array for part in functions for array in part.arrays]
    seen: list[View] = []
    start = 0
    for part in functions:
        stop = start + len(part.arrays)
        before, after = (
            Split(every[:start], bare(start)),
            Split(every[stop:], bare(len(every) - stop)),
        )
        seen.append(View(Operands(before, part, after, *others), functions=3, own=1))
        start = stop
    return seen


class Call:
    """What is static in one call of a public function, while the call lasts.

    - `caller`: the public function.
    - `function`: the function of the user's that is to be traced.
    - `first`, `operands`: for each argument of the traced function that holds arrays, its
        trees. The first holds the functions, and last of all the carry.
    - `as_arrays`: which leaves of its outputs are arrays even if they are numbers.
    """

    def __init__(
        self,
        caller: str,
        function: Callable[..., Any],
        trace_numbers: bool,
        first: View | Operands,
        *operands: Operands,
        as_arrays: frozenset[int] = frozenset(),
    ):
        self.caller = caller
        self.function = function
        self.trace_numbers = trace_numbers
        view = first if isinstance(first, View) else View(first, 1, 0)
        self.statics = tuple(part.statics for part in (view.operands, *operands))
        self.functions = view.functions
        self.own = view.own
        self.as_arrays = as_arrays

    @functools.cached_property
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

    def token(self, tokens: Tokens) -> Hashable:
        statics = (static.token(tokens) for part in self.statics for static in part)
        return (self.trace_numbers, self.functions, self.own, self.as_arrays, *statics)
