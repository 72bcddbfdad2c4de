"""Prefetching in one process: order, end, errors, and the end of the thread."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from scalax import axes
from scalax._data.host import global_batch, prefetch, process_collectives
from scalax.errors import DataError
from scalax.sharding import (
    MeshShardingHelper,
    get_global_annotation_shardings,
    get_global_mesh,
    get_global_mesh_helper,
)
from tests.support import ROOT
from tests.support.snapshots import Snapshot
from tests.support.threads import COUNT, in_threads

HELPER = MeshShardingHelper([4, 2], ['data', 'tp'])
LONG = 200  # seconds to wait for what comes, on a busy machine


def batch(number: int) -> dict[str, Any]:
    return {'x': np.full((8, 2), number, np.float32), 'number': number}


def eventually(condition: Callable[[], bool]) -> bool:
    """Waits until a condition is true; returns False after a generous timeout."""
    end = time.monotonic() + 300
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


EARLIER: set[threading.Thread] = set()  # threads that were there before the test


def threads() -> list[threading.Thread]:
    """Returns the threads of the prefetches of this test."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == 'scalax-prefetch' and thread not in EARLIER
    ]


@pytest.fixture(autouse=True)
def no_thread_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    EARLIER.clear()
    EARLIER.update(threading.enumerate())
    monkeypatch.setattr(prefetch, '_CLOSE_TIMEOUT', LONG)  # a busy machine may take long to load a batch
    yield
    gc.collect()
    assert eventually(lambda: not threads())


@pytest.mark.parametrize('size', [1, 2, 5])
@pytest.mark.parametrize('count', [0, 1, 2, 7])
def test_batches_come_in_order(count: int, size: int) -> None:
    numbers = []
    for arrays in HELPER.prefetch(map(batch, range(count)), size=size):
        assert arrays['x'].sharding.spec == jax.P(('data', 'tp'))
        np.testing.assert_array_equal(arrays['x'], batch(int(arrays['number']))['x'])
        numbers.append(int(arrays['number']))
    assert numbers == list(range(count))


class Counted:
    """An iterator with a state that it changes in place."""

    def __init__(self, start: int, stop: int) -> None:
        self.state, self.stop = {'next': start}, stop

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.state['next'] == self.stop:
            raise StopIteration
        self.state['next'] += 1
        return batch(self.state['next'] - 1)

    def get_state(self) -> dict[str, int]:
        return self.state


def test_state_is_that_of_the_last_returned_batch() -> None:
    iterator = Counted(2, 6)
    with HELPER.prefetch(iterator, size=3) as batches:
        assert eventually(lambda: iterator.state['next'] == 5)
        assert batches.get_state() == {'next': 2}
        for arrays in batches:
            state = batches.get_state()
            assert state == {'next': int(arrays['number']) + 1}
            state['next'] = 100  # a copy, whose state is not shared
        assert batches.get_state() == {'next': 6}
    assert batches.get_state() == {'next': 6}


def test_restart_from_the_state_continues_with_the_next_batch() -> None:
    with HELPER.prefetch(Counted(0, 9), size=4) as batches:
        seen = [int(next(batches)['number']) for _ in range(3)]
        again = Counted(batches.get_state()['next'], 9)
    with HELPER.prefetch(again) as batches:
        seen += [int(arrays['number']) for arrays in batches]
    assert seen == list(range(9))


def test_iterator_without_state(snapshot: Snapshot) -> None:
    with HELPER.prefetch([batch(0)]) as batches, snapshot.raises(DataError):
        batches.get_state()


def test_options_of_the_batch() -> None:
    (array,) = HELPER.prefetch([np.zeros((3, 4))], -1, 'data')
    assert array.sharding.spec == jax.P(None, 'data')
    (array,) = HELPER.prefetch(
        [np.zeros((4, 3))], mesh_axis_subset='data', local_batch='addressable', check=False
    )
    assert array.sharding.spec == jax.P('data')


@pytest.mark.parametrize('size', [1, 3])
def test_at_most_size_batches_are_loaded(size: int) -> None:
    loaded = []

    def load() -> Iterator[Any]:
        for number in itertools.count():
            loaded.append(number)
            yield batch(number)

    with HELPER.prefetch(load(), size=size) as batches:
        for count in range(4):
            assert eventually(lambda count=count: len(loaded) == count + size)
            time.sleep(0.02)  # as long as an unstopped loader would need for many more batches
            assert len(loaded) == count + size
            next(batches)


def test_loader_runs_beside_the_loop() -> None:
    loaded = threading.Event()

    def load() -> Iterator[Any]:
        yield batch(0)
        loaded.set()
        yield batch(1)

    batches = HELPER.prefetch(load())
    next(batches)
    assert loaded.wait(LONG)  # the second batch was not requested
    assert int(next(batches)['number']) == 1


def test_slow_loader() -> None:
    go = threading.Event()

    def load() -> Iterator[Any]:
        for number in range(3):
            assert go.wait(LONG)
            yield batch(number)

    batches = HELPER.prefetch(load())
    threading.Timer(0.05, go.set).start()
    assert [int(arrays['number']) for arrays in batches] == [0, 1, 2]


def test_loader_that_reuses_memory() -> None:
    memory = np.zeros(2**12, np.float32)  # large enough for JAX to share its memory, if allowed

    def load() -> Iterator[Any]:
        for number in range(6):
            memory[:] = number
            yield memory

    for number, array in enumerate(HELPER.prefetch(load(), size=4)):
        np.testing.assert_array_equal(array, np.full(2**12, number))


def test_errors_of_the_loader_keep_their_traceback() -> None:
    def read_a_file() -> None:
        raise OSError('the file is gone')

    def load() -> Iterator[Any]:
        yield batch(0)
        read_a_file()

    batches = HELPER.prefetch(load())
    next(batches)
    with pytest.raises(OSError, match='the file is gone') as caught:
        next(batches)
    assert 'read_a_file' in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert list(batches) == []


def test_a_batch_that_does_not_fit(snapshot: Snapshot) -> None:
    batches = HELPER.prefetch([np.zeros(8), np.zeros(6)])
    next(batches)
    with snapshot.raises(DataError):
        next(batches)
    assert list(batches) == []


@pytest.mark.parametrize('size', [0, -1, 1.5, True])
def test_invalid_sizes(size: Any) -> None:
    with pytest.raises(DataError) as error:
        HELPER.prefetch([], size=size)
    assert str(error.value) == f'size is the number of batches to prefetch, a positive integer, got {size!r}'


def test_not_iterable() -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        HELPER.prefetch(wrong)


def endless() -> Iterator[Any]:
    return map(batch, itertools.count())


def test_closing_stops_the_thread() -> None:
    batches = HELPER.prefetch(endless())
    next(batches)
    assert threads()
    batches.close()
    assert not threads()
    assert list(batches) == []
    batches.close()


def test_leaving_a_with_block_stops_the_thread() -> None:
    with pytest.raises(KeyError), HELPER.prefetch(endless()) as batches:
        next(batches)
        raise KeyError
    assert not threads()


def test_dropping_stops_the_thread() -> None:
    for arrays in HELPER.prefetch(endless()):
        if int(arrays['number']) == 3:
            break
    gc.collect()
    assert eventually(lambda: not threads())


def test_closing_drops_loaded_batches() -> None:
    closed = threading.Event()

    def load() -> Iterator[Any]:
        try:
            yield from endless()
        finally:
            closed.set()

    with HELPER.prefetch(load()) as batches:
        next(batches)  # the loader has begun, and has more to load
    assert closed.wait(LONG)


def test_closing_wakes_a_waiting_thread() -> None:
    go = threading.Event()

    def load() -> Iterator[Any]:
        assert go.wait(LONG)
        yield batch(0)

    batches = HELPER.prefetch(load())
    received: list[Any] = []
    waiting = threading.Thread(target=lambda: received.append(next(batches, 'the end')))
    waiting.start()
    assert eventually(batches._lock.locked)  # it waits
    closing = threading.Thread(target=batches.close)
    closing.start()
    waiting.join(LONG)
    assert received == ['the end']
    go.set()  # the loader ends, for which `close` waits
    closing.join(LONG)
    assert not closing.is_alive()


def test_closing_wakes_all_waiting_threads() -> None:
    go = threading.Event()

    def load() -> Iterator[Any]:
        assert go.wait(LONG)
        yield from endless()

    batches = HELPER.prefetch(load())

    def work(number: int) -> Any:
        if number == COUNT - 1:
            time.sleep(0.05)  # most of the others wait by then
            threading.Thread(target=let_go_once_it_is_closed).start()
            batches.close()
        return next(batches, 'the end')

    def let_go_once_it_is_closed() -> None:
        assert eventually(lambda: batches._buffer.stopped)
        go.set()

    assert in_threads(work) == ['the end'] * COUNT
    assert list(batches) == []


@pytest.mark.parametrize('count', [0, 1, 7, 40])
def test_threads_share_the_batches(count: int) -> None:
    batches = HELPER.prefetch(map(batch, range(count)))
    received = in_threads(lambda _: [int(arrays['number']) for arrays in batches])
    assert sorted(jax.tree.leaves(received)) == list(range(count))
    assert all(numbers == sorted(numbers) for numbers in received)


def test_an_error_is_raised_in_one_thread_and_ends_the_others() -> None:
    def load() -> Iterator[Any]:
        yield from map(batch, range(5))
        raise OSError('the file is gone')

    batches = HELPER.prefetch(load())

    def work(_: int) -> tuple[list[int], str]:
        numbers: list[int] = []
        try:
            numbers.extend(int(arrays['number']) for arrays in batches)
        except OSError as error:
            return numbers, str(error)
        return numbers, ''

    received = in_threads(work)
    assert sorted(jax.tree.leaves([numbers for numbers, _ in received])) == list(range(5))
    assert sorted(text for _, text in received) == [*[''] * (COUNT - 1), 'the file is gone']


def test_thread_that_stops_early_loses_no_batches_of_others() -> None:
    batches = HELPER.prefetch(map(batch, range(20)))
    received = in_threads(lambda number: [next(batches, None)] if number % 2 else list(batches))
    assert len([arrays for part in received for arrays in part if arrays is not None]) == 20


def test_ctrl_c_keeps_the_remaining_batches() -> None:
    go = threading.Event()

    def load() -> Iterator[Any]:
        yield batch(0)
        assert go.wait(LONG)
        yield batch(1)

    batches = HELPER.prefetch(load())
    assert int(next(batches)['number']) == 0

    def press() -> None:
        assert eventually(batches._lock.locked)  # the loop waits
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    with pytest.raises(KeyboardInterrupt):
        presser.start()
        next(batches)
    presser.join(LONG)
    go.set()
    assert [int(arrays['number']) for arrays in batches] == [1]


@pytest.mark.parametrize('kind', [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize('together', [False, True])
def test_loader_that_exits_ends_the_data(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], together: bool
) -> None:
    """As for any error of a loader, the other processes get an error, and do not continue."""

    def load() -> Iterator[Any]:
        yield batch(0)
        raise kind('of the loader')

    with HELPER.prefetch(load()) as batches:
        monkeypatch.setattr(batches, '_must_agree', together)
        assert int(next(batches)['number']) == 0
        with pytest.raises(kind, match='of the loader'):
            next(batches)
        assert list(batches) == []


@pytest.mark.parametrize('where', ['before', 'after'])
def test_ctrl_c_loses_no_batch(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    bound_queue, pressed = process_collectives.bound_queue, iter([False, True, False, False])

    def press(mesh: Any) -> None:
        if where == 'after':
            bound_queue(mesh)
        if next(pressed):
            raise KeyboardInterrupt
        if where == 'before':
            bound_queue(mesh)

    monkeypatch.setattr(process_collectives, 'bound_queue', press)
    batches = HELPER.prefetch(map(batch, range(3)))
    numbers = []
    with pytest.raises(KeyboardInterrupt):
        numbers.extend(int(arrays['number']) for arrays in batches)
    numbers.extend(int(arrays['number']) for arrays in batches)
    assert numbers == [0, 1, 2]


def test_no_batch_follows_an_interrupted_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other processes have continued without this one."""

    def press(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(global_batch, 'agree', press)
    with HELPER.prefetch(map(batch, range(3))) as batches:
        monkeypatch.setattr(batches, '_must_agree', True)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        for _ in range(2):
            with pytest.raises(DataError) as error:
                next(batches)
            assert str(error.value) == (
                'prefetch was interrupted while processes agreed on a batch, and the others have continued: '
                'end the program on all of them, and restart it from a checkpoint'
            )
    assert list(batches) == []


def seen_by_a_loader(look: Callable[[], Any]) -> Any:
    """Returns the value that a loader reads in its thread."""
    seen: list[Any] = []

    def load() -> Iterator[np.ndarray]:
        seen.append(look())
        yield np.zeros(8)

    assert len(list(HELPER.prefetch(load()))) == 1
    (value,) = seen
    return value


@pytest.mark.medium
@pytest.mark.parametrize(
    ('setting', 'look'),
    [
        (lambda: jax.enable_x64(True), lambda: jax.numpy.arange(3).dtype),
        (lambda: jax.threefry_partitionable(False), lambda: jax.random.normal(jax.random.key(0), 5).tolist()),
        (lambda: jax.default_prng_impl('rbg'), lambda: jax.random.key(0).dtype),
        (lambda: jax.default_device(jax.devices()[3]), lambda: jax.numpy.zeros(2).sharding),
        (lambda: jax.disable_jit(), lambda: jax.jit(lambda x: isinstance(x, jax.core.Tracer))(1.0)),
        (lambda: np.errstate(divide='raise'), lambda: np.geterr()['divide']),
        (lambda: jax.set_mesh(HELPER.mesh), lambda: jax.device_put(np.zeros(8), jax.P('data')).sharding),
        (lambda: HELPER.get_context(), get_global_mesh_helper),
        (lambda: HELPER.get_context({'act': jax.P('tp')}), get_global_annotation_shardings),
        (lambda: axes.axis_mapping({'batch': 'data'}), lambda: axes.physical_axis_name('batch')),
    ],
    ids=['x64', 'threefry', 'prng', 'device', 'jit', 'numpy', 'set_mesh', 'helper', 'annotations', 'axes'],
)
def test_loader_sees_the_settings_of_the_loop(setting: Any, look: Callable[[], Any]) -> None:
    with setting():
        here = look()
        assert seen_by_a_loader(look) == here
    assert get_global_mesh() is None
    try:
        outside = look()
    except (ValueError, RuntimeError):  # it needs the settings
        return
    assert outside != here


def test_settings_that_raise_also_raise_in_the_loader() -> None:
    def promote() -> None:
        jax.numpy.ones(3, np.float32) + jax.numpy.ones(3, np.int32)

    with jax.numpy_dtype_promotion('strict'), pytest.raises(Exception, match='strict'):
        seen_by_a_loader(promote)


def test_an_error_before_the_first_batch_is_raised_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError('a setting that cannot be entered')

    monkeypatch.setattr('scalax._core.context.thread_state.ThreadState.run', fails)
    with pytest.raises(ValueError, match='a setting that cannot be entered'):
        list(HELPER.prefetch([np.zeros(8)]))


@pytest.mark.slow
def test_program_ends_with_loaded_batches() -> None:
    code = """
import itertools, numpy as np
from scalax.sharding import MeshShardingHelper
batches = MeshShardingHelper([-1], ['data']).prefetch(np.zeros(8) for _ in itertools.count())
print(next(batches).shape)
"""
    assert run_program(code) == '(8,)\n'


@pytest.mark.slow
def test_program_ends_while_threads_wait() -> None:
    code = """
import threading, time, numpy as np
from scalax.sharding import MeshShardingHelper

def load():
    yield np.zeros(8)
    time.sleep(600)

batches = MeshShardingHelper([-1], ['data']).prefetch(load())
waiting = [threading.Thread(target=lambda: next(batches, None), daemon=True) for _ in range(16)]
for thread in waiting:
    thread.start()
while sum(thread.is_alive() for thread in waiting) == 16:
    time.sleep(0.01)
print('one batch')
"""
    assert run_program(code) == 'one batch\n'


@pytest.mark.slow
def test_queue_of_steps_is_bounded() -> None:
    # More steps than simulated devices can queue: without a bound they would deadlock.
    code = """
import numpy as np, jax
from scalax.sharding import MeshShardingHelper, PartitionSpec as P
helper = MeshShardingHelper([-1], ['data'])

@helper.sjit(in_shardings=(P(), P('data')), out_shardings=P())
def step(state, rows):
    return state - 1e-6 * (rows.T @ jax.numpy.tanh(rows @ state))

state = jax.numpy.eye(512)
for rows in helper.prefetch(np.ones((256, 512), np.float32) for _ in range(100)):
    state = step(state, rows)
print(np.isfinite(np.asarray(state)).all())
"""
    assert run_program(code) == 'True\n'


def run_program(code: str) -> str:
    """Runs a program that has to succeed, and returns its output."""
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_NUM_CPU_DEVICES': '8'}
    command = [sys.executable, '-W', 'error', '-c', code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout
