"""`filter_fori_loop`."""

from collections.abc import Callable
from typing import Any, SupportsInt, TypeVar

from ._body import Step, body_for
from ._boundary import public
from ._call import Call, Operands, as_tree
from ._errors import not_a_choice
from ._jax import lax
from ._split import split, split_held
from ._static import is_scalar


Carry = TypeVar("Carry")


@public(lax.fori_loop, functions=("body_fun",), trees=("init_val",))
def filter_fori_loop(
    lower: SupportsInt,
    upper: SupportsInt,
    body_fun: Callable[[Any, Carry], Carry],
    init_val: Carry,
    *,
    unroll: SupportsInt | None = None,
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
        mode; otherwise it is a while loop, and cannot.
    - `body_fun`: the body, `(i, carry) -> carry`. Any callable, such as an `eqx.Module`; arrays
        inside it are inputs of the loop. `i` is an integer array.
    - `init_val`: the first carry.
    - `unroll`: how many steps to compile into one iteration of the loop, if the bounds are
        known while tracing.
    - `trace_numbers`: take Python's numbers and booleans in the carry for arrays, as
        `jax.lax.fori_loop` does. By default they are static.

    **Returns:**

    The last carry; `init_val` if `upper <= lower`.

    **Raises:**

    - [`loopax.MismatchError`][], a `TypeError`, if `body_fun` returns another carry than it was
        given: another static value, structure, shape, dtype or sharding.
    - [`loopax.ArgumentError`][], a `TypeError`, if an argument is of the wrong type.

    Asked for with the other loops in Equinox issue
    [789](https://github.com/patrick-kidger/equinox/issues/789).
    """
    for name, bound in (("lower", lower), ("upper", upper)):
        # `lax` takes any real number, if the other is one of the same kind.
        if not is_scalar(bound, "biuf"):
            raise not_a_choice("filter_fori_loop", name, "an integer", bound)
    state = Operands(split_held(as_tree(body_fun)), split(init_val, trace_numbers))
    call = Call("filter_fori_loop", body_fun, trace_numbers, state)
    body = body_for(_step, call)
    with body.during(call):
        out = lax.fori_loop(lower, upper, body, body.argument(state), unroll=unroll)
    *_, carry = state.merge(out.arrays)
    return carry


def _step(step: Step, i: Any, body_fun: Callable[..., Any], carry: Any) -> Any:
    return step.carry(body_fun(i, carry))
