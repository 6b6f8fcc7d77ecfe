"""`filter_fori_loop`."""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, SupportsInt, TypeVar

import numpy as np
from jax.core import Tracer

from ._adjoint.steps import Number
from ._body import Body, Calling, Step, body_for
from ._boundary import public
from ._call import Call, Operands, as_tree
from ._errors import ArgumentError, no_unroll, not_a_choice
from ._forward import forward_only
from ._guard import guarded
from ._jax import jnp, lax
from ._kinds import Kind, bound_of, compiled, kind_of
from ._loan import Loan, places, unwoven, woven
from ._split import split, split_held
from ._static import is_number, is_scalar
from ._words import shown


Carry = TypeVar("Carry")


@public(lax.fori_loop, functions=("body_fun",), trees=("init_val",))
def filter_fori_loop(
    lower: SupportsInt,
    upper: SupportsInt,
    body_fun: Callable[[Any, Carry], Carry],
    init_val: Carry,
    *,
    unroll: SupportsInt | None = None,
    max_steps: SupportsIndex | None = None,
    kind: str | None = None,
    checkpoints: SupportsIndex | str | None = None,
    buffers: Callable[[Carry], Any] | None = None,
    trace_numbers: bool = False,
) -> Carry:
    """Counts from `lower` to `upper` with a carry: `jax.lax.fori_loop`, over any PyTree.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import loopax

        net = eqx.nn.MLP(2, 2, width_size=8, depth=1, key=jax.random.key(0))

        def body(i, carry):
            return {**carry, "h": carry["net"](carry["h"]) / (i + 1)}

        out = loopax.filter_fori_loop(0, 3, body, {"net": net, "h": jnp.ones(2)})
        assert out["net"].activation is net.activation
        ```

    It computes

    ```python
    def filter_fori_loop(lower, upper, body_fun, init_val):
        val = init_val
        for i in range(lower, upper):
            val = body_fun(i, val)
        return val
    ```

    as one compiled loop. The carry may be any PyTree. Its arrays go through the loop. Anything
    else in it is static, and has to come back from `body_fun` as it went in.

    **Arguments:**

    - `lower`, `upper`: the first index, and the one after the last: integers, or integer
        scalars. If both are known while tracing, the loop can be differentiated in reverse
        mode; otherwise it is a while loop, and can with `max_steps`.
    - `body_fun`: the body, `(i, carry) -> carry`. Any callable, such as an `eqx.Module`; arrays
        inside it are inputs of the loop. `i` is an integer array.
    - `init_val`: the first carry.
    - `unroll`: how many steps to compile into one iteration of the loop, if the bounds are
        known while tracing.
    - `max_steps`: the greatest number of steps, for bounds that are not known while tracing.
        It is an error if there are more.
    - `kind`: how the loop is differentiated: `"lax"`, `"checkpointed"` or `"bounded"`, as for
        [`loopax.filter_while_loop`][]. `None` is `"checkpointed"` with `max_steps` or
        `checkpoints`, and `"lax"` without, which keeps every carry for the backward pass.
    - `checkpoints`: how many carries a `"checkpointed"` loop saves: an integer, or `"all"`. By
        default the square root of the number of steps.
    - `buffers`: picks arrays out of the carry that are buffers of rows, each written once, as
        for [`loopax.filter_while_loop`][].
    - `trace_numbers`: take Python's numbers and booleans in the carry for arrays, as
        `jax.lax.fori_loop` does. By default they are static.

    **Returns:**

    The last carry; `init_val` if `upper <= lower`.

    **Raises:**

    - [`loopax.MismatchError`][], a `TypeError`, if `body_fun` returns another carry than it was
        given: another static value, structure, shape, dtype or sharding.
    - [`loopax.ArgumentError`][], a `TypeError`, if an argument is of the wrong type, or there
        are more than `max_steps` steps between bounds that are known. If they are not, that is
        a runtime error, as of `eqx.error_if`.

    Asked for with the other loops in Equinox issue
    [789](https://github.com/patrick-kidger/equinox/issues/789).
    """
    for name, bound in (("lower", lower), ("upper", upper)):
        # `lax` takes any real number, if the other is one of the same kind.
        if not is_scalar(bound, "biuf"):
            raise not_a_choice("filter_fori_loop", name, "an integer", bound)
    how = _kind(lower, upper, max_steps, kind, checkpoints)
    carry = split(init_val, trace_numbers)
    state = Operands(split_held(as_tree(body_fun)), split_held(buffers), carry)
    at = places("filter_fori_loop", buffers, carry.static)
    call = Call("filter_fori_loop", body_fun, trace_numbers, state)
    body = body_for(_BODY, call)
    with body.during(call):
        if how.name == "lax" and how.bound is None:
            out = lax.fori_loop(lower, upper, body, body.argument(state), unroll=unroll)
            out = out.arrays
            if isinstance(lower, Tracer) or isinstance(upper, Tracer):
                out = forward_only("filter_fori_loop", state.arrays, out)
        else:
            if unroll is not None:
                raise no_unroll("filter_fori_loop", how.name)
            held = len(state.arrays) - len(carry.arrays)
            out, more = compiled(_run, (body,), how, at, held)(lower, upper, state.arrays)
            if more is not None:
                out = guarded(out, more, _too_many(body_fun, max_steps))
    result = state.merge_last(out)
    return result


def _step(step: Step, i: Any, *rest: Any) -> Any:
    *active, body_fun, buffers, carry = rest
    loan = Loan(step.caller, buffers, *active)
    return step.carry(loan.back(body_fun(i, loan.out(carry))))


# `lax` calls it with the number of the step first.
_BODY = Calling(_step, "fori_loop", before=(("",),))


def _kind(lower: Any, upper: Any, max_steps: Any, kind: str | None, checkpoints: Any) -> Kind:
    """The kind of loop. It has no bound if the loop is left to `jax.lax`."""
    bound = bound_of("filter_fori_loop", max_steps)
    steps: int | None = None
    known = not any(isinstance(each, Tracer) for each in (lower, upper))
    if known:
        steps = max(int(upper) - int(lower), 0)
        if bound is not None and steps > bound:
            raise ArgumentError(
                f"filter_fori_loop: there are {steps} steps from {lower} to {upper}, and "
                f"`max_steps` is {bound}."
            )
    how = kind_of(
        "filter_fori_loop",
        kind,
        checkpoints,
        bound if steps is None else steps,
        "Pass `max_steps`, or bounds that are known while tracing.",
        plain=bound is None,
    )
    if how.name == "lax" and (steps is not None or bound is None):
        return how._replace(bound=None)
    for name, value in (("lower", lower), ("upper", upper)):
        if not is_scalar(value, "biu"):
            raise not_a_choice("filter_fori_loop", name, "an integer", value)
    dtype = jnp.result_type(lower, upper)
    for name, value in (("lower", lower), ("upper", upper)):
        if is_number(value) and int(np.asarray(value).astype(dtype)) != value:
            raise ArgumentError(
                f"filter_fori_loop: `{name}` is {value}, which is no {dtype.name}, as the "
                "other bound is."
            )
    return how


# Steps are counted in 32 bits.
_MOST = 2**31 - 1


def _run(
    bodies: Sequence[Body],
    kind: Kind,
    at: tuple[int, ...],
    held: int,
    lower: Any,
    upper: Any,
    arrays: list[Any],
) -> tuple[list[Any], Any]:
    """Runs a loop that is not left to `jax.lax`. Also returns whether there was more to do."""
    (body,) = bodies
    functions, carry = arrays[:held], arrays[held:]
    dtype = jnp.result_type(lower, upper)
    lower, upper = jnp.asarray(lower, dtype), jnp.asarray(upper, dtype)
    # Without a sign the difference is that of the bounds, whatever they are.
    wide = jnp.uint64 if dtype.itemsize == 8 else jnp.uint32
    steps = jnp.where(lower < upper, upper.astype(wide) - lower.astype(wide), 0)
    many = jnp.asarray(kind.bound if kind.bound is not None else _MOST, wide)
    more = None if kind.bound is None else steps > many
    steps = jnp.minimum(steps, many).astype(jnp.int32)

    def step(number: Number, active: Any, carry: Any, buffers: Any) -> Any:
        node = body.node([*functions, *woven(at, carry, buffers)])
        out = body(lower + number.own.astype(lower.dtype), node, active)
        return unwoven(at, out.arrays[held:])

    carry, buffers = kind.run(lambda i, _, __: i < steps, step, *unwoven(at, carry))
    return [*functions, *woven(at, carry, buffers)], more


def _too_many(body_fun: Callable[..., Any], max_steps: Any) -> str:
    return (
        f"filter_fori_loop: {shown(body_fun)} was called max_steps={max_steps} times, and "
        "there are more steps from `lower` to `upper`."
    )
