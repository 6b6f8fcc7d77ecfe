"""What loopax takes from JAX and Equinox under types of its own.

One function is private. `typematch` is how `jax.lax` decides whether a carry has kept its
type. There is no public form of it, and a copy would drift: it knows of sharding, of manual
axes, of memory spaces.

The others are public, but annotated in ways that leave a strict type checker with unknowns.
"""

from typing import Any

import equinox as eqx
import jax
from jax._src import core


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
