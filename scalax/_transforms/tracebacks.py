"""Tracebacks of errors that the user's function raises: the frames of this room are taken out.

In a file of its own, because every transformation of this room uses it.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from pathlib import Path

import jax

_OURS = f'{Path(__file__).parent}{os.sep}'


class HidingOurs:
    """A context manager that takes the frames of this room out of tracebacks of errors of the user's code.

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
