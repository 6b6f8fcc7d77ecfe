"""`filter_map`."""

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar

import jax

from . import _tree
from ._axes import length_along
from ._body import Calling, Step, body_for, merge_output
from ._boundary import public
from ._call import Call, Operands, as_tree
from ._errors import LengthError
from ._jax import lax
from ._split import Arrays, split, split_held


X = TypeVar("X")
Y = TypeVar("Y")


@public(lax.map, functions=("f",), trees=("xs",))
def filter_map(
    f: Callable[[X], Y],
    xs: X,
    *,
    batch_size: SupportsIndex | None = None,
    trace_numbers: bool = False,
) -> Y:
    """Calls a function on each row, one after the other: `jax.lax.map`, over any PyTree.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import loopax

        net = eqx.nn.MLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
        xs = {"x": jnp.ones((7, 2)), "name": "a"}

        ys = loopax.filter_map(lambda row: (net(row["x"]), row["name"]), xs, batch_size=3)
        assert ys[0].shape == (7, 1) and ys[1] == "a"
        ```

    It computes

    ```python
    def filter_map(f, xs):
        return jnp.stack([f(x) for x in xs])
    ```

    as one compiled loop, which needs the memory of one row, or of one batch of them.

    **Arguments:**

    - `f`: the function, from a row to a result. Any callable, such as an `eqx.Module`; arrays
        inside it are inputs of the loop.
    - `xs`: what to map over. Arrays are sliced along their first axis; anything else reaches
        every call as it is.
    - `batch_size`: how many rows to take at once, under `jax.vmap`. If the number of rows is
        not a multiple of it, what remains is a smaller batch of its own. 0 takes all rows at
        once.
    - `trace_numbers`: take Python's numbers and booleans in `xs` and results for arrays, as
        `jax.lax.map` does. By default they are static.

    **Returns:**

    The results: arrays stacked along a new first axis, anything else once, as it is.

    **Raises:**

    - [`loopax.ArgumentError`][], a `TypeError`, if an argument is of the wrong type.
    - [`loopax.LengthError`][], a `ValueError`, if the arrays in `xs` are not of one length, if
        there are none, or if `batch_size` is negative.

    `batch_size` was asked for in JAX issue
    [11319](https://github.com/jax-ml/jax/issues/11319).
    """
    length = length_along("filter_map", "xs", xs, 0, trace_numbers)
    state, inputs = Operands(split_held(as_tree(f))), Operands(split(xs, trace_numbers))
    call = Call("filter_map", f, trace_numbers, state, inputs)
    body = body_for(_ONE if batch_size is None else _BATCH, call)
    with body.during(call):

        def run(rows: Arrays) -> Arrays:
            _, ys = lax.scan(body, body.argument(state), rows)
            return ys

        rows = body.argument(inputs, 1)
        if batch_size is None:
            return merge_output(run(rows))
        size = operator.index(batch_size)
        if size < 0:
            raise LengthError(f"filter_map: `batch_size` must not be negative, got {size}.")
        return merge_output(_in_batches(run, rows, length, size))


def _one(step: Step, f: Callable[..., Any], x: Any) -> tuple[Arrays, Arrays]:
    return step.unchanged(), step.output(f(x))


def _batch(step: Step, f: Callable[..., Any], xs: Any) -> tuple[Arrays, Arrays]:
    arrays, static = split(xs, step.trace_numbers)

    def one(arrays: list[Any]) -> Arrays:
        return step.output(f(static.merge(arrays)))

    return step.unchanged(), jax.vmap(one)(arrays)


_ONE = Calling(_one, "scan")
_BATCH = Calling(_batch, "scan")


def _in_batches(
    run: Callable[[Arrays], Arrays], rows: Arrays, length: int, size: int
) -> Arrays:
    """Runs whole batches of `size` rows, and then what remains as a batch of its own.

    A size of 0 is all rows in one batch.
    """
    whole = length - length % size if size else 0
    parts = [(0, whole, size), (whole, length, length - whole)]
    results = [
        _joined(run(_cut(rows, start, stop, each)))
        for start, stop, each in parts
        if start < stop or length == 0 == start
    ]
    # What is static is that of the first batch: no row knows the size of its batch.
    first = results[0]
    columns = zip(*(result.arrays for result in results), strict=True)
    arrays = [lax.concatenate(parts, 0) for parts in columns]
    return Arrays(arrays, first.names, first.label)


def _cut(rows: Any, start: int, stop: int, size: int) -> Any:
    """The rows from `start` to `stop`, as batches of `size` rows."""
    count = (stop - start) // size if size else 0

    def one(row: Any) -> Any:
        return row[start:stop].reshape(count, size, *row.shape[1:])

    return _tree.map_leaves(one, rows)


def _joined(batches: Any) -> Any:
    """Batches of rows as rows."""

    def one(batch: Any) -> Any:
        return batch.reshape(batch.shape[0] * batch.shape[1], *batch.shape[2:])

    return _tree.map_leaves(one, batches)
