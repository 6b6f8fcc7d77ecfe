"""`filter_scan`."""

from collections.abc import Callable
from typing import Any, SupportsInt, TypeVar, cast

import numpy as np

from ._axes import Axes, along, stacked
from ._body import Call, Operands, Step, as_tree, body_for, merge_output
from ._boundary import public
from ._errors import not_a_pair
from ._jax import combine, lax
from ._split import split


Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


@public(lax.scan, functions=("f",), trees=("init", "xs"))
def filter_scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    length: SupportsInt | None = None,
    reverse: bool | np.bool_ = False,
    unroll: SupportsInt = 1,
    *,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    trace_numbers: bool = False,
) -> tuple[Carry, Y]:
    whole, sliced = along("filter_scan", xs, in_axes, length, trace_numbers)
    state = Operands(
        split(as_tree(f), False), split(whole, trace_numbers), split(init, trace_numbers)
    )
    inputs = Operands(split(sliced, trace_numbers))
    call = Call("filter_scan", f, trace_numbers, state, inputs)
    body = body_for(_step, call)
    with body.during(call):
        out, ys = lax.scan(
            body,
            body.argument(state),
            body.argument(inputs, 1),
            length=length,
            reverse=reverse,
            unroll=unroll,
        )
        ys = merge_output(ys)
    *_, carry = state.merge(out.arrays)
    return carry, stacked("filter_scan", ys, out_axes, trace_numbers)


def _step(step: Step, f: Callable[..., Any], whole: Any, carry: Any, x: Any) -> Any:
    result: Any = f(carry, x if whole is None else combine(x, whole))
    if not _is_pair(result):
        raise not_a_pair(step.caller, step.function, result)
    new, y = result
    return step.carry(new), step.output(y)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(cast(Any, value)) == 2
