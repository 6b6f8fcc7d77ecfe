"""`Buffer`: what a body gets in place of an array that `buffers=` names."""

from typing import Any, cast

import jax
import jax.tree_util as jtu

from ._adjoint.rows import read, write
from ._errors import ArgumentError
from ._jax import jnp, same_trace
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
        # A part of `Buffer` that has an object of its own only for the sake of `.at[i]`.
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
