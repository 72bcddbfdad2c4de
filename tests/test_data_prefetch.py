"""Batches are loaded ahead, in one process: order, ends, errors, and a thread that never stays behind."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from scalax.errors import DataError
from scalax.sharding import MeshShardingHelper

HELPER = MeshShardingHelper([4, 2], ['data', 'tp'])
ROOT = Path(__file__).resolve().parent.parent


def batch(number: int) -> dict[str, Any]:
    return {'x': np.full((8, 2), number, np.float32), 'number': number}


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether something comes true; how long that takes is not measured, only bounded."""
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == 'scalax-prefetch']


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
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
    """An iterator with a state, which it changes in place."""

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


def test_the_state_is_that_of_the_loop_and_not_of_what_is_loaded_ahead() -> None:
    iterator = Counted(2, 6)
    with HELPER.prefetch(iterator, size=3) as batches:
        assert eventually(lambda: iterator.state['next'] == 5)
        assert batches.get_state() == {'next': 2}
        for arrays in batches:
            state = batches.get_state()
            assert state == {'next': int(arrays['number']) + 1}
            state['next'] = 100  # a copy: nobody else's state
        assert batches.get_state() == {'next': 6}
    assert batches.get_state() == {'next': 6}


def test_another_start_from_the_state_goes_on_with_the_next_batch() -> None:
    with HELPER.prefetch(Counted(0, 9), size=4) as batches:
        seen = [int(next(batches)['number']) for _ in range(3)]
        again = Counted(batches.get_state()['next'], 9)
    with HELPER.prefetch(again) as batches:
        seen += [int(arrays['number']) for arrays in batches]
    assert seen == list(range(9))


def test_what_has_no_state_says_so() -> None:
    with HELPER.prefetch([batch(0)]) as batches:
        with pytest.raises(DataError) as error:
            batches.get_state()
        assert str(error.value) == (
            'the iterator that is loaded ahead has no get_state. Give an iterator with a state, such as one '
            'of Grain, or count batches and start from that number'
        )
        with pytest.raises(DataError) as error:
            batches.set_state({})
        assert str(error.value) == (
            'batches are loaded ahead already: set the state of the iterator itself (or restore it from the '
            'checkpoint), and call helper.prefetch then'
        )


def test_options_are_those_of_the_batch() -> None:
    (array,) = HELPER.prefetch([np.zeros((3, 4))], -1, 'data')
    assert array.sharding.spec == jax.P(None, 'data')
    (array,) = HELPER.prefetch([np.zeros((4, 3))], mesh_axis_subset='data', rows='needed', check=False)
    assert array.sharding.spec == jax.P('data')


@pytest.mark.parametrize('size', [1, 3])
def test_no_more_is_loaded_than_asked_for(size: int) -> None:
    loaded = []

    def load() -> Iterator[Any]:
        for number in itertools.count():
            loaded.append(number)
            yield batch(number)

    with HELPER.prefetch(load(), size=size) as batches:
        for taken in range(4):
            assert eventually(lambda taken=taken: len(loaded) == taken + size)
            time.sleep(0.02)  # as long as a loader that nobody stops would need for many more
            assert len(loaded) == taken + size
            next(batches)


def test_the_loader_runs_while_the_loop_does() -> None:
    loaded = threading.Event()

    def load() -> Iterator[Any]:
        yield batch(0)
        loaded.set()
        yield batch(1)

    batches = HELPER.prefetch(load())
    next(batches)
    assert loaded.wait(20)  # nobody has asked for the second batch
    assert int(next(batches)['number']) == 1


def test_a_slow_loader_is_waited_for() -> None:
    go = threading.Event()

    def load() -> Iterator[Any]:
        for number in range(3):
            assert go.wait(20)
            yield batch(number)

    batches = HELPER.prefetch(load())
    threading.Timer(0.05, go.set).start()
    assert [int(arrays['number']) for arrays in batches] == [0, 1, 2]


def test_memory_that_the_loader_fills_again() -> None:
    memory = np.zeros(2**12, np.float32)  # large enough for JAX to share it, were it let

    def load() -> Iterator[Any]:
        for number in range(6):
            memory[:] = number
            yield memory

    for number, array in enumerate(HELPER.prefetch(load(), size=4)):
        np.testing.assert_array_equal(array, np.full(2**12, number))


def test_errors_of_the_loader_come_with_their_traceback() -> None:
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


def test_a_batch_that_does_not_fit() -> None:
    batches = HELPER.prefetch([np.zeros(8), np.zeros(6)])
    next(batches)
    with pytest.raises(DataError) as error:
        next(batches)
    assert str(error.value) == (
        "local data does not fit the mesh (data=4, tp=2), with the batch on axis 0 over mesh axes ('data', "
        "'tp'):\n  (the leaf itself): float64[6]: the global batch of 6 rows does not divide by 8 shards\n"
        'What to do: give arrays whose batch divides, or shard it over fewer axes with mesh_axis_subset.'
    )
    assert list(batches) == []


@pytest.mark.parametrize('size', [0, -1, 1.5, True])
def test_sizes_that_make_no_sense(size: Any) -> None:
    with pytest.raises(DataError) as error:
        HELPER.prefetch([], size=size)
    assert str(error.value) == f'size is how many batches are loaded ahead, at least 1, got {size!r}'


def test_what_is_no_iterable() -> None:
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


def test_closing_lets_go_of_what_is_loaded() -> None:
    closed = threading.Event()

    def load() -> Iterator[Any]:
        try:
            yield from endless()
        finally:
            closed.set()

    HELPER.prefetch(load()).close()
    assert closed.wait(20)


def test_closing_wakes_who_waits() -> None:
    go = threading.Event()

    def load() -> Iterator[Any]:
        assert go.wait(20)
        yield batch(0)

    batches = HELPER.prefetch(load())
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(next(batches, 'the end')))
    waiting.start()
    threading.Timer(0.05, go.set).start()
    batches.close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert found in (['the end'], [batch(0)]) or isinstance(found[0], dict)


def test_the_precision_of_the_consumer_is_that_of_the_thread() -> None:
    with jax.enable_x64(True):
        (array,) = HELPER.prefetch([np.zeros(8)])
    assert array.dtype == np.float64


def test_a_program_ends_with_batches_under_way() -> None:
    code = """
import itertools, numpy as np
from scalax.sharding import MeshShardingHelper
batches = MeshShardingHelper([-1], ['data']).prefetch(np.zeros(8) for _ in itertools.count())
print(next(batches).shape)
"""
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_NUM_CPU_DEVICES': '8'}
    command = [sys.executable, '-W', 'error', '-c', code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, '(8,)\n'), done.stderr
