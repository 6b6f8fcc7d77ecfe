"""What is called otherwise in one supported version of JAX or another."""

from contextlib import contextmanager

import jax


@contextmanager
def enable_x64(on=True):
    """`jax.enable_x64`."""
    owner = jax if hasattr(jax, "enable_x64") else jax.experimental
    with owner.enable_x64(on):
        yield
