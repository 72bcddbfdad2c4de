"""Paths as Orbax takes them, also in object stores; durable writes; and the lazy import of Orbax.

Orbax syncs the files of arrays to the disk, but neither folders nor JSON files. So without these functions a
complete step may be lost in a power failure.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from scalax._core.util import strict_json
from scalax._jax.orbax import Path
from scalax.errors import ArgumentError, MissingDependencyError

_MAX_JSON = 1_000_000_000  # bytes: a manifest lists all files of a step


def orbax() -> Any:
    """Imports ``orbax.checkpoint`` and returns it.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        if error.name not in ('orbax', 'orbax.checkpoint'):  # a dependency of Orbax is missing
            raise
        raise MissingDependencyError('checkpoints need Orbax: pip install orbax-checkpoint') from error
    return orbax.checkpoint


def as_path(directory: str | os.PathLike[str]) -> Path:
    """Returns a directory as a path of Orbax.

    Raises:
        ArgumentError: it is not a path.
    """
    orbax()
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        raise ArgumentError(f'Checkpointer: directory has to be a path, got {directory!r}')
    from etils import epath  # a dependency of Orbax

    return epath.Path(directory).absolute()


def read_json(path: Path) -> Any:
    """Returns the value of a JSON file, which may be damaged or hostile; see `strict_json`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, or not valid JSON.
    """
    # Object stores have only regular files.
    text = path.read_bytes() if '://' in str(path) else strict_json.read(path, _MAX_JSON)
    return strict_json.parse(text)


def sync(path: Path) -> None:
    """Syncs a file or folder to the disk; object stores do so themselves."""
    if '://' in str(path):
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
    """Syncs a folder and all folders below it, which contain the names of the files."""
    if '://' in str(root):
        return
    for folder, _, _ in os.walk(root):
        sync(folder)
