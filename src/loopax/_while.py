"""`filter_while_loop`."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

from ._body import Call, Operands, Step, as_tree, body_for
from ._boundary import public
from ._errors import not_a_predicate
from ._split import split


Carry = TypeVar("Carry")


@public(lax.while_loop, functions=("cond_fun", "body_fun"))
def filter_while_loop(
    cond_fun: Callable[[Carry], Any],
    body_fun: Callable[[Carry], Carry],
    init_val: Carry,
    *,
    trace_numbers: bool = False,
) -> Carry:
    state = Operands(
        split(as_tree(cond_fun), False),
        split(as_tree(body_fun), False),
        split(init_val, trace_numbers),
    )
    test = Call("filter_while_loop", cond_fun, trace_numbers, state)
    step = Call("filter_while_loop", body_fun, trace_numbers, state)
    cond, body = body_for(_test, test), body_for(_step, step)
    with cond.during(test), body.during(step):
        out = lax.while_loop(cond, body, body.arrays(0, state))
    *_, carry = state.merge(out.arrays)
    return carry


def _test(step: Step, cond_fun: Callable[..., Any], body_fun: Any, carry: Any) -> Any:
    pred = cond_fun(carry)
    if not _is_boolean_scalar(pred):
        raise not_a_predicate(step.caller, step.function, pred)
    return pred


def _step(step: Step, cond_fun: Any, body_fun: Callable[..., Any], carry: Any) -> Any:
    return step.carry(body_fun(carry))


def _is_boolean_scalar(value: Any) -> bool:
    try:
        aval = jax.typeof(value)
    except TypeError:
        return False
    return getattr(aval, "shape", None) == () and aval.dtype == bool
