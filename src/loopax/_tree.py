"""JAX's functions on trees, under types that a strict checker can follow.

JAX's own annotations leave the structure of a tree unknown to it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util


_jtu: Any = jax.tree_util

IsLeaf = Callable[[Any], bool]


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Any]:
    """The leaves of `tree`, and its structure."""
    return _jtu.tree_flatten(tree, is_leaf=is_leaf)


def leaves(tree: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """The leaves of `tree`."""
    return _jtu.tree_leaves(tree, is_leaf=is_leaf)


def leaves_with_path(
    tree: Any, is_leaf: IsLeaf | None = None
) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of `tree`, each with the keys that lead to it."""
    return _jtu.tree_leaves_with_path(tree, is_leaf=is_leaf)


def structure(tree: Any) -> Any:
    """The structure of `tree`, a `PyTreeDef`."""
    return _jtu.tree_structure(tree)


def map_leaves(
    function: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf | None = None
) -> Any:
    """`tree` with `function` applied to each leaf."""
    return _jtu.tree_map(function, tree, *rest, is_leaf=is_leaf)


def is_leaf(value: Any) -> bool:
    """Whether `value` is no node of a tree. `None` is one."""
    return _jtu.all_leaves([value])


def path_text(path: Sequence[Any]) -> str:
    """A path as JAX writes it: `.net['w'][0]`."""
    text = _jtu.keystr(tuple(path))
    # Of a node that was registered without keys.
    return re.sub(r"<flat index (\d+)>", r"\1", text) if "<" in text else text
