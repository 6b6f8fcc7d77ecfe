"""How cotangents go through a loop, from its last step to its first."""

from typing import Any

from .._jax import jnp
from .derivative import Derivative, Point
from .loop import Runs
from .plan import Plan
from .rows import read, room, write


# Levels at which carries are saved, at most. With the square root of the number of steps two
# are enough; with fewer carries there are more, and beyond that steps are taken repeatedly.
_LEVELS = 4


def backwards(
    steps: Derivative, plan: Plan, point: Point, total: Any, cotangents: Any, runs: Runs
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
            t, here = advance(carry[1], start, carry[0], carry[0] + spacing, spacing)
            row = t // spacing
            saves = [write(s, row, x, active) for s, x in zip(saves, here, strict=True)]
            return (t, here), saves

        # The first is there already, and what comes after the last is not needed: where
        # `spacing` turns out to be one, no step is taken.
        _, saves = runs(
            lambda carry, _: carry[0] + spacing < count,
            save,
            (jnp.int32(0), here),
            [room(each, slots) for each in here],
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
