"""When a trace may be used again: tokens that are equal for what no trace can tell apart.

This is finer than `_static.same`, which asks whether a loop changed something. A Python
function counts by identity here, as in JAX: what it closes over may have changed since.
"""

import dataclasses
import functools
import types
import weakref
from collections.abc import Hashable
from typing import Any

import equinox as eqx
import jax
from jax.core import Tracer

from . import _tree
from ._static import array_key, float_key, is_numpy, nodes, type_of


class NoToken(Exception):
    """The value has no token, so that no trace is kept for it."""


# What has a very large number of parts is traced anew sooner than they are gone through.
_MOST_PARTS = 10_000

# Types whose values are equal only if no trace can tell them apart.
_PLAIN = frozenset((type(None), bool, int, str, bytes))

# What a function of C has for a receiver if it is none of a method.
_NO_RECEIVERS = (type(None), types.ModuleType)

# Types that never die.
_IMMORTAL = frozenset((type(None), tuple, list, dict, frozenset))


# There is none in many a place where there could be a tree.
_NOTHING = _tree.structure(None)


class Tokens:
    """Makes tokens. They keep nothing alive that counts by identity.

    `watched` is what must stay alive for the tokens made so far to be good.
    """

    def __init__(self) -> None:
        self._watched: dict[int, Any] = {}
        self._parts = 0
        self._inside: set[int] = set()
        self._known: dict[tuple[int, bool], tuple[Any, Hashable]] = {}
        self._arrays_by_identity = False

    @property
    def watched(self) -> list[Any]:
        return list(self._watched.values())

    def of(self, value: Any) -> Hashable:
        """The token of a static value. Raises `NoToken` if it has none."""
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise NoToken
        kind = type_of(value)
        if kind in _PLAIN:
            return (kind, value)
        if kind is tuple:
            return (kind, *map(self.of, value))
        if kind in (float, complex):
            return (kind, float_key(value))
        if is_numpy(value):
            if value.dtype.hasobject:
                raise NoToken
            return (kind, *array_key(value))
        if isinstance(value, jax.Array):
            return self._of_array(value)
        if isinstance(value, types.MethodType):
            return (kind, self.of(value.__func__), self._of_holder(value.__self__))
        if kind is types.BuiltinMethodType and not isinstance(value.__self__, _NO_RECEIVERS):
            return (kind, value.__name__, self._of_holder(value.__self__))
        if kind is functools.partial:
            return self._of_holder(value)
        if _is_function(value):
            return self._identity(value)
        return self._of_object(value, kind)

    def of_structure(self, treedef: Any) -> Hashable:
        """The token of the structure of a tree."""
        if treedef == _NOTHING:
            return None
        return tuple(
            [
                node
                if node[0] is None
                else (self._of_kind(node[0]), self._of_data(node[1]), *node[2:])
                for node in nodes(treedef)
            ]
        )

    def _of_data(self, data: Any) -> Hashable:
        return None if data is None else self.of(data)

    def _of_object(self, value: Any, kind: Any) -> Hashable:
        # The same object is often found in many places, such as the sign of an absent field.
        key = (id(value), self._arrays_by_identity)
        if key not in self._known:
            # With the object, so that no other one takes its address meanwhile.
            self._known[key] = (value, self._of_new_object(value, kind))
        return self._known[key][1]

    def _of_new_object(self, value: Any, kind: Any) -> Hashable:
        parts: Hashable = None
        if id(value) in self._inside:
            # It holds itself; the rest of it is being gone through already.
            if kind in _IMMORTAL:
                raise NoToken
            return self._identity(value)
        self._inside.add(id(value))
        try:
            if kind is list or issubclass(kind, tuple):
                parts = (tuple(map(self.of, value)), self._of_attributes(value, kind))
            elif kind is dict:
                parts = tuple(map(self.of, value.items()))
            elif kind is frozenset:
                parts = frozenset(map(self.of, value))
            elif kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
                parts = (self._identity(value), self._of_attributes(value, kind))
            elif dataclasses.is_dataclass(value):
                # Their own `==` takes `1` and `True` for the same.
                parts = self._of_attributes(value, kind)
            elif not _tree.is_leaf(value):
                leaves, treedef = _tree.flatten(value)
                parts = (self.of_structure(treedef), tuple(map(self.of, leaves)))
            else:
                parts = (_by_value(value, kind), self._of_attributes(value, kind))
        finally:
            self._inside.discard(id(value))
        return (self._of_kind(kind), parts)

    def _of_kind(self, kind: Any) -> Hashable:
        return kind if kind in _IMMORTAL else self._identity(kind)

    def _of_attributes(self, value: Any, kind: Any) -> Hashable:
        # An object may have been changed since the last call.
        attributes: dict[str, Any] = dict(getattr(value, "__dict__", {}))
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    attributes[name] = getattr(value, name)
        attributes.pop("__weakref__", None)
        return tuple((name, self.of(part)) for name, part in attributes.items())

    def _of_holder(self, value: Any) -> Hashable:
        """The token of a partial application, or of the receiver of a method.

        JAX does not see the arrays in these, and so a trace closes over them. A partial
        application or a Module cannot be changed, so that the arrays in it live as long as
        it does, and so does the trace.
        """
        is_partial = type_of(value) is functools.partial
        if not (is_partial or isinstance(value, eqx.Module)):
            return self.of(value)
        kind = type_of(value)
        try:
            return self._of_parts(value, kind)
        except NoToken:
            if self._arrays_by_identity:
                raise
        self._arrays_by_identity = True
        try:
            return (self._identity(value), self._of_parts(value, kind))
        finally:
            self._arrays_by_identity = False

    def _of_parts(self, value: Any, kind: Any) -> Hashable:
        if kind is functools.partial:
            parts = (value.func, value.args, value.keywords, value.__dict__)
            return (kind, *map(self.of, parts))
        return self._of_object(value, kind)

    def _of_array(self, value: Any) -> Hashable:
        if isinstance(value, Tracer) or not self._arrays_by_identity:
            raise NoToken
        return (jax.Array, id(value))

    def _identity(self, value: Any) -> Hashable:
        try:
            reference = weakref.ref(value)
        except TypeError:
            # Few things can be neither hashed by value nor referred to weakly; NumPy's
            # own functions are some of them, and they live for ever.
            return _Identity(value)
        self._watched[id(value)] = value
        return _WeakIdentity(reference, id(value))


def _is_function(value: Any) -> bool:
    # What wraps a function, as `jax.jit` does, is one too.
    return isinstance(
        value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
    ) or (hasattr(value, "__wrapped__") and not isinstance(value, eqx.Module))


def _by_value(value: Any, kind: Any) -> Hashable:
    # Some values are equal and still can be told apart, such as ranges, or one moment in two
    # time zones. They are not written alike. What has attributes is told apart by those.
    by_text = not hasattr(value, "__dict__") and kind.__repr__ is not object.__repr__
    try:
        hash(value)
        text = repr(value) if by_text else ""
        equal = bool(value == value)
    except Exception as error:
        raise NoToken from error
    if not equal:
        raise NoToken
    return (value, text)


class _Identity:
    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _WeakIdentity:
    # Not a bare `weakref.ref`: that compares what it refers to by `==`, and hashes it.
    __slots__ = ("address", "reference")

    def __init__(self, reference: "weakref.ref[Any]", address: int):
        self.reference = reference
        self.address = address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _WeakIdentity) and self.reference is other.reference

    def __hash__(self) -> int:
        return self.address
