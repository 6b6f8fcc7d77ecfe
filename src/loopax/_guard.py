"""A runtime error that is raised whichever of a result or its derivatives is computed."""

from collections.abc import Sequence
from typing import Any

from ._jax import (
    UndefinedPrimal,
    VmapAxis,
    Zero,
    error_if,
    instantiate_zeros,
    jnp,
    primitive,
    set_jvp,
)


def guarded(arrays: Sequence[Any], wrong: Any, message: str) -> list[Any]:
    """`arrays`, with a runtime error if `wrong` holds.

    `eqx.error_if` alone is dropped from a gradient for which the arrays are not needed.
    """
    if not arrays:
        return []
    return list(_guard.bind(wrong, *arrays, message=message))


def _run(wrong: Any, *arrays: Any, message: str) -> Any:
    return error_if(list(arrays), wrong, message)


def _types(wrong: Any, *avals: Any, message: str) -> Any:
    return list(avals), set()


def _jvp(primals: Any, tangents: Any, *, message: str) -> Any:
    wrong, *arrays = primals
    moving = [each for each in tangents[1:] if not isinstance(each, Zero)]
    rest = iter(_guard.bind(wrong, *moving, message=message) if moving else ())
    out = _guard.bind(wrong, *arrays, message=message)
    return out, [each if isinstance(each, Zero) else next(rest) for each in tangents[1:]]


def _batch(axis: VmapAxis, operands: Any, axes: Any, *, message: str) -> Any:
    wrong, *arrays = operands
    out = _guard.bind(jnp.any(wrong), *arrays, message=message)
    return out, list(axes[1:])


def _transpose(cotangents: Any, wrong: Any, *arrays: Any, message: str) -> Any:
    given = [instantiate_zeros(each) for each in cotangents]
    out = _guard.bind(wrong, *given, message=message)
    return [None] + [
        each if isinstance(of, UndefinedPrimal) else None
        for of, each in zip(arrays, out, strict=True)
    ]


_guard = primitive("guard", _run, _types, _batch, _transpose)
set_jvp(_guard, _jvp)
