"""Reading and writing rows of a buffer, differentiated in place.

JAX transposes a read into a buffer of zeros with one row filled in, to be added to the
cotangent of the buffer: at each step of a loop, the work of the whole buffer. Here a read
returns the buffer as well. What is read next is read from that, so that the buffer, and
backwards its cotangent, goes through all reads and writes as one chain, and each of them works
on its own row only.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from .._jax import (
    UndefinedPrimal,
    VmapAxis,
    Zero,
    cached_type,
    instantiate_zeros,
    jnp,
    lax,
    make_jaxpr,
    primitive,
    set_jvp,
    typeof,
    vmap,
)


def read(buffer: Any, index: Any) -> tuple[Any, Any]:
    """The row of that number, and the buffer to go on with."""
    return tuple(_read.bind(buffer, index, lead=0))


def row_of(array: Any, index: Any) -> Any:
    """A row of an array that does not change."""
    return _at(array, index, axis=0)


def write(buffer: Any, index: Any, row: Any, where: Any, *, fresh: bool = False) -> Any:
    """The buffer with a row replaced where `where` holds.

    `fresh`: what the buffer held at first has no tangent. Then there is no need to see to it
    that the cotangent of what is replaced is zero.
    """
    (out,) = _write.bind(buffer, index, row, where, lead=0, done=False, fresh=fresh)
    return out


def no_rows(aval: Any, count: int) -> Any:
    """A buffer for so many rows of that type, all of them zero."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jnp.zeros((count, *aval.shape), aval.dtype)
    return instantiate_zeros(Zero(room_type(aval, count)))


def room(value: Any, count: int) -> Any:
    """Room for so many values like it. Not zeros, so that it is of the same type to JAX."""
    return jnp.broadcast_to(value, (count, *value.shape))


@cached_type
def room_type(aval: Any, count: int) -> Any:
    """The type of room for so many values of a type, which also says how it is sharded."""
    (out,) = make_jaxpr(functools.partial(room, count=count))(aval).out_avals
    return out.update(weak_type=False)


# The first `lead` axes of a buffer are those of `jax.vmap`; rows are numbered along the next.
# An index is a scalar, one for all, or has those axes, and for a read any number of others
# after them: several reads of the same buffer. So are the masks of a write.


# Indices are not negative, which saves looking whether they are at every step.
_at = functools.partial(lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
_updated = functools.partial(lax.dynamic_update_index_in_dim, allow_negative_indices=False)


def _take(buffer: Any, index: Any, lead: int) -> Any:
    if index.ndim == 0:
        return _at(buffer, index, axis=lead)
    one = functools.partial(_at, axis=0)
    for _ in range(index.ndim - lead):
        one = vmap(one, in_axes=(None, 0))
    for _ in range(lead):
        one = vmap(one)
    return one(buffer, index)


def _put(buffer: Any, index: Any, row: Any, lead: int) -> Any:
    if index.ndim == 0:
        return _updated(buffer, row, index, axis=lead)
    one = functools.partial(_updated, axis=0)
    for _ in range(lead):
        one = vmap(one)
    return one(buffer, row, index)


def _add(buffer: Any, index: Any, row: Any, lead: int) -> Any:
    if index.ndim == 0:
        # As a scatter it stays apart from a write before it: see `_once`.
        place = (*[slice(None)] * lead, index)
        return buffer.at[place].add(row, mode="clip", unique_indices=True)
    if index.ndim <= lead:
        return _put(buffer, index, _take(buffer, index, lead) + row, lead)

    def one(buffer: Any, index: Any, row: Any) -> Any:
        return buffer.at[index].add(row)

    for _ in range(lead):
        one = vmap(one)
    return one(buffer, index, row)


def _once(row: Any) -> Any:
    """A row that was read, as a value that XLA computes once.

    On CPU it repeats a read in all that uses the row. It does not see then that each of them
    comes before the next write, and copies the buffer, at every step. What it does not repeat
    is a division. This one is by one; what is not a number stays so.
    """
    if not jnp.issubdtype(row.dtype, jnp.floating):
        return row
    return row / jnp.where(row != row, 2, 1).astype(row.dtype)


def masked(where: Any, new: Any, old: Any) -> Any:
    """`new` where `where` holds, which has the first axes of both."""
    where = jnp.asarray(where)
    return jnp.where(where.reshape(where.shape + (1,) * (new.ndim - where.ndim)), new, old)


# -- read --------------------------------------------------------------------------------


def _run_read(buffer: Any, index: Any, *, lead: int) -> Any:
    return [_once(_take(buffer, index, lead)), buffer]


def _read_types(buffer: Any, index: Any, *, lead: int) -> Any:
    return [_row_type(buffer, index, lead), buffer], set()


@cached_type
def _row_type(buffer: Any, index: Any, lead: int) -> Any:
    (row,) = make_jaxpr(functools.partial(_take, lead=lead))(buffer, index).out_avals
    return row


def _read_jvp(primals: Any, tangents: Any, *, lead: int) -> Any:
    buffer, index = primals
    out = _read.bind(buffer, index, lead=lead)
    if isinstance(tangents[0], Zero):
        return out, [Zero(typeof(each).to_tangent_aval()) for each in out]
    return out, _read.bind(tangents[0], index, lead=lead)


def _read_transpose(cotangents: Any, buffer: Any, index: Any, *, lead: int) -> Any:
    row, rest = cotangents
    if isinstance(row, Zero):
        return [rest, None]
    return [_add(instantiate_zeros(rest), index, row, lead), None]


def _read_batch(axis: VmapAxis, operands: Any, axes: Any, *, lead: int) -> Any:
    (buffer, index), (at, index_at) = operands, axes
    if at is None and index_at is None:
        return _read.bind(buffer, index, lead=lead), (None, None)
    if at is not None:
        buffer = jnp.moveaxis(buffer, at, 0)
        if index_at is not None:
            index = jnp.moveaxis(index, index_at, 0)
            index = _spread(index, buffer.shape[: lead + 1])
        elif index.ndim:
            index = jnp.broadcast_to(index, (axis.size, *index.shape))
        return _read.bind(buffer, index, lead=lead + 1), (0, 0)
    # Several reads of one buffer.
    if index.ndim == 1 and lead:
        index = jnp.broadcast_to(index, (*buffer.shape[:lead], axis.size))
    else:
        index = jnp.moveaxis(index, index_at, lead)
    return _read.bind(buffer, index, lead=lead), (lead, None)


def _spread(value: Any, shape: Sequence[int]) -> Any:
    """A value for each place of the first axis, as one for each of all of these axes."""
    if value.ndim >= len(shape):
        return value
    value = value.reshape(value.shape + (1,) * (len(shape) - value.ndim))
    return jnp.broadcast_to(value, tuple(shape))


_read = primitive("read_row", _run_read, _read_types, _read_batch, _read_transpose)
set_jvp(_read, _read_jvp)


# -- write -------------------------------------------------------------------------------


def _run_write(
    buffer: Any, index: Any, row: Any, where: Any, *, lead: int, done: bool, fresh: bool
) -> Any:
    if done:
        return [buffer]
    return [_put(buffer, index, masked(where, row, _take(buffer, index, lead)), lead)]


def _write_types(
    buffer: Any, index: Any, row: Any, where: Any, *, lead: int, done: bool, fresh: bool
) -> Any:
    return [buffer], set()


def _write_jvp(primals: Any, tangents: Any, *, lead: int, done: bool, fresh: bool) -> Any:
    buffer, index, row, where = primals
    out = _write.bind(buffer, index, row, where, lead=lead, done=done, fresh=fresh)
    into, _, of, _ = tangents
    if isinstance(into, Zero) and isinstance(of, Zero):
        return out, [into]
    into, of = instantiate_zeros(into), instantiate_zeros(of)
    return out, _write.bind(into, index, of, where, lead=lead, done=False, fresh=fresh)


def _write_transpose(
    cotangents: Any,
    buffer: Any,
    index: Any,
    row: Any,
    where: Any,
    *,
    lead: int,
    done: bool,
    fresh: bool,
) -> Any:
    (after,) = cotangents
    if isinstance(after, Zero):
        return [None] * 4
    before = of = None
    old = _once(_take(after, index, lead))
    if isinstance(row, UndefinedPrimal):
        of = masked(where, old, jnp.zeros_like(old))
    if isinstance(buffer, UndefinedPrimal):
        # Nothing is beyond infinity. Zeros that do not depend on what was read might be put
        # in its place before it is read, for all that XLA knows, which would copy the buffer.
        nothing = (abs(old) > jnp.inf).astype(old.dtype)
        none = masked(where, nothing, old)
        before = after if fresh else _put(after, index, none, lead)
    return [before, None, of, None]


def _write_batch(
    axis: VmapAxis, operands: Any, axes: Any, *, lead: int, done: bool, fresh: bool
) -> Any:
    def mapped(value: Any, at: Any) -> Any:
        if at is None:
            return jnp.broadcast_to(value, (axis.size, *value.shape))
        return jnp.moveaxis(value, at, 0)

    (buffer, index, row, where), (at, index_at, row_at, where_at) = operands, axes
    if (done and at is None) or all(place is None for place in axes):
        return _write.bind(buffer, index, row, where, lead=lead, done=done, fresh=fresh), [None]
    buffer = mapped(buffer, at)
    row = mapped(row, row_at)
    index, where = (
        # One for all may stay one for all.
        value if at is None and not value.ndim else _spread(mapped(value, at), shape)
        for value, at in ((jnp.asarray(index), index_at), (jnp.asarray(where), where_at))
        for shape in [buffer.shape[: lead + 1]]
    )
    lead += 1
    return _write.bind(buffer, index, row, where, lead=lead, done=done, fresh=fresh), [0]


_write = primitive("write_row", _run_write, _write_types, _write_batch, _write_transpose)
set_jvp(_write, _write_jvp)


# -- buffers that are full ----------------------------------------------------------------


def filled(eqn: Any, marks: Sequence[bool]) -> tuple[Any, list[bool]] | None:
    """A read or a write, where the buffers that are marked are full.

    What is written is there already, so that the buffer stays as it is. Its tangent does not.
    """
    if eqn.primitive is _read:
        return eqn, [False, marks[0]]
    if eqn.primitive is _write and marks[0]:
        return eqn.replace(params={**eqn.params, "done": True}), [True]
    return None
