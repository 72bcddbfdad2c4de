"""Thread-safe LRU cache, used by several packages."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar('Key', bound=Hashable)
Value = TypeVar('Value')

SIZE = 4096


def type_key(value: object) -> tuple[type, str]:
    """Returns a part of a cache key that distinguishes equal values for which programs differ.

    1, True and 1.0 are equal, as are 0.0 and -0.0.
    """
    return type(value), repr(value) if isinstance(value, float | complex) else ''


class LRUCache(Generic[Key, Value]):
    """A mapping that drops the least recently used entry once it holds more than `SIZE` entries.

    Entries may keep large objects alive, such as a model that is a static argument; JAX's caches are bounded
    for the same reason. Safe to use from many threads.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        # Re-entrant: comparing keys may run users' code, which may use this cache.
        self._lock = threading.RLock()

    def get(self, key: Key) -> Value | None:
        """Returns the value of *key*, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def add(self, key: Key, value: Value) -> Value:
        """Returns the value of *key*, which is set to *value* unless it has one, so that threads agree."""
        with self._lock:
            entry = self._entries.setdefault(key, value)
            self._entries.move_to_end(key)
            if len(self._entries) > SIZE:
                self._entries.popitem(last=False)
            return entry
