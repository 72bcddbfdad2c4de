"""The user's frames of a stack, for plans and reports."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

Frame = TypeVar('Frame')

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARIES = ('site-packages', 'dist-packages')
_STANDARD = os.path.dirname(os.__file__) + os.sep  # Python's own library
# Cells of IPython, Jupyter and Colab: each is a temporary file.
_CELL = re.compile(r'<ipython-input-\d+-|.*\bipykernel_\d+[/\\]\d+\.py$|.*\bipython-input-[\d-]+\.py$')


def innermost_user_frame(frames: Iterable[Frame], file_of: Callable[[Frame], str]) -> Frame | None:
    """Returns the innermost frame of the user's code.

    Frames of scalax and generated code are skipped, and frames of libraries if there are others.

    Args:
        frames: the frames, the innermost first.
        file_of: the path of a frame's file.

    Example:
        >>> innermost_user_frame(
        ...     ['<string>', '/usr/lib/python3/site-packages/optax/a.py', '/home/me/train.py'], str
        ... )
        '/home/me/train.py'
    """
    return next(iter(_user_frames(frames, file_of)), None)


def user_call_path(
    frames: Iterable[Frame], file_of: Callable[[Frame], str], tracing: tuple[str, ...]
) -> list[Frame]:
    """Returns the frames of the user from the innermost one to the function that is traced.

    Args:
        frames: the frames, the innermost first.
        file_of: the path of a frame's file.
        tracing: the folders of scalax whose code traces that function.

    Example:
        >>> user_call_path(['/me/model.py', '/me/train.py', '/ours/make.py', '/me/main.py'], str, ('/ours/',))
        ['/me/model.py', '/me/train.py']
    """
    inside = []
    for frame in frames:
        if file_of(frame).startswith(tracing):
            break
        inside.append(frame)
    return _user_frames(inside, file_of)


def _user_frames(frames: Iterable[Frame], file_of: Callable[[Frame], str]) -> list[Frame]:
    """Returns the frames outside of scalax; only those outside of libraries, if there are any."""
    candidates = [
        frame for frame in frames if not file_of(frame).startswith(('<', _PACKAGE)) or is_cell(file_of(frame))
    ]
    return [frame for frame in candidates if not _is_of_library(file_of(frame))] or candidates


def _is_of_library(file: str) -> bool:
    return file.startswith(_STANDARD) or any(part in _LIBRARIES for part in file.split(os.sep))


def is_cell(file: str) -> bool:
    """Returns whether a file is the cell of a notebook.

    Example:
        >>> is_cell('/tmp/ipykernel_81/1220511822.py'), is_cell('/home/me/train.py')
        (True, False)
    """
    return bool(_CELL.match(file))


def file_text(file: str) -> str:
    """Returns the name of a file as messages show it; for the cell of a notebook, its number if it is known.

    Example:
        >>> file_text('/home/me/train.py'), file_text('/tmp/ipykernel_81/1220511822.py')
        ('train.py', 'notebook')
    """
    if not is_cell(file):
        return os.path.basename(file)
    # The shell of the notebook has the number, if this runs in it.
    ipython = sys.modules.get('IPython')
    shell = None if ipython is None else ipython.get_ipython()
    label = getattr(getattr(shell, 'compile', None), 'format_code_name', lambda _: None)(file)
    return label[1] if label else 'notebook'
