"""`filter_fori_loop`."""

from collections.abc import Callable
from typing import Any, SupportsInt, TypeVar

from ._body import Call, Operands, Step, as_tree, body_for
from ._boundary import public
from ._jax import lax
from ._split import split


Carry = TypeVar("Carry")


@public(lax.fori_loop, functions=("body_fun",), trees=("init_val",))
def filter_fori_loop(
    lower: SupportsInt,
    upper: SupportsInt,
    body_fun: Callable[[Any, Carry], Carry],
    init_val: Carry,
    *,
    unroll: SupportsInt | None = None,
    trace_numbers: bool = False,
) -> Carry:
    state = Operands(split(as_tree(body_fun), False), split(init_val, trace_numbers))
    call = Call("filter_fori_loop", body_fun, trace_numbers, state)
    body = body_for(_step, call)
    with body.during(call):
        out = lax.fori_loop(lower, upper, body, body.argument(state), unroll=unroll)
    *_, carry = state.merge(out.arrays)
    return carry


def _step(step: Step, i: Any, body_fun: Callable[..., Any], carry: Any) -> Any:
    return step.carry(body_fun(i, carry))
