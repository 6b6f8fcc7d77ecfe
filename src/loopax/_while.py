"""`filter_while_loop`."""

from collections.abc import Callable
from typing import Any, TypeVar

from jax.core import Tracer

from ._body import Call, Step, as_tree, body_for, views
from ._boundary import public
from ._errors import not_a_predicate
from ._jax import lax
from ._split import closed_over, split
from ._static import is_scalar


Carry = TypeVar("Carry")


@public(lax.while_loop, functions=("cond_fun", "body_fun"), trees=("init_val",))
def filter_while_loop(
    cond_fun: Callable[[Carry], Any],
    body_fun: Callable[[Carry], Carry],
    init_val: Carry,
    *,
    trace_numbers: bool = False,
) -> Carry:
    functions = [split(as_tree(cond_fun), False), split(as_tree(body_fun), False)]
    carry = split(init_val, trace_numbers)
    if any(isinstance(leaf, Tracer) for leaf in (*functions[0].arrays, *carry.arrays)):
        # `lax` takes what the body forwards for a constant of the loop, but not if the
        # predicate reads it. Under `vmap`, with a predicate that differs between lanes,
        # each lane would then get a copy of its own, to be selected anew at every step.
        functions[0] = closed_over(as_tree(cond_fun))
    test_state, step_state = views(functions, carry)
    test = Call("filter_while_loop", cond_fun, trace_numbers, test_state, functions=2)
    step = Call(
        "filter_while_loop", body_fun, trace_numbers, step_state, functions=2, own=1
    )
    cond, body = body_for(_test, test), body_for(_step, step)
    with cond.during(test), body.during(step):
        out = lax.while_loop(cond, body, body.argument(step_state))
    *_, result = step_state.merge(out.arrays)
    return result


def _test(step: Step, cond_fun: Callable[..., Any], carry: Any) -> Any:
    pred = cond_fun(carry)
    if not is_scalar(pred, "b"):
        raise not_a_predicate(step.caller, step.function, pred)
    return pred


def _step(step: Step, body_fun: Callable[..., Any], carry: Any) -> Any:
    return step.carry(body_fun(carry))
