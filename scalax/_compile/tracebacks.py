"""Tracebacks of errors from the user's functions, without scalax's internal frames."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

_INTERNAL = f'{Path(__file__).parent}{os.sep}'


def run_user_function(fun: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Calls a user's function. An error whose traceback contains this frame comes from the function."""
    return fun(*args, **keywords)


class HideInternalFrames:
    """A context manager that removes scalax's frames from the tracebacks of errors in the user's code.

    JAX does the same with its frames. ``jax_traceback_filtering='off'`` shows all frames.

    Args:
        codes: the code objects of functions that call the user's code, besides `run_user_function`.
    """

    def __init__(self, *codes: types.CodeType) -> None:
        self._codes = {run_user_function.__code__, *codes}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.hide(error)

    def hide(self, error: Exception) -> bool:
        """Removes the frames if *error* comes from the user's code, and returns whether it does."""
        entries, entry = [], error.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        if self._codes.isdisjoint(entry.tb_frame.f_code for entry in entries):
            return False
        if jax.config.jax_traceback_filtering != 'off':
            visible = None
            for entry in reversed(entries):
                if not entry.tb_frame.f_code.co_filename.startswith(_INTERNAL):
                    visible = types.TracebackType(visible, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
            error.__traceback__ = visible
        return True
