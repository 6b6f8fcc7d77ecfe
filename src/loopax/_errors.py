"""What loopax raises."""

import collections
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp

from . import _tree
from ._advice import for_branches, for_carry, hints
from ._mismatch import Mismatch, key_text
from ._static import is_number
from ._words import described, hint_text, shown, sides, tree_text, type_text


class Refusal(Exception):
    """What loopax itself raises, as against what the user's functions or JAX raise."""

    # Whether it has left the call that raised it.
    settled = False


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
    return MismatchError(report(headline, mismatches, _for_loops(mismatches)), mismatches)


def element_mismatch(
    caller: str, function: Callable[..., Any], mismatches: Sequence[Mismatch]
) -> MismatchError:
    """The function of an associative scan returned another kind of element."""
    headline = (
        f"{caller}: {shown(function)} must return an element like those it was given, "
        "up to array values, but:"
    )
    return MismatchError(report(headline, mismatches, _for_loops(mismatches)), mismatches)


def stack_mismatch(
    caller: str, root: str, mismatches: Sequence[Mismatch], more_advice: str
) -> MismatchError:
    """The trees to be stacked, the argument of the name `root`, are not alike."""
    headline = f"{caller}: the {root} must be like `{root}[0]`, up to array values, but:"
    rows = [(m.path, *sides(m)) for m in mismatches]
    widths = [max(len(row[column]) for row in rows) for column in (0, 2)]
    lines = [
        f"  {path:<{widths[0]}}   has {now:<{widths[1]}}   where {root}[0] has {was}"
        for path, was, now in rows
    ]
    kinds = {m.kind for m in mismatches}
    advice = "\n".join(
        [
            *(["Arrays must be of one shape and dtype."] if "array" in kinds else []),
            *(["Trees must be of one structure."] if "type" in kinds else []),
            *(
                ["Leave out what else differs, or make it an array."]
                if kinds - {"array", "type"}
                else []
            ),
            *([more_advice] if more_advice else []),
        ]
    )
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
    shown_paths: set[str] = set()
    for fact in dict.fromkeys(map(_fact, found)):
        # What stands there, and in which branches.
        told: dict[str, list[str]] = {}
        for number, each in enumerate(mismatches):
            here = [mismatch for mismatch in each if _fact(mismatch) == fact]
            if here:
                before, after = sides(here[0])
                told.setdefault(before, [])
                told.setdefault(after, []).append(who[number])
        first = next(iter(told))
        told[first] = [
            who[number]
            for number, each in enumerate(mismatches)
            if all(_fact(mismatch) != fact for mismatch in each)
        ]
        label = "" if fact[0] in shown_paths else fact[0]
        shown_paths.add(fact[0])
        for text, names in told.items():
            rows.append((label, text, ", ".join(names)))
            label = ""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [
        f"  {label:<{widths[0]}}   {text:<{widths[1]}}   from {names}"
        for label, text, names in rows
    ]
    headline = f"{caller}: the branches must return the same, up to array values, but:"
    advice = [f"  * {hint}" for hint in hints(found, for_branches)]
    return MismatchError("\n".join([headline, "", *lines, "", *advice]).rstrip(), found)


def _fact(mismatch: Mismatch) -> tuple[str, str]:
    """What a mismatch is about: its path, and which key if it is about one."""
    if mismatch.kind in ("new", "missing"):
        key = mismatch.after if mismatch.kind == "new" else mismatch.before
        return mismatch.path, key_text(key)
    return mismatch.path, ""


# What fits on a screen.
_MOST_ROWS = 30


def report(headline: str, mismatches: Sequence[Mismatch], advice: Sequence[str]) -> str:
    """What came back that is not what was given, a line each, and what to do."""
    rows = [(m.path, *_columns(m)) for m in mismatches[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [
        f"  {path:<{widths[0]}}   {f'{was:<{widths[1]}}   ' if widths[1] else ''}{came}"
        for path, was, came in rows
    ]
    if len(mismatches) > _MOST_ROWS:
        lines.append(f"  ... and {len(mismatches) - _MOST_ROWS} more, see `mismatches`")
    return "\n".join([headline, "", *lines, "", *advice]).rstrip()


def _for_loops(mismatches: Sequence[Mismatch]) -> list[str]:
    advice = [_ALL_STATIC] if any(m.kind != "array" for m in mismatches) else []
    return advice + [f"  * {hint}" for hint in hints(mismatches, for_carry)]


_ALL_STATIC = "Anything that is not an array is static: it keeps one value for the whole loop."


def _columns(mismatch: Mismatch) -> tuple[str, str]:
    before, after = sides(mismatch)
    match mismatch.kind:
        case "new":
            return "", f"came back with {after.replace('the ', 'a new ', 1)}"
        case "missing":
            return "", f"came back without {before}"
        case "length" | "metadata":
            return f"had {before}", f"came back with {after}"
        case _:
            return f"was {before}", f"came back as {after}"


def length_conflict(
    caller: str,
    root: str,
    tree: Any,
    found: Sequence[tuple[str, Any, int]],
    length: int | None,
) -> LengthError:
    """The arrays in an argument, and `length`, do not agree on how long they are."""
    more: list[str] = []
    if len(found) > _MOST_ROWS:
        # Those that are unlike most are what one looks for.
        count = collections.Counter(aval.shape[axis] for _, aval, axis in found)
        found = sorted(found, key=lambda each: count[each[1].shape[each[2]]])
        more = [f"  ... and {len(found) - _MOST_ROWS} more"]
        found = found[:_MOST_ROWS]
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
    advice: list[str] = []
    if isinstance(tree, (list, tuple)) and not any(map(_tree.is_leaf, cast(Any, tree))):
        advice = [
            "",
            f"To go over a list of like trees, stack them: loopax.filter_stack({root}).",
        ]
    return LengthError("\n".join([headline, "", *rows, *more, *advice]))


def no_length(caller: str, root: str, tree: Any, otherwise: str = "") -> LengthError:
    """There are no arrays in an argument to take a length from."""
    leaves = _tree.leaves(tree)
    hint = ""
    if leaves and all(map(is_number, leaves)):
        hint = " Python numbers are static; make arrays of them, with jnp.asarray."
    elif hasattr(tree, "__next__") or isinstance(tree, range):
        hint = f" It is {described(tree)}; make arrays of what it holds first."
    if otherwise:
        hint += f" Or {otherwise}" if hint else f" {otherwise[0].upper()}{otherwise[1:]}"
    return LengthError(f"{caller}: there are no arrays in `{root}` to go along.{hint}")


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
        compare = "Compare it with something" if aval.dtype != bool else ""
        reduce = "educe it, with jnp.any or jnp.all" if aval.shape else ""
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            pass
        elif compare and reduce:
            hint = f" {compare}, and r{reduce}."
        elif compare or reduce:
            hint = f" {compare}." if compare else f" R{reduce}."
    return ArgumentError(
        f"{caller}: {shown(function)} must return a boolean scalar, but returned "
        f"{tree_text(result)}.{hint}"
    )


def not_a_choice(caller: str, name: str, expected: str, value: Any) -> ArgumentError:
    """The predicate of a cond, the index of a switch or the bound of a loop is no scalar."""
    return ArgumentError(
        f"{caller}: `{name}` must be {expected}, a scalar, but is {tree_text(value)}."
    )


def wrong_argument(caller: str, name: str, hint: Any, value: Any) -> ArgumentError:
    """An argument is not of the type that its parameter has.

    If that is `Annotated`, it is by what to do.
    """
    advice: list[str] = []
    if typing.get_origin(hint) is typing.Annotated:
        hint, *advice = typing.get_args(hint)
    said = f"{caller}: `{name}` must be {hint_text(hint)}, but is {tree_text(value)}."
    return ArgumentError(" ".join([said, *advice]))


def no_unroll(caller: str, kind: str) -> ArgumentError:
    """A loop that `jax.lax` does not run was to be unrolled."""
    return ArgumentError(f'{caller}: `unroll` is for kind="lax"; kind="{kind}" has none.')
