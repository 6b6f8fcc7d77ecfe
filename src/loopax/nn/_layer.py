"""One layer of a stack: how it is made, called and checked."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax

from .._call import as_tree
from .._mismatch import Comparison, attributes
from .._split import split
from ._errors import layer_mismatch, more_than_a_key, no_layer, no_state_returned
from ._options import Options
from ._state import with_arrays


def maker(caller: str, make_layer: Callable[..., Any]) -> Callable[[jax.Array], Any]:
    """Makes a layer of a key, by `make_layer(key=key)` if that can be, or `make_layer(key)`."""
    signature = _signature(make_layer)
    by_name = False
    if signature is not None:
        try:
            by_name = bool(signature.bind(key=None))
        except TypeError:
            # By place the key would go to something else.
            parameter = signature.parameters.get("key")
            if parameter is not None and parameter.kind in _NAMED:
                raise more_than_a_key(caller, make_layer, _needed(signature)) from None

    def make(key: jax.Array) -> Any:
        layer = make_layer(key=key) if by_name else make_layer(key)
        return checked(caller, "`make_layer` returned", layer)

    return make


def checked(caller: str, where: str, layer: Any) -> Any:
    """A layer, as a PyTree that can be stacked."""
    if not callable(layer):
        raise no_layer(caller, where, layer)
    return with_arrays(as_tree(layer))


class Run(eqx.Module):
    """The body of the scan: one layer."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    options: Options = eqx.field(static=True)
    depth: int = eqx.field(static=True)

    def __call__(self, x: Any, row: tuple[Any, eqx.nn.State | None, Any]) -> Any:
        remat, unroll = self.options.remat, self.options.unroll
        apply: Callable[..., Any] = _apply
        if remat is not False:
            # What is computed again could be merged with what it repeats only where the
            # loop is gone.
            unrolled = unroll is True or not 0 < unroll < self.depth
            policy = None if remat is True else remat
            apply = eqx.filter_checkpoint(_apply, policy=policy, prevent_cse=unrolled)
        x, state = apply(x, row, self.arguments, self.keywords)
        return x, (x if self.options.all_outputs else None, state)


def _apply(
    x: Any,
    row: tuple[Any, eqx.nn.State | None, Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> tuple[Any, eqx.nn.State | None]:
    layer, state, key = row
    before = split(x, False)
    attributes_before = attributes(before.static)
    if key is not None or _wants_key(layer):
        keywords = {**keywords, "key": key}
    if state is None:
        x = layer(x, *arguments, **keywords)
    else:
        result: Any = layer(x, state, *arguments, **keywords)
        if not _is_with_state(result):
            raise no_state_returned("Stacked", layer, result)
        x, state = result
    rules = Comparison(False, weak_fits=True)
    _, mismatches = rules.compare(before.static, before.arrays, x, "x")
    mismatches += rules.changed_in_place(before.static, attributes_before, "x")
    if mismatches:
        raise layer_mismatch("Stacked", layer, mismatches)
    return x, state


def _is_with_state(result: Any) -> bool:
    pair = isinstance(result, tuple) and len(cast(Any, result)) == 2
    return pair and isinstance(cast(Any, result)[1], eqx.nn.State)


def _wants_key(layer: Callable[..., Any]) -> bool:
    signature = _signature(layer)
    parameter = signature.parameters.get("key") if signature is not None else None
    return parameter is not None and parameter.default is inspect.Parameter.empty


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _needed(signature: inspect.Signature) -> list[str]:
    """What has to be given, beside a key."""
    return [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.name != "key"
        and parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, *_NAMED)
    ]


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        # Some of those that are built in tell nothing.
        return None
