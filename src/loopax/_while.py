"""`filter_while_loop`."""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeVar

from jax.core import Tracer

from ._body import Body, Calling, Step, body_for
from ._boundary import public
from ._call import Call, as_tree, views
from ._errors import ArgumentError, not_a_predicate
from ._forward import forward_only
from ._guard import guarded
from ._jax import config, lax
from ._kinds import Kind, bound_of, compiled, kind_of
from ._loan import Loan, places, unwoven, woven
from ._split import closed_over, split, split_held
from ._static import is_scalar
from ._words import shown


Carry = TypeVar("Carry")


@public(lax.while_loop, functions=("cond_fun", "body_fun"), trees=("init_val",))
def filter_while_loop(
    cond_fun: Callable[[Carry], Any],
    body_fun: Callable[[Carry], Carry],
    init_val: Carry,
    *,
    max_steps: SupportsIndex | None = None,
    kind: str | None = None,
    checkpoints: SupportsIndex | str | None = None,
    buffers: Callable[[Carry], Any] | None = None,
    throw: bool = False,
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
    def filter_while_loop(cond_fun, body_fun, init_val, max_steps=None):
        val, steps = init_val, 0
        while cond_fun(val) and (max_steps is None or steps < max_steps):
            val, steps = body_fun(val), steps + 1
        return val
    ```

    as one compiled loop. The carry may be any PyTree. Its arrays go through the loop. Anything
    else in it is static, and has to come back from `body_fun` as it went in.

    With `max_steps` the loop can be differentiated in reverse mode, and in any other: the
    gradient of the root above with respect to what `function` holds, say. The backward pass
    keeps about the square root of `max_steps` carries, not all of them, and takes the time of
    the steps that were taken, not of `max_steps`. Without it the loop is a
    `jax.lax.while_loop`, which has forward mode only.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import loopax

        def power(x):  # x ** 5
            def body(carry):
                n, y = carry
                return n - 1, x * y

            _, y = loopax.filter_while_loop(
                lambda carry: carry[0] > 0, body, (jnp.array(5), jnp.array(1.0)), max_steps=8
            )
            return y

        assert jnp.allclose(jax.grad(power)(2.0), 80.0)
        ```

    **Arguments:**

    - `cond_fun`: the condition, from the carry to a boolean scalar. Any callable, such as an
        `eqx.Module`; arrays inside it are inputs of the loop.
    - `body_fun`: the body, from carry to carry. Likewise.
    - `init_val`: the first carry.
    - `max_steps`: the greatest number of steps, an integer that is known while tracing. The
        loop ends there, even if the condition still holds: see `throw`.
    - `kind`: how the loop is differentiated.
        - `"lax"`: as `jax.lax.while_loop`, in forward mode only. What `None` means without
            `max_steps`.
        - `"checkpointed"`: in both modes, and in any nesting of them. The forward pass saves
            some carries; the backward pass computes those in between again. What `None` means
            with `max_steps`. Without `max_steps` it needs `checkpoints`.
        - `"bounded"`: as a scan of `max_steps` steps, of which those after the end are
            skipped. Slower; for when the derivatives of JAX's own primitives are wanted.
    - `checkpoints`: how many carries a `"checkpointed"` loop saves: an integer, or `"all"`.
        By default the square root of `max_steps`, with which each step is computed two or
        three times in all. The fewer there are, the more often. The backward pass holds as
        many again at a time, and twice that where a step needs little more to be
        differentiated.
    - `buffers`: picks arrays out of the carry that are buffers of rows, one or several, such as
        `lambda carry: carry.history`. Each row is written once, and read only after that. The
        body gets a [`loopax.Buffer`][] for each, and their gradient takes time in proportion
        to the rows that are written and read, where it would take that times the length of
        the buffer. That rows are not written twice, nor read before, is not checked: the
        backward pass would read the last value.
    - `throw`: raise a runtime error, as `eqx.error_if` does, if `max_steps` are taken and the
        condition still holds.
    - `trace_numbers`: take Python's numbers and booleans in the carry for arrays, as
        `jax.lax.while_loop` does. By default they are static.

    **Returns:**

    The first carry for which the condition does not hold.

    **Raises:**

    - [`loopax.MismatchError`][], a `TypeError`, if `body_fun` returns another carry than it was
        given: another static value, structure, shape, dtype or sharding.
    - [`loopax.ArgumentError`][], a `TypeError`, if `cond_fun` does not return a boolean scalar,
        or if an argument is of the wrong type.

    Asked for in Equinox issue [789](https://github.com/patrick-kidger/equinox/issues/789);
    reverse mode in JAX issues [2139](https://github.com/jax-ml/jax/issues/2139) and
    [8239](https://github.com/jax-ml/jax/issues/8239). Keeping the square root of the number of
    carries is due to Griewank, "Achieving logarithmic growth of temporal and spatial
    complexity in reverse automatic differentiation" (1992), and Chen et al., "Training deep
    nets with sublinear memory cost" ([2016](https://arxiv.org/abs/1604.06174)); doing so for
    an unknown number of steps to Stumm and Walther, "New algorithms for optimal online
    checkpointing" (2010).
    """
    bound = bound_of("filter_while_loop", max_steps)
    how = kind_of(
        "filter_while_loop", kind, checkpoints, bound, "Pass `max_steps`.", plain=bound is None
    )
    if throw and bound is None:
        raise ArgumentError(
            "filter_while_loop: `throw` is for a loop with `max_steps`, of which there is none."
        )
    plain = how.name == "lax" and bound is None and buffers is None
    test_tree, step_tree = as_tree(cond_fun), as_tree(body_fun)
    functions = [split_held(test_tree), split_held(step_tree)]
    picks = split_held(buffers)
    carry = split(init_val, trace_numbers)
    if plain and any(
        isinstance(leaf, Tracer) for leaf in (*functions[0].arrays, *carry.arrays)
    ):
        # `lax` takes what the body forwards for a constant of the loop, but not if the
        # predicate reads it. Under `vmap`, with a predicate that differs between lanes,
        # each lane would then get a copy of its own, to be selected anew at every step.
        functions[0] = closed_over(test_tree)
    test_view, step_view = views(functions, picks, carry)
    test = Call("filter_while_loop", cond_fun, trace_numbers, test_view)
    step = Call("filter_while_loop", body_fun, trace_numbers, step_view)
    cond, body = body_for(_TEST, test), body_for(_BODY, step)
    operands = step_view.operands
    with cond.during(test), body.during(step):
        if plain:
            out = lax.while_loop(cond, body, body.argument(operands)).arrays
            out = forward_only("filter_while_loop", operands.arrays, out)
        else:
            at = places("filter_while_loop", buffers, carry.static)
            held = len(operands.arrays) - len(carry.arrays)
            out, more = compiled(_run, (body, cond), how, at, held, throw)(operands.arrays)
            if throw:
                # Outside of the program, so that it is an ordinary error if nothing else is
                # compiled.
                out = guarded(out, more, _reached(body_fun, max_steps))
    *_, result = operands.merge(out)
    return result


def _test(step: Step, cond_fun: Callable[..., Any], _: Any, carry: Any) -> Any:
    pred = cond_fun(carry)
    if not is_scalar(pred, "b") and not config.jax_disable_jit:
        raise not_a_predicate(step.caller, step.function, pred)
    return pred


def _step(step: Step, *rest: Any) -> Any:
    *active, body_fun, buffers, carry = rest
    loan = Loan(step.caller, buffers, *active)
    return step.carry(loan.back(body_fun(loan.out(carry))))


_TEST = Calling(_test, "while_cond")
_BODY = Calling(_step, "while_body")


def _run(
    bodies: Sequence[Body],
    kind: Kind,
    at: tuple[int, ...],
    held: int,
    throw: bool,
    arrays: list[Any],
) -> tuple[list[Any], Any]:
    """Runs a loop that is not left to `jax.lax`. Also returns whether there was more to do."""
    body, cond = bodies
    functions, carry = arrays[:held], arrays[held:]

    def test(_: Any, carry: Any, buffers: Any) -> Any:
        return cond(cond.node([*functions, *woven(at, carry, buffers)]))

    def step(_: Any, active: Any, carry: Any, buffers: Any) -> Any:
        out = body(body.node([*functions, *woven(at, carry, buffers)]), active)
        return unwoven(at, out.arrays[held:])

    carry, buffers = kind.run(test, step, *unwoven(at, carry))
    more = test(None, carry, buffers) if throw else None
    return [*functions, *woven(at, carry, buffers)], more


def _reached(body_fun: Callable[..., Any], max_steps: Any) -> str:
    return (
        f"filter_while_loop: {shown(body_fun)} was called max_steps={max_steps} times, and the "
        "condition still holds."
    )
