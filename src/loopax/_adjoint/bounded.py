"""Loops with a bound as scans, for which JAX has all derivatives of any order."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._jax import checkpoint, jnp, lax
from .rows import masked


def bounded_loop(
    cond: Callable[[Any, Any, Any], Any],
    body: Callable[[Any, Any, Any, Any], Any],
    carry: Sequence[Any],
    buffers: Sequence[Any],
    bound: int,
) -> tuple[list[Any], list[Any]]:
    """As `_adjoint.loop`, as a scan of scans, of which the inner are checkpointed.

    Memory for the backward pass is that of about twice the square root of `bound` carries.
    When the loop has ended, what is left of the scans is skipped.
    """
    if bound == 0:
        return list(carry), list(buffers)
    inner = int(np.ceil(np.sqrt(bound)))
    outer = -(-bound // inner)

    def step(state: Any) -> Any:
        i, active, carry, last, buffers = state
        last, buffers = body(i, active, carry, buffers)
        go = active & cond(i + 1, last, buffers) & (i + 1 < bound)
        # Under `jax.vmap` both sides of a branch are run. A lane that has stopped runs its
        # last step again, for which the body is known to be defined, so that no derivative
        # of it is infinite.
        carry = [masked(go, a, b) for a, b in zip(last, carry, strict=True)]
        return i + 1, go, carry, last, buffers

    def skip(state: Any) -> Any:
        return state

    def if_active(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(state: Any, _: None) -> Any:
            return lax.cond(state[1], step, skip, state), None

        return run

    def steps(state: Any) -> Any:
        return lax.scan(if_active(step), state, None, length=inner)[0]

    zero = jnp.int32(0)
    state = (zero, cond(zero, carry, buffers), list(carry), list(carry), list(buffers))
    (_, _, _, last, full), _ = lax.scan(if_active(checkpoint(steps)), state, None, length=outer)
    return last, full
