"""What a public function was called with, split, while the call lasts."""

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import equinox as eqx

from ._split import Arrays, Split, Static, split_held
from ._static import Watch


def as_tree(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a PyTree, so that the arrays inside it are seen.

    A Module is one already. Python's own bound methods and partial applications are not;
    to JAX they are opaque.
    """
    if isinstance(function, types.MethodType):
        return eqx.Partial(function.__func__, function.__self__)
    if is_plain_partial(function):
        partial: Any = function
        return eqx.Partial(as_tree(partial.func), *partial.args, **partial.keywords)
    return function


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
