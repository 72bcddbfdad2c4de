"""What is remembered, and for how long? The things used last, up to a number of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar('Key', bound=Hashable)
Value = TypeVar('Value')

SIZE = 4096


def sort_of(value: object) -> tuple[type, str]:
    """What tells equal values apart that make programs that differ: 1, True and 1.0; 0.0 and -0.0."""
    return type(value), repr(value) if isinstance(value, float | complex) else ''


class Recent(Generic[Key, Value]):
    """A dict that forgets what nobody has asked for longest, once it holds more than `SIZE`.

    What it holds may keep large things alive, such as a model that is a static argument: JAX's caches are
    bounded for the same reason. Safe to use from many threads.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        # Re-entrant: the keys of users compare themselves under it.
        self._lock = threading.RLock()

    def get(self, key: Key) -> Value | None:
        """The value of *key*, or None."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key]

    def put(self, key: Key, value: Value) -> None:
        """Remembers *value*, in place of what was known for *key*."""
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            while len(self._kept) > SIZE:
                self._kept.popitem(last=False)

    def add(self, key: Key, value: Value) -> Value:
        """Remembers *value* unless *key* is known; returns what is known then, so that threads agree."""
        with self._lock:
            known = self.get(key)
            if known is not None:
                return known
            self.put(key, value)
            return value

    def items(self) -> list[tuple[Key, Value]]:
        """Everything known now, the oldest first."""
        with self._lock:
            return list(self._kept.items())
