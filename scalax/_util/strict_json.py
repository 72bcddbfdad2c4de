"""JSON, and files of it that may be damaged or hostile: bounded work, and regular files only."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

LARGEST = 100_000_000  # bytes of a file
_LONGEST = 120  # characters of a value in a message


def parse(text: str | bytes | bytearray) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: it is not JSON, or an object has a key twice; the message has the reason.

    Example:
        >>> parse('{"a": [1, null]}')
        {'a': [1, None]}
    """
    if isinstance(text, bytes | bytearray):
        text = text.decode('utf-8')  # json would guess among other encodings
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError('it is nested too deep') from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f'the key {brief(twice)} is there twice in one object')
    return found


def brief(value: Any) -> str:
    """A value from a file as messages show it: printable, on one line, and not too long."""
    if isinstance(value, str):
        value = value[: 2 * _LONGEST]
    text = repr(value)
    return text if len(text) <= _LONGEST else f'{text[: _LONGEST // 2]} ... {text[-_LONGEST // 3 :]}'


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A regular file, opened for reading. Pipes and devices might block or never end.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file, or the path is invalid.
    """
    # Opening a pipe without a writer would block.
    with open(path, 'rb', opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError('it is no regular file')
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
        ValueError: it is not a regular file, is larger than that, or changes while it is read.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f'it has {size:,} bytes, and {most:,} are taken at most')
        return exactly(file, size, 0)


def exactly(file: BinaryIO, size: int, position: int) -> bytes:
    """Reads *size* bytes of a file, from *position* on.

    Raises:
        OSError: it cannot be read.
        ValueError: it has become shorter.
    """
    file.seek(position)
    data = file.read(size)
    if len(data) < size:
        raise ValueError(f'it became shorter while it was read: {len(data):,} of {size:,} bytes were there')
    return data


def reason(error: OSError | ValueError) -> str:
    """The message of an error of `read` or `parse`, without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
