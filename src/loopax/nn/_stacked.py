"""`Stacked`."""

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, SupportsIndex, TypeVar, Unpack, cast, overload

import equinox as eqx
import jax
import jax.random as jr
from jaxtyping import PRNGKeyArray

from .._axes import length_along
from .._boundary import public
from .._errors import LengthError
from .._mismatch import Comparison
from .._scan import filter_scan
from .._split import split
from .._stack import stack
from . import _state
from ._errors import (
    UNLIKE,
    foreign_state,
    layer_mismatch,
    no_layer,
    no_state,
    no_state_returned,
)
from ._options import Options, OptionsDict


Layer = TypeVar("Layer", bound=Callable[..., Any])


class Stacked(eqx.nn.StatefulLayer, Generic[Layer]):
    """Layers of one kind, called one after the other by one scan."""

    layers: Layer
    options: Options = eqx.field(static=True)
    # How many layers there are, where they have no arrays to tell.
    _depth: int = eqx.field(static=True)

    @public()
    def __init__(
        self,
        make_layer: Callable[..., Layer],
        depth: SupportsIndex,
        *,
        key: PRNGKeyArray,
        **options: Unpack[OptionsDict],
    ):
        depth = operator.index(depth)
        if depth < 0:
            raise LengthError(f"Stacked: `depth` must not be negative, got {depth}.")
        by_name = _made_by_name(make_layer)

        def make(key: PRNGKeyArray) -> Layer:
            return make_layer(key=key) if by_name else make_layer(key)

        self.layers = cast(Any, eqx).filter_vmap(make, axis_size=depth)(jr.split(key, depth))
        self._depth = depth
        self.options = Options().replace("Stacked", depth, {**options})
        if not callable(self.layers):
            raise no_layer("Stacked", self.layers)

    @overload
    @classmethod
    def from_layers(
        cls, layers: Sequence[Layer], state: None = None, **options: Unpack[OptionsDict]
    ) -> "Stacked[Layer]": ...
    @overload
    @classmethod
    def from_layers(
        cls, layers: Sequence[Layer], state: eqx.nn.State, **options: Unpack[OptionsDict]
    ) -> tuple["Stacked[Layer]", eqx.nn.State]: ...
    @classmethod
    @public()
    def from_layers(
        cls,
        layers: Sequence[Layer],
        state: eqx.nn.State | None = None,
        **options: Unpack[OptionsDict],
    ) -> "Stacked[Layer] | tuple[Stacked[Layer], eqx.nn.State]":
        """."""
        caller, depth = "Stacked.from_layers", len(layers)
        if depth == 0:
            raise LengthError(f"{caller}: `layers` is empty; there is nothing to stack.")
        together = stack(caller, "layers", _state.joined(layers), False, UNLIKE)
        new = cls._of(together, Options().replace(caller, depth, {**options}), depth)
        return new if state is None else (new, _state.joined_state(state, layers, together))

    @classmethod
    def _of(cls, layers: Layer, options: Options, depth: int) -> "Stacked[Layer]":
        # As a Module is made again of its leaves: `__init__` makes layers of its own.
        new = object.__new__(cls)
        for name, value in {"layers": layers, "options": options, "_depth": depth}.items():
            object.__setattr__(new, name, value)
        return new

    @overload
    def unstack(self, state: None = None) -> list[Layer]: ...
    @overload
    def unstack(self, state: eqx.nn.State) -> tuple[list[Layer], eqx.nn.State]: ...
    @public()
    def unstack(
        self, state: eqx.nn.State | None = None
    ) -> list[Layer] | tuple[list[Layer], eqx.nn.State]:
        """."""
        layers = list(self)
        if state is None:
            return layers
        return layers, _state.parted_state(state, self.layers, layers)

    @public()
    def with_options(self, **options: Unpack[OptionsDict]) -> "Stacked[Layer]":
        """."""
        depth = len(self)
        new = self.options.replace("Stacked.with_options", depth, {**options})
        return self._of(self.layers, new, depth)

    def is_stateful(self) -> bool:
        """Whether to call this with a state, as `eqx.nn.Sequential` asks of its layers."""
        if isinstance(self.layers, eqx.nn.StatefulLayer):
            return self.layers.is_stateful()
        return bool(_state.indices(self.layers))

    @public()
    def __call__(
        self, x: Any, *arguments: Any, key: PRNGKeyArray | None = None, **keywords: Any
    ) -> Any:
        """."""
        state: eqx.nn.State | None = None
        if arguments and isinstance(arguments[0], eqx.nn.State):
            state, arguments = arguments[0], arguments[1:]
        elif isinstance(keywords.get("state"), eqx.nn.State):
            state = keywords.pop("state")
        depth, options = len(self), self.options
        own = self._own(state)
        keys = None if key is None else jr.split(key, depth)
        run = _Run(arguments, keywords, options, depth)
        with jax.named_scope("loopax.nn.Stacked"):
            x, (outputs, own) = filter_scan(
                run,
                x,
                (self.layers, own, keys),
                length=depth,
                reverse=options.reverse,
                unroll=options.unroll,
                kind=options.kind,
                checkpoints=options.checkpoints,
            )
        result = (x, outputs) if options.all_outputs else x
        if state is None:
            return result
        return result, state if own is None else state.update(own)

    def _own(self, state: eqx.nn.State | None) -> eqx.nn.State | None:
        """The part of `state` that belongs to the layers."""
        if not self.is_stateful():
            return None
        if state is None:
            raise no_state("Stacked", self.layers)
        try:
            return cast(Any, state).substate(self.layers)
        except KeyError:
            raise foreign_state("Stacked", self.layers) from None

    def __len__(self) -> int:
        if not split(self.layers, False).arrays:
            return self._depth
        return length_along("Stacked", "layers", self.layers, 0, False)

    def __iter__(self) -> Iterator[Layer]:
        return map(self.__getitem__, range(len(self)))

    @overload
    def __getitem__(self, index: SupportsIndex) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> "Stacked[Layer]": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "Layer | Stacked[Layer]":
        depth = len(self)
        arrays, static = split(self.layers, False)
        if isinstance(index, slice):
            places = range(depth)[index]
            some = static.merge(array[index] for array in arrays)
            some = _state.chosen(some, depth, places)
            return self._of(some, self.options, len(places))
        try:
            place = range(depth)[index]
        except IndexError:
            raise IndexError(f"Stacked: there is no layer {index} of {depth}.") from None
        one = static.merge(array[place] for array in arrays)
        return _state.parted(one, depth, place)


class _Run(eqx.Module):
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
    if key is not None or _takes_key(layer):
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


def _takes_key(layer: Callable[..., Any]) -> bool:
    signature = _signature(layer)
    return signature is not None and "key" in signature.parameters


def _made_by_name(make_layer: Callable[..., Any]) -> bool:
    """Whether to call `make_layer(key=key)`, not `make_layer(key)`."""
    signature = _signature(make_layer)
    try:
        return signature is not None and bool(signature.bind(key=None))
    except TypeError:
        return False


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        # Some of those that are built in tell nothing.
        return None
