"""What is dynamic, what is static, and when two static values are the same."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import ShapedArray, Tracer

from . import _tree


# Types that are common as leaves and that JAX never takes as values. `jax.typeof` gives
# the same answer for them, but only after formatting an error message.
_NEVER_VALUES = (str, bytes, type, types.FunctionType, types.MethodType)

# Types of JAX's arrays, and of what stands for them in a trace. By their addresses: not all
# types can be hashed.
_arrays: dict[int, type] = {}

# Types that JAX was seen to refuse: it decides by type, and says no by formatting a message
# that has the value in it.
_refused: "weakref.WeakSet[type]" = weakref.WeakSet()


def is_reference(value: Any) -> bool:
    """Whether a value that JAX knows is a mutable reference."""
    return hasattr(jax.typeof(value), "inner_aval")


def is_number(leaf: Any) -> bool:
    """Whether `leaf` is one of Python's own numbers or booleans."""
    # NumPy and JAX have subclasses of these, with a dtype.
    return is_of(leaf, (int, float, complex)) and not hasattr(leaf, "dtype")


def is_dynamic(leaf: Any, trace_numbers: bool) -> bool:
    """Whether a loop may change `leaf`: it is an array, or else a value to JAX."""
    if id(type_of(leaf)) in _arrays:
        return True
    if is_numpy(leaf):
        return _jax_has(leaf.dtype)
    if is_of(leaf, (jax.Array, Tracer)) and eqx.is_array(leaf):
        kind = type_of(leaf)
        _arrays[id(kind)] = kind
        return True
    if is_number(leaf):
        return trace_numbers
    # JAX takes a `ShapeDtypeStruct` for the description of a value, not for a value.
    if is_of(leaf, (*_NEVER_VALUES, jax.ShapeDtypeStruct)) or _is_refused(type_of(leaf)):
        return False
    return _is_value(leaf)


@functools.cache
def _jax_has(dtype: Any) -> bool:
    # NumPy has arrays of objects, strings, dates and more besides. JAX takes those of its
    # newer strings for values, and then has no type for them.
    if dtype.kind == "T":
        return False
    try:
        jax.typeof(np.empty((), dtype))
    except TypeError:
        return False
    return True


def _is_value(leaf: Any) -> bool:
    try:
        jax.typeof(leaf)
    except TypeError:
        with contextlib.suppress(Exception):
            _refused.add(type_of(leaf))
        return False
    except Exception:
        # Either JAX knows this kind of value and refuses it for a reason of its own, which
        # it gives when it is handed the value. Or the value does not let itself be asked, or
        # failed to become part of JAX's message.
        return inspect.getattr_static(type_of(leaf), "__jax_array__", None) is not None
    return True


def _is_refused(kind: Any) -> bool:
    try:
        return kind in _refused
    except Exception:
        # A type that cannot be hashed, by the will of its metaclass.
        return False


def is_held(leaf: Any, trace_numbers: bool) -> bool:
    """Whether `leaf` can go round a loop unchanged, as part of what the loop holds.

    That is, [`is_dynamic`][] but for mutable references, which no loop returns. A trace
    closes over those.
    """
    if not is_dynamic(leaf, trace_numbers):
        return False
    return is_number(leaf) or isinstance(jax.typeof(leaf), ShapedArray)


def is_scalar(value: Any, kinds: str) -> bool:
    """Whether `value` is a scalar of one of NumPy's `kinds`, such as `b` for booleans."""
    if is_number(value):
        # Also one that is too large for JAX, which `lax` brings into range.
        return np.asarray(value).dtype.kind in f"{kinds}{'O' if 'i' in kinds else ''}"
    try:
        aval: Any = jax.typeof(value)
    except TypeError:
        return False
    # The types of random keys are no dtypes of NumPy's.
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and aval.shape == () and dtype.kind in kinds


def is_numpy(value: Any) -> bool:
    """Whether `value` is an array or a scalar of NumPy's."""
    return is_of(value, (np.ndarray, np.generic))


def is_of(value: Any, kinds: Any) -> bool:
    """`isinstance`, by what `value` is and not by what its `__class__` says, as JAX has it."""
    return issubclass(type_of(value), kinds)


# Their kinds as `Any`: a type checker need not follow what is told apart here.
type_of: Callable[[Any], Any] = type


# -- structure ---------------------------------------------------------------------------


def nodes(treedef: Any) -> Iterator[tuple[Any, Any, int, bool]]:
    """The nodes of a tree in preorder: type, metadata, number of children, and whether those
    are all leaves. If they are they do not follow.

    A leaf has neither type nor metadata. Walking the nodes instead of comparing the
    treedefs keeps Python's `==` out of it: that takes `True` for `1`, calls two NaNs
    different, and raises on arrays.
    """
    ahead = [treedef]
    while ahead:
        node = ahead.pop()
        data = node.node_data()
        if data is None:
            yield _LEAF
            continue
        children = node.children()
        count = len(children)
        only_leaves = node.num_leaves == count == node.num_nodes - 1
        yield (*data, count, only_leaves)
        if not only_leaves:
            ahead += reversed(children)


_LEAF = (None, None, 0, False)


def same_structure(before: Any, after: Any) -> bool:
    """Whether two treedefs agree, metadata included."""
    if before is after:
        return True
    if before.num_leaves != after.num_leaves or before.num_nodes != after.num_nodes:
        return False
    pairs = zip(nodes(before), nodes(after), strict=True)
    return all(
        a[0] is b[0] and a[2:] == b[2:] and (a[1] is b[1] or same(a[1], b[1])) for a, b in pairs
    )


# -- equality ----------------------------------------------------------------------------


def same(before: Any, after: Any) -> bool:
    """Whether `before` and `after` are the same static value."""
    return _same(before, after, frozenset())


def _same(a: Any, b: Any, comparing: frozenset[tuple[int, int]]) -> bool:
    if a is b:
        return True
    kind = type_of(a)
    if kind is not type_of(b):
        return False
    # Functions and containers can hold themselves. Whatever is being compared already,
    # further up, is taken to be the same here.
    pair = (id(a), id(b))
    if pair in comparing:
        return True
    recur = functools.partial(_same, comparing=comparing | {pair})
    if is_of(a, (float, complex)):
        return _same_number(a, b)
    if is_numpy(a):
        return array_key(a) == array_key(b)
    if kind in (tuple, list):
        return len(a) == len(b) and all(map(recur, a, b))
    if kind is dict:
        return _typed(a) == _typed(b) and all(recur(a[key], b[key]) for key in a)
    if kind in (set, frozenset):
        return _typed(a) == _typed(b)
    if is_of(a, types.MethodType):
        return recur(a.__func__, b.__func__) and recur(a.__self__, b.__self__)
    if kind is functools.partial:
        return recur(
            (a.func, a.args, a.keywords),
            (b.func, b.args, b.keywords),
        )
    if is_of(a, types.FunctionType):
        return _same_function(a, b, recur)
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        # Their own `==` takes `1` and `True` for the same, and may leave fields out.
        return recur(_fields(a), _fields(b))
    if not _tree.is_leaf(a):
        leaves_a, treedef_a = _tree.flatten(a)
        leaves_b, treedef_b = _tree.flatten(b)
        return same_structure(treedef_a, treedef_b) and recur(leaves_a, leaves_b)
    try:
        answer: Any = a == b
    except Exception:
        return False
    return type_of(answer) in (bool, np.bool_) and bool(answer)


def _same_number(a: Any, b: Any) -> bool:
    return bool(a == b) or float_key(a) == float_key(b)


def _same_function(a: Any, b: Any, recur: Callable[[Any, Any], bool]) -> bool:
    def closure(function: Any) -> list[Any]:
        return [_contents(cell) for cell in function.__closure__ or ()]

    return (
        a.__code__ is b.__code__
        and a.__globals__ is b.__globals__
        and recur(a.__defaults__, b.__defaults__)
        and recur(a.__kwdefaults__, b.__kwdefaults__)
        and recur(a.__dict__, b.__dict__)
        and recur(closure(a), closure(b))
    )


def _typed(items: Any) -> set[tuple[type, Any]]:
    return {(type_of(item), item) for item in items}


def _fields(value: Any) -> dict[str, Any]:
    fields = {
        field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)
    }
    return fields | getattr(value, "__dict__", {})


_EMPTY_CELL = object()


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY_CELL


def float_key(value: Any) -> Hashable:
    """A number as something that is equal for equal numbers only."""
    # Tells 0.0 from -0.0, which a trace can, and takes NaN for NaN.
    if isinstance(value, complex):
        return (float_key(value.real), float_key(value.imag))
    return float(value).hex()


def array_key(value: Any) -> tuple[Hashable, ...]:
    """A NumPy array as something that is equal for equal arrays only."""
    if value.dtype.hasobject:
        # The bytes of such an array are addresses.
        return (value.dtype, value.shape, id(value))
    data = value.tobytes()
    if len(data) > 4096:
        data = hashlib.sha256(data).digest()
    # The dtype itself: as texts, different ones can be equal.
    return (value.dtype, value.shape, data)
