"""Filtered control flow for JAX: `jax.lax`'s loops and branches, over any PyTree."""

import os

from . import nn as nn
from ._associative import filter_associative_scan as filter_associative_scan
from ._buffers import Buffer as Buffer
from ._cond import filter_cond as filter_cond
from ._errors import (
    ArgumentError as ArgumentError,
    LengthError as LengthError,
    MismatchError as MismatchError,
)
from ._fori import filter_fori_loop as filter_fori_loop
from ._jax import hide_source
from ._map import filter_map as filter_map
from ._mismatch import Mismatch as Mismatch
from ._scan import filter_scan as filter_scan
from ._stack import filter_stack as filter_stack, filter_unstack as filter_unstack
from ._switch import filter_switch as filter_switch
from ._while import filter_while_loop as filter_while_loop


hide_source(os.path.dirname(__file__))
del hide_source, os

__version__ = "0.1.0"

__all__ = (
    "ArgumentError",
    "Buffer",
    "LengthError",
    "Mismatch",
    "MismatchError",
    "filter_associative_scan",
    "filter_cond",
    "filter_fori_loop",
    "filter_map",
    "filter_scan",
    "filter_stack",
    "filter_switch",
    "filter_unstack",
    "filter_while_loop",
)

# Messages should say where these are found, not where they are written.
for _name in __all__:
    globals()[_name].__module__ = __name__
