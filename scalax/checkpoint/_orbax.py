"""Orbax, and what this room knows of it beyond its documentation.

Orbax writes and reads the arrays and their metadata, and names the steps, through its documented handlers.
Each function below relies on something that its documentation does not promise, and says on what;
``tests/checkpoint/test_orbax.py`` tests each, and what Orbax alone loses of what this room adds to it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from scalax.errors import MissingDependencyError

Path = Any
"""An ``etils.epath.Path``: a path as in pathlib, also in object stores."""


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
        raise MissingDependencyError(
            'checkpoints are written and read by Orbax: pip install orbax-checkpoint'
        ) from error
    return orbax.checkpoint


def wait_for_processes(key: str, processes: Collection[int] | None, seconds: float) -> None:
    """A barrier of some processes, or of all (None).

    Relies on Orbax's own barrier for saves, which uses no device: other threads may be using them.
    """
    sync = orbax().multihost.get_barrier_sync_fn(processes=processes)
    sync(key=key, timeout_ms=int(1000 * seconds))


def unfinished_mark() -> str:
    """A part of the names of folders that are no steps.

    Relies on Orbax taking no folder for a step that has this in its name, whatever follows it.
    """
    return str(orbax().path.atomicity.TMP_DIR_SUFFIX)


def commits_by_rename(directory: Path) -> bool:
    """Whether a step is complete as soon as its folder has its name.

    Relies on Orbax looking for a file named `COMMITTED` in the folders of steps in Google Cloud Storage,
    which has no atomic rename, and nowhere else.
    """
    return not str(directory).startswith('gs://')


COMMITTED = 'commit_success.txt'


def folder_of_process(process: int) -> str:
    """The folder in which a process writes its arrays, below that of the tree.

    Relies on that name: each process measures the files in it, which nobody changes afterwards.
    """
    return f'ocdbt.process_{process}'


def awaited_folder(root: Path) -> Path:
    """The folder below that of the tree for which all processes but the first wait, for ten minutes.

    Relies on that name: whoever makes it ends this wait, where the first process will never do so.
    """
    return root / 'array_metadatas'
