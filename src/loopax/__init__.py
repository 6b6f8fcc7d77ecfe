"""Filtered control flow for JAX: loops whose carry may be any PyTree."""

import os

from ._errors import MismatchError as MismatchError
from ._fori import filter_fori_loop as filter_fori_loop
from ._jax import hide_frames
from ._mismatch import Mismatch as Mismatch
from ._scan import filter_scan as filter_scan
from ._while import filter_while_loop as filter_while_loop


hide_frames(os.path.dirname(__file__))
del hide_frames, os

__version__ = "0.1.0"
