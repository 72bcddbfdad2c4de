"""Tracebacks of errors that the user's function raises, without the frames of what runs it."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from pathlib import Path

import jax

# This room, and the one that follows the batch through the function.
_OURS = tuple(f'{Path(__file__).parents[1] / room}{os.sep}' for room in ('_transforms', '_follow'))


class HidingOurs:
    """A context manager that takes the frames of scalax out of tracebacks of errors of the user's code.

    As JAX does with its own: ``jax_traceback_filtering='off'`` shows all.

    Args:
        codes: the code of the functions that call the user's.
    """

    def __init__(self, *codes: types.CodeType) -> None:
        self._codes = codes

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.hide(error)

    def hide(self, error: Exception) -> bool:
        """Hides the frames if *error* comes from the user's code; returns whether it does."""
        trace = list(_linked(error.__traceback__))
        if all(each.tb_frame.f_code not in self._codes for each in trace):
            return False
        if jax.config.jax_traceback_filtering != 'off':
            error.__traceback__ = None
            for each in reversed(trace):
                if not each.tb_frame.f_code.co_filename.startswith(_OURS):
                    kept = types.TracebackType(
                        error.__traceback__, each.tb_frame, each.tb_lasti, each.tb_lineno
                    )
                    error.__traceback__ = kept
        return True


def _linked(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
