"""What to do about a mismatch."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue

from ._mismatch import Mismatch
from ._static import is_number
from ._words import is_array_type, key_words, type_text


@dataclasses.dataclass(frozen=True)
class Words:
    """What the tree goes through, for advice."""

    loop: str = "the loop"
    body: str = "the body"
    a_body: str = "A body"
    throughout: str = "for the whole loop"
    collect: str = "To collect something at each step, return it as the y of a scan"
    or_else: str = ", or pass trace_numbers=True"


LOOP = Words()
LAYERS = Words(
    loop="the layers",
    body="the layer",
    a_body="A layer",
    throughout="from layer to layer",
    collect=(
        "To collect what comes out of each layer, call stacked.with_options(all_outputs=True)"
    ),
    or_else="",
)


def hints(
    mismatches: Sequence[Mismatch],
    hint: Callable[[Mismatch], Iterable[str]],
    words: Words = LOOP,
) -> Iterator[str]:
    """What to do. Paths that need the same are named together."""
    paths: dict[str, dict[str, None]] = {}
    for mismatch in mismatches:
        for advice in _given(hint, mismatch):
            paths.setdefault(advice, {})[mismatch.path] = None
    for advice, at in paths.items():
        first = ", ".join(list(at)[:3])
        more = f" and {len(at) - 3} more" if len(at) > 3 else ""
        one = len(at) == 1
        yield advice.format(
            paths=first + more,
            is_a="is a" if one else "are each a",
            it="it" if one else "them",
            words=words,
        )


def for_carry(mismatch: Mismatch) -> Iterator[str]:
    before, after = mismatch.before, mismatch.after
    to_array = isinstance(after, AbstractValue)
    match mismatch.kind:
        case "array":
            yield from _array_hints(before, after)
        case "static":
            yield f"{{paths}}: return an array of type {_braced(type_text(before))} there."
        case "value" | "type" if before is None and to_array:
            yield f"{{paths}}: None is static too. Start from {_braced(_start(after))}."
        case "value" | "type" if before is None:
            yield "{paths}: None is static too. Start from what {words.body} returns."
        case "value" if isinstance(before, bool):
            yield (
                "{paths} {is_a} Python bool. Set flags outside of {words.loop}. To change {it} "
                f"in {{words.loop}}, start from an array, jnp.asarray({before!r})."
            )
        case "value" if is_number(before):
            yield (
                f"{{paths}} {{is_a}} Python {type(before).__name__}. To change {{it}} in "
                f"{{words.loop}}, start from an array, jnp.asarray({_number_text(before)})"
                "{words.or_else}."
            )
        case "value" if to_array:
            yield "{paths}: return what was there before, or start from an array."
        case "value":
            yield _value_hint(before, after)
        case "field":
            yield (
                "{paths}: it is declared static, and so is part of the structure. What is to "
                "change has to be an array in an ordinary field."
            )
        case "attribute":
            yield (
                "{paths}: changed in place, in an object that is not a PyTree. {words.a_body} "
                "runs once, while it is traced. Make the object an eqx.Module, with arrays for "
                "what changes, and return a new one."
            )
        case "new":
            key = _braced(key_words(after))
            yield (
                f"{{paths}}: start with the {key} in place, or do not add it in {{words.loop}}."
            )
        case "missing":
            key = _braced(key_words(before))
            yield f"{{paths}}: return the {key} too, or leave it out from the start."
        case "length":
            yield (
                "{paths}: a list or tuple keeps its length. {words.collect}, or write into an "
                "array."
            )
        case "type":
            yield (
                "{paths}: return what was there before, or start from what {words.body} "
                "returns."
            )
        case "metadata":
            yield "{paths}: metadata are part of the structure. Keep them as they are."


def _given(hint: Callable[[Mismatch], Iterable[str]], mismatch: Mismatch) -> list[str]:
    try:
        return list(hint(mismatch))
    except Exception:
        # A value of the user's may fail whatever it is asked.
        return []


def _value_hint(before: Any, after: Any) -> str:
    code = getattr(before, "__code__", None)
    if code is not None and code is getattr(after, "__code__", None):
        if hasattr(before, "__self__"):
            return "{paths}: it is a method of another object. Return the one that was there."
        return (
            "{paths}: it was made anew, over other values. Make it once, outside of "
            "{words.loop}, or carry those values as arrays."
        )
    if _is_function(before) and _is_function(after):
        return (
            "{paths}: to choose between functions in {words.loop}, carry an index and call "
            "loopax.filter_switch."
        )
    if type(before) is type(after) and hasattr(before, "__dict__"):
        return (
            "{paths}: not a PyTree, and so one static value. Make it an eqx.Module, so that "
            "the arrays in it are seen, or return the same object."
        )
    return "{paths}: keep what changes in an array, or leave it out."


def _number_text(number: Any) -> str:
    """As one would type it."""
    if isinstance(number, enum.Enum):
        number = number.value
    try:
        text = repr(number)
    except ValueError:
        # Python writes no integers of thousands of digits.
        return "..."
    return text.replace("inf", "jnp.inf").replace("nan", "jnp.nan")


def _is_function(value: Any) -> bool:
    # JAX's own have types of their own, so that a name has to do for a sign.
    return callable(value) and hasattr(value, "__name__") and not isinstance(value, type)


def for_branches(mismatch: Mismatch) -> Iterator[str]:
    before, after = mismatch.before, mismatch.after
    match mismatch.kind:
        case "array":
            yield from _one_type_hints(before, after)
        case "value" if is_number(before) and is_number(after):
            yield (
                "{paths}: Python numbers are static. To return different ones, return "
                f"arrays, jnp.asarray({_number_text(before)}), or pass trace_numbers=True."
            )
        case "value" | "static" | "field" | "metadata":
            yield (
                "{paths}: anything that is not an array is static, and must not depend on "
                "which branch runs. Return an array there, or the same from each branch."
            )
        case _:
            yield "{paths}: return the same structure from each branch."


def _array_hints(before: Any, after: Any) -> Iterator[str]:
    if not (is_array_type(before) and is_array_type(after)):
        return
    keys = [jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) for aval in (before, after)]
    if any(keys):
        if all(keys) and before.dtype != after.dtype:
            yield "{paths}: keep to one implementation of random keys, their `impl`."
        elif not all(keys):
            yield _KINDS_OF_KEYS
            return
    elif before.dtype != after.dtype and not before.weak_type:
        yield (
            f"{{paths}}: cast {{it}} back with .astype({_dtype_text(before.dtype)}), "
            f"or start from {_dtype_text(after.dtype, prefix='')}."
        )
    if before.shape != after.shape:
        yield (
            f"{{paths}}: an array keeps its shape {{words.throughout}}. Return shape "
            f"{before.shape}, or start from shape {after.shape}."
        )
    elif before.dtype == after.dtype:
        yield _placement_hint(before, after)


_KINDS_OF_KEYS = (
    "{paths}: keep to one kind of random key. jax.random.key makes typed keys, "
    "jax.random.PRNGKey makes arrays of integers."
)


def _to_vary(axes: Sequence[str]) -> str:
    if hasattr(jax.lax, "pcast"):
        return f"jax.lax.pcast(..., {tuple(axes)!r}, to='varying')"
    # The name in JAX 0.7.
    return f"jax.lax.pvary(..., {tuple(axes)!r})"


def _placement_hint(before: Any, after: Any) -> str:
    missing = sorted(_varying(after) - _varying(before))
    if missing:
        return (
            "{paths}: start from a value that varies over the same axes, "
            f"{_to_vary(missing)}."
        )
    return (
        "{paths}: start from a value with the same sharding, by jax.device_put, or change it "
        "back in {words.body}, by jax.sharding.reshard."
    )


def _one_type_hints(before: Any, after: Any) -> Iterator[str]:
    if not (is_array_type(before) and is_array_type(after)):
        yield "{paths}: return arrays of one type from each branch."
        return
    keys = [jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) for aval in (before, after)]
    if any(keys) and before.dtype != after.dtype:
        yield _KINDS_OF_KEYS
    elif before.dtype != after.dtype:
        yield "{paths}: return arrays of one dtype; .astype casts."
    if before.shape != after.shape:
        yield "{paths}: return arrays of one shape."
    elif before.dtype == after.dtype:
        differing = sorted(_varying(before) ^ _varying(after))
        if differing:
            yield (
                f"{{paths}}: return values that vary over the same axes, {_to_vary(differing)}."
            )
        else:
            yield ("{paths}: return arrays of one sharding; jax.sharding.reshard changes it.")


def _dtype_text(dtype: Any, prefix: str = "jnp.") -> str:
    return prefix + np.dtype(dtype).name.replace("bool", "bool_" if prefix else "bool")


def _varying(aval: Any) -> frozenset[str]:
    # Called `vma` first, and part of `mat` since JAX 0.10.
    manual = getattr(aval, "mat", None)
    names = getattr(aval, "vma", ()) if manual is None else manual.varying
    return frozenset(names or ())


def _start(aval: Any) -> str:
    """Something of the type `aval`, to start from."""
    if is_array_type(aval) and jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return f"random keys of type {type_text(aval)}"
    if is_array_type(aval):
        return f"an array, jnp.zeros({tuple(aval.shape)}, {_dtype_text(aval.dtype)})"
    return type_text(aval)


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
