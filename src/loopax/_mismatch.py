"""Differences between two trees, as structured facts with paths."""

import dataclasses
import enum
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import AbstractValue, ShapedArray

from . import _tree
from ._jax import typematch
from ._split import HOLE, Static
from ._static import is_dynamic, is_number, is_of, same, same_structure


Kind = Literal[
    "value",
    "static",
    "array",
    "field",
    "metadata",
    "attribute",
    "type",
    "length",
    "new",
    "missing",
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
        - `"attribute"`: an object that is no PyTree was changed in place.
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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How two trees are compared.

    - `trace_numbers`: whether Python's numbers are arrays.
    - `weak_fits`: whether a weakly typed array before fits an array after of any dtype.
        Where one has to give way like that, `lax` promotes it and traces the body again, and
        what dtypes the others have then is seen in that trace.
    - `any_type`: whether any array fits any other.
    - `numbers_join`: whether a number before fits an array after. The other way round it
        always does: where there is an array, a number becomes one, as in `lax`.
    """

    trace_numbers: bool
    weak_fits: bool = False
    any_type: bool = False
    numbers_join: bool = False

    def compare(
        self, static: Static, arrays: Sequence[Any], after: Any, root: str
    ) -> tuple[list[Any], list[Mismatch]]:
        """The arrays of `after`, and in what else it differs from a tree split before.

        The tree before is given in its parts. It has to be: once the body has called
        `eqx.nn.State.set`, the state that it was given can no longer be flattened.
        """
        leaves, treedef = _tree.flatten(after)
        if same_structure(static.treedef, treedef):
            pairs = list(zip(static.leaves, leaves, strict=True))
            new = [leaf for expected, leaf in pairs if expected is HOLE]
            statics = [pair for pair in pairs if pair[0] is not HOLE]
            if all(same(*pair) for pair in statics) and self._all_fit(arrays, new):
                return new, []
        # Both are made again, to be flattened once more.
        before, after = static.merge(arrays), treedef.unflatten(leaves)
        found = list(self.differences(before, after, root))
        if not found and not self.numbers_join:
            found = [Mismatch(root, "metadata", static.treedef, treedef)]
        return [], found

    def differences(self, before: Any, after: Any, path: str) -> Iterator[Mismatch]:
        """In what `after` differs from `before`. Both have to be fit to be flattened."""
        inner_before, inner_after = _one_level(before), _one_level(after)
        if inner_before is None and inner_after is None:
            yield from self._leaf_differences(before, after, path)
            return
        if inner_before is None or inner_after is None or type(before) is not type(after):
            yield Mismatch(path, "type", self._facts(before), self._facts(after))
            return
        if isinstance(before, (tuple, list)) and len(inner_before) != len(inner_after):
            yield Mismatch(path, "length", len(inner_before), len(inner_after))
            return
        if inner_before.keys() == inner_after.keys():
            yield from _metadata_differences(before, after, path, inner_before.keys())
        for text, (key, child) in inner_before.items():
            if text in inner_after:
                yield from self.differences(child, inner_after[text][1], path + text)
            else:
                yield Mismatch(path, "missing", key, None)
        for text, (key, _) in inner_after.items():
            if text not in inner_before:
                yield Mismatch(path, "new", None, key)

    def changed_in_place(
        self, static: Static, before: dict[int, dict[str, Any]], root: str
    ) -> Iterator[Mismatch]:
        """The attributes of objects among the leaves that are not what they were."""
        if not before:
            return
        after = attributes(static)
        changed = [
            (place, name, was, now)
            for place, attributes_before in before.items()
            for name, was in attributes_before.items()
            if not same(was, now := after.get(place, {}).get(name))
        ]
        if changed:
            places = range(len(static.leaves))
            paths = _tree.leaves_with_path(static.treedef.unflatten(places))
            for place, name, was, now in changed:
                text = root + path_text(paths[place][0]) + f".{name}"
                yield Mismatch(text, "attribute", was, self._facts(now))

    def _leaf_differences(self, before: Any, after: Any, path: str) -> Iterator[Mismatch]:
        is_array = self._is_dynamic(after)
        joins = self.numbers_join and is_array and is_number(before)
        if self._is_dynamic(before) or joins:
            if self._fits(before, after):
                return
            kind = "array" if self._is_array(after) else "static"
            after = _type(after) if kind == "array" else after
            yield Mismatch(path, kind, _type(before), after)
        elif is_array:
            yield Mismatch(path, "value", before, _type(after))
        elif not same(before, after):
            yield Mismatch(path, "value", before, after)

    def _all_fit(self, before: Sequence[Any], after: Sequence[Any]) -> bool:
        pairs = list(zip(before, after, strict=True))
        if all(self._fits(*pair) for pair in pairs):
            return True
        if not self.weak_fits or not all(self._fits(*pair, any_dtype=True) for pair in pairs):
            return False
        return any(_is_promoted(_type(before), _type(after)) for before, after in pairs)

    def _fits(self, before: Any, after: Any, any_dtype: bool = False) -> bool:
        if before is after:
            return True
        if not self._is_array(after):
            return False
        was, now = _type(before), _type(after)
        if self.any_type or typematch(was, now):
            return True
        if not (isinstance(was, ShapedArray) and isinstance(now, ShapedArray)):
            return False
        if not (any_dtype or (self.weak_fits and was.weak_type)):
            return False
        if _is_key(was) or _is_key(now):
            return False
        return typematch(cast(Any, was).update(dtype=now.dtype), now)

    def _is_array(self, leaf: Any) -> bool:
        return (is_number(leaf) and _fits_in_jax(leaf)) or self._is_dynamic(leaf)

    def _is_dynamic(self, leaf: Any) -> bool:
        if is_number(leaf):
            return self.trace_numbers and _fits_in_jax(leaf)
        return is_of(leaf, AbstractValue) or is_dynamic(leaf, self.trace_numbers)

    def _facts(self, tree: Any) -> Any:
        if _one_level(tree) is not None:
            return _tree.structure(tree)
        return _type(tree) if self._is_dynamic(tree) else tree


def attributes(static: Static) -> dict[int, dict[str, Any]]:
    """The attributes that objects among the leaves have now, by the place of the leaf.

    Not of functions, nor of others that are no objects in the everyday sense.
    """
    found = ((place, _attributes(leaf)) for place, leaf in enumerate(static.leaves))
    return {place: names for place, names in found if names is not None}


def _attributes(leaf: Any) -> dict[str, Any] | None:
    if leaf is HOLE or is_of(leaf, _NO_OBJECTS):
        return None
    try:
        return None if hasattr(leaf, "__wrapped__") else dict[str, Any](leaf.__dict__)
    except Exception:
        # It has none, or does not let itself be asked.
        return None


_NO_OBJECTS = (type, enum.Enum, types.FunctionType, types.MethodType, types.ModuleType)


def _fits_in_jax(number: Any) -> bool:
    try:
        jax.typeof(number)
    except OverflowError:
        return False
    return True


def _type(leaf: Any) -> Any:
    # Where there are no arrays, but only what they would be, their types stand for them.
    return leaf if is_of(leaf, AbstractValue) else jax.typeof(leaf)


def _is_promoted(was: Any, now: Any) -> bool:
    return not typematch(was, now) and was.weak_type


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _metadata_differences(
    before: Any, after: Any, path: str, inner: Iterable[str]
) -> Iterator[Mismatch]:
    _, metadata_before = _tree.structure(before).node_data()
    _, metadata_after = _tree.structure(after).node_data()
    if same(metadata_before, metadata_after):
        return
    fields = [
        Mismatch(f"{path}.{name}", "field", *values)
        for name in _static_fields(before, inner)
        if not same(*(values := (_field(before, name), _field(after, name))))
    ]
    if fields:
        yield from fields
    else:
        yield Mismatch(path, "metadata", metadata_before, metadata_after)


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


def _one_level(tree: Any) -> dict[str, tuple[Any, Any]] | None:
    """The children of a node by the text of their keys, or `None` for a leaf."""
    if tree is None:
        # To JAX a node without children; to everybody else a value.
        return None
    pairs = _tree.leaves_with_path(tree, is_leaf=lambda child: child is not tree)
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    children: dict[str, tuple[Any, Any]] = {}
    for path, child in pairs:
        text = key_text(path[0])
        # Nothing keeps a node from giving one key to several children.
        while text in children:
            text += "'"
        children[text] = (path[0], child)
    return children


def key_text(key: Any) -> str:
    """One key of a path, as one would write it in Python."""
    match key:
        case jtu.DictKey():
            return f"[{quoted(key.key)}]"
        case jtu.FlattenedIndexKey():
            return f"[<child {key.key}>]"
        case _:
            return str(key)


def path_text(path: Iterable[Any]) -> str:
    """A path, as one would write it in Python."""
    return "".join(map(key_text, path))


def quoted(value: Any) -> str:
    """`repr`, with double quotes around strings."""
    if type(value) is str:
        return '"' + repr("'" + value)[2:-1] + '"' if '"' not in value else repr(value)
    return printed(value)


def printed(value: Any) -> str:
    """`repr`, or the type of a value that fails to have one."""
    try:
        return repr(value)
    except Exception:
        return f"<{cast(Any, type)(value).__name__}>"
