"""JSON from files that may be damaged or malicious: bounded work, errors that name the location, no pipes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import reprlib
import stat
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

MAX_BYTES = 100_000_000  # per file
MAX_DEPTH = 127  # levels of nested arrays and objects
_MAX_DIGITS = 100
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxdict = 8
_REPR.maxstring, _REPR.maxlong = 120, 80
# Possessive quantifiers: a string of 100 MB must not fill the memory with backtracking positions. A string
# without an end matches too; otherwise the search would continue at each quote in it.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(r'\\u[dD][89a-fA-F]')


def parse(text: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """Parses a JSON text, and rejects texts that JSON readers interpret differently.

    Python's reader takes the last value of a repeated key, accepts half of a surrogate pair, and recurses as
    deep as the interpreter allows, which ends the process if a program has raised that limit. It also accepts
    NaN and Infinity. These are returned, as are numbers that are too large (as infinity), so that the caller
    can report the invalid value.

    Args:
        text: the text, in UTF-8.
        max_depth: the largest depth of nested arrays and objects.

    Raises:
        ValueError: the text is invalid. The message has the reason, and the keys that lead to the value.

    Example:
        >>> parse(b'{"a": [1, null]}')
        {'a': [1, None]}
        >>> parse(b'{"x": {"a": 1, "a": 2}}')
        Traceback (most recent call last):
        ...
        ValueError: x: the key 'a' occurs twice
    """
    decoded = text.decode('utf-8')
    _reject_deep_nesting(decoded, max_depth)
    with_repeated_keys: list[_ObjectWithRepeatedKey] = []

    def as_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            values = _ObjectWithRepeatedKey(pairs)
            with_repeated_keys.append(values)
        return values

    value = json.loads(decoded, object_pairs_hook=as_object, parse_int=_integer)
    if with_repeated_keys or _SURROGATE.search(decoded):
        _reject_values(value, ())
    return value


class _ObjectWithRepeatedKey(dict[str, Any]):
    """A JSON object with a repeated key.

    Attributes:
        key: the repeated key.
    """

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__()
        self.key = ''
        for key, value in pairs:
            if key in self:
                self.key = key
            self[key] = value


def _integer(text: str) -> int | float:
    # An int of many thousand digits takes long to convert, and Python's error does not name its location.
    # Other readers parse -0 as a float.
    return float(text) if len(text) > _MAX_DIGITS or text == '-0' else int(text)


def _reject_deep_nesting(text: str, max_depth: int) -> None:
    """Raises ValueError for a text that is nested too deep, before a parser recurses into it."""
    depth, key = 0, ''
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token[0] == '"':
            if depth == 1:
                key = token
        elif token in '[{':
            depth += 1
            if depth > max_depth:
                raise ValueError(
                    f'{_location((_unquoted(key),) if key else ())}it is nested more than {max_depth} deep'
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
    if isinstance(value, _ObjectWithRepeatedKey):
        raise ValueError(f'{_location(keys)}the key {brief(value.key)} occurs twice')
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
                f'{_location(keys)}the string {brief(value)} has half of a surrogate pair'
            ) from None


def _location(keys: tuple[str, ...]) -> str:
    return '/'.join(map(printable, keys)) + ': ' if keys else ''


def printable(text: str, max_length: int = 200) -> str:
    r"""Returns a text from a file as messages show it: short, on one line, without control characters.

    Example:
        >>> printable('model.norm'), printable('a\x1b[2J')
        ('model.norm', 'a\\x1b[2J')
    """
    if len(text) > max_length:
        text = f'{text[: max_length // 2]} ... {text[-max_length // 3 :]}'
    if text.isprintable():
        return text
    return ''.join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def brief(value: Any) -> str:
    """Returns a value from a file as messages show it: its repr, short and on one line."""
    return printable(_REPR.repr(value))


@contextlib.contextmanager
def open_regular_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a regular file for reading. Pipes and devices might block or never end.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file, or the path is invalid.
    """
    # Without O_NONBLOCK, opening a pipe waits for a process that writes to it.
    with open(path, 'rb', opener=_open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError('it is not a regular file')
        yield file


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, 'O_NONBLOCK', 0))


def read(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Reads all bytes of a regular file.

    Args:
        path: the path of the file.
        max_bytes: the largest size of the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, is too large, or becomes shorter while it is read.
    """
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f'it has {size:,} bytes; the limit is {max_bytes:,}')
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
    """Returns the message of an error of `read` or `parse`, without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
