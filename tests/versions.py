"""What is called otherwise in one supported version of JAX or another."""

from contextlib import contextmanager

import jax


NEW_NAMES = hasattr(jax.lax, "pcast")

# What stands before the axes that a type varies over, where it is written.
VARIES = "V:" if NEW_NAMES else ""


def to_vary(x, axes):
    """`jax.lax.pcast(x, axes, to="varying")`."""
    return jax.lax.pcast(x, axes, to="varying") if NEW_NAMES else jax.lax.pvary(x, axes)


def advice_to_vary(axes):
    """The same as we tell it."""
    if NEW_NAMES:
        return f"jax.lax.pcast(..., {axes!r}, to='varying')"
    return f"jax.lax.pvary(..., {axes!r})"


@contextmanager
def enable_x64(on=True):
    """`jax.enable_x64`."""
    owner = jax if hasattr(jax, "enable_x64") else jax.experimental
    with owner.enable_x64(on):
        yield
