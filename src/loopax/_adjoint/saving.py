"""`SAVING`: a loop that also returns the carries at some of its steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._jax import ShapedArray, VmapAxis, jnp, lax, primitive
from .lanes import in_lanes
from .loop import Runs, compiled, types
from .plan import Plan, cut, operands_of
from .rows import room, room_type, write
from .steps import State, Steps


def run_saving(
    *flat: Any, cond: Any, body: Any, plan: Plan, runs: Runs = compiled
) -> list[Any]:
    """Runs the loop, and saves the carry every `plan.spacing` steps."""
    steps = Steps(cond, body, plan, flat)
    state = steps.start()
    saves = [room(each, plan.slots) for each in state.carry]
    if plan.spacing is None:
        return _save_online(steps, plan, state, saves, runs)
    spacing = plan.spacing

    def save(active: Any, state: State, both: Any) -> Any:
        buffers, saves = both[: plan.buffers], both[plan.buffers :]
        row = state.i // spacing
        saves = [write(s, row, x, active) for s, x in zip(saves, state.carry, strict=True)]
        state, buffers = _some_steps(steps, active, state, buffers, spacing, spacing, runs)
        return state, [*buffers, *saves]

    state, both = runs(
        lambda state, _: state.is_going, save, state, [*steps.buffers, *saves], plan.slots
    )
    carry, count = steps.result(state)
    return [*carry, *both[: plan.buffers], count, *both[plan.buffers :]]


def _some_steps(
    steps: Steps,
    counts: Any,
    state: State,
    buffers: Any,
    number: Any,
    bound: int | None,
    runs: Runs,
) -> tuple[State, Any]:
    """At most that number of steps, which is at most `bound`."""
    if bound == 1:
        return steps.step(counts, state, buffers)
    stop = state.i + number

    def step(active: Any, state: Any, buffers: Any) -> Any:
        return steps.step(counts & active, state, buffers)

    return runs(lambda state, _: (state.i < stop) & state.is_going, step, state, buffers, bound)


def _save_online(
    steps: Steps, plan: Plan, state: State, saves: list[Any], runs: Runs
) -> list[Any]:
    """Saves the carries of a loop without a bound.

    Whenever all slots are taken, every other one is freed, and from then on the distance
    between two that are saved is twice as long.
    """
    slots = plan.slots

    def thin(saves: Any) -> Any:
        return [jnp.concatenate([each[::2], each[1::2]]) for each in saves]

    def keep(saves: Any) -> Any:
        return saves

    def save(active: Any, carry: Any, buffers: Any) -> Any:
        state, saves, taken, spacing = carry
        is_full = taken == slots
        saves = lax.cond(is_full, thin, keep, saves)
        taken = jnp.where(is_full, slots // 2, taken)
        spacing = jnp.where(is_full, 2 * spacing, spacing)
        saves = [
            lax.dynamic_update_index_in_dim(s, x, taken, 0)
            for s, x in zip(saves, state.carry, strict=True)
        ]
        state, buffers = _some_steps(steps, active, state, buffers, spacing, None, runs)
        return (state, saves, taken + 1, spacing), buffers

    (state, saves, _, spacing), buffers = runs(
        lambda carry, _: carry[0].is_going,
        save,
        (state, saves, jnp.int32(0), jnp.int32(1)),
        steps.buffers,
        None,
    )
    carry, count = steps.result(state)
    return [*carry, *buffers, count, spacing, *saves]


def cut_saved(plan: Plan, out: Sequence[Any]) -> list[list[Any]]:
    """What was returned: the carry, the buffers, the number of steps, the distance between two
    that were saved, if it is not fixed, and the saved carries."""
    return cut(out, plan.carry, plan.buffers, 1, int(plan.spacing is None), plan.carry)


def _types(*avals: Any, cond: Any, body: Any, plan: Plan) -> Any:
    out, effects = types(*avals, cond=cond, body=body, plan=plan)
    number = ShapedArray((), np.dtype(np.int32))
    saves = [room_type(each, plan.slots) for each in operands_of(plan, avals).carry]
    return [*out, *([number] if plan.spacing is None else []), *saves], effects


def _batch(axis: VmapAxis, flat: Any, axes: Any, *, cond: Any, body: Any, plan: Plan) -> Any:
    lanes = in_lanes(axis, flat, axes, cond, body, plan)
    out = SAVING.bind(*lanes.flat, **lanes.params)
    spacing = [None] if plan.spacing is None else []
    saves = [1 if mark else None for mark in lanes.carry]
    return out, [*lanes.out_axes, *spacing, *saves]


SAVING = primitive("saving_loop", run_saving, _types, _batch)
