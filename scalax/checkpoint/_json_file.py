"""Small files of a checkpoint, also in object stores: bounded reads of regular files, writes that last."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

from scalax._util import strict_json
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
        ValueError: it has more than *most* bytes, or is no JSON.
    """
    return strict_json.parse(bytes_of(path, most))


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


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file, and returns once it would outlast a loss of power."""
    path.write_bytes(data)
    sync(path)


def sync(path: Path) -> None:
    """Returns once a file or folder is on the disk; does nothing where there is no such thing."""
    if '://' in str(path):
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # folders of some file systems
            raise
    finally:
        os.close(number)


def sync_folders(root: Path) -> None:
    """The same for a folder and all folders in it, which say what files there are."""
    for folder, _, _ in os.walk(root) if '://' not in str(root) else ():
        sync(folder)


def write_json(path: Path, value: Any) -> None:
    """Writes a file that `json_of` reads.

    Raises:
        ValueError: it would be too large for that.
    """
    data = json.dumps(value).encode()
    if len(data) > _MOST:
        raise ValueError(f'{path.name} would have {len(data)} bytes, and at most {_MOST} are read')
    write_bytes(path, data)
