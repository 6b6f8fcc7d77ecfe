"""Loops with a bound as scans, for which JAX has all derivatives of any order."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._jax import checkpoint, jnp, lax
from .jaxprs import trace
from .loop import settled
from .rows import masked
from .steps import Number


def bounded_loop(
    cond: Callable[[Any, Any, Any], Any],
    body: Callable[[Any, Any, Any, Any], Any],
    carry: Sequence[Any],
    buffers: Sequence[Any],
    bound: int,
) -> tuple[list[Any], list[Any]]:
    """As `_adjoint.loop`, as a scan of scans, of which the inner are checkpointed.

    Memory for the backward pass is that of about the square root of `bound` carries, and of
    what as many steps leave behind. When the loop has ended, the outer scan skips the rest.
    """
    if bound == 0:
        return list(carry), list(buffers)
    zero = jnp.int32(0)

    def flat_body(carry: Any) -> Any:
        new, _ = body(Number(zero, zero), np.bool_(True), carry, list(buffers))
        return list(new)

    jaxpr, _, carry = settled(lambda carry: trace(flat_body, carry), carry)
    inner = int(np.ceil(np.sqrt(bound)))
    outer = -(-bound // inner)

    def step(state: Any, _: None) -> Any:
        i, active, carry, last, buffers = state
        new, buffers = body(Number(i, i), active, carry, buffers)
        new = map(jnp.asarray, new)
        last = [masked(active, a, b) for a, b in zip(new, last, strict=True)]
        go = active & cond(i + 1, last, buffers) & (i + 1 < bound)
        # When the loop has ended, its last step is run again, for which the body is known to
        # be defined, so that no derivative of it is infinite.
        carry = [masked(go, a, b) for a, b in zip(last, carry, strict=True)]
        return (jnp.where(go, i + 1, i), go, carry, last, buffers), None

    def skip(state: Any, _: None) -> Any:
        return state, None

    def if_active(step: Any) -> Callable[[Any, None], Any]:
        def run(state: Any, _: None) -> Any:
            return lax.cond(state[1], step, skip, state, None)

        return run

    state = (zero, cond(zero, carry, buffers), list(carry), list(carry), list(buffers))
    # What a step does outside must not be done once more. A branch at each step would have
    # each leave behind a copy of all that the body closes over.
    each = if_active(step) if jaxpr.effects else step

    def steps(state: Any, _: None) -> Any:
        return lax.scan(each, state, None, length=inner)[0], None

    (_, _, _, last, full), _ = lax.scan(if_active(checkpoint(steps)), state, None, length=outer)
    return last, full
