"""`filter_switch`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ._body import Body
from ._boundary import public
from ._branches import choose
from ._errors import LengthError, not_a_choice, wrong_argument
from ._jax import lax
from ._split import Arrays
from ._static import is_scalar


Y = TypeVar("Y")

_NOT_GIVEN: Any = object()


# beartype looks at one item of a sequence only, and at any one; hence the `Any`, and a check
# of all of them below.
@public(lax.switch, functions=("branches",), trees=("operands", "operand"))
def filter_switch(
    index: Any,
    branches: Sequence[Callable[..., Y] | Any],
    *operands: Any,
    operand: Any = _NOT_GIVEN,
    trace_numbers: bool = False,
) -> Y:
    if operand is not _NOT_GIVEN:
        operands = (*operands, operand)
    if not is_scalar(index, "iu"):
        raise not_a_choice("filter_switch", "index", "an integer", index)
    functions = {f"branches[{n}]": branch for n, branch in enumerate(branches)}
    for name, function in functions.items():
        if not callable(function):
            raise wrong_argument("filter_switch", name, Callable, function)
    if not functions:
        raise LengthError("filter_switch: `branches` is empty; there is nothing to choose.")

    def primitive(bodies: Sequence[Body], arguments: Sequence[Arrays]) -> Arrays:
        return lax.switch(index, bodies, *arguments)

    return choose("filter_switch", primitive, functions, operands, trace_numbers)
