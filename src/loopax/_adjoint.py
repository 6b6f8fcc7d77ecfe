"""Loops that can be differentiated in reverse mode: forwards, tangents and cotangents.

A loop is a primitive here, `loop`. Its derivative is made of two others:

- `saving` is the same loop. It also returns the carries at some of its steps.
- `linear` is the derivative of a loop, a linear map from tangents to tangents, at the carries
    that were saved. Transposed it maps cotangents to cotangents: it goes through the steps
    backwards, and computes the carries between two that were saved anew.

What `linear` computes is written in terms of loops. Where that is differentiated in turn, they
are primitives of the same kind, which is how there is a second derivative of any kind; where
it is compiled, they are `jax.lax.while_loop`s.

Under `jax.vmap` the lanes of a loop go in lockstep. They share a counter, which runs until no
lane is active. A lane that has stopped is given its last carry but one again, for which the
body is known to be defined, and nothing comes of it: its cotangent is zero there. Neither
the saved carries nor the buffers are selected from.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _tree
from ._jax import (
    Literal,
    UndefinedPrimal,
    VmapAxis,
    Zero,
    eval_jaxpr,
    instantiate_zeros,
    lax,
    primitive,
)
from ._jaxprs import is_differentiable, reached, rearranged, rewritten, trace
from ._rows import filled, masked, read, write


class Plan(NamedTuple):
    """All that there is to know of a loop but what it computes.

    - `cond_consts`, `body_consts`, `carry`, `buffers`: how many operands of each there are.
    - `lanes`: the axes of the predicate, and the first axes of each carry: those of `jax.vmap`.
    - `bound`: the greatest number of steps, or `None` if there is none.
    - `slots`: how many carries to save, at each level.
    """

    cond_consts: int
    body_consts: int
    carry: int
    buffers: int
    lanes: tuple[int, ...]
    bound: int | None
    slots: int

    @property
    def spacing(self) -> int | None:
        """How many steps there are from one saved carry to the next, if that is fixed."""
        return None if self.bound is None else max(-(-self.bound // self.slots), 1)


class Operands(NamedTuple):
    """The operands of a loop.

    - `cond_consts`, `body_consts`: what the predicate and the body close over.
    - `carry`: the first carry.
    - `buffers`: arrays of which rows are read and written.
    """

    cond_consts: list[Any]
    body_consts: list[Any]
    carry: list[Any]
    buffers: list[Any]


def _operands(plan: Plan, flat: Sequence[Any]) -> Operands:
    return Operands(*cut(flat, *plan[:4]))


def cut(flat: Sequence[Any], *counts: int) -> list[list[Any]]:
    rest = iter(flat)
    parts = [[next(rest) for _ in range(count)] for count in counts]
    assert not list(rest)
    return parts


def _pick(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [value for value, is_in in zip(values, which, strict=True) if is_in]


def _put_in(values: Sequence[Any], which: Sequence[bool], new: Sequence[Any]) -> list[Any]:
    """`values` with others in those places."""
    rest = iter(new)
    return [next(rest) if is_in else v for v, is_in in zip(values, which, strict=True)]


# -- making a loop -----------------------------------------------------------------------


def loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    carry: Sequence[Any],
    buffers: Sequence[Any],
    bound: int | None,
    slots: int,
) -> tuple[list[Any], list[Any]]:
    """A while loop that can be differentiated.

    - `cond`: `(i, carry, buffers) -> bool`.
    - `body`: `(i, active, carry, buffers) -> (carry, buffers)`. `active` is whether the step
        counts; a write to a buffer must depend on it.
    - `carry`, `buffers`: lists of arrays. Of the buffers rows are read and written, with
        `read` and `write`; rows that are read have been written before.
    - `bound`: the greatest number of steps, after which the loop ends.
    - `slots`: how many carries the forward pass saves, if the loop is differentiated.

    Returns the last carry and the buffers.
    """
    buffers = list(buffers)
    zero, true = np.int32(0), np.bool_(True)

    def flat_body(i: Any, active: Any, carry: Any, buffers: Any) -> Any:
        return [each for part in body(i, active, carry, buffers) for each in part]

    test, test_consts = trace(lambda *args: [cond(*args)], zero, carry, buffers)
    step, step_consts, promoted = settled(
        lambda carry: trace(flat_body, zero, true, carry, buffers), carry
    )
    if promoted is not carry:
        carry = promoted
        test, test_consts = trace(lambda *args: [cond(*args)], zero, carry, buffers)
    # What the body hands on as it is need not be saved.
    given = step.invars[len(step_consts) + 2 :][: len(carry)]
    fixed = [a is b for a, b in zip(given, step.outvars, strict=False)]
    moving = [not is_fixed for is_fixed in fixed]
    held = _pick(carry, fixed)
    test = _hoisted(test, len(test_consts), 1, fixed)
    step = _hoisted(step, len(step_consts), 2, fixed)
    step = rearranged(
        step,
        step.invars,
        [*_pick(step.outvars[: len(carry)], moving), *step.outvars[len(carry) :]],
    )
    plan = Plan(
        cond_consts=len(test_consts) + len(held),
        body_consts=len(step_consts) + len(held),
        carry=sum(moving),
        buffers=len(buffers),
        lanes=(),
        bound=bound,
        slots=slots,
    )
    out = _loop.bind(
        *test_consts,
        *held,
        *step_consts,
        *held,
        *_pick(carry, moving),
        *buffers,
        cond=test,
        body=step,
        plan=plan,
    )
    new, buffers, _ = cut(out, plan.carry, plan.buffers, 1)
    return _put_in(carry, moving, new), buffers


def settled(
    traced: Callable[[Any], tuple[Any, list[Any]]], carry: Sequence[Any]
) -> tuple[Any, list[Any], Sequence[Any]]:
    """The jaxpr of a body, what it closes over, and the carry in the type that it keeps.

    A weakly typed carry, such as a Python number, becomes what the body makes of it. The
    carries are the first results of the jaxpr.
    """
    jaxpr, consts = traced(carry)
    avals = [jax.typeof(each) for each in carry]
    new = [var.aval for var in jaxpr.outvars[: len(carry)]]
    weak = [
        getattr(a, "weak_type", False) and (not b.weak_type or a.dtype != b.dtype)
        for a, b in zip(avals, new, strict=True)
    ]
    if not any(weak):
        return jaxpr, consts, carry
    carry = [
        lax.convert_element_type(each, aval.dtype) if is_weak else each
        for each, aval, is_weak in zip(carry, new, weak, strict=True)
    ]
    return *traced(carry), carry


def _hoisted(jaxpr: Any, consts: int, others: int, fixed: Sequence[bool]) -> Any:
    """The jaxpr with carries moved behind the constants."""
    total = len(jaxpr.invars)
    parts = cut(
        jaxpr.invars, consts, others, len(fixed), total - consts - others - len(fixed)
    )
    first, between, carry, rest = parts
    moving = [not is_fixed for is_fixed in fixed]
    order = [*first, *_pick(carry, fixed), *between, *_pick(carry, moving), *rest]
    return rearranged(jaxpr, order, jaxpr.outvars)


# -- the steps of a loop -----------------------------------------------------------------


def _holds(cond: Any, ops: Operands, i: Any, carry: Any, buffers: Any) -> Any:
    (pred,) = eval_jaxpr(cond, (), *ops.cond_consts, i, *carry, *buffers)
    return pred


def _called(
    body: Any, plan: Plan, consts: Any, i: Any, active: Any, carry: Any, buffers: Any
) -> list[list[Any]]:
    out = eval_jaxpr(body, (), *consts, i, active, *carry, *buffers)
    # A constant that the body returns may come out as a number of Python's.
    out = [
        jnp.asarray(each, var.aval.dtype) if isinstance(var, Literal) else each
        for each, var in zip(out, body.outvars, strict=True)
    ]
    return cut(out, plan.carry, plan.buffers)


class _State(NamedTuple):
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


def _start(cond: Any, plan: Plan, ops: Operands) -> _State:
    i = jnp.int32(0)
    active = _holds(cond, ops, i, ops.carry, ops.buffers)
    if plan.bound == 0:
        active = jnp.zeros_like(active)
    if not plan.lanes:
        return _State(i, active, ops.carry, [], [])
    # A lane with no step at all has no carry for which the body is known to be defined. It
    # borrows one.
    which = jnp.argmax(active.reshape(-1))

    def borrowed(each: Any) -> Any:
        flat = each.reshape(-1, *each.shape[len(plan.lanes) :])
        return masked(active, each, jnp.broadcast_to(flat[which], each.shape))

    carry = [borrowed(each) for each in ops.carry]
    return _State(i, active, carry, ops.carry, [jnp.zeros(plan.lanes, jnp.int32)])


def _going(state: _State) -> Any:
    return jnp.any(state.active)


def _stepped(
    cond: Any, body: Any, plan: Plan, ops: Operands, state: _State, buffers: Any
) -> tuple[_State, Any]:
    i, active, carry, last, steps = state
    new, buffers = _called(body, plan, ops.body_consts, i, active, carry, buffers)
    if plan.lanes:
        last = [masked(active, a, b) for a, b in zip(new, last, strict=True)]
        steps = [steps[0] + active]
        new = last
    go = _holds(cond, ops, i + 1, new, buffers)
    if plan.bound is not None:
        go = go & (i + 1 < plan.bound)
    if plan.lanes:
        go = go & active
        new = [masked(go, a, b) for a, b in zip(new, carry, strict=True)]
    return _State(i + 1, go, new, last, steps), buffers


def _result(plan: Plan, state: _State) -> tuple[list[Any], Any]:
    if plan.lanes:
        return state.last, state.steps[0]
    return state.carry, state.i


# How to run the loops that a rule is made of: `(cond, body, carry, buffers, bound)`, with
# functions of trees. `body` is told whether the step counts.
_Runs = Callable[..., tuple[Any, Any]]


def _compiled(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    carry: Any,
    buffers: list[Any],
    bound: int | None,
) -> tuple[Any, Any]:
    """Runs a loop that is not differentiated."""
    return lax.while_loop(
        lambda state: cond(*state), lambda state: body(True, *state), (carry, buffers)
    )


def _differentiable(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    carry: Any,
    buffers: list[Any],
    bound: int | None,
) -> tuple[Any, Any]:
    """Runs a loop that is."""
    leaves, treedef = _tree.flatten(carry)

    def flat_body(_: Any, active: Any, leaves: Any, buffers: Any) -> Any:
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




# How many carries a loop without a bound saves, if nothing is said.
_SLOTS = 32


def default_slots(bound: int | None) -> int:
    """About the square root of the number of steps."""
    return _SLOTS if bound is None else max(int(np.ceil(np.sqrt(bound))), 1)


# -- loop --------------------------------------------------------------------------------


def _run_loop(*flat: Any, cond: Any, body: Any, plan: Plan) -> Any:
    ops = _operands(plan, flat)
    state, buffers = lax.while_loop(
        lambda s: _going(s[0]),
        lambda s: _stepped(cond, body, plan, ops, *s),
        (_start(cond, plan, ops), ops.buffers),
    )
    carry, steps = _result(plan, state)
    return [*carry, *buffers, steps]


def _types(*avals: Any, cond: Any, body: Any, plan: Plan) -> Any:
    ops = _operands(plan, avals)
    steps = jax.core.ShapedArray(plan.lanes, np.dtype(np.int32))
    return [*ops.carry, *ops.buffers, steps], cond.effects | body.effects


def _loop_jvp(primals: Any, tangents: Any, *, cond: Any, body: Any, plan: Plan) -> Any:
    ops, into = _operands(plan, primals), _operands(plan, tangents)
    consts = [not isinstance(each, Zero) for each in into.body_consts]
    carry = [not isinstance(each, Zero) for each in into.carry]
    buffers = [not isinstance(each, Zero) for each in into.buffers]
    while True:
        outs = reached(
            body, [*consts, False, False, *carry, *buffers], is_differentiable
        )
        new_carry, new_buffers = cut(outs, plan.carry, plan.buffers)
        before = carry, buffers
        carry = [a or b for a, b in zip(carry, new_carry, strict=True)]
        buffers = [a or b for a, b in zip(buffers, new_buffers, strict=True)]
        if before == (carry, buffers):
            break
    if not any((*carry, *buffers)):
        out = _loop.bind(*primals, cond=cond, body=body, plan=plan)
        return out, [Zero(jax.typeof(each).to_tangent_aval()) for each in out]
    active = Active(tuple(consts), tuple(carry), tuple(buffers))
    out = _saving.bind(*primals, cond=cond, body=body, plan=plan)
    new, full, (steps,), spacing, saves = _cut_saved(plan, out)
    moved = _linear.bind(
        *ops.body_consts,
        steps,
        *spacing,
        *saves,
        *full,
        *_pick(into.body_consts, consts),
        *[instantiate_zeros(each) for each in _pick(into.carry, carry)],
        *[instantiate_zeros(each) for each in _pick(into.buffers, buffers)],
        body=_filled(body, plan),
        plan=plan,
        active=active,
        transposed=False,
        mapped=(),
    )
    out = [*new, *full, steps]
    none = [Zero(jax.typeof(each).to_tangent_aval()) for each in out]
    return out, _put_in(none, [*carry, *buffers, False], moved)


def _filled(body: Any, plan: Plan) -> Any:
    """The body, to be run when all rows of the buffers have been written."""
    marks = [place >= len(body.invars) - plan.buffers for place in range(len(body.invars))]
    return rewritten(body, marks, _fill)[0]


def _fill(eqn: Any, marks: Sequence[bool]) -> tuple[Any, Sequence[bool]] | None:
    if eqn.primitive is not _loop and eqn.primitive is not _saving:
        return filled(eqn, marks)
    plan, body = eqn.params["plan"], eqn.params["body"]
    *_, carry, buffers = cut(marks, *plan[:4])
    if any(carry):
        return None
    inner = [False] * (len(body.invars) - plan.buffers)
    body, _ = rewritten(body, [*inner, *buffers], _fill)
    outs = [False] * len(eqn.outvars)
    outs[plan.carry : plan.carry + plan.buffers] = buffers
    return eqn.replace(params={**eqn.params, "body": body}), outs


def _batch(
    primitive: Callable[[], Any],
    axis: VmapAxis,
    flat: Any,
    axes: Any,
    *,
    cond: Any,
    body: Any,
    plan: Plan,
) -> Any:
    ops, at = _operands(plan, flat), _operands(plan, axes)
    in_lanes, marks, cond, body, plan, flat = _mapped(axis, ops, at, cond, body, plan)
    out = primitive().bind(*flat, cond=cond, body=body, plan=plan)
    carry, buffers, steps, spacing, saves = (
        _cut_saved(plan, out)
        if primitive is _saving_itself
        else (*cut(out, plan.carry, plan.buffers, 1), [], [])
    )
    axes = [
        *[0 if mark else None for mark in marks.carry],
        *[0 if mark else None for mark in marks.buffers],
        *[0 if in_lanes else None for _ in steps],
        *[None for _ in spacing],
        *[1 if mark else None for mark in marks.carry if saves],
    ]
    return [*carry, *buffers, *steps, *spacing, *saves], axes


def _mapped(
    axis: VmapAxis, ops: Operands, at: Operands, cond: Any, body: Any, plan: Plan
) -> tuple[bool, Operands, Any, Any, Plan, list[Any]]:
    """A loop under `jax.vmap`: a loop over what all lanes have."""
    marks = Operands(*([each is not None for each in part] for part in at))
    while True:
        (differs,) = reached(
            cond, [*marks.cond_consts, False, *marks.carry, *marks.buffers]
        )
        # Only the first axes of a carry can be lanes.
        differs = differs or bool(plan.lanes)
        outs = reached(
            body, [*marks.body_consts, False, differs, *marks.carry, *marks.buffers]
        )
        carry, buffers = cut(outs, plan.carry, plan.buffers)
        new = marks._replace(
            carry=[a or b or differs for a, b in zip(marks.carry, carry, strict=True)],
            buffers=[a or b for a, b in zip(marks.buffers, buffers, strict=True)],
        )
        if new == marks:
            break
        marks = new
    ops = Operands(
        *(
            [
                _to_front(axis, value, place) if mark else value
                for value, place, mark in zip(values, places, part, strict=True)
            ]
            for values, places, part in zip(ops, at, marks, strict=True)
        )
    )
    zero = np.int32(0)
    first = np.zeros((axis.size, *plan.lanes) if differs else (), bool)
    in_axes = Operands(*([0 if mark else None for mark in part] for part in marks))
    carry_axes, buffer_axes = in_axes.carry, in_axes.buffers

    def mapped_cond(consts: Any, i: Any, carry: Any, buffers: Any) -> Any:
        return axis.vmap(
            lambda c, i, x, b: eval_jaxpr(cond, (), *c, i, *x, *b),
            in_axes=(in_axes.cond_consts, None, carry_axes, buffer_axes),
            out_axes=0 if differs else None,
        )(consts, i, carry, buffers)

    def mapped_body(consts: Any, i: Any, active: Any, carry: Any, buffers: Any) -> Any:
        return axis.vmap(
            lambda c, i, a, x, b: eval_jaxpr(body, (), *c, i, a, *x, *b),
            in_axes=(
                in_axes.body_consts,
                None,
                0 if differs else None,
                carry_axes,
                buffer_axes,
            ),
            out_axes=[*carry_axes, *buffer_axes],
        )(consts, i, active, carry, buffers)

    test, more_test = trace(mapped_cond, ops.cond_consts, zero, ops.carry, ops.buffers)
    step, more_step = trace(
        mapped_body, ops.body_consts, zero, first, ops.carry, ops.buffers
    )
    plan = plan._replace(
        cond_consts=plan.cond_consts + len(more_test),
        body_consts=plan.body_consts + len(more_step),
        lanes=first.shape,
    )
    ops = ops._replace(
        cond_consts=[*more_test, *ops.cond_consts],
        body_consts=[*more_step, *ops.body_consts],
    )
    return differs, marks, test, step, plan, [each for part in ops for each in part]


def _to_front(axis: VmapAxis, value: Any, place: int | None) -> Any:
    if place is None:
        return jnp.broadcast_to(value, (axis.size, *jnp.shape(value)))
    return jnp.moveaxis(value, place, 0)


# -- saving ------------------------------------------------------------------------------


def _run_saving(
    *flat: Any, cond: Any, body: Any, plan: Plan, runs: _Runs = _compiled
) -> Any:
    ops = _operands(plan, flat)
    state = _start(cond, plan, ops)
    saves = [_room(each, plan.slots) for each in state.carry]
    if plan.spacing is None:
        return _save_online(cond, body, plan, ops, state, saves, runs)
    spacing = plan.spacing
    split = plan.buffers

    def save(active: Any, state: _State, both: Any) -> Any:
        buffers, saves = both[:split], both[split:]
        state = state._replace(active=state.active & active)
        k = state.i // spacing
        saves = [write(s, k, x, active) for s, x in zip(saves, state.carry, strict=True)]
        if spacing == 1:
            state, buffers = _stepped(cond, body, plan, ops, state, buffers)
        else:
            (_, state), buffers = runs(
                lambda carry, _: (carry[0] < spacing) & _going(carry[1]),
                lambda _, carry, buffers: _count(
                    carry[0], *_stepped(cond, body, plan, ops, carry[1], buffers)
                ),
                (jnp.int32(0), state),
                buffers,
                spacing,
            )
        return state, [*buffers, *saves]

    state, both = runs(
        lambda state, _: _going(state), save, state, [*ops.buffers, *saves], plan.slots
    )
    carry, steps = _result(plan, state)
    return [*carry, *both[:split], steps, *both[split:]]


def _count(t: Any, state: _State, buffers: Any) -> Any:
    return (t + 1, state), buffers


def _room(value: Any, count: int) -> Any:
    """Room for so many values like it. Not zeros, so that it is of the same type to JAX."""
    return jnp.broadcast_to(value, (count, *value.shape))


def _save_online(
    cond: Any,
    body: Any,
    plan: Plan,
    ops: Operands,
    state: _State,
    saves: list[Any],
    runs: _Runs,
) -> Any:
    """Saves the carries of a loop without a bound.

    Whenever all slots are taken, every other one is freed, and from then on the distance
    between two that are saved is twice as long.
    """
    slots = plan.slots

    def thin(saves: Any) -> Any:
        return [jnp.concatenate([each[::2], each[1::2]]) for each in saves]

    def save(_: Any, carry: Any, buffers: Any) -> Any:
        state, saves, taken, spacing = carry
        full = taken == slots
        saves = lax.cond(full, thin, lambda saves: saves, saves)
        taken = jnp.where(full, slots // 2, taken)
        spacing = jnp.where(full, 2 * spacing, spacing)
        saves = [
            lax.dynamic_update_index_in_dim(s, x, taken, 0)
            for s, x in zip(saves, state.carry, strict=True)
        ]
        (_, state), buffers = runs(
            lambda carry, _: (carry[0] < spacing) & _going(carry[1]),
            lambda _, carry, buffers: _count(
                carry[0], *_stepped(cond, body, plan, ops, carry[1], buffers)
            ),
            (jnp.int32(0), state),
            buffers,
            None,
        )
        return (state, saves, taken + 1, spacing), buffers

    (state, saves, _, spacing), buffers = runs(
        lambda carry, _: _going(carry[0]),
        save,
        (state, saves, jnp.int32(0), jnp.int32(1)),
        ops.buffers,
        None,
    )
    carry, steps = _result(plan, state)
    return [*carry, *buffers, steps, spacing, *saves]


def _cut_saved(plan: Plan, out: Any) -> list[list[Any]]:
    """The carry, the buffers, the number of steps, the distance if it is not fixed, and the
    saved carries."""
    online = plan.spacing is None
    return cut(out, plan.carry, plan.buffers, 1, int(online), plan.carry)


def _saving_types(*avals: Any, cond: Any, body: Any, plan: Plan) -> Any:
    out, effects = _types(*avals, cond=cond, body=body, plan=plan)
    number = jax.core.ShapedArray((), np.dtype(np.int32))
    carry = _operands(plan, avals).carry
    saves = [_saved_type(each, plan.slots) for each in carry]
    return [*out, *([number] if plan.spacing is None else []), *saves], effects


@functools.lru_cache
def _saved_type(aval: Any, count: int) -> Any:
    (out,) = trace(lambda value: [_room(value, count)], aval)[0].outvars
    return out.aval


def _saving_jvp(primals: Any, tangents: Any, *, cond: Any, body: Any, plan: Plan) -> Any:
    run = functools.partial(
        _run_saving, cond=cond, body=body, plan=plan, runs=_differentiable
    )
    return _jvp_of(run, primals, tangents)


def _jvp_of(run: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """The rule of differentiation that follows from how something is computed."""
    moving = [not isinstance(each, Zero) for each in tangents]
    out, moved = jax.jvp(
        lambda *some: run(*_put_in(primals, moving, some)),
        _pick(primals, moving),
        _pick(tangents, moving),
    )
    return out, [
        each if is_differentiable(jax.typeof(of)) else Zero(jax.typeof(of).to_tangent_aval())
        for of, each in zip(out, moved, strict=True)
    ]


# -- linear ------------------------------------------------------------------------------


class Active(NamedTuple):
    """Which constants of the body, carries and buffers have a tangent."""

    consts: tuple[bool, ...]
    carry: tuple[bool, ...]
    buffers: tuple[bool, ...]

    def counts(self, transposed: bool) -> tuple[int, ...]:
        """How many linear operands there are of each."""
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


class _Point(NamedTuple):
    """Where a derivative is taken."""

    body_consts: list[Any]
    steps: list[Any]
    spacing: list[Any]
    saves: list[Any]
    buffers: list[Any]


def _cut_linear(
    plan: Plan, active: Active, transposed: bool, flat: Sequence[Any]
) -> tuple[_Point, list[list[Any]]]:
    counts = (plan.body_consts, 1, int(plan.spacing is None), plan.carry, plan.buffers)
    parts = cut(flat, *counts, *active.counts(transposed))
    return _Point(*parts[:5]), parts[5:]


class _Steps:
    """The steps of a derivative, with each `jax.vmap` over it applied to them."""

    def __init__(self, body: Any, plan: Plan, active: Active, mapped: tuple[Mapped, ...]):
        self._body = body
        self._plan = plan
        self._active = active
        self._mapped = mapped
        # Without lanes every step counts that is taken.
        self._masked = bool(plan.lanes) or any(each.steps for each in mapped)

    def next_carry(self, point: _Point, i: Any, carry: Any) -> list[Any]:
        """The carry after step `i`; of a lane for which that is the last, the one before."""
        step: Any = self._next_carry
        for each in self._mapped:
            c, s, x, b, _ = _in_axes(each)
            step = each.axis.vmap(step, (c, None, s, x, b), x)
        return step(point.body_consts, i, point.steps, carry, point.buffers)

    def _next_carry(self, consts: Any, i: Any, steps: Any, carry: Any, buffers: Any) -> Any:
        goes_on = self._counts(i + 1, steps)
        active = self._counts(i, steps)
        new, _ = _called(self._body, self._plan, consts, i, active, carry, buffers)
        if not self._masked:
            return new
        return [masked(goes_on, a, b) for a, b in zip(new, carry, strict=True)]

    def _counts(self, i: Any, steps: Any) -> Any:
        return i < steps[0] if self._masked else np.bool_(True)

    def tangents(self, point: _Point, i: Any, carry: Any, tangents: Any) -> Any:
        """The carry, and the tangents, after step `i`."""
        step: Any = self._tangents
        for each in self._mapped:
            c, s, x, b, t = _in_axes(each)
            step = each.axis.vmap(step, (c, None, s, x, b, [t, 0, 0]), (x, 0, 0))
        return step(point.body_consts, i, point.steps, carry, point.buffers, tangents)

    def _tangents(
        self, consts: Any, i: Any, steps: Any, carry: Any, buffers: Any, tangents: Any
    ) -> Any:
        active = self._counts(i, steps)
        run, at = self._restricted(consts, i, active, carry, buffers)
        (new, some, rows), (_, moved, moved_rows) = jax.jvp(
            run, at, tuple(tangents)
        )
        if self._masked:
            goes_on = self._counts(i + 1, steps)
            new = [masked(goes_on, a, b) for a, b in zip(new, carry, strict=True)]
            moved = [masked(active, a, b) for a, b in zip(moved, tangents[1], strict=True)]
        return new, moved, moved_rows

    def cotangents(self, point: _Point, i: Any, carry: Any, cotangents: Any) -> Any:
        """The cotangents before step `i`; those of the constants are added up."""
        step: Any = self._cotangents
        for each in self._mapped:
            c, s, x, b, _ = _in_axes(each)
            step = each.axis.vmap(step, (c, None, s, x, b, 0), 0)
        return step(point.body_consts, i, point.steps, carry, point.buffers, cotangents)

    def _cotangents(
        self, consts: Any, i: Any, steps: Any, carry: Any, buffers: Any, cotangents: Any
    ) -> Any:
        of_consts, of_carry, of_buffers = cotangents
        active = self._counts(i, steps)
        run, at = self._restricted(consts, i, active, carry, buffers)
        _, pull = jax.vjp(lambda *some: run(*some)[1:], *at)
        given = of_carry
        if self._masked:
            given = [masked(active, each, jnp.zeros_like(each)) for each in of_carry]
        more, new, of_buffers = pull((given, of_buffers))
        if self._masked:
            new = [masked(active, a, b) for a, b in zip(new, of_carry, strict=True)]
        of_consts = [a + b for a, b in zip(of_consts, more, strict=True)]
        return of_consts, new, of_buffers

    def _restricted(
        self, consts: Any, i: Any, active: Any, carry: Any, buffers: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The step as a function of what has a tangent, and where it is taken.

        It returns the new carry, and what of that and of the buffers has a tangent.
        """
        which = self._active

        def run(some_consts: Any, some_carry: Any, some_buffers: Any) -> Any:
            new, rows = _called(
                self._body,
                self._plan,
                _put_in(consts, which.consts, some_consts),
                i,
                active,
                _put_in(carry, which.carry, some_carry),
                _put_in(buffers, which.buffers, some_buffers),
            )
            return new, _pick(new, which.carry), _pick(rows, which.buffers)

        return run, (
            _pick(consts, which.consts),
            _pick(carry, which.carry),
            _pick(buffers, which.buffers),
        )


def _in_axes(mapped: Mapped) -> tuple[Any, ...]:
    def axes(marks: Any) -> Any:
        return [0 if mark else None for mark in marks]

    return (
        axes(mapped.body_consts),
        0 if mapped.steps else None,
        axes(mapped.carry),
        axes(mapped.buffers),
        axes(mapped.tangents),
    )


def _run_linear(
    *flat: Any,
    body: Any,
    plan: Plan,
    active: Active,
    transposed: bool,
    mapped: tuple[Mapped, ...],
    runs: _Runs = _compiled,
) -> Any:
    point, given = _cut_linear(plan, active, transposed, flat)
    steps = _Steps(body, plan, active, mapped)
    total = jnp.max(point.steps[0])
    if transposed:
        of_carry, of_buffers = given[1:]
        sizes = tuple(each.axis.size for each in reversed(mapped))
        of_consts = [
            jnp.zeros_like(jnp.broadcast_to(each, (*sizes, *each.shape[skip:])))
            for each, skip in _with_skips(point.body_consts, active.consts, mapped)
        ]
        out = _backwards(
            steps, plan, point, total, (of_consts, of_carry, of_buffers), runs
        )
        return [each for part in out for each in part]
    of_consts, of_carry, of_buffers = given

    def step(_: Any, state: Any, of_buffers: Any) -> Any:
        i, carry, of_carry = state
        carry, of_carry, of_buffers = steps.tangents(
            point, i, carry, [of_consts, of_carry, of_buffers]
        )
        return (i + 1, carry, of_carry), of_buffers

    (_, _, of_carry), of_buffers = runs(
        lambda state, _: state[0] < total,
        step,
        (jnp.int32(0), [each[0] for each in point.saves], of_carry),
        of_buffers,
        plan.bound,
    )
    return [*of_carry, *of_buffers]


def _with_skips(
    consts: Sequence[Any], which: Sequence[bool], mapped: tuple[Mapped, ...]
) -> list[tuple[Any, int]]:
    """The constants that have a tangent, with how many axes of `mapped` they have."""
    return [
        (each, sum(one.body_consts[place] for one in mapped))
        for place, (each, is_in) in enumerate(zip(consts, which, strict=True))
        if is_in
    ]


# Levels at which carries are saved, at most. With the square root of the number of steps two
# are enough; with fewer carries there are more, and beyond that steps are taken repeatedly.
_LEVELS = 4


def _backwards(
    steps: _Steps, plan: Plan, point: _Point, total: Any, cotangents: Any, runs: _Runs
) -> Any:
    """Takes the cotangents through all steps, from the last to the first."""
    slots = plan.slots
    spacing = point.spacing[0] if plan.spacing is None else plan.spacing

    def descend(
        level: int, saves: Any, first: Any, count: Any, spacing: Any, bound: Any, state: Any
    ) -> Any:
        """Through `count` steps from `first` on, with carries saved every `spacing`."""
        segments = -(-count // spacing)

        def segment(_: Any, carry: Any, buffers: Any) -> Any:
            k, state = carry
            k = k - 1
            start = first + k * spacing
            here = [read(each, k)[0] for each in saves]
            steps_here = jnp.minimum(spacing, count - k * spacing)
            if _is_one(spacing):
                state = steps.cotangents(point, start, here, state)
            elif level == _LEVELS or slots == 1:
                state = repeat(here, start, steps_here, spacing, state)
            else:
                inner = _spacing_within(spacing, slots)
                below = replay(here, start, steps_here, inner)
                within = spacing if isinstance(spacing, int) else None
                state = descend(level + 1, below, start, steps_here, inner, within, state)
            return (k, state), buffers

        bound = slots if bound is None else min(slots, -(-bound // spacing))
        (_, state), _ = runs(
            lambda carry, _: carry[0] > 0, segment, (segments, state), [], bound
        )
        return state

    def replay(here: Any, start: Any, count: Any, spacing: Any) -> Any:
        """The carries every `spacing` steps, from one that was saved."""

        def save(active: Any, carry: Any, saves: Any) -> Any:
            t, here = carry
            row = t // spacing
            saves = [write(s, row, x, active) for s, x in zip(saves, here, strict=True)]
            stop = jnp.minimum(t + spacing, count)
            return advance(here, start, t, stop, spacing), saves

        _, saves = runs(
            lambda carry, _: carry[0] < count,
            save,
            (jnp.int32(0), here),
            [_room(each, slots) for each in here],
            slots,
        )
        return saves

    def advance(here: Any, start: Any, t: Any, stop: Any, most: Any) -> Any:
        """The carry `stop` steps after `start`, from that `t` steps after."""

        def step(_: Any, carry: Any, buffers: Any) -> Any:
            t, here = carry
            return (t + 1, steps.next_carry(point, start + t, here)), buffers

        if _is_one(most):
            return step(True, (t, here), [])[0]
        bound = most if isinstance(most, int) else None
        carry, _ = runs(lambda carry, _: carry[0] < stop, step, (t, here), [], bound)
        return carry

    def repeat(here: Any, start: Any, count: Any, most: Any, state: Any) -> Any:
        """Through some steps, each time from the one carry that is there."""

        def step(_: Any, carry: Any, buffers: Any) -> Any:
            t, state = carry
            _, there = advance(here, start, jnp.int32(0), t - 1, most)
            return (t - 1, steps.cotangents(point, start + t - 1, there, state)), buffers

        bound = most if isinstance(most, int) else None
        (_, state), _ = runs(lambda carry, _: carry[0] > 0, step, (count, state), [], bound)
        return state

    return descend(1, point.saves, jnp.int32(0), total, spacing, plan.bound, cotangents)


def _is_one(spacing: Any) -> bool:
    return isinstance(spacing, int) and spacing == 1


def _spacing_within(spacing: Any, slots: int) -> Any:
    return -(-spacing // slots)


def _linear_types(
    *avals: Any,
    body: Any,
    plan: Plan,
    active: Active,
    transposed: bool,
    mapped: tuple[Mapped, ...],
) -> Any:
    point, given = _cut_linear(plan, active, transposed, avals)
    out = [each for part in given[1:] for each in part]
    if transposed:
        sizes = tuple(each.axis.size for each in reversed(mapped))
        consts = [
            each.to_tangent_aval().update(shape=(*sizes, *each.shape[skip:]))
            for each, skip in _with_skips(point.body_consts, active.consts, mapped)
        ]
        out = [*consts, *out]
    return out, body.effects


def _linear_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    plan, active, transposed = params["plan"], params["active"], params["transposed"]
    linear = sum(active.counts(transposed))
    point = len(primals) - linear
    out = moved = None
    if any(not isinstance(each, Zero) for each in tangents[point:]):
        out = _linear.bind(*primals, **params)
        given = [instantiate_zeros(each) for each in tangents[point:]]
        moved = _linear.bind(*primals[:point], *given, **params)
    if any(not isinstance(each, Zero) for each in tangents[:point]):
        none = [Zero(each.aval) if isinstance(each, Zero) else Zero(jax.typeof(each)) for each in tangents[point:]]
        run = functools.partial(_run_linear, **params, runs=_differentiable)
        out, more = _jvp_of(run, primals, [*tangents[:point], *none])
        moved = more if moved is None else [
            a if isinstance(b, Zero) else a + b for a, b in zip(moved, more, strict=True)
        ]
    return out, moved


def _linear_transpose(cotangents: Any, *flat: Any, **params: Any) -> Any:
    plan, active, transposed = params["plan"], params["active"], params["transposed"]
    linear = sum(active.counts(transposed))
    point = flat[: len(flat) - linear]
    given = flat[len(flat) - linear :]
    into = [instantiate_zeros(each) for each in cotangents]
    mapped = params["mapped"]
    own = tuple(each._replace(tangents=(True,) * len(each.tangents)) for each in mapped)
    params = {**params, "transposed": not transposed, "mapped": own}
    out = _linear.bind(*point, *into, **params)
    if not transposed:
        # A tangent that was one for all lanes gets the sum of their cotangents.
        for place in range(sum(active.consts)):
            shared = [n for n, each in enumerate(reversed(mapped)) if not each.tangents[place]]
            out[place] = jnp.sum(out[place], shared) if shared else out[place]
    return [None] * len(point) + [
        each if isinstance(of, UndefinedPrimal) else None
        for of, each in zip(given, out, strict=True)
    ]


def _linear_batch(
    axis: VmapAxis,
    flat: Any,
    axes: Any,
    *,
    body: Any,
    plan: Plan,
    active: Active,
    transposed: bool,
    mapped: tuple[Mapped, ...],
) -> Any:
    point, given = _cut_linear(plan, active, transposed, flat)
    at, given_at = _cut_linear(plan, active, transposed, axes)
    params = {"active": active, "transposed": transposed}
    is_mapped = [[each is not None for each in part] for part in at]
    marks = _Point(*is_mapped)
    spacing = point.spacing
    if any(marks.spacing):
        # Loops that ran apart, and may have saved at other distances.
        return _one_by_one(axis, flat, axes, {**params, "body": body, "plan": plan, "mapped": mapped})
    consts = [_or_front(axis, v, p) for v, p in zip(point.body_consts, at.body_consts, strict=True)]
    steps = [_or_front(axis, v, p) for v, p in zip(point.steps, at.steps, strict=True)]
    saves = [v if p is None else jnp.moveaxis(v, p, 1) for v, p in zip(point.saves, at.saves, strict=True)]
    buffers = [_or_front(axis, v, p) for v, p in zip(point.buffers, at.buffers, strict=True)]
    some, some_at = given[0], given_at[0]
    rest = [_to_front(axis, v, p) for v, p in zip((*given[1], *given[2]), (*given_at[1], *given_at[2]), strict=True)]
    tangents = [_or_front(axis, v, p) for v, p in zip(some, some_at, strict=True)]
    new = Mapped(
        axis,
        tuple(marks.body_consts),
        marks.steps[0],
        tuple(marks.saves),
        tuple(marks.buffers),
        (True,) * sum(active.consts) if transposed else tuple(p is not None for p in some_at),
    )
    out = _linear.bind(
        *consts, *steps, *spacing, *saves, *buffers, *tangents, *rest,
        body=body, plan=plan, mapped=(*mapped, new), **params,
    )
    return out, [0] * len(out)


def _one_by_one(axis: VmapAxis, flat: Any, axes: Any, params: Any) -> Any:
    def one(some: Any) -> Any:
        return _linear.bind(*_put_in(flat, which, some), **params)

    which = [place is not None for place in axes]
    some = [_to_front(axis, v, p) for v, p in zip(flat, axes, strict=True) if p is not None]
    out = lax.map(one, some)
    return out, [0] * len(out)


def _or_front(axis: VmapAxis, value: Any, place: int | None) -> Any:
    return value if place is None else jnp.moveaxis(value, place, 0)


def _loop_itself() -> Any:
    return _loop


def _saving_itself() -> Any:
    return _saving


_loop = primitive(
    "loop", _run_loop, _types, _loop_jvp, functools.partial(_batch, _loop_itself)
)
_saving = primitive(
    "saving_loop",
    _run_saving,
    _saving_types,
    _saving_jvp,
    functools.partial(_batch, _saving_itself),
)
_linear = primitive(
    "linear_loop",
    _run_linear,
    _linear_types,
    _linear_jvp,
    _linear_batch,
    _linear_transpose,
)
