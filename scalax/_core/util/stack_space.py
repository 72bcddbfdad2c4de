"""Room on the stack of Python's interpreter for deep calls."""

from __future__ import annotations

import types
from typing import TypeVar, cast

F = TypeVar('F')

# The stack of a frame, in words of 8 bytes. CPython makes a piece of 1 MiB of it, and what is not
# used takes no memory.
_WORDS = 70_000


def with_stack_space(function: F) -> F:
    """The function, changed so that its frame and those of all calls inside it lie in one piece of memory.

    CPython keeps frames in pieces of 16 KiB. It maps a piece when a call does not fit in the last one, and
    unmaps it when that call returns. Code that calls JAX is some fifty frames deep, and if its loops are at
    the end of a piece, that happens thousands of times: tracing took a third longer at one depth than at
    the next. A frame that asks for a larger stack gets a larger piece, and calls inside use the rest of it.

    Args:
        function: a Python function, which is changed itself; no generator, whose frames lie elsewhere.
    """
    plain = cast(types.FunctionType, function)
    plain.__code__ = plain.__code__.replace(co_stacksize=_WORDS)
    return function
