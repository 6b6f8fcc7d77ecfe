"""A loop under `jax.vmap`: one loop over what all lanes have, in lockstep."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._jax import VmapAxis, eval_jaxpr
from .jaxprs import trace
from .plan import Operands, Plan, cut, operands_of


class Lanes(NamedTuple):
    """The loop over all lanes.

    - `flat`, `params`: its operands and its parameters.
    - `carry`: which carries have the axis.
    - `out_axes`: the axes of the carry, the buffers and the number of steps.
    """

    flat: list[Any]
    params: dict[str, Any]
    carry: list[bool]
    out_axes: list[int | None]


def in_lanes(
    axis: VmapAxis, flat: Sequence[Any], axes: Sequence[Any], cond: Any, body: Any, plan: Plan
) -> Lanes:
    """The loop over all lanes, from the operands and the axes that they have."""
    given, at = operands_of(plan, flat), operands_of(plan, axes)
    marks, differs = _which(axis, given, at, cond, body, plan)
    given = Operands(
        *(
            [
                axis.to_front(value, place) if mark else value
                for value, place, mark in zip(*parts, strict=True)
            ]
            for parts in zip(given, at, marks, strict=True)
        )
    )
    in_axes = Operands(*(_axes(part) for part in marks))
    out_axes = [*in_axes.carry, *in_axes.buffers]
    i = np.int32(0)
    active = np.zeros((axis.size, *plan.lanes) if differs else (), bool)
    own = np.zeros(active.shape, np.int32)

    def one_test(consts: Any, i: Any, carry: Any, buffers: Any) -> Any:
        return eval_jaxpr(cond, (), *consts, i, *carry, *buffers)

    def one_step(consts: Any, i: Any, own: Any, active: Any, carry: Any, buffers: Any) -> Any:
        return eval_jaxpr(body, (), *consts, i, own, active, *carry, *buffers)

    where = 0 if differs else None
    every_test = axis.vmap(
        one_test, (in_axes.cond_consts, None, in_axes.carry, in_axes.buffers), [where]
    )
    every_step = axis.vmap(
        one_step,
        (in_axes.body_consts, None, where, where, in_axes.carry, in_axes.buffers),
        out_axes,
    )
    test, more_test = trace(every_test, given.cond_consts, i, given.carry, given.buffers)
    step, more_step = trace(
        every_step, given.body_consts, i, own, active, given.carry, given.buffers
    )
    plan = plan._replace(
        cond_consts=plan.cond_consts + len(more_test),
        body_consts=plan.body_consts + len(more_step),
        lanes=active.shape,
        of_lanes=(False,) * len(more_step)
        + tuple(
            differs and mark and (was or not plan.lanes)
            for mark, was in zip(marks.body_consts, plan.of_lanes, strict=True)
        ),
    )
    test_consts = [*more_test, *given.cond_consts]
    step_consts = [*more_step, *given.body_consts]
    return Lanes(
        [*test_consts, *step_consts, *given.carry, *given.buffers],
        {"cond": test, "body": step, "plan": plan},
        marks.carry,
        [*out_axes, where],
    )


def _which(
    axis: VmapAxis, given: Operands, at: Operands, cond: Any, body: Any, plan: Plan
) -> tuple[Operands, bool]:
    """Which operands have the axis, before the loop or after some steps.

    Also whether the predicate has it. Then every carry does, of which each lane has its last.
    """
    marks = Operands(*([each is not None for each in part] for part in at))

    def reaches(jaxpr: Any, consts: int, numbers: Sequence[Any], differ: bool) -> list[bool]:
        # Not which may have it, but which do, as `jax.vmap` finds: what a collective makes of
        # all lanes is one for all of them again.
        more = [None] * len(numbers), [differ and n > 0 for n in range(len(numbers))]
        values, axes, has = (
            [*part[consts], *each, *part.carry, *part.buffers]
            for part, each in zip((given, at, marks), (numbers, *more), strict=True)
        )
        return axis.reaches(functools.partial(eval_jaxpr, jaxpr, ()), values, axes, has)

    i = np.int32(0)
    number = [i, np.zeros(plan.lanes, np.int32), np.zeros(plan.lanes, bool)]
    while True:
        (differs,) = reaches(cond, 0, [i], False)
        # The lanes are the first axes of a predicate, so that none can be left out before them.
        differs = differs or bool(plan.lanes)
        outs = reaches(body, 1, number, differs)
        carry, buffers = cut(outs, plan.carry, plan.buffers)
        new = marks._replace(
            carry=[a or b or differs for a, b in zip(marks.carry, carry, strict=True)],
            buffers=[a or b for a, b in zip(marks.buffers, buffers, strict=True)],
        )
        if new == marks:
            return marks, differs
        marks = new


def _axes(marks: Sequence[bool]) -> list[int | None]:
    return [0 if mark else None for mark in marks]
