"""`filter_cond`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ._body import Body
from ._boundary import public
from ._branches import NOT_GIVEN, choose, only_operand
from ._call import Applied
from ._errors import not_a_choice, wrong_argument
from ._jax import lax
from ._split import Arrays
from ._static import is_scalar


Y = TypeVar("Y")


# `Any` stands beside the types of the functions for the sake of an old way to call
# `lax.cond`, which `_with_own_operands` takes care of.
@public(lax.cond, functions=("true_fun", "false_fun"), trees=("operands", "operand"))
def filter_cond(
    pred: Any,
    true_fun: Callable[..., Y] | Any,
    false_fun: Callable[..., Y] | Any,
    *operands: Any,
    operand: Any = NOT_GIVEN,
    trace_numbers: bool = False,
) -> Y:
    """Calls one of two functions: `jax.lax.cond`, over any PyTree.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import loopax

        key1, key2 = jax.random.split(jax.random.key(0))
        small = eqx.nn.MLP(2, 1, width_size=4, depth=1, key=key1)
        large = eqx.nn.MLP(2, 1, width_size=64, depth=2, key=key2)

        x = jnp.ones(2)
        y = loopax.filter_cond(jnp.linalg.norm(x) < 1, small, large, x)
        assert jnp.array_equal(y, large(x))
        ```

    It computes

    ```python
    def filter_cond(pred, true_fun, false_fun, *operands):
        if pred:
            return true_fun(*operands)
        else:
            return false_fun(*operands)
    ```

    with both functions traced, and only the chosen one run. Under `jax.vmap` with a `pred` that
    differs between lanes both are run, and each lane selects. Gradients come from the chosen
    one alone.

    **Arguments:**

    - `pred`: a boolean scalar, or a number that counts as true if it is not 0.
    - `true_fun`, `false_fun`: the branches. Any callables, such as `eqx.Module`s, of different
        kinds and sizes; arrays inside them are inputs, and gradients flow to them.
    - `operands`: what to call the branch with: any PyTrees.
    - `operand`: a single operand, by name.
    - `trace_numbers`: take Python's numbers and booleans in operands and results for arrays,
        as `jax.lax.cond` does. By default they are static.

    **Returns:**

    What the chosen function returns: any PyTree. What is static in it must not depend on the
    choice. A number is an array where the other branch returns an array, and static otherwise:
    `filter_cond(pred, lambda: 1.0, lambda: 2.0)` is an error.

    **Raises:**

    - [`loopax.MismatchError`][], a `TypeError`, if the branches differ in what they return:
        in a static value, structure, shape, dtype or sharding.
    - [`loopax.ArgumentError`][], a `TypeError`, if an argument is of the wrong type.

    Asked for in Equinox issue [789](https://github.com/patrick-kidger/equinox/issues/789) and
    JAX issue [13554](https://github.com/jax-ml/jax/issues/13554).
    """
    if operand is not NOT_GIVEN:
        operands = only_operand("filter_cond", operands, operand)
    elif not callable(true_fun) and len(operands) == 2 and callable(operands[1]):
        true_fun, false_fun, operands = _with_own_operands(true_fun, false_fun, *operands)
    functions = {"true_fun": true_fun, "false_fun": false_fun}
    for name, function in functions.items():
        if not callable(function):
            raise wrong_argument("filter_cond", name, Callable, function)
    if not is_scalar(pred, "biuf"):
        raise not_a_choice("filter_cond", "pred", "a boolean or a real number", pred)

    def primitive(bodies: Sequence[Body], arguments: Sequence[Arrays]) -> Arrays:
        return lax.cond(pred, *bodies, *arguments)

    return choose("filter_cond", primitive, functions, operands, trace_numbers)


def _with_own_operands(
    true_operand: Any, true_fun: Any, false_operand: Any, false_fun: Any
) -> tuple[Any, Any, tuple[Any, Any]]:
    # `lax.cond(pred, x, f, y, g)`, in which each function has an operand of its own. It is
    # no longer documented, and still works.
    return (
        Applied(_on_first, (true_fun,), {}),
        Applied(_on_second, (false_fun,), {}),
        (true_operand, false_operand),
    )


def _on_first(function: Callable[..., Any], first: Any, _: Any) -> Any:
    return function(first)


def _on_second(function: Callable[..., Any], _: Any, second: Any) -> Any:
    return function(second)
