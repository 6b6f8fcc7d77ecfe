"""What the examples share: a measured number beside the bound that it must meet."""

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree


_RELATIONS = {"<=": operator.le, ">": operator.gt, "==": operator.eq}


class Check(NamedTuple):
    name: str
    value: float
    relation: Literal["<=", ">", "=="]
    bound: float

    @property
    def ok(self) -> bool:
        # False for NaN, whatever the relation.
        return bool(_RELATIONS[self.relation](self.value, self.bound))

    def __str__(self) -> str:
        wanted = f"{self.relation} {self.bound:g}"
        verdict = "ok" if self.ok else "FAILED"
        return f"{self.name:<44} {self.value:>10.4g}  {wanted:<12} {verdict}"


def report(checks: Iterable[Check]) -> bool:
    """Prints every check, and says whether all of them hold."""
    checks = list(checks)
    for check in checks:
        print(f"  {check}", flush=True)
    return len(checks) > 0 and all(check.ok for check in checks)


def distance(a: PyTree[Array], b: PyTree[Array]) -> float:
    """The largest absolute difference between two trees of arrays."""
    gaps = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)), a, b)
    return float(jnp.max(jnp.stack(jax.tree.leaves(gaps))))


@contextmanager
def double_precision() -> Iterator[None]:
    """`jax.enable_x64(True)`, which older versions of JAX lack."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
