"""Room on the stack of Python's interpreter for deep calls."""

from __future__ import annotations

import types
from typing import TypeVar, cast

F = TypeVar('F')

# In words of 8 bytes. CPython rounds it up to 1 MiB, of which what is not used costs no memory.
_WORDS = 70_000


def with_room(function: F) -> F:
    """The function, whose calls have their frames in one piece of memory, and so have those inside them.

    CPython keeps frames in pieces of 16 KiB. It maps a piece when a call does not fit in the last one, and
    unmaps it when that call returns. Code that calls JAX is some fifty frames deep, and if its loops are at
    the end of a piece, that happens thousands of times: tracing took a third longer at one depth than at
    the next. A frame that says that it needs more gets a larger piece, and leaves the rest to others.

    Args:
        function: a Python function; no generator, whose frames are elsewhere.
    """
    plain = cast(types.FunctionType, function)
    plain.__code__ = plain.__code__.replace(co_stacksize=_WORDS)
    return function
