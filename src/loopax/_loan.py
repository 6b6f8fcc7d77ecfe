"""Which arrays of a carry are buffers, and how they are lent to a body."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import _tree
from ._buffers import Buffer
from ._errors import ArgumentError
from ._jax import jnp, tree_at
from ._split import Static
from ._words import tree_text, type_text


class _Place:
    """Stands for an array, to see which of them `buffers` picks."""

    def __init__(self, number: int):
        self.number = number

    def __repr__(self) -> str:
        return "an array"


def places(caller: str, where: Callable[..., Any] | None, static: Static) -> tuple[int, ...]:
    """Which arrays of the carry are buffers."""
    if where is None:
        return ()
    marked = static.merge(_Place(number) for number in range(static.num_arrays))
    try:
        picked = _tree.leaves(where(marked), is_leaf=_is_buffer)
    except Exception as error:
        raise ArgumentError(
            f"{caller}: `buffers` must pick arrays out of the carry, as in "
            f"`buffers=lambda carry: carry.history`, but failed: {error!r}."
        ) from error
    # The first child of a buffer of an outer loop is the array.
    picked = [_tree.leaves(each)[0] if _is_buffer(each) else each for each in picked]
    for each in picked:
        if not isinstance(each, _Place):
            raise ArgumentError(
                f"{caller}: `buffers` must pick arrays out of the carry, but picked "
                f"{tree_text(each)}."
            )
    if not picked:
        raise ArgumentError(
            f"{caller}: `buffers` must pick arrays out of the carry, but picked none."
        )
    numbers = [each.number for each in picked]
    if len(set(numbers)) < len(numbers):
        raise ArgumentError(f"{caller}: `buffers` picked an array twice.")
    return tuple(sorted(numbers))


def woven(at: Sequence[int], carry: Sequence[Any], buffers: Sequence[Any]) -> list[Any]:
    """The arrays of a carry, of which those at some places are kept apart."""
    rest, kept = iter(carry), dict(zip(at, buffers, strict=True))
    count = len(carry) + len(buffers)
    return [kept[place] if place in kept else next(rest) for place in range(count)]


def unwoven(at: Sequence[int], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The opposite of `woven`."""
    rest = [array for place, array in enumerate(arrays) if place not in at]
    return rest, [arrays[place] for place in at]


class Loan:
    """The buffers of one run of a body: handed out before, taken back after."""

    def __init__(self, caller: str, where: Callable[..., Any] | None, active: Any = True):
        self._caller = caller
        self._where = where
        self._active = active
        # For a buffer of an outer loop, its mask there.
        self._outer: list[Any] = []

    def out(self, carry: Any) -> Any:
        """The carry with a `Buffer` for each array that is one."""
        return carry if self._where is None else self._replaced(carry, self._lend)

    def back(self, carry: Any) -> Any:
        """The carry that the body returned, with the arrays again."""
        if self._where is None:
            return carry
        rest = iter(self._outer)
        try:
            for each in _tree.leaves(self._where(carry), is_leaf=_is_buffer):
                if isinstance(each, Buffer):
                    # In a tree that is made of this one nobody could tell any more. Users have
                    # no use for it, so that it is no public part of a buffer.
                    each._check_latest()  # pyright: ignore[reportPrivateUsage]
            return self._replaced(carry, lambda value: self._return(value, next(rest)))
        except (AttributeError, KeyError, IndexError, StopIteration, TypeError) as error:
            if isinstance(error, ArgumentError):
                raise
            # Another structure. How it differs is found when the carries are compared.
            return _tree.map_leaves(_array_of, carry, is_leaf=_is_buffer)

    def none_in(self, tree: Any) -> Any:
        """`tree`, unless there is a buffer in it."""
        if self._where is not None and any(
            map(_is_buffer, _tree.leaves(tree, is_leaf=_is_buffer))
        ):
            raise ArgumentError(
                f"{self._caller}: the body returned a buffer outside of the carry, which would "
                "be a copy of all of it for each step."
            )
        return tree

    def _replaced(self, carry: Any, one: Callable[[Any], Any]) -> Any:
        def node(value: Any) -> Any:
            return _tree.map_leaves(one, value, is_leaf=_is_buffer)

        return tree_at(self._where, carry, replace_fn=node, is_leaf=_is_buffer)

    def _lend(self, value: Any) -> Any:
        array, mask = _tree.leaves(value) if _is_buffer(value) else (value, None)
        if not jnp.ndim(array):
            raise ArgumentError(
                f"{self._caller}: `buffers` picked {type_text(jax.typeof(array))}, which has "
                "no rows. A buffer has an axis along which they are numbered."
            )
        self._outer.append(mask)
        return Buffer(array, self._active if mask is None else self._active & mask)

    def _return(self, value: Any, mask: Any) -> Any:
        if not isinstance(value, Buffer):
            raise ArgumentError(
                f"{self._caller}: the body was given a buffer, and must return it or what "
                f"`buffer.at[i].set(row)` made of it, but returned {tree_text(value)}."
            )
        array, _ = _tree.leaves(value)
        return array if mask is None else Buffer(array, mask)


def _array_of(leaf: Any) -> Any:
    return _tree.leaves(leaf)[0] if _is_buffer(leaf) else leaf


def _is_buffer(value: Any) -> bool:
    return isinstance(value, Buffer)
