"""A tree as its arrays and the rest."""

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu

from . import _tree
from ._static import is_dynamic, is_held, same, same_structure
from ._token import Tokens


class _Hole:
    def __repr__(self) -> str:
        return "*"


# Stands in a `Static` where the tree has an array.
HOLE = _Hole()


class Static:
    """All of a tree but its arrays: the structure and the other leaves."""

    __slots__ = ("_leaves", "treedef")

    def __init__(self, treedef: Any, leaves: Sequence[Any]):
        self.treedef = treedef
        self._leaves = tuple(leaves)

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The leaves, with `HOLE` for each array."""
        return self._leaves

    def merge(self, arrays: Iterable[Any]) -> Any:
        """The tree with `arrays` where its arrays belong."""
        rest = iter(arrays)
        leaves = [next(rest) if leaf is HOLE else leaf for leaf in self.leaves]
        return self.treedef.unflatten(leaves)

    @property
    def num_arrays(self) -> int:
        return sum(leaf is HOLE for leaf in self._leaves)

    def token(self, tokens: Tokens) -> Hashable:
        """Equal for what no trace can tell apart."""
        leaves = (None if leaf is HOLE else tokens.of(leaf) for leaf in self.leaves)
        return (tokens.of_structure(self.treedef), *leaves)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Static)
            and same_structure(self.treedef, other.treedef)
            and all(map(same, self.leaves, other.leaves))
        )

    def __hash__(self) -> int:
        # Hashing must not fail, whatever the leaves are, and it must agree with `same`.
        return hash(tuple(leaf is HOLE for leaf in self._leaves))

    def __repr__(self) -> str:
        return repr(self.treedef.unflatten(self.leaves))


class _Bare(Static):
    """The static part of a list of so and so many arrays."""

    __slots__ = ()

    def token(self, tokens: Tokens) -> Hashable:
        return len(self._leaves)


@functools.lru_cache
def bare(count: int) -> Static:
    """What is static in a list of arrays: only how many there are."""
    return _Bare(_tree.structure([HOLE] * count), [HOLE] * count)


class Split(NamedTuple):
    """A tree in two parts: `static.merge(arrays)` is the tree again."""

    arrays: list[Any]
    static: Static


def split(tree: Any, trace_numbers: bool, as_arrays: frozenset[int] = frozenset()) -> Split:
    """Splits `tree` into its arrays and the rest. It is flattened just once.

    `as_arrays` are the places, among all of the leaves, at which numbers are arrays.
    """
    leaves, treedef = _tree.flatten(tree)
    dynamic = [
        is_dynamic(leaf, trace_numbers or place in as_arrays)
        for place, leaf in enumerate(leaves)
    ]
    return _split(leaves, treedef, dynamic)


def split_held(tree: Any, trace_numbers: bool = False) -> Split:
    """As [`split`][], of what goes round a loop unchanged, such as the function."""
    leaves, treedef = _tree.flatten(tree)
    return _split(leaves, treedef, [is_held(leaf, trace_numbers) for leaf in leaves])


def _split(leaves: list[Any], treedef: Any, dynamic: list[bool]) -> Split:
    arrays: list[Any] = []
    rest = leaves.copy()
    for place, is_array in enumerate(dynamic):
        if is_array:
            arrays.append(leaves[place])
            rest[place] = HOLE
    return Split(arrays, Static(treedef, rest))


def closed_over(tree: Any) -> Split:
    """As [`split`][], with no array taken out: a trace closes over all of `tree`."""
    leaves, treedef = _tree.flatten(tree)
    return Split([], Static(treedef, leaves))


@jtu.register_pytree_with_keys_class
class Arrays:
    """Arrays on their way through a JAX primitive, as a PyTree of nothing else.

    `label` is the metadata of the node. It travels through the primitive with the arrays,
    into JAX's own cache too, and comes back with them. `names` are where the arrays stand
    in the user's trees, so that JAX's messages read as if they stood there still.
    """

    __slots__ = ("arrays", "label", "names")

    def __init__(self, arrays: Sequence[Any], names: Sequence[Any], label: Any = None):
        self.arrays = arrays
        self.names = names
        self.label = label

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        return tuple(zip(self.names, self.arrays, strict=True)), (self.names, self.label)

    def tree_flatten(self) -> tuple[Any, Any]:
        return tuple(self.arrays), (self.names, self.label)

    @classmethod
    def tree_unflatten(cls, metadata: Any, arrays: Any) -> "Arrays":
        names, label = metadata
        return cls(arrays, names, label)


class Name(str):
    """A path as one key, which JAX joins to a path of keys as it stands."""

    __slots__ = ()


def names(static: Static) -> tuple[Name, ...]:
    """Where the arrays stand in the tree, as JAX writes it: `.net.layers[0].weight`."""
    if not static.num_arrays:
        return ()
    try:
        tree = static.treedef.unflatten(static.leaves)
        paths = [path for path, _ in _tree.leaves_with_path(tree)]
        pairs = list(zip(paths, static.leaves, strict=True))
    except Exception:
        # A node may refuse to be made of what is no array. It has no names, then.
        numbers = range(static.num_arrays)
        return tuple(Name(f"[<array {number}>]") for number in numbers)
    return tuple(Name(_tree.path_text(path)) for path, leaf in pairs if leaf is HOLE)
