"""One layer of a stack: how it is made, called and checked."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax

from .._call import as_tree
from .._mismatch import Comparison
from .._split import split
from ._errors import layer_mismatch, no_layer, no_state_returned
from ._options import Options
from ._state import with_arrays


def maker(caller: str, make_layer: Callable[..., Any]) -> Callable[[jax.Array], Any]:
    """Makes a layer of a key, by `make_layer(key=key)` if that can be, or `make_layer(key)`."""
    signature = _signature(make_layer)
    try:
        by_name = signature is not None and bool(signature.bind(key=None))
    except TypeError:
        by_name = False

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
    if key is not None or _wants_key(layer):
        keywords = {**keywords, "key": key}
    if state is None:
        x = layer(x, *arguments, **keywords)
    else:
        result: Any = layer(x, state, *arguments, **keywords)
        if not _is_with_state(result):
            raise no_state_returned("Stacked", layer, result)
        x, state = result
    _, mismatches = Comparison(False, weak_fits=True).compare(
        before.static, before.arrays, x, "x"
    )
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


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        # Some of those that are built in tell nothing.
        return None
