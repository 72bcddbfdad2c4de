"""Orbax, and what is known of it beyond its documentation. It is imported where it is used."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

Path = Any
"""An ``etils.epath.Path``: a path as in pathlib, also in Google Cloud Storage."""


def wait_for_processes(key: str, processes: Collection[int] | None, seconds: float) -> None:
    """A barrier of some processes, or of all (None).

    Relies on Orbax's own barrier for saves, which uses no device: other threads may be using them.
    """
    import orbax.checkpoint

    sync = orbax.checkpoint.multihost.get_barrier_sync_fn(processes=processes)
    sync(key=key, timeout_ms=int(1000 * seconds))


def unfinished_mark() -> str:
    """A part of the names of folders that are no steps.

    Relies on Orbax taking no folder for a step that has this in its name, whatever follows it.
    """
    import orbax.checkpoint

    return str(orbax.checkpoint.path.atomicity.TMP_DIR_SUFFIX)


COMMITTED = 'commit_success.txt'


def commits_by_rename(directory: Path) -> bool:
    """Whether a step is complete as soon as its folder has its name.

    Relies on Orbax looking for a file named `COMMITTED` in the folders of steps in Google Cloud Storage,
    which has no atomic rename, and nowhere else.
    """
    return not str(directory).startswith('gs://')


def is_complete(step: Path) -> bool:
    """Whether the folder of a step is that of a complete one. Relies on what `commits_by_rename` does."""
    return commits_by_rename(step) or bool((step / COMMITTED).exists())


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
