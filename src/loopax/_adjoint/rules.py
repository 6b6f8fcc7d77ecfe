"""The rules of differentiation of the primitives that loops are made of."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .._jax import Zero, eval_jaxpr, instantiate_zeros, jvp, set_jvp, typeof, vjp
from .derivative import Active
from .jaxprs import (
    has_rule,
    is_differentiable,
    reached,
    rearranged,
    rewritten,
    trace,
    without_callbacks,
)
from .linear import LINEAR, Linear, run_linear
from .loop import LOOP, differentiable
from .plan import Plan, cut, operands_of, pick, put_in
from .rows import filled
from .saving import SAVING, cut_saved, run_saving


def _loop_jvp(primals: Any, tangents: Any, *, cond: Any, body: Any, plan: Plan) -> Any:
    given, into = operands_of(plan, primals), operands_of(plan, tangents)
    active = _active(body, plan, into.body_consts, into.carry, into.buffers)
    moving = [*active.carry, *active.buffers]
    if not any(moving):
        out = LOOP.bind(*primals, cond=cond, body=body, plan=plan)
        return out, [_no_tangent(each) for each in out]
    body, taken, more = _as_differentiated(body, plan, active)
    active = active._replace(consts=(*(False for _ in more), *active.consts))
    plan = plan._replace(
        body_consts=len(active.consts), of_lanes=(*(False for _ in more), *plan.of_lanes)
    )
    consts = [*more, *given.body_consts]
    saved = SAVING.bind(
        *given.cond_consts,
        *consts,
        *given.carry,
        *given.buffers,
        cond=cond,
        body=taken,
        plan=plan,
    )
    carry, buffers, (steps,), spacing, saves = cut_saved(plan, saved)
    full = _when_full(body, plan)
    linear = Linear(
        full,
        full if taken is body else _when_full(taken, plan),
        plan,
        active,
        transposed=False,
        again=False,
        mapped=(),
    )
    moved = linear.bind(
        *consts,
        steps,
        *spacing,
        *saves,
        *buffers,
        *pick([*more, *into.body_consts], active.consts),
        *map(instantiate_zeros, pick(into.carry, active.carry)),
        *map(instantiate_zeros, pick(into.buffers, active.buffers)),
    )
    out = [*carry, *buffers, steps]
    return out, put_in([_no_tangent(each) for each in out], [*moving, False], moved)


def _active(body: Any, plan: Plan, consts: Any, carry: Any, buffers: Any) -> Active:
    """What has a tangent before the loop, or after some steps."""
    now = Active(*(tuple(map(_has_tangent, part)) for part in (consts, carry, buffers)))
    while True:
        marks = [*now.consts, False, False, False, *now.carry, *now.buffers]
        outs = reached(body, marks, is_differentiable)
        carry, buffers = cut(outs, plan.carry, plan.buffers)
        new = now._replace(
            carry=tuple(a or b for a, b in zip(now.carry, carry, strict=True)),
            buffers=tuple(a or b for a, b in zip(now.buffers, buffers, strict=True)),
        )
        if new == now:
            return now
        now = new


def _as_differentiated(body: Any, plan: Plan, active: Active) -> tuple[Any, Any, list[Any]]:
    """The body, what a step computes that is differentiated, and what those close over.

    They are the same, unless the body calls a function with a `jax.custom_vjp`. When such a
    function is differentiated, its result is that of the rule of its forward pass. A second
    derivative is that of the rule, then, not the rule once more.
    """
    if not has_rule(body):
        return body, body, []

    def run(*operands: Any) -> Any:
        consts, number, carry, buffers = cut(
            operands, plan.body_consts, 3, plan.carry, plan.buffers
        )

        def of_some(*some: Any) -> Any:
            consts_now, carry_now, buffers_now = (
                put_in(part, which, new)
                for part, which, new in zip((consts, carry, buffers), active, some, strict=True)
            )
            return eval_jaxpr(body, (), *consts_now, *number, *carry_now, *buffers_now)

        at = map(pick, (consts, carry, buffers), active)
        out, _ = vjp(of_some, *at)
        return out

    taken, more = trace(run, *(var.aval for var in body.invars))
    body = rearranged(body, [*taken.invars[: len(more)], *body.invars], body.outvars)
    return body, taken, more


def _has_tangent(tangent: Any) -> bool:
    return not isinstance(tangent, Zero)


def _no_tangent(value: Any) -> Zero:
    return Zero(typeof(value).to_tangent_aval())


def _when_full(body: Any, plan: Plan) -> Any:
    """The body, to be run again when all rows of the buffers have been written.

    What the user has it print was printed the first time.
    """
    count = len(body.invars)
    marks = [place >= count - plan.buffers for place in range(count)]
    return without_callbacks(rewritten(body, marks, _fill)[0])


def _fill(eqn: Any, marks: Sequence[bool]) -> tuple[Any, Sequence[bool]] | None:
    if eqn.primitive is not LOOP and eqn.primitive is not SAVING:
        return filled(eqn, marks)
    # A loop within the body, that goes on with the same buffers.
    plan, body = eqn.params["plan"], eqn.params["body"]
    *_, buffers = cut(marks, *plan[:4])
    others = [False] * (len(body.invars) - plan.buffers)
    body, _ = rewritten(body, [*others, *buffers], _fill)
    outs = [False] * len(eqn.outvars)
    outs[plan.carry : plan.carry + plan.buffers] = buffers
    return eqn.replace(params={**eqn.params, "body": body}), outs


def _saving_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    run = functools.partial(run_saving, **params, runs=differentiable)
    return _from_run(run, primals, tangents)


def _linear_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    linear = Linear(**params)
    count = len(primals) - linear.operands
    moving = list(map(_has_tangent, tangents))
    here = [each if n < count else _no_tangent(primals[n]) for n, each in enumerate(tangents)]
    if not any(moving[:count]):
        out = linear.bind(*primals)
        return out, linear.bind(*primals[:count], *map(instantiate_zeros, tangents[count:]))
    run = functools.partial(run_linear, **params, runs=differentiable)
    out, moved = _from_run(run, primals, here)
    if any(moving[count:]):
        more = linear.bind(*primals[:count], *map(instantiate_zeros, tangents[count:]))
        moved = [b if isinstance(a, Zero) else a + b for a, b in zip(moved, more, strict=True)]
    return out, moved


def _from_run(run: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """The derivative of a primitive that follows from what it computes."""
    moving = list(map(_has_tangent, tangents))

    def of_some(*some: Any) -> Any:
        return run(*put_in(primals, moving, some))

    out, moved = jvp(of_some, pick(primals, moving), pick(tangents, moving))
    return out, [
        each if is_differentiable(typeof(of)) else _no_tangent(of)
        for of, each in zip(out, moved, strict=True)
    ]


set_jvp(LOOP, _loop_jvp)
set_jvp(SAVING, _saving_jvp)
set_jvp(LINEAR, _linear_jvp)
