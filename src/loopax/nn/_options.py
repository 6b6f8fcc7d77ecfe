"""How the scan over layers is to run."""

import dataclasses
import operator
import typing
from collections.abc import Callable
from typing import Any, SupportsIndex, TypedDict

from beartype.door import is_bearable

from .._errors import ArgumentError, no_unroll, wrong_argument
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
            if name not in _HINTS:
                raise ArgumentError(
                    f"{caller}: there is no option `{name}`, but {', '.join(_HINTS)}. What is "
                    "meant for the layers goes to them when they are made, or called."
                )
            if not is_bearable(value, _HINTS[name]):
                raise wrong_argument(caller, name, _HINTS[name], value)
        new = dataclasses.replace(self, **{k: _plain(v) for k, v in changes.items()})
        kind = kind_of(caller, new.kind, new.checkpoints, depth, "", plain=True)
        if kind.name != "lax" and (new.unroll is True or new.unroll != 1):
            raise no_unroll(caller, kind.name)
        return new


_HINTS = typing.get_type_hints(OptionsDict)


def _plain(value: Any) -> Any:
    """`value`, and if it is an integer of some other library's, Python's."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return value
    return operator.index(value)
