"""What the transposed derivative of a step needs of it, kept from when the step was taken."""

from typing import Any

import numpy as np

from .. import _tree
from .._jax import eval_jaxpr
from .derivative import Derivative, Point, in_axes
from .jaxprs import reached, rearranged, spared, trace
from .plan import pick, put_in


class Kept:
    """The cotangents of a step in two parts: `residuals` when it is taken, `cotangents` later.

    As `Derivative.cotangents` does both at once, the step itself is computed once less.

    - `types`: of the residuals. Those that are the same for all steps are not among them.
    """

    def __init__(self, derivative: Derivative, point: Point):
        self._derivative = derivative
        self._point = point
        one = _one_lane(derivative, point)
        self._treedef: Any = None
        jaxpr, consts = trace(self._flat, *one)
        leaves = self._treedef.num_leaves
        kept, self._anew = spared(jaxpr, leaves)
        jaxpr = rearranged(jaxpr, jaxpr.invars, [*kept, *jaxpr.outvars[leaves:]])
        count = len(kept)
        fixed = [False] * (len(consts) + len(point.body_consts))
        carry, buffers = [True] * len(point.saves), [False] * len(point.buffers)
        # What depends on the number of the step or on its carry.
        self._varying = reached(jaxpr, [*fixed, True, False, *carry, *buffers])[:count]

        def step(*operands: Any) -> Any:
            return eval_jaxpr(jaxpr, (), *consts, *_tree.leaves(operands))

        self._axes: list[list[int | None]] = []
        for each in derivative.mapped:
            marks = [
                *[False] * len(consts),
                *each.body_consts,
                False,
                each.steps,
                *each.carry,
                *each.buffers,
            ]
            axes = [0 if mark else None for mark in reached(jaxpr, marks)[:count]]
            c, s, x, b, _ = in_axes(each)
            step = each.axis.vmap(step, (c, None, s, x, b), [*axes, *x])
            self._axes.append(axes)
        first = [each[0] for each in point.saves]
        i = np.int32(0)
        self._jaxpr, self._consts = trace(
            step, point.body_consts, i, point.steps, first, point.buffers
        )
        # Of which what varies is never looked at.
        self._every = self._run(i, first)[:count]
        self.types = pick([var.aval for var in self._jaxpr.outvars[:count]], self._varying)

    def _flat(self, consts: Any, i: Any, steps: Any, carry: Any, buffers: Any) -> Any:
        pull, new = self._derivative.pullback(consts, i, steps, carry, buffers)
        leaves, self._treedef = _tree.flatten(pull)
        return [*leaves, *new]

    def _run(self, i: Any, carry: Any) -> list[Any]:
        point = self._point
        operands = (point.body_consts, i, point.steps, carry, point.buffers)
        return eval_jaxpr(self._jaxpr, (), *self._consts, *_tree.leaves(operands))

    def residuals(self, i: Any, carry: Any) -> tuple[list[Any], list[Any]]:
        """What step `i` leaves behind, and the carry after it."""
        out = self._run(i, carry)
        count = len(self._varying)
        return pick(out[:count], self._varying), out[count:]

    def cotangents(self, i: Any, residuals: Any, cotangents: Any) -> Any:
        """The cotangents before step `i`."""

        def step(every: Any, i: Any, steps: Any, cotangents: Any) -> Any:
            pull = self._treedef.unflatten(eval_jaxpr(self._anew, (), *every))
            return self._derivative.pulled(pull, i, steps, cotangents)

        for each, axes in zip(self._derivative.mapped, self._axes, strict=True):
            step = each.axis.vmap(step, (axes, None, 0 if each.steps else None, 0), 0)
        every = put_in(self._every, self._varying, residuals)
        return step(every, i, self._point.steps, cotangents)


def _one_lane(derivative: Derivative, point: Point) -> tuple[Any, ...]:
    """The operands of a step, in the types that they have without any `jax.vmap`."""
    consts, steps = point.body_consts, point.steps
    carry, buffers = [each[0] for each in point.saves], point.buffers
    for each in reversed(derivative.mapped):
        consts = [v[0] if m else v for v, m in zip(consts, each.body_consts, strict=True)]
        steps = [v[0] if each.steps else v for v in steps]
        carry = [v[0] if m else v for v, m in zip(carry, each.carry, strict=True)]
        buffers = [v[0] if m else v for v, m in zip(buffers, each.buffers, strict=True)]
    return consts, np.int32(0), steps, carry, buffers
