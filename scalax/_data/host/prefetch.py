"""Prefetching: a thread loads the next batches while a step runs, and does host work only.

The thread asks the iterable for batches and puts each on this process's own devices. What all processes do
together happens in the consumer's ``next``: collectives of a thread and those of the step would start in
different orders on different processes, which would wait for one another for ever.
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
_PATIENCE = 5.0  # seconds that closing waits for a loader that is in the middle of a batch


@dataclasses.dataclass(frozen=True)
class _Item:
    """A batch or an error; an empty one marks the end of the data."""

    part: global_batch.ProcessBatch | None = None
    finish: global_batch.Finish | None = None
    error: BaseException | None = None
    iterator_state: Any = None  # once it had given this batch


class _Shared:
    """What the thread and the consumer share. The thread has no other reference to the consumer.

    SimpleQueue is reentrant: `stop` may run from the garbage collector.
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
_running: dict[threading.Thread, _Shared] = {}


@atexit.register
def _stop_all() -> None:
    left = list(_running.items())
    for _, shared in left:
        shared.stop()
    for thread, _ in left:
        thread.join(_PATIENCE)


class Prefetch(Iterator[Batch], contextlib.AbstractContextManager['Prefetch[Batch]']):
    """An iterator of global arrays that are loaded ahead: what `MeshShardingHelper.prefetch` returns.

    Its thread ends with the iterable, with `close`, at the end of a ``with`` block, or when the iterator is
    garbage-collected.

    Threads may share one: each batch is given once, in the order of the data, and all of them see the end.
    One of them gets an error; for the others iteration ends.

    A ``next`` that is interrupted (Ctrl-C) loses no batch: the following one gives it. Of several processes
    the others have continued without the interrupted one, so there each later ``next`` is an error.

    The iterator of *iterable* is ahead of the loop by as many batches as are loaded. Where it has a state
    (``get_state``, as Grain's have), `get_state` is the state after the last batch that the loop was given:
    what belongs in a checkpoint.
    """

    def __init__(
        self, iterable: Iterable[Batch], options: global_batch.BatchOptions, size: int, check: bool
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise DataError(f'size is how many batches are loaded ahead, at least 1, got {size!r}')
        process_collectives.require_this_process(options.mesh)
        self._together = check and process_collectives.processes_of(options.mesh).is_multiprocess
        self._options = options
        # What processes do together has one order on all of them, whichever threads ask for batches.
        self._turn = threading.Lock()
        self._shared = _Shared(size)
        self._taken: list[_Item] = []  # the item of the next batch, until that is given; at most one
        self._count = 0
        self._done = self._interrupted = False
        # Here, so that an error about an object that is not iterable is not raised in the thread.
        iterator = iter(iterable)
        self._stateful = hasattr(iterator, 'get_state')
        self._iterator_state = _state_of(iterator)
        arguments = (iterator, options, self._shared, ThreadState(in_contexts=True))
        self._thread = threading.Thread(target=_load, args=arguments, name='scalax-prefetch', daemon=True)
        _running[self._thread] = self._shared
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._shared.stop)
        self._finalizer.atexit = False

    def __next__(self) -> Batch:
        with self._turn:
            if self._done:
                raise StopIteration
            if self._interrupted:
                raise DataError(
                    'prefetch was interrupted while processes agreed on a batch, and the others have '
                    'continued: end the program on all of them, and restart it from a checkpoint'
                )
            if not self._taken:
                # Without a step of Python between the queue and the list, where a signal would lose the item.
                items = map(queue.SimpleQueue.get, itertools.repeat(self._shared.items))
                self._taken.extend(itertools.islice(items, 1))
            item = self._taken[0]
            try:
                batch = self._completed(item)
            except BaseException as error:
                if isinstance(error, Exception) or error is item.error:
                    self._taken.clear()
                    self._done = True
                    self._finalizer()
                else:  # Ctrl-C
                    self._interrupted = self._together
                raise
            self._taken.clear()
            return batch

    def _completed(self, item: _Item) -> Batch:
        """The batch, once all processes have one."""
        if self._shared.stopped:
            raise StopIteration
        error = item.error
        if self._together:
            ended = f'has no more data after {self._count} batches' if item.part is None else 'has more data'
            global_batch.agree(self._options, 'prefetch', item.part, error, ended)
        else:
            process_collectives.bound_queue(self._options.mesh)
        if error is not None:
            raise error
        if item.finish is None:
            raise StopIteration
        batch: Batch = item.finish()
        self._iterator_state = item.iterator_state
        self._count += 1
        self._shared.free_slots.put(None)
        return batch

    def get_state(self) -> Any:
        """The state of the iterator after the last batch that the loop was given, whatever is loaded ahead.

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
                'the iterator that is loaded ahead has no get_state. Give an iterator with a state, such as '
                'one of Grain, or count batches and start from that number'
            )
        return copy.deepcopy(self._iterator_state)

    def close(self) -> None:
        """Stops loading, and lets go of what is loaded. Later ``next`` calls end the iteration."""
        self._done = True
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(
    iterator: Iterator[Any], options: global_batch.BatchOptions, shared: _Shared, thread_state: ThreadState
) -> None:
    """The body of the thread. The loader runs under the state of the thread that called `prefetch`."""
    try:
        thread_state.run(lambda: _load_all(iterator, options, shared))
    except BaseException as error:  # noqa: BLE001 - raised by the thread that takes the batches
        shared.items.put(_Item(error=error))
    finally:
        _running.pop(threading.current_thread(), None)


def _load_all(iterator: Iterator[Any], options: global_batch.BatchOptions, shared: _Shared) -> None:
    """Loads batches until the data ends or `Prefetch` is closed."""
    while True:
        shared.free_slots.get()
        if shared.stopped:
            return
        try:
            tree = next(iterator)
        except StopIteration:
            shared.items.put(_Item())
            return
        part = global_batch.read(options, tree)
        # Copied: a loader may fill the same memory with its next batch.
        shared.items.put(
            _Item(part, global_batch.place(part, keep=False), iterator_state=_state_of(iterator))
        )
        del tree, part  # the consumer's alone now


def _state_of(iterator: Iterator[Any]) -> Any:
    """A copy of its state, if it has one."""
    get_state = getattr(iterator, 'get_state', None)
    return None if get_state is None else copy.deepcopy(get_state())
