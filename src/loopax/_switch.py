"""`filter_switch`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ._body import Body
from ._boundary import public
from ._branches import NOT_GIVEN, choose, only_operand
from ._errors import LengthError, not_a_choice, wrong_argument
from ._jax import lax
from ._split import Arrays
from ._static import is_scalar


Y = TypeVar("Y")


# beartype looks at one item of a sequence, any one. Hence the `Any`, and a check of all
# of them below.
@public(lax.switch, functions=("branches",), trees=("operands", "operand"))
def filter_switch(
    index: Any,
    branches: Sequence[Callable[..., Y] | Any],
    *operands: Any,
    operand: Any = NOT_GIVEN,
    trace_numbers: bool = False,
) -> Y:
    """Calls one of several functions: `jax.lax.switch`, over any PyTree.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import loopax

        keys = jax.random.split(jax.random.key(0), 3)
        experts = [eqx.nn.MLP(2, 1, width, 1, key=k) for width, k in zip((4, 8, 16), keys)]

        y = loopax.filter_switch(jnp.array(1), experts, jnp.ones(2))
        assert jnp.array_equal(y, experts[1](jnp.ones(2)))
        ```

    It computes

    ```python
    def filter_switch(index, branches, *operands):
        index = max(0, min(index, len(branches) - 1))
        return branches[index](*operands)
    ```

    with all functions traced, and only the chosen one run. Under `jax.vmap` with an `index`
    that differs between lanes all are run, and each lane selects.

    **Arguments:**

    - `index`: an integer scalar. One that is out of range is clamped.
    - `branches`: a sequence of callables, such as `eqx.Module`s, of different kinds and sizes;
        arrays inside them are inputs, and gradients flow to them.
    - `operands`: what to call the branch with: any PyTrees.
    - `operand`: a single operand, by name.
    - `trace_numbers`: take Python's numbers and booleans in operands and results for arrays,
        as `jax.lax.switch` does. By default they are static.

    **Returns:**

    What the chosen function returns: any PyTree. What is static in it must not depend on the
    choice. A number is an array where another branch returns an array, and static otherwise.

    **Raises:**

    - [`loopax.MismatchError`][], a `TypeError`, if the branches differ in what they return:
        in a static value, structure, shape, dtype or sharding.
    - [`loopax.ArgumentError`][], a `TypeError`, if an argument is of the wrong type.
    - [`loopax.LengthError`][], a `ValueError`, if there are no branches.

    Asked for in JAX issue [13554](https://github.com/jax-ml/jax/issues/13554) and Equinox issue
    [1057](https://github.com/patrick-kidger/equinox/issues/1057).
    """
    if operand is not NOT_GIVEN:
        operands = only_operand("filter_switch", operands, operand)
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
