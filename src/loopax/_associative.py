"""`filter_associative_scan`."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeVar

import jax
import numpy as np

from ._axes import length_along
from ._boundary import public
from ._errors import element_mismatch
from ._jax import key_data, lax, with_keys
from ._mismatch import Comparison
from ._split import split


Elements = TypeVar("Elements")


@public(lax.associative_scan, functions=("fn",), trees=("elems",))
def filter_associative_scan(
    fn: Callable[[Elements, Elements], Elements],
    elems: Elements,
    reverse: bool | np.bool_ = False,
    axis: SupportsIndex = 0,
    *,
    trace_numbers: bool = False,
) -> Elements:
    """All partial results of an associative operation: `jax.lax.associative_scan`, over any
    PyTree.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import loopax

        class Affine(eqx.Module):
            # the map from h to a * h + b
            a: jax.Array
            b: jax.Array
            name: str

        def then(first, second):
            a, b = second.a * first.a, second.a * first.b + second.b
            return Affine(a, b, first.name)

        maps = Affine(jnp.full(4, 2.0), jnp.ones(4), "recurrence")
        out = loopax.filter_associative_scan(then, maps)
        assert out.b.tolist() == [1.0, 3.0, 7.0, 15.0]
        ```

    It computes

    ```python
    def filter_associative_scan(fn, elems):
        results = [elems[0]]
        for elem in elems[1:]:
            results.append(fn(results[-1], elem))
        return jnp.stack(results)
    ```

    in a number of rounds that grows with the logarithm of the length (G. E. Blelloch, "Prefix
    sums and their applications", CMU-CS-90-190, 1990).

    **Arguments:**

    - `fn`: the operation, `(element, element) -> element`, with
        `fn(a, fn(b, c)) == fn(fn(a, b), c)`. Its arguments have many elements each, along
        `axis`, to be combined one by one, as `jax.vmap` would.
    - `elems`: the elements. Arrays hold them along `axis`; anything else goes to each call as
        it is, and has to come back from it unchanged.
    - `reverse`: start from the end.
    - `axis`: the axis of the arrays in `elems`.
    - `trace_numbers`: take Python's numbers and booleans in `elems` for arrays, as
        `jax.lax.associative_scan` does. By default they are static.

    **Returns:**

    The partial results, as a tree like `elems`.

    **Raises:**

    - [`loopax.MismatchError`][], a `TypeError`, if `fn` returns another kind of element than it
        was given: another static value, structure, shape or dtype.
    - [`loopax.ArgumentError`][], a `TypeError`, if an argument is of the wrong type.
    - [`loopax.LengthError`][], a `ValueError`, if the arrays in `elems` are not of one length
        along `axis`, or if there are none.

    Asked for in JAX issue [5354](https://github.com/jax-ml/jax/issues/5354).
    """
    along = operator.index(axis)
    length_along("filter_associative_scan", "elems", elems, along, trace_numbers)
    arrays, static = split(elems, trace_numbers)
    if along < 0:
        # In reverse `lax` does not take a negative one.
        along += jax.typeof(arrays[0]).ndim
    rules = Comparison(trace_numbers, weak_fits=True)

    # `lax` pads arrays with zeros, which keys of `jax.random` are without.
    def combine(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        left, right = with_keys(left, arrays), with_keys(right, arrays)
        result = fn(static.merge(left), static.merge(right))
        combined, mismatches = rules.compare(static, left, result, "elems")
        if mismatches:
            raise element_mismatch("filter_associative_scan", fn, mismatches)
        return key_data(combined)

    data = lax.associative_scan(combine, key_data(arrays), bool(reverse), along)
    return static.merge(with_keys(data, arrays))
