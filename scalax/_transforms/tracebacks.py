"""Tracebacks of errors that the user's function raises: the frames of this room are taken out."""

from __future__ import annotations

import os
import traceback
import types
from pathlib import Path

import jax

_OURS = f'{Path(__file__).parent}{os.sep}'


def arose_below(error: BaseException, *codes: types.CodeType) -> bool:
    """Whether *error* comes out of what a function with one of these codes has called."""
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def hide_ours(error: BaseException) -> None:
    """Takes the frames of what runs the user's function out of the traceback of an error that it raised.

    As JAX does with its own: ``jax_traceback_filtering='off'`` shows all.
    """
    if jax.config.jax_traceback_filtering == 'off':
        return
    kept = []
    frame = error.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_OURS):
            kept.append(frame)
        frame = frame.tb_next
    chain = None
    for frame in reversed(kept):
        chain = types.TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = chain
