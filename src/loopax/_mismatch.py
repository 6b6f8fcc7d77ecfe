"""Differences between two trees, as structured facts with paths."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.tree_util as jtu

from . import _tree
from ._jax import typematch
from ._split import HOLE, Static
from ._static import is_dynamic, is_number, same, same_structure


Kind = Literal[
    "value", "field", "metadata", "type", "length", "new", "missing", "static", "array"
]


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One place in which a tree is not what it has to be.

    - `path`: where, as one would write it in Python: `carry.net.layers[0].weight`,
        `carry["info"]["truncated"]`.
    - `kind`: what is wrong there.
        - `"value"`: a static leaf has another value, or an array stands in its place.
        - `"static"`: something static stands in place of an array.
        - `"array"`: an array has another type.
        - `"field"`: a static field of a Module or dataclass has another value.
        - `"metadata"`: the metadata of some other kind of node differ.
        - `"type"`: another kind of tree, or of container, stands there.
        - `"length"`: a sequence has another length.
        - `"new"`, `"missing"`: a mapping or a Module has a key or a field more, or less.
    - `before`, `after`: what was expected, and what came instead: a static value as it
        is; an array as its type (what `jax.typeof` says of it); a tree as its structure (a
        `PyTreeDef`); for `"length"` the two lengths; for `"new"` and `"missing"` the key.
    """

    path: str
    kind: Kind
    before: Any
    after: Any


def compare(
    static: Static, arrays: Sequence[Any], after: Any, root: str, trace_numbers: bool
) -> tuple[list[Any], list[Mismatch]]:
    """The arrays of `after`, and in what else it differs from a tree split before.

    The tree before is given in its parts. It has to be: once the body has called
    `eqx.nn.State.set`, the state that it was given can no longer be flattened.
    """
    leaves, treedef = _tree.flatten(after)
    if same_structure(static.treedef, treedef):
        unused = iter(arrays)
        found: list[Any] = []
        for expected, leaf in zip(static.leaves, leaves, strict=True):
            if expected is HOLE:
                if not _fits(next(unused), leaf, trace_numbers):
                    break
                found.append(leaf)
            elif not same(expected, leaf):
                break
        else:
            return found, []
    before = static.merge(arrays)
    after = treedef.unflatten(leaves)
    return [], list(_differences(before, after, root, trace_numbers))


def _fits(before: Any, after: Any, trace_numbers: bool) -> bool:
    # A number that the body returns where the carry holds an array becomes an array.
    if not (is_number(after) or is_dynamic(after, trace_numbers)):
        return False
    # A weakly typed carry, such as a Python number, is promoted by `lax` to the type that
    # the body gives it. `lax` then traces the body again, and that trace is checked.
    was = jax.typeof(before)
    return getattr(was, "weak_type", False) or typematch(was, jax.typeof(after))


def _differences(
    before: Any, after: Any, path: str, trace_numbers: bool
) -> Iterator[Mismatch]:
    inner_before, inner_after = _one_level(before), _one_level(after)
    if inner_before is None and inner_after is None:
        yield from _leaf_differences(before, after, path, trace_numbers)
        return
    if inner_before is None or inner_after is None or type(before) is not type(after):
        yield Mismatch(
            path, "type", _facts(before, trace_numbers), _facts(after, trace_numbers)
        )
        return
    if isinstance(before, (tuple, list)) and len(inner_before) != len(inner_after):
        yield Mismatch(path, "length", len(inner_before), len(inner_after))
        return
    for key in inner_before.keys() - inner_after.keys():
        yield Mismatch(path, "missing", inner_before[key][0], None)
    for key in inner_after.keys() - inner_before.keys():
        yield Mismatch(path, "new", None, inner_after[key][0])
    yield from _metadata_differences(before, after, path, inner_before.keys())
    for key in inner_before:
        if key in inner_after:
            yield from _differences(
                inner_before[key][1], inner_after[key][1], path + key, trace_numbers
            )


def _leaf_differences(
    before: Any, after: Any, path: str, trace_numbers: bool
) -> Iterator[Mismatch]:
    if is_dynamic(before, trace_numbers):
        if _fits(before, after, trace_numbers):
            return
        as_array = is_number(after) or is_dynamic(after, trace_numbers)
        kind = "array" if as_array else "static"
        after = jax.typeof(after) if as_array else after
        yield Mismatch(path, kind, jax.typeof(before), after)
    elif is_dynamic(after, trace_numbers):
        yield Mismatch(path, "value", before, jax.typeof(after))
    elif not same(before, after):
        yield Mismatch(path, "value", before, after)


def _metadata_differences(
    before: Any, after: Any, path: str, inner: Iterable[str]
) -> Iterator[Mismatch]:
    data_before = _tree.structure(before).node_data()
    data_after = _tree.structure(after).node_data()
    if data_before is None or data_after is None:
        return
    if isinstance(before, dict) or same(data_before[1], data_after[1]):
        return
    fields = [
        Mismatch(f"{path}.{name}", "field", *values)
        for name in _static_fields(before, inner)
        if not same(*(values := (_field(before, name), _field(after, name))))
    ]
    if fields:
        yield from fields
    else:
        yield Mismatch(path, "metadata", data_before[1], data_after[1])


_ABSENT = object()


def _field(node: Any, name: str) -> Any:
    return getattr(node, name, _ABSENT)


def _static_fields(node: Any, inner: Iterable[str]) -> list[str]:
    # Whatever field is not a child of the node is part of its metadata, no matter by
    # which library's word for it.
    if not dataclasses.is_dataclass(node):
        return []
    names = [field.name for field in dataclasses.fields(node)]
    return [name for name in names if f".{name}" not in inner]


def _facts(tree: Any, trace_numbers: bool) -> Any:
    if _one_level(tree) is not None:
        return _tree.structure(tree)
    return jax.typeof(tree) if is_dynamic(tree, trace_numbers) else tree


def _one_level(tree: Any) -> dict[str, tuple[Any, Any]] | None:
    """The children of a node by the text of their keys, or `None` for a leaf."""
    if tree is None:
        # To JAX a node without children; to everybody else a value.
        return None
    pairs = _tree.leaves_with_path(tree, is_leaf=lambda child: child is not tree)
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    return {key_text(path[0]): (path[0], child) for path, child in pairs}


def key_text(key: Any) -> str:
    """One key of a path, as one would write it in Python."""
    match key:
        case jtu.GetAttrKey():
            return f".{key.name}"
        case jtu.SequenceKey():
            return f"[{key.idx}]"
        case jtu.DictKey():
            return f"[{quoted(key.key)}]"
        case jtu.FlattenedIndexKey():
            return f"[<child {key.key}>]"
        case _:
            return str(key)


def quoted(value: Any) -> str:
    """`repr`, with double quotes around strings."""
    if type(value) is str:
        return '"' + repr("'" + value)[2:-1] + '"' if '"' not in value else repr(value)
    return repr(value)
