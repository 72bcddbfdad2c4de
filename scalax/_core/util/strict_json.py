"""JSON from files that may be damaged or hostile: bounded work, errors with their place, no pipes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import reprlib
import stat
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

LARGEST = 100_000_000  # bytes of a file
DEEPEST = 127  # arrays and objects inside each other
_MOST_DIGITS = 100
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxdict = 8
_REPR.maxstring, _REPR.maxlong = 120, 80
# Possessive quantifiers: a string of 100 MB must not fill the memory with positions to go back to. A string
# without an end matches too, or the search would go on at each quote in it.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(r'\\u[dD][89a-fA-F]')


def parse(text: bytes, deepest: int = DEEPEST) -> Any:
    """Parses a JSON text, and rejects what JSON readers disagree about.

    Python's reader takes the last value of a repeated key, accepts half of a surrogate pair, and recurses as
    deep as the interpreter allows, which ends the process if a program has raised that limit. It also accepts
    NaN and Infinity; these are returned, as are numbers that are too large (as infinity), so that the caller
    can name the value that should be something else.

    Args:
        text: the text, in UTF-8.
        deepest: how many arrays and objects may be inside each other.

    Raises:
        ValueError: the text is not valid; the message has the reason, and the keys that lead to the place.

    Example:
        >>> parse(b'{"a": [1, null]}')
        {'a': [1, None]}
        >>> parse(b'{"x": {"a": 1, "a": 2}}')
        Traceback (most recent call last):
        ...
        ValueError: x: the key 'a' is there twice
    """
    decoded = text.decode('utf-8')
    _reject_deep_nesting(decoded, deepest)
    repeated: list[_Repeated] = []

    def as_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            values = _Repeated(pairs)
            repeated.append(values)
        return values

    value = json.loads(decoded, object_pairs_hook=as_object, parse_int=_integer)
    if repeated or _SURROGATE.search(decoded):
        _reject_values(value, ())
    return value


class _Repeated(dict[str, Any]):
    """An object with a repeated key, which is *key*."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__()
        self.key = ''
        for key, value in pairs:
            if key in self:
                self.key = key
            self[key] = value


def _integer(text: str) -> int | float:
    # An int of many thousand digits takes long to convert, and Python raises an error without its place.
    # Other readers take -0 as a float.
    return float(text) if len(text) > _MOST_DIGITS or text == '-0' else int(text)


def _reject_deep_nesting(text: str, deepest: int) -> None:
    """Raises ValueError for a text that is nested too deep, before a parser recurses into it."""
    depth, key = 0, ''
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token[0] == '"':
            if depth == 1:
                key = token
        elif token in '[{':
            depth += 1
            if depth > deepest:
                raise ValueError(
                    f'{_place((_unquoted(key),) if key else ())}it is nested more than {deepest} deep'
                )
        else:
            depth -= 1


def _unquoted(token: str) -> str:
    try:
        return str(json.loads(token))
    except ValueError:
        return token


def _reject_values(value: Any, keys: tuple[str, ...]) -> None:
    """Raises ValueError for objects with a repeated key, and for strings that are not Unicode."""
    if isinstance(value, _Repeated):
        raise ValueError(f'{_place(keys)}the key {brief(value.key)} is there twice')
    if isinstance(value, dict):
        for key, item in value.items():
            _reject_values(key, keys)
            _reject_values(item, (*keys, key))
    elif isinstance(value, list):
        for item in value:
            _reject_values(item, keys)
    elif isinstance(value, str):
        try:
            value.encode('utf-8')
        except UnicodeEncodeError:
            raise ValueError(
                f'{_place(keys)}the string {brief(value)} has half of a surrogate pair'
            ) from None


def _place(keys: tuple[str, ...]) -> str:
    return '/'.join(map(printable, keys)) + ': ' if keys else ''


def printable(text: str, longest: int = 200) -> str:
    r"""A text from a file as messages show it: on one line, without control characters, and not too long.

    Example:
        >>> printable('model.norm'), printable('a\x1b[2J')
        ('model.norm', 'a\\x1b[2J')
    """
    if len(text) > longest:
        text = f'{text[: longest // 2]} ... {text[-longest // 3 :]}'
    if text.isprintable():
        return text
    return ''.join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def brief(value: Any) -> str:
    """A value from a file as messages show it: its repr on one line, and not too long."""
    return printable(_REPR.repr(value))


@contextlib.contextmanager
def open_regular_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A regular file, opened for reading. Pipes and devices might block or never end.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file, or the path is invalid.
    """
    # Without O_NONBLOCK, opening a pipe waits for a process that writes to it.
    with open(path, 'rb', opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError('it is not a regular file')
        yield file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, 'O_NONBLOCK', 0))


def read(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """All bytes of a regular file.

    Args:
        path: the path of the file.
        most: the largest number of bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, is larger than that, or becomes shorter while it is read.
    """
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f'it has {size:,} bytes; the limit is {most:,}')
        return read_exactly(file, size)


def read_exactly(file: BinaryIO, size: int) -> bytes:
    """Reads the next *size* bytes of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it has become shorter.
    """
    data = file.read(size)
    if len(data) < size:
        raise ValueError(f'it became shorter while it was read: {len(data):,} of {size:,} bytes were there')
    return data


def error_reason(error: OSError | ValueError) -> str:
    """The message of an error of `read` or `parse`, without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
