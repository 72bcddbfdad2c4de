"""The running compilations, for a parent process that reports them if the compiler crashes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

_lock = threading.Lock()
_running: list[str] = []
_watchers: list[Callable[[Sequence[str]], None]] = []
_dump_folder: str | None = None


def watch(watcher: Callable[[Sequence[str]], None]) -> None:
    """Calls *watcher* with all running compilations whenever one starts or ends."""
    _watchers.append(watcher)


def dump_in(folder: str) -> None:
    """Makes compilers dump their files in *folder*, which the parent process removes."""
    global _dump_folder
    _dump_folder = folder


def dump_folder() -> str | None:
    """Returns the folder for the files of compilers; None for the default temporary folder."""
    return _dump_folder


@contextlib.contextmanager
def compiling(description: str) -> Iterator[None]:
    """Reports a compilation to the watchers as running, inside the block.

    Args:
        description: the function and its devices.
    """
    with _lock:
        _running.append(description)
        _notify()
    try:
        yield
    finally:
        with _lock:
            _running.remove(description)
            _notify()


def _notify() -> None:
    for watcher in _watchers:
        watcher(_running)
