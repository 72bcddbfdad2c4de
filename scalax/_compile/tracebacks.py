"""Tracebacks of errors that the user's function raises, without the frames of what runs it."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

_OURS = f'{Path(__file__).parent}{os.sep}'


def run_users(fun: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Runs a function of the user's. An error that passes through this frame comes from it."""
    return fun(*args, **keywords)


class HidingOurs:
    """A context manager that takes the frames of scalax out of tracebacks of errors of the user's code.

    As JAX does with its own: ``jax_traceback_filtering='off'`` shows all.

    Args:
        codes: the code of functions that call the user's, other than `run_users`.
    """

    def __init__(self, *codes: types.CodeType) -> None:
        self._codes = {run_users.__code__, *codes}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.hide(error)

    def hide(self, error: Exception) -> bool:
        """Hides the frames if *error* comes from the user's code; returns whether it does."""
        entries, entry = [], error.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        if self._codes.isdisjoint(entry.tb_frame.f_code for entry in entries):
            return False
        if jax.config.jax_traceback_filtering != 'off':
            kept = None
            for entry in reversed(entries):
                if not entry.tb_frame.f_code.co_filename.startswith(_OURS):
                    kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
            error.__traceback__ = kept
        return True
