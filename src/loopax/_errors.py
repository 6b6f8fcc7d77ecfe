"""What loopax raises, and all of its wording."""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsInt, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import AbstractValue

from . import _tree
from ._jax import PyTreeDef
from ._mismatch import Mismatch, key_text, quoted
from ._static import is_number, nodes


class Refusal(Exception):
    """What loopax itself raises, as against what the user's functions or JAX raise."""


class ArgumentError(Refusal, TypeError):
    """An argument, or what a function returned, is of the wrong kind."""


class LengthError(Refusal, ValueError):
    """The number of steps is not given, or is given in ways that disagree."""


class MismatchError(Refusal, TypeError):
    """A tree came back different in something that a loop may not change.

    Raised while tracing, before anything has run. All differences are reported at once.
    `mismatches` holds them as a tuple of `Mismatch(path, kind, before, after)`; the
    message is one rendering of it.

    !!! Example

        ```python
        import jax.numpy as jnp
        import loopax

        def step(carry, x):
            return {"total": carry["total"] + x, "phase": "late"}, None

        try:
            loopax.filter_scan(step, {"total": 0.0, "phase": "early"}, jnp.ones(3))
        except loopax.MismatchError as error:
            assert [m.path for m in error.mismatches] == [
                'carry["phase"]', 'carry["total"]'
            ]
        ```
    """

    mismatches: tuple[Mismatch, ...]

    def __init__(self, message: str, mismatches: Iterable[Mismatch]):
        super().__init__(message)
        self.mismatches = tuple(mismatches)

    def __reduce__(self) -> Any:
        return type(self), (self.args[0], self.mismatches)


def carry_mismatch(
    caller: str, body: Callable[..., Any], mismatches: Sequence[Mismatch]
) -> MismatchError:
    """The body returned another carry than it was given."""
    headline = (
        f"{caller}: {shown(body)} must return the carry it was given, up to array values, but:"
    )
    return MismatchError(_report(headline, mismatches), mismatches)


def element_mismatch(
    caller: str, function: Callable[..., Any], mismatches: Sequence[Mismatch]
) -> MismatchError:
    """The function of an associative scan returned another kind of element."""
    headline = (
        f"{caller}: {shown(function)} must return an element like those it was given, "
        "up to array values, but:"
    )
    return MismatchError(_report(headline, mismatches), mismatches)


def stack_mismatch(caller: str, mismatches: Sequence[Mismatch]) -> MismatchError:
    """The trees to be stacked are not alike."""
    headline = f"{caller}: the trees must be like `trees[0]`, up to array values, but:"
    rows = [(m.path, *_sides(m)) for m in mismatches]
    widths = [max(len(row[column]) for row in rows) for column in (0, 2)]
    lines = [
        f"  {path:<{widths[0]}}   has {now:<{widths[1]}}   where trees[0] has {was}"
        for path, was, now in rows
    ]
    advice = "Leave out what differs, or make it an array."
    return MismatchError("\n".join([headline, "", *lines, "", advice]), mismatches)


def branch_mismatch(
    caller: str,
    branches: dict[str, Callable[..., Any]],
    mismatches: Sequence[Sequence[Mismatch]],
) -> MismatchError:
    """The branches do not agree on what they return.

    `branches` are by the name of their parameter. `mismatches` has for each branch those
    with the first.
    """
    found = [mismatch for each in mismatches for mismatch in each]
    who = [f"{name} {shown(branch)}" for name, branch in branches.items()]
    rows: list[tuple[str, str, str]] = []
    for path in dict.fromkeys(mismatch.path for mismatch in found):
        # What stands there, and in which branches. Of several differences at one path,
        # such as several keys, each is told.
        told: dict[str, list[str]] = {}
        for number, each in enumerate(mismatches):
            here = [_sides(mismatch) for mismatch in each if mismatch.path == path]
            for before, after in here:
                told.setdefault(before, [who[0]])
                told.setdefault(after, []).append(who[number])
        first = next(iter(told))
        told[first] += [
            who[number]
            for number, each in enumerate(mismatches[1:], 1)
            if not any(mismatch.path == path for mismatch in each)
        ]
        labels = [path] + [""] * (len(told) - 1)
        rows += [
            (label, text, ", ".join(names))
            for label, (text, names) in zip(labels, told.items(), strict=True)
        ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [
        f"  {label:<{widths[0]}}   {text:<{widths[1]}}   from {names}"
        for label, text, names in rows
    ]
    headline = f"{caller}: the branches must return the same, up to array values, but:"
    advice = [f"  * {hint}" for hint in _hints(found, _branch_hint)]
    return MismatchError("\n".join([headline, "", *lines, "", *advice]).rstrip(), found)


def _report(headline: str, mismatches: Sequence[Mismatch]) -> str:
    rows = [(m.path, *_columns(m)) for m in mismatches]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [
        f"  {path:<{widths[0]}}   {f'{was:<{widths[1]}}   ' if widths[1] else ''}{came}"
        for path, was, came in rows
    ]
    advice = [_ALL_STATIC] if any(m.kind != "array" for m in mismatches) else []
    advice += [f"  * {hint}" for hint in _hints(mismatches, _carry_hint)]
    return "\n".join([headline, "", *lines, "", *advice]).rstrip()


_ALL_STATIC = "Anything that is not an array is static: it keeps one value for the whole loop."


# -- describing things -------------------------------------------------------------------


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
    while isinstance(function, functools.partial) or hasattr(function, "keywords"):
        function = function.func
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


def _is_array_type(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "update")


def type_text(aval: Any) -> str:
    """The type of an array, as JAX writes it: `float32[3,4]`."""
    return str(aval).lstrip("~")


def described(value: Any) -> str:
    """A static value, an array's type, or a tree's structure, in a few words."""
    if isinstance(value, AbstractValue):
        return type_text(value)
    if isinstance(value, PyTreeDef):
        return _structure_text(value)
    if value is None:
        return "None"
    if is_number(value):
        return f"{value!r} ({type(value).__name__})"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, type):
        return f"<class {cast(Any, value).__qualname__}>"
    if callable(value) and (name := getattr(_innermost(value), "__name__", None)):
        kind = "method" if hasattr(value, "__self__") else "function"
        return f"<{kind} {name}>"
    return _clipped(value)


def _clipped(value: Any, limit: int = 60) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _structure_text(treedef: Any) -> str:
    kind, metadata, count = next(nodes(treedef))
    name = kind.__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    if kind is dict:
        return f"a dict with keys {', '.join(map(quoted, metadata))}" if count else "{}"
    if kind in (tuple, list):
        return f"{article} {name} of length {count}"
    return f"{article} {name}"


def _columns(mismatch: Mismatch) -> tuple[str, str]:
    before, after = _sides(mismatch)
    match mismatch.kind:
        case "new":
            return "", f"came back with {after}"
        case "missing":
            return "", f"came back without {before}"
        case "length" | "metadata":
            return f"had {before}", f"came back with {after}"
        case _:
            return f"was {before}", f"came back as {after}"


def _sides(mismatch: Mismatch) -> tuple[str, str]:
    """What stood there before, and what after, in words that differ."""
    before, after = mismatch.before, mismatch.after
    match mismatch.kind:
        case "new":
            return f"no {_key_words(after)}", f"a new {_key_words(after)}"
        case "missing":
            return f"the {_key_words(before)}", f"no {_key_words(before)}"
        case "length":
            return f"length {before}", f"length {after}"
        case "metadata":
            was, now = _told_apart(before, after)
            return f"metadata {was}", f"metadata {now}"
        case _:
            return _told_apart(before, after)


def _key_words(key: Any) -> str:
    if isinstance(key, jtu.DictKey):
        return f"key {quoted(key.key)}"
    return f"field {key_text(key).lstrip('.')}"


def _told_apart(before: Any, after: Any) -> tuple[str, str]:
    was, now = described(before), described(after)
    if was != now:
        return was, now
    # Two things that read the same need to be told apart.
    parts_before, parts_after = _parts(before), _parts(after)
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


# -- advice ------------------------------------------------------------------------------


def _hints(
    mismatches: Sequence[Mismatch], hint: Callable[[Mismatch], Iterable[str]]
) -> Iterator[str]:
    """What to do. Paths that need the same are named together."""
    paths: dict[str, dict[str, None]] = {}
    for mismatch in mismatches:
        for advice in hint(mismatch):
            paths.setdefault(advice, {})[mismatch.path] = None
    for advice, at in paths.items():
        first = ", ".join(list(at)[:3])
        more = f" and {len(at) - 3} more" if len(at) > 3 else ""
        one = len(at) == 1
        yield advice.format(
            paths=first + more,
            is_a="is a" if one else "are each a",
            it="it" if one else "them",
        )


def _carry_hint(mismatch: Mismatch) -> Iterator[str]:
    before, after = mismatch.before, mismatch.after
    to_array = isinstance(after, AbstractValue)
    match mismatch.kind:
        case "array":
            yield from _array_hints(before, after)
        case "static":
            yield f"{{paths}}: return an array there, {_braced(type_text(before))}."
        case "value" | "type" if before is None and to_array:
            yield f"{{paths}}: None is static too. Start from {_braced(_start(after))}."
        case "value" | "type" if before is None:
            yield "{paths}: None is static too. Start from what the body returns."
        case "value" if is_number(before):
            yield (
                f"{{paths}} {{is_a}} Python {type(before).__name__}. To change {{it}} in the "
                f"loop, start from an array, jnp.asarray({before!r}), or pass "
                "trace_numbers=True."
            )
        case "value" if to_array:
            yield "{paths}: return what was there before, or start from an array."
        case "value":
            yield _value_hint(before, after)
        case "field":
            yield (
                "{paths}: declared static, and part of the structure. What is to change has "
                "to be an array in an ordinary field."
            )
        case "new":
            yield "{paths}: start with it in place, or do not add it in the loop."
        case "missing":
            yield "{paths}: return it too, or leave it out from the start."
        case "length":
            yield (
                "{paths}: it keeps its length. To collect something at each step, return it "
                "besides the carry, or write into an array."
            )
        case "type":
            yield "{paths}: return what was there before, or start from what is returned."
        case "metadata":
            yield "{paths}: metadata are part of the structure. Keep them as they are."


def _value_hint(before: Any, after: Any) -> str:
    code = getattr(before, "__code__", None)
    if code is not None and code is getattr(after, "__code__", None):
        if hasattr(before, "__self__"):
            return "{paths}: it is a method of another object. Return the one that was there."
        return (
            "{paths}: it was made anew, over other values. Make it once, outside of the "
            "loop, or carry those values as arrays."
        )
    if _is_function(before) and _is_function(after):
        return (
            "{paths}: to choose between functions in the loop, carry an index and call "
            "loopax.filter_switch."
        )
    return "{paths}: keep what changes in an array, or leave it out."


def _is_function(value: Any) -> bool:
    # JAX's own have types of their own, so that a name has to do for a sign.
    return callable(value) and hasattr(value, "__name__") and not isinstance(value, type)


def _branch_hint(mismatch: Mismatch) -> Iterator[str]:
    before, after = mismatch.before, mismatch.after
    match mismatch.kind:
        case "array":
            yield "{paths}: return arrays of one type, with .astype for example."
        case "value" if is_number(before) and is_number(after):
            yield (
                "{paths}: Python numbers are static. To return different ones, return "
                f"arrays, jnp.asarray({before!r}), or pass trace_numbers=True."
            )
        case "value" | "static" | "field" | "metadata":
            yield (
                "{paths}: anything that is not an array is static, and must not depend on "
                "which branch runs. Return an array there, or the same from each branch."
            )
        case _:
            yield "{paths}: return trees of one form from each branch."


def _array_hints(before: Any, after: Any) -> Iterator[str]:
    if not (_is_array_type(before) and _is_array_type(after)):
        return
    keys = [jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) for aval in (before, after)]
    if any(keys):
        if all(keys) and before.dtype != after.dtype:
            yield "{paths}: keep to one implementation of random keys, their `impl`."
        elif not all(keys):
            yield (
                "{paths}: keep to one kind of random key. jax.random.key makes typed keys, "
                "jax.random.PRNGKey makes arrays of integers."
            )
            return
    elif before.dtype != after.dtype:
        yield (
            f"{{paths}}: cast {{it}} back with .astype({_dtype_text(before.dtype)}), "
            f"or start from {_dtype_text(after.dtype, prefix='')}."
        )
    if before.shape != after.shape:
        yield (
            f"{{paths}}: an array keeps its shape for the whole loop. Return shape "
            f"{before.shape}, or start from shape {after.shape}."
        )
    elif before.dtype == after.dtype:
        yield _placement_hint(before, after)


def _placement_hint(before: Any, after: Any) -> str:
    missing = sorted(_varying(after) - _varying(before))
    if missing:
        return (
            "{paths}: start from a value that varies over the same axes, "
            f"jax.lax.pcast(..., {tuple(missing)!r}, to='varying')."
        )
    return (
        "{paths}: start from a value with the same sharding, by jax.device_put, or change it "
        "back in the body, by jax.sharding.reshard."
    )


def _dtype_text(dtype: Any, prefix: str = "jnp.") -> str:
    return prefix + np.dtype(dtype).name.replace("bool", "bool_" if prefix else "bool")


def _varying(aval: Any) -> frozenset[str]:
    # Called `vma` first, and part of `mat` since JAX 0.10.
    manual = getattr(aval, "mat", None)
    names = getattr(aval, "vma", ()) if manual is None else manual.varying
    return frozenset(names or ())


def _start(aval: Any) -> str:
    """Something of the type `aval`, to start from."""
    if _is_array_type(aval) and jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return "a key, jax.random.key(0)"
    if _is_array_type(aval):
        return f"an array, jnp.zeros({tuple(aval.shape)}, {_dtype_text(aval.dtype)})"
    return type_text(aval)


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


# -- other refusals ----------------------------------------------------------------------


def length_conflict(
    caller: str, root: str, found: Sequence[tuple[str, Any, int]], length: int | None
) -> LengthError:
    """The arrays in an argument, and `length`, do not agree on how long they are."""
    names = max(len(name) for name, _, _ in found)
    kinds = max(len(type_text(aval)) for _, aval, _ in found)
    rows = [
        f"  {name:<{names}}   {type_text(aval):<{kinds}}   "
        f"has length {aval.shape[axis]} along axis {axis}"
        for name, aval, axis in found
    ]
    if length is None:
        headline = f"{caller}: the arrays in `{root}` must be of one length, but:"
    else:
        headline = (
            f"{caller}: `length` is {length}, and the arrays in `{root}` must agree, but:"
        )
    return LengthError("\n".join([headline, "", *rows]))


def not_a_pair(caller: str, body: Callable[..., Any], result: Any) -> ArgumentError:
    """The body of a scan returned something else than `(carry, y)`."""
    return ArgumentError(
        f"{caller}: {shown(body)} must return a pair (carry, y), but returned "
        f"{_tree_text(result)}. If there is nothing to collect, return (carry, None)."
    )


def not_a_predicate(caller: str, function: Callable[..., Any], result: Any) -> ArgumentError:
    """The predicate of a while loop returned something else than a boolean scalar."""
    hint = ""
    if eqx.is_array_like(result):
        aval = jax.typeof(result)
        hints = [] if aval.dtype == bool else ["Compare it with something."]
        if aval.shape:
            hints.append("Reduce it, with jnp.any or jnp.all.")
        hint = "".join(f" {text}" for text in hints)
    return ArgumentError(
        f"{caller}: {shown(function)} must return a boolean scalar, but returned "
        f"{_tree_text(result)}.{hint}"
    )


def _tree_text(tree: Any) -> str:
    if eqx.is_array(tree):
        return type_text(jax.typeof(tree))
    if _tree.is_leaf(tree) or tree is None:
        return described(tree)
    return _structure_text(_tree.structure(tree))


def not_a_choice(caller: str, name: str, expected: str, value: Any) -> ArgumentError:
    """The predicate of a cond, or the index of a switch, is of the wrong kind."""
    return ArgumentError(
        f"{caller}: `{name}` must be a scalar, {expected}, but is {_tree_text(value)}."
    )


def wrong_argument(caller: str, name: str, hint: Any, value: Any) -> ArgumentError:
    """An argument is not of the type that its parameter has."""
    return ArgumentError(
        f"{caller}: `{name}` must be {_hint_text(hint)}, but is {_tree_text(value)}."
    )


def _hint_text(hint: Any) -> str:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = [_HINT_WORDS.get(typing.get_origin(o) or o, str(o)) for o in options]
    return " or ".join(dict.fromkeys(words))


_HINT_WORDS = {
    Callable: "callable",
    Sequence: "a sequence",
    SupportsInt: "an integer",
    bool: "a boolean",
    np.bool_: "a boolean",
    type(None): "None",
}
