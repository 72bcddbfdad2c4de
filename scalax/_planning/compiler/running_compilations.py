"""The compilations that are running, for a process that outlives a compiler that crashes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

_lock = threading.Lock()
_running: list[str] = []
_watchers: list[Callable[[Sequence[str]], None]] = []
_dump_folder: str | None = None


def watch(watcher: Callable[[Sequence[str]], None]) -> None:
    """Has *watcher* called whenever a compilation begins or ends, with all that are running."""
    _watchers.append(watcher)


def dump_in(folder: str) -> None:
    """Has compilers write their files in *folder*, which the process that outlives them removes."""
    global _dump_folder
    _dump_folder = folder


def dump_folder() -> str | None:
    """The folder in which compilers write their files; None for that of temporary files."""
    return _dump_folder


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Tells the watchers that a compilation is running, until the block is left.

    Args:
        what: the function, and what it is compiled for.
    """
    with _lock:
        _running.append(what)
        _tell()
    try:
        yield
    finally:
        with _lock:
            _running.remove(what)
            _tell()


def _tell() -> None:
    for watcher in _watchers:
        watcher(_running)
