"""Paths as Orbax takes them, and durable writes.

Orbax syncs the files of the arrays, and neither folders nor JSON, so that a step may be gone after a power
failure though it was complete.
"""

from __future__ import annotations

import errno
import os

from scalax._jax.orbax import Path
from scalax.checkpoint._orbax import orbax
from scalax.errors import ArgumentError


def as_path(directory: str | os.PathLike[str]) -> Path:
    """A directory as Orbax takes it.

    Raises:
        ArgumentError: it is not a path, or in an object store.
    """
    orbax()
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        raise ArgumentError(f'Checkpointer: directory has to be a path, got {directory!r}')
    if '://' in str(directory):
        raise ArgumentError(
            f'Checkpointer: {str(directory)!r} is in an object store, which cannot rename a folder at once, '
            'and so cannot keep writers apart. Save in a file system that all processes see, and copy the '
            'steps from there; or use Orbax itself'
        )
    from etils import epath  # a dependency of Orbax

    return epath.Path(directory).absolute()


def sync(path: Path) -> None:
    """Syncs a file or folder to the disk."""
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
    for folder, _, _ in os.walk(root):
        sync(folder)
