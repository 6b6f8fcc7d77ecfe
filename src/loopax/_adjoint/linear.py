"""`LINEAR`: the derivative of a loop, a linear map from tangents to tangents.

Transposed, from cotangents to cotangents, it is the same primitive with `transposed=True`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .._jax import (
    UndefinedPrimal,
    VmapAxis,
    Zero,
    cached_type,
    instantiate_zeros,
    jnp,
    lax,
    make_jaxpr,
    primitive,
    typeof,
)
from .backwards import Backwards, Stretch
from .derivative import Active, Derivative, Mapped, Point
from .kept import Kept
from .loop import Runs, compiled
from .plan import Plan, cut, put_in
from .rows import room


class Linear(NamedTuple):
    """The parameters of `LINEAR`.

    - `body`: the body of the loop, for when its buffers are full.
    - `taken`: the same, in which a function with a derivative of its own computes what it does
        when it is differentiated.
    - `plan`: of the loop.
    - `active`: what has a tangent.
    - `transposed`: whether it maps cotangents.
    - `again`: whether it comes of one that does, by transposing that.
    - `mapped`: each `jax.vmap` over it, the innermost first.
    """

    body: Any
    taken: Any
    plan: Plan
    active: Active
    transposed: bool
    again: bool
    mapped: tuple[Mapped, ...]

    def bind(self, *flat: Any) -> list[Any]:
        return LINEAR.bind(*flat, **self._asdict())

    def cut(self, flat: Sequence[Any]) -> tuple[Point, list[list[Any]]]:
        """The point, and what is mapped: of constants, carry and buffers."""
        plan = self.plan
        counts = (plan.body_consts, 1, int(plan.spacing is None), plan.carry, plan.buffers)
        parts = cut(flat, *counts, *self.active.counts(self.transposed))
        return Point(*parts[:5]), parts[5:]

    @property
    def operands(self) -> int:
        """How many operands are linear. They are the last."""
        return sum(self.active.counts(self.transposed))

    def cotangent_types(self, consts: Sequence[Any]) -> list[Any]:
        """Those of the constants that have a tangent. Each lane has a cotangent of its own."""
        sizes = tuple(each.axis.size for each in self.mapped)
        return [
            _in_every_lane(aval, sum(each.body_consts[place] for each in self.mapped), sizes)
            for place, aval in enumerate(consts)
            if self.active.consts[place]
        ]


def run_linear(*flat: Any, runs: Runs = compiled, **params: Any) -> list[Any]:
    """Maps tangents, or cotangents, through all steps of the loop."""
    linear = Linear(**params)
    point, (of_consts, of_carry, of_buffers) = linear.cut(flat)
    derivative = Derivative(
        linear.body, linear.taken, linear.plan, linear.active, linear.mapped
    )
    total = jnp.max(point.steps[0])
    if linear.transposed:
        types = linear.cotangent_types([typeof(each) for each in point.body_consts])
        cotangents = ([instantiate_zeros(Zero(each)) for each in types], of_carry, of_buffers)
        plan = linear.plan
        spacing = point.spacing[0] if plan.spacing is None else plan.spacing
        every = Stretch(jnp.int32(0), total, point.saves, spacing, plan.bound)
        kept = _kept(derivative, point, plan) if runs is compiled else None
        back = Backwards(derivative, point, plan.slots, runs, kept)
        out = back.through(every, cotangents)
        return [each for part in out for each in part]

    def step(active: Any, state: Any, of_buffers: Any) -> Any:
        i, carry, of_carry = state
        tangents = [of_consts, of_carry, of_buffers]
        carry, of_carry, of_buffers = derivative.tangents(
            point, i, active, carry, tangents, linear.again
        )
        return (i + 1, carry, of_carry), of_buffers

    first = [each[0] for each in point.saves]
    (_, _, of_carry), of_buffers = runs(
        lambda state, _: state[0] < total,
        step,
        (jnp.int32(0), first, of_carry),
        of_buffers,
        linear.plan.bound,
    )
    return [*of_carry, *of_buffers]


# A step may leave behind so many times what its carry takes, to be kept rather than computed
# again. A tanh of a linear map leaves two carries; deep networks far more.
_WORTH_KEEPING = 2


def _kept(derivative: Derivative, point: Point, plan: Plan) -> Kept | None:
    if plan.spacing is None:
        return None
    kept = Kept(derivative, point)
    carry = sum(_bytes(typeof(each)) for each in point.saves) / plan.slots
    return kept if sum(map(_bytes, kept.types)) <= _WORTH_KEEPING * carry else None


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _types(*avals: Any, **params: Any) -> Any:
    linear = Linear(**params)
    point, (_, of_carry, of_buffers) = linear.cut(avals)
    if not linear.transposed:
        return [*of_carry, *of_buffers], set()
    return [*linear.cotangent_types(point.body_consts), *of_carry, *of_buffers], set()


@cached_type
def _in_every_lane(aval: Any, axes: int, sizes: tuple[int, ...]) -> Any:
    """The type of the tangent of a constant that has some axes of lanes, with all of them."""

    def spread(value: Any) -> Any:
        for _ in range(axes):
            value = value[0]
        for size in sizes:
            value = room(value, size)
        return value

    aval = aval.to_tangent_aval().update(weak_type=False)
    return aval if axes == len(sizes) else make_jaxpr(spread)(aval).out_avals[0]


def _transpose(cotangents: Any, *flat: Any, **params: Any) -> Any:
    linear = Linear(**params)
    point = flat[: len(flat) - linear.operands]
    into = [instantiate_zeros(each) for each in cotangents]
    # Each lane has its own cotangent of a constant, so that those have all axes from here on.
    own = tuple(
        each._replace(tangents=(True,) * sum(linear.active.consts)) for each in linear.mapped
    )
    opposite = linear._replace(
        transposed=not linear.transposed, again=linear.transposed, mapped=own
    )
    out = list(opposite.bind(*point, *into))
    if not linear.transposed:
        # A tangent that was one for all lanes gets the sum of their cotangents.
        for place in range(sum(linear.active.consts)):
            shared = [
                number
                for number, each in enumerate(reversed(linear.mapped))
                if not each.tangents[place]
            ]
            out[place] = jnp.sum(out[place], shared) if shared else out[place]
    given = flat[len(point) :]
    return [None] * len(point) + [
        each if isinstance(of, UndefinedPrimal) else None
        for of, each in zip(given, out, strict=True)
    ]


def _batch(axis: VmapAxis, flat: Any, axes: Any, **params: Any) -> Any:
    linear = Linear(**params)
    point, given = linear.cut(flat)
    at, given_at = linear.cut(axes)
    if at.spacing and at.spacing[0] is not None:
        return _one_by_one(axis, flat, axes, linear)
    of_consts, *others = zip(given, given_at, strict=True)
    moved = Point(
        body_consts=_moved(point.body_consts, at.body_consts, 0),
        steps=_moved(point.steps, at.steps, 0),
        spacing=point.spacing,
        # The first axis of these is that of the saved carries.
        saves=_moved(point.saves, at.saves, 1),
        buffers=_moved(point.buffers, at.buffers, 0),
    )
    mapped = Mapped(
        axis,
        body_consts=_marks(at.body_consts),
        steps=at.steps[0] is not None,
        carry=_marks(at.saves),
        buffers=_marks(at.buffers),
        tangents=(True,) * sum(linear.active.consts)
        if linear.transposed
        else _marks(given_at[0]),
    )
    out = linear._replace(mapped=(*linear.mapped, mapped)).bind(
        *(each for part in moved for each in part),
        *_moved(*of_consts, 0),
        *(axis.to_front(*pair) for part in others for pair in zip(*part, strict=True)),
    )
    return out, [0] * len(out)


def _moved(values: Sequence[Any], axes: Sequence[Any], to: int) -> list[Any]:
    return [
        value if place is None else jnp.moveaxis(value, place, to)
        for value, place in zip(values, axes, strict=True)
    ]


def _marks(axes: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(place is not None for place in axes)


def _one_by_one(axis: VmapAxis, flat: Any, axes: Any, linear: Linear) -> Any:
    """Of loops that ran apart, which may have saved their carries at other distances."""
    which = _marks(axes)
    some = [
        axis.to_front(value, place)
        for value, place in zip(flat, axes, strict=True)
        if place is not None
    ]

    def one(some: Any) -> Any:
        return linear.bind(*put_in(flat, which, some))

    out = lax.map(one, some)
    return out, [0] * len(out)


LINEAR = primitive("linear_loop", run_linear, _types, _batch, _transpose)
