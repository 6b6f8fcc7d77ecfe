"""`Stacked`."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Annotated, Any, Generic, SupportsIndex, TypeVar, Unpack, cast, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from .. import _tree
from .._axes import length_along
from .._boundary import public
from .._errors import LengthError, Refusal
from .._kinds import a_count
from .._scan import filter_scan
from .._split import split
from .._stack import stack
from . import _state
from ._errors import (
    TO_MAKE_A_KEY,
    TO_STACK_LAYERS,
    UNLIKE,
    foreign_state,
    made_by_a_layer,
    no_key,
    no_row_for_each,
    no_state,
    options_in_call,
)
from ._layer import Run, checked, maker
from ._options import OPTIONS, Options, OptionsDict


Layer = TypeVar("Layer")


class Stacked(eqx.nn.StatefulLayer, Generic[Layer]):
    """Many like layers, called one after the other as one [`loopax.filter_scan`][].

    A drop-in for [`equinox.nn.Sequential`](https://docs.kidger.site/equinox/api/nn/sequential/)
    of layers that differ in nothing but their weights. One layer is traced and compiled,
    however many there are.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import loopax

        class Block(eqx.Module):
            norm: eqx.nn.LayerNorm
            mlp: eqx.nn.MLP

            def __init__(self, size, *, key):
                self.norm = eqx.nn.LayerNorm(size)
                self.mlp = eqx.nn.MLP(size, size, 4 * size, 1, jax.nn.gelu, key=key)

            def __call__(self, x, *, key=None):
                return x + self.mlp(self.norm(x))

        def make_block(key):
            return Block(8, key=key)

        blocks = loopax.nn.Stacked(make_block, 24, key=jax.random.key(0))
        y = blocks(jnp.ones(8))
        assert y.shape == (8,) and blocks.layers.mlp.layers[0].weight.shape == (24, 32, 8)

        same = eqx.nn.Sequential(blocks.unstack())
        assert jnp.allclose(y, same(jnp.ones(8)), rtol=1e-4)
        ```

    It computes

    ```python
    class Stacked:
        def __init__(self, make_layer, depth, key):
            self.layers = [make_layer(key) for key in jax.random.split(key, depth)]

        def __call__(self, x, key):
            keys = jax.random.split(key, len(self.layers))
            for layer, key in zip(self.layers, keys):
                x = layer(x, key=key)
            return x
    ```

    with the layers in `layers` as one layer whose arrays have a leading axis, of length
    `depth`. So an optimiser, `eqx.tree_at`, saving to disk and sharding all take them as one.

    **Arguments:**

    - `make_layer`: makes one layer: `make_layer(key=key)`, or `make_layer(key)` if it has no
        parameter of that name. It is called once for all layers, under `eqx.filter_vmap`, so
        that nothing but what comes of the key differs between them. Any callable PyTree will
        do for a layer; one that has states too, see below.
    - `depth`: how many layers to make.
    - `key`: a key of `jax.random`, which is split into one for each layer.

    **Options**, by name, here, for `from_layers` and for `with_options`:

    - `unroll`: how many layers to compile into one iteration of the scan, best a divisor of
        `depth`. `True` unrolls it altogether. For a shallow stack it may save time, where the
        hardware is slow to begin an iteration.
    - `reverse`: call the last layer first.
    - `kind`, `checkpoints`: how gradients are computed, as for [`loopax.filter_scan`][]. By
        default (`"lax"`) everything is kept that the backward pass needs of every layer.
        `"checkpointed"` keeps what goes into every few layers, and computes the rest again.
    - `remat`: what to compute again in the backward pass, inside each layer. `True`: all but
        what goes into the layer. A function: what that `policy` of `jax.checkpoint` does not
        save, such as `jax.checkpoint_policies.dots_saveable`. By default nothing.
    - `all_outputs`: return `(x, outputs)` for `x`, where `outputs[i]` is what came out of layer
        `i`.

    **States:** if the layers have an `eqx.nn.StateIndex` in them, such as those of
    `eqx.nn.BatchNorm` or a cache of keys and values, make the model with
    `eqx.nn.make_with_state`. In the state each index of a layer then has one value for all
    layers, with a leading axis, and each layer gets and sets its own.

    !!! Example

        ```python
        class Count(eqx.Module):
            calls: eqx.nn.StateIndex

            def __init__(self, key):
                self.calls = eqx.nn.StateIndex(jnp.array(0))

            def __call__(self, x, state):
                calls = state.get(self.calls)
                return x + calls, state.set(self.calls, calls + 1)

        stack, state = eqx.nn.make_with_state(loopax.nn.Stacked)(
            Count, 3, key=jax.random.key(0)
        )
        x, state = stack(jnp.array(0.0), state)
        x, state = stack(x, state)
        assert x == 3
        ```

    A batch of examples is a `jax.vmap` of the call: over `x` alone, with one state for all,
    or over `x` and a batch of states.

    **Raises:**

    - [`loopax.ArgumentError`][], a `TypeError`, if an argument or option is of the wrong kind.
    - [`loopax.LengthError`][], a `ValueError`, if `depth` is negative.

    Asked for in Equinox issues
    [293](https://github.com/patrick-kidger/equinox/issues/293),
    [450](https://github.com/patrick-kidger/equinox/issues/450),
    [726](https://github.com/patrick-kidger/equinox/issues/726),
    [934](https://github.com/patrick-kidger/equinox/issues/934) and
    [1057](https://github.com/patrick-kidger/equinox/issues/1057).
    """

    layers: Layer
    options: Options = eqx.field(static=True)
    # How many layers there are, where they have no arrays to tell.
    _depth: int = eqx.field(static=True)

    @public()
    def __init__(
        self,
        make_layer: Annotated[Callable[..., Layer], TO_STACK_LAYERS],
        depth: SupportsIndex,
        *,
        key: Annotated[jax.Array, TO_MAKE_A_KEY],
        **options: Unpack[OptionsDict],
    ):
        depth = a_count("Stacked", "depth", depth, "such as 12")
        if depth < 0:
            raise LengthError(f"Stacked: `depth` must not be negative, got {depth}.")
        self.options = Options().replace("Stacked", depth, {**options})
        make = cast(Any, eqx).filter_vmap(maker("Stacked", make_layer), axis_size=depth)
        try:
            self.layers = make(_keys("Stacked", key, depth))
        except Exception as error:
            if isinstance(make_layer, eqx.Module) and not isinstance(make_layer, eqx.Partial):
                error.add_note(made_by_a_layer("Stacked", make_layer))
            raise
        self._depth = depth

    @overload
    @classmethod
    def from_layers(
        cls,
        layers: Iterable[Layer],
        state: None = None,
        **options: Unpack[OptionsDict],
    ) -> "Stacked[Layer]": ...
    @overload
    @classmethod
    def from_layers(
        cls,
        layers: Iterable[Layer],
        state: eqx.nn.State,
        **options: Unpack[OptionsDict],
    ) -> tuple["Stacked[Layer]", eqx.nn.State]: ...
    @classmethod
    @public()
    def from_layers(
        cls,
        layers: Iterable[Layer],
        state: eqx.nn.State | None = None,
        **options: Unpack[OptionsDict],
    ) -> "Stacked[Layer] | tuple[Stacked[Layer], eqx.nn.State]":
        """Stacks layers that there are, such as those of an `eqx.nn.Sequential`.

        !!! Example

            ```python
            keys = jax.random.split(jax.random.key(0), 6)
            model = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=key) for key in keys])
            stack = loopax.nn.Stacked.from_layers(model, unroll=2)
            assert eqx.tree_equal(stack.unstack(), list(model.layers))
            ```

        **Arguments:**

        - `layers`: layers that differ in nothing but the values of their arrays: a list of
            them, an `eqx.nn.Sequential`, anything that can be iterated over.
        - `state`: the state of the model that they come from, if they are to keep their values
            in it. All layers of one stack, in their order, go with the state of that stack
            without it.
        - the options of [`loopax.nn.Stacked`][].

        **Returns:**

        The stack; with `state` a pair, of the stack and the state of a model that has it in
        place of the layers.

        **Raises:**

        - [`loopax.MismatchError`][], a `TypeError`, if a layer differs from the first one in
            something else. The path begins with its index: `layers[2].activation`.
        - [`loopax.ArgumentError`][], a `TypeError`, if an argument is of the wrong kind, or the
            state has no values for the layers.
        - [`loopax.LengthError`][], a `ValueError`, if there are no layers.
        """
        caller = "Stacked.from_layers"
        apart = [checked(caller, "`layers` holds", layer) for layer in cast(Any, layers)]
        depth = len(apart)
        if depth == 0:
            raise LengthError(f"{caller}: `layers` is empty; there is nothing to stack.")
        how = Options().replace(caller, depth, {**options})
        together = stack(caller, "layers", _state.joined(apart), False, UNLIKE)
        new = _of(cls, {"layers": together, "options": how, "_depth": depth})
        if state is None:
            return new
        with _own_state(caller, apart[0]):
            return new, _state.joined_state(state, apart, together)

    def _with(self, **fields: Any) -> "Stacked[Layer]":
        return _of(type(self), {**self.__dict__, **fields})

    @overload
    def unstack(self, state: None = None) -> list[Layer]: ...
    @overload
    def unstack(self, state: eqx.nn.State) -> tuple[list[Layer], eqx.nn.State]: ...
    @public()
    def unstack(
        self, state: eqx.nn.State | None = None
    ) -> list[Layer] | tuple[list[Layer], eqx.nn.State]:
        """The layers, one by one: the inverse of `from_layers`.

        Likewise `stack[i]` is one layer, `stack[i:j]` a stack of some, `len(stack)` how many
        there are, and a loop over `stack` goes over them.

        **Arguments:**

        - `state`: the state of the model, if the layers are to keep their values in it.

        **Returns:**

        A list of layers; with `state` a pair, of the list and the state of a model that has
        the layers in place of the stack. In that each layer has values of its own.
        """
        layers = list(self)
        if state is None:
            return layers
        self._own("Stacked.unstack", state, len(layers))
        return layers, _state.parted_state(state, self.layers, layers)

    @public()
    def with_options(self, **options: Unpack[OptionsDict]) -> "Stacked[Layer]":
        """The same layers, run in another way.

        !!! Example

            ```python
            stack = loopax.nn.Stacked(
                lambda key: eqx.nn.Linear(4, 4, key=key), 3, key=jax.random.key(0)
            )
            x, outputs = stack.with_options(all_outputs=True)(jnp.ones(4))
            assert outputs.shape == (3, 4) and jnp.all(outputs[-1] == x)
            ```

        **Arguments:**

        - the options of [`loopax.nn.Stacked`][]. Those that are not given stay as they are.
        """
        caller = "Stacked.with_options"
        return self._with(options=self.options.replace(caller, len(self), {**options}))

    def is_stateful(self) -> bool:
        """Whether to call this with a state, as `eqx.nn.Sequential` asks of its layers."""
        if isinstance(self.layers, eqx.nn.StatefulLayer):
            return self.layers.is_stateful()
        return bool(_state.indices(self.layers))

    @public()
    def __call__(
        self,
        x: Any,
        *arguments: Any,
        key: Annotated[jax.Array | None, TO_MAKE_A_KEY] = None,
        **keywords: Any,
    ) -> Any:
        """Calls the layers one after the other.

        **Arguments:**

        - `x`: what the first layer is called with: any PyTree. Each layer has to return
            something like it, up to array values.
        - `state`: next, or by name, an `eqx.nn.State`, if the layers have states.
        - `key`: if given, it is split by the number of layers, and each gets one, as in
            `eqx.nn.Sequential`.
        - anything else goes to every layer as it is.

        **Returns:**

        What the last layer returns. If `state` is passed, a pair, of that and the new state.

        **Raises:**

        - [`loopax.MismatchError`][], a `TypeError`, if a layer returns an `x` of another
            structure, shape or dtype.
        - [`loopax.ArgumentError`][], a `TypeError`, if the layers have states and none is
            passed, or another model's.
        - [`loopax.LengthError`][], a `ValueError`, if the arrays of the layers are not of one
            length.
        """
        state: eqx.nn.State | None = None
        if arguments and isinstance(arguments[0], eqx.nn.State):
            state, arguments = arguments[0], arguments[1:]
        elif isinstance(keywords.get("state"), eqx.nn.State):
            state = keywords.pop("state")
        depth, options = len(self), self.options
        own = self._own("Stacked", state, depth)
        keys = None if key is None else _keys("Stacked", key, depth)
        run = Run(arguments, keywords, options, depth)
        with jax.named_scope("loopax.nn.Stacked"), _no_options("Stacked", keywords):
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

    def _own(self, caller: str, state: eqx.nn.State | None, depth: int) -> eqx.nn.State | None:
        """The part of `state` that belongs to the layers."""
        if not self.is_stateful():
            return None
        if state is None:
            raise no_state(caller, self.layers)
        with _own_state(caller, self.layers):
            own = cast(Any, state).substate(self.layers)
        for value in _tree.leaves(own):
            if jnp.shape(value)[:1] != (depth,):
                raise no_row_for_each(caller, depth, value)
        return own

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
    def __getitem__(self, index: Any) -> "Layer | Stacked[Layer]":
        depth = len(self)
        arrays, static = split(self.layers, False)
        if isinstance(index, slice):
            places = range(depth)[index]
            some = static.merge(array[index] for array in arrays)
            some = _state.chosen(some, depth, places)
            return self._with(layers=some, _depth=len(places))
        place = a_count("Stacked", "index", index, "or a slice of those")
        try:
            place = range(depth)[place]
        except IndexError:
            raise IndexError(f"Stacked: there is no layer {index} of {depth}.") from None
        one = static.merge(array[place] for array in arrays)
        return _state.parted(one, depth, place)


def _of(cls: type["Stacked[Layer]"], fields: dict[str, Any]) -> "Stacked[Layer]":
    # As Equinox makes a Module again of its leaves: `__init__` makes layers of its own.
    new = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(new, name, value)
    return new


def _keys(caller: str, key: Any, depth: int) -> Any:
    try:
        return jr.split(key, depth)
    except (TypeError, ValueError):
        raise no_key(caller, key) from None


@contextlib.contextmanager
def _no_options(caller: str, keywords: dict[str, Any]) -> Generator[None]:
    # A layer may have an argument of that name, so that it is for the layer to refuse it.
    try:
        yield
    except TypeError as error:
        names = [name for name in keywords if name in OPTIONS]
        if names and not isinstance(error, Refusal):
            error.add_note(options_in_call(caller, names, keywords))
        raise


@contextlib.contextmanager
def _own_state(caller: str, layer: Any) -> Generator[None]:
    try:
        yield
    except KeyError:
        raise foreign_state(caller, layer) from None
