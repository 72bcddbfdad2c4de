"""Renamed parameters: callers may still use the names of earlier versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Params = ParamSpec('Params')
Result = TypeVar('Result')


def renamed(**names: str) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Returns a decorator that also accepts keywords by their old names.

    Args:
        **names: old name -> new name.

    Example:
        >>> @renamed(pytree='tree')
        ... def count(tree):
        ...     return len(tree)
        >>> count(tree=[1, 2]), count(pytree=[1, 2])
        (2, 2)
    """

    def decorate(fun: Callable[Params, Result]) -> Callable[Params, Result]:
        @functools.wraps(fun)
        def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            for old in names.keys() & kwargs.keys():
                # If both names are given, the old one stays, and Python raises an error about it.
                if names[old] not in kwargs:
                    kwargs[names[old]] = kwargs.pop(old)
            return fun(*args, **kwargs)

        return call

    return decorate
