"""What loopax raises."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax

from ._advice import for_branches, for_carry, hints
from ._mismatch import Mismatch
from ._words import hint_text, shown, sides, tree_text, type_text


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
    rows = [(m.path, *sides(m)) for m in mismatches]
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
            here = [sides(mismatch) for mismatch in each if mismatch.path == path]
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
    advice = [f"  * {hint}" for hint in hints(found, for_branches)]
    return MismatchError("\n".join([headline, "", *lines, "", *advice]).rstrip(), found)


def _report(headline: str, mismatches: Sequence[Mismatch]) -> str:
    rows = [(m.path, *_columns(m)) for m in mismatches]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [
        f"  {path:<{widths[0]}}   {f'{was:<{widths[1]}}   ' if widths[1] else ''}{came}"
        for path, was, came in rows
    ]
    advice = [_ALL_STATIC] if any(m.kind != "array" for m in mismatches) else []
    advice += [f"  * {hint}" for hint in hints(mismatches, for_carry)]
    return "\n".join([headline, "", *lines, "", *advice]).rstrip()


_ALL_STATIC = "Anything that is not an array is static: it keeps one value for the whole loop."


def _columns(mismatch: Mismatch) -> tuple[str, str]:
    before, after = sides(mismatch)
    match mismatch.kind:
        case "new":
            return "", f"came back with {after}"
        case "missing":
            return "", f"came back without {before}"
        case "length" | "metadata":
            return f"had {before}", f"came back with {after}"
        case _:
            return f"was {before}", f"came back as {after}"


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
        f"{tree_text(result)}. If there is nothing to collect, return (carry, None)."
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
        f"{tree_text(result)}.{hint}"
    )


def not_a_choice(caller: str, name: str, expected: str, value: Any) -> ArgumentError:
    """The predicate of a cond, or the index of a switch, is of the wrong kind."""
    return ArgumentError(
        f"{caller}: `{name}` must be a scalar, {expected}, but is {tree_text(value)}."
    )


def wrong_argument(caller: str, name: str, hint: Any, value: Any) -> ArgumentError:
    """An argument is not of the type that its parameter has."""
    return ArgumentError(
        f"{caller}: `{name}` must be {hint_text(hint)}, but is {tree_text(value)}."
    )
