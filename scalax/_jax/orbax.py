"""Undocumented behavior of Orbax, which is imported where it is used."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

Path = Any
"""An ``etils.epath.Path``: a path as in pathlib, also in Google Cloud Storage."""


def wait_for_processes(key: str, processes: Collection[int] | None, seconds: float) -> None:
    """Waits at a barrier of some processes, or of all (None).

    Relies on Orbax's own barrier for saves, which uses no device: other threads may be using them.
    """
    import orbax.checkpoint

    sync = orbax.checkpoint.multihost.get_barrier_sync_fn(processes=processes)
    sync(key=key, timeout_ms=int(1000 * seconds))


def unfinished_mark() -> str:
    """Returns a part of the names of folders that are not complete steps.

    Relies on Orbax not taking a folder with this in its name for a step, whatever follows it.
    """
    import orbax.checkpoint

    return str(orbax.checkpoint.path.atomicity.TMP_DIR_SUFFIX)


COMMITTED = 'commit_success.txt'


def commits_by_rename(directory: Path) -> bool:
    """Returns whether a step is complete as soon as its folder has its name.

    Relies on Orbax looking for a file named `COMMITTED` in the folders of steps in Google Cloud Storage,
    which has no atomic rename, and nowhere else.
    """
    return not str(directory).startswith('gs://')


def is_complete(step: Path) -> bool:
    """Returns whether the folder of a step is complete. Relies on what `commits_by_rename` relies on."""
    return commits_by_rename(step) or bool((step / COMMITTED).exists())


def folder_of_process(process: int) -> str:
    """Returns the folder in which a process writes its arrays, inside of the tree's folder.

    Relies on that name: each process measures the files in it, which nobody changes afterwards.
    """
    return f'ocdbt.process_{process}'


def awaited_folder(root: Path) -> Path:
    """Returns the folder, inside of the tree's folder, that all processes but the first wait for.

    Relies on that name: creating it ends this wait of ten minutes if the first process will never do so.
    """
    return root / 'array_metadatas'
