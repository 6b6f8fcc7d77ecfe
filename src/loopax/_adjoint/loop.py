"""`LOOP`: a while loop, as a primitive that can be differentiated."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _tree
from .._errors import ArgumentError
from .._jax import ShapedArray, VmapAxis, lax, primitive, typeof
from .._static import is_reference
from .jaxprs import rearranged, trace
from .lanes import in_lanes
from .plan import Plan, cut, operands_of, pick, put_in
from .steps import Number, Steps


def loop(
    cond: Callable[[Any, Any, Any], Any],
    body: Callable[[Any, Any, Any, Any], Any],
    carry: Sequence[Any],
    buffers: Sequence[Any],
    bound: int | None,
    slots: int,
) -> tuple[list[Any], list[Any]]:
    """A while loop that can be differentiated.

    - `cond`: `(i, carry, buffers) -> bool`.
    - `body`: `(number, active, carry, buffers) -> (carry, buffers)`. `active` is whether the
        step counts; a write to a buffer must depend on it. `number.own` is the number of the
        step, and `number.all` too, unless the step does not count.
    - `carry`, `buffers`: lists of arrays. Of the buffers rows are read and written, with
        `read` and `write`; rows that are read have been written before.
    - `bound`: the greatest number of steps, after which the loop ends.
    - `slots`: how many carries the forward pass saves, if the loop is differentiated.

    Returns the last carry and the buffers.
    """
    buffers = list(buffers)
    zero, true = np.int32(0), np.bool_(True)

    def flat_body(i: Any, own: Any, active: Any, carry: Any, buffers: Any) -> Any:
        new = body(Number(i, own), active, carry, buffers)
        return [each for part in new for each in part]

    test, test_consts = trace(lambda *args: [cond(*args)], zero, carry, buffers)
    step, step_consts, promoted = settled(
        lambda carry: trace(flat_body, zero, zero, true, carry, buffers), carry
    )
    if promoted is not carry:
        carry = promoted
        test, test_consts = trace(lambda *args: [cond(*args)], zero, carry, buffers)
    for const in (*test_consts, *step_consts):
        if is_reference(const):
            raise ArgumentError(
                'A loop of kind="checkpointed" has no use for mutable references: when it is '
                'differentiated, its steps are run again. Those of kind="lax" may change them.'
            )
    # What the body hands on as it is need not be saved.
    given = step.invars[len(step_consts) + 3 :][: len(carry)]
    fixed = [a is b for a, b in zip(given, step.outvars, strict=False)]
    moving = [not is_fixed for is_fixed in fixed]
    held = pick(carry, fixed)
    test = _hoisted(test, len(test_consts), 1, fixed)
    step = _hoisted(step, len(step_consts), 3, fixed)
    step = rearranged(
        step,
        step.invars,
        [*pick(step.outvars[: len(carry)], moving), *step.outvars[len(carry) :]],
    )
    plan = Plan(
        cond_consts=len(test_consts) + len(held),
        body_consts=len(step_consts) + len(held),
        carry=sum(moving),
        buffers=len(buffers),
        lanes=(),
        of_lanes=(False,) * (len(step_consts) + len(held)),
        bound=bound,
        slots=slots,
    )
    out = LOOP.bind(
        *test_consts,
        *held,
        *step_consts,
        *held,
        *pick(carry, moving),
        *buffers,
        cond=test,
        body=step,
        plan=plan,
    )
    new, buffers, _ = cut(out, plan.carry, plan.buffers, 1)
    return put_in(carry, moving, new), buffers


def settled(
    traced: Callable[[Any], tuple[Any, list[Any]]], carry: Sequence[Any]
) -> tuple[Any, list[Any], Sequence[Any]]:
    """The jaxpr of a body, what it closes over, and the carry in the type that it keeps.

    A weakly typed carry, such as a Python number, is promoted to what the body makes of it,
    as by `lax`: never to what it would not fit in, such as a float to an integer. The carries
    are the first results of the jaxpr.
    """
    jaxpr, consts = traced(carry)
    avals = [typeof(each) for each in carry]
    new = [var.aval for var in jaxpr.outvars[: len(carry)]]
    weak = [
        getattr(a, "weak_type", False) and (not b.weak_type or a.dtype != b.dtype)
        for a, b in zip(avals, new, strict=True)
    ]
    if not any(weak):
        return jaxpr, consts, carry
    carry = [
        lax.convert_element_type(each, jnp.result_type(each, aval.dtype)) if is_weak else each
        for each, aval, is_weak in zip(carry, new, weak, strict=True)
    ]
    return *traced(carry), carry


def _hoisted(jaxpr: Any, consts: int, others: int, fixed: Sequence[bool]) -> Any:
    """The jaxpr with carries moved behind the constants."""
    total = len(jaxpr.invars)
    parts = cut(jaxpr.invars, consts, others, len(fixed), total - consts - others - len(fixed))
    first, between, carry, rest = parts
    moving = [not is_fixed for is_fixed in fixed]
    order = [*first, *pick(carry, fixed), *between, *pick(carry, moving), *rest]
    return rearranged(jaxpr, order, jaxpr.outvars)


def run_loop(*flat: Any, cond: Any, body: Any, plan: Plan) -> Any:
    steps = Steps(cond, body, plan, flat)

    def goes_on(both: Any) -> Any:
        return both[0].is_going

    def step(both: Any) -> Any:
        return steps.step(True, *both)

    start = (steps.start(), steps.buffers)
    state, buffers = lax.while_loop(goes_on, step, start)
    carry, count = steps.result(state)
    return [*carry, *buffers, count]


def types(*avals: Any, cond: Any, body: Any, plan: Plan) -> Any:
    """The types of the carry, the buffers and the number of steps."""
    given = operands_of(plan, avals)
    count = ShapedArray(plan.lanes, np.dtype(np.int32))
    return [*given.carry, *given.buffers, count], cond.effects | body.effects


def _batch(axis: VmapAxis, flat: Any, axes: Any, *, cond: Any, body: Any, plan: Plan) -> Any:
    lanes = in_lanes(axis, flat, axes, cond, body, plan)
    return LOOP.bind(*lanes.flat, **lanes.params), lanes.out_axes


LOOP = primitive("loop", run_loop, types, _batch)


# How to run a loop that a rule is made of: `(cond, body, carry, buffers, bound)`, where `cond`
# is `(carry, buffers) -> bool` and `body` `(active, carry, buffers) -> (carry, buffers)`, and a
# carry any tree.
Runs = Callable[
    [Callable[[Any, Any], Any], Callable[[Any, Any, Any], Any], Any, list[Any], int | None],
    tuple[Any, Any],
]


def compiled(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    carry: Any,
    buffers: list[Any],
    bound: int | None,
) -> tuple[Any, Any]:
    """Runs a loop of a rule that is not differentiated."""

    def test(both: Any) -> Any:
        return cond(*both)

    def step(both: Any) -> Any:
        return body(True, *both)

    return lax.while_loop(test, step, (carry, buffers))


def differentiable(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    carry: Any,
    buffers: list[Any],
    bound: int | None,
) -> tuple[Any, Any]:
    """Runs a loop of a rule that is."""
    leaves, treedef = _tree.flatten(carry)

    def flat_body(_: Number, active: Any, leaves: Any, buffers: Any) -> Any:
        carry, buffers = body(active, treedef.unflatten(leaves), buffers)
        return _tree.leaves(carry), buffers

    leaves, buffers = loop(
        lambda _, leaves, buffers: cond(treedef.unflatten(leaves), buffers),
        flat_body,
        leaves,
        buffers,
        bound,
        default_slots(bound),
    )
    return treedef.unflatten(leaves), buffers


# How many carries a loop without a bound saves, if nothing is said; and one with a bound that
# is there only for form's sake, with which two levels would be a waste.
_SLOTS, _MOST_SLOTS = 32, 1024


def default_slots(bound: int | None) -> int:
    """About the square root of the number of steps, or the cube root if there are very many."""
    if bound is None:
        return _SLOTS
    root = math.isqrt(max(bound, 1) - 1) + 1
    return min(root, max(_MOST_SLOTS, math.ceil(bound ** (1 / 3))))
