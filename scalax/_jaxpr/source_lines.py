"""Source lines: the lines of the user's code that equations come from."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax

from scalax._core.util.user_frames import file_text, innermost_user_frame
from scalax._jax.equations import name_stack, traceback_of

_JAX = os.path.dirname(jax.__file__) + os.sep


def line_of(equation: Any, calls: Sequence[Any] = ()) -> str:
    """Returns the line of the user's code, such as ``'model.py:12 layer'``.

    An equation that JAX derived has the line of the innermost call around it that has one.

    Args:
        equation: the equation.
        calls: the equations whose jaxprs contain the equation, from the innermost one outwards.
    """
    lines = map(line_of_stack, map(traceback_of, (equation, *calls)))
    return next(filter(None, lines), '') or name_stack(equation)


def line_of_stack(stack: TracebackType | None) -> str:
    """Returns the innermost line of the user's code in a stack; an empty string if there is none."""
    frame = innermost_user_frame(frames_outside_jax(stack), lambda frame: frame.filename)
    return '' if frame is None else f'{file_text(frame.filename)}:{frame.lineno} {frame.name}'


def frames_outside_jax(stack: TracebackType | None) -> list[traceback.FrameSummary]:
    """Returns the frames of a stack outside of JAX, the innermost first."""
    frames = [] if stack is None else reversed(traceback.extract_tb(stack))
    return [frame for frame in frames if not frame.filename.startswith(_JAX)]
