"""Strict JSON, and files of it that may be damaged or hostile: bounded work, and regular files only."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any

LARGEST = 100_000_000  # bytes of a file
DEEPEST = 127  # arrays and objects in one another
_DIGITS = 300  # of an integer that is a finite float whatever they are
_LONGEST = 120  # characters of a value in a message


def parse(text: str | bytes | bytearray) -> Any:
    """Parses a JSON text, and refuses what JSON readers disagree about.

    Python's own reader accepts more: NaN, a key twice (the last one counts), half of a surrogate pair, and
    nesting up to the limit of the interpreter.

    Args:
        text: bytes are UTF-8.

    Raises:
        ValueError: it is not strict JSON; the message has the reason.

    Example:
        >>> parse('{"a": [1, null]}')
        {'a': [1, None]}
        >>> parse('{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ...
        ValueError: the key 'a' is there twice in one object
    """
    if isinstance(text, bytes | bytearray):
        text = text.decode('utf-8')
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check(value)
    return value


_TOO_DEEP = f'it is nested more than {DEEPEST} deep'


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f'the key {brief(twice)} is there twice in one object')
    return found


def _constant(name: str) -> Any:
    raise ValueError(f'{name} is no number of JSON')


def _integer(text: str) -> float:
    if len(text) > _DIGITS:
        _require_finite(float(text))
    return -0.0 if text == '-0' else int(text)


def _require_finite(number: float) -> None:
    if not math.isfinite(number):
        raise ValueError('a number is too large')


def _check(value: Any) -> None:
    """Raises ValueError about strings that are not Unicode, infinite numbers, and deep nesting."""
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                if not item.isascii():
                    item.encode('utf-8')
            elif kind is float:
                _require_finite(item)
            elif kind is dict or kind is list:
                if depth == DEEPEST:
                    raise ValueError(_TOO_DEEP)
                inner.extend(item)
                if kind is dict:
                    inner.extend(item.values())
        level, depth = inner, depth + 1


def brief(value: Any) -> str:
    """A value from a file as messages show it: printable, on one line, and not too long."""
    if isinstance(value, str):
        value = value[: 2 * _LONGEST]
    text = repr(value)
    return text if len(text) <= _LONGEST else f'{text[: _LONGEST // 2]} ... {text[-_LONGEST // 3 :]}'


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[io.FileIO]:
    """A regular file, opened for reading without a buffer. Pipes and devices might block or never end.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file, or the path is invalid.
    """
    # Opening a pipe without a writer would block.
    with open(path, 'rb', buffering=0, opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError('it is no regular file')
        yield file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, 'O_NONBLOCK', 0))


def read(path: str | os.PathLike[str], most: int = LARGEST) -> bytearray:
    """All bytes of a regular file.

    Args:
        path: the path of the file.
        most: the largest number of bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, is larger than that, or changes while it is read.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f'it has {size:,} bytes, and {most:,} are taken at most')
        return exactly(file, size, 0)


def exactly(file: io.FileIO, size: int, position: int) -> bytearray:
    """Reads *size* bytes of a file, from *position* on.

    Raises:
        OSError: it cannot be read.
        ValueError: it has become shorter.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    file.seek(position)
    while done < size:
        count = file.readinto(view[done:])
        if not count:
            raise ValueError(f'it became shorter while it was read: {done:,} of {size:,} bytes were there')
        done += count
    return data


def reason(error: OSError | ValueError) -> str:
    """The message of an error of `read` or `parse`, without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
