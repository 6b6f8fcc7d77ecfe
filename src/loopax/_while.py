"""`filter_while_loop`."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.core import Tracer

from ._body import Call, Operands, Step, as_tree, body_for
from ._boundary import public
from ._errors import not_a_predicate
from ._jax import lax
from ._split import closed_over, split


Carry = TypeVar("Carry")


@public(lax.while_loop, functions=("cond_fun", "body_fun"))
def filter_while_loop(
    cond_fun: Callable[[Carry], Any],
    body_fun: Callable[[Carry], Carry],
    init_val: Carry,
    *,
    trace_numbers: bool = False,
) -> Carry:
    body_part, carry_part = (
        split(as_tree(body_fun), False),
        split(init_val, trace_numbers),
    )
    cond_part = split(as_tree(cond_fun), False)
    if any(isinstance(leaf, Tracer) for leaf in (*cond_part.arrays, *carry_part.arrays)):
        # `lax` takes what the body forwards for a constant of the loop, but not if the
        # predicate reads it. Under `vmap`, with a predicate that differs between lanes,
        # each lane would then get a copy of its own, to be selected anew at every step.
        cond_part = closed_over(as_tree(cond_fun))
    # Neither function's trace depends on what is static in the other.
    test_state = Operands(cond_part, split(body_part.arrays, False), carry_part)
    step_state = Operands(split(cond_part.arrays, False), body_part, carry_part)
    test = Call("filter_while_loop", cond_fun, trace_numbers, test_state)
    step = Call("filter_while_loop", body_fun, trace_numbers, step_state)
    cond, body = body_for(_test, test), body_for(_step, step)
    with cond.during(test), body.during(step):
        out = lax.while_loop(cond, body, body.arrays(0, step_state))
    *_, carry = step_state.merge(out.arrays)
    return carry


def _test(step: Step, cond_fun: Callable[..., Any], _: Any, carry: Any) -> Any:
    pred = cond_fun(carry)
    if not _is_boolean_scalar(pred):
        raise not_a_predicate(step.caller, step.function, pred)
    return pred


def _step(step: Step, _: Any, body_fun: Callable[..., Any], carry: Any) -> Any:
    return step.carry(body_fun(carry))


def _is_boolean_scalar(value: Any) -> bool:
    try:
        aval = jax.typeof(value)
    except TypeError:
        return False
    return getattr(aval, "shape", None) == () and aval.dtype == bool
