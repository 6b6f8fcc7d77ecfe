"""`filter_scan`."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, SupportsInt, TypeVar, cast

import numpy as np

from ._adjoint import settled
from ._adjoint.jaxprs import trace
from ._adjoint.plan import cut
from ._adjoint.rows import masked, no_rows, read, write
from ._adjoint.steps import Number
from ._axes import Axes, along, stacked
from ._body import Body, Calling, Step, body_for, merge_output
from ._boundary import public
from ._call import Call, Operands, as_tree
from ._errors import ArgumentError, no_unroll, not_a_pair, not_a_predicate
from ._jax import combine, config, eval_jaxpr, jnp, lax
from ._kinds import Kind, compiled, kind_of
from ._loan import Loan, places, unwoven, woven
from ._split import Arrays, split, split_held
from ._static import is_reference, is_scalar


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
    kind: str | None = None,
    checkpoints: SupportsIndex | str | None = None,
    buffers: Callable[[Carry], Any] | None = None,
    until: Callable[[Carry], Any] | None = None,
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
    def filter_scan(f, init, xs, length, until=lambda carry: False):
        carry, ys = init, []
        for x in xs:  # or: for _ in range(length)
            if until(carry):
                break  # the rows of ys that are left are zero
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
    - `kind`: how the scan is differentiated in reverse mode.
        - `"lax"`: as `jax.lax.scan`, which keeps what the backward pass needs of every step.
            What `None` means, unless `until` or `checkpoints` is given.
        - `"checkpointed"`: keeps some carries only, and computes those in between again: less
            memory, for the time of one more forward pass. For any length.
        - `"bounded"`: likewise, as a scan of scans, with the derivatives of JAX's own
            primitives. Slower.
    - `checkpoints`: how many carries a `"checkpointed"` scan keeps: an integer, or `"all"`. By
        default the square root of the number of steps.
    - `buffers`: picks arrays out of the carry that are buffers of rows, each written once, as
        for [`loopax.filter_while_loop`][].
    - `until`: a function from the carry to a boolean scalar. The scan ends before the first
        step at which it holds. What was not done is not paid for, forwards or backwards. The
        scan is `"checkpointed"` then, unless `kind` says something else; as `"lax"` it has
        forward mode only.
    - `trace_numbers`: take Python's numbers and booleans for arrays wherever they stand in
        `init`, `xs` and `ys`, as `jax.lax.scan` does. By default they are static.

    **Returns:**

    The last carry, and `ys`. Arrays of each step's `y` are stacked along a new axis. Anything
    static in it is returned once, as it is: if each `y` is `("loss", 1.0)`, so is `ys`.

    **Raises:**

    - [`loopax.MismatchError`][], a `TypeError`, if `f` returns another carry than it was given:
        another static value, structure, shape, dtype or sharding.
    - [`loopax.ArgumentError`][], a `TypeError`, if `f` does not return a pair, if `until` does
        not return a boolean scalar, or if an argument is of the wrong type.
    - [`loopax.LengthError`][], a `ValueError`, if the arrays in `xs` and `length` do not agree
        on a number of steps, or none is given.

    Asked for in Equinox issues
    [446](https://github.com/patrick-kidger/equinox/issues/446),
    [630](https://github.com/patrick-kidger/equinox/issues/630) and
    [709](https://github.com/patrick-kidger/equinox/issues/709); `in_axes` in JAX issue
    [15041](https://github.com/jax-ml/jax/issues/15041); `until` in JAX issue
    [2469](https://github.com/jax-ml/jax/issues/2469) and pull request
    [13062](https://github.com/jax-ml/jax/pull/13062).
    """
    whole, sliced, steps = along("filter_scan", xs, in_axes, length, trace_numbers)
    how = kind_of("filter_scan", kind, checkpoints, steps, "", plain=until is None)
    carry = split(init, trace_numbers)
    state = Operands(
        split_held(as_tree(f)),
        split_held(buffers),
        split_held(whole, trace_numbers),
        carry,
    )
    inputs = Operands(split(sliced, trace_numbers))
    call = Call("filter_scan", f, trace_numbers, state, inputs)
    body = body_for(_BODY, call)
    plain = how.name == "lax" and until is None
    at = places("filter_scan", buffers, carry.static)
    if not plain and any(map(is_reference, inputs.arrays)):
        raise ArgumentError(
            "filter_scan: only `jax.lax.scan` goes over mutable references, which is what "
            '`xs` holds, so that `kind` must be "lax", and `until` None.'
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(body.during(call))
        # Where there are no steps, or no number of them, it is for `lax` to say so.
        if plain or not steps:
            out, ys = lax.scan(
                body,
                body.argument(state),
                body.argument(inputs, 1),
                length=length,
                reverse=reverse,
                unroll=unroll,
            )
            out = out.arrays
        else:
            if unroll is True or int(unroll) != 1:
                raise no_unroll("filter_scan", how.name)
            bodies, stops = [body], []
            if until is not None:
                stop = Operands(split_held(as_tree(until)), carry)
                stop_call = Call("filter_scan", until, trace_numbers, stop)
                bodies.append(body_for(_UNTIL, stop_call))
                stack.enter_context(bodies[1].during(stop_call))
                stops = stop.arrays[: len(stop.arrays) - len(carry.arrays)]
            run = compiled(_run, bodies, how, at, steps, bool(reverse))
            out, ys = run(state.arrays, carry.arrays, inputs.arrays, stops)
        ys = merge_output(ys)
    last = state.merge_last(out)
    return last, stacked("filter_scan", ys, out_axes, trace_numbers)


def _step(step: Step, *rest: Any) -> Any:
    *active, f, buffers, whole, carry, x = rest
    loan = Loan(step.caller, buffers, *active)
    result: Any = f(loan.out(carry), x if whole is None else combine(x, whole))
    if not _is_pair(result):
        raise not_a_pair(step.caller, step.function, result)
    new, y = result
    return step.carry(loan.back(new)), step.output(loan.none_in(y))


def _until(step: Step, until: Callable[..., Any], carry: Any) -> Any:
    pred = until(carry)
    if not is_scalar(pred, "b") and not config.jax_disable_jit:
        raise not_a_predicate(step.caller, step.function, pred)
    return pred


_BODY = Calling(_step, "scan")
_UNTIL = Calling(_until, "while_cond")


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(cast(Any, value)) == 2


def _run(
    bodies: Sequence[Body],
    kind: Kind,
    at: tuple[int, ...],
    steps: int,
    reverse: bool,
    state: list[Any],
    carry: list[Any],
    xs: list[Any],
    stops: list[Any],
) -> tuple[list[Any], Arrays]:
    """Runs a scan that is not left to `jax.lax`.

    `xs` are buffers of which each step reads a row, and `ys` buffers to which it writes one.
    """
    body, *until = bodies
    held = state[: len(state) - len(carry)]
    labels: list[Arrays] = []

    def call(active: Any, carry: Any, buffers: Any, rows: Any) -> list[Any]:
        node = body.node([*held, *woven(at, carry, buffers)])
        out, y = body(node, body.node(rows, 1), active)
        labels.append(y)
        carry, buffers = unwoven(at, out.arrays[len(held) :])
        return [*carry, *buffers, *y.arrays]

    def goes_on(i: Any, carry: Any, both: Any) -> Any:
        go = i < steps
        for test in until:
            buffers = both[: len(at)]
            go &= ~jnp.asarray(test(test.node([*stops, *woven(at, carry, buffers)])))
        return go

    carry, buffers = unwoven(at, carry)
    first = [lax.index_in_dim(each, 0, keepdims=False) for each in xs]
    jaxpr, consts, init = settled(lambda c: trace(call, True, c, buffers, first), carry)
    counts = len(carry), len(buffers)
    ys = [no_rows(var.aval, steps) for var in jaxpr.outvars[sum(counts) :]]

    def step(number: Number, active: Any, carry: Any, both: Any) -> Any:
        buffers, sources, ys = cut(both, len(at), len(xs), len(both) - len(at) - len(xs))
        own, place = (steps - 1 - i if reverse else i for i in (number.own, number.all))
        pairs = [read(each, own) for each in sources]
        # Nothing comes of a step that does not count, also if its derivative is infinite.
        rows = [masked(active, row, lax.stop_gradient(row)) for row, _ in pairs]
        if config.jax_disable_jit:
            out = call(active, carry, buffers, rows)
        else:
            out = eval_jaxpr(jaxpr, (), *consts, active, *carry, *buffers, *rows)
        carry, buffers, new = cut(out, *counts, len(ys))
        ys = [
            write(each, place, jnp.asarray(row), active, fresh=True)
            for each, row in zip(ys, new, strict=True)
        ]
        return carry, [*buffers, *(each for _, each in pairs), *ys]

    carry, both = kind.run(goes_on, step, init, [*buffers, *xs, *ys])
    buffers, _, ys = cut(both, len(at), len(xs), len(ys))
    label = labels[-1]
    return [*held, *woven(at, carry, buffers)], Arrays(ys, label.names, label.label)
