"""What a loop is made of, and its operands."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Plan(NamedTuple):
    """All that there is to know of a loop but what it computes.

    - `cond_consts`, `body_consts`, `carry`, `buffers`: how many operands of each there are.
    - `lanes`: the axes of the predicate, and the first axes of each carry: those of `jax.vmap`.
    - `of_lanes`: which of `body_consts` have all of these axes.
    - `bound`: the greatest number of steps, or `None` if there is none.
    - `slots`: how many carries to save, at each level.
    """

    cond_consts: int
    body_consts: int
    carry: int
    buffers: int
    lanes: tuple[int, ...]
    of_lanes: tuple[bool, ...]
    bound: int | None
    slots: int

    @property
    def spacing(self) -> int | None:
        """How many steps there are from one saved carry to the next, if that is fixed."""
        return None if self.bound is None else max(-(-self.bound // self.slots), 1)


class Operands(NamedTuple):
    """The operands of a loop.

    - `cond_consts`, `body_consts`: what the predicate and the body close over.
    - `carry`: the first carry.
    - `buffers`: arrays of which rows are read and written.
    """

    cond_consts: list[Any]
    body_consts: list[Any]
    carry: list[Any]
    buffers: list[Any]


def operands_of(plan: Plan, flat: Sequence[Any]) -> Operands:
    """The operands, from one list of them all."""
    return Operands(*cut(flat, *plan[:4]))


def cut(flat: Sequence[Any], *counts: int) -> list[list[Any]]:
    """A list cut into parts of so many each."""
    rest = iter(flat)
    return [[next(rest) for _ in range(count)] for count in counts]


def pick(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    """The values that are marked."""
    return [value for value, is_in in zip(values, which, strict=True) if is_in]


def put_in(values: Sequence[Any], which: Sequence[bool], new: Sequence[Any]) -> list[Any]:
    """`values` with others in the places that are marked."""
    rest = iter(new)
    return [next(rest) if is_in else v for v, is_in in zip(values, which, strict=True)]
