"""`filter_stack` and `filter_unstack`."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp

from ._axes import length_along
from ._boundary import public
from ._errors import ArgumentError, LengthError, stack_mismatch
from ._mismatch import Comparison, Mismatch
from ._split import split
from ._static import is_reference


Tree = TypeVar("Tree")


@public()
def filter_stack(trees: Sequence[Tree], *, trace_numbers: bool = False) -> Tree:
    """Stacks like PyTrees: their arrays along a new leading axis, anything else once.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import loopax

        keys = jax.random.split(jax.random.key(0), 3)
        layers = [eqx.nn.Linear(4, 4, key=key) for key in keys]

        stacked = loopax.filter_stack(layers)
        assert stacked.weight.shape == (3, 4, 4)

        h, _ = loopax.filter_scan(lambda h, layer: (layer(h), None), jnp.ones(4), stacked)
        ```

    It computes

    ```python
    def filter_stack(trees):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    ```

    for the arrays, and makes sure that the rest is the same in each tree.

    **Arguments:**

    - `trees`: a sequence of PyTrees that differ in nothing but the values of their arrays.
    - `trace_numbers`: take Python's numbers and booleans for arrays. By default they are
        static.

    **Returns:**

    One PyTree, from which [`loopax.filter_unstack`][] gets the trees back exactly.

    **Raises:**

    - [`loopax.MismatchError`][], a `TypeError`, if a tree differs from the first one. The path
        begins with its index: `trees[2].activation`.
    - [`loopax.ArgumentError`][], a `TypeError`, if an argument is of the wrong type, or a
        mutable reference is in a tree.
    - [`loopax.LengthError`][], a `ValueError`, if there are no trees.

    Asked for in Equinox issue [1046](https://github.com/patrick-kidger/equinox/issues/1046).
    """
    if len(trees) == 0:
        raise LengthError("filter_stack: `trees` is empty; there is nothing to stack.")
    return stack("filter_stack", "trees", trees, trace_numbers)


def stack(
    caller: str, root: str, trees: Sequence[Tree], trace_numbers: bool, advice: str = ""
) -> Tree:
    """Stacks trees, at least one, that are the argument of the name `root`.

    `advice` is what else to do if they are not alike.
    """
    first = split(trees[0], trace_numbers)
    rules = Comparison(trace_numbers)
    rows: list[list[Any]] = []
    found: list[Mismatch] = []
    for index, tree in enumerate(trees):
        arrays, mismatches = rules.compare(first.static, first.arrays, tree, f"{root}[{index}]")
        rows.append(arrays)
        found += mismatches
    if found:
        raise stack_mismatch(caller, root, found, advice)
    for index, row in enumerate(rows):
        if any(map(is_reference, row)):
            raise ArgumentError(
                f"{caller}: there is a mutable reference in {root}[{index}], of which there "
                "can be no stack. Stack what it holds, `ref[...]`, and make one of that."
            )
    return first.static.merge(jnp.stack(column) for column in zip(*rows, strict=True))


@public()
def filter_unstack(tree: Tree, *, trace_numbers: bool = False) -> list[Tree]:
    """Takes a stacked PyTree apart: the inverse of [`loopax.filter_stack`][].

    !!! Example

        ```python
        import jax.numpy as jnp
        import loopax

        rows = loopax.filter_unstack({"x": jnp.arange(3), "name": "a"})
        assert [int(row["x"]) for row in rows] == [0, 1, 2]
        assert rows[2]["name"] == "a"
        ```

    It computes

    ```python
    def filter_unstack(tree):
        return [jax.tree.map(lambda leaf: leaf[i], tree) for i in range(length)]
    ```

    for the arrays. Anything else is in each of the trees as it is.

    **Arguments:**

    - `tree`: a PyTree whose arrays have a first axis of one length.
    - `trace_numbers`: take Python's numbers and booleans for arrays. By default they are
        static.

    **Returns:**

    A list of PyTrees, one for each index along the first axis.

    **Raises:**

    - [`loopax.ArgumentError`][], a `TypeError`, if an array has no axis.
    - [`loopax.LengthError`][], a `ValueError`, if the arrays are not of one length, or if there
        are none.

    Asked for in Equinox issue [1046](https://github.com/patrick-kidger/equinox/issues/1046).
    """
    length = length_along("filter_unstack", "tree", tree, 0, trace_numbers)
    arrays, static = split(tree, trace_numbers)
    return [static.merge(array[index] for array in arrays) for index in range(length)]
