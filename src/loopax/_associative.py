"""`filter_associative_scan`."""

from collections.abc import Callable, Sequence
from typing import Any, SupportsInt, TypeVar

import numpy as np

from ._axes import length_along
from ._boundary import public
from ._errors import element_mismatch
from ._jax import lax
from ._mismatch import Comparison
from ._split import split


Elements = TypeVar("Elements")


@public(lax.associative_scan, functions=("fn",), trees=("elems",))
def filter_associative_scan(
    fn: Callable[[Elements, Elements], Elements],
    elems: Elements,
    reverse: bool | np.bool_ = False,
    axis: SupportsInt = 0,
    *,
    trace_numbers: bool = False,
) -> Elements:
    length_along("filter_associative_scan", "elems", elems, int(axis), trace_numbers)
    arrays, static = split(elems, trace_numbers)
    rules = Comparison(trace_numbers, weak_fits=True)

    def combine(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        result = fn(static.merge(left), static.merge(right))
        combined, mismatches = rules.compare(static, left, result, "elems")
        if mismatches:
            raise element_mismatch("filter_associative_scan", fn, mismatches)
        return combined

    return static.merge(lax.associative_scan(combine, arrays, bool(reverse), int(axis)))
