"""Layers made of loops."""

from ._stacked import Stacked as Stacked


__all__ = ("Stacked",)

# Messages should say where it is found, not where it is written.
Stacked.__module__ = __name__
