"""`filter_scan`."""

from collections.abc import Callable
from typing import Any, SupportsInt, TypeVar, cast

import numpy as np

from ._axes import Axes, along, stacked
from ._body import Step, body_for, merge_output
from ._boundary import public
from ._call import Call, Operands, as_tree
from ._errors import not_a_pair
from ._jax import combine, lax
from ._split import split, split_held


Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


@public(lax.scan, functions=("f",), trees=("init", "xs"))
def filter_scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    length: SupportsInt | None = None,
    reverse: bool | np.bool_ = False,
    unroll: SupportsInt = 1,
    *,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    trace_numbers: bool = False,
) -> tuple[Carry, Y]:
    """Loops over the leading axis of `xs` with a carry: `jax.lax.scan`, over any PyTree.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import loopax

        net = eqx.nn.MLP(2, 2, width_size=8, depth=1, key=jax.random.key(0))

        def step(carry, x):
            net, h = carry  # the network, its activation function and all
            h = jnp.tanh(net(h) + x)
            return (net, h), h

        (net, h), hs = loopax.filter_scan(step, (net, jnp.zeros(2)), jnp.ones((5, 2)))
        assert hs.shape == (5, 2)
        ```

    It computes

    ```python
    def filter_scan(f, init, xs, length):
        carry, ys = init, []
        for x in xs:  # or: for _ in range(length)
            carry, y = f(carry, x)
            ys.append(y)
        return carry, jnp.stack(ys)
    ```

    as one compiled loop. `init`, `xs` and what `f` returns may be any PyTrees. Their arrays go
    through the loop. Anything else in them is static: functions, strings, settings, `None`,
    Python's own numbers, and the structure itself. What is static in the carry has to come
    back as it went in. This is checked while tracing, and an error names each place in which
    it does not hold.

    **Arguments:**

    - `f`: the body, `(carry, x) -> (carry, y)`. Any callable: a function, an `eqx.Module`, a
        bound method, a partial application. Arrays inside it are inputs of the loop: gradients
        flow to them, and a call with other weights in the same body uses the trace of the
        first. Define it once; a function made anew at each call is traced anew, as in JAX.
    - `init`: the first carry.
    - `xs`: what to loop over. Arrays are sliced along `in_axes`; anything else reaches every
        step as it is.
    - `length`: the number of steps. Needed only if there are no arrays in `xs` to tell.
    - `reverse`: start from the end. `ys[i]` still belongs to `xs[i]`.
    - `unroll`: how many steps to compile into one iteration of the loop. `True` or `0`
        unrolls it altogether.
    - `in_axes`: the axis of each array in `xs` to loop over: an integer, `None` for an array
        that each step gets whole, or a PyTree of these that is a prefix of `xs`. A function
        from a leaf to one of these will do as well, such as `eqx.if_array(0)`.
    - `out_axes`: the axis of each array in `ys` along which to stack, in the same form.
    - `trace_numbers`: take Python's numbers and booleans for arrays wherever they stand in
        `init`, `xs` and `ys`, as `jax.lax.scan` does. By default they are static.

    **Returns:**

    The last carry, and `ys`. Arrays of each step's `y` are stacked along a new axis. Anything
    static in it is returned once, as it is: if each `y` is `("loss", 1.0)`, so is `ys`.

    **Raises:**

    - [`loopax.MismatchError`][], a `TypeError`, if `f` returns another carry than it was given:
        another static value, structure, shape, dtype or sharding.
    - [`loopax.ArgumentError`][], a `TypeError`, if `f` does not return a pair, or if an
        argument is of the wrong type.
    - [`loopax.LengthError`][], a `ValueError`, if the arrays in `xs` and `length` do not agree
        on a number of steps, or none is given.

    Asked for in Equinox issues
    [446](https://github.com/patrick-kidger/equinox/issues/446),
    [630](https://github.com/patrick-kidger/equinox/issues/630) and
    [709](https://github.com/patrick-kidger/equinox/issues/709); `in_axes` in JAX issue
    [15041](https://github.com/jax-ml/jax/issues/15041).
    """
    whole, sliced = along("filter_scan", xs, in_axes, length, trace_numbers)
    state = Operands(
        split_held(as_tree(f)),
        split_held(whole, trace_numbers),
        split(init, trace_numbers),
    )
    inputs = Operands(split(sliced, trace_numbers))
    call = Call("filter_scan", f, trace_numbers, state, inputs)
    body = body_for(_step, call)
    with body.during(call):
        out, ys = lax.scan(
            body,
            body.argument(state),
            body.argument(inputs, 1),
            length=length,
            reverse=reverse,
            unroll=unroll,
        )
        ys = merge_output(ys)
    *_, carry = state.merge(out.arrays)
    return carry, stacked("filter_scan", ys, out_axes, trace_numbers)


def _step(step: Step, f: Callable[..., Any], whole: Any, carry: Any, x: Any) -> Any:
    result: Any = f(carry, x if whole is None else combine(x, whole))
    if not _is_pair(result):
        raise not_a_pair(step.caller, step.function, result)
    new, y = result
    return step.carry(new), step.output(y)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(cast(Any, value)) == 2
