"""Which kind of loop to run: `kind`, `max_steps`, `checkpoints`."""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax

from ._adjoint import bounded_loop, default_slots, loop
from ._adjoint.steps import Number
from ._body import Body
from ._errors import ArgumentError
from ._forward import forward_only
from ._jax import config, jit, jnp, lax
from ._words import tree_text


# A predicate, of the number of the step, the carry and the buffers.
Test = Callable[[Any, Any, Any], Any]

# A body, of the number of the step, whether it counts, the carry and the buffers.
Run = Callable[[Any, Any, Any, Any], Any]


class Kind(NamedTuple):
    """How a loop is to be differentiated.

    - `caller`: the public function.
    - `name`: `"lax"`, `"checkpointed"` or `"bounded"`.
    - `bound`: the greatest number of steps, if there is one.
    - `slots`: how many carries to save.
    """

    caller: str
    name: str
    bound: int | None
    slots: int

    def run(
        self,
        cond: Test,
        body: Run,
        carry: Sequence[Any],
        buffers: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Runs a while loop: see `_adjoint.loop`, of which all kinds have the signature."""
        if config.jax_disable_jit:
            return _in_python(cond, body, carry, buffers, self.bound)
        if self.name == "lax":
            return _in_lax(self.caller, cond, body, carry, buffers, self.bound)
        if self.name == "bounded":
            return bounded_loop(cond, body, carry, buffers, cast(int, self.bound))
        return loop(cond, body, carry, buffers, self.bound, self.slots)


def _in_python(cond: Test, body: Run, carry: Any, buffers: Any, bound: int | None) -> Any:
    i = 0
    while (bound is None or i < bound) and cond(jnp.int32(i), carry, buffers):
        carry, buffers = body(_number(jnp.int32(i)), True, carry, buffers)
        i += 1
    return carry, buffers


def _number(i: Any) -> Number:
    return Number(i, i)


def _in_lax(
    caller: str,
    cond: Test,
    body: Run,
    carry: Any,
    buffers: Any,
    bound: int | None,
) -> Any:
    def goes_on(state: Any) -> Any:
        go = cond(*state)
        return go if bound is None else go & (state[0] < bound)

    def step(state: Any) -> Any:
        i, carry, buffers = state
        return (i + 1, *body(_number(i), True, carry, buffers))

    _, carry, buffers = lax.while_loop(goes_on, step, (jnp.int32(0), carry, buffers))
    return forward_only(caller, (), carry), forward_only(caller, (), buffers)


_KINDS = ("lax", "checkpointed", "bounded")


def kind_of(
    caller: str,
    kind: str | None,
    checkpoints: Any,
    bound: int | None,
    has_bound: str,
    plain: bool,
) -> Kind:
    """The kind that the arguments of a public function ask for.

    - `bound`: the greatest number of steps, if that is known.
    - `has_bound`: how to give one, for messages.
    - `plain`: whether to leave the loop to `jax.lax` if nothing else is said.
    """
    if kind is not None and kind not in _KINDS:
        raise ArgumentError(
            f"{caller}: `kind` must be one of {', '.join(map(repr, _KINDS))}, or None, but is "
            f"{tree_text(kind)}."
        )
    if kind is None:
        kind = "lax" if plain and checkpoints is None else "checkpointed"
    if kind != "checkpointed":
        if checkpoints is not None:
            raise ArgumentError(
                f'{caller}: `checkpoints` is for kind="checkpointed"; kind="{kind}" has none.'
            )
        if kind == "bounded" and bound is None:
            raise ArgumentError(
                f'{caller}: kind="bounded" needs a bound on the number of steps. {has_bound}'
            )
        return Kind(caller, kind, bound, 0)
    if bound is None and (checkpoints is None or _is_all(checkpoints)):
        raise ArgumentError(
            f'{caller}: kind="checkpointed" needs a bound on the number of steps, or a number '
            f"of `checkpoints`. {has_bound}"
        )
    return Kind(caller, kind, bound, _slots(caller, checkpoints, bound))


def _is_all(checkpoints: Any) -> bool:
    return isinstance(checkpoints, str) and checkpoints == "all"


def _slots(caller: str, checkpoints: Any, bound: int | None) -> int:
    if checkpoints is None:
        return default_slots(bound)
    if _is_all(checkpoints):
        return max(cast(int, bound), 1)
    slots = a_count(caller, "checkpoints", checkpoints, 'or "all"')
    if slots < 1:
        raise ArgumentError(f"{caller}: `checkpoints` must be at least 1, but is {slots}.")
    if bound is None:
        # Every other one is dropped when they are all taken.
        return max(2, slots - slots % 2)
    return min(slots, max(bound, 1))


def a_count(caller: str, name: str, value: Any, otherwise: str = "or None") -> int:
    """A number that has to be known while tracing."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except (TypeError, jax.errors.JAXTypeError):
        raise ArgumentError(
            f"{caller}: `{name}` must be an integer that is known while tracing, {otherwise}, "
            f"but is {tree_text(value)}."
        ) from None


def bound_of(caller: str, max_steps: Any) -> int | None:
    """`max_steps`, checked."""
    if max_steps is None:
        return None
    bound = a_count(caller, "max_steps", max_steps)
    if not 0 <= bound < 2**31:
        raise ArgumentError(
            f"{caller}: `max_steps` must be at least 0 and below 2**31, but is {bound}."
        )
    return bound


# -- programs ----------------------------------------------------------------------------


def compiled(run: Callable[..., Any], bodies: Sequence[Body], *options: Any) -> Any:
    """`run(bodies, *options, ...)`, compiled when it is first called.

    The program is kept for as long as the first of the bodies, and holds none of them.
    """
    first, *others = bodies
    refs = [weakref.ref(body) for body in bodies]
    key = (run, *refs[1:], *options)
    program = first.programs.get(key)
    if program is None:

        @functools.wraps(run)
        def call(*args: Any) -> Any:
            return run([ref() for ref in refs], *options, *args)

        mine = jit(call)
        # Another thread may have been here meanwhile. What is traced is the one that is kept.
        program = first.programs.setdefault(key, mine)
        if program is mine:
            for other in others:
                weakref.finalize(other, _forget, weakref.ref(first), key).atexit = False
    return program


def _forget(first: Any, key: Any) -> None:
    body = first()
    if body is not None:
        body.programs.pop(key, None)
