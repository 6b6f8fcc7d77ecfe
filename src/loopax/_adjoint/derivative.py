"""The steps of the derivative of a loop."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .._jax import VmapAxis, jnp, jvp, vjp
from .plan import Plan, pick, put_in
from .rows import masked
from .steps import Number, called, lent


class Active(NamedTuple):
    """Which constants of the body, carries and buffers have a tangent."""

    consts: tuple[bool, ...]
    carry: tuple[bool, ...]
    buffers: tuple[bool, ...]

    def counts(self, transposed: bool) -> tuple[int, ...]:
        """How many operands are linear: tangents, or if transposed cotangents of results."""
        return (0 if transposed else sum(self.consts), sum(self.carry), sum(self.buffers))


class Mapped(NamedTuple):
    """One `jax.vmap` over a derivative, and which of its operands have the axis.

    What is not listed has it: all cotangents, and the tangents of carry and buffers.
    """

    axis: VmapAxis
    body_consts: tuple[bool, ...]
    steps: bool
    carry: tuple[bool, ...]
    buffers: tuple[bool, ...]
    tangents: tuple[bool, ...]


class Point(NamedTuple):
    """Where a derivative is taken.

    - `body_consts`: what the body closes over.
    - `steps`: how many steps there were, in each lane.
    - `spacing`: how many there are from one saved carry to the next, if that is not fixed.
    - `saves`: the saved carries.
    - `buffers`: the buffers after the last step.
    """

    body_consts: list[Any]
    steps: list[Any]
    spacing: list[Any]
    saves: list[Any]
    buffers: list[Any]


class Derivative:
    """The steps of a derivative, with each `jax.vmap` over it applied to them.

    `body` is to be differentiated, and `taken` what a step computes that only is taken.
    """

    def __init__(
        self, body: Any, taken: Any, plan: Plan, active: Active, mapped: tuple[Mapped, ...]
    ):
        self._body = body
        self._taken = taken
        self._plan = plan
        self._active = active
        self.mapped = mapped
        # Without lanes every step counts that is taken.
        self._masked = bool(plan.lanes) or any(each.steps for each in mapped)

    def next_carry(self, point: Point, i: Any, carry: Any) -> list[Any]:
        """The carry after step `i`; of a lane for which that is the last, the one before."""
        step: Any = self._next_carry
        for each in self.mapped:
            c, s, x, b, _ = in_axes(each)
            step = each.axis.vmap(step, (c, None, s, x, b), x)
        return step(point.body_consts, i, point.steps, carry, point.buffers)

    def _next_carry(self, consts: Any, i: Any, steps: Any, carry: Any, buffers: Any) -> Any:
        goes_on = self._counts(i + 1, steps)
        active = self._counts(i, steps)
        consts, number = self._lent(consts, steps), self._number(i, steps)
        new, _ = called(self._taken, self._plan, consts, number, active, carry, buffers)
        if not self._masked:
            return new
        return [masked(goes_on, a, b) for a, b in zip(new, carry, strict=True)]

    def _counts(self, i: Any, steps: Any) -> Any:
        return i < steps[0] if self._masked else np.bool_(True)

    def _number(self, i: Any, steps: Any) -> Number:
        own = jnp.clip(i, 0, jnp.maximum(steps[0] - 1, 0)) if self._masked else i
        return Number(i, own)

    def _lent(self, consts: Any, steps: Any) -> list[Any]:
        return lent(self._plan, steps[0] > 0, consts) if self._plan.lanes else consts

    def tangents(
        self, point: Point, i: Any, active: Any, carry: Any, tangents: Any, again: bool
    ) -> Any:
        """The carry, and the tangents, after step `i`, if that counts.

        - `again`: map them by the transpose of the pullback, which differs from the pushforward
            for a function that has a `jax.custom_vjp`: it has no other.
        """
        step: Any = functools.partial(self._tangents, active, again)
        for each in self.mapped:
            c, s, x, b, t = in_axes(each)
            step = each.axis.vmap(step, (c, None, s, x, b, [t, 0, 0]), (x, 0, 0))
        return step(point.body_consts, i, point.steps, carry, point.buffers, tangents)

    def _tangents(
        self,
        active: Any,
        again: bool,
        consts: Any,
        i: Any,
        steps: Any,
        carry: Any,
        buffers: Any,
        tangents: Any,
    ) -> Any:
        active = active & self._counts(i, steps)
        run, at = self._restricted(consts, i, steps, active, carry, buffers)
        if again:
            linear, pull, new = _pullback(run, at)
            # That of a linear map is the same everywhere.
            _, transpose = vjp(pull, linear)
            ((moved, moved_rows),) = transpose(tuple(tangents))
        else:
            (new, *_), (_, moved, moved_rows) = jvp(run, at, tuple(tangents))
        if self._masked:
            goes_on = self._counts(i + 1, steps)
            new = [masked(goes_on, a, b) for a, b in zip(new, carry, strict=True)]
            moved = [masked(active, a, b) for a, b in zip(moved, tangents[1], strict=True)]
        return new, moved, moved_rows

    def cotangents(self, point: Point, i: Any, carry: Any, cotangents: Any) -> Any:
        """The cotangents before step `i`; those of the constants are added up."""
        step: Any = self._cotangents
        for each in self.mapped:
            c, s, x, b, _ = in_axes(each)
            step = each.axis.vmap(step, (c, None, s, x, b, 0), 0)
        return step(point.body_consts, i, point.steps, carry, point.buffers, cotangents)

    def _cotangents(
        self, consts: Any, i: Any, steps: Any, carry: Any, buffers: Any, cotangents: Any
    ) -> Any:
        pull, _ = self.pullback(consts, i, steps, carry, buffers)
        return self.pulled(pull, i, steps, cotangents)

    def pullback(
        self, consts: Any, i: Any, steps: Any, carry: Any, buffers: Any
    ) -> tuple[Any, list[Any]]:
        """The transposed derivative of step `i`, as JAX has it, and the carry after it."""
        active = self._counts(i, steps)
        run, at = self._restricted(consts, i, steps, active, carry, buffers)

        _, pull, new = _pullback(run, at)
        if self._masked:
            goes_on = self._counts(i + 1, steps)
            new = [masked(goes_on, a, b) for a, b in zip(new, carry, strict=True)]
        return pull, new

    def pulled(self, pull: Any, i: Any, steps: Any, cotangents: Any) -> Any:
        """The cotangents before step `i`, from what `pullback` returned."""
        of_consts, of_carry, of_buffers = cotangents
        active, given = self._counts(i, steps), of_carry
        if self._masked:
            given = [masked(active, each, jnp.zeros_like(each)) for each in of_carry]
        more, new, of_buffers = pull([given, of_buffers])
        if self._masked:
            new = [masked(active, a, b) for a, b in zip(new, of_carry, strict=True)]
            if not self._plan.lanes:
                more = [masked(active, each, jnp.zeros_like(each)) for each in more]
        of_consts = [a + b for a, b in zip(of_consts, more, strict=True)]
        return of_consts, new, of_buffers

    def _restricted(
        self, consts: Any, i: Any, steps: Any, active: Any, carry: Any, buffers: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The step as a function of what has a tangent, and where it is taken.

        It returns the new carry, and what of that and of the buffers has a tangent.
        """
        which = self._active
        consts, number = self._lent(consts, steps), self._number(i, steps)

        def run(some_consts: Any, some_carry: Any, some_buffers: Any) -> Any:
            new, rows = called(
                self._body,
                self._plan,
                put_in(consts, which.consts, some_consts),
                number,
                active,
                put_in(carry, which.carry, some_carry),
                put_in(buffers, which.buffers, some_buffers),
            )
            return new, pick(new, which.carry), pick(rows, which.buffers)

        return run, (
            pick(consts, which.consts),
            pick(carry, which.carry),
            pick(buffers, which.buffers),
        )


def _pullback(run: Callable[..., Any], at: tuple[Any, ...]) -> Any:
    """What has a tangent after a step, its pullback, and the new carry."""

    def split(*some: Any) -> Any:
        new, *linear = run(*some)
        return linear, new

    return vjp(split, *at, has_aux=True)


def in_axes(mapped: Mapped) -> tuple[Any, ...]:
    def axes(marks: Any) -> Any:
        return [0 if mark else None for mark in marks]

    return (
        axes(mapped.body_consts),
        0 if mapped.steps else None,
        axes(mapped.carry),
        axes(mapped.buffers),
        axes(mapped.tangents),
    )
