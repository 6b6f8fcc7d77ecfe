"""The states of stacked layers, together and apart.

An `eqx.nn.State` has its values by the `marker` of the `eqx.nn.StateIndex` that stands in
the model. Layers that are stacked have one index between them, and with it one value with
a leading axis; layers on their own have one each. Equinox has no words for that, so that
what is done to its objects is done here.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import equinox as eqx

from .. import _tree
from .._jax import jnp


Tree = TypeVar("Tree")


class _Marker(str):
    """A marker that was put together. Equinox prints markers, as what they are: texts."""

    __slots__ = ("parts",)

    parts: tuple[Any, ...]

    def __new__(cls, text: str, *parts: Any) -> Any:
        new = super().__new__(cls, text)
        new.parts = parts
        return new

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.parts == self.parts

    def __hash__(self) -> int:
        return hash((type(self), self.parts))


class _Joined(_Marker):
    """The marker of what was stacked. Its parts are those that it was stacked from."""

    __slots__ = ()


class _Part(_Marker):
    """The marker of one layer of a stack: that of the stack, the layer's place, the depth."""

    __slots__ = ()

    def __repr__(self) -> str:
        # Equinox raises `KeyError(marker)` where the layer is called with the stack's state.
        return (
            f"<{str(self)!r} of a layer taken out of a stack: its values are in the state that "
            "`stack.unstack(state)` returns with the layers>"
        )


def _join(markers: Sequence[Any]) -> Any:
    """The marker of a stack of layers with these: the inverse of `_each`."""
    if markers and isinstance(markers[0], _Part):
        whole = markers[0].parts[0]
        if list(markers) == _each(whole, len(markers)):
            # All layers of a stack are that stack, and have its state.
            return whole
    text = ", ".join(map(str, dict.fromkeys([*markers[:1], *markers[-1:]])))
    return _Joined(text, *markers)


def indices(tree: Any) -> list[eqx.nn.StateIndex[Any]]:
    """What in `tree` has a value in the state."""
    return [leaf for leaf in _tree.leaves(tree, is_leaf=_is_index) if _is_index(leaf)]


def with_arrays(tree: Tree) -> Tree:
    """`tree` with first values of states that are arrays, which Equinox makes of numbers, too.

    Only arrays are stacked.
    """

    def one(leaf: Any) -> Any:
        if not _is_index(leaf):
            return leaf
        return _index(_tree.map_leaves(jnp.asarray, leaf.init), leaf.marker)

    return _tree.map_leaves(one, tree, is_leaf=_is_index)


def joined(layers: Sequence[Tree]) -> list[Tree]:
    """The layers with one marker for all at each place where all of them have an index."""
    columns = list(zip(*map(indices, layers), strict=False))
    markers = [_join([index.marker for index in column]) for column in columns]
    return [_marked(layer, markers) for layer in layers]


def parted(layer: Tree, depth: int, place: int) -> Tree:
    """A layer taken out of a stack, with markers of its own."""
    return _marked(layer, [_each(index.marker, depth)[place] for index in indices(layer)])


def chosen(stack: Tree, depth: int, places: Sequence[int]) -> Tree:
    """A stack of some of the layers of one, with markers of its own."""
    each = [_each(index.marker, depth) for index in indices(stack)]
    return _marked(stack, [_join([some[place] for place in places]) for some in each])


def joined_state(state: eqx.nn.State, layers: Sequence[Any], stack: Any) -> eqx.nn.State:
    """`state`, with the values for `layers` stacked, by the markers of `stack`."""
    columns = list(zip(*map(indices, layers), strict=True))
    gone = {index.marker for column in columns for index in column}
    values = [_tree.map_leaves(_stack, *map(state.get, column)) for column in columns]
    return _replaced(state, gone, zip((i.marker for i in indices(stack)), values, strict=True))


def parted_state(state: eqx.nn.State, stack: Any, layers: Sequence[Any]) -> eqx.nn.State:
    """`state`, with the values for `stack` taken apart, by the markers of `layers`."""
    columns = list(zip(*map(indices, layers), strict=True))
    stacked = indices(stack)
    new: list[tuple[Any, Any]] = []
    for index, column in zip(stacked, columns, strict=False):
        value = state.get(index)
        for place, one in enumerate(column):
            row = _tree.map_leaves(operator.itemgetter(place), value)
            new.append((one.marker, row))
    return _replaced(state, {index.marker for index in stacked}, new)


def _stack(*rows: Any) -> Any:
    return jnp.stack(rows)


def _is_index(value: Any) -> bool:
    return isinstance(value, eqx.nn.StateIndex)


def _marked(tree: Tree, markers: Sequence[Any]) -> Tree:
    """`tree` with other markers in its indices, in order."""
    left = iter(markers)

    def one(leaf: Any) -> Any:
        return _index(leaf.init, next(left, leaf.marker)) if _is_index(leaf) else leaf

    return _tree.map_leaves(one, tree, is_leaf=_is_index)


def _index(init: Any, marker: Any) -> eqx.nn.StateIndex[Any]:
    index = eqx.nn.StateIndex(init)
    object.__setattr__(index, "marker", marker)
    return index


def _each(marker: Any, depth: int) -> list[Any]:
    """The markers of the layers of a stack."""
    if isinstance(marker, _Joined):
        return list(marker.parts)
    return [_Part(f"{marker}[{place}]", marker, place, depth) for place in range(depth)]


def _replaced(state: eqx.nn.State, gone: set[Any], new: Iterable[tuple[Any, Any]]) -> Any:
    """`state` without the markers in `gone`, and with new ones."""
    _, markers = _tree.structure(state).node_data()
    kept = [marker for marker in markers if marker not in gone]
    values = [(marker, state.get(_index(None, marker))) for marker in kept]
    # Equinox makes a state from the indices of a model, each with its first value.
    return eqx.nn.State([_index(value, marker) for marker, value in (*values, *new)])
