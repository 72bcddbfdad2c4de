"""What does FILE.py:name name? A function of a file that the user wrote."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalax.errors import ArgumentError, did_you_mean

_NAME = '__file_of_the_command__'


def load_function(named: str) -> Callable[..., Any]:
    """The function that ``FILE.py:name`` names. The file is run; what it raises is not caught.

    Raises:
        ArgumentError: there is no such file, or no such function in it.
    """
    file, colon, name = named.rpartition(':')
    if not colon or not name.isidentifier():
        raise ArgumentError(f'{named!r} names no function: write FILE.py:function')
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ArgumentError(f'{file!r} is no Python file')
    # As `python FILE.py` would have it: its neighbours can be imported, and it takes the name of no module.
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith('_')]
        raise ArgumentError(f'{file!r} has no function {name!r} ({did_you_mean(name, own)})')
    return function


def pair(returned: Any, named: str, second: str) -> tuple[Any, Any]:
    """What such a function returned: two values.

    Args:
        returned: what it returned.
        named: what the user called it.
        second: what the second value is, for the message.

    Raises:
        ArgumentError: it is something else.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ArgumentError(f'{named!r} has to return {second}; it returned {type(returned).__name__}')
    return returned
