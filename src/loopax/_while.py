"""`filter_while_loop`."""

from collections.abc import Callable
from typing import Any, TypeVar

from jax.core import Tracer

from ._body import Step, body_for
from ._boundary import public
from ._call import Call, as_tree, views
from ._errors import not_a_predicate
from ._jax import config, lax
from ._split import closed_over, split, split_held
from ._static import is_scalar


Carry = TypeVar("Carry")


@public(lax.while_loop, functions=("cond_fun", "body_fun"), trees=("init_val",))
def filter_while_loop(
    cond_fun: Callable[[Carry], Any],
    body_fun: Callable[[Carry], Carry],
    init_val: Carry,
    *,
    trace_numbers: bool = False,
) -> Carry:
    """Calls a function while a condition holds: `jax.lax.while_loop`, over any PyTree.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import loopax
        from collections.abc import Callable

        class Newton(eqx.Module):
            x: jax.Array
            function: Callable
            steps: jax.Array

        def body(s):
            x = s.x - s.function(s.x) / jax.grad(s.function)(s.x)
            return Newton(x, s.function, s.steps + 1)

        start = Newton(jnp.array(1.0), lambda x: x**2 - 2, jnp.array(0))
        root = loopax.filter_while_loop(
            lambda s: jnp.abs(s.function(s.x)) > 1e-4, body, start
        )
        assert jnp.allclose(root.x, jnp.sqrt(2), atol=1e-4)
        ```

    It computes

    ```python
    def filter_while_loop(cond_fun, body_fun, init_val):
        val = init_val
        while cond_fun(val):
            val = body_fun(val)
        return val
    ```

    as one compiled loop. The carry may be any PyTree. Its arrays go through the loop. Anything
    else in it is static, and has to come back from `body_fun` as it went in.

    As with `jax.lax.while_loop`, the number of steps is not known to the compiler, so that the
    loop can be differentiated in forward mode only.

    **Arguments:**

    - `cond_fun`: the condition, from the carry to a boolean scalar. Any callable, such as an
        `eqx.Module`; arrays inside it are inputs of the loop.
    - `body_fun`: the body, from carry to carry. Likewise.
    - `init_val`: the first carry.
    - `trace_numbers`: take Python's numbers and booleans in the carry for arrays, as
        `jax.lax.while_loop` does. By default they are static.

    **Returns:**

    The first carry for which the condition does not hold.

    **Raises:**

    - [`loopax.MismatchError`][], a `TypeError`, if `body_fun` returns another carry than it was
        given: another static value, structure, shape, dtype or sharding.
    - [`loopax.ArgumentError`][], a `TypeError`, if `cond_fun` does not return a boolean scalar,
        or if an argument is of the wrong type.

    Asked for in Equinox issue [789](https://github.com/patrick-kidger/equinox/issues/789).
    """
    functions = [split_held(as_tree(cond_fun)), split_held(as_tree(body_fun))]
    carry = split(init_val, trace_numbers)
    if any(isinstance(leaf, Tracer) for leaf in (*functions[0].arrays, *carry.arrays)):
        # `lax` takes what the body forwards for a constant of the loop, but not if the
        # predicate reads it. Under `vmap`, with a predicate that differs between lanes,
        # each lane would then get a copy of its own, to be selected anew at every step.
        functions[0] = closed_over(as_tree(cond_fun))
    test_view, step_view = views(functions, carry)
    test = Call("filter_while_loop", cond_fun, trace_numbers, test_view)
    step = Call("filter_while_loop", body_fun, trace_numbers, step_view)
    cond, body = body_for(_test, test), body_for(_step, step)
    with cond.during(test), body.during(step):
        out = lax.while_loop(cond, body, body.argument(step_view.operands))
    *_, result = step_view.operands.merge(out.arrays)
    return result


def _test(step: Step, cond_fun: Callable[..., Any], carry: Any) -> Any:
    pred = cond_fun(carry)
    if not is_scalar(pred, "b") and not config.jax_disable_jit:
        raise not_a_predicate(step.caller, step.function, pred)
    return pred


def _step(step: Step, body_fun: Callable[..., Any], carry: Any) -> Any:
    return step.carry(body_fun(carry))
