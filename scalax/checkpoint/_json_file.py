"""JSON of a file that anybody may have written: bounded, and every fault of it is a ValueError."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from scalax.checkpoint._orbax import Path

_MOST = 1 << 28
"""Bytes of JSON that are read: descriptions of a million leaves have fewer."""


def json_of(path: Path, most: int = _MOST) -> Any:
    """The JSON that a file holds.

    Args:
        path: of the file.
        most: how many bytes of it may be read.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more than *most* bytes, or is no JSON that Python can hold.
    """
    return parsed(bytes_of(path, most))


def bytes_of(path: Path, most: int) -> bytes:
    """The bytes of a file, at most so many.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more.
    """
    size = size_of(path)
    if size <= most:
        with path.open('rb') as file:
            data: bytes = file.read(most + 1)  # it may have grown
        size = len(data)
    if size > most:
        raise ValueError(f'it has {size} bytes, and at most {most} are read')
    return data


def require_size(path: Path) -> None:
    """Raises ValueError if there is a file of more bytes than `json_of` reads."""
    if path.exists() and (size := size_of(path)) > _MOST:
        raise ValueError(f'{path.name} has {size} bytes, and at most {_MOST} are read')


def size_of(path: Path) -> int:
    """The size of a file in bytes.

    Raises:
        OSError: there is no such file, or it is none that has a size, such as a pipe.
    """
    if '://' in str(path):
        return int(path.stat().length)
    found = os.stat(path)  # that of epath asks for the name of the owner, which users of containers may lack
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f'{path.name} is no regular file')
    return found.st_size


def parsed(data: bytes) -> Any:
    """The value that bytes of JSON stand for.

    Raises:
        ValueError: they are no JSON, or nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError('it is nested too deeply') from None


def write_json(path: Path, value: Any) -> None:
    """Writes a file that `json_of` reads.

    Raises:
        ValueError: it would be too large for that.
    """
    data = json.dumps(value).encode()
    if len(data) > _MOST:
        raise ValueError(f'{path.name} would have {len(data)} bytes, and at most {_MOST} are read')
    path.write_bytes(data)
