"""Bounded reads and durable writes of files, also in object stores.

Orbax syncs the files of the arrays, and neither folders nor JSON, so that a step may be gone after a power
failure though it was complete.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any

from scalax._jax.orbax import Path
from scalax._util import strict_json
from scalax.checkpoint._orbax import orbax
from scalax.errors import ArgumentError


def as_path(directory: str | os.PathLike[str]) -> Path:
    """A directory as Orbax takes it: absolute, possibly in an object store (``gs://...``).

    Raises:
        ArgumentError: it is not a path.
    """
    orbax()
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        raise ArgumentError(f'Checkpointer: directory has to be a path, got {directory!r}')
    from etils import epath  # a dependency of Orbax

    return epath.Path(directory).absolute()


_MOST = 1 << 28
"""The most bytes of JSON that are read; the description of a million leaves has fewer."""


def read_json(path: Path, most: int = _MOST) -> Any:
    """The value in a JSON file.

    Args:
        path: the file.
        most: the most bytes to read.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more than *most* bytes, or is not a regular file of JSON.
    """
    return strict_json.parse(read_bytes(path, most))


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more than *most* bytes, or is not a regular file.
    """
    if _is_local(path):
        return bytes(strict_json.read(path, most))
    with path.open('rb') as file:
        data: bytes = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f'it has more than {most:,} bytes, the most that are read')
    return data


def require_json_size(name: str, size: int) -> None:
    """Raises ValueError if a file of JSON is larger than what is read."""
    if size > _MOST:
        raise ValueError(f'{name} has {size} bytes, and at most {_MOST} are read')


def file_size(path: Path) -> int:
    """The size of a file in bytes.

    Raises:
        OSError: there is no such file, or it is not a regular one, such as a pipe.
    """
    if not _is_local(path):
        return int(path.stat().length)
    status = os.stat(path)  # epath looks up the name of the owner, which a container may not have
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f'{path.name} is no regular file')
    return status.st_size


def write_json(path: Path, value: Any) -> None:
    """Writes a file that `read_json` can read, and syncs it to the disk.

    Raises:
        ValueError: it would be larger than `read_json` reads.
    """
    data = json.dumps(value).encode()
    require_json_size(path.name, len(data))
    path.write_bytes(data)
    sync(path)


def sync(path: Path) -> None:
    """Syncs a file or folder to the disk; does nothing in an object store."""
    if not _is_local(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync folders.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_folders(root: Path) -> None:
    """Syncs a folder and all folders below it, which hold the names of the files."""
    for folder, _, _ in os.walk(root) if _is_local(root) else ():
        sync(folder)


def _is_local(path: Path) -> bool:
    return '://' not in str(path)
