"""Which axis of which array a loop goes along, and for how many steps."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from . import _tree
from ._errors import ArgumentError, LengthError, length_conflict, no_length
from ._jax import partition
from ._mismatch import path_text
from ._static import is_dynamic
from ._words import type_text


# An axis, `None` to pass arrays whole, a function from a leaf to one of these (such as
# `eqx.if_array(0)`), or a PyTree of them whose structure is a prefix of that of the tree.
Axes = Any


def along(
    caller: str, xs: Any, axes: Axes, length: Any, trace_numbers: bool
) -> tuple[Any, Any, int | None]:
    """Splits `xs` into what is passed whole and what is sliced, along its first axis.

    `eqx.combine` puts them together again. Also returns the number of steps, unless it is one
    that only `lax` knows what to do with. Raises if the arrays do not agree on a number
    of steps with each other and with `length`.
    """
    if axes == 0:
        # The usual case, without a walk over the tree.
        whole, sliced = None, xs
        each = None
    else:
        each = _each_axis(caller, "in_axes", axes, xs, trace_numbers)
        is_whole = _tree.map_leaves(_is_whole, each, is_leaf=_is_axis)
        whole, sliced = partition(xs, is_whole)
    steps = _length_along(caller, "xs", sliced, each, length, trace_numbers, _SPARED_IN_SCAN)
    if steps is None and length is None:
        raise no_length(caller, "xs", xs, "pass the number of steps as `length`.")
    if each is not None:
        sliced = _move(sliced, each, to_front=True)
    return whole, sliced, steps


def stacked(caller: str, ys: Any, axes: Axes, trace_numbers: bool) -> Any:
    """Moves the first axis of the arrays in `ys` to where `out_axes` wants it."""
    if axes == 0:
        return ys
    each = _each_axis(caller, "out_axes", axes, ys, trace_numbers)
    every = _tree.leaves(each, is_leaf=_is_axis)
    for place, (leaf, axis) in enumerate(zip(_tree.leaves(ys), every, strict=True)):
        if is_dynamic(leaf, trace_numbers) and not -leaf.ndim <= axis.axis < leaf.ndim:
            raise ArgumentError(
                f"{caller}: {_names('ys', ys)[place]} is {type_text(jax.typeof(leaf))} once it "
                f"is stacked, which has no axis {axis.axis} to stack along. See `out_axes`."
            )
    return _move(ys, each, to_front=False)


_SPARED_IN_SCAN = "give it None in `in_axes`, or let the body close over it"
_SPARED_ELSEWHERE = "let the function close over it"


class _Axis:
    """The axis of one leaf. A leaf itself to JAX, unlike a bare `None`."""

    def __init__(self, axis: int | None):
        self.axis = axis


def _is_axis(value: Any) -> bool:
    return isinstance(value, _Axis)


def _is_whole(axis: _Axis) -> bool:
    return axis.axis is None


def _each_axis(caller: str, argument: str, axes: Axes, tree: Any, trace_numbers: bool) -> Any:
    def one(axis: Any, leaf: Any) -> _Axis:
        if callable(axis):
            axis = axis(leaf)
        if not is_dynamic(leaf, trace_numbers):
            # Goes with what is sliced, where it reaches every step as it is.
            return _Axis(0)
        if axis is None:
            if argument == "out_axes":
                raise ArgumentError(
                    f"{caller}: `out_axes` has None for an array, but what every step "
                    "returns anew has to be stacked along some axis."
                )
            return _Axis(None)
        try:
            return _Axis(operator.index(axis))
        except TypeError:
            raise ArgumentError(
                f"{caller}: `{argument}` must hold integers and None, got {axis!r}."
            ) from None

    def subtree(axis: Any, tree: Any) -> Any:
        return _tree.map_leaves(functools.partial(one, axis), tree)

    try:
        return _tree.map_leaves(subtree, axes, tree, is_leaf=lambda axis: axis is None)
    except ValueError:
        raise ArgumentError(
            f"{caller}: `{argument}` must be an integer, None, or a PyTree of those, a "
            f"prefix of `{'xs' if argument == 'in_axes' else 'ys'}`, got {axes!r}."
        ) from None


def _move(tree: Any, axes: Any, to_front: bool) -> Any:
    def one(axis: _Axis, leaf: Any) -> Any:
        if leaf is None or not axis.axis:
            return leaf
        pair = (axis.axis, 0) if to_front else (0, axis.axis)
        return jnp.moveaxis(leaf, *pair)

    return _tree.map_leaves(one, axes, tree, is_leaf=_is_axis)


def length_along(caller: str, name: str, tree: Any, axis: int, trace_numbers: bool) -> int:
    """How long the arrays in `tree`, the argument of that name, are along an axis."""
    each = _each_axis(caller, name, axis, tree, trace_numbers)
    length = _length_along(caller, name, tree, each, None, trace_numbers, _SPARED_ELSEWHERE)
    if length is None:
        raise no_length(caller, name, tree)
    return length


def _length_along(
    caller: str,
    root: str,
    tree: Any,
    axes: Any,
    length: Any,
    trace_numbers: bool,
    how_to_spare: str,
) -> int | None:
    number = _concrete_length(caller, length)
    leaves = _tree.leaves(tree)
    which = [0] * len(leaves)
    if axes is not None:
        every = _tree.leaves(axes, is_leaf=_is_axis)
        which = [axis.axis for axis in every if not _is_whole(axis)]
    found: list[tuple[int, Any, int]] = []
    for place, (leaf, axis) in enumerate(zip(leaves, which, strict=True)):
        if not is_dynamic(leaf, trace_numbers):
            continue
        aval = jax.typeof(leaf)
        shape = getattr(aval, "shape", None)
        if shape is None:
            # Not an array, but something that only `lax` knows how to scan over.
            return number
        if not -len(shape) <= axis < len(shape):
            raise ArgumentError(
                f"{caller}: {_names(root, tree)[place]} is {type_text(aval)}, which has no "
                f"axis {axis} to go along. To pass it whole, {how_to_spare}."
            )
        found.append((place, aval, axis))
    lengths = {aval.shape[axis] for _, aval, axis in found}
    if len(lengths) > 1 or (number is not None and lengths - {number}):
        names = _names(root, tree)
        rows = [(names[place], aval, axis) for place, aval, axis in found]
        raise length_conflict(caller, root, tree, rows, number)
    return lengths.pop() if lengths else number


def _names(root: str, tree: Any) -> list[str]:
    """What the leaves are called. Asked only when something is wrong with one of them."""
    return [root + path_text(path) for path, _ in _tree.leaves_with_path(tree)]


def _concrete_length(caller: str, length: Any) -> int | None:
    if length is None or isinstance(length, Tracer):
        # `lax` says what is wrong with a traced length.
        return None
    number = int(length)
    if number < 0:
        raise LengthError(f"{caller}: `length` must not be negative, got {number}.")
    return number
