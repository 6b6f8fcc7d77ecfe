"""How cotangents go through a loop, from its last step to its first."""

from typing import Any, NamedTuple

from .._jax import jnp
from .derivative import Derivative, Point
from .kept import Kept
from .loop import Runs, default_slots
from .rows import no_rows, room, row_of, write


# Levels at which carries are saved, at most. With the square root of the number of steps two
# are enough; with fewer carries there are more, and beyond that steps are taken repeatedly.
_LEVELS = 4


class Stretch(NamedTuple):
    """Some steps, with carries saved at equal distances.

    - `first`, `count`: the number of the first step, and of how many steps there are.
    - `saves`: the carries, from that before the first step on.
    - `spacing`: how many steps there are from one to the next.
    - `bound`: the greatest number of steps, if that is known.
    - `kept`: if it is not the carries that are saved, but what each step leaves behind.
    """

    first: Any
    count: Any
    saves: list[Any]
    spacing: Any
    bound: int | None
    kept: Kept | None = None


class Backwards:
    """Takes cotangents through the steps of a loop, from the last to the first.

    - `slots`: how many carries to save at a level.
    - `runs`: how to run the loops that this is made of.
    - `kept`: what steps leave behind when they are taken once more, if that is to be kept.
    """

    def __init__(
        self,
        derivative: Derivative,
        point: Point,
        slots: int,
        runs: Runs,
        kept: Kept | None,
    ):
        self._derivative = derivative
        self._kept = kept
        self._point = point
        self._slots = slots
        self._runs = runs

    def through(self, stretch: Stretch, cotangents: Any, level: int = 1) -> Any:
        """The cotangents before the stretch, from those after it."""
        first, count, saves, spacing, bound, kept = stretch
        if _is_one(spacing) and kept is None and self._kept is not None:
            return self._kept_of_saved(self._kept, stretch, cotangents)

        def segment(_: Any, carry: Any, buffers: Any) -> Any:
            left, cotangents = carry
            k = left - 1
            start, here = first + k * spacing, [row_of(each, k) for each in saves]
            steps = jnp.minimum(spacing, count - k * spacing)
            if kept is not None:
                cotangents = kept.cotangents(start, here, cotangents)
            elif _is_one(spacing):
                cotangents = self._derivative.cotangents(self._point, start, here, cotangents)
            elif level == _LEVELS or self._slots == 1:
                cotangents = self._repeatedly(here, start, steps, spacing, cotangents)
            else:
                within = self._replayed(here, start, steps, spacing)
                cotangents = self.through(within, cotangents, level + 1)
            return (k, cotangents), buffers

        most = self._slots if bound is None else min(self._slots, -(-bound // spacing))
        segments = -(-count // spacing)
        return self._countdown(segment, segments, cotangents, most)

    def _replayed(self, here: Any, start: Any, count: Any, most: Any) -> Stretch:
        """A stretch from one carry on, of `count` steps of at most `most`."""
        spacing = -(-most // self._slots)
        if _is_one(spacing) and self._kept is not None:
            kept = self._kept

            def keep(t: Any, here: Any) -> Any:
                return kept.residuals(start + t, here)

            return self._kept_steps(kept, keep, here, start, count, most)

        def save(active: Any, carry: Any, saves: Any) -> Any:
            t, here = carry
            t, here = self._advanced(here, start, t, t + spacing, spacing)
            row = t // spacing
            saves = [write(s, row, x, active) for s, x in zip(saves, here, strict=True)]
            return (t, here), saves

        # The first is there already, and what comes after the last is not needed: where
        # `spacing` turns out to be one, no step is taken.
        _, saves = self._runs(
            lambda carry, _: carry[0] + spacing < count,
            save,
            (jnp.int32(0), here),
            [room(each, self._slots) for each in here],
            self._slots,
        )
        return Stretch(start, count, saves, spacing, _if_known(most))

    def _kept_of_saved(self, kept: Kept, stretch: Stretch, cotangents: Any) -> Any:
        """Through a stretch of which every carry is saved, some steps at a time."""
        first, count, saves, _, bound = stretch[:5]
        size = default_slots(bound)

        def segment(_: Any, carry: Any, buffers: Any) -> Any:
            left, cotangents = carry
            k = left - 1
            start, steps = first + k * size, jnp.minimum(size, count - k * size)

            def keep(t: Any, _: Any) -> Any:
                here = [row_of(each, k * size + t) for each in saves]
                return kept.residuals(start + t, here)

            within = self._kept_steps(kept, keep, [], start, steps, size)
            return (k, self.through(within, cotangents)), buffers

        return self._countdown(segment, -(-count // size), cotangents, size)

    def _kept_steps(
        self, kept: Kept, keep: Any, here: Any, start: Any, count: Any, most: int
    ) -> Stretch:
        """A stretch of what steps leave behind, as `keep` says, from a carry to the next."""

        def step(_: Any, carry: Any, rows: Any) -> Any:
            t, here = carry
            left, new = keep(t, here)
            rows = [write(s, t, x, True) for s, x in zip(rows, left, strict=True)]
            return (t + 1, new if here else []), rows

        _, rows = self._runs(
            lambda carry, _: carry[0] < count,
            step,
            (jnp.int32(0), here),
            [no_rows(aval, most) for aval in kept.types],
            most,
        )
        return Stretch(start, count, rows, 1, most, kept)

    def _advanced(self, here: Any, start: Any, t: Any, stop: Any, most: Any) -> Any:
        """`stop`, and the carry that many steps after `start`, from that `t` steps after."""

        def step(_: Any, carry: Any, buffers: Any) -> Any:
            t, here = carry
            return (t + 1, self._derivative.next_carry(self._point, start + t, here)), buffers

        if _is_one(most):
            return step(True, (t, here), [])[0]
        carry, _ = self._runs(
            lambda carry, _: carry[0] < stop, step, (t, here), [], _if_known(most)
        )
        return carry

    def _repeatedly(self, here: Any, start: Any, count: Any, most: Any, cotangents: Any) -> Any:
        """Through some steps, each time from the one carry that is there."""

        def step(_: Any, carry: Any, buffers: Any) -> Any:
            left, cotangents = carry
            t = left - 1
            _, there = self._advanced(here, start, jnp.int32(0), t, most)
            new = self._derivative.cotangents(self._point, start + t, there, cotangents)
            return (t, new), buffers

        return self._countdown(step, count, cotangents, _if_known(most))

    def _countdown(self, step: Any, count: Any, cotangents: Any, bound: int | None) -> Any:
        (_, cotangents), _ = self._runs(
            lambda carry, _: carry[0] > 0, step, (count, cotangents), [], bound
        )
        return cotangents


def _if_known(number: Any) -> int | None:
    return number if isinstance(number, int) else None


def _is_one(spacing: Any) -> bool:
    return isinstance(spacing, int) and spacing == 1
