"""The steps of a loop."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .._jax import Literal, eval_jaxpr, jnp
from .plan import Operands, Plan, cut, operands_of
from .rows import masked


class Number(NamedTuple):
    """The number of a step.

    - `all`: that of all lanes, for what is written.
    - `own`: that of a lane. One that has stopped stays with its last.
    """

    all: Any
    own: Any


class State(NamedTuple):
    """Where a loop stands. Without lanes `last` and `steps` are empty.

    - `i`: the number of steps that were taken, by the lane that took most.
    - `active`: which lanes go on.
    - `carry`: the carry, for a lane that is not active its last but one.
    - `last`: the carry, for all lanes.
    - `steps`: the number of steps of each lane.
    """

    i: Any
    active: Any
    carry: list[Any]
    last: list[Any]
    steps: list[Any]

    @property
    def is_going(self) -> Any:
        return jnp.any(self.active)


class Steps:
    """The steps of the loop with these jaxprs and operands."""

    def __init__(self, cond: Any, body: Any, plan: Plan, flat: Sequence[Any]):
        self._cond = cond
        self._body = body
        self._plan = plan
        self._operands: Operands = operands_of(plan, flat)
        self._consts = self._operands.body_consts

    @property
    def buffers(self) -> list[Any]:
        return self._operands.buffers

    def start(self) -> State:
        carry, lanes = self._operands.carry, self._plan.lanes
        i = jnp.int32(0)
        active = self._goes_on(i, carry, self.buffers)
        if not lanes:
            return State(i, active, carry, [], [])
        # A lane with no step at all has no carry for which the body is known to be defined. It
        # borrows one.
        self._consts = lent(self._plan, active, self._consts)
        steps = jnp.zeros_like(active, jnp.int32)
        start = [borrowed(active, each) for each in carry]
        return State(i, active, start, carry, [steps])

    def step(self, counts: Any, state: State, buffers: Any) -> tuple[State, Any]:
        """A step, which writes to the buffers where it `counts`."""
        i, active, carry, last, steps = state
        own = jnp.where(active, i, jnp.maximum(steps[0] - 1, 0)) if steps else i
        number = Number(i, own)
        new, buffers = called(
            self._body, self._plan, self._consts, number, active & counts, carry, buffers
        )
        if not self._plan.lanes:
            return State(i + 1, self._goes_on(i + 1, new, buffers), new, [], []), buffers
        last = [masked(active, a, b) for a, b in zip(new, last, strict=True)]
        go = active & self._goes_on(i + 1, last, buffers)
        carry = [masked(go, a, b) for a, b in zip(last, carry, strict=True)]
        return State(i + 1, go, carry, last, [steps[0] + active]), buffers

    def _goes_on(self, i: Any, carry: Any, buffers: Any) -> Any:
        consts = self._operands.cond_consts
        (go,) = eval_jaxpr(self._cond, (), *consts, i, *carry, *buffers)
        return go if self._plan.bound is None else go & (i < self._plan.bound)

    def result(self, state: State) -> tuple[list[Any], Any]:
        """The last carry, and how many steps were taken."""
        if self._plan.lanes:
            return state.last, state.steps[0]
        return state.carry, state.i


def borrowed(active: Any, value: Any) -> Any:
    """A value of each lane, where some lane that is not active has that of one that is."""
    which = jnp.argmax(active.reshape(-1))
    one = value.reshape(-1, *value.shape[active.ndim :])[which]
    return masked(active, value, jnp.broadcast_to(one, value.shape))


def lent(plan: Plan, active: Any, consts: Sequence[Any]) -> list[Any]:
    """What the body closes over, for lanes with no step at all that of another lane."""
    return [
        borrowed(active, each) if is_of_lanes else each
        for each, is_of_lanes in zip(consts, plan.of_lanes, strict=True)
    ]


def called(
    body: Any, plan: Plan, consts: Any, number: Number, active: Any, carry: Any, buffers: Any
) -> list[list[Any]]:
    """The carry and the buffers after a step."""
    out = eval_jaxpr(body, (), *consts, *number, active, *carry, *buffers)
    # A constant that the body returns may be a number of Python's here.
    out = [
        jnp.asarray(each, var.aval.dtype) if isinstance(var, Literal) else each
        for each, var in zip(out, body.outvars, strict=True)
    ]
    return cut(out, plan.carry, plan.buffers)
