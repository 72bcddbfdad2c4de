"""Prefetching of batches in a thread while a step runs.

The thread reads batches from the iterable and copies each to the devices of this process. Collectives run in
the consumer's ``next``: if a thread started them, processes would start collectives of the thread and of the
step in different orders, and wait for one another forever.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import itertools
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from scalax._core.context.thread_state import ThreadState
from scalax._data.host import global_batch, process_collectives
from scalax.errors import DataError

Batch = TypeVar('Batch')
_CLOSE_TIMEOUT = 5.0  # seconds that closing waits for a loader that is loading a batch


@dataclasses.dataclass(frozen=True)
class _Item:
    """A batch or an error. An empty item marks the end of the data."""

    batch: global_batch.LocalBatch | None = None
    finish: global_batch.Finish | None = None
    error: BaseException | None = None
    iterator_state: Any = None  # after the iterator returned this batch


class _Buffer:
    """The queue of batches between the thread and the consumer.

    The thread has no other reference to the consumer, which can therefore be garbage-collected. SimpleQueue
    is reentrant: `stop` may run from the garbage collector.
    """

    def __init__(self, size: int) -> None:
        self.items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self.free_slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stopped = False
        for _ in range(size):
            self.free_slots.put(None)

    def stop(self) -> None:
        """Ends the thread after its current batch, and wakes the threads that wait for a batch."""
        self.stopped = True
        self.free_slots.put(None)
        self.items.put(_Item())


# Stopped at exit: the interpreter aborts if a thread still runs inside JAX.
_running: dict[threading.Thread, _Buffer] = {}


@atexit.register
def _stop_all() -> None:
    threads = list(_running.items())
    for _, buffer in threads:
        buffer.stop()
    for thread, _ in threads:
        thread.join(_CLOSE_TIMEOUT)


class Prefetch(Iterator[Batch], contextlib.AbstractContextManager['Prefetch[Batch]']):
    """The iterator of prefetched global batches that `MeshShardingHelper.prefetch` returns.

    Its thread ends with the iterable, with `close`, at the end of a ``with`` block, or when the iterator is
    garbage-collected.

    Threads may share an iterator: each batch is returned once, in the order of the data, and all threads see
    the end. An error is raised in one of them; for the others the iteration ends.

    A ``next`` that is interrupted (Ctrl-C) loses no batch: the following ``next`` returns it. With several
    processes, every later ``next`` is an error, because the other processes have continued.

    The iterator of *iterable* is ahead of the loop by the number of prefetched batches. If it has a state
    (``get_state``, as in Grain), `get_state` returns the state after the last batch that the loop received:
    save that one in checkpoints.
    """

    def __init__(
        self, iterable: Iterable[Batch], options: global_batch.BatchOptions, size: int, check: bool
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise DataError(f'size is the number of batches to prefetch, a positive integer, got {size!r}')
        process_collectives.require_this_process(options.mesh)
        self._must_agree = check and process_collectives.processes_of(options.mesh).is_multiprocess
        self._options = options
        # Collectives need the same order on every process, whichever threads call `next`.
        self._lock = threading.Lock()
        self._buffer = _Buffer(size)
        self._pending: list[_Item] = []  # the item of the next batch, until it is returned; at most one
        self._count = 0
        self._done = self._interrupted = False
        # Called here, so that an object that is not iterable is an error here, and not in the thread.
        iterator = iter(iterable)
        self._stateful = hasattr(iterator, 'get_state')
        self._iterator_state = _state_of(iterator)
        arguments = (iterator, options, self._buffer, ThreadState(in_contexts=True))
        self._thread = threading.Thread(target=_load, args=arguments, name='scalax-prefetch', daemon=True)
        _running[self._thread] = self._buffer
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._buffer.stop)
        self._finalizer.atexit = False

    def __next__(self) -> Batch:
        with self._lock:
            if self._done:
                raise StopIteration
            if self._interrupted:
                raise DataError(
                    'prefetch was interrupted while processes agreed on a batch, and the others have '
                    'continued: end the program on all of them, and restart it from a checkpoint'
                )
            if not self._pending:
                # One call, so that a signal handler cannot run between the queue and the list.
                items = map(queue.SimpleQueue.get, itertools.repeat(self._buffer.items))
                self._pending.extend(itertools.islice(items, 1))
            item = self._pending[0]
            try:
                batch = self._complete(item)
            except BaseException as error:
                if isinstance(error, Exception) or error is item.error:
                    self._pending.clear()
                    self._done = True
                    self._finalizer()
                else:  # Ctrl-C
                    self._interrupted = self._must_agree
                raise
            self._pending.clear()
            return batch

    def _complete(self, item: _Item) -> Batch:
        """Returns the global batch, after all processes have agreed that they have a local batch."""
        if self._buffer.stopped:
            raise StopIteration
        error = item.error
        if self._must_agree:
            has_ended = item.batch is None
            state = f'has no more data after {self._count} batches' if has_ended else 'has more data'
            global_batch.agree(self._options, 'prefetch', item.batch, error, state)
        else:
            process_collectives.bound_queue(self._options.mesh)
        if error is not None:
            raise error
        if item.finish is None:
            raise StopIteration
        batch: Batch = item.finish()
        self._iterator_state = item.iterator_state
        self._count += 1
        self._buffer.free_slots.put(None)
        return batch

    def get_state(self) -> Any:
        """Returns the state of the iterator after the last batch that the loop received.

        Raises:
            DataError: the iterator has no state.

        Example:
            >>> import numpy as np
            >>> from scalax.sharding import MeshShardingHelper
            >>> class Counter:
            ...     def __init__(self, start):
            ...         self.next = start
            ...
            ...     def __iter__(self):
            ...         return self
            ...
            ...     def __next__(self):
            ...         self.next += 1
            ...         return np.full(8, self.next - 1)
            ...
            ...     def get_state(self):
            ...         return {'next': self.next}
            >>> with MeshShardingHelper([-1], ['data']).prefetch(Counter(5), size=3) as batches:
            ...     print(next(batches).sum(), batches.get_state())
            40 {'next': 6}
        """
        if not self._stateful:
            raise DataError(
                'the prefetched iterator has no get_state. Pass an iterator with a state, such as one from '
                'Grain, or count the batches and skip as many after a restart'
            )
        return copy.deepcopy(self._iterator_state)

    def close(self) -> None:
        """Stops loading, and drops prefetched batches. A later ``next`` ends the iteration."""
        self._done = True
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(
    iterator: Iterator[Any], options: global_batch.BatchOptions, buffer: _Buffer, thread_state: ThreadState
) -> None:
    """Runs the loader in this thread, under the state of the thread that called `prefetch`."""
    try:
        thread_state.run(lambda: _load_all(iterator, options, buffer))
    except BaseException as error:  # noqa: BLE001 - raised by the consumer
        buffer.items.put(_Item(error=error))
    finally:
        _running.pop(threading.current_thread(), None)


def _load_all(iterator: Iterator[Any], options: global_batch.BatchOptions, buffer: _Buffer) -> None:
    """Loads batches until the data end or `Prefetch` is closed."""
    while True:
        buffer.free_slots.get()
        if buffer.stopped:
            return
        try:
            tree = next(iterator)
        except StopIteration:
            buffer.items.put(_Item())
            return
        batch = global_batch.make_local_batch(options, tree)
        finish = global_batch.copy_to_devices(
            batch, keep=False
        )  # a loader may overwrite the memory of its batch
        buffer.items.put(_Item(batch, finish, iterator_state=_state_of(iterator)))
        del tree, batch, finish  # only the consumer holds the batch now


def _state_of(iterator: Iterator[Any]) -> Any:
    """Returns a copy of the state of an iterator; None if it has no state."""
    get_state = getattr(iterator, 'get_state', None)
    return None if get_state is None else copy.deepcopy(get_state())
