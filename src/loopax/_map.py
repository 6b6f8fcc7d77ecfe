"""`filter_map`."""

from collections.abc import Callable
from typing import Any, SupportsInt, TypeVar

import jax

from . import _tree
from ._axes import length_along
from ._body import Call, Operands, Step, as_tree, body_for, merge_output
from ._boundary import public
from ._errors import LengthError
from ._jax import lax
from ._split import Arrays, split


X = TypeVar("X")
Y = TypeVar("Y")


@public(lax.map, functions=("f",), trees=("xs",))
def filter_map(
    f: Callable[[X], Y],
    xs: X,
    *,
    batch_size: SupportsInt | None = None,
    trace_numbers: bool = False,
) -> Y:
    length = length_along("filter_map", "xs", xs, 0, trace_numbers)
    state, inputs = Operands(split(as_tree(f), False)), Operands(split(xs, trace_numbers))
    call = Call("filter_map", f, trace_numbers, state, inputs)
    body = body_for(_one if batch_size is None else _batch, call)
    with body.during(call):

        def run(rows: Arrays) -> Arrays:
            _, ys = lax.scan(body, body.argument(state), rows)
            return ys

        rows = body.argument(inputs, 1)
        if batch_size is None:
            return merge_output(run(rows))
        size = int(batch_size)
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
    return _tree.map_leaves(lambda *parts: lax.concatenate(parts, 0), *results)


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
