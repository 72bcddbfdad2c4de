"""Which frame of a stack is a user's line, for the sources of plans and of followed values alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

Frame = TypeVar('Frame')

# Of the package.
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = ('site-packages', 'dist-packages')


def users_own(frames: Iterable[Frame], file_of: Callable[[Frame], str]) -> Frame | None:
    """The innermost frame of the user: neither ours nor generated, and outside of libraries if possible.

    Args:
        frames: the frames, the innermost first.
        file_of: the path of a frame's file.

    Example:
        >>> users_own(['<string>', '/usr/lib/python3/site-packages/optax/a.py', '/home/me/train.py'], str)
        '/home/me/train.py'
    """
    written = [frame for frame in frames if not file_of(frame).startswith(('<', _OWN))]
    for frame in written:
        if not any(part in _LIBRARIES for part in file_of(frame).split(os.sep)):
            return frame
    return written[0] if written else None
