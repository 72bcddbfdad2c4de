"""Parameters that were renamed: callers may still use the names of earlier versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec('Given')
Result = TypeVar('Result')


def renamed(**names: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator: keywords may be given by their old names, too.

    Args:
        **names: old name -> the name that it has now.

    Example:
        >>> @renamed(pytree='tree')
        ... def count(tree):
        ...     return len(tree)
        >>> count(tree=[1, 2]), count(pytree=[1, 2])
        (2, 2)
    """

    def decorate(fun: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(fun)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            for old in names.keys() & kwargs.keys():
                # If both are given, Python raises about the old one.
                if names[old] not in kwargs:
                    kwargs[names[old]] = kwargs.pop(old)
            return fun(*args, **kwargs)

        return call

    return decorate
