"""Things in a few words: functions, values, types, trees."""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex, SupportsInt, cast

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import AbstractValue

from . import _tree
from ._jax import PyTreeDef
from ._mismatch import Mismatch, key_text, printed, quoted
from ._static import is_number, nodes


def shown(function: Any) -> str:
    """A function by its name and place: `step` (rollout.py:31)."""
    name, place = named(function), _place(function)
    return f"`{name}` ({place})" if place else f"`{name}`"


def named(function: Any) -> str:
    """The name of any callable."""
    inner = _innermost(function)
    if isinstance(inner, type):
        return inner.__qualname__
    name = getattr(inner, "__qualname__", None) or getattr(inner, "__name__", None)
    if name is None:
        return f"{type(inner).__name__}.__call__"
    return name.rpartition("<locals>.")[2]


def _innermost(function: Any) -> Any:
    while isinstance(function, (functools.partial, eqx.Partial)):
        function = cast(Any, function).func
    return function


def _place(function: Any) -> str:
    inner = _innermost(function)
    if not hasattr(inner, "__code__") and not hasattr(inner, "__wrapped__"):
        inner = cast(Any, type)(inner).__call__
    try:
        code = inspect.unwrap(inner).__code__
    except (AttributeError, ValueError):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def is_array_type(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "update")


def type_text(aval: Any) -> str:
    """The type of an array, as JAX writes it: `float32[3,4]`."""
    return str(aval).lstrip("~")


def described(value: Any) -> str:
    """A static value, an array's type, or a tree's structure, in a few words."""
    return _unless_it_fails(_described, value, _clipped(value))


def _unless_it_fails(say: Callable[[Any], str], value: Any, otherwise: str) -> str:
    # A value of the user's may fail whatever it is asked.
    try:
        return say(value)
    except Exception:
        return otherwise


def _described(value: Any) -> str:
    if isinstance(value, AbstractValue):
        return type_text(value)
    if isinstance(value, PyTreeDef):
        return _structure_text(value)
    if value is None:
        return "None"
    if is_number(value):
        return f"{_clipped(value)} ({type(value).__name__})"
    if isinstance(value, str):
        return quoted(value) if len(value) <= 60 else _clipped(value)
    if isinstance(value, type):
        return f"<class {cast(Any, value).__qualname__}>"
    if callable(value) and (name := getattr(_innermost(value), "__name__", None)):
        kind = "method" if hasattr(value, "__self__") else "function"
        return f"<{kind} {name}>"
    return _clipped(value)


def _clipped(value: Any, limit: int = 60) -> str:
    text = " ".join(printed(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _structure_text(treedef: Any) -> str:
    kind, metadata, count, _ = next(nodes(treedef))
    name = kind.__name__
    # An acronym is said letter by letter.
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOUaeiou"
    article = "an" if name[0] in vowels else "a"
    if kind is dict:
        return f"a dict with keys {', '.join(map(quoted, metadata))}" if count else "{}"
    if kind in (tuple, list):
        return f"{article} {name} of length {count}"
    return f"{article} {name}"


def sides(mismatch: Mismatch) -> tuple[str, str]:
    """What stood there before, and what after, in words that differ."""
    before, after = mismatch.before, mismatch.after
    match mismatch.kind:
        case "new":
            return f"no {key_words(after)}", f"the {key_words(after)}"
        case "missing":
            return f"the {key_words(before)}", f"no {key_words(before)}"
        case "length":
            return f"length {before}", f"length {after}"
        case "metadata":
            was, now = _told_apart(before, after)
            return f"metadata {was}", f"metadata {now}"
        case _:
            return _told_apart(before, after)


def key_words(key: Any) -> str:
    """A key or a field, by its name."""
    if isinstance(key, jtu.DictKey):
        return f"key {quoted(key.key)}"
    if isinstance(key, jtu.GetAttrKey):
        return f"field {key.name}"
    return key_text(key).strip("[]<>")


def _told_apart(before: Any, after: Any) -> tuple[str, str]:
    was, now = described(before), described(after)
    if was != now:
        return was, now
    # Two things that read the same need to be told apart.
    parts_before, parts_after = (_unless_it_fails(_parts, each, "") for each in (before, after))
    if parts_before != parts_after:
        return f"{was}{parts_before}", f"{now}{parts_after}"
    return was, f"another {now}"


def _parts(value: Any) -> str:
    """What else there is to say of a value."""
    if isinstance(value, functools.partial):
        partial = cast(Any, value)
        arguments = [_clipped(argument, 20) for argument in partial.args]
        arguments += [f"{key}={_clipped(v, 20)}" for key, v in partial.keywords.items()]
        return f" with {', '.join(arguments)}"
    if hasattr(value, "__self__"):
        return f" of {_clipped(value.__self__, 40)}"
    if place := _place(value) if callable(value) else "":
        return f" ({place})"
    return f" ({cast(Any, type)(value).__qualname__})"


def tree_text(tree: Any) -> str:
    if eqx.is_array(tree):
        return type_text(jax.typeof(tree))
    if _tree.is_leaf(tree) or tree is None:
        return described(tree)
    return _structure_text(_tree.structure(tree))


def hint_text(hint: Any) -> str:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = [_HINT_WORDS.get(typing.get_origin(o) or o, str(o)) for o in options]
    return " or ".join(dict.fromkeys(words))


_HINT_WORDS = {
    Callable: "callable",
    Sequence: "a sequence",
    Iterable: "an iterable",
    SupportsIndex: "an integer",
    SupportsInt: "an integer",
    bool: "a boolean",
    str: "a string",
    jax.Array: "an array",
    eqx.nn.State: "an eqx.nn.State",
    np.bool_: "a boolean",
    type(None): "None",
}
