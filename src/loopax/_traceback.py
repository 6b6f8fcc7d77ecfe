"""Tracebacks without the frames of this package."""

import os
import types

from ._jax import config


_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def hide_own_frames(error: BaseException) -> None:
    """Takes the frames of this package out of the traceback of `error`.

    JAX filters its own frames; what is left then is the user's. As there,
    `JAX_TRACEBACK_FILTERING=off` keeps everything.

    This is called on the way out, instead of wrapping functions in a boundary of JAX's:
    JAX notes the stack of every operation that it traces, so that one frame more is paid
    for at each of them.
    """
    if config.jax_traceback_filtering == "off":
        return
    kept: list[types.TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(_HERE):
            kept.append(entry)
        entry = entry.tb_next
    chain: types.TracebackType | None = None
    for entry in reversed(kept):
        chain = types.TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = chain
