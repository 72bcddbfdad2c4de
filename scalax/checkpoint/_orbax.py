"""Orbax, imported where it is used: a missing one is an error with the command that installs it."""

from __future__ import annotations

import os
from typing import Any

from scalax.errors import ArgumentError, MissingDependencyError

Path = Any
"""An ``etils.epath.Path``: like one of pathlib, and for object stores too."""


def orbax() -> Any:
    """The module ``orbax.checkpoint``.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise MissingDependencyError(
            'checkpoints are written and read by Orbax: pip install orbax-checkpoint'
        ) from error
    return orbax.checkpoint


def path_of(directory: str | os.PathLike[str]) -> Path:
    """A directory as Orbax takes it: absolute, and in an object store too (``gs://...``).

    Raises:
        ArgumentError: it is no path.
    """
    orbax()
    if not isinstance(directory, str | os.PathLike) or not str(directory):
        raise ArgumentError(f'Checkpointer: directory is a path, got {directory!r}')
    from etils import epath  # a dependency of Orbax

    return epath.Path(directory).absolute()
