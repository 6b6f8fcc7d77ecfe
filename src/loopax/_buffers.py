"""`Buffer`: what a body gets in place of an array that `buffers=` names."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.tree_util as jtu

from . import _tree
from ._adjoint.rows import read, write
from ._errors import ArgumentError
from ._jax import jnp, same_trace, tree_at
from ._split import Static
from ._static import is_scalar
from ._words import tree_text, type_text


class _Latest:
    """The last version of a buffer. All of its versions share it."""

    def __init__(self, array: Any):
        self.array = array
        self.version = 0


@jtu.register_pytree_node_class
class Buffer:
    """A buffer of rows, each written once, as the body of a loop sees it.

    The arrays that `buffers=` names come to the body as these. There are two things to do:

    - `buffer.at[i].set(row)` returns the buffer with row `i` written;
        `buffer.at[i].set(row, where=condition)` writes it if a condition holds. An index
        beyond the end writes nothing; a negative one counts from the end.
    - `buffer[i]` is row `i`, which has to be written already, at this step or before.

    They are made by the loops, not by users.

    A write and a read take the time of one row, forwards and backwards. As an array the
    gradient of each would take the time of the whole buffer.
    """

    def __init__(self, array: Any, active: Any, latest: _Latest | None = None):
        self._array = array
        # Whether what is written counts: under `jax.vmap` other lanes may go on for longer.
        self._active = active
        self._latest = latest if latest is not None else _Latest(array)
        self._version = self._latest.version

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self._latest.array, self._active), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "Buffer":
        return cls(*children)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    @property
    def ndim(self) -> int:
        return self._array.ndim

    @property
    def size(self) -> int:
        return self._array.size

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def at(self) -> "_At":
        return _At(self)

    def __getitem__(self, index: Any) -> Any:
        place = _row_number(self, index)
        self._check_latest()
        if not len(self):
            raise ArgumentError("buffer[i]: the buffer has no rows.")
        latest = self._latest
        row, after = read(latest.array, _clipped(place, len(self)))
        if same_trace(after, latest.array):
            # Read within a function of its own, such as a branch, it is not to leave that.
            latest.array = after
        return row

    def _set(self, index: Any, row: Any, where: Any) -> "Buffer":
        place = _row_number(self, index)
        self._check_latest()
        if where is not None and not is_scalar(where, "b"):
            raise ArgumentError(
                "buffer.at[i].set: `where` must be a boolean scalar, but is "
                f"{tree_text(where)}."
            )
        row = jnp.asarray(row)
        if row.dtype != self.dtype and jnp.result_type(row, self._array) != self.dtype:
            raise ArgumentError(
                f"buffer.at[i].set: the rows are {self.dtype.name}, and the value is "
                f"{type_text(jax.typeof(row))}. Cast it with .astype."
            )
        try:
            row = jnp.broadcast_to(row, self.shape[1:]).astype(self.dtype)
        except ValueError:
            raise ArgumentError(
                f"buffer.at[i].set: a row has the shape {self.shape[1:]}, and the value is "
                f"{type_text(jax.typeof(row))}."
            ) from None
        if not len(self):
            return self
        inside = (place >= 0) & (place < len(self))
        where = self._active & inside if where is None else self._active & inside & where
        latest = self._latest
        after = write(latest.array, _clipped(place, len(self)), row, where)
        if not same_trace(after, latest.array):
            return Buffer(after, self._active)
        latest.array = after
        latest.version += 1
        return Buffer(self._array, self._active, latest)

    def _check_latest(self) -> None:
        if self._version != self._latest.version:
            raise ArgumentError(
                "A buffer was used after a row of it was written. Go on with what "
                "`buffer.at[i].set(row)` returned."
            )

    def __jax_array__(self) -> Any:
        raise ArgumentError(_ONLY_ROWS)

    def __setitem__(self, index: Any, row: Any) -> None:
        raise ArgumentError(_ONLY_ROWS)

    def __getattr__(self, name: str) -> Any:
        # What an array has, and a buffer does not.
        if hasattr(jax.Array, name) and not name.startswith("__"):
            raise ArgumentError(f"buffer.{name}: {_ONLY_ROWS}")
        raise AttributeError(f"a buffer has no {name!r}")

    def _refused(self, *_: Any) -> Any:
        raise ArgumentError(_ONLY_ROWS)

    __iter__ = __bool__ = __neg__ = __abs__ = __invert__ = _refused
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refused
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __and__ = __or__ = __xor__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refused
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Buffer({type_text(jax.typeof(self._array))})"


_ONLY_ROWS = (
    "A buffer is no array: the body of a loop may write a row, `buffer.at[i].set(row)`, and "
    "read one, `buffer[i]`. For anything else leave the array out of `buffers`."
)


class _At:
    def __init__(self, buffer: Buffer):
        self._buffer = buffer

    def __getitem__(self, index: Any) -> "_Row":
        return _Row(self._buffer, index)


class _Row:
    def __init__(self, buffer: Buffer, index: Any):
        self._buffer = buffer
        self._index = index

    def set(self, row: Any, *, where: Any = None) -> Buffer:
        """The buffer with the row written, if `where` holds."""
        return self._buffer._set(self._index, row, where)  # pyright: ignore[reportPrivateUsage]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ArgumentError(
            f"buffer.at[i].{name}: a row can only be set, `buffer.at[i].set(row)`, and only "
            "once. To read it, take `buffer[i]`."
        )


def _row_number(buffer: Buffer, index: Any) -> Any:
    if isinstance(index, tuple) and len(cast(Any, index)) == 1:
        index = cast(Any, index)[0]
    try:
        aval = jax.typeof(index)
        valid = aval.shape == () and jnp.issubdtype(aval.dtype, jnp.integer)
    except TypeError:
        valid = False
    if not valid:
        raise ArgumentError(
            "buffer[i]: `i` must be an integer, the number of a row along the first axis, "
            f"but is {tree_text(index)}."
        )
    index = jnp.asarray(index)
    return (
        jnp.where(index < 0, index + len(buffer), index) if index.dtype.kind == "i" else index
    )


def _clipped(index: Any, length: int) -> Any:
    return jnp.clip(index, 0, length - 1).astype(jnp.int32)


def _array_of(leaf: Any) -> Any:
    return _tree.leaves(leaf)[0] if _is_buffer(leaf) else leaf


def _is_buffer(value: Any) -> bool:
    return isinstance(value, Buffer)


# -- where they are ----------------------------------------------------------------------


class _Place:
    """Stands for an array, to see which of them `buffers` picks."""

    def __init__(self, number: int):
        self.number = number

    def __repr__(self) -> str:
        return "an array"


def places(caller: str, where: Callable[..., Any] | None, static: Static) -> tuple[int, ...]:
    """Which arrays of the carry are buffers."""
    if where is None:
        return ()
    marked = static.merge(_Place(number) for number in range(static.num_arrays))
    try:
        picked = _tree.leaves(where(marked), is_leaf=_is_buffer)
    except Exception as error:
        raise ArgumentError(
            f"{caller}: `buffers` must pick arrays out of the carry, as in "
            f"`buffers=lambda carry: carry.history`, but failed: {error!r}."
        ) from error
    # The first child of a buffer of an outer loop is the array.
    picked = [_tree.leaves(each)[0] if _is_buffer(each) else each for each in picked]
    for each in picked:
        if not isinstance(each, _Place):
            raise ArgumentError(
                f"{caller}: `buffers` must pick arrays out of the carry, but picked "
                f"{tree_text(each)}."
            )
    if not picked:
        raise ArgumentError(
            f"{caller}: `buffers` must pick arrays out of the carry, but picked none."
        )
    numbers = [each.number for each in picked]
    if len(set(numbers)) < len(numbers):
        raise ArgumentError(f"{caller}: `buffers` picked an array twice.")
    return tuple(sorted(numbers))


def woven(at: Sequence[int], carry: Sequence[Any], buffers: Sequence[Any]) -> list[Any]:
    """The arrays of a carry, of which those at some places are kept apart."""
    rest, kept = iter(carry), dict(zip(at, buffers, strict=True))
    count = len(carry) + len(buffers)
    return [kept[place] if place in kept else next(rest) for place in range(count)]


def unwoven(at: Sequence[int], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The opposite of `woven`."""
    rest = [array for place, array in enumerate(arrays) if place not in at]
    return rest, [arrays[place] for place in at]


class Loan:
    """The buffers of one run of a body: handed out before, taken back after."""

    def __init__(self, caller: str, where: Callable[..., Any] | None, active: Any = True):
        self._caller = caller
        self._where = where
        self._active = active
        # For a buffer of an outer loop, its mask there.
        self._outer: list[Any] = []

    def out(self, carry: Any) -> Any:
        """The carry with a `Buffer` for each array that is one."""
        return carry if self._where is None else self._replaced(carry, self._lend)

    def back(self, carry: Any) -> Any:
        """The carry that the body returned, with the arrays again."""
        if self._where is None:
            return carry
        rest = iter(self._outer)
        try:
            for each in _tree.leaves(self._where(carry), is_leaf=_is_buffer):
                if isinstance(each, Buffer):
                    # In a tree that is made of this one nobody could tell any more.
                    each._check_latest()  # pyright: ignore[reportPrivateUsage]
            return self._replaced(carry, lambda value: self._return(value, next(rest)))
        except (AttributeError, KeyError, IndexError, StopIteration, TypeError) as error:
            if isinstance(error, ArgumentError):
                raise
            # Another structure. How it differs is found when the carries are compared.
            return _tree.map_leaves(_array_of, carry, is_leaf=_is_buffer)

    def none_in(self, tree: Any) -> Any:
        """`tree`, unless there is a buffer in it."""
        if self._where is not None and any(
            map(_is_buffer, _tree.leaves(tree, is_leaf=_is_buffer))
        ):
            raise ArgumentError(
                f"{self._caller}: the body returned a buffer outside of the carry, which would "
                "be a copy of all of it for each step."
            )
        return tree

    def _replaced(self, carry: Any, one: Callable[[Any], Any]) -> Any:
        def node(value: Any) -> Any:
            return _tree.map_leaves(one, value, is_leaf=_is_buffer)

        return tree_at(self._where, carry, replace_fn=node, is_leaf=_is_buffer)

    def _lend(self, value: Any) -> Any:
        array, mask = _tree.leaves(value) if _is_buffer(value) else (value, None)
        if not jnp.ndim(array):
            raise ArgumentError(
                f"{self._caller}: `buffers` picked {type_text(jax.typeof(array))}, which has "
                "no rows. A buffer has an axis along which they are numbered."
            )
        self._outer.append(mask)
        return Buffer(array, self._active if mask is None else self._active & mask)

    def _return(self, value: Any, mask: Any) -> Any:
        if not isinstance(value, Buffer):
            raise ArgumentError(
                f"{self._caller}: the body was given a buffer, and must return it or what "
                f"`buffer.at[i].set(row)` made of it, but returned {tree_text(value)}."
            )
        array, _ = _tree.leaves(value)
        return array if mask is None else Buffer(array, mask)
