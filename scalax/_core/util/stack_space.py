"""Contiguous stack space for deep Python calls."""

from __future__ import annotations

import types
from typing import TypeVar, cast

F = TypeVar('F')

# The stack of a frame, in words of 8 bytes. CPython allocates a chunk of 1 MiB for it, of which unused pages
# take no memory.
_WORDS = 70_000


def with_stack_space(function: F) -> F:
    """Changes a function so that its frame and the frames of all calls inside it share one chunk of memory.

    CPython keeps frames in chunks of 16 KiB. It maps a chunk when a call does not fit in the last one, and
    unmaps it when that call returns. Code that calls JAX is some fifty frames deep, and if its loops run at
    the end of a chunk, that happens thousands of times: tracing took a third longer at one depth than at
    the next. A frame that needs a larger stack gets a larger chunk, and calls inside use the rest of it.

    Args:
        function: a Python function, which is changed in place. A generator does not work: its frames are
            allocated elsewhere.
    """
    plain = cast(types.FunctionType, function)
    plain.__code__ = plain.__code__.replace(co_stacksize=_WORDS)
    return function
