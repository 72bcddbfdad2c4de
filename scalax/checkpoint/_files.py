"""Orbax, imported where it is used; paths as it takes them, also in object stores; and durable writes.

Orbax syncs the files of the arrays, and neither folders nor JSON, so that a step may be gone after a power
failure though it was complete.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from scalax._core.util import strict_json
from scalax._jax.orbax import Path
from scalax.errors import ArgumentError, MissingDependencyError

_LARGEST = 1_000_000_000  # bytes of a JSON file: a manifest names all files of a step


def orbax() -> Any:
    """The module ``orbax.checkpoint``, imported where it is used.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        if error.name not in ('orbax', 'orbax.checkpoint'):  # of what Orbax needs itself
            raise
        raise MissingDependencyError('checkpoints need Orbax: pip install orbax-checkpoint') from error
    return orbax.checkpoint


def as_path(directory: str | os.PathLike[str]) -> Path:
    """A directory as Orbax takes it.

    Raises:
        ArgumentError: it is not a path.
    """
    orbax()
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        raise ArgumentError(f'Checkpointer: directory has to be a path, got {directory!r}')
    from etils import epath  # a dependency of Orbax

    return epath.Path(directory).absolute()


def read_json(path: Path) -> Any:
    """The value of a JSON file, which may be damaged or hostile; see `strict_json`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, or not valid; says why.
    """
    # Object stores have regular files only.
    text = path.read_bytes() if '://' in str(path) else strict_json.read(path, _LARGEST)
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
    """Syncs a folder and all folders below it, which hold the names of the files."""
    if '://' in str(root):
        return
    for folder, _, _ in os.walk(root):
        sync(folder)
