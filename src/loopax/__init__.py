"""Filtered control flow for JAX: loops whose carry may be any PyTree."""

from ._errors import (
    ArgumentError as ArgumentError,
    LengthError as LengthError,
    MismatchError as MismatchError,
)
from ._fori import filter_fori_loop as filter_fori_loop
from ._mismatch import Mismatch as Mismatch
from ._scan import filter_scan as filter_scan
from ._while import filter_while_loop as filter_while_loop


# Where users find them, and so where messages should say that they are.
for _public in (
    ArgumentError,
    LengthError,
    Mismatch,
    MismatchError,
    filter_fori_loop,
    filter_scan,
    filter_while_loop,
):
    _public.__module__ = __name__
del _public

__version__ = "0.1.0"
