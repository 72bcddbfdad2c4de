"""A thread-safe LRU cache, on which the caches of several packages are built."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar('Key', bound=Hashable)
Value = TypeVar('Value')

SIZE = 4096


def type_key(value: object) -> tuple[type, str]:
    """Part of a cache key: tells apart equal values of which programs differ: 1, True, 1.0; 0.0 and -0.0."""
    return type(value), repr(value) if isinstance(value, float | complex) else ''


class LRUCache(Generic[Key, Value]):
    """A mapping that drops the least recently used entries once it holds more than `SIZE`.

    Entries may keep large objects alive, such as a model that is a static argument; JAX's caches are bounded
    for the same reason. Safe to use from many threads.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        # Re-entrant: comparing keys may run users' code, which may come back here.
        self._lock = threading.RLock()

    def get(self, key: Key) -> Value | None:
        """The value of *key*, or None."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key]

    def add(self, key: Key, value: Value) -> Value:
        """Sets the value of *key* unless it has one; returns the one it has then, so that threads agree."""
        with self._lock:
            found = self._kept.setdefault(key, value)
            self._kept.move_to_end(key)
            if len(self._kept) > SIZE:
                self._kept.popitem(last=False)
            return found
