"""How the scan over layers is to run."""

import dataclasses
import difflib
import operator
import typing
from collections.abc import Callable
from typing import Any, SupportsIndex, TypedDict

import equinox as eqx
from beartype.door import is_bearable

from .._errors import ArgumentError, no_unroll, wrong_argument
from .._jax import checkpoint
from .._kinds import kind_of


class OptionsDict(TypedDict, total=False):
    """`Options`, as keyword arguments."""

    unroll: SupportsIndex
    reverse: bool
    kind: str | None
    checkpoints: SupportsIndex | str | None
    remat: bool | Callable[..., Any]
    all_outputs: bool


@dataclasses.dataclass(frozen=True)
class Options:
    """What [`loopax.nn.Stacked`][] documents, in values that can be hashed."""

    unroll: int | bool = 1
    reverse: bool = False
    kind: str | None = None
    checkpoints: int | str | None = None
    remat: bool | Callable[..., Any] = False
    all_outputs: bool = False

    def replace(self, caller: str, depth: int, changes: dict[str, Any]) -> "Options":
        """With some options changed, of a stack of so many layers."""
        for name, value in changes.items():
            if name not in OPTIONS:
                close = difflib.get_close_matches(name, OPTIONS, 1)
                meant = f" Did you mean `{close[0]}`?" if close else ""
                raise ArgumentError(
                    f"{caller}: there is no option `{name}`, but {', '.join(OPTIONS)}.{meant} "
                    "What is meant for the layers goes to them when they are made, or called."
                )
            if not is_bearable(value, OPTIONS[name]):
                raise wrong_argument(caller, name, OPTIONS[name], value)
            if name == "remat" and any(
                value is each for each in (checkpoint, eqx.filter_checkpoint)
            ):
                raise ArgumentError(
                    f"{caller}: `remat` is True to do what {value.__name__} does, or one of "
                    "jax.checkpoint_policies, which says what to keep."
                )
        new = dataclasses.replace(self, **{k: _plain(v) for k, v in changes.items()})
        kind = kind_of(caller, new.kind, new.checkpoints, depth, "", plain=True)
        if kind.name != "lax" and (new.unroll is True or new.unroll != 1):
            raise no_unroll(caller, kind.name)
        return new


# The names of the options, and their types.
OPTIONS = typing.get_type_hints(OptionsDict)


def _plain(value: Any) -> Any:
    """`value`, and if it is an integer of some other library's, Python's."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return value
    return operator.index(value)
