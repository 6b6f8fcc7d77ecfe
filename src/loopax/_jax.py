"""All that loopax uses of JAX's insides, and why.

* `typematch` is how `jax.lax` decides whether a carry has kept its type. There is no
  public form of it, and a copy would drift: it knows of sharding, of manual axes, of
  memory spaces.
* `api_boundary` and `register_exclusion` take frames that are not the user's out of
  tracebacks, as they do for `jax.lax` and Equinox.
"""

import pathlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jax._src import core, traceback_util


_Function = TypeVar("_Function", bound=Callable[..., Any])


def typematch(before: Any, after: Any) -> bool:
    """Whether `lax` takes one type for the other. It ignores weak types."""
    return bool(core.typematch(before, after))


def api_boundary(function: _Function) -> _Function:
    """Filters the traceback of what is raised inside `function`."""
    return cast(_Function, traceback_util.api_boundary(function))


def hide_frames(directory: str) -> None:
    """Leaves the frames of the files in `directory` out of filtered tracebacks."""
    for path in pathlib.Path(directory).rglob("*.py"):
        traceback_util.register_exclusion(str(path))
