"""What loopax takes from JAX and Equinox under types of its own.

Two functions are private. `typematch` is how `jax.lax` decides whether a carry has kept its
type. There is no public form of it, and a copy would drift: it knows of sharding, of manual
axes, of memory spaces. `register_exclusion` is how JAX and its libraries keep their own lines
out of the locations of operations, which profiles and messages show.

The others are public, but annotated in ways that leave a strict type checker with unknowns.
"""

from typing import Any

import equinox as eqx
import jax
from jax._src import core, source_info_util


_jax: Any = jax
_eqx: Any = eqx

lax = _jax.lax
make_jaxpr = _jax.make_jaxpr
config = _jax.config
PyTreeDef = _jax.tree_util.PyTreeDef
partition = _eqx.partition
combine = _eqx.combine


def typematch(before: Any, after: Any) -> bool:
    """Whether `lax` takes one type for the other. It ignores weak types."""
    return bool(core.typematch(before, after))


def hide_source(directory: str) -> None:
    """Makes JAX note the user's line as the source of an operation, not one of ours."""
    source_info_util.register_exclusion(directory)
