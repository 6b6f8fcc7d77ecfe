"""`filter_stack` and `filter_unstack`."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp

from ._axes import length_along
from ._boundary import public
from ._errors import LengthError, stack_mismatch
from ._mismatch import Comparison, Mismatch
from ._split import split


Tree = TypeVar("Tree")


@public()
def filter_stack(trees: Sequence[Tree], *, trace_numbers: bool = False) -> Tree:
    if len(trees) == 0:
        raise LengthError("filter_stack: `trees` is empty; there is nothing to stack.")
    first = split(trees[0], trace_numbers)
    rules = Comparison(trace_numbers)
    rows: list[list[Any]] = []
    found: list[Mismatch] = []
    for index, tree in enumerate(trees):
        arrays, mismatches = rules.compare(
            first.static, first.arrays, tree, f"trees[{index}]"
        )
        rows.append(arrays)
        found += mismatches
    if found:
        raise stack_mismatch("filter_stack", found)
    return first.static.merge(jnp.stack(column) for column in zip(*rows, strict=True))


@public()
def filter_unstack(tree: Tree, *, trace_numbers: bool = False) -> list[Tree]:
    length = length_along("filter_unstack", "tree", tree, 0, trace_numbers)
    arrays, static = split(tree, trace_numbers)
    return [static.merge(array[index] for array in arrays) for index in range(length)]
