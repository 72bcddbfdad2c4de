"""Which lines does a traceback show, when the user's function raises? The user's, and the call of it."""

from __future__ import annotations

import types
from pathlib import Path

import jax

_HERE = str(Path(__file__).parent)


def hide_ours(error: BaseException) -> None:
    """Takes the frames of this package out of the traceback of an error that the user's code raised.

    As JAX does with its own: ``jax_traceback_filtering='off'`` shows all.
    """
    if jax.config.jax_traceback_filtering == 'off':
        return
    kept = []
    frame = error.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_HERE):
            kept.append(frame)
        frame = frame.tb_next
    chain = None
    for frame in reversed(kept):
        chain = types.TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = chain
