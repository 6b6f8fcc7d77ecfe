"""What a stack of layers says."""

from collections.abc import Sequence
from typing import Any, cast

import equinox as eqx
import jax

from .._advice import LAYERS, for_carry, hints
from .._errors import ArgumentError, MismatchError, report
from .._mismatch import Mismatch
from .._words import named, shown, tree_text, type_text


UNLIKE = (
    "Layers that are not alike go before or after the stack, in an eqx.nn.Sequential; or each "
    "of the stacked layers is a block of unlike ones."
)


def layer_mismatch(caller: str, layer: Any, mismatches: Sequence[Mismatch]) -> MismatchError:
    """A layer returned what the next one could not be called with in the same way."""
    headline = (
        f"{caller}: {shown(layer)} must return an `x` like the one it was given, up to array "
        "values, for the next layer to go on with, but:"
    )
    what_to_do = hints(mismatches, for_carry, LAYERS)
    advice = [*(f"  * {hint}" for hint in what_to_do), "", UNLIKE]
    return MismatchError(report(headline, mismatches, advice), mismatches)


def no_layer(caller: str, where: str, made: Any) -> ArgumentError:
    """What was to be a layer cannot be called."""
    text = f"{caller}: a layer must be callable, but {where} {tree_text(made)}."
    if isinstance(made, tuple) and any(
        isinstance(part, eqx.nn.State) for part in cast(Any, made)
    ):
        text += (
            " Let it return the layer alone, and make the whole model with "
            "eqx.nn.make_with_state: that is what collects the states."
        )
    return ArgumentError(text)


TO_STACK_LAYERS = "To stack layers that there are, call Stacked.from_layers."
TO_MAKE_A_KEY = "A random key is made by jax.random.key(0)."

_A_LAYER_ITSELF = (
    "If it is a layer itself, pass what makes it instead: a class, or a function of a key. "
    + TO_STACK_LAYERS
)


def made_by_a_layer(caller: str, layer: Any) -> str:
    """A note to an error that came up when a layer was called to make one."""
    return (
        f"{caller}: `make_layer` is {tree_text(layer)}, and was called with a key, to make a "
        f"layer. {_A_LAYER_ITSELF}"
    )


def more_than_a_key(caller: str, make_layer: Any, needed: Sequence[str]) -> ArgumentError:
    """What makes layers, or a layer in its place, cannot be called with a key alone."""
    names = ", ".join(f"`{name}`" for name in needed)
    if isinstance(make_layer, eqx.Module) and not isinstance(make_layer, eqx.Partial):
        advice = _A_LAYER_ITSELF
    else:
        advice = (
            "Give it the rest first, by functools.partial or a lambda: "
            f"lambda key: {named(make_layer)}(..., key=key)."
        )
    return ArgumentError(
        f"{caller}: `make_layer` is called with a key alone, make_layer(key=key), but "
        f"{shown(make_layer)} needs {names} too. {advice}"
    )


def no_key(caller: str, key: Any) -> ArgumentError:
    """What was to be split, into a key for each layer, is not one key."""
    return ArgumentError(
        f"{caller}: `key` must be one random key, such as jax.random.key(0), which is split by "
        f"the number of layers, but is {tree_text(key)}."
    )


def options_in_call(caller: str, names: Sequence[str], values: dict[str, Any]) -> str:
    """A note to an error of a layer that was called with an option of the stack."""
    some = ", ".join(f"{name}={values[name]!r}" for name in names)
    return (
        f"{caller}: what a stack is called with goes to its layers. To run it in another way, "
        f"call stacked.with_options({some})."
    )


def no_state(caller: str, layer: Any) -> ArgumentError:
    """Layers with states were called without one."""
    return ArgumentError(
        f"{caller}: {shown(layer)} has a state. Make the model with eqx.nn.make_with_state, "
        "and call this with the state that it returns, right after `x`: "
        "x, state = stacked(x, state)."
    )


def foreign_state(caller: str, layer: Any) -> ArgumentError:
    """The state is one of other layers."""
    return ArgumentError(
        f"{caller}: `state` has no values for {shown(layer)} as it is stacked here. It must "
        "come from the eqx.nn.make_with_state that made this model. Layers that are taken out "
        "of a stack, or put into one, take their values along if the state is passed to "
        "`unstack` or `from_layers` as well."
    )


def no_row_for_each(caller: str, depth: int, value: Any) -> ArgumentError:
    """A value in the state is not one for each layer."""
    return ArgumentError(
        f"{caller}: `state` has {type_text(jax.typeof(value))}, whose first axis is not that "
        f"of the {depth} layers. A batch of states is for jax.vmap to take apart: "
        "jax.vmap(stacked)(x, state), or eqx.filter_vmap over stacked.unstack(state)."
    )


def no_state_returned(caller: str, layer: Any, result: Any) -> ArgumentError:
    """A layer with a state returned none."""
    return ArgumentError(
        f"{caller}: {shown(layer)} has a state, and so must return a pair (x, state), but "
        f"returned {tree_text(result)}."
    )
