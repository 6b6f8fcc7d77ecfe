"""`filter_cond`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx

from ._body import Body
from ._boundary import public
from ._branches import choose
from ._errors import not_a_choice, wrong_argument
from ._jax import lax
from ._split import Arrays
from ._static import is_scalar


Y = TypeVar("Y")

_NOT_GIVEN: Any = object()


# `Any` stands beside the types of the functions for the sake of an old way to call
# `lax.cond`, which `_with_own_operands` takes care of.
@public(lax.cond, functions=("true_fun", "false_fun"), trees=("operands", "operand"))
def filter_cond(
    pred: Any,
    true_fun: Callable[..., Y] | Any,
    false_fun: Callable[..., Y] | Any,
    *operands: Any,
    operand: Any = _NOT_GIVEN,
    trace_numbers: bool = False,
) -> Y:
    if operand is not _NOT_GIVEN:
        operands = (*operands, operand)
    elif not callable(true_fun) and len(operands) == 2 and callable(operands[1]):
        true_fun, false_fun, operands = _with_own_operands(true_fun, false_fun, *operands)
    functions = {"true_fun": true_fun, "false_fun": false_fun}
    for name, function in functions.items():
        if not callable(function):
            raise wrong_argument("filter_cond", name, Callable, function)
    if not is_scalar(pred, "biuf"):
        raise not_a_choice("filter_cond", "pred", "a boolean or a number", pred)

    def primitive(bodies: Sequence[Body], arguments: Sequence[Arrays]) -> Arrays:
        return lax.cond(pred, *bodies, *arguments)

    return choose("filter_cond", primitive, functions, operands, trace_numbers)


def _with_own_operands(
    true_operand: Any, true_fun: Any, false_operand: Any, false_fun: Any
) -> tuple[Any, Any, tuple[Any, Any]]:
    # `lax.cond(pred, x, f, y, g)`, in which each function has an operand of its own. It is
    # no longer documented, and still works.
    return (
        eqx.Partial(_on_first, true_fun),
        eqx.Partial(_on_second, false_fun),
        (true_operand, false_operand),
    )


def _on_first(function: Callable[..., Any], first: Any, _: Any) -> Any:
    return function(first)


def _on_second(function: Callable[..., Any], _: Any, second: Any) -> Any:
    return function(second)
