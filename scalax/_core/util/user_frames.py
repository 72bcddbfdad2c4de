"""Which frames of a stack are the user's, for plans and reports alike."""

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
# Cells of IPython, of Jupyter and of Colab: each is a file of its own, which is gone when it has run.
_CELL = re.compile(r'<ipython-input-\d+-|.*\bipykernel_\d+[/\\]\d+\.py$|.*\bipython-input-[\d-]+\.py$')


def innermost_user_frame(frames: Iterable[Frame], file_of: Callable[[Frame], str]) -> Frame | None:
    """The innermost frame of the user: neither ours nor generated, and outside of libraries if possible.

    Args:
        frames: the frames, the innermost first.
        file_of: the path of a frame's file.

    Example:
        >>> innermost_user_frame(
        ...     ['<string>', '/usr/lib/python3/site-packages/optax/a.py', '/home/me/train.py'], str
        ... )
        '/home/me/train.py'
    """
    return next(iter(_users(frames, file_of)), None)


def user_call_path(
    frames: Iterable[Frame], file_of: Callable[[Frame], str], tracing: tuple[str, ...]
) -> list[Frame]:
    """The frames of the user from the innermost up to the function that is traced, in that order.

    Args:
        frames: the frames, the innermost first.
        file_of: the path of a frame's file.
        tracing: the folders of ours whose functions trace that function.

    Example:
        >>> user_call_path(['/me/model.py', '/me/train.py', '/ours/make.py', '/me/main.py'], str, ('/ours/',))
        ['/me/model.py', '/me/train.py']
    """
    inside = []
    for frame in frames:
        if file_of(frame).startswith(tracing):
            break
        inside.append(frame)
    return _users(inside, file_of)


def _users(frames: Iterable[Frame], file_of: Callable[[Frame], str]) -> list[Frame]:
    """The frames that are neither ours nor generated; without those of libraries, if any others are left."""
    written = [
        frame for frame in frames if not file_of(frame).startswith(('<', _PACKAGE)) or is_cell(file_of(frame))
    ]
    own = [frame for frame in written if not _is_of_library(file_of(frame))]
    return own or written


def _is_of_library(file: str) -> bool:
    return file.startswith(_STANDARD) or any(part in _LIBRARIES for part in file.split(os.sep))


def is_cell(file: str) -> bool:
    """Whether a file is the cell of a notebook.

    Example:
        >>> is_cell('/tmp/ipykernel_81/1220511822.py'), is_cell('/home/me/train.py')
        (True, False)
    """
    return bool(_CELL.match(file))


def file_text(file: str) -> str:
    """The name of a file as messages say it; of the cell of a notebook, its number if it is known.

    Example:
        >>> file_text('/home/me/train.py'), file_text('/tmp/ipykernel_81/1220511822.py')
        ('train.py', 'notebook')
    """
    if not is_cell(file):
        return os.path.basename(file)
    # The shell of the notebook knows which cell it is, if this runs in it.
    ipython = sys.modules.get('IPython')
    shell = None if ipython is None else ipython.get_ipython()
    label = getattr(getattr(shell, 'compile', None), 'format_code_name', lambda _: None)(file)
    return label[1] if label else 'notebook'
