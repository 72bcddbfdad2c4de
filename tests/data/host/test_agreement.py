"""Agreement among processes, simulated by threads; tests/data/host/test_processes.py has real processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from scalax._data.host import agreement
from scalax._data.host.agreement import agree, placed_text
from scalax.errors import DataError

COUNT = 3
WAIT = 200  # seconds, on a busy machine


class Threads:
    """Replaces `scalax._data.host.process_collectives`: the n-th thread simulates process 10 n."""

    def __init__(self):
        self.barrier, self.here, self.brought = threading.Barrier(COUNT), threading.local(), {}

    def processes_of(self, mesh):
        del mesh
        return SimpleNamespace(is_multiprocess=True, order='', indices=[10 * n for n in range(COUNT)])

    def gather_json(self, mesh, value):
        del mesh
        self.brought[self.here.number] = value
        self.barrier.wait(WAIT)
        values = [self.brought[n] for n in range(COUNT)]
        self.barrier.wait(WAIT)
        return values

    def gather(self, mesh, row):
        return np.stack(self.gather_json(mesh, row))

    def broadcast_bytes(self, mesh, position, data):
        return self.gather_json(mesh, data)[position]


def errors(monkeypatch, calls):
    """Returns the error of each process."""
    threads = Threads()
    monkeypatch.setattr(agreement, 'process_collectives', threads)

    def run(number):
        threads.here.number = number
        try:
            calls[number]()
        except (DataError, OSError) as error:
            return f'{type(error).__name__}: {error}'
        return ''

    with ThreadPoolExecutor(COUNT) as pool:
        return [*pool.map(run, range(COUNT))]


def says(*leaves, error=None):
    return lambda: agree(None, 'shard', 'batch_axis=0', leaves, 'Do it right.', error)


X = ('x', 'float32[8]')


def test_processes_that_agree(monkeypatch):
    assert errors(monkeypatch, [says(X)] * COUNT) == [''] * COUNT


def test_every_process_learns_which_one_differs(monkeypatch):
    assert errors(monkeypatch, [says(X), says(('x', 'int32[8]')), says(X)]) == COUNT * [
        'DataError: shard: the processes disagree (batch_axis=0):\n'
        '  process 10: x is int32[8], and float32[8] on process 0\n'
        'Do it right.'
    ]


def test_process_with_an_error_reports_only_the_error(monkeypatch):
    first, *others = errors(monkeypatch, [says(error=OSError('no disk')), says(X), says(('y', 'int8'))])
    assert first == 'OSError: no disk'
    assert others == 2 * [
        'DataError: shard: the processes disagree (batch_axis=0):\n'
        '  process 0: OSError: no disk\n'
        '  process 20: x is missing, and float32[8] on process 10\n'
        '  process 20: y is int8, and missing on process 10\n'
        'Do it right.'
    ]


def test_errors_on_all_processes(monkeypatch):
    calls = [says(error=OSError(f'no disk {n}')) for n in range(COUNT)]
    assert errors(monkeypatch, calls) == [f'OSError: no disk {n}' for n in range(COUNT)]


def test_placed_text():
    x = jnp.ones(2)
    texts = [
        placed_text(leaf) for leaf in (x, np.ones((2, 3), 'int8'), 1.0, int, jax.ShapeDtypeStruct((), bool))
    ]
    assert texts == ['float32[2]', 'int8[2, 3]', 'Python float', 'Python int', 'bool[]']
    x.delete()
    assert placed_text(x) == 'float32[2], deleted'
